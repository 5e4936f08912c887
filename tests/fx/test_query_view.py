"""A gathered query stays in the workspace only where a merge ends every use of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, fx

from dcp_inductor import config, ops
from dcp_inductor.fx.query_view import place_views
from tests.formulations import family_a, surroundings
from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.formulations.inputs import Input
from tests.formulations.tracing import DYNAMIC, STATIC
from tests.fx.sketch import HEADS_PER_RANK, Rewritten, deviation, passed

_LIBRARY = torch.library.Library("dcp_view_tests", "DEF")
_LIBRARY.define("touch(Tensor(a!) x) -> ()")
_LIBRARY.define("part(Tensor(a) x) -> Tensor(a)")
_LIBRARY.define("look(Tensor x) -> Tensor")
_LIBRARY.define(
    "attend_unsafe(Tensor query, Tensor rows) -> (Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_LIBRARY.impl("touch", lambda x: x.add_(1), "CPU")
_LIBRARY.impl("look", lambda x: x + 1, "CPU")
torch.library.register_fake("dcp_view_tests::touch", lambda x: None)
torch.library.register_fake("dcp_view_tests::look", torch.empty_like)
torch.library.register_fake(
    "dcp_view_tests::attend_unsafe",
    lambda query, rows: (torch.empty_like(query), query.new_empty(query.shape[:2])),
)
_ops = torch.ops.dcp_view_tests
attention = torch.ops.dcp_formulations.attention

QUERY = torch.randn(3, HEADS_PER_RANK, 8, generator=torch.Generator().manual_seed(1))
ROWS = Input(torch.randn(6, 8, generator=torch.Generator().manual_seed(2)), None)
Model = Callable[..., Tensor | tuple[Tensor, ...]]


def per_rank(world_size: int = 2) -> list[list[Tensor | Input]]:
    return [[QUERY * (r + 1), ROWS] for r in range(world_size)]


def decomposed(query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Attention in plain torch: partial output and LSE."""
    scores = torch.einsum("thd,kd->thk", query, rows)
    return torch.einsum("thk,kd->thd", scores.softmax(-1), rows), scores.logsumexp(-1)


def verdicts(after: Rewritten) -> list[str]:
    """By query gather in graph order: "view", or why it is copied out."""
    ops_there = [
        node.target is ops.q_gather_view
        for node in after.graph.nodes
        if node.target in (ops.q_gather, ops.q_gather_view)
    ]
    rows = [row for row in after.sites if row.kind == "query_gather"]
    assert [row.op == "q_gather_view" for row in rows] == ops_there
    reasons = [row.result.rpartition("copied out: ")[2] for row in rows]
    return [
        "view" if view else reason
        for view, reason in zip(ops_there, reasons, strict=True)
    ]


def copied(model: Model, *inputs: Tensor | Input, **how: object) -> str:
    """Why the one query of the model is copied out."""
    [verdict] = verdicts(passed(model, inputs or [QUERY, ROWS], **how))
    assert verdict != "view"
    return verdict


# Views.


@pytest.mark.parametrize("form", [STATIC, DYNAMIC])
@pytest.mark.parametrize("kind", ["plain", "functional", "list", "mutating"])
def test_a_query_that_only_attention_reads(kind: str, form: str) -> None:
    """The trial runs overwrite a view as soon as the merge has run."""

    def model(ctx: Context, query: Tensor, rows: Tensor) -> Tensor:
        if kind != "plain":
            return surroundings.decode(ctx, query, rows, kind=kind, merge="a")
        return family_a.merge(ctx, *decomposed(sp.ag(ctx, query, 1), rows))

    after, error = deviation(model, per_rank(), form=form)
    assert [verdicts(each) for each in after] == [["view"]] * 2
    assert error < 1e-5


def test_views_and_work_of_its_own_come_between() -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> Tensor:
        whole = sp.ag(ctx, query, 1)
        nope, rope = whole[:, None].squeeze(1).split([5, 3], -1)
        out, lse = attention(torch.cat([nope * 2, torch.tanh(rope)], -1), rows)
        bias = whole.transpose(0, 1).double().sum(-1).float().t()
        return family_a.merge(ctx, out, lse + bias)

    after, error = deviation(model, per_rank())
    assert [verdicts(each) for each in after] == [["view"]] * 2
    assert error < 1e-5


def test_every_layer_has_a_view() -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> Tensor:
        for _ in range(3):
            out, lse = attention(sp.ag(ctx, query, 1), rows)
            query = torch.sin(family_a.merge(ctx, out, lse))
        return query

    after, error = deviation(model, per_rank())
    assert [verdicts(each) for each in after] == [["view"] * 3] * 2
    assert error < 1e-5


def test_other_exchanges_between_change_nothing() -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        whole = sp.ag(ctx, query, 1)
        every = sp.ag(ctx, rows * 2, 0)
        total = sp.ar(ctx, rows + 1)
        return family_a.merge(ctx, *attention(whole, every)), total * 2

    after, error = deviation(model, per_rank())
    assert [verdicts(each) for each in after] == [["view"]] * 2
    assert error < 1e-5


def test_its_size_may_be_read_at_any_time() -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        whole = sp.ag(ctx, query, 1)
        merged = family_a.merge(ctx, *attention(whole, rows))
        return merged, torch.zeros_like(whole) + merged.sum() * whole.shape[0]

    assert verdicts(passed(model, [QUERY, ROWS], form=DYNAMIC)) == ["view"]


def test_what_an_opaque_op_made_of_it_may_live_on() -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(sp.ag(ctx, query, 1), rows)
        return family_a.merge(ctx, out, lse), out + 1

    after, error = deviation(model, per_rank())
    assert [verdicts(each) for each in after] == [["view"]] * 2
    assert error < 1e-5


# Copies, each for one reason.


def test_the_query_is_returned() -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        whole = sp.ag(ctx, query, 1)
        return family_a.merge(ctx, *attention(whole, rows)), whole

    assert copied(model).startswith("the graph returns ")


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[:, 1:3],
        lambda x: x.flatten(1),
        lambda x: x.split(1, 0)[1],
        lambda x: x.unsqueeze(0).expand(4, -1, -1, -1),
        lambda x: x.view(torch.int32),
    ],
)
def test_a_view_of_the_query_is_returned(view: Callable[[Tensor], Tensor]) -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        whole = sp.ag(ctx, query, 1)
        return family_a.merge(ctx, *attention(whole, rows)), view(whole)

    assert copied(model).startswith("the graph returns ")


@pytest.mark.parametrize(
    "read", [lambda x: x.sum() + 1, _ops.look], ids=["plain", "opaque"]
)
def test_something_that_the_merge_does_not_need_reads_it(
    read: Callable[[Tensor], Tensor],
) -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        whole = sp.ag(ctx, query, 1)
        other = _ops.look(read(whole))
        return family_a.merge(ctx, *attention(whole, rows)), other

    assert copied(model).endswith("may read it after the merge")


def test_it_is_read_again_behind_the_merge() -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> Tensor:
        whole = sp.ag(ctx, query, 1)
        merged = family_a.merge(ctx, *attention(whole, rows))
        return _ops.look(merged) + whole[:, :HEADS_PER_RANK]

    assert "after the merge" in copied(model)


def test_work_on_it_may_be_done_anew_behind_the_merge() -> None:
    """Inductor computes the product twice rather than store it."""

    def model(ctx: Context, query: Tensor, rows: Tensor) -> Tensor:
        twice = sp.ag(ctx, query, 1) * 2
        out, lse = decomposed(twice, rows)
        merged = family_a.merge(ctx, out, lse)
        return _ops.look(merged) + twice[:, :HEADS_PER_RANK]

    assert "after the merge" in copied(model)


def test_two_queries_before_one_merge() -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> Tensor:
        first = sp.ag(ctx, query, 1)
        second = sp.ag(ctx, query + torch.tanh(first).sum(), 1)
        return family_a.merge(ctx, *attention(first + second, rows))

    after, error = deviation(model, per_rank())
    for each in after:
        first, second = verdicts(each)
        assert first == "the group gathers another query before it merges"
        assert second == "view"  # before the next call of the graph comes the merge
    assert error < 1e-5


def test_a_merge_of_another_group() -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> Tensor:
        row = Context(*ctx.row[1:], ctx.row[0], ctx.heads_per_rank)
        column = Context(*ctx.column[1:], ctx.column[0], ctx.heads_per_rank)
        return family_a.merge(column, *attention(sp.ag(row, query, 1), rows))

    reason = copied(model, QUERY, ROWS, world_size=4, grid=True)
    assert reason == "no merge of the group follows in this graph"


@pytest.mark.parametrize("why", ["disabled", "no merge", "merge before"])
def test_no_merge_in_the_graph(why: str) -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> Tensor:
        if why == "no merge":  # as in a piece of a graph that ends at attention
            return attention(sp.ag(ctx, query, 1), rows)[0]
        if why == "disabled":
            return family_a.merge(ctx, *attention(sp.ag(ctx, query, 1), rows))
        out, lse = attention(torch.cat([query, query], 1), rows)
        merged = family_a.merge(ctx, out, lse)
        return attention(sp.ag(ctx, torch.sin(merged), 1), rows)[0]

    knobs = {"direct_combine": "disable"} if why == "disabled" else {}
    with config.patch(**knobs):
        reason = copied(model)
    assert reason == "no merge of the group follows in this graph"


@pytest.mark.parametrize("version", [1, 2])
def test_an_op_writes_to_it(version: int) -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor) -> Tensor:
        whole = sp.ag(ctx, query, 1)
        _ops.touch(whole)
        return family_a.merge(ctx, *attention(whole, rows))

    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        assert copied(model).endswith("writes to it")


def test_it_is_written_to_an_input() -> None:
    def model(ctx: Context, query: Tensor, rows: Tensor, kept: Tensor) -> Tensor:
        whole = sp.ag(ctx, query, 1)
        kept.copy_(whole)
        return family_a.merge(ctx, *attention(whole, rows))

    kept = Input(torch.zeros(3, 2 * HEADS_PER_RANK, 8), None)
    assert copied(model, QUERY, ROWS, kept)


def test_the_knob_switches_it_off() -> None:
    model = partial(surroundings.decode, kind="functional", merge="a")
    with config.patch(query_view=False):
        assert copied(model) == "query_view is off"


def copying() -> tuple[fx.Graph, fx.Node, fx.Node]:
    """A graph without a view to edit, its attention and the query that this reads."""
    model = partial(surroundings.decode, kind="functional", merge="a")
    with config.patch(query_view=False):
        graph = passed(model, [QUERY, ROWS]).graph
    [attend] = [n for n in graph.nodes if n.target is attention.default]
    whole = attend.args[0]
    assert isinstance(whole, fx.Node)
    return graph, attend, whole


def test_a_reader_that_the_merge_needs_for_its_shape_alone() -> None:
    for like, reason in (
        (torch.ops.aten.zeros_like.default, "look_default may read it after the merge"),
        (torch.ops.aten.relu.default, ""),
    ):
        graph, attend, whole = copying()
        with graph.inserting_before(attend):
            looked = graph.call_function(_ops.look.default, (whole,))
            shape = graph.call_function(like, (looked,))
            total = graph.call_function(torch.ops.aten.add.Tensor, (whole, shape))
        attend.update_arg(0, total)
        [found] = place_views(graph).values()
        assert found == reason


def edited(target: object) -> str:
    """The verdict where ``target`` stands between the query and attention."""
    graph, attend, whole = copying()
    with graph.inserting_before(attend):
        between = graph.call_function(target, (whole,))  # type: ignore[arg-type]
    between.meta["val"] = whole.meta["val"]
    attend.update_arg(0, between)
    [reason] = place_views(graph).values()
    return reason


def test_what_is_not_understood_is_a_reason() -> None:
    assert edited(torch.ops.aten.clone.default) == ""
    assert edited(_ops.look.default) == ""
    assert edited(_ops.part.default).endswith("returns a view of it")
    assert edited(_ops.touch.default).endswith("writes to it")
    assert edited(torch.ops.aten.relu_.default).endswith("writes to it")
    assert edited(torch.cond).endswith("with it is not known")
    assert edited(torch.ops.higher_order.cond).endswith("with it is not known")


@pytest.mark.parametrize("what", ["unsafe attention", "named", "host", "neither"])
@pytest.mark.parametrize("cudagraphs", [True, False])
def test_a_cuda_graph_that_ends_before_the_merge(what: str, cudagraphs: bool) -> None:
    """All outputs of a CUDA graph of Inductor's must lie in that graph's memory."""

    def model(ctx: Context, query: Tensor, rows: Tensor) -> Tensor:
        attend = _ops.attend_unsafe if what == "unsafe attention" else attention
        out, lse = attend(sp.ag(ctx, query, 1), rows)
        if what == "host":
            lse = lse + rows.sum().to("meta").to("cpu")
        return family_a.merge(ctx, out, lse)

    settings: dict[str, object] = {"triton.cudagraphs": cudagraphs}
    if what == "named":
        settings["custom_should_partition_ops"] = ["dcp_formulations::attention"]
    with torch._inductor.config.patch(settings):
        [verdict] = verdicts(passed(model, [QUERY, ROWS]))
    if cudagraphs and what != "neither":
        assert "a CUDA graph may end at" in verdict
    else:
        assert verdict == "view"
