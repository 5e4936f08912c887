"""Exceptions of dcp_inductor that a caller may want to catch by type."""

from __future__ import annotations

from dataclasses import dataclass

# How a group goes on whose workspaces are out of use.
WAY_ON = (
    "To go on: if every rank of the group still runs, call dcp_inductor.recover(group) "
    "on all of them. If one has ended, make a new group of the others, "
    "torch.distributed.new_group(ranks, use_local_synchronization=True), or, if the "
    "ended one held the store (rank 0, mostly), destroy_process_group() and "
    "init_process_group(...) at another address; and compile the model for that group"
)


def with_way_on(why: str) -> str:
    """``why`` a group is out of use, and the way on, which it may name already."""
    return why if WAY_ON in why else f"{why}. {WAY_ON}"


class DCPError(RuntimeError):
    """Base of every run-time error that dcp_inductor raises by a type of its own."""


@dataclass(frozen=True)
class FaultRecord:
    """What a bounded wait saw when its time ran out; epoch 0 is ahead of all calls."""

    op: str
    site: str
    group_name: str
    rank: int
    peer: int
    epoch_wanted: int
    epoch_seen: int

    def __str__(self) -> str:
        site = f" at site {self.site}" if self.site else ""
        who = f"{self.op}{site}: rank {self.rank} of group '{self.group_name}' waited "
        if not self.epoch_wanted:  # a meeting ahead of all exchanges
            return f"{who}for rank {self.peer}, which did not come"
        return (
            f"{who}for epoch {self.epoch_wanted} of rank {self.peer}, which is at "
            f"epoch {self.epoch_seen}"
        )


class DCPTimeoutError(DCPError):
    """A peer did not arrive within ``config.timeout_s``.

    ``record`` names op, site, rank, peer and both epochs. The workspace is unusable
    until every rank of the group has called :func:`dcp_inductor.recover`. Where a rank
    has ended there is no way back, and the others need a new group.
    """

    def __init__(self, record: FaultRecord, timeout_s: float) -> None:
        super().__init__(
            f"{record} after {timeout_s:g} s. Every rank of the group must make the "
            "same sequence of exchanges; a rank that died, raised, or took another "
            "branch shows up here, and one that was only slow (raise "
            f"DCP_INDUCTOR_TIMEOUT_S). {WAY_ON}"
        )
        self.record = record
        self.timeout_s = timeout_s

    def __reduce__(self) -> tuple[type[DCPTimeoutError], tuple[FaultRecord, float]]:
        return type(self), (self.record, self.timeout_s)


class DCPMismatchError(DCPError):
    """Ranks of a group met in one exchange with different ops, shapes or options."""


class DCPDisagreementError(DCPError):
    """Ranks decided differently about one site of the graph, so it must not run."""
