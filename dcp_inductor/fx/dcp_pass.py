"""The pass: find -> prove -> judge -> rewrite -> order -> check, with one report per
graph.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from dcp_inductor import config, groups, ops, votes
from dcp_inductor.errors import DCPError
from dcp_inductor.fx import report
from dcp_inductor.fx.candidate import Candidate
from dcp_inductor.fx.chain import InferenceAwarePass
from dcp_inductor.fx.check import check_rewrite
from dcp_inductor.fx.collectives import issues_exchange, split_coalesced_gathers
from dcp_inductor.fx.emit import CannotExpress, Emitter
from dcp_inductor.fx.leaves import put_back, take_apart
from dcp_inductor.fx.legality import SWITCHES, forced, judge
from dcp_inductor.fx.nodes import location
from dcp_inductor.fx.order import insert_guard, thread_token
from dcp_inductor.fx.query_view import place_views, query_gather_of
from dcp_inductor.fx.rewrite import rewrite_gather, rewrite_merge
from dcp_inductor.fx.search import find_gathers, find_merges, replaced_collectives
from dcp_inductor.fx.site import GatherSite, MergeSite, Reject
from dcp_inductor.fx.summary import describe, tell_view

log = logging.getLogger(__name__)

_AUTOGRAD = Reject(
    "autograd", "the graph is part of training; the direct ops have no gradient"
)


class DcpPass(InferenceAwarePass):
    """Rewrite the exchanges of decode context parallelism in a post-AOT, decomposed
    graph.

    Works on any such graph by itself (``DcpPass()(graph)``); the backend installs it as
    Inductor's ``post_grad_custom_pre_pass``. No communication happens here.

    Args:
        config_overrides: knobs that beat ``dcp_inductor.config`` while this pass runs.
        places: where the graph's code is, :func:`places_of` it. A site's name holds its
            line, so a graph cached before an edit that moved it is another graph.
    """

    def __init__(
        self, config_overrides: Mapping[str, Any] | None = None, places: str = ""
    ) -> None:
        self.config_overrides = dict(config_overrides or {})
        self.places = places
        for name, value in self.config_overrides.items():
            getattr(config, name)  # names the near ones if there is no such knob
            config.check(name, value)

    def __call__(self, graph: Graph, is_inference: bool = True) -> None:
        if not any(issues_exchange(node) for node in graph.nodes):
            report.publish(report.GraphReport(num_nodes=len(graph.nodes)))
            return
        with config.patch(self.config_overrides):
            if config.enable:
                votes.reconsider()  # where no backend of ours does, as in vLLM
                with _disable_current_modes(), torch.no_grad(), _one_thread():
                    self._run(graph, is_inference)

    def uuid(self) -> Any:
        """Identity for the FX graph cache: source, versions, knobs and places."""
        with config.patch(self.config_overrides):
            # Ranks may share a cache, and a graph may read differently on each of them.
            seats = groups.seats()
            knobs = config.get_hash()
            return (_source_hash(), torch.__version__, knobs, seats, self.places)

    def _run(self, graph: Graph, is_inference: bool) -> None:
        start = time.perf_counter()
        summary = report.GraphReport(num_nodes=len(graph.nodes))
        run = _Run(graph, is_inference, summary)
        assemblies = take_apart(graph)
        unread = {node for assembly in assemblies for node in assembly.unread}
        run.stage(find_merges(graph, unread))
        put_back(graph, assemblies)
        if is_inference:
            split_coalesced_gathers(graph)
        run.stage(find_gathers(graph))
        run.finish()
        summary.pass_ms = (time.perf_counter() - start) * 1e3
        report.publish(summary)
        if summary.sites:
            log.info(
                "rewrote %d/%d DCP sites in %.1f ms%s",
                summary.rewritten,
                summary.found,
                summary.pass_ms,
                _reasons(summary),
            )


def places_of(gm: GraphModule) -> str:
    """A digest of the files (without folders) and lines that led to the nodes of a
    graph from Dynamo; "" where none of them communicates.
    """
    graphs = [m.graph for m in gm.modules() if isinstance(m, GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    if not any("c10d" in str(node.target) for node in nodes):
        return ""
    lines = dict.fromkeys(os.path.basename(location(node)) for node in nodes)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Trials are many tiny ops; a thread pool costs them more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Run:
    """One graph on its way through the pass."""

    def __init__(
        self, graph: Graph, is_inference: bool, summary: report.GraphReport
    ) -> None:
        self._graph = graph
        self._is_inference = is_inference
        self._summary = summary
        self._groups: dict[str, Node] = {}  # the first token of each rewritten group
        self._replaced: list[Node] = []
        self._moved: dict[Node, Node] = {}
        self._guarded: set[tuple[str, str]] = set()
        self._query_gathers: dict[Node, report.SiteReport] = {}

    def stage(self, candidates: list[Candidate]) -> None:
        """Judge and rewrite candidates that were found on one state of the graph."""
        self._moved = {}
        for candidate in candidates:
            self._decide(candidate)
        if self._replaced:
            stable_topological_sort(self._graph)

    def _decide(self, candidate: Candidate) -> None:
        site = candidate.site
        reject = candidate.reject
        if not self._is_inference:
            reject = _AUTOGRAD
        if reject is None and site is not None:
            site.rename(self._moved)
            reject = judge(self._graph, site) or self._rewrite(site)
        if candidate.kind == "combine" or (reject is not None and reject.rows):
            self._vote(candidate, reject)
        if reject is not None and forced(candidate.kind):
            raise DCPError(
                f"{candidate.name}: {SWITCHES[candidate.kind]} is 'force', but the "
                f"site cannot be rewritten ({reject.code}): {reject.reason}. Change "
                f"the model, or set "
                f"{SWITCHES[candidate.kind]} to 'auto' to keep its collectives"
            )
        row = describe(candidate, reject)
        self._summary.sites.append(row)
        if reject is None and isinstance(site, GatherSite):
            self._query_gathers[self._moved[site.exits[0].node]] = row
        counters["dcp_inductor"]["found"] += 1
        if reject is None:
            counters["dcp_inductor"]["rewritten"] += 1
        else:
            counters["dcp_inductor"][f"rejected.{reject.code}"] += 1
        log.debug(
            "%s %s at %s, site %s: %s%s",
            row.decision,
            row.kind,
            row.source or "an unknown place",
            row.site,
            row.family,
            f" ({row.code}: {row.reason})" if row.code else "",
        )

    def _vote(self, candidate: Candidate, reject: Reject | None) -> None:
        """Tell the peers what this rank decided; where they may have decided otherwise,
        look.
        """
        group = candidate.group
        vote = reject.reason if reject else votes.ACCEPTED
        rows = reject.rows if reject else ""
        for name in sorted({candidate.name, *candidate.aliases}):
            votes.post(group.name, votes.of_rows(name, rows) if rows else name, vote)
        if reject is not None and (rows or reject.code == "foreign_rank"):
            name = votes.of_rows(candidate.name, rows) if rows else candidate.name
            # Equal layers share a name, and one look at the peers serves them all.
            if (group.name, name) not in self._guarded:
                self._guarded.add((group.name, name))
                insert_guard(
                    self._graph, candidate.first_collective, name, reject.reason
                )

    def _rewrite(self, site: Any) -> Reject | None:
        token = self._first_token(site)
        exits = [
            e.node
            for e in (site.proof.exits if isinstance(site, MergeSite) else site.exits)
        ]
        replaced = replaced_collectives(site.region, exits)
        try:
            if isinstance(site, MergeSite):
                replacements = rewrite_merge(self._graph, site, token)
            else:
                replacements = rewrite_gather(self._graph, site, token)
        except CannotExpress as error:
            return Reject("symbolic_shape", str(error))
        self._moved.update(replacements)
        self._replaced += replaced
        return None

    def _first_token(self, site: Any) -> Node:
        token = self._groups.get(site.group.name)
        if token is None:
            first = next(node for node in self._graph.nodes if node.op != "placeholder")
            with self._graph.inserting_before(first):
                token = Emitter(self._graph, site.origin).call(
                    torch.ops.aten.empty.memory_format,
                    [0],
                    dtype=torch.uint8,
                    device=site.origin.meta["val"].device,
                )
            self._groups[site.group.name] = token
        return token

    def finish(self) -> None:
        """Tie the exchanges of each group together and check the graph."""
        for group_name, token in self._groups.items():
            if not token.users:
                self._graph.erase_node(token)
                continue
            thread_token(self._graph, group_name)
            stable_topological_sort(self._graph)
        reasons = place_views(self._graph)
        for result, row in self._query_gathers.items():
            gather = query_gather_of(result)
            if gather in reasons:
                tell_view(row, reasons[gather], gather.meta["val"][0].device.type)
        if self._replaced:
            check_rewrite(self._graph, self._replaced)


def _reasons(summary: report.GraphReport) -> str:
    codes: dict[str, int] = {}
    for site in summary.sites:
        if site.code:
            codes[site.code] = codes.get(site.code, 0) + 1
    return (
        f" ({', '.join(f'{code}={n}' for code, n in codes.items())})" if codes else ""
    )


_SOURCE_HASH: str | None = None


def _source_hash() -> str:
    global _SOURCE_HASH
    if _SOURCE_HASH is None:
        digest = hashlib.sha256()
        for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        digest.update(pathlib.Path(ops.__file__).read_bytes())
        _SOURCE_HASH = digest.hexdigest()
    return _SOURCE_HASH
