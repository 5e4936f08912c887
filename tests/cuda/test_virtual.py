"""What takes many exchanges or much memory, between ranks of one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dcp_inductor import reference
from dcp_inductor.runtime import cuda_launch_ops, cuda_layout
from tests.cuda.virtual import VirtualRanks, combine

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """Leaves the GPU to the processes of other tests."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def chain(size: int, kernel: int, merges: int) -> tuple[Tensor, Tensor]:
    """First and last value of a chain in which each merge is the next one's input."""
    tokens, heads, dim, different = 4, 8, 64, 50
    generator = torch.Generator("cuda").manual_seed(size)
    outputs, lses = (
        torch.randn(size, *shape, generator=generator, device="cuda").mul_(2)
        for shape in ((tokens, heads, dim), (different, tokens, heads))
    )
    outputs = outputs.to(torch.bfloat16)
    ranks = VirtualRanks(size)
    layout = cuda_layout.combine_arena(kernel, size, tokens * heads, 2 * dim, 0)
    tables = ranks.tables(
        ranks.arena(layout),
        cuda_layout.combine_words(kernel, "none", True, [0] * size, layout),
    )
    buffers = [o.clone() for o in outputs], [torch.empty_like(o) for o in outputs]

    def merge(rank: int, step: int) -> None:
        cuda_launch_ops.symm_a2a_lse_reduce(
            buffers[step % 2][rank], lses[rank, step % different], None, None,
            buffers[1 - step % 2][rank], None, False, tables[rank],
        )  # fmt: skip

    ranks.run(merge)
    first = buffers[1][0].clone()
    ranks.run(lambda rank, step: merge(rank, step + 1), merges - 1)
    x = buffers[merges % 2]
    ranks.check()
    for each in x[1:]:
        assert torch.equal(each, x[0])
    exact, _ = reference.merge(outputs.double(), lses[:, 0].double())
    torch.testing.assert_close(first.double(), exact, rtol=8e-3, atol=1e-3)
    return first, x[0]


@pytest.mark.parametrize("kernel", [cuda_layout.MARKED, cuda_layout.TILED])
@pytest.mark.parametrize("size", [2, 8, 16])
def test_two_thousand_merges_in_a_row_do_not_drift(size: int, kernel: int) -> None:
    # A merge of equal values is that value: whatever weights that do not add up to
    # one, or a value from another call, would do to it adds up over the chain.
    first, last = chain(size, kernel, 2000)
    assert (last.double() - first.double()).abs().max() <= 2e-3 * first.abs().max()
    assert torch.equal(chain(size, kernel, 2000)[1], last)


def late_input(captured: bool) -> None:
    """Two side streams write the input late; the launch follows them by events."""
    size, tokens, heads, dim = 2, 4, 8, 64
    ranks = VirtualRanks(size)
    layout = cuda_layout.combine_arena(cuda_layout.MARKED, size, 32, 2 * dim, 0)
    tables = ranks.tables(
        ranks.arena(layout),
        cuda_layout.combine_words(cuda_layout.MARKED, "none", True, [0] * size, layout),
    )
    new = torch.zeros(tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
    partials = [torch.zeros_like(new) for _ in range(size)]
    outputs = [torch.zeros_like(new) for _ in range(size)]
    lses = [torch.zeros(tokens, heads, device="cuda") for _ in range(size)]
    other = torch.zeros(1024, device="cuda")
    sides = [torch.cuda.Stream() for _ in range(size)]

    def step() -> None:
        current = torch.cuda.current_stream()
        for side, partial in zip(sides, partials, strict=True):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                torch.cuda._sleep(1_000_000)
                torch.add(new, 0, out=partial)
        other.add_(1)  # the launch that the exchange's may overlap
        for side in sides:
            current.wait_stream(side)
        combine(ranks, tables, partials, lses, outputs)

    step()
    again = step
    if captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        again = graph.replay
    for i in range(1, 30):
        new.fill_(i)
        again()
        for output in outputs:
            assert bool((output == i).all()), i
    ranks.check()


@pytest.mark.parametrize("captured", [False, True])
def test_a_launch_waits_for_inputs_from_other_streams(captured: bool) -> None:
    late_input(captured)


def touched(tokens: int, spot: int) -> list[int]:
    """The first and last tokens, and those on both sides of a far offset."""
    return [0, spot - 1, spot, tokens - 1]


def test_a_gather_beyond_two_billion_elements() -> None:
    size, tokens, heads, dim = 2, 32768, 64, 576
    total, row_bytes = size * heads, 2 * dim
    assert tokens * total * dim > 2**31
    spots = touched(tokens, 2**31 // (total * dim))
    ranks = VirtualRanks(size)
    layout = cuda_layout.gather_arena(
        cuda_layout.SLICES, size, tokens * heads * row_bytes
    )
    tables = ranks.tables(
        ranks.arena(layout),
        cuda_layout.gather_words(
            cuda_layout.Q_GATHER, cuda_layout.SLICES, total, layout
        ),
    )
    queries, outputs = [], []
    for rank in range(size):
        query = torch.zeros(tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
        for spot in spots:
            query[spot] = torch.randn(heads, dim, device="cuda") + rank
        queries.append(query)
        outputs.append(query.new_empty(tokens, total, dim))
    for _ in range(2):  # both slots
        for output in outputs:
            output[spots] = torch.nan
        ranks.run(
            lambda rank, _: cuda_launch_ops.symm_gather(
                queries[rank], outputs[rank], tables[rank]
            )
        )
        ranks.check()
        for output in outputs:
            for spot in spots:
                assert torch.equal(output[spot], torch.cat([q[spot] for q in queries]))
            assert int(output.count_nonzero()) == sum(
                int(query.count_nonzero()) for query in queries
            )


@pytest.mark.parametrize("scatter", ["none", "tokens"])
def test_a_merge_beyond_two_billion_elements(scatter: str) -> None:
    size, tokens, heads, dim = 2, 32768, 128, 576
    assert tokens * heads * dim > 2**31
    spots = touched(tokens, 2**31 // (heads * dim))
    part = tokens if scatter == "none" else tokens // size
    ranks = VirtualRanks(size)
    layout = cuda_layout.combine_arena(
        cuda_layout.TILED, size, part * heads, 2 * dim, 0
    )
    splits = [0 if scatter == "none" else part] * size
    tables = ranks.tables(
        ranks.arena(layout),
        cuda_layout.combine_words(cuda_layout.TILED, scatter, True, splits, layout),
    )
    partials, lses, outputs = [], [], []
    for _ in range(size):
        partial = torch.zeros(tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
        lse = torch.zeros(tokens, heads, device="cuda")
        for spot in spots:
            partial[spot] = torch.randn(heads, dim, device="cuda")
            lse[spot] = torch.randn(heads, device="cuda")
        partials.append(partial)
        lses.append(lse)
        outputs.append(partial.new_full((part, heads, dim), torch.nan))
    combine(ranks, tables, partials, lses, outputs)
    ranks.check()
    for rank, output in enumerate(outputs):
        start = 0 if scatter == "none" else rank * part
        mine = [spot for spot in spots if start <= spot < start + part]
        assert mine
        exact, _ = reference.merge(
            torch.stack([p[mine].double() for p in partials]),
            torch.stack([lse[mine].double() for lse in lses]),
        )
        got = output[[spot - start for spot in mine]]
        torch.testing.assert_close(got.double(), exact, rtol=8e-3, atol=1e-3)
        # Every row is written, and those of zeros are zero.
        assert int(output.count_nonzero()) == int(got.count_nonzero())
