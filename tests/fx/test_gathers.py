"""Gathers: which are exact, what each becomes, and which only look like one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx

from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.formulations.tracing import DYNAMIC, STATIC
from tests.fx.sketch import HEADS_PER_RANK, Model, deviation, passed


def per_rank(world_size: int, *shape: int, dtype: torch.dtype = torch.float32) -> list:
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator) * 4 for _ in range(world_size)]
    return [[x.to(dtype)] for x in values]


def exact(
    fn: Model, inputs: Sequence[Sequence[Tensor]], op: str, *, form: str = STATIC
) -> fx.Node:
    """Rewritten to ``op`` on every rank and equal to the last bit; the op's node."""
    after, error = deviation(fn, inputs, form=form)
    assert [each.calls() for each in after] == [[op]] * len(after)
    assert error == 0.0
    (node,) = [n for n in after[0].graph.nodes if op in str(n.target)]
    return node


def heads_joined(ctx: Context, query: Tensor) -> Tensor:
    return sp.ag(ctx, query, 1)


def heads_by_view(ctx: Context, query: Tensor) -> Tensor:
    return sp.stack_view(ctx, query).movedim(0, 1).flatten(1, 2)


def heads_by_chunks(ctx: Context, query: Tensor) -> Tensor:
    return torch.cat(sp.ag(ctx, query, 0).chunk(ctx.world_size, 0), 1)


def heads_flattened(ctx: Context, query: Tensor) -> Tensor:
    flat = sp.ag(ctx, query.flatten(1), 1)
    return flat.view(query.shape[0], -1, query.shape[2])


def heads_in_zeros(ctx: Context, query: Tensor) -> Tensor:
    slots = query.new_zeros((ctx.world_size, *query.shape))
    slots[ctx.rank] = query
    return sp.ar(ctx, slots).movedim(0, 1).flatten(1, 2)


SPELLINGS = [
    heads_joined, heads_by_view, heads_by_chunks, heads_flattened, heads_in_zeros,
]  # fmt: skip


@pytest.mark.parametrize("form", [STATIC, DYNAMIC])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("fn", SPELLINGS)
def test_query_heads(fn: Model, world_size: int, form: str) -> None:
    inputs = per_rank(world_size, 3, HEADS_PER_RANK, 8)
    node = exact(fn, inputs, "q_gather", form=form)
    heads = node.meta["val"][0].shape[1]
    assert heads == world_size * HEADS_PER_RANK


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8],
)
def test_any_dtype_goes_through_bit_by_bit(dtype: torch.dtype) -> None:
    inputs = per_rank(2, 3, HEADS_PER_RANK, 8, dtype=dtype)
    exact(heads_joined, inputs, "q_gather")


@pytest.mark.parametrize("form", [STATIC, DYNAMIC])
def test_rows(form: str) -> None:
    exact(lambda ctx, x: sp.ag(ctx, x), per_rank(2, 5, 6), "kv_gather", form=form)


def test_rows_that_are_dealt_out_in_turn() -> None:
    def in_turn(ctx: Context, rows: Tensor) -> Tensor:
        return sp.stack_view(ctx, rows).transpose(0, 1).reshape(-1, rows.shape[1])

    # One row of each rank in turn: in the op's terms, one-row heads.
    exact(in_turn, per_rank(2, 5, 6), "q_gather")


def test_flat_buffer() -> None:
    exact(lambda ctx, x: sp.ag(ctx, x) * 1.0, per_rank(2, 24), "kv_gather")


@pytest.mark.parametrize("form", [STATIC, DYNAMIC])
def test_one_head_a_rank_is_gathered_in_whole_rows(form: str) -> None:
    """A GPU moves rows of 16 bytes and more; elements would take the collective."""
    call = exact(heads_joined, per_rank(2, 3, 1, 8), "q_gather", form=form)
    assert call.args[0].meta["val"].shape[1:] == (1, 8)


def test_name_of_a_gathered_vector_is_free_of_its_size() -> None:
    """Ranks meet under it, of which one may have a static graph of its own size."""

    def vector(ctx: Context, x: Tensor) -> Tensor:
        return sp.ag(ctx, x) * 1.0

    given = (24, STATIC), (30, STATIC), (24, DYNAMIC)
    sites = [passed(vector, per_rank(2, n)[1], form=form).only for n, form in given]
    assert {site.op for site in sites} == {"kv_gather"}
    assert len({site.site for site in sites}) == 1


def test_coalesced_gathers_are_judged_one_by_one() -> None:
    def both(ctx: Context, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        got = sp.all_gather_coalesced([query, rows], ctx.group_name)
        return got[0] * 1.0, got[1] * 1.0

    tensors = [torch.randn(3, HEADS_PER_RANK, 8), torch.randn(5, 6)]
    after = passed(both, tensors)
    assert after.calls() == ["kv_gather", "kv_gather"]
    assert after.counts == {"found": 2, "rewritten": 2}


def test_gather_with_two_readers_in_different_layouts() -> None:
    def both(ctx: Context, query: Tensor) -> tuple[Tensor, Tensor]:
        whole = sp.ag(ctx, query, 1)
        return whole * 2, whole.transpose(0, 1).contiguous() * 3

    exact(both, per_rank(2, 3, HEADS_PER_RANK, 8), "q_gather")


# What is no gather of the whole.


def test_sum_of_full_slots_is_no_gather() -> None:
    """Ones where a gather has zeros: every slot gets something of every rank."""

    def model(ctx: Context, query: Tensor) -> Tensor:
        slots = query.new_ones((ctx.world_size, *query.shape))
        slots[ctx.rank] = query
        return sp.ar(ctx, slots)

    after = passed(model, per_rank(2, 3, HEADS_PER_RANK, 8)[1])
    assert after.unchanged


def test_slot_of_another_rank_is_not_taken_for_the_own() -> None:
    """Every rank writes slot 0: a sum of the ranks, and zeros."""

    def model(ctx: Context, query: Tensor) -> Tensor:
        slots = query.new_zeros((ctx.world_size, *query.shape))
        slots[0] = query
        return sp.ar(ctx, slots)

    for rank in (1, 0):
        after = passed(model, per_rank(2, 3, HEADS_PER_RANK, 8)[rank], rank=rank)
        if rank:
            assert after.unchanged, after.sites
        # Rank 0's graph is that of a gather; rank 1's is not, and they must not mix.


@pytest.mark.parametrize("op", ["max", "avg"])
def test_other_reductions_of_slots(op: str) -> None:
    def model(ctx: Context, query: Tensor) -> Tensor:
        slots = query.new_zeros((ctx.world_size, *query.shape))
        slots[ctx.rank] = query
        return sp.ar(ctx, slots, op)

    assert passed(model, per_rank(2, 3, HEADS_PER_RANK, 8)[1]).unchanged


def test_boolean_rows_are_left_alone() -> None:
    rows = [torch.zeros(5, 6, dtype=torch.bool)]
    after = passed(lambda ctx, x: sp.ag(ctx, x) & True, rows)
    assert after.calls() == ["all_gather_into_tensor"]


def test_gather_that_computes_on_what_it_gathered() -> None:
    """Only the stack is a gather; what is made of it stays as it is."""

    def model(ctx: Context, rows: Tensor) -> Tensor:
        return torch.sin(sp.stack_view(ctx, rows)).sum(0)

    after, error = deviation(model, per_rank(2, 5, 6))
    assert [each.calls() for each in after] == [["kv_gather"]] * 2
    assert error < 1e-6
