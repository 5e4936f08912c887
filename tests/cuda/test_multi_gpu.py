"""What only several GPUs show: a process on each, NCCL beside direct exchanges."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from dcp_inductor import config, ops, reference
from dcp_inductor.backend import dcp_inductor as backend
from dcp_inductor.errors import DCPTimeoutError
from dcp_inductor.runtime import cuda_registry
from tests.cuda import worlds
from tests.cuda.test_collective_combine import nccl_group
from tests.cuda.worlds import TOKEN
from tests.support import fallbacks

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu, pytest.mark.timeout(600)]


def world_size() -> int:
    """A rank for each GPU, as many as the kernels take."""
    return 1 << (min(torch.cuda.device_count(), 16).bit_length() - 1)


def uuids(rank: int, size: int) -> str:
    device = torch.cuda.current_device()
    for peer in range(size):
        assert peer == device or torch.cuda.can_device_access_peer(device, peer)
    return str(torch.cuda.get_device_properties(device).uuid)


def test_every_rank_has_a_gpu_of_its_own_and_reaches_the_others() -> None:
    size = world_size()
    assert len(set(worlds.run(size, uuids))) == size


def skewed(rank: int, size: int, replays: int) -> tuple[int, int]:
    """Replays with random delays, each checked on the device; counts what differs."""
    name = nccl_group(size).group_name
    tokens, heads, dim = 4, 2 * size, 64
    ranks = torch.arange(size, device="cuda").view(size, 1, 1, 1)
    cell = torch.arange(tokens * heads * dim, device="cuda").view(tokens, heads, dim)
    call = torch.zeros((), dtype=torch.int64, device="cuda")
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")

    def every() -> tuple[torch.Tensor, torch.Tensor]:
        """All ranks' inputs of this call, which every rank can work out."""
        values = (cell * 7 + ranks * 13 + call * 5) % 251
        lses = ((values[..., 0] + call) % 9 - 4).float()
        return values.to(torch.bfloat16), lses.masked_fill(lses == -4, -torch.inf)

    def step() -> None:
        call.add_(1)
        outputs, lses = every()
        merged = ops.a2a_lse_reduce(outputs[rank], lses[rank], TOKEN, name)[0]
        rows = ops.kv_gather(outputs[rank], TOKEN, name)[0]
        exact = reference.merge(outputs, lses)[0].chunk(size, 1)[rank]
        close = (merged.float() - exact).abs() <= 8e-3 * exact.abs() + 1e-5
        wrong[0] += (~close).sum()
        wrong[1] += (rows != outputs.flatten(0, 1)).sum()

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(3):  # an odd number: slots must not follow the host
            step()
    delays = random.Random(rank)
    for i in range(replays):
        if delays.random() < 0.3:
            torch.cuda._sleep(delays.randrange(1, 60_000))
        graph.replay()
        if i % 500 == 0:
            torch.cuda.synchronize()
            cuda_registry.check()
    torch.cuda.synchronize()
    cuda_registry.check()
    assert call.item() == 1 + 3 * replays
    assert not fallbacks(), fallbacks()
    return wrong[0].item(), wrong[1].item()


def test_ten_thousand_replays_with_skew_are_right() -> None:
    for wrong in worlds.run(world_size(), skewed, 10_000, limit_s=300):
        assert wrong == (0, 0)


def full_exchanges(
    rank: int, size: int, name: str, wrong: torch.Tensor
) -> Callable[[int], None]:
    """A merge and a gather that fill the chip, checked on the device."""
    tokens, heads, dim = 256, 128, 512
    partial = torch.empty(tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
    lse = torch.zeros(tokens, heads, device="cuda")
    ranks = torch.arange(size, device="cuda")[:, None]

    def exchange(value: int) -> None:
        partial.fill_(rank + value)
        merged = ops.a2a_lse_reduce(partial, lse, TOKEN, name)[0]
        wrong.add_(merged.ne((size - 1) / 2 + value).sum())
        whole = ops.q_gather(partial[:, : heads // size], TOKEN, name)[0]
        wrong.add_(whole.view(tokens, size, -1).ne(ranks + value).sum())

    return exchange


def overlapping(rank: int, size: int, with_nccl: bool, rounds: int) -> int:
    """Exchanges beside something on another stream that half of the ranks start first;
    counts what is wrong.
    """
    group = nccl_group(size)
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")  # a count for each stream
    exchange = full_exchanges(rank, size, group.group_name, wrong[0])
    side = torch.cuda.Stream()
    ones = torch.ones(16 << 20, device="cuda")
    others = dist.new_group(list(range(size)))
    of_others = full_exchanges(rank, size, others.group_name, wrong[1])

    def beside(value: int) -> None:
        with torch.cuda.stream(side):
            if not with_nccl:
                of_others(value)
                return
            total = value * ones
            dist.all_reduce(total, group=group)
            wrong[1].add_(total.ne(size * value).sum())

    for marked_bytes in 32 << 20, 1:  # by marked words, then by tiles
        with config.patch(marked_bytes=marked_bytes):
            for step in exchange, beside:
                step(1)  # CUDA loads kernels at their first launch, when nothing waits
                torch.cuda.synchronize()
            for i in range(1, rounds + 1):
                dist.barrier()
                for step in (
                    (exchange, beside) if (rank + i) % 2 else (beside, exchange)
                ):
                    step(i)
                    time.sleep(0.003)  # it is on the chip
                torch.cuda.synchronize()
                cuda_registry.check()
    assert not fallbacks(), fallbacks()
    return int(wrong.sum().item())


@pytest.mark.parametrize("with_nccl", [True, False])
def test_what_waits_on_another_stream_may_overlap(with_nccl: bool) -> None:
    assert not any(worlds.run(world_size(), overlapping, with_nccl, 20, limit_s=300))


def example_model(rank: int, size: int) -> tuple[float, float, int]:
    """The example in bf16, TP = DCP = N over NCCL: eager against compiled."""
    from examples.mla_lm.parallel import create_layout
    from tests.cuda.example_model import errors

    torch._dynamo.reset()
    counters.clear()
    group = nccl_group(size)
    layout = dataclasses.replace(create_layout(size), tp_group=group, dcp_group=group)
    eager, compiled = errors(layout, backend, 6)
    assert not fallbacks(), fallbacks()
    return eager, compiled, counters["dcp_inductor"]["rewritten"]


def test_example_model_over_nccl() -> None:
    size = min(world_size(), 8)  # a head each
    for eager, compiled, rewritten in worlds.run(size, example_model, limit_s=500):
        assert rewritten > 0
        assert max(eager, compiled) < 8.0, (eager, compiled)


def killed(rank: int, size: int, limit_s: float) -> tuple[float, int]:
    group = dist.new_group(list(range(size)))
    row = torch.full((2, 64), float(rank), device="cuda")
    ops.kv_gather(row, TOKEN, group.group_name)
    torch.cuda.synchronize()
    with config.patch(timeout_s=limit_s):
        ops.kv_gather(row, TOKEN, group.group_name)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            ops.kv_gather(row, TOKEN, group.group_name)
        for _ in range(100):
            graph.replay()
        torch.cuda.synchronize()
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        waited = time.monotonic() - began
        with pytest.raises(DCPTimeoutError) as raised:
            cuda_registry.check(group)
    assert raised.value.record.peer == size - 1, raised.value.record
    ones = torch.ones(1024, 1024, device="cuda")
    assert (ones @ ones)[0, 0].item() == 1024
    return waited, os.getpid()


def gathered(rank: int, size: int) -> float:
    row = torch.full((2, 64), float(rank), device="cuda")
    total = ops.kv_gather(row, TOKEN, worlds.name())[0].sum().item()
    cuda_registry.check()
    return total


def test_a_killed_rank_is_a_timeout_and_the_gpus_go_on() -> None:
    size, limit_s = world_size(), 4.0
    world = worlds.cuda_world(size)
    outcomes = world.outcomes(killed, limit_s, limit_s=60, may_die=(size - 1,))
    for ok, told in outcomes[:-1]:
        assert ok, told
        assert limit_s - 0.5 < told[0] < limit_s + 3, told
    assert not outcomes[-1][0]
    world.close()
    expected = 128.0 * sum(range(size))
    assert worlds.run(size, gathered, limit_s=400) == [expected] * size
