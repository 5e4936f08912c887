"""Tensors that hold several in one: taken apart in any number, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.formulations.inputs import Input
from tests.fx.sketch import rewrite, traced

LAYERS = 70
HEADS, HEAD_DIM = 4, 6


def merge(ctx: Context, output: Tensor, pair: Tensor) -> Tensor:
    outputs, pairs = (sp.a2a(ctx, sp.head_shards(ctx, x)) for x in (output, pair))
    top, total = pairs.unbind(-1)
    share = total * torch.exp(top - top.amax(0))
    return (outputs * (share / share.sum(0))[..., None]).sum(0)


def layer_inputs(count: int) -> list[Input]:
    shapes = [(3, HEADS, HEAD_DIM), (3, HEADS, 2)] * count
    return [Input(torch.ones(shape)) for shape in shapes]


def test_every_layer_of_a_deep_model_is_taken_apart() -> None:
    def layers(ctx: Context, *inputs: Tensor) -> Tensor:
        pairs = zip(inputs[::2], inputs[1::2], strict=True)
        return torch.stack([merge(ctx, *each) for each in pairs])

    after = rewrite(traced(layers, layer_inputs(LAYERS)))
    assert after.counts == {"found": LAYERS, "rewritten": LAYERS}


def test_what_no_rewrite_takes_is_put_back() -> None:
    def mean(ctx: Context, output: Tensor, pair: Tensor) -> Tensor:
        outputs, pairs = (sp.a2a(ctx, sp.head_shards(ctx, x)) for x in (output, pair))
        return outputs.mean(0) + pairs.amax(0)[..., :1]

    assert rewrite(traced(mean, layer_inputs(1))).unchanged


def negative_on(ranks: tuple[int, ...], ctx: Context, output: Tensor, lse: Tensor):
    """A merge by LSEs that only some ranks take for negative."""
    lses = sp.stack_view(ctx, lse)
    lses = -lses if ctx.rank in ranks else lses
    return sp.rs(ctx, output * torch.softmax(lses, 0)[ctx.rank][..., None])


def lse_inputs() -> list[Input]:
    return [Input(torch.ones(3, HEADS, HEAD_DIM)), Input(torch.ones(3, HEADS))]


def test_ranks_that_differ_in_a_sign_have_different_names() -> None:
    """Each graph is a merge by itself; ranks compare names of what they exchange."""

    def names(ranks: tuple[int, ...]) -> list[str]:
        model = functools.partial(negative_on, ranks)
        graphs = [traced(model, lse_inputs(), rank=rank) for rank in (0, 1)]
        return [rewrite(graph).only.site for graph in graphs]

    for ranks in ((), (0, 1)):
        own, peer = names(ranks)
        assert own == peer
    own, peer = names((0,))
    assert own != peer


NUMBERS = (0.3, 0.9)
TABLE = [0.3, 1.7, 0.9, 2.2]


def shifted(factor: float, ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    lses = sp.stack_view(ctx, lse + factor)
    return sp.rs(ctx, output * torch.exp(lse + factor - lses.logsumexp(0))[..., None])


def scaled(
    make: Callable[[float], Any],
    factor: float,
    ctx: Context,
    output: Tensor,
    lse: Tensor,
) -> Tensor:
    weight = torch.exp(lse - sp.ar(ctx, lse, "max")) * make(factor)
    total = sp.ar(ctx, weight)
    own = total.chunk(2, 1)[ctx.rank]
    return sp.rs(ctx, output * weight[..., None]) / own[..., None]


@pytest.mark.parametrize(
    "model",
    [
        shifted,
        functools.partial(scaled, lambda factor: factor),
        functools.partial(scaled, lambda factor: int(10 * factor)),
        functools.partial(scaled, lambda factor: torch.tensor([factor] * HEADS)),
        functools.partial(scaled, lambda factor: torch.full((3, HEADS), factor)),
        # Of one table, the place that is the rank's own.
        functools.partial(
            scaled, lambda factor: torch.tensor(TABLE)[NUMBERS.index(factor)]
        ),
        functools.partial(
            scaled, lambda factor: torch.arange(1, HEADS + 1) * 0.3 + factor
        ),
        functools.partial(
            scaled, lambda factor: torch.arange(1, HEADS + 1) + int(10 * factor)
        ),
    ],
)
def test_ranks_that_compute_with_other_numbers_have_different_names(
    model: Callable[..., Tensor],
) -> None:
    """What a peer sends is proven with this rank's numbers, which cancel."""
    alike, unlike = (
        [
            rewrite(traced(functools.partial(model, x), lse_inputs(), rank=rank)).only
            for rank, x in enumerate(numbers)
        ]
        for numbers in (NUMBERS[:1] * 2, NUMBERS)
    )
    assert [site.op for site in alike + unlike] == ["a2a_lse_reduce"] * 4
    assert alike[0].site == alike[1].site
    assert unlike[0].site != unlike[1].site


def test_numbers_behind_the_exchange_are_each_ranks_own() -> None:
    """The scale of a quantised projection, say, of which each rank has its part."""

    def model(factor: float, ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        lses = sp.stack_view(ctx, lse)
        weight = torch.exp(lse - lses.logsumexp(0))
        return sp.rs(ctx, output * weight[..., None]) * factor

    sites = [
        rewrite(traced(functools.partial(model, x), lse_inputs(), rank=rank)).only
        for rank, x in enumerate(NUMBERS)
    ]
    assert [site.op for site in sites] == ["a2a_lse_reduce"] * 2
    assert sites[0].site == sites[1].site


def test_a_negative_lse_is_negated_once() -> None:
    model = functools.partial(negative_on, (0, 1))
    after = rewrite(traced(model, lse_inputs()))
    assert after.counts == {"found": 1, "rewritten": 1}
    assert [n.target for n in after.graph.nodes].count(torch.ops.aten.neg.default) == 1


def test_lanes_are_put_back_where_another_one_counts() -> None:
    def model(ctx: Context, output: Tensor, lanes: Tensor) -> Tensor:
        lses = sp.stack_view(ctx, lanes)
        weight = torch.softmax(lses[..., 0], 0)[ctx.rank]
        weight = torch.where(lanes.amax(-1) > 1e9, 0.0, weight)
        return sp.rs(ctx, output * weight[..., None])

    inputs = [lse_inputs()[0], Input(torch.ones(3, HEADS, 16))]
    after = rewrite(traced(model, inputs), direct_kv_gather="disable")
    assert after.unchanged
    reasons = [site.code for site in after.sites if site.kind == "combine"]
    assert set(reasons) == {"not_equivalent"}
