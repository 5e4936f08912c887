"""Exceptions of dcp_inductor that a caller may want to catch by type."""

from __future__ import annotations

from dataclasses import dataclass


class DCPError(RuntimeError):
    """Base of every run-time error that dcp_inductor raises by a type of its own."""


@dataclass(frozen=True)
class FaultRecord:
    """What a bounded wait saw when its time ran out."""

    op: str
    site: str
    group_name: str
    rank: int
    peer: int
    epoch_wanted: int
    epoch_seen: int

    def __str__(self) -> str:
        site = f" at site {self.site}" if self.site else ""
        return (
            f"{self.op}{site}: rank {self.rank} of group '{self.group_name}' waited "
            f"for epoch {self.epoch_wanted} of rank {self.peer}, which is at epoch "
            f"{self.epoch_seen}"
        )


class DCPTimeoutError(DCPError):
    """A peer did not arrive within ``config.timeout_s``.

    ``record`` names op, site, rank, peer and both epochs. The workspace is unusable
    until every rank of the group has called :func:`dcp_inductor.recover`.
    """

    def __init__(self, record: FaultRecord, timeout_s: float) -> None:
        super().__init__(
            f"{record} after {timeout_s:g} s. Every rank of the group must make the "
            "same sequence of exchanges; a rank that died, raised, or took another "
            "branch shows up here. Call dcp_inductor.recover(group) on all ranks to go "
            "on, or raise DCP_INDUCTOR_TIMEOUT_S if the peer was only slow."
        )
        self.record = record
        self.timeout_s = timeout_s

    def __reduce__(self) -> tuple[type[DCPTimeoutError], tuple[FaultRecord, float]]:
        return type(self), (self.record, self.timeout_s)


class DCPMismatchError(DCPError):
    """Ranks of a group met in one exchange with different ops, shapes or options."""


class DCPDisagreementError(DCPError):
    """Ranks decided differently about one site of the graph, so it must not run."""
