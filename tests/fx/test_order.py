"""Exchanges of a group stay in one order, because each depends on the one before it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx

from dcp_inductor.fx.collectives import as_collective
from dcp_inductor.fx.order import group_of_direct
from tests.formulations import family_a
from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.formulations.tracing import DYNAMIC, STATIC
from tests.fx.sketch import (
    HEADS_PER_RANK,
    Rewritten,
    deviation,
    partials,
    passed,
)

ORDER_OPS = ("order_after", "order_token")
QUERY = torch.randn(3, HEADS_PER_RANK, 8, generator=torch.Generator().manual_seed(1))


def group_of(node: fx.Node) -> str | None:
    collective = as_collective(node)
    return collective.group_name if collective else group_of_direct(node)


def depends(node: fx.Node, on: fx.Node) -> bool:
    stack, seen = [node], set()
    while stack:
        for source in stack.pop().all_input_nodes:
            if source is on:
                return True
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return False


def unordered(graph: fx.Graph) -> list[str]:
    """Exchanges that do not depend on the one of their group before them."""
    by_group: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        name = group_of(node)
        if name is not None:
            by_group.setdefault(name, []).append(node)
    return [
        f"{later.name} after {earlier.name}"
        for nodes in by_group.values()
        for earlier, later in pairwise(nodes)
        if not depends(later, earlier)
    ]


def node_of(after: Rewritten, stem: str) -> fx.Node:
    (node,) = [n for n in after.graph.nodes if stem in str(n.target)]
    return node


def attend(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Some partial output and LSE made of the gathered query."""
    return torch.tanh(whole) * 2, whole.sum(-1)


def decode(ctx: Context, query: Tensor) -> Tensor:
    return family_a.merge(ctx, *attend(sp.ag(ctx, query, 1)))


@pytest.mark.parametrize("form", [STATIC, DYNAMIC])
def test_token_runs_from_gather_to_combine(form: str) -> None:
    after = passed(decode, [QUERY], form=form)
    assert after.calls() == ["q_gather", "a2a_lse_reduce"]
    assert after.calls(*ORDER_OPS) == []
    gather, combine = node_of(after, "q_gather"), node_of(after, "a2a_lse_reduce")
    token = combine.args[2]
    assert token.args == (gather, 1)
    first = gather.args[1]
    assert first.target is torch.ops.aten.empty.memory_format
    assert unordered(after.graph) == []


def test_tokens_hold_no_data() -> None:
    after = passed(decode, [QUERY])
    for stem, slot in (("q_gather", 1), ("a2a_lse_reduce", 2)):
        value = node_of(after, stem).args[slot].meta["val"]
        assert (value.numel(), value.dtype) == (0, torch.uint8)


def test_several_layers_make_one_chain() -> None:
    def layers(ctx: Context, query: Tensor) -> Tensor:
        for _ in range(3):
            # Without the sine, merge and gather are one merge that all ranks receive.
            query = torch.sin(decode(ctx, query))
        return query

    after = passed(layers, [QUERY])
    assert after.calls() == ["q_gather", "a2a_lse_reduce"] * 3
    starts = [n for n in after.graph.nodes if n.name.startswith("empty")]
    assert len(starts) == 1
    assert unordered(after.graph) == []


def test_gathers_that_share_no_data_are_chained() -> None:
    def two(ctx: Context, query: Tensor) -> tuple[Tensor, Tensor]:
        return sp.ag(ctx, query, 1) * 2, sp.ag(ctx, query + 1, 1) * 3

    after = passed(two, [QUERY])
    assert after.calls() == ["q_gather", "q_gather"]
    assert unordered(after.graph) == []


def test_unrelated_collective_between_is_tied_on_both_sides() -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        whole = sp.ag(ctx, query, 1)
        total = sp.ar(ctx, rows * 2)
        return family_a.merge(ctx, *attend(whole)), total + 1

    def before(ctx: Context, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        total = sp.ar(ctx, rows * 2)
        return decode(ctx, query), total + 1

    def behind(ctx: Context, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        merged = decode(ctx, query)
        return merged, sp.ar(ctx, rows * 2) + 1

    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    for fn, order, ops in (
        (before, ["all_reduce", "q_gather", "a2a_lse_reduce"], ["order_token"]),
        (
            model,
            ["q_gather", "all_reduce", "a2a_lse_reduce"],
            ["order_after", "order_token"],
        ),
        (behind, ["q_gather", "a2a_lse_reduce", "all_reduce"], ["order_after"]),
    ):
        inputs = [(QUERY * (r + 1), rows - r) for r in range(2)]
        after, error = deviation(fn, inputs)
        assert error < 1e-5
        for each in after:
            assert unordered(each.graph) == [], fn.__name__
            assert sorted(each.calls()) == sorted(order)
            # Where an exchange stands is torch's choice; how it is tied is not.
            if each.calls() == order:
                assert each.calls(*ORDER_OPS) == ops


def test_collective_on_the_data_path_needs_no_tie() -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> Tensor:
        output, lse = attend(sp.ag(ctx, query, 1) @ rows)
        scale = sp.ar(ctx, output.sum())
        merged = family_a.merge(ctx, output * scale, lse)
        return sp.ar(ctx, merged.flatten(1) * 2)

    after = passed(model, [QUERY, torch.zeros(8, 8)])
    assert after.calls() == ["q_gather", "all_reduce", "a2a_lse_reduce", "all_reduce"]
    assert after.calls(*ORDER_OPS) == []
    assert unordered(after.graph) == []


def test_collective_that_meets_only_one_side() -> None:
    """It needs the gathered query, and the combine does not need it."""

    def model(ctx: Context, query: Tensor) -> tuple[Tensor, Tensor]:
        whole = sp.ag(ctx, query, 1)
        aside = sp.ar(ctx, whole.sum(0))
        return family_a.merge(ctx, *attend(whole)), aside * 2

    after = passed(model, [QUERY])
    assert unordered(after.graph) == []
    if after.calls() == ["q_gather", "all_reduce", "a2a_lse_reduce"]:
        assert after.calls(*ORDER_OPS) == ["order_token"]


def test_collectives_of_another_group_are_left_alone() -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        whole = sp.ag(ctx, query, 1)
        aside = funcol.all_reduce(rows * 2, "sum", ctx.row[0])
        return family_a.merge(ctx, *attend(whole)), aside + 1

    rows = torch.zeros(4, 5)
    after = passed(model, [QUERY, rows], world_size=4, grid=True)
    assert sorted(after.calls()) == ["a2a_lse_reduce", "all_reduce", "q_gather"]
    assert after.calls(*ORDER_OPS) == []
    assert unordered(after.graph) == []


def test_groups_have_chains_of_their_own() -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        row = Context(*ctx.row[1:], ctx.row[0], ctx.heads_per_rank)
        return decode(ctx, query), decode(row, rows)

    after = passed(model, [QUERY, QUERY + 1], world_size=4, grid=True)
    assert sorted(after.calls()) == ["a2a_lse_reduce"] * 2 + ["q_gather"] * 2
    names = {group_of(n) for n in after.graph.nodes} - {None}
    assert len(names) == 2
    assert unordered(after.graph) == []
    starts = [n for n in after.graph.nodes if n.name.startswith("empty")]
    assert len(starts) == 2


def test_graph_without_a_rewrite_gets_no_token() -> None:
    def model(ctx: Context, rows: Tensor) -> tuple[Tensor, Tensor]:
        return sp.ar(ctx, rows), sp.ar(ctx, rows + 1)

    after = passed(model, [QUERY])
    assert after.unchanged
    assert after.counts == {}


def foreign(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    weights = torch.softmax(sp.stack_view(ctx, lse), 0)[0]
    return sp.rs(ctx, output * weights[..., None])


def test_guard_stands_before_the_site_that_a_peer_may_accept() -> None:
    after = passed(foreign, partials(2)[1], rank=1)
    guard = node_of(after, "site_guard")
    _, _, site, reason = guard.args
    refused = next(s for s in after.sites if s.code == "foreign_rank")
    assert (site, reason) == (refused.site, refused.reason)
    for node in after.graph.nodes:
        if group_of(node) is not None:
            assert depends(node, guard), node.name
    # The name under which a peer that accepts votes.
    accepted = passed(foreign, partials(2)[0], rank=0)
    assert accepted.only.site == site


def test_new_nodes_tell_where_they_come_from() -> None:
    for node in passed(decode, [QUERY]).graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta, node.name
            assert node.meta.get("stack_trace"), node.name
