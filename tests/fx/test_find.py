"""The search for cuts and regions: what it reaches, and where it stops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from dcp_inductor.fx.axes import statistic_axes
from dcp_inductor.fx.find import cuts
from dcp_inductor.fx.region import GraphIndex, is_minimal
from dcp_inductor.fx.search import find_gathers, find_merges, replaced_collectives
from tests.formulations import family_a, family_b
from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.formulations.fabric import fake_rank
from tests.fx.sketch import HEADS_PER_RANK, Model, partials, passed, sketch, traced


def graph_of(fn: Model, tensors) -> fx.Graph:
    return traced(fn, tensors).graph_module().graph


def all_cuts(graph: fx.Graph) -> list:
    index = GraphIndex(graph)
    tried: set[fx.Node] = set()
    return [cut for c in index.collectives for cut in cuts(index, c, tried)]


def test_cut_of_the_inputs_is_proposed() -> None:
    graph = graph_of(family_a.merge, partials(2)[1])
    lse, output = [n for n in graph.nodes if n.op == "placeholder"]
    found = [(cut.partial_output, cut.statistics) for cut in all_cuts(graph)]
    assert (output, (lse,)) in found
    assert len(found) == len(set(found))


def test_statistics_have_the_rows_of_the_output() -> None:
    for cut in all_cuts(graph_of(family_a.merge, partials(2)[1])):
        shape = cut.partial_output.meta["val"].shape
        assert 1 <= len(cut.statistics) <= 2
        for node in cut.statistics:
            # One number for each row, whichever dim holds the features.
            assert shape.numel() // node.meta["val"].numel() in shape


def test_cut_does_not_reach_through_a_matrix_product() -> None:
    """The LSE comes out of a projection: that is where attention begins."""

    def model(ctx: Context, output: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return family_a.merge(ctx, output, x @ w)

    tensors = [partials(2)[1][0], torch.randn(3, 6), torch.randn(6, 4)]
    graph = graph_of(model, tensors)
    (product,) = [n for n in graph.nodes if "mm" in str(n.target)]
    merges = passed(model, tensors)
    assert merges.calls() == ["a2a_lse_reduce"]
    for cut in all_cuts(graph):
        assert all(node.op != "placeholder" for node in cut.statistics)
    assert any(cut.statistics == (product,) for cut in all_cuts(graph))


def test_region_stops_at_what_else_enters() -> None:
    def model(ctx: Context, output: Tensor, lse: Tensor, other: Tensor) -> Tensor:
        return (family_a.merge(ctx, output, lse) + other) * 2

    tensors = [*partials(2)[1], torch.zeros(3, HEADS_PER_RANK, 8)]
    graph = graph_of(model, tensors)
    index = GraphIndex(graph)
    group = index.collectives[0].group_name
    output, lse = (
        sorted(
            (n for n in graph.nodes if n.op == "placeholder"),
            key=lambda n: -n.meta["val"].numel(),
        )[0],
        None,
    )
    for cut in all_cuts(graph):
        placeholders = [node.op for node in cut.statistics] == ["placeholder"]
        if cut.partial_output is output and placeholders:
            lse = cut.statistics[0]
            region = index.region(cut.leaves, group)
            assert is_minimal(index, region)
            (exit_node,) = region.exits()
            assert "wait_tensor" in str(exit_node.target)
            assert [c.kind for c in region.collectives] == [
                "all_gather",
                "reduce_scatter",
            ]
    assert lse is not None


def test_cut_inside_another_region_is_not_minimal() -> None:
    graph = graph_of(family_a.merge, partials(2)[1])
    index = GraphIndex(graph)
    group = index.collectives[0].group_name
    leaves = tuple(n for n in graph.nodes if n.op == "placeholder")
    (weighted,) = [n for n in graph.nodes if "mul" in str(n.target)]
    assert is_minimal(index, index.region(leaves, group))
    assert not is_minimal(index, index.region((*leaves, weighted), group))


def test_searching_leaves_the_graph_as_it_is() -> None:
    graph = graph_of(family_b.tree, partials(2)[1])
    before = sketch(graph)
    with fake_rank(1, 2, HEADS_PER_RANK):
        merges, gathers = find_merges(graph), find_gathers(graph)
    assert [c.kind for c in merges] == ["combine"]
    assert gathers == []
    assert sketch(graph) == before


def test_collectives_that_a_merge_stands_for() -> None:
    """All of them, unless something else needs what they deliver."""

    def shared(ctx: Context, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        lses = sp.stack_view(ctx, lse)
        weight = torch.softmax(lses, 0)[ctx.rank]
        return sp.rs(ctx, output * weight[..., None]), lses.std(0)

    for fn, kinds in (
        (family_a.merge, {"all_gather", "reduce_scatter"}),
        (shared, {"reduce_scatter"}),
    ):
        graph = graph_of(fn, partials(2)[1])
        with fake_rank(1, 2, HEADS_PER_RANK):
            (candidate,) = find_merges(graph)
        assert candidate.site is not None
        exits = [e.node for e in candidate.site.proof.exits]
        gone = replaced_collectives(candidate.site.region, exits)
        stems = {str(n.target) for n in gone}
        assert len(gone) == len(kinds)
        assert all(any(kind in stem for stem in stems) for kind in kinds)


def test_two_merges_are_two_sites_in_graph_order() -> None:
    def model(ctx: Context, o: Tensor, lse: Tensor, o2: Tensor, l2: Tensor) -> tuple:
        return family_a.merge(ctx, o, lse), family_a.merge(ctx, o2, l2)

    after = passed(model, [*partials(2)[1], *partials(2, seed=1)[1]])
    assert after.calls() == ["a2a_lse_reduce"] * 2
    assert [site.kind for site in after.sites] == ["combine"] * 2


@pytest.mark.parametrize(
    ("statistic", "shape", "ways"),
    [
        (("3", "4"), ("3", "4", "8"), [(2, (0, 1))]),
        (("4", "3"), ("3", "4", "8"), [(2, (1, 0))]),
        (("3", "4", "1"), ("3", "4", "8"), [(2, (0, 1))]),
        (("4",), ("1", "4", "8"), [(2, (1,))]),
        # Square: both readings are possible, and the proof decides.
        (("4", "4"), ("4", "4", "8"), [(2, (0, 1)), (2, (1, 0))]),
        (("3", "5"), ("3", "4", "8"), []),
        # Two symbols may be one size under two names.
        (("s0", "4"), ("s1", "4", "8"), [(2, (0, 1))]),
        (("s0", "4"), ("3", "4", "8"), []),
    ],
)
def test_ways_to_read_a_statistic(statistic, shape, ways) -> None:
    assert [w for w in statistic_axes(statistic, shape) if w[0] == 2] == ways
