"""What a rewrite changes in degenerate rows: these rows, in these ways, and no others.

docs/recognition.md states the same.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.formulations import family_a
from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.formulations.lockstep import run_graphs
from tests.fx.sketch import Model, partials, rewrite, traced

ONE_EMPTY, ALL_EMPTY, ORDINARY = 0, 1, 2  # rows of the inputs below


def scrubbed(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    """NaN to zero in the weight and in the weighted product."""
    weight = sp.w_logsumexp(ctx, lse, sp.stack_view(ctx, lse)).nan_to_num(0.0)
    return sp.own(ctx, sp.ar(ctx, (output * weight[..., None]).nan_to_num(0.0)))


def inputs(sentinel: float, payload: float) -> list[list[Tensor]]:
    """Rank 1 is empty in one row, both in another."""
    given = [[output.clone(), lse.clone()] for output, lse in partials(2)]
    given[1][0][ONE_EMPTY], given[1][1][ONE_EMPTY] = payload, sentinel
    for output, lse in given:
        output[ALL_EMPTY], lse[ALL_EMPTY] = payload, sentinel
    return given


def before_and_after(
    fn: Model, given: list[list[Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    graphs = [traced(fn, partials(2)[rank], rank=rank) for rank in range(2)]
    modules = [rewrite(graph).module for graph in graphs]
    before = run_graphs(graphs, [graph.original for graph in graphs], given)
    after = run_graphs(graphs, modules, given)
    return [x[0] for x in before], [x[0] for x in after]


def own_heads(x: Tensor, rank: int) -> Tensor:
    return x.chunk(2, -2)[rank]


@pytest.mark.parametrize("sentinel", [-math.inf, math.inf])
@pytest.mark.parametrize("payload", [0.0, math.nan])
def test_rows_that_were_nan_become_finite(sentinel: float, payload: float) -> None:
    given = inputs(sentinel, payload)
    before, after = before_and_after(family_a.merge, given)
    for rank in range(2):
        if sentinel > 0 or math.isnan(payload):
            assert before[rank][ONE_EMPTY].isnan().all()
        full_shard = own_heads(given[0][0][ONE_EMPTY], rank)
        torch.testing.assert_close(after[rank][ONE_EMPTY], full_shard)
        assert before[rank][ALL_EMPTY].isnan().all()
        assert (after[rank][ALL_EMPTY] == 0).all()
        torch.testing.assert_close(after[rank][ORDINARY], before[rank][ORDINARY])


def test_sentinel_of_plus_infinity_no_longer_wipes_a_row_out() -> None:
    """The graph scrubs the row to 0; the op gives what the full shard has."""
    given = inputs(math.inf, 0.0)
    before, after = before_and_after(scrubbed, given)
    for rank in range(2):
        assert (before[rank][ONE_EMPTY] == 0).all()
        full_shard = own_heads(given[0][0][ONE_EMPTY], rank)
        torch.testing.assert_close(after[rank][ONE_EMPTY], full_shard)
        assert (after[rank][ALL_EMPTY] == 0).all()
        torch.testing.assert_close(after[rank][ORDINARY], before[rank][ORDINARY])


def test_nan_of_a_shard_that_has_weight_stays() -> None:
    """Also where the graph scrubbed it: it is a sign of an error, not of padding."""
    given = inputs(-math.inf, 0.0)
    given[0][0][ORDINARY] = math.nan
    for fn, was_nan in ((family_a.merge, True), (scrubbed, False)):
        before, after = before_and_after(fn, given)
        for rank in range(2):
            assert bool(before[rank][ORDINARY].isnan().all()) is was_nan
            assert after[rank][ORDINARY].isnan().all()
