"""What the pass saw and decided, as data: one GraphReport per compiled graph.

``collect()`` hands the reports of the graphs compiled inside it to the caller; it is
how ``explain`` and the demo learn what happened. Nothing is kept when nobody collects.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class SiteReport:
    """One candidate exchange of one graph."""

    site: str  # stable name, equal on all ranks
    kind: str  # "combine", "query_gather" or "kv_gather"
    group_name: str
    world_size: int
    source: str  # user's source line, "file:line code", "" if unknown
    family: str  # what was found, e.g. "all_gather + reduce_scatter, base e"
    trials: int  # lockstep runs that the proof took; 0 when it came from the cache
    proof_ms: float
    decision: str  # "rewritten" or "rejected"
    code: str  # reason code, "" when rewritten
    reason: str  # one sentence
    op: str  # graph op that stands there now, "" when rejected
    result: str  # e.g. "heads", "tokens", "none", with the LSE if it is an output too
    workspace_bytes: int  # shared memory of one rank for this site's geometry


@dataclass
class GraphReport:
    """All candidate exchanges of one graph, in graph order."""

    sites: list[SiteReport] = field(default_factory=list)
    pass_ms: float = 0.0
    num_nodes: int = 0

    @property
    def found(self) -> int:
        return len(self.sites)

    @property
    def rewritten(self) -> int:
        return sum(site.decision == "rewritten" for site in self.sites)


_collectors: contextvars.ContextVar[tuple[list[GraphReport], ...]] = (
    contextvars.ContextVar("dcp_inductor_reports", default=())
)


@contextlib.contextmanager
def collect() -> Iterator[list[GraphReport]]:
    """Yield a list that receives the report of every graph compiled inside."""
    reports: list[GraphReport] = []
    token = _collectors.set((*_collectors.get(), reports))
    try:
        yield reports
    finally:
        _collectors.reset(token)


def collecting() -> bool:
    """Whether anybody collects; a graph from a cache would come without a report."""
    return bool(_collectors.get())


def publish(report: GraphReport) -> None:
    """Hand a report to everybody who collects."""
    for reports in _collectors.get():
        reports.append(report)
