"""Facts about process groups; the one home of torch.distributed's private group
registry.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dcp_inductor.bounded_store import BoundedStore

_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, BoundedStore] = (
    weakref.WeakKeyDictionary()
)


def resolve(group_name: str) -> dist.ProcessGroup:
    """The group that functional collectives call ``group_name``.

    Raises:
        ValueError: no such group exists in this process.
    """
    try:
        # Newer torch gives names a type of their own.
        return c10d._resolve_process_group(cast(Any, group_name))
    except (RuntimeError, KeyError, ValueError) as error:
        raise ValueError(
            f"expected the name of a live process group, got {group_name!r}: create "
            "the group with torch.distributed before compiling or running a graph "
            "that uses it"
        ) from error


def or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group that a public function was given, or the world.

    Raises:
        ValueError: there is none, or this process is not in it.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError(
            "expected a process group, got none: call "
            "torch.distributed.init_process_group first"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "expected a process group that this process is in, as "
            f"torch.distributed.new_group returns it, got {group!r}"
        )
    return group


def size(group_name: str) -> int:
    """Number of ranks in the group."""
    return resolve(group_name).size()


def rank(group_name: str) -> int:
    """This process's rank within the group."""
    return resolve(group_name).rank()


def store(group: dist.ProcessGroup) -> BoundedStore:
    """The key-value store that the group was set up with, prefixed for it.

    Raises:
        KeyError: the group was destroyed.
    """
    store = c10d._world.pg_map[group][1]
    bounded = _stores.get(group)
    if bounded is None or not bounded.is_of(store):
        bounded = _stores[group] = BoundedStore(store)
    return bounded


def takes_cuda(group: dist.ProcessGroup) -> bool:
    """Whether the group's collectives take CUDA tensors."""
    return torch.device("cuda") in group._device_types


def seats() -> tuple[tuple[str, int, int], ...]:
    """Name, size and this process's rank of every group that it is in."""
    return tuple(
        sorted((g.group_name, g.size(), g.rank()) for g in list(c10d._world.pg_map))
    )
