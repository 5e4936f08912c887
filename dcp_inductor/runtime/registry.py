"""The workspaces of live process groups: made at first use, dropped with them."""

from __future__ import annotations

import logging
import threading
import weakref

import torch.distributed as dist

from dcp_inductor import config, groups, votes
from dcp_inductor.capability import Refusal
from dcp_inductor.runtime import (
    bootstrap,
    cuda_registry,
    fallback,
    layout,
    turns,
    ubatch,
)
from dcp_inductor.runtime.workspace import Workspace

log = logging.getLogger(__name__)

# Keyed by the object and not by its name: a group that is made again under an old name
# is another.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Workspace] | Refusal]
_groups = weakref.WeakKeyDictionary()
# One lock a group: two groups may be set up at once, in any order on each rank.
_locks: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Lock]
_locks = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def workspace_for(
    group_name: str, site: str = "", rows: int = 0
) -> Workspace | Refusal:
    """This thread's workspace of a group; its first call, by all ranks, sets it up.

    ``site`` is the place in a graph that asks, and ``rows`` how many it exchanges.

    Raises:
        DCPDisagreementError: a rank did not come because it refused the site.
        DCPTimeoutError: a rank did not come to the set-up.
        ValueError: the thread's micro-batch is beyond those that the group was set up
            with.
    """
    group = groups.resolve(group_name)
    members = _groups.get(group)
    if members is None:
        members = _set_up(group, site, rows)
    if isinstance(members, Refusal):
        return members
    again = "call dcp_inductor.recover(group) on all ranks, which sets it up anew"
    return members[ubatch.within(len(members), group_name, again)]


def num_ubatches(group_name: str) -> int:
    """Micro-batches that a group was set up for; 0 where it has no workspaces."""
    members = _groups.get(groups.resolve(group_name))
    return len(members) if isinstance(members, list) else 0


def break_off(group_name: str, why: str) -> None:
    """Put this thread's workspace of a group, if it has one, out of use.

    For a call that its peers may have finished and that this rank has not.
    """
    members = _groups.get(groups.resolve(group_name))
    if isinstance(members, list) and ubatch.current() < len(members):
        members[ubatch.current()].mark_dead(why)


def recover(group: dist.ProcessGroup | None = None) -> None:
    """Make ``group`` (default: the world) fit for exchanges; every rank must call this.

    The way back after DCPTimeoutError or DCPDisagreementError, as long as all ranks
    run. No thread may be within an exchange of the group. On CPUs the next exchange
    sets the group up as the first one did; on GPUs memory stays where it is.

    Raises:
        DCPTimeoutError: a rank did not come within ``config.timeout_s``, or has ended.
        DCPError: this process is a fork of the one that set the group up.
    """
    group = groups.or_world(group)
    members = _groups.get(group)
    workspaces = members if isinstance(members, list) else []
    for workspace in workspaces:
        workspace.refuse_fork()
    _groups.pop(group, None)
    turns.reset(group)
    for workspace in workspaces:
        workspace.mark_dead("recover() was called")

    def look() -> None:
        for workspace in workspaces[:1]:
            workspace.refuse_ended_peers("recover")

    if not cuda_registry.recover(group):
        bootstrap.meet(group, config.timeout_s, look)
    fallback.forget(group)
    votes.recovered(group)


def close(group: dist.ProcessGroup | None = None) -> None:
    """Give back the memory of ``group`` (default: the world); every rank must call it.

    To be called before the group is destroyed, where a process goes on: on GPUs nothing
    else gives the memory back, since captured graphs hold its addresses. No such graph
    may be replayed afterwards, and no thread be within an exchange of the group. A
    later exchange would set the group up anew.

    Raises:
        DCPTimeoutError: a rank did not come within ``config.timeout_s``, or has ended;
            the memory is kept.
        DCPError: this process is a fork of the one that set the group up.
    """
    group = groups.or_world(group)
    recover(group)  # a meeting: nobody is within an exchange
    cuda_registry.close(group)


def _set_up(
    group: dist.ProcessGroup, site: str, rows: int
) -> list[Workspace] | Refusal:
    with _lock:
        lock = _locks.setdefault(group, threading.Lock())
    with lock:
        members = _groups.get(group)
        if members is None:
            joined = bootstrap.join(group, config.timeout_s, site, rows)
            members = (
                joined if isinstance(joined, Refusal) else _workspaces(group, joined)
            )
            _groups[group] = members
    return members


def _workspaces(
    group: dist.ProcessGroup, joined: bootstrap.Membership
) -> list[Workspace]:
    workspaces = []
    for index in range(joined.num_ubatches):
        start = layout.control_offset(index)
        workspaces.append(
            Workspace(
                group_name=group.group_name,
                rank=group.rank(),
                controls=[
                    s.view[start : start + layout.CONTROL_BYTES]
                    for s in joined.segments
                ],
                addresses=[segment.address + start for segment in joined.segments],
                processes=joined.processes,
                owners=joined.segments,
            )
        )
    log.debug("group '%s': %d ranks share memory", group.group_name, group.size())
    return workspaces
