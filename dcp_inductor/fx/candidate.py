"""Candidates of a search, and how near misses that share an exchange become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from dcp_inductor.fx.site import GatherSite, Group, MergeSite, Reject, site_name


@dataclass
class Candidate:
    """A site, or the reason why what looked like one is none."""

    kind: str
    group: Group
    origin: Node
    key: str
    site: MergeSite | GatherSite | None
    reject: Reject | None
    trials: int
    proof_ms: float
    collectives: frozenset[Node]
    first_collective: Node
    # Names of the same place under every cut that was tried: a peer may have taken
    # another.
    aliases: frozenset[str] = frozenset()
    # Of a near miss: how much its refutation says.
    telling: tuple[int, ...] = ()
    # Most collectives of a cut that was tried, where that one names the near miss.
    width: int = 0

    @property
    def name(self) -> str:
        return site_name(self.origin, self.key)


def join(missed: Sequence[Candidate], order: Mapping[Node, int]) -> list[Candidate]:
    """One near miss for those that share a collective."""
    joined: list[Candidate] = []
    for candidate in missed:
        for other in [c for c in joined if c.collectives & candidate.collectives]:
            joined.remove(other)
            candidate = _one_of(other, candidate, order)
        joined.append(candidate)
    return joined


def _one_of(one: Candidate, other: Candidate, order: Mapping[Node, int]) -> Candidate:
    """The near miss that two are. What it says is the more telling of both."""
    told = max(one, other, key=lambda c: c.telling)
    # The widest region is the same one on all ranks, whatever their data refute first.
    named = max(one, other, key=lambda c: (c.width, c.key)) if told.width else told
    return replace(
        told,
        origin=named.origin,
        key=named.key,
        width=named.width,
        trials=one.trials + other.trials,
        proof_ms=one.proof_ms + other.proof_ms,
        collectives=one.collectives | other.collectives,
        first_collective=min(
            one.first_collective, other.first_collective, key=order.__getitem__
        ),
        aliases=one.aliases | other.aliases | {one.name, other.name},
    )
