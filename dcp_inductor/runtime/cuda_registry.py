"""The symmetric memory of live process groups: made at first use, closed by request.

Whether a group has any is decided once and alike on all ranks: if one rank cannot, none
does, and the reason names that rank.
"""

from __future__ import annotations

import logging
import threading
import weakref

import torch
import torch.distributed as dist

from dcp_inductor import config, groups
from dcp_inductor.capability import Refusal
from dcp_inductor.runtime import (
    bootstrap,
    cuda_layout,
    cuda_library,
    cuda_workspace,
    process,
    rendezvous,
    symm_mem,
    ubatch,
)
from dcp_inductor.runtime.cuda_launch_ops import PROTOCOL
from dcp_inductor.runtime.cuda_workspace import GroupMemory, Workspace

log = logging.getLogger(__name__)

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupMemory | Refusal]
_groups = weakref.WeakKeyDictionary()
# Captured graphs and peers hold addresses: memory outlives its group unless closed.
_held: list[GroupMemory] = []
# One lock a group: two groups may be set up at once, in any order on each rank.
_locks: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Lock]
_locks = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def workspace_for(group_name: str, device: torch.device) -> Workspace | Refusal:
    """This thread's workspace of a group; its first call, by all ranks, sets it up.

    Raises:
        DCPError: the set-up would fall inside the capture of a CUDA graph.
        DCPTimeoutError: a rank did not come to the set-up.
        ValueError: the tensor or the thread's micro-batch does not fit the set-up.
    """
    group = groups.resolve(group_name)
    memory = _groups.get(group)
    if memory is None:
        memory = _set_up(group, device)
    if isinstance(memory, Refusal):
        return memory
    if device != memory.device:
        raise ValueError(
            f"expected tensors on {memory.device}, where group '{group_name}' was set "
            f"up, got {device}"
        )
    held = len(memory.workspaces)
    index = ubatch.within(held, group_name, "exchange over a new group")
    return memory.workspaces[index]


def check(group: dist.ProcessGroup | None = None) -> None:
    """Raise what exchanges of ``group`` (default: of all groups) reported; see
    :meth:`Workspace.check`. Call it behind ``torch.cuda.synchronize()``: replayed
    graphs touch no host code that would notice.

    Raises:
        ValueError: ``group`` is no process group.
    """
    if group is not None:
        group = groups.or_world(group)
    memories = [_groups.get(group)] if group is not None else list(_groups.values())
    for memory in memories:
        if isinstance(memory, GroupMemory):
            for workspace in memory.workspaces:
                workspace.check()


def recover(group: dist.ProcessGroup) -> bool:
    """Arm the group's memory anew, in place: captured graphs stay valid.

    Every rank must call this, with no exchange of the group under way. False: the group
    has no symmetric memory; why not is found out again by its next exchange.

    Raises:
        DCPTimeoutError: a rank did not come within ``config.timeout_s``.
    """
    memory = _groups.get(group)
    if not isinstance(memory, GroupMemory):
        _groups.pop(group, None)
        return False
    memory.recover()
    return True


def close(group: dist.ProcessGroup) -> None:
    """Give the group's memory back; every rank must call this.

    No captured graph with exchanges of the group may be replayed afterwards.
    """
    memory = _groups.pop(group, None)
    if not isinstance(memory, GroupMemory):
        return
    memory.recover()  # a rendezvous: all ranks are done with the memory
    for workspace in memory.workspaces:
        workspace.plans.clear()  # which may hold views of the memory
        for buffer in (*workspace.arenas.values(), workspace.control):
            buffer.close()
    _held.remove(memory)


def num_ubatches(group_name: str) -> int:
    """Micro-batches that a group was set up for; 0 where it has no memory."""
    memory = _groups.get(groups.resolve(group_name))
    return len(memory.workspaces) if isinstance(memory, GroupMemory) else 0


def memory_bytes(group: dist.ProcessGroup) -> int:
    """Bytes of symmetric memory that this rank holds for ``group``."""
    memory = _groups.get(group)
    return memory.nbytes if isinstance(memory, GroupMemory) else 0


def site_bytes(group_name: str, site: str) -> int:
    """Bytes of the payload memory that this rank's exchanges of a site go through.

    Sites of like geometry share memory, so sites do not add up to the group's bytes.
    """
    memory = _groups.get(groups.resolve(group_name))
    return memory.site_bytes(site) if isinstance(memory, GroupMemory) else 0


def _set_up(group: dist.ProcessGroup, device: torch.device) -> GroupMemory | Refusal:
    with _lock:
        lock = _locks.setdefault(group, threading.Lock())
    with lock:
        memory = _groups.get(group)
        if memory is None:
            cuda_workspace.refuse_capture(group.group_name)
            memory = _join(group, device)
            _groups[group] = memory
            if isinstance(memory, GroupMemory):
                _held.append(memory)
                log.debug("group '%s': symmetric memory", group.group_name)
    return memory


def _join(group: dist.ProcessGroup, device: torch.device) -> GroupMemory | Refusal:
    if group.size() > cuda_layout.MAX_RANKS:
        return Refusal(
            "ranks", f"{group.size()} ranks are more than {cuda_layout.MAX_RANKS}"
        )
    if "fake" in dist.get_backend(group):
        return Refusal("fake_group", "the group's backend does not communicate")
    try:
        memory = GroupMemory(group, device, config.num_ubatches)
    except KeyError:
        return Refusal("no_store", "the group has no store to meet at")
    try:
        # Looked up before the rendezvous, so that a build does not count as waiting.
        facts = symm_mem.facts(device)
        problem = cuda_library.load(facts["capability"])
        session = memory.session()
        said = session.exchange(
            {
                **process.current().as_dict(),
                **facts,
                "protocol": PROTOCOL,
                "num_ubatches": config.num_ubatches,
                "max_tokens": config.max_tokens,
                "multicast": config.multicast,
                "marked_bytes": config.marked_bytes,
                "packet_bytes": config.packet_bytes,
                "refusal": ["build", problem] if problem else None,
            }
        )
        refusal = bootstrap.decide(said) or _differing_settings(said)
        memory.hidden_peers = symm_mem.hides_peers(said)
        return refusal or memory.create_controls(session) or memory
    except rendezvous.PeersMissingError as error:
        raise memory.missing(error, "symmetric memory", "") from error


def _differing_settings(said: list[dict[str, str]]) -> Refusal | None:
    for key in (
        "max_tokens", "multicast", "marked_bytes", "packet_bytes", "symmetric_memory",
    ):  # fmt: skip
        for rank, facts in enumerate(said):
            if facts[key] != said[0][key]:
                return Refusal(
                    "config",
                    f"rank {rank} has {key} {facts[key]}, rank 0 has {said[0][key]}",
                )
    return None
