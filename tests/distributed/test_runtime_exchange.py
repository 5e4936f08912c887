"""The direct exchanges of real processes against the reference and an fp64 oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dcp_inductor import geometry, ops, reference
from dcp_inductor.geometry import MergeOptions
from dcp_inductor.runtime import registry
from tests.support import fallbacks, group_name, world

T, H, D = 6, 8, 72  # D is not a multiple of a vector
TOKEN = torch.empty(0)
WORLDS = (2, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def shards(
    world_size: int, dtype: torch.dtype, tokens: int = T, heads: int = H, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Outputs [N, T, H, D] and skewed LSEs [N, T, H], some shards empty, on all
    ranks."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(world_size, tokens, heads, D, generator=generator).to(dtype)
    lses = 4 * torch.randn(world_size, tokens, heads, generator=generator)
    # Shard 0 is empty in token 0, under each spelling; what it holds there is garbage.
    lses[0, 0] = -torch.inf
    lses[0, 0, 1] = torch.nan
    lses[0, 0, 2] = torch.inf
    outputs[0, 0] = torch.nan
    # Row (1, 0) is empty everywhere; (2, 0) has a weight that underflows to nothing.
    lses[:, 1, 0] = -torch.inf
    lses[0, 2, 0] = -2000
    lses[1:, 2, 0] = 0
    outputs[0, 2, 0] = torch.nan
    return outputs, lses


def part_of(x: Tensor, scatter: str, sizes: list[int], rank: int) -> Tensor:
    """This rank's part of a merged [T, H, ...]."""
    if scatter == "none":
        return x
    return x.split(sizes, 1 if scatter == "heads" else 0)[rank]


def oracle(outputs: Tensor, lses: Tensor, base_e: bool = True) -> tuple[Tensor, Tensor]:
    """Merged output and LSE in fp64."""
    return reference.merge(outputs.double(), lses.double(), base_e)


def check_close(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """``got`` is as near to ``exact`` as twice the error of ``plain``, where finite."""
    torch.testing.assert_close(got.isnan(), exact.isnan())
    torch.testing.assert_close(got.isneginf(), exact.isneginf())
    usable = exact.isfinite()
    error = (got.double() - exact).abs()[usable]
    allowed = 2 * (plain.double() - exact).abs()[usable].max() + 1e-6
    assert error.max() <= allowed, (error.max(), allowed)


def runs_direct(rounds: int = 1):
    """Fails unless ``rounds`` exchanges, and no fallback, happen inside."""

    class _Counting:
        def __enter__(self) -> None:
            self.before = registry.workspace_for(group_name()).epoch

        def __exit__(self, kind: object, *error: object) -> None:
            if kind is None:
                after = registry.workspace_for(group_name()).epoch
                assert after >= self.before + rounds, (self.before, after)
                assert not fallbacks()

    return _Counting()


# --- combine ---------------------------------------------------------------------


def combine_all_options(
    rank: int, world_size: int, dtype: torch.dtype, scatter: str
) -> None:
    tokens = T * world_size if scatter == "tokens" else T
    outputs, lses = shards(world_size, dtype, tokens)
    total = {"heads": H, "tokens": tokens, "none": world_size}[scatter]
    even = [total // world_size] * world_size
    uneven = [total // world_size] * world_size
    uneven[0] += 1
    uneven[-1] -= 1
    with runs_direct(4 if scatter == "none" else 8):
        for base_e in (True, False):
            exact, exact_lse = oracle(outputs, lses, base_e)
            for sizes in (even, uneven) if scatter != "none" else (even,):
                for full_lse in (False, True):
                    options = MergeOptions(
                        scatter, () if sizes == even else tuple(sizes), base_e, True,
                        full_lse,
                    )  # fmt: skip
                    got, got_lse, token = ops.a2a_lse_reduce(
                        outputs[rank], lses[rank], TOKEN, group_name(),
                        **options._asdict(),
                    )  # fmt: skip
                    plain, plain_lse = reference.a2a_lse_reduce(
                        outputs[rank], lses[rank], group_name(), options
                    )
                    mine = part_of(exact, scatter, sizes, rank)
                    assert got.shape == mine.shape
                    assert got.dtype == dtype
                    assert got.is_contiguous()
                    assert token.shape == TOKEN.shape
                    check_close(got, plain, mine)
                    mine_lse = exact_lse
                    if not full_lse:
                        mine_lse = part_of(exact_lse, scatter, sizes, rank)
                    assert got_lse.dtype == torch.float32
                    check_close(got_lse, plain_lse, mine_lse)


@pytest.mark.parametrize("scatter", geometry.SCATTER_MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", WORLDS)
def test_combine_equals_oracle(size: int, dtype: torch.dtype, scatter: str) -> None:
    world(size).run(combine_all_options, dtype, scatter)


def combine_output_dtypes(rank: int, world_size: int) -> None:
    for dtype in DTYPES:
        outputs, lses = shards(world_size, dtype)
        exact = oracle(outputs, lses)[0].chunk(world_size, 1)[rank]
        for output_dtype in DTYPES:
            with runs_direct():
                got = ops.a2a_lse_reduce(
                    outputs[rank],
                    lses[rank],
                    TOKEN,
                    group_name(),
                    output_dtype=output_dtype,
                )[0]
            assert got.dtype == output_dtype
            check_close(got, exact.to(output_dtype), exact)


def test_output_dtype_is_rounded_once() -> None:
    world(2).run(combine_output_dtypes)


def combine_strided(rank: int, world_size: int) -> None:
    outputs, lses = shards(world_size, torch.bfloat16)
    cap = T + 5
    payload, lse = outputs[rank], lses[rank]
    head_major = torch.full((H, cap, D), torch.nan, dtype=payload.dtype)
    layouts = {
        "head-major": head_major[:, :T].transpose(0, 1),
        "more rows": torch.full((cap, H, D), torch.nan).to(payload.dtype)[:T],
        "more heads": torch.full((T, H + 2, D), torch.nan).to(payload.dtype)[:, :H],
        "offset": torch.empty(T * H * D + 1, dtype=payload.dtype)[1:].view(T, H, D),
        "transposed rows": torch.empty(D, H, T, dtype=payload.dtype).permute(2, 1, 0),
        "every other": torch.empty(T, H, 2 * D, dtype=payload.dtype)[..., ::2],
    }
    lse_layouts = (torch.empty(H, T).t(), torch.empty(T, 2 * H)[:, ::2])
    exact = oracle(outputs, lses)[0].chunk(world_size, 1)[rank]
    plain = exact.bfloat16()
    for name, layout in layouts.items():
        layout.copy_(payload)
        for lse_layout in lse_layouts:
            lse_layout.copy_(lse)
            with runs_direct():
                got = ops.a2a_lse_reduce(layout, lse_layout, TOKEN, group_name())[0]
            try:
                check_close(got, plain, exact)
            except AssertionError as error:
                raise AssertionError(name) from error


def test_strides_and_offsets_are_honoured() -> None:
    world(2).run(combine_strided)


def combine_lse_dtypes(rank: int, world_size: int) -> None:
    # Two shards with LSE 10 and 7: 0.9526 and 0.0474 in base e, 0.8889 and 0.1111 in 2.
    lse = torch.full((1, 2), 10.0 if rank == 0 else 7.0)
    payload = torch.full((1, 2, 4), 1.0 if rank == 0 else 0.0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for base_e, share in ((True, 0.952574), (False, 0.888889)):
            with runs_direct():
                got = ops.a2a_lse_reduce(
                    payload,
                    lse.to(dtype),
                    TOKEN,
                    group_name(),
                    is_lse_base_on_e=base_e,
                )[0]
            torch.testing.assert_close(got, torch.full_like(got, share))
    with pytest.raises(ValueError, match="expected a floating-point partial_lse"):
        ops.a2a_lse_reduce(payload, lse.to(torch.int32), TOKEN, group_name())


def test_lse_of_any_float_dtype_is_converted() -> None:
    world(2).run(combine_lse_dtypes)


def combine_degenerate(rank: int, world_size: int, index_dtype: torch.dtype) -> None:
    lengths = [[0, 5, 0, 1], [0, 3, 2, 0]][rank]
    rows, padding = 8, 3
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(2, rows + padding, H, D, generator=generator)
    lses = torch.randn(2, rows + padding, H, generator=generator)
    outputs[:, rows:] = torch.nan
    lses[:, rows:] = torch.nan
    exact_lses = lses.clone()
    for shard, local in enumerate([[0, 5, 0, 1], [0, 3, 2, 0]]):
        for sequence, length in enumerate(local):
            if length == 0:
                at = slice(2 * sequence, 2 * sequence + 2)
                exact_lses[shard, at] = -torch.inf
                # What attention leaves behind without KV is garbage of any kind.
                outputs[shard, at] = torch.nan
                lses[shard, at] = 1e9
    exact, exact_lse = oracle(outputs, exact_lses)
    # New metadata objects on each step, as schedulers make them.
    for _ in range(2):
        with runs_direct():
            got, lse, _ = ops.a2a_lse_reduce(
                outputs[rank],
                lses[rank],
                TOKEN,
                group_name(),
                return_lse=True,
                seq_lens=torch.tensor(lengths, dtype=index_dtype),
                query_start_loc=torch.tensor([0, 2, 4, 6, 8], dtype=index_dtype),
            )
        mine = exact.chunk(2, 1)[rank]
        check_close(got, mine.float(), mine)
        check_close(
            lse, exact_lse.chunk(2, 1)[rank].float(), exact_lse.chunk(2, 1)[rank]
        )
        assert got[rows:].count_nonzero() == 0
        assert got[:2].count_nonzero() == 0
        assert lse[:2].isneginf().all()
        assert lse[rows:].isneginf().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16], ids=str)
def test_rows_without_local_kv_and_padding_are_empty(dtype: torch.dtype) -> None:
    world(2).run(combine_degenerate, dtype)


def combine_nan_payload(rank: int, world_size: int) -> None:
    outputs, lses = shards(world_size, torch.float32)
    outputs[1, 3, :, 5] = torch.nan
    lses[:, 3] = 0.0
    got = ops.a2a_lse_reduce(
        outputs[rank], lses[rank], TOKEN, group_name(), scatter="none"
    )[0]
    wanted = torch.zeros_like(got, dtype=torch.bool)
    wanted[3, :, 5] = True
    torch.testing.assert_close(got.isnan(), wanted)


def test_nan_payload_of_a_shard_with_weight_stays() -> None:
    world(2).run(combine_nan_payload)


def chained_merges(rank: int, world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    noise = 0.04 * torch.randn(world_size, 1, 4, 64, generator=generator)
    lses = torch.randn(world_size, 1, 4, generator=generator)
    x, exact = torch.zeros(1, 4, 64).bfloat16(), torch.zeros(1, 4, 64).double()
    with runs_direct(2000):
        for _ in range(2000):
            partial = (0.5 * x.float() + noise[rank]).bfloat16()
            x = ops.a2a_lse_reduce(
                partial, lses[rank], TOKEN, group_name(), scatter="none"
            )[0]
            exact = oracle(0.5 * exact + noise.double(), lses)[0]
    torch.testing.assert_close(x.double(), exact, atol=2e-3, rtol=0)
    return x


def test_two_thousand_merges_stay_exact_and_repeat_bit_for_bit() -> None:
    first = world(2).run(chained_merges)
    again = world(2).run(chained_merges)
    for x in (*first, *again):
        assert torch.equal(x.view(torch.int16), first[0].view(torch.int16))


# --- gathers ---------------------------------------------------------------------

GATHER_DTYPES = (
    *DTYPES,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
)


def random_bytes(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Every bit pattern of a dtype, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(
        256, (*shape[:-1], shape[-1] * width), generator=generator, dtype=torch.uint8
    )
    return raw.view(dtype)


def same_bits(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    assert got.is_contiguous()
    flat = (x.contiguous().view(-1).view(torch.uint8) for x in (got, wanted))
    assert torch.equal(*flat)


def gather_bits(rank: int, world_size: int) -> None:
    heads = 3
    for dtype in GATHER_DTYPES:
        for width in (576, 7, 1):
            of = [
                random_bytes(T, heads, width, dtype=dtype, seed=r)
                for r in range(world_size)
            ]
            wanted = torch.cat(of, 1)
            with runs_direct(4):
                got = ops.q_gather(of[rank], TOKEN, group_name())[0]
                padded = ops.q_gather(
                    of[rank], TOKEN, group_name(), padded_heads=wanted.shape[1] + 3
                )[0]
                rows = ops.kv_gather(of[rank], TOKEN, group_name())[0]
                flat = ops.kv_gather(of[rank][:, 0, 0], TOKEN, group_name())[0]
            same_bits(got, wanted)
            same_bits(padded[:, : wanted.shape[1]].contiguous(), wanted)
            assert not padded[:, wanted.shape[1] :].contiguous().view(torch.uint8).any()
            same_bits(rows, torch.cat(of, 0))
            same_bits(flat, torch.cat([x[:, 0, 0] for x in of]))
            same_bits(got, reference.q_gather(of[rank], group_name()))
            same_bits(rows, reference.kv_gather(of[rank], group_name()))


@pytest.mark.parametrize("size", WORLDS)
def test_gathers_move_every_dtype_bit_for_bit(size: int) -> None:
    world(size).run(gather_bits)


def gather_strided(rank: int, world_size: int) -> None:
    of = [torch.randn(T, 3, 20) + r for r in range(world_size)]
    layouts = (
        torch.empty(3, T, 20).transpose(0, 1),
        torch.empty(T, 5, 20)[:, 1:4],
        torch.empty(T, 3, 64)[..., 7:27],
        torch.empty(20, 3, T).permute(2, 1, 0),
    )
    for layout in layouts:
        layout.copy_(of[rank])
        with runs_direct(2):
            same_bits(ops.q_gather(layout, TOKEN, group_name())[0], torch.cat(of, 1))
            same_bits(ops.kv_gather(layout, TOKEN, group_name())[0], torch.cat(of, 0))


def test_gathers_honour_strides() -> None:
    world(2).run(gather_strided)


def two_gathers(rank: int, world_size: int) -> None:
    import time

    for step in range(20):
        time.sleep(0.002 * ((step + rank) % 2))
        first = ops.q_gather(torch.full((2, 1, 8), 1.0 + rank), TOKEN, group_name())[0]
        second = ops.q_gather(torch.full((2, 1, 8), 9.0 + rank), TOKEN, group_name())[0]
        third = ops.q_gather(torch.full((2, 1, 8), 5.0 + rank), TOKEN, group_name())[0]
        for got, start in ((first, 1.0), (second, 9.0), (third, 5.0)):
            wanted = start + torch.arange(world_size, dtype=torch.float32)
            assert torch.equal(got, wanted.view(1, -1, 1).expand_as(got)), (step, got)


def test_gathers_without_a_combine_between_them_keep_their_results() -> None:
    world(2).run(two_gathers)
