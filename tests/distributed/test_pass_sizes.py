"""Compiled models of several sizes on real ranks: none may stand for another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from dcp_inductor.errors import DCPMismatchError
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


def weighed(ctx: Context, output: Tensor, lse: Tensor, weight: Tensor | int) -> Tensor:
    """A rank's sums count as often as ``weight`` says, which is the rank's own."""
    sums = torch.exp(lse)[..., None]
    total = sp.ar(ctx, torch.cat([output * sums, sums], -1) * weight)
    return total[..., :-1] / total[..., -1:]


def counted(ctx: Context, output: Tensor, lse: Tensor, keys: Tensor) -> Tensor:
    return weighed(ctx, output, lse, torch.ones(keys.shape[0]).sum())


def highest(ctx: Context, output: Tensor, lse: Tensor, keys: Tensor) -> Tensor:
    return weighed(ctx, output, lse, (torch.arange(keys.shape[0]) + 1).amax())


def times(ctx: Context, output: Tensor, lse: Tensor, keys: Tensor) -> Tensor:
    return weighed(ctx, output, lse, keys.shape[0])


def own_keys(rank: int, size: int, model: Callable[..., Tensor]) -> float:
    torch._dynamo.reset()
    group = fresh_group(size)
    ctx = Context(rank, size, group.group_name, 4, group)
    compiled = torch.compile(
        lambda *args: model(ctx, *args), backend="dcp_inductor", dynamic=True
    )
    worst = 0.0
    for step, keys in enumerate([5 + 13 * rank, 9 + rank]):
        own = torch.Generator().manual_seed(10 * step + rank)
        output = torch.randn(4, 8, 16, generator=own)
        given = output, torch.randn(4, 8, generator=own), torch.randn(keys, 2)
        worst = max(worst, float((compiled(*given) - model(ctx, *given)).abs().max()))
    return worst


@pytest.mark.parametrize("model", [counted, highest, times])
def test_a_weight_by_the_ranks_own_number_of_keys_is_no_merge(model) -> None:
    assert max(world(2).run(own_keys, model, limit_s=180)) < 1e-5


def large(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    return weighed(ctx, output, lse, torch.tensor(2e4 if ctx.rank else 1e5))


def powers(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    sums = torch.exp(lse)[..., None]
    sent = torch.ldexp(torch.cat([output * sums, sums], -1), torch.tensor(ctx.rank))
    total = sp.ar(ctx, sent)
    return total[..., :-1] / total[..., -1:]


def shifted(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    """Rank 1 adds one to its LSEs, and nothing to the rest."""
    shift = torch.tensor([0.0] * output.shape[-1] + [float(ctx.rank)])
    packed = torch.cat([output, lse[..., None]], -1) + shift
    every = sp.stack_view(ctx, packed)
    return (every[..., :-1] * torch.softmax(every[..., -1], 0)[..., None]).sum(0)


def repeated(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    """Rank r sends its sums r + 1 times."""
    sums = torch.exp(lse)[..., None]
    packed = torch.cat([output * sums, sums], -1)
    total = sp.ar(ctx, packed[None].expand(ctx.rank + 1, -1, -1, -1).sum(0))
    return total[..., :-1] / total[..., -1:]


def own_numbers(rank: int, size: int, model: Callable[..., Tensor]) -> str:
    torch._dynamo.reset()
    group = fresh_group(size)
    ctx = Context(rank, size, group.group_name, 4, group)
    given = torch.randn(4, 8, 16), torch.randn(4, 8)
    compiled = torch.compile(lambda *args: model(ctx, *args), backend="dcp_inductor")
    try:
        got = compiled(*given)
    except DCPMismatchError as error:
        return str(error)
    return f"off by {float((got - model(ctx, *given)).abs().max())}"


@pytest.mark.parametrize("model", [large, powers, shifted, repeated])
def test_ranks_that_compute_with_numbers_of_their_own_are_told(model) -> None:
    for told in world(2).run(own_numbers, model, limit_s=180):
        assert "came with a2a_lse_reduce" in told
