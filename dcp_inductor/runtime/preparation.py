"""Sets groups up ahead of their first exchange, at a moment that the caller chooses."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from dcp_inductor import groups
from dcp_inductor.capability import Refusal
from dcp_inductor.runtime import cuda_registry, registry

log = logging.getLogger(__name__)


def prepare(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
) -> bool:
    """Set up the workspaces of ``group`` now and not at its first exchange.

    Every rank must call this, outside the capture of a CUDA graph; a group that is set
    up already is left as it is. It compiles and loads what is needed, and finds out
    whether the ranks can address each other's memory. Memory for the payload of an
    exchange comes with the first exchange of its kind and size, which has to run once
    outside a capture too.

    Args:
        group: default: the world.
        device: where the tensors of this rank's exchanges will be, ``cpu`` or a CUDA
            device. Default: the current CUDA device if there is one and the group
            takes CUDA tensors, otherwise the CPU.

    Returns:
        Whether exchanges go direct. If not they take the collectives, on all ranks.

    Raises:
        DCPError: within the capture of a CUDA graph, or where an exchange would raise.
        DCPTimeoutError: a rank did not come within ``config.timeout_s`` seconds.
        ValueError: there is no group, or the device is of another kind.
    """
    group = groups.or_world(group)
    where = _device(group, device)
    workspace = (
        registry.workspace_for(group.group_name)
        if where.type == "cpu"
        else cuda_registry.workspace_for(group.group_name, where)
    )
    if isinstance(workspace, Refusal):
        log.info(
            "exchanges of group '%s' on %s will use the collectives: %s",
            group.group_name, where, workspace.detail,
        )  # fmt: skip
        return False
    workspace.check()
    return True


def _device(
    group: dist.ProcessGroup, device: torch.device | str | int | None
) -> torch.device:
    available = torch.cuda.is_available()
    if device is None:
        device = "cuda" if available and groups.takes_cuda(group) else "cpu"
    where = torch.device(device)
    if where.type != "cpu" and not (where.type == "cuda" and available):
        raise ValueError(
            "expected device 'cpu' or a CUDA device that this process has, got "
            f"'{where}'"
        )
    if str(where) == "cuda":
        where = torch.device("cuda", torch.cuda.current_device())
    return where
