"""Sets up the shared memory of a group, or finds out that some rank cannot; by vote.

Three rounds over the group's store: facts about the ranks, the names of their control
segments, and whether everybody has mapped everything. After each, all ranks look at the
same words and decide alike: if one rank cannot, none does, and the reason names that
rank.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from dcp_inductor import config, extension, groups, launch_ops, votes
from dcp_inductor.bounded_store import BoundedStore
from dcp_inductor.capability import Refusal
from dcp_inductor.errors import DCPTimeoutError, FaultRecord
from dcp_inductor.runtime import layout, process, rendezvous, shm


@dataclass(frozen=True)
class Membership:
    """The control segments of all ranks, mapped here, and the ranks' processes."""

    segments: list[shm.Segment]
    processes: list[process.Process]
    num_ubatches: int


def join(
    group: dist.ProcessGroup,
    timeout_s: float,
    site: str = "",
    rows: int = 0,
) -> Membership | Refusal:
    """Map the control segments of all ranks; every rank of the group must call this.

    Raises:
        DCPDisagreementError: a rank refused ``site`` or has left, so it will not come.
        DCPTimeoutError: a rank did not come to the rendezvous.
    """
    if group.size() > layout.MAX_RANKS:
        return Refusal(
            "ranks", f"{group.size()} ranks are more than {layout.MAX_RANKS}"
        )
    store = meeting_place(group)
    if isinstance(store, Refusal):
        return store
    # Looked up before the rendezvous, so that a build does not count as waiting.
    own = _local_refusal()

    def look() -> None:
        votes.check_waiting(group.group_name, site, rows)

    with in_time(group, timeout_s, "set-up", site):
        session = rendezvous.Session(
            store, group.rank(), group.size(), timeout_s, while_waiting=look
        )
        return _vote(session, group.rank(), own)


def meet(
    group: dist.ProcessGroup, timeout_s: float, look: Callable[[], object]
) -> None:
    """Wait until every rank of the group has called this, where the ranks can meet.

    Ranks that have left are waited for, since they come back; and those are not met
    that have not noticed yet that the others recover. ``look`` may end the wait.

    Raises:
        DCPTimeoutError: a rank did not come.
    """
    store = meeting_place(group)
    if isinstance(store, Refusal):
        return
    store = store.within("dcp_inductor_recovery")
    with in_time(group, timeout_s, "recover"):
        look()
        rendezvous.Session(
            store, group.rank(), group.size(), timeout_s, while_waiting=look
        )


def meeting_place(group: dist.ProcessGroup) -> BoundedStore | Refusal:
    """The store at which the ranks of a group can meet, or why there is none."""
    if "fake" in dist.get_backend(group):
        return Refusal("fake_group", "the group's backend does not communicate")
    try:
        return groups.store(group)
    except KeyError:
        return Refusal("no_store", "the group has no store to meet at")


@contextlib.contextmanager
def in_time(
    group: dist.ProcessGroup, timeout_s: float, op: str, site: str = ""
) -> Iterator[None]:
    """Raise DCPTimeoutError where ranks are missing at a rendezvous in the body."""
    try:
        yield
    except rendezvous.PeersMissingError as error:
        record = FaultRecord(
            op=op, site=site, group_name=group.group_name, rank=group.rank(),
            peer=error.ranks[0], epoch_wanted=0, epoch_seen=0,
        )  # fmt: skip
        raise DCPTimeoutError(record, timeout_s) from error


def _local_refusal() -> Refusal | None:
    if sys.platform != "linux":
        return Refusal("platform", f"expected Linux, got {sys.platform}")
    reason = extension.load_extension()
    return Refusal("build", reason) if reason else None


def decide(facts: list[dict[str, Any]]) -> Refusal | None:
    """Why ranks with these ``facts`` cannot share memory, or None; equal on all."""
    for rank, fact in enumerate(facts):
        if fact["refusal"]:
            code, detail = fact["refusal"]
            return Refusal(code, f"rank {rank}: {detail}")
    for key, code, remedy in (
        ("hostname", "hosts", "shared memory needs all ranks on one host"),
        ("boot_id", "hosts", "shared memory needs all ranks on one host"),
        ("uid", "users", "shared memory needs all ranks to run as one user"),
        ("protocol", "versions", "install one version of dcp_inductor on all ranks"),
        ("num_ubatches", "config", "set DCP_INDUCTOR_NUM_UBATCHES alike on all ranks"),
        ("max_tokens", "config", "set DCP_INDUCTOR_MAX_TOKENS alike on all ranks"),
    ):
        for rank, fact in enumerate(facts):
            if fact.get(key) != facts[0].get(key):  # other versions say less
                return Refusal(
                    code,
                    f"rank {rank} has {key} {fact.get(key)}, rank 0 has "
                    f"{facts[0].get(key)}; {remedy}",
                )
    return None


def _first_refusal(answers: list[dict[str, Any]]) -> Refusal | None:
    for rank, answer in enumerate(answers):
        if answer["refusal"]:
            return Refusal("allocation", f"rank {rank}: {answer['refusal']}")
    return None


def _vote(
    session: rendezvous.Session, rank: int, own: Refusal | None
) -> Membership | Refusal:
    num_ubatches = config.num_ubatches
    facts = session.exchange(
        {
            **process.current().as_dict(),
            "protocol": launch_ops.PROTOCOL,
            "num_ubatches": num_ubatches,
            "max_tokens": config.max_tokens,
            "refusal": [own.code, own.detail] if own else None,
        }
    )
    refusal = decide(facts)
    if refusal:
        return refusal
    size = layout.control_segment_bytes(num_ubatches)
    tag = secrets.randbits(64)
    mine = None
    try:
        try:
            shm.sweep()
            mine = shm.create(size)
            layout.write_u64(mine.view, layout.TAG, tag)
            offer = {"name": mine.name, "tag": tag, "refusal": ""}
        except OSError as error:
            offer = {
                "name": "",
                "tag": 0,
                "refusal": f"cannot create shared memory: {error}",
            }
        offers = session.exchange(offer)
        refusal = _first_refusal(offers)
        if refusal or mine is None:
            return refusal or Refusal("allocation", "no control segment")
        segments, problem = _attach_all(mine, rank, offers, size)
        refusal = _first_refusal(session.exchange({"refusal": problem}))
        if refusal:
            return refusal
    finally:
        if mine is not None:
            mine.unlink()
    fields = process.Process.__dataclass_fields__
    processes = [
        process.Process(**{name: fact[name] for name in fields}) for fact in facts
    ]
    return Membership(segments, processes, num_ubatches)


def _attach_all(
    mine: shm.Segment, rank: int, offers: list[dict[str, Any]], size: int
) -> tuple[list[shm.Segment], str]:
    segments: list[shm.Segment] = []
    for peer, offer in enumerate(offers):
        try:
            segment = mine if peer == rank else shm.attach(offer["name"], size)
        except OSError as error:
            return segments, f"cannot map the segment of rank {peer}: {error}"
        # Read back through the mapping before anything depends on it.
        if layout.read_u64(segment.view, layout.TAG) != offer["tag"]:
            return segments, f"the segment of rank {peer} does not hold its tag"
        segments.append(segment)
    return segments, ""
