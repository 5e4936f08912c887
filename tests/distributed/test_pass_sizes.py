"""Compiled models of several sizes on real ranks: none may stand for another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.support import fresh_group, world

Model = Callable[[Context, Tensor, Tensor, int], Tensor]


def merged(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    every = sp.stack_view(ctx, lse)
    return sp.rs(ctx, output * torch.exp(lse - every.logsumexp(0))[..., None])


def padded(ctx: Context, output: Tensor, lse: Tensor, rows: int) -> Tensor:
    """Rows from ``rows`` on are zero."""
    whole = merged(ctx, output, lse)
    return F.pad(whole[:rows], (0, 0, 0, 0, 0, whole.shape[0] - rows))


def copied(ctx: Context, output: Tensor, lse: Tensor, rows: int) -> Tensor:
    whole = merged(ctx, output, lse)
    result = torch.zeros_like(whole)
    result[:rows] = whole[:rows]
    return result


def masked(ctx: Context, output: Tensor, lse: Tensor, rows: int) -> Tensor:
    whole = merged(ctx, output, lse)
    kept = torch.arange(whole.shape[0]) < rows
    return torch.where(kept[:, None, None], whole, 0.0)


def gathered(ctx: Context, output: Tensor, lse: Tensor, rows: int) -> Tensor:
    """Only the first rows of each rank are of interest."""
    tokens, heads, dim = output.shape
    whole = sp.ag(ctx, output, 0).view(ctx.world_size, tokens, heads, dim)
    kept = torch.arange(tokens) < rows
    return torch.where(kept[None, :, None, None], whole, 0.0)


def compare(rank: int, size: int, model: Model) -> tuple[float, int]:
    torch._dynamo.reset()
    counters.clear()
    group = fresh_group(size)
    ctx = Context(rank, size, group.group_name, 4, group)
    compiled = torch.compile(
        lambda *args: model(ctx, *args), backend="dcp_inductor", dynamic=True
    )
    worst = 0.0
    for step, (tokens, rows) in enumerate([(6, 4), (7, 2), (5, 5)]):
        own = torch.Generator().manual_seed(10 * step + rank)
        output = torch.randn(tokens, 4 * size, 16, generator=own)
        lse = torch.randn(tokens, 4 * size, generator=own)
        want = model(ctx, output, lse, rows)
        worst = max(worst, float((compiled(output, lse, rows) - want).abs().max()))
    return worst, counters["dcp_inductor"]["rewritten"]


@pytest.mark.parametrize("model", [padded, copied, masked, gathered])
@pytest.mark.parametrize("size", [2, 4])
def test_a_number_of_real_rows_is_no_number_of_tokens(size: int, model: Model) -> None:
    for worst, rewritten in world(size).run(compare, model, limit_s=180):
        assert worst < 1e-5
        assert rewritten > 0
