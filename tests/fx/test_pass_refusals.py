"""Every reason to refuse a site: its code, sentence and count, and its negative twin.

The twin differs in one thing and is rewritten. A refused graph stays as it was; where
its LSE gather is still an exact gather of its own, that alone is rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dcp_inductor.errors import DCPError
from tests.formulations import family_a, family_b, family_d
from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.formulations.inputs import Input
from tests.formulations.tracing import DYNAMIC, STATIC
from tests.fx.sketch import Model, Rewritten, partials, passed, rewrite, sketch, traced

merge = family_a.merge
ROWS = torch.zeros(3, 8)
PARTIALS = partials(2)[1]


def weight(ctx: Context, lse: Tensor) -> Tensor:
    """Weight of the own shard [T, H, 1]."""
    return sp.w_logsumexp(ctx, lse, sp.stack_view(ctx, lse))[..., None]


def refuse(
    fn: Model,
    tensors: Sequence[Tensor | Input],
    code: str,
    reason: str,
    becomes: Sequence[str] = (),
    **how: Any,
) -> Rewritten:
    """Hold a refusal to its code, sentence and count.

    ``becomes``: exchanges of the graph afterwards; without it the graph is unchanged.
    """
    names = ("rank", "world_size", "form", "minimum")
    given = {name: how.pop(name) for name in names if name in how}
    after = rewrite(traced(fn, tensors, **given), **how)
    refused = [site for site in after.sites if site.code]
    assert [(site.code, site.decision) for site in refused] == [(code, "rejected")]
    assert reason in refused[0].reason
    assert refused[0].op == ""
    rewritten = len(after.sites) - 1
    expected = {"found": len(after.sites), f"rejected.{code}": 1}
    assert after.counts == expected | ({"rewritten": rewritten} if rewritten else {})
    if becomes:
        assert after.calls() == list(becomes)
    else:
        assert after.unchanged
        assert rewritten == 0
    return after


def accept(
    fn: Model, tensors: Sequence[Tensor | Input], op: str, **how: Any
) -> Rewritten:
    """The twin: one site, rewritten to ``op``."""
    names = ("rank", "world_size", "form", "minimum")
    given = {name: how.pop(name) for name in names if name in how}
    after = rewrite(traced(fn, tensors, **given), **how)
    assert after.counts == {"found": 1, "rewritten": 1}
    assert after.calls() == [op]
    assert after.only.op == op
    return after


# Refused, but its gather of the LSEs is exact and stands alone.
LSE_GATHERED = ("kv_gather", "reduce_scatter_tensor")


def query_gather(ctx: Context, query: Tensor) -> Tensor:
    return sp.ag(ctx, query, 1) * 2


def row_gather(ctx: Context, rows: Tensor) -> Tensor:
    return sp.ag(ctx, rows, 0) * 2


@pytest.mark.parametrize(
    ("fn", "tensors", "knob", "op"),
    [
        (query_gather, [torch.zeros(3, 2, 8)], "direct_query_gather", "q_gather"),
        (row_gather, [ROWS], "direct_kv_gather", "kv_gather"),
    ],
)
def test_a_gather_that_is_disabled(fn: Model, tensors, knob: str, op: str) -> None:
    refuse(fn, tensors, "disabled", f"{knob} is set to 'disable'", **{knob: "disable"})
    others = {"direct_query_gather", "direct_kv_gather", "direct_combine"} - {knob}
    accept(fn, tensors, op, **dict.fromkeys(others, "disable"))


def test_a_merge_that_is_disabled_keeps_its_collectives() -> None:
    off = {"direct_combine": "disable"}
    refuse(
        merge,
        PARTIALS,
        "disabled",
        "direct_combine is set to 'disable'",
        LSE_GATHERED,
        **off,
    )
    both = passed(merge, PARTIALS)
    assert both.calls() == ["a2a_lse_reduce"]
    neither = rewrite(traced(merge, PARTIALS), direct_kv_gather="disable", **off)
    assert neither.unchanged
    assert neither.counts == {"found": 2, "rejected.disabled": 2}


def test_nothing_is_looked_at_when_switched_off() -> None:
    after = rewrite(traced(merge, PARTIALS), enable=False)
    assert after.unchanged
    assert after.counts == {}


def test_training() -> None:
    graph = traced(merge, PARTIALS)
    after = rewrite(graph, is_inference=False)
    assert after.unchanged
    assert {site.code for site in after.sites} == {"autograd"}
    assert "no gradient" in after.sites[0].reason
    assert set(after.counts) == {"found", "rejected.autograd"}
    assert rewrite(graph, is_inference=True).calls() == ["a2a_lse_reduce"]


def test_double_precision() -> None:
    output, lse = PARTIALS
    refuse(
        merge,
        [output.double(), lse],
        "dtype",
        "lose precision of torch.float64",
        LSE_GATHERED,
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        accept(merge, [output.to(dtype), lse], "a2a_lse_reduce")


def test_result_in_double_precision() -> None:
    def doubled(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        return sp.rs(ctx, output.double() * weight(ctx, lse))

    after = passed(doubled, PARTIALS)
    assert [s.code for s in after.sites if s.kind == "combine"] == ["dtype"]


def test_more_tokens_than_a_workspace_holds() -> None:
    for fn, tensors, op in (
        (merge, PARTIALS, "a2a_lse_reduce"),
        (query_gather, [torch.zeros(3, 2, 8)], "q_gather"),
        (row_gather, [ROWS], "kv_gather"),
    ):
        after = rewrite(traced(fn, tensors), max_tokens=2)
        codes = {site.code for site in after.sites if site.op != op}
        assert codes == {"over_capacity"}
        # A peer may have another limit, and wait in the exchange.
        refused = [site for site in after.sites if site.code == "over_capacity"]
        assert after.calls("site_guard") == ["site_guard"] * len(refused)
        assert "3 rows exceed max_tokens=2; raise" in after.sites[0].reason
        accept(fn, tensors, op, max_tokens=3)


def test_capacity_of_a_dynamic_size_is_for_the_run_to_judge() -> None:
    accept(merge, PARTIALS, "a2a_lse_reduce", form=DYNAMIC, max_tokens=2)


def test_gather_of_features() -> None:
    refuse(
        lambda ctx, x: sp.ag(ctx, x, 1) * 2,
        [ROWS],
        "feature_gather",
        "joins features, not heads or rows",
    )
    accept(row_gather, [ROWS], "kv_gather")


def first_row(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    weights = torch.softmax(sp.stack_view(ctx, lse), 0)
    return sp.rs(ctx, output * weights[0][..., None])


def own_row(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    weights = torch.softmax(sp.stack_view(ctx, lse), 0)
    return sp.rs(ctx, output * weights[ctx.rank][..., None])


@pytest.mark.parametrize("world_size", [2, 4])
def test_place_of_another_rank(world_size: int) -> None:
    for rank in range(1, world_size):
        how = {"rank": rank, "world_size": world_size}
        after = refuse(
            first_row,
            partials(world_size)[rank],
            "foreign_rank",
            "reads rank 0's place, which is not its own",
            LSE_GATHERED,
            **how,
        )
        # Rank 0 reads its own place and accepts, so this rank has to look at its vote.
        assert after.calls("site_guard") == ["site_guard"]
        accept(own_row, partials(world_size)[rank], "a2a_lse_reduce", **how)
    # On rank 0 the graph is that of the merge, which is what the votes are for.
    own = accept(
        first_row,
        partials(world_size)[0],
        "a2a_lse_reduce",
        rank=0,
        world_size=world_size,
    )
    assert own.calls("site_guard") == []


@pytest.mark.parametrize(
    "fn",
    [
        lambda ctx, o, lse: sp.rs(
            ctx, o * torch.exp(lse - sp.stack_view(ctx, lse).amax(0))[..., None]
        ),
        lambda ctx, o, lse: sp.rs(ctx, o * weight(ctx, lse), 1, "avg"),
        lambda ctx, o, lse: sp.rs(ctx, o * weight(ctx, lse) * 1.0005),
    ],
    ids=["undivided", "average", "scaled"],
)
def test_something_else_than_the_merge(fn: Model) -> None:
    nearest = "this is no merge; nearest: the merge by an LSE of base "
    refuse(fn, PARTIALS, "not_equivalent", nearest, LSE_GATHERED)
    accept(merge, PARTIALS, "a2a_lse_reduce")


def narrowed(
    ctx: Context, output: Tensor, lse: Tensor, to: torch.dtype = torch.bfloat16
) -> Tensor:
    """The LSEs are rounded for the gather; the own weight is of the exact LSE."""
    lses = sp.stack_view(ctx, lse.to(to)).float()
    return sp.rs(ctx, output * torch.exp(lse - torch.logsumexp(lses, 0))[..., None])


@pytest.mark.parametrize("form", [STATIC, DYNAMIC])
@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("world_size", [2, 4])
def test_lse_narrowed_on_the_way(world_size: int, tokens: int, form: str) -> None:
    refuse(
        narrowed,
        partials(world_size, tokens)[1],
        "precision",
        "LSE of large magnitude loses precision",
        LSE_GATHERED,
        form=form,
        world_size=world_size,
    )


def test_lse_widened_on_the_way() -> None:
    accept(
        lambda ctx, o, lse: narrowed(ctx, o, lse, torch.float64),
        PARTIALS,
        "a2a_lse_reduce",
    )


def test_empty_shards_that_count() -> None:
    """The sentinel of an empty shard is taken for an LSE of 0 in the denominator."""

    def counted(
        ctx: Context, output: Tensor, lse: Tensor, sentinel: float = 0.0
    ) -> Tensor:
        lses = sp.stack_view(ctx, lse)
        lses = torch.where(lses == float("-inf"), sentinel, lses)
        return sp.rs(ctx, output * torch.exp(lse - torch.logsumexp(lses, 0))[..., None])

    refuse(
        counted,
        PARTIALS,
        "empty_shards",
        "rows with empty shards come out differently",
        LSE_GATHERED,
    )
    accept(lambda ctx, o, lse: counted(ctx, o, lse, -1e30), PARTIALS, "a2a_lse_reduce")


def test_nan_on_ordinary_data() -> None:
    def limited(ctx: Context, o: Tensor, lse: Tensor, most: float = 30.0) -> Tensor:
        w = weight(ctx, lse)
        return sp.rs(ctx, o * torch.where(lse[..., None].abs() > most, float("nan"), w))

    refuse(limited, PARTIALS, "not_finite", "not finite on ordinary data", LSE_GATHERED)
    accept(lambda ctx, o, lse: limited(ctx, o, lse, 1e30), PARTIALS, "a2a_lse_reduce")


def test_part_that_is_not_the_same_part_at_every_size() -> None:
    """The slice stays, behind the merge of all of it."""

    def part(ctx: Context, o: Tensor, lse: Tensor) -> Tensor:
        return sp.ar(ctx, o * weight(ctx, lse))[: o.shape[0] // 2] * 2

    accept(part, PARTIALS, "a2a_lse_reduce", form=DYNAMIC)


def test_shape_too_large_to_try() -> None:
    output, lse = torch.zeros(1, 1, 1), torch.zeros(1, 1)
    refuse(
        merge,
        [output.expand(256, 256, 1024), lse.expand(256, 256)],
        "too_large",
        "a trial of shape (256, 256, 1024) would take too long",
        LSE_GATHERED,
    )
    accept(merge, [output.expand(4, 4, 16), lse.expand(4, 4)], "a2a_lse_reduce")


@pytest.mark.parametrize("fn", [merge, family_b.tree_decoding, family_d.one_gather_own])
def test_no_tokens(fn: Model) -> None:
    after = rewrite(traced(fn, partials(2, 0)[1]))
    [refused] = [site for site in after.sites if site.code == "no_tokens"]
    reason = "there are no tokens: a partial output of [0, 4, 8] holds nothing to excha"
    assert refused.reason.startswith(reason)
    # A peer that has some waits in the exchange.
    assert after.calls("site_guard") == ["site_guard"]
    assert after.calls("a2a_lse_reduce") == []
    accept(fn, partials(2, 1)[1], "a2a_lse_reduce")


def test_region_that_does_not_run_at_trial_sizes() -> None:
    """Views that need a multiple of three tokens, which no trial has."""

    def by_three(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        return merge(ctx, output, lse).view(-1, 3, 2, 8) * 2

    tensors = partials(2, 6)[1]
    refuse(
        by_three,
        tensors,
        "not_runnable",
        "does not run on a trial",
        LSE_GATHERED,
        form=DYNAMIC,
    )
    accept(by_three, tensors, "a2a_lse_reduce")


def test_views_that_cannot_be_written() -> None:
    """Batch and sequence are both symbolic and stand on either side of the heads."""
    output, lse = torch.zeros(3, 4, 5, 8), torch.zeros(3, 4, 5)

    def scattered(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        lses = sp.stack_reshape(ctx, lse)
        return sp.rs(ctx, output * sp.w_logsumexp(ctx, lse, lses)[..., None])

    accept(scattered, [output, lse], "a2a_lse_reduce", form=DYNAMIC)
    for tensor in (output, lse):
        torch._dynamo.mark_dynamic(tensor, 2)
    refuse(
        scattered,
        [Input(output), Input(lse)],
        "symbolic_shape",
        "no views make shape",
        LSE_GATHERED,
        form=DYNAMIC,
    )


def test_group_that_does_not_exist_here() -> None:
    """A graph from elsewhere: its collectives stay, and nothing is claimed."""
    from dcp_inductor.fx.dcp_pass import DcpPass

    graph = traced(merge, PARTIALS)
    before = sketch(graph.original.graph)
    module = graph.graph_module()
    DcpPass()(module.graph)  # outside of any process group
    assert sketch(module.graph) == before


@pytest.mark.parametrize(
    ("fn", "knob"),
    [(first_row, "direct_combine"), (query_gather, "direct_query_gather")],
)
def test_forced_site_that_cannot_be_rewritten_is_an_error(fn: Model, knob: str) -> None:
    tensors = PARTIALS if fn is first_row else [torch.zeros(3, 2, 8)]
    limits = {} if fn is first_row else {"max_tokens": 2}
    graph = traced(fn, tensors)
    with pytest.raises(DCPError, match=rf"{knob} is 'force'.*set {knob} to 'auto'"):
        rewrite(graph, **{knob: "force"}, **limits)
    twin = own_row if fn is first_row else fn
    assert rewrite(traced(twin, tensors), **{knob: "force"}).counts["rewritten"] == 1
