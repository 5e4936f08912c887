"""Every op over symmetric memory, between real processes, against an oracle that knows
all ranks' inputs; eager, captured and replayed.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dcp_inductor
from dcp_inductor import config, ops, reference
from dcp_inductor.bench.variants import one_kernel_for_all
from dcp_inductor.capability import Refusal
from dcp_inductor.errors import DCPError
from dcp_inductor.runtime import cuda_registry
from tests.cuda import worlds
from tests.cuda.worlds import TOKEN, draw
from tests.support import fallbacks, fresh_group

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]
SIZES = [2, 4, 8]


def oracle(outputs, lses, scatter, splits, rank, is_base_e=True):
    """fp64 merge of all ranks' ``[N, T, H, D]``, and what of it lands on ``rank``."""
    merged, lse = reference.merge(outputs.double(), lses.double(), is_base_e)
    if scatter == "none":
        return merged, lse
    dim = 1 if scatter == "heads" else 0
    size = outputs.shape[0]
    splits = splits or [lse.shape[dim] // size] * size
    return merged.split(splits, dim)[rank], lse.split(splits, dim)[rank]


def close(got, exact, dtype):
    """Whether ``got`` is ``exact`` to within a rounding of ``dtype`` or fp32 noise."""
    bound = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}[dtype]
    torch.testing.assert_close(
        got.double(), exact, rtol=bound, atol=1e-5, equal_nan=True
    )


def with_empty_shards(lses):
    """Some LSEs as the field writes an empty shard, one row empty on all ranks."""
    lses = lses.clone()
    lses[0, 0] = -torch.inf
    lses[-1, -1] = torch.nan
    lses[0, -1, -1] = torch.inf
    lses[:, 0, 1] = -torch.inf
    return lses


def combine_cases(rank: int, size: int) -> None:
    name = worlds.name()
    cases = [
        # tokens, heads a rank, D, dtype, LSE dtype, scatter, splits, base e, output
        (1, 4, 512, torch.bfloat16, torch.float32, "heads", None, True, None),
        (5, 16, 512, torch.bfloat16, torch.bfloat16, "heads", None, False, None),
        (3, 2, 72, torch.float16, torch.float16, "heads", "uneven", True, None),
        (size, 3, 64, torch.float32, torch.float64, "tokens", None, True, None),
        (4, 2, 128, torch.bfloat16, torch.float32, "none", None, True, torch.float32),
        (96, 16, 512, torch.bfloat16, torch.float32, "heads", None, True, None),
    ]
    for i, case in enumerate(cases):
        heads, splits = case[1], []
        if case[6]:
            splits = [0, *[heads] * (size - 2), 2 * heads]
        check_combine(name, rank, size, i, case, heads * size, splits)
    assert not fallbacks(), fallbacks()


def check_combine(name, rank, size, seed, case, total, splits):
    """The merge of a case with ``total`` heads, its LSE, and the LSE of all of it."""
    tokens, _, dim, dtype, lse_dtype, scatter, _, base_e, to = case
    outputs = draw(seed, size, tokens, total, dim, dtype=dtype)
    lses = with_empty_shards(4 * draw(50 + seed, size, tokens, total)).to(lse_dtype)
    outputs[(lses.float() == -torch.inf) | lses.isnan() | lses.isposinf()] = torch.nan
    got, lse, _ = ops.a2a_lse_reduce(
        outputs[rank], lses[rank], TOKEN, name, scatter=scatter, split_sizes=splits,
        is_lse_base_on_e=base_e, return_lse=True, output_dtype=to,
    )  # fmt: skip
    exact, exact_lse = oracle(outputs, lses, scatter, splits, rank, base_e)
    close(got, exact, to or dtype)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
    full = ops.a2a_lse_reduce(
        outputs[rank], lses[rank], TOKEN, name, scatter=scatter, split_sizes=splits,
        is_lse_base_on_e=base_e, return_lse=True, full_lse=True, output_dtype=to,
    )[1]  # fmt: skip
    whole = oracle(outputs, lses, "none", None, rank, base_e)[1]
    torch.testing.assert_close(full.double(), whole, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_combine_equals_the_oracle(size: int) -> None:
    worlds.run(size, combine_cases)


def tiled_cases(rank: int, size: int) -> None:
    """The kernel for more than the marked words serve; parts that differ by one."""
    cases = [
        (1, 2, 512, torch.bfloat16, torch.float32, "heads", "uneven", True, None),
        (37, 3, 576, torch.bfloat16, torch.bfloat16, "heads", "uneven", False, None),
        (5, 2, 72, torch.float16, torch.float16, "heads", None, True, None),
        (2 * size + 1, 3, 64, torch.float32, torch.float64, "tokens", "uneven", True,
         None),
        (7, 2, 128, torch.bfloat16, torch.float32, "none", None, True, torch.float32),
        (201, 5, 512, torch.bfloat16, torch.float32, "heads", "uneven", True, None),
    ]  # fmt: skip
    name = fresh_group(size).group_name
    with one_kernel_for_all("tiled"):
        for i, case in enumerate(cases):
            uneven, of_tokens = bool(case[6]), case[5] == "tokens"
            heads = case[1] * size + (uneven and not of_tokens)
            each, more = divmod(case[0] if of_tokens else heads, size)
            splits = [each] * (size - 1) + [each + more] if uneven else []
            check_combine(name, rank, size, i, case, heads, splits)
        captured(rank, size, 10, name)
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = cuda_registry.workspace_for(name, device)
    assert not isinstance(workspace, Refusal)
    assert {layout.kind for layout in workspace.arenas} == {"tiled", "slices"}
    assert not fallbacks(), fallbacks()


@pytest.mark.parametrize("size", [2, pytest.param(3, id="N3")])
def test_the_tiled_combine_equals_the_oracle(size: int) -> None:
    worlds.run(size, tiled_cases, limit_s=300)


def layouts(rank: int, size: int) -> None:
    name = worlds.name()
    tokens, heads, dim = 3, 2 * size, 64
    outputs = draw(7, size, tokens, heads, dim, dtype=torch.bfloat16)
    lses = draw(8, size, tokens, heads)
    exact = oracle(outputs, lses, "heads", None, rank)[0]
    mine, lse = outputs[rank], lses[rank]
    head_major = torch.empty(heads, 8, dim, device="cuda", dtype=mine.dtype)
    head_major = head_major[:, :tokens].transpose(0, 1).copy_(mine)
    capped = torch.empty(8, heads, dim, device="cuda", dtype=mine.dtype)
    capped = capped[:tokens].copy_(mine)
    wide = torch.empty(tokens, heads + 2, dim, device="cuda", dtype=mine.dtype)
    wide = wide[:, :heads].copy_(mine)
    shifted = torch.empty(mine.numel() + 1, device="cuda", dtype=mine.dtype)
    shifted = shifted[1:].view(mine.shape).copy_(mine)
    spread = torch.empty(*mine.shape, 2, device="cuda", dtype=mine.dtype)[..., 0]
    spread = spread.copy_(mine)
    transposed = lse.t().contiguous().t()

    def merge(partial, lse):
        return ops.a2a_lse_reduce(partial, lse, TOKEN, name)[0]

    torch._dynamo.reset()
    compiled = torch.compile(merge, backend="inductor", dynamic=False)
    for i, partial in enumerate((head_major, capped, wide, shifted, spread)):
        for each in (lse, transposed):
            got = merge(partial, each)
            close(got, exact, torch.bfloat16)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed = merge(partial, each)
            graph.replay()
            assert torch.equal(replayed, got)
        assert torch.equal(compiled(partial, (lse, transposed)[i % 2]), got)


def bases(rank: int, size: int) -> None:
    """Two shards with LSEs 10 and 7: what each base and dtype makes of them."""
    name = worlds.name()
    partial = torch.full((1, size, 64), float(rank == 0), device="cuda")
    for base_e, weight in ((True, 0.9526), (False, 0.8889)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            lse = torch.full((1, size), 10.0 if rank == 0 else 7.0, device="cuda")
            got = ops.a2a_lse_reduce(
                partial, lse.to(dtype), TOKEN, name, is_lse_base_on_e=base_e
            )[0]
            assert (got - weight).abs().max() < 1e-4, (base_e, dtype, got)
    refused = ops.a2a_lse_reduce(
        partial, torch.zeros(1, size, device="cuda", dtype=torch.float8_e5m2), TOKEN,
        name,
    )[0]  # fmt: skip
    assert (refused - 0.5).abs().max() < 1e-6
    assert fallbacks() == {"fallback.dtype": 1}


def test_bases_and_dtypes_of_the_lse() -> None:
    worlds.run(2, bases)


def masks(rank: int, size: int) -> None:
    name = worlds.name()
    lengths = torch.tensor([0, 5, 0, 1], device="cuda", dtype=torch.int64)
    if rank == 1:
        lengths = lengths * 0
    starts = torch.tensor([0, 2, 4, 6, 8], device="cuda", dtype=torch.int32)
    tokens, heads, dim = 11, size, 64
    outputs = draw(9, size, tokens, heads, dim)
    lses = draw(10, size, tokens, heads)
    outputs[:, 8:] = torch.nan
    lses[:, 8:] = torch.nan
    dense = torch.zeros(size, tokens, dtype=torch.bool, device="cuda")
    for r in range(size):
        if r != 1:
            dense[r, 2:4] = dense[r, 6:8] = True
    exact, exact_lse = oracle(
        outputs, lses.masked_fill(~dense[..., None], -torch.inf), "heads", None, rank
    )
    got, lse, _ = ops.a2a_lse_reduce(
        outputs[rank], lses[rank], TOKEN, name, return_lse=True, seq_lens=lengths,
        query_start_loc=starts,
    )  # fmt: skip
    close(got, exact, torch.float32)
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    assert torch.isfinite(got).all()


def gathers(rank: int, size: int) -> None:
    name = worlds.name()
    for tokens, heads, dim, dtype, padded in (
        (1, 2, 576, torch.bfloat16, 0),
        (7, 3, 576, torch.float8_e4m3fn, 0),
        (5, 2, 64, torch.float32, 2 * size + 3),
        (64, 16, 576, torch.bfloat16, 0),
    ):
        every = draw(20 + tokens, size, tokens, heads, dim).to(dtype)
        got = ops.q_gather(every[rank], TOKEN, name, padded_heads=padded)[0]
        want = every.view(torch.uint8).transpose(0, 1).flatten(1, 2)
        assert torch.equal(got[:, : size * heads].view(torch.uint8), want)
        assert not got[:, size * heads :].float().any()
        strided = every[rank].transpose(0, 1).contiguous().transpose(0, 1)
        got = ops.q_gather(strided, TOKEN, name, padded_heads=padded)[0]
        assert torch.equal(got[:, : size * heads].view(torch.uint8), want)
    first = ops.q_gather(every[rank], TOKEN, name)[0]
    second = ops.q_gather(every[rank] * 2, TOKEN, name)[0]  # nothing in between
    assert torch.equal(second, first * 2)
    for rows in (1, 33, 256):
        every = draw(30 + rows, size, rows, 2, 288).to(torch.bfloat16)
        got = ops.kv_gather(every[rank], TOKEN, name)[0]
        assert torch.equal(got, every.flatten(0, 1))
    assert not fallbacks(), fallbacks()


@pytest.mark.parametrize("size", [2, 4])
def test_any_layout_is_taken(size: int) -> None:
    worlds.run(size, layouts)


@pytest.mark.parametrize("size", [2, 4])
def test_row_masks_are_read_on_the_device(size: int) -> None:
    worlds.run(size, masks)


@pytest.mark.parametrize("size", SIZES)
def test_gathers_move_every_byte(size: int) -> None:
    worlds.run(size, gathers)


def published(rank: int, size: int) -> None:
    """Rows that are sent ahead, with other work before the gather that waits."""
    group = dist.new_group(list(range(size)))
    name = group.group_name
    for rows in (1, 33, 256):
        every = draw(30 + rows, size, rows, 2, 288).to(torch.bfloat16)
        kept = every[rank].clone()

        def step(kept=kept):
            token = ops.kv_gather_publish(kept, TOKEN, name)
            other = kept.float() @ torch.ones(288, 288, device="cuda")
            return ops.kv_gather(kept, token, name)[0], other

        for _ in range(3):
            assert torch.equal(step()[0], every.flatten(0, 1))
            # An exchange in one launch, of the same shape, in between.
            assert torch.equal(ops.kv_gather(kept, TOKEN, name)[0], every.flatten(0, 1))
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gathered, _ = step()
        for i in range(5):
            kept.copy_(every[rank] * i)
            graph.replay()
            assert torch.equal(gathered, every.flatten(0, 1) * i)
    # Another exchange in between is refused, and recover() drops the gather.
    token = ops.kv_gather_publish(kept, TOKEN, name)
    for call in (
        lambda: ops.q_gather(kept, token, name),
        lambda: ops.a2a_lse_reduce(kept, kept[..., 0], token, name),
        lambda: ops.kv_gather(kept[:3], token, name),
        lambda: ops.kv_gather_publish(kept, token, name),
    ):
        with pytest.raises(DCPError, match="expected the kv_gather that ends"):
            call()
    dist.barrier()
    dcp_inductor.recover(group)
    assert torch.equal(ops.kv_gather(every[rank], TOKEN, name)[0], every.flatten(0, 1))
    cuda_registry.check(group)
    assert not fallbacks(), fallbacks()


@pytest.mark.parametrize("size", [2, 4])
def test_rows_may_be_sent_ahead_of_the_gather(size: int) -> None:
    worlds.run(size, published)


def beyond_capacity(rank: int, size: int) -> None:
    name = worlds.name()
    for tokens in (config.max_tokens, config.max_tokens + 1, 1):
        before = sum(fallbacks().values())
        outputs = draw(tokens, size, tokens, size, 16)
        lses = draw(tokens + 1, size, tokens, size)
        got = ops.a2a_lse_reduce(outputs[rank], lses[rank], TOKEN, name)[0]
        close(got, oracle(outputs, lses, "heads", None, rank)[0], torch.float32)
        took = sum(fallbacks().values()) - before
        assert took == (tokens > config.max_tokens), fallbacks()
    rows = draw(3, size, 4, 73)  # 292 bytes: no multiple of 16
    assert torch.equal(ops.kv_gather(rows[rank], TOKEN, name)[0], rows.flatten(0, 1))
    assert fallbacks()["fallback.row_bytes"]


def test_more_than_the_workspace_takes_the_collectives() -> None:
    worlds.run(2, beyond_capacity)


def captured(rank: int, size: int, replays: int, name: str = "") -> None:
    """Graphs of two sizes with an odd number of calls, replayed with eager between."""
    name = name or worlds.name()
    heads, dim = 2 * size, 128
    inputs = {}
    graphs = {}
    for tokens in (8, 3):
        partial = torch.zeros(tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
        lse = torch.zeros(tokens, heads, device="cuda")
        query = torch.zeros(tokens, 2, dim, device="cuda", dtype=torch.bfloat16)

        def step(partial=partial, lse=lse, query=query):
            gathered = ops.q_gather(query, TOKEN, name)[0]
            return gathered, ops.a2a_lse_reduce(partial, lse, TOKEN, name)[0], (
                ops.a2a_lse_reduce(partial * 2, lse, TOKEN, name)[0]
            )  # fmt: skip

        step()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        inputs[tokens], graphs[tokens] = (partial, lse, query), (graph, results)
    for i in range(replays):
        tokens = (8, 3)[i * 7 % 3 % 2]
        partial, lse, query = inputs[tokens]
        outputs = draw(i, size, tokens, heads, dim, dtype=torch.bfloat16)
        lses = draw(1000 + i, size, tokens, heads)
        queries = draw(2000 + i, size, tokens, 2, dim, dtype=torch.bfloat16)
        partial.copy_(outputs[rank])
        lse.copy_(lses[rank])
        query.copy_(queries[rank])
        graph, (gathered, once, twice) = graphs[tokens]
        graph.replay()
        exact = oracle(outputs, lses, "heads", None, rank)[0]
        close(once, exact, torch.bfloat16)
        close(twice, 2 * exact, torch.bfloat16)
        assert torch.equal(gathered, queries.transpose(0, 1).flatten(1, 2))
        if i % 5 == 0:
            got = ops.a2a_lse_reduce(outputs[rank], lses[rank], TOKEN, name)[0]
            assert torch.equal(got, once)  # the same bits by both ways
    torch.cuda.synchronize()
    cuda_registry.check()


@pytest.mark.parametrize(("size", "replays"), [(2, 40), (4, 20), (8, 8)])
def test_graphs_replay_with_changing_inputs(size: int, replays: int) -> None:
    worlds.run(size, captured, replays, limit_s=300)


def one_after_another(rank: int, size: int) -> None:
    with config.patch(launch_overlap=False):
        captured(rank, size, 10)


def test_launches_need_not_overlap() -> None:
    worlds.run(2, one_after_another)
