"""Properties of the LSE merge: of the reference, and of the compiled one against it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dcp_inductor import extension, launch_ops, reference
from dcp_inductor.runtime import layout
from tests.support import VirtualRanks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EMPTY = (-math.inf, math.inf, math.nan)

lse_values = st.one_of(
    st.floats(-60, 60, width=32), st.sampled_from(EMPTY), st.floats(-1e4, 1e4, width=32)
)


@st.composite
def shards(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> tuple:
    """N shards of one token: outputs [N, 1, H, D], LSEs [N, 1, H]."""
    num_shards = draw(st.integers(1, 6))
    heads = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([1, 7, 64, 130]))
    values = st.lists(
        lse_values, min_size=num_shards * heads, max_size=num_shards * heads
    )
    lses = torch.tensor(draw(values)).view(num_shards, 1, heads)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    outputs = torch.randn(num_shards, 1, heads, head_dim, generator=generator)
    outputs = outputs.to(draw(st.sampled_from(dtypes)))
    # Behind an empty shard there may be anything.
    empty = ~(lses < math.inf) | lses.isneginf()
    outputs[empty] = draw(st.sampled_from([math.nan, math.inf, 0.0]))
    return outputs, lses


def dense(outputs: Tensor, lses: Tensor, base_e: bool) -> tuple[Tensor, Tensor]:
    """The merge written another way: one softmax over the shards, in fp64."""
    factor = 1.0 if base_e else math.log(2.0)
    lses = torch.where(lses < math.inf, lses.double() * factor, -math.inf)
    total = torch.logsumexp(lses, 0)
    weights = torch.softmax(lses, 0).nan_to_num(0.0).unsqueeze(-1)
    payload = torch.where(weights > 0, outputs.double(), 0.0)
    return (weights * payload).sum(0), total / factor


def close(
    got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], tol: float
) -> None:
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=tol, rtol=tol)


@given(shards(), st.booleans())
def test_reference_is_a_softmax_over_shards(
    case: tuple[Tensor, Tensor], base_e: bool
) -> None:
    outputs, lses = case
    # A weight that is nothing in fp32 and something in fp64 has a payload of size 1.
    close(reference.merge(outputs, lses, base_e), dense(outputs, lses, base_e), 2e-5)


@given(shards((torch.float64,)), st.booleans(), st.data())
def test_merging_in_any_grouping_gives_the_same(
    case: tuple[Tensor, Tensor], base_e: bool, data: st.DataObject
) -> None:
    outputs, lses = case
    lses = lses.double()
    whole = reference.merge(outputs, lses, base_e)
    cut = data.draw(st.integers(0, outputs.shape[0]))
    groups = [
        reference.merge(outputs[part], lses[part], base_e)
        for part in (slice(0, cut), slice(cut, None))
        if len(range(outputs.shape[0])[part])
    ]
    nested = reference.merge(*map(list, zip(*groups, strict=True)), base_e)
    close(nested, whole, 1e-12)


@given(shards(), st.booleans(), st.data())
def test_empty_shards_change_nothing(
    case: tuple[Tensor, Tensor], base_e: bool, data: st.DataObject
) -> None:
    outputs, lses = case
    at = data.draw(st.integers(0, outputs.shape[0]))
    payload = torch.full_like(outputs[:1], math.nan)
    lse = torch.full_like(lses[:1], data.draw(st.sampled_from(EMPTY)))
    wider = reference.merge(
        torch.cat([outputs[:at], payload, outputs[at:]]),
        torch.cat([lses[:at], lse, lses[at:]]),
        base_e,
    )
    plain = reference.merge(outputs, lses, base_e)
    assert all(torch.equal(x, y) for x, y in zip(wider, plain, strict=True))


@given(shards(), st.booleans())
def test_a_single_shard_with_weight_comes_back_unchanged(
    case: tuple[Tensor, Tensor], base_e: bool
) -> None:
    outputs, lses = case
    merged, lse = reference.merge(outputs[:1], lses[:1], base_e)
    usable = lses[0] < math.inf
    usable &= ~lses[0].isneginf()
    assert torch.equal(merged[usable], outputs[0][usable].to(merged.dtype))
    assert torch.equal(lse[usable], lses[0][usable])
    assert merged[~usable].count_nonzero() == 0
    assert lse[~usable].isneginf().all()


@given(shards(), st.data())
def test_nan_payload_shows_exactly_where_its_shard_has_weight(
    case: tuple[Tensor, Tensor], data: st.DataObject
) -> None:
    outputs, lses = case
    shard = data.draw(st.integers(0, outputs.shape[0] - 1))
    clean = torch.where(outputs.isfinite(), outputs, 0.0)
    clean[shard] = math.nan
    merged, lse = reference.merge(clean, lses)
    usable = (lses[shard] < math.inf) & ~lses[shard].isneginf()
    share = torch.exp(lses[shard] - lse).nan_to_num(0.0)
    certain = usable & (share > 1e-30)
    assert merged[certain].isnan().all()
    assert not merged[~usable].isnan().any()


# --- the compiled merge ----------------------------------------------------------


def compiled(
    outputs: Tensor, lses: Tensor, base_e: bool, output_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Merge by csrc/cpu, all of it on virtual rank 0."""
    num_shards, tokens, heads, head_dim = outputs.shape
    row_bytes = head_dim * outputs.element_size()
    needed = layout.combine_slot_bytes(tokens, heads, row_bytes)
    ranks = VirtualRanks(num_shards, layout.arena_slot_bytes(needed))
    merged = torch.empty(num_shards, tokens, heads, head_dim, dtype=output_dtype)
    lse = torch.empty(num_shards, tokens, heads)
    words = torch.zeros(layout.SIGNATURE_BYTES, dtype=torch.uint8)

    def launch(rank: int, resume: bool) -> int:
        return launch_ops.shm_a2a_lse_reduce(
            outputs[rank], lses[rank], None, None, merged[rank], lse[rank],
            ranks.tables[rank], words, [0, tokens, 0, heads], True, base_e, False,
            resume,
        )  # fmt: skip

    assert set(ranks.launch(launch)) == {launch_ops.DONE}
    for rank in range(1, num_shards):
        assert torch.equal(lse[rank], lse[0])
        same = (x.contiguous().view(torch.uint8) for x in (merged[rank], merged[0]))
        assert torch.equal(*same), "ranks differ in bits"
    return merged[0], lse[0]


@pytest.fixture(scope="module")
def library() -> None:
    assert extension.load_extension() == ""


@settings(max_examples=200)
@given(shards(), st.booleans(), st.sampled_from(DTYPES))
def test_compiled_merge_equals_the_reference(
    library: None, case: tuple[Tensor, Tensor], base_e: bool, output_dtype: torch.dtype
) -> None:
    outputs, lses = case
    merged, lse = compiled(outputs, lses, base_e, output_dtype)
    exact, exact_lse = dense(outputs, lses, base_e)
    # One rounding to the output's dtype, and a few of fp32.
    tolerance = torch.finfo(output_dtype).eps / 2 + 2e-5
    torch.testing.assert_close(
        merged.double(), exact, atol=tolerance, rtol=tolerance, equal_nan=True
    )
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-5, rtol=2e-5)


def passed_through(x: Tensor, output_dtype: torch.dtype) -> Tensor:
    """A single shard of weight 1, so that only conversion is left."""
    return compiled(x.view(1, 1, 1, -1), torch.zeros(1, 1, 1), True, output_dtype)[0]


def same_values(got: Tensor, wanted: Tensor) -> None:
    got, wanted = got.view(-1), wanted.view(-1)
    assert torch.equal(got.isnan(), wanted.isnan())
    finite = ~wanted.isnan()
    assert torch.equal(got[finite], wanted[finite])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_is_widened_and_rounded_back(
    library: None, dtype: torch.dtype
) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    every = every.view(dtype)
    same_values(passed_through(every, torch.float32), every.float())
    same_values(passed_through(every, dtype), every)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_is_rounded_to_nearest_even_everywhere(
    library: None, dtype: torch.dtype
) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = every.view(dtype).float().view(torch.int32)
    # The value itself, the halfway point above it, and both neighbours of that.
    drop = 16 if dtype == torch.bfloat16 else 13
    half = 1 << (drop - 1)
    near = torch.cat([values + offset for offset in (0, half - 1, half, half + 1)])
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator())
    tiny = torch.logspace(-9, -4, 5000)  # fp16 subnormals, and below them
    samples = (near.view(torch.float32), bits.to(torch.int32).view(torch.float32))
    x = torch.cat([*samples, tiny, -tiny])
    # An fp32 subnormal times its weight of 1 is kept, too.
    same_values(passed_through(x, dtype), x.to(dtype))
