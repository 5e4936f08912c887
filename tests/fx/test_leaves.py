"""Tensors that hold several in one: taken apart in any number, and put back."""

from __future__ import annotations

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
