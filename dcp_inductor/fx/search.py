"""Drive find and prove over a whole graph: every candidate site, proven or refused."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from dcp_inductor import groups
from dcp_inductor.fx.candidate import Candidate, join
from dcp_inductor.fx.collectives import Collective, as_collective
from dcp_inductor.fx.find import cuts
from dcp_inductor.fx.gathers import gather_sources, prove_gather
from dcp_inductor.fx.nodes import graph_break, size_name, source_line, tensor_val
from dcp_inductor.fx.own_rank import foreign_ranks
from dcp_inductor.fx.proof import Exit, Proof, Refuted
from dcp_inductor.fx.prove import prove_merge
from dcp_inductor.fx.region import (
    Cut,
    GraphIndex,
    Region,
    distinct_cuts,
    is_minimal,
)
from dcp_inductor.fx.site import (
    GatherExit,
    GatherSite,
    Group,
    MergeSite,
    Reject,
    site_name,
)
from dcp_inductor.fx.structure import Memo, fingerprint, site_key

_aten = torch.ops.aten
# Weights by LSE need one of these; without any, a region is not even a near miss.
_EXPONENTIALS = {
    _aten.exp.default,
    _aten.exp2.default,
    _aten.pow.Scalar,
    _aten.sigmoid.default,
    _aten._softmax.default,
    _aten.softmax.int,
    _aten.logsumexp.default,
    _aten.log1p.default,
}
# How much a refutation tells, least first.
_INFORMATIVE = (
    "no_exchange",
    "no_tokens",
    "not_runnable",
    "too_large",
    "not_equivalent",
    "layout",
    "not_finite",
    "empty_shards",
    "precision",
    "several_groups",
    "foreign_rank",
)
_SEVERAL_GROUPS = Reject(
    "several_groups", "the merge goes on in another group, and the op works in one"
)
_proofs = Memo()


def find_merges(graph: Graph, unread: Collection[Node] = ()) -> list[Candidate]:
    """Proven merges and near misses of the graph, in graph order.

    Args:
        graph: to look through.
        unread: tensors that a merge may carry along and not look at.
    """
    index = GraphIndex(graph, unread)
    claimed: set[Node] = set()
    tried: dict[str, set[Node]] = {}
    spent: Counter[Node] = Counter()
    proven: list[Candidate] = []
    missed: list[Candidate] = []
    for collective in index.collectives:
        group = _group(collective)
        if collective.node in claimed or group is None or group.world_size < 2:
            continue
        seen = tried.setdefault(group.name, set())
        candidate, trials = _merge_from(index, collective, group, seen, claimed)
        spent[collective.node] = trials
        if candidate is not None:
            candidate.trials = trials
            spent[collective.node] = 0
            (missed if candidate.site is None else proven).append(candidate)
    near: list[Candidate] = []
    for candidate in missed:
        if shared := candidate.collectives & claimed:
            spent[min(shared, key=index.order.__getitem__)] += candidate.trials
        else:
            near.append(candidate)
    found = [*proven, *join(near, index.order)]
    for candidate in found:
        # Also those from another of its collectives, which found nothing or less.
        for node in candidate.collectives:
            candidate.trials += spent.pop(node, 0)
    return sorted(found, key=lambda c: index.order[c.first_collective])


def _merge_from(
    index: GraphIndex,
    collective: Collective,
    group: Group,
    tried: set[Node],
    claimed: set[Node],
) -> tuple[Candidate | None, int]:
    """The site or near miss that the collective leads to, and the trials it took."""
    start = time.perf_counter()
    regions: list[tuple[Cut, Region]] = []
    for cut in cuts(index, collective, tried):
        region = index.region(cut.leaves, group.name)
        if region.exits() and is_minimal(index, region):
            regions.append((cut, region))
    distinct = distinct_cuts(regions)
    failed: list[tuple[Refuted, Cut, Region]] = []
    proven: tuple[MergeSite, Cut, Region] | None = None
    covered: set[Node] = set()
    trials = 0
    for weights in (False, True):
        for cut, region in distinct:
            if weights and len(cut.statistics) == 2:
                continue
            # A shifted LSE merges as well as the LSE itself, but leaves the exchange of
            # the shift behind: the cut that covers most collectives is the one to take.
            if proven and set(region.collectives) <= set(proven[2].collectives):
                continue
            outcome, cached = _prove(region, cut, group, weights)
            trials += 0 if cached else outcome.trials
            if isinstance(outcome, Proof):
                key = _key(cut, region, group)
                site = MergeSite(group, cut, region, outcome, key, region.origin())
                covers = replaced_collectives(region, [e.node for e in outcome.exits])
                if covers & claimed:
                    continue
                if proven is None or len(covers) > len(covered):
                    proven, covered = (site, cut, region), covers
                continue
            failed.append((outcome, cut, region))
        if proven:
            claimed.update(covered)
            return _candidate(*proven[:1], None, *proven[1:], group, start), trials
    if not failed:
        return None, trials
    _, cut, region = max(
        failed, key=lambda f: (_INFORMATIVE.index(f[0].code), len(f[2].nodes))
    )
    missed = _candidate(None, _SEVERAL_GROUPS, cut, region, group, start)
    if _leaves_group(region, group):
        missed.telling = (_INFORMATIVE.index("several_groups"),)
        return missed, trials
    if not any(n.target in _EXPONENTIALS for n in region.nodes):
        return None, trials
    peers: set[int] = set()
    for _, tried_region in regions:
        peers |= foreign_ranks(tried_region.nodes, group.world_size, group.rank)
    for peer in sorted(peers):
        seat = Group(group.name, group.world_size, peer)
        for other in distinct:
            outcome, cached = _prove(other[1], other[0], seat, False)
            trials += 0 if cached else outcome.trials
            if isinstance(outcome, Proof):
                reason = f"the graph reads rank {peer}'s place, which is not its own"
                refusal = Reject("foreign_rank", reason)
                missed = _candidate(None, refusal, *other, group, start)
                missed.telling = (_INFORMATIVE.index("foreign_rank"),)
                return missed, trials
    refuted, cut, region = max(failed, key=_telling)
    # No rows are a number of rows: refused for this one, on all ranks or on none.
    rows = "0" if refuted.code == "no_tokens" else ""
    reject = Reject(refuted.code, refuted.reason + _parted(region), rows)
    missed = _candidate(None, reject, cut, region, group, start)
    missed.telling = _telling((refuted, cut, region))
    # What a rank's data refute first differs from rank to rank; the widest region is
    # the same one on all of them, and names the site.
    missed.width, missed.key, widest = max(
        (len(region.collectives), _key(cut, region, group), position)
        for position, (cut, region) in enumerate(regions)
    )
    missed.origin = regions[widest][1].origin()
    missed.aliases = frozenset(
        site_name(region.origin(), _key(cut, region, group)) for cut, region in regions
    )
    return missed, trials


def _telling(failed: tuple[Refuted, Cut, Region]) -> tuple[int, ...]:
    """How much a refutation says; of two that say as much, that of the cut which
    leaves less of the merge open says more.
    """
    refuted, cut, region = failed
    return (
        _INFORMATIVE.index(refuted.code),
        refuted.nearness,
        len(region.collectives),
        -len(cut.statistics),
        len(region.nodes),
    )


def _parted(region: Region) -> str:
    """Words for a near miss that may lack what a graph break keeps from it."""
    place = graph_break(region.nodes)
    if not place:
        return ""
    return (
        f"; its graph begins behind a graph break at {place}, where what was exchanged "
        "before comes in as data (TORCH_LOGS=graph_breaks says why it is there)"
    )


def _leaves_group(region: Region, group: Group) -> bool:
    """Whether what was exchanged goes straight on to an exchange of another group."""
    for node in region.exits():
        for user in node.users:
            collective = as_collective(user)
            if collective is not None and collective.group_name != group.name:
                return True
    return False


def _candidate(
    site: MergeSite | None,
    reject: Reject | None,
    cut: Cut,
    region: Region,
    group: Group,
    start: float,
) -> Candidate:
    return Candidate(
        "combine",
        group,
        region.origin(),
        _key(cut, region, group),
        site,
        reject,
        0,
        (time.perf_counter() - start) * 1e3,
        frozenset(c.node for c in region.collectives),
        region.collectives[0].node,
    )


def _prove(
    region: Region, cut: Cut, group: Group, weights: bool
) -> tuple[Proof | Refuted, bool]:
    """The proof of a region, from memory where an equal region was proven before."""
    key = ("merge", weights, group.world_size, group.rank, fingerprint(region))
    nodes = (*region.leaves, *region.nodes)
    number = {node: i for i, node in enumerate(nodes)}

    def make() -> object:
        outcome = prove_merge(
            region, cut, group.world_size, group.rank, weights=weights
        )
        if isinstance(outcome, Refuted):
            return outcome
        exits = [(number[e.node], e.what, e.layout, e.lse_scale) for e in outcome.exits]
        return outcome.hypothesis, exits, outcome.trials

    stored, cached = _proofs.get(key, make)
    if isinstance(stored, Refuted):
        return stored, cached
    hypothesis, numbered, trials = stored
    exits = tuple(Exit(nodes[i], *rest) for i, *rest in numbered)
    return Proof(hypothesis, exits, trials), cached


def replaced_collectives(region: Region, exits: list[Node]) -> set[Node]:
    """Collectives that nothing needs any more once the exits are replaced."""
    issued = {collective.node for collective in region.collectives}
    replaced = set(exits)
    kept = [node for node in region.exits() if node not in replaced]
    needed: set[Node] = set()
    stack = list(kept)
    while stack:
        node = stack.pop()
        if node not in needed and node not in replaced:
            needed.add(node)
            stack += [
                source for source in node.all_input_nodes if source in region.exchanged
            ]
    return (region.feeding(exits) & issued) - needed


def find_gathers(graph: Graph) -> list[Candidate]:
    """Proven gathers of the graph, in graph order."""
    index = GraphIndex(graph)
    found: list[Candidate] = []
    for collective in index.collectives:
        group = _group(collective)
        if group is None or group.world_size < 2:
            continue
        for source in gather_sources(index, collective, group.world_size):
            candidate = _gather_from(index, source, collective, group)
            if candidate is not None:
                found.append(candidate)
                break
    return found


def _gather_from(
    index: GraphIndex, source: Node, collective: Collective, group: Group
) -> Candidate | None:
    start = time.perf_counter()
    region = index.region((source,), group.name)
    if not any(c.node is collective.node for c in region.collectives):
        return None
    region = region.through(collective)
    nodes = (source, *region.nodes)
    number = {node: i for i, node in enumerate(nodes)}

    def make() -> object:
        outcome = prove_gather(region, source, group.world_size, group.rank)
        if isinstance(outcome, Refuted):
            return outcome
        return [(number[e.node], e.layout) for e in outcome[0]], outcome[1]

    memo = ("gather", group.world_size, group.rank, fingerprint(region))
    stored, cached = _proofs.get(memo, make)
    if isinstance(stored, Refuted):
        return None
    exits = tuple(GatherExit(nodes[i], layout) for i, layout in stored[0])
    elapsed = (time.perf_counter() - start) * 1e3
    value = tensor_val(source)
    assert value is not None
    # Of one dim, it is the rows', which may be static on one rank only.
    width = size_name(value.shape[-1]) if value.dim() > 1 else ""
    key = site_key("gather", _variable(region), group.world_size, (width, value.dtype))
    # The call that gathers, and not what reads its result.
    origin = collective.node if source_line(collective.node) else exits[0].node
    site = GatherSite(group, source, region, exits, key, origin)
    trials = 0 if cached else stored[1]
    return Candidate(
        site.kind,
        group,
        site.origin,
        key,
        site,
        None,
        trials,
        elapsed,
        frozenset({collective.node}),
        collective.node,
    )


def _key(cut: Cut, region: Region, group: Group) -> str:
    value = tensor_val(cut.partial_output)
    assert value is not None
    return site_key(
        "combine",
        _variable(region),
        group.world_size,
        (size_name(value.shape[-1]), value.dtype),
    )


def _variable(region: Region) -> list[Node]:
    """Nodes that depend on a leaf; constants may be built otherwise on each rank."""
    found = set(region.leaves)
    for node in region.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return [node for node in region.nodes if node in found]


def _group(collective: Collective) -> Group | None:
    try:
        group = groups.resolve(collective.group_name)
    except ValueError:
        return None
    return Group(collective.group_name, group.size(), group.rank())
