"""Captured graphs between real processes, in the ways that went wrong in the field."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

import dcp_inductor
from dcp_inductor import config, ops
from dcp_inductor.capability import Refusal
from dcp_inductor.runtime import cuda_layout, cuda_registry
from tests.cuda import worlds
from tests.cuda.test_exchange import close, oracle
from tests.cuda.worlds import TOKEN, draw
from tests.support import fallbacks

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]

MILLISECOND = 1_800_000  # cycles of a GPU, about


def skew(step: int, rank: int, size: int, milliseconds: int = 2) -> None:
    """Delay the stream of one rank, another at each step."""
    if step % size == rank:
        torch.cuda._sleep(milliseconds * MILLISECOND)


def captured(step):
    """A graph of ``step`` and its results, once it has run on all ranks."""
    step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def one_token(rank: int, size: int, replays: int) -> None:
    """Inputs come last, of one token; two gathers in a row, and both are looked at."""
    name = worlds.name()
    heads, dim = 2 * size, 128
    staged = torch.zeros(1, heads + 4, dim, device="cuda")
    staged_lse = torch.zeros(1, heads, device="cuda")

    def step():
        own = staged.clone()  # the last moment: the launch ahead of the exchanges
        first = ops.q_gather(own[:, heads : heads + 2], TOKEN, name)[0]
        second = ops.q_gather(own[:, heads + 2 :], TOKEN, name)[0]
        merged = ops.a2a_lse_reduce(own[:, :heads], staged_lse, TOKEN, name)[0]
        return first, second, merged

    graph, (first, second, merged) = captured(step)
    for i in range(replays):
        every = draw(i, size, 1, heads + 4, dim)
        lses = draw(10_000 + i, size, 1, heads)
        skew(i, rank, size)
        staged.copy_(every[rank])
        staged_lse.copy_(lses[rank])
        graph.replay()
        for got, start in ((first, heads), (second, heads + 2)):
            want = every[:, :, start : start + 2].transpose(0, 1).flatten(1, 2)
            assert torch.equal(got, want), i
        exact = oracle(every[:, :, :heads], lses, "heads", None, rank)[0]
        close(merged, exact, torch.float32)
    cuda_registry.check()


@pytest.mark.parametrize(("size", "replays"), [(2, 200), (4, 50)])
def test_one_token_replays_see_the_inputs_of_this_replay(
    size: int, replays: int
) -> None:
    worlds.run(size, one_token, replays, limit_s=200)


def larger_in_between(rank: int, size: int) -> None:
    group = dist.new_group(list(range(size)))  # whose memory no other test has made
    name = group.group_name
    heads, dim = 2 * size, 72
    graphs = {}
    for tokens in (8, 4):
        partial = torch.zeros(tokens, heads, dim, device="cuda", dtype=torch.float16)
        lse = torch.zeros(tokens, heads, device="cuda")

        def step(partial=partial, lse=lse):
            return ops.a2a_lse_reduce(partial, lse, TOKEN, name)[0]

        graphs[tokens] = (*captured(step), partial, lse)
    bytes_before = cuda_registry.memory_bytes(group)
    # New memory, of other geometry, while graphs hold the addresses of the old.
    outputs = draw(3, size, 250, heads, 1000, dtype=torch.float16)
    lses = draw(4, size, 250, heads)
    got = ops.a2a_lse_reduce(outputs[rank], lses[rank], TOKEN, name)[0]
    close(got, oracle(outputs, lses, "heads", None, rank)[0], torch.float16)
    assert cuda_registry.memory_bytes(group) > bytes_before
    order = random.Random(0)
    for i in range(24):
        tokens = order.choice((8, 4))
        graph, got, partial, lse = graphs[tokens]
        outputs = draw(50 + i, size, tokens, heads, dim, dtype=torch.float16)
        lses = draw(90 + i, size, tokens, heads)
        partial.copy_(outputs[rank])
        lse.copy_(lses[rank])
        graph.replay()
        close(got, oracle(outputs, lses, "heads", None, rank)[0], torch.float16)
    cuda_registry.check(group)
    assert not fallbacks(), fallbacks()


def test_memory_that_graphs_hold_stays_when_more_is_made() -> None:
    worlds.run(2, larger_in_between)


def lengths_on_the_device(rank: int, size: int) -> None:
    """Lengths that change on the device while their readers are queued."""
    name = worlds.name()
    tokens, heads, dim = 6, size, 64
    outputs, lses = draw(5, size, tokens, heads, dim), draw(6, size, tokens, heads)
    starts = torch.tensor([0, 2, 4, 6], device="cuda", dtype=torch.int32)
    for dtype in (torch.int32, torch.int64):
        kept = torch.ones(3, device="cuda", dtype=dtype)

        def step(lengths):
            return ops.a2a_lse_reduce(
                outputs[rank], lses[rank], TOKEN, name, return_lse=True,
                seq_lens=lengths, query_start_loc=starts,
            )[:2]  # fmt: skip

        graph, replayed = captured(lambda kept=kept, step=step: step(kept))
        for i in range(8):
            # All of a request's shards may be empty, but rank 0 keeps one request.
            table = torch.randint(0, 2, (size, 3), generator=_generator(i))
            table[0, 2] = 7
            new = table[rank].to("cuda", dtype)
            masked = lses.masked_fill(
                (table == 0).repeat_interleave(2, 1).cuda()[..., None], -torch.inf
            )
            exact, exact_lse = oracle(outputs, masked, "heads", None, rank)
            torch.cuda._sleep(2 * MILLISECOND)
            lengths = torch.full_like(new, 9)  # another object each time
            queued_late = lengths.copy_(new)
            eager = step(queued_late)
            lengths.fill_(0)  # behind the launch, which has read them
            kept.copy_(new)
            graph.replay()
            kept.fill_(0)
            for got, lse in (eager, replayed):
                close(got, exact, torch.float32)
                assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    cuda_registry.check()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_lengths_are_those_on_the_device_when_the_launch_runs() -> None:
    worlds.run(2, lengths_on_the_device)


CANARY = 0xA5


def canaries(rank: int, size: int, rounds: int) -> None:
    """Bytes around what is exchanged: the tails of all buffers, margins of inputs."""
    group = dist.new_group(list(range(size)))
    name = group.group_name
    heads, dim = 2 * size, 128
    partial, partial_margins = with_margins(5, heads, dim)
    query, query_margins = with_margins(5, 2, dim)
    rows, rows_margins = with_margins(40, 1, dim)

    def exchanges() -> None:
        ops.q_gather(query, TOKEN, name)
        ops.kv_gather(rows, TOKEN, name)
        ops.a2a_lse_reduce(partial, lse, TOKEN, name, return_lse=True, full_lse=True)

    lse = torch.zeros(5, heads, device="cuda")
    assert dcp_inductor.prepare(group)
    workspace = cuda_registry.workspace_for(name, lse.device)
    assert not isinstance(workspace, Refusal)
    few = config.default("marked_bytes"), config.default("packet_bytes")
    both = (few, (1, 1))  # the kernels for few rows, then those for many
    try:
        for config.marked_bytes, config.packet_bytes in both:
            exchanges()
        kinds = {layout.kind for layout in workspace.arenas}
        assert kinds == {"packets", "slices", "marked", "tiled"}
        tails = [workspace.control.tensor[cuda_layout.HEADER_BYTES :]]
        for layout, arena in workspace.arenas.items():
            tails.append(arena.tensor[layout.size - cuda_layout.TAIL_BYTES :])
        assert all(len(tail) >= 64 * 1024 for tail in tails)
        for each in (*tails, *partial_margins, *query_margins, *rows_margins):
            each.fill_(CANARY)
        torch.cuda.synchronize()
        dist.barrier()
        for i in range(rounds):
            config.marked_bytes, config.packet_bytes = both[i % 2]
            exchanges()
        torch.cuda.synchronize()
        dist.barrier()
        for each in (*tails, *partial_margins, *query_margins, *rows_margins):
            assert bool((each == CANARY).all())
        cuda_registry.check()
        dist.barrier()
        cuda_registry.close(group)
    finally:
        config.marked_bytes, config.packet_bytes = few


def with_margins(*shape: int):
    """A tensor of ``shape`` and the 256 bytes on both sides of it."""
    size = 4 * torch.Size(shape).numel()
    whole = torch.zeros(size + 512, device="cuda", dtype=torch.uint8)
    inner = whole[256 : 256 + size].view(torch.float32).view(shape)
    return inner, (whole[:256], whole[256 + size :])


def test_bytes_around_what_is_exchanged_stay() -> None:
    worlds.run(2, canaries, 34)
