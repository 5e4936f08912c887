"""Compiled models on real ranks whose gathered query is overwritten behind the merge.

CPUs have no views of a workspace. Here they get one that is as bad as it may be: one
place for all T, which holds NaN as soon as the merge has run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from dcp_inductor.runtime import shm_exchange
from tests.distributed.test_pass_ranks import (
    MOVERS,
    attend,
    context,
    expected,
    inputs,
    layer,
    options,
)
from tests.formulations import family_a
from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.support import fresh_group, world


@contextmanager
def one_place() -> Iterator[list[int]]:
    """Let view gathers write to one buffer; yields the sizes of the views made."""
    place = torch.full((4096,), torch.nan)
    made: list[int] = []
    gather, combine = shm_exchange.q_gather, shm_exchange.a2a_lse_reduce

    def view(*args: Any) -> Any:
        fresh = gather(*args)
        assert isinstance(fresh, Tensor)
        made.append(fresh.numel())
        return place[: fresh.numel()].copy_(fresh.flatten()).view(fresh.shape)

    def merge(*args: Any, **kwargs: Any) -> Any:
        result = combine(*args, **kwargs)
        place.fill_(torch.nan)
        return result

    shm_exchange.q_gather_view, shm_exchange.a2a_lse_reduce = view, merge
    try:
        yield made
    finally:
        shm_exchange.q_gather_view, shm_exchange.a2a_lse_reduce = gather, combine


def whole_of(size: int, tokens: int, step: int) -> tuple[Tensor, Tensor]:
    """Query and keys of all ranks."""
    parts = [inputs(r, tokens, step) for r in range(size)]
    query = torch.cat([part["query"] for part in parts], 1).double()
    return query, torch.cat([part["keys"] for part in parts]).double()


def twice(ctx: Context, query: Tensor, keys: Tensor, aside: Tensor) -> tuple:
    """Two layers; what both queries are made of lives on behind both merges."""
    first, total = layer(ctx, query, keys, aside)
    whole = sp.ag(ctx, torch.tanh(query), 1)
    merged = family_a.merge(ctx, *attend(whole * 2, keys))
    return first, total, torch.cos(query) + merged


def late(ctx: Context, query: Tensor, keys: Tensor, aside: Tensor) -> tuple:
    """Reads the query again behind the merge, so that it has to be a copy."""
    whole = sp.ag(ctx, query, 1)
    merged = family_a.merge(ctx, *attend(whole, keys))
    own = merged.flatten(1).sin() + whole.mean()
    return sp.ar(ctx, own), sp.ar(ctx, aside * 2) + 1


MODELS = {"layer": (layer, 1), "twice": (twice, 2), "late": (late, 0)}


def wanted(which: str, size: int, rank: int, tokens: int, step: int) -> list[Tensor]:
    """What the model must give: all shards in one process."""
    summed, total = expected(size, rank, tokens, step)
    query, keys = whole_of(size, tokens, step)
    if which == "late":
        return [summed + size * query.mean(), total]
    merged = attend(torch.tanh(query) * 2, keys)[0].chunk(size, 1)[rank]
    third = torch.cos(query).chunk(size, 1)[rank] + merged
    return [summed, total, third][: 3 if which == "twice" else 2]


def steps(rank: int, size: int, which: str, moved: bool) -> tuple[float, list[int]]:
    """Worst difference over steps of changing size, and the views made per step."""
    torch._dynamo.reset()
    counters.clear()
    ctx = context(rank, size, fresh_group(size))
    model, _ = MODELS[which]
    compiled = torch.compile(
        lambda *args: model(ctx, *args), backend="dcp_inductor",
        options=options(**MOVERS) if moved else {},
    )  # fmt: skip
    worst, views = 0.0, []
    with torch.no_grad(), one_place() as made:
        for step, tokens in enumerate([3, 5, 2, 7, 3, 11, 4, 3]):
            given = inputs(rank, tokens, step)
            for name in ("query", "aside"):
                torch._dynamo.mark_dynamic(given[name], 0)
            got = compiled(*given.values())
            want = wanted(which, size, rank, tokens, step)
            for one, other in zip(got, want, strict=True):
                difference = float((one - other).abs().max())
                worst = max(worst, math.inf if math.isnan(difference) else difference)
            views.append(len(made))
            made.clear()
    return worst, views


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("which", MODELS)
def test_nothing_reads_the_query_behind_the_merge(which: str, moved: bool) -> None:
    for worst, views in world(2).run(steps, which, moved, limit_s=240):
        assert worst < 1e-5
        assert views == [MODELS[which][1]] * 8
