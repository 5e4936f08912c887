"""What CUDA ranks are told when a peer is late, lost or makes another call."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import dcp_inductor
from dcp_inductor import config, ops
from dcp_inductor.errors import DCPError, DCPMismatchError, DCPTimeoutError
from dcp_inductor.runtime import cuda_registry
from tests.cuda import worlds
from tests.cuda.worlds import TOKEN, draw
from tests.support import World

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]


def gather(group, rank: int, rows: int = 2) -> torch.Tensor:
    return ops.kv_gather(
        torch.full((rows, 16), float(rank), device="cuda"), TOKEN, group.group_name
    )[0]


def late_peer(rank: int, size: int) -> None:
    group = dist.new_group(list(range(size)))
    assert gather(group, rank).sum() == 32 * sum(range(size))
    with config.patch(timeout_s=1.5):
        if rank != 1:
            started = time.monotonic()
            got = gather(group, rank)
            torch.cuda.synchronize()
            waited = time.monotonic() - started
            assert 1.0 < waited < 20.0, waited
            assert got.isnan().any()
            with pytest.raises(DCPTimeoutError) as raised:
                cuda_registry.check(group)
            record = raised.value.record
            assert (record.op, record.rank, record.peer) == ("kv_gather", rank, 1)
            assert record.epoch_wanted == record.epoch_seen + 1, record
            with pytest.raises(DCPError, match="recover"):
                gather(group, rank)
    dist.barrier()
    dcp_inductor.recover(group)
    for _ in range(3):
        assert gather(group, rank).sum() == 32 * sum(range(size))
    cuda_registry.check(group)


@pytest.mark.parametrize("size", [2, 4])
def test_a_peer_that_does_not_come_is_named(size: int) -> None:
    worlds.run(size, late_peer)


def other_call(rank: int, size: int, rows_of_one: int) -> str:
    group = dist.new_group(list(range(size)))
    for rows in (2, rows_of_one):
        assert len(gather(group, rank, rows)) == size * rows
    torch.cuda.synchronize()
    dist.barrier()
    with config.patch(timeout_s=20.0):
        gather(group, rank, rows_of_one if rank == 1 else 2)
        torch.cuda.synchronize()
        with pytest.raises(DCPMismatchError) as raised:
            cuda_registry.check(group)
    dist.barrier()
    dcp_inductor.recover(group)
    gather(group, rank)
    torch.cuda.synchronize()
    cuda_registry.check(group)
    return str(raised.value)


@pytest.mark.parametrize("rows_of_one", [3, 0])
def test_ranks_with_different_calls_are_told_both(rows_of_one: int) -> None:
    for message in worlds.run(2, other_call, rows_of_one):
        assert "kv_gather[2, 16]" in message
        assert f"kv_gather[{rows_of_one}, 16]" in message


def other_op(rank: int, size: int) -> str:
    group = dist.new_group(list(range(size)))
    partial, lse = draw(1, 2, size, 16), draw(2, 2, size)
    gather(group, rank)
    ops.a2a_lse_reduce(partial, lse, TOKEN, group.group_name)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        gather(group, rank)
    else:
        ops.a2a_lse_reduce(partial, lse, TOKEN, group.group_name)
    torch.cuda.synchronize()
    with pytest.raises(DCPMismatchError) as raised:
        cuda_registry.check(group)
    dist.barrier()
    dcp_inductor.recover(group)  # check() of all groups is for later tests
    return str(raised.value)


def test_ranks_with_different_ops_are_told_both() -> None:
    for message in worlds.run(2, other_op):
        assert "kv_gather" in message
        assert "a2a_lse_reduce" in message


def broken_library(rank: int, size: int) -> dict[str, int]:
    from dcp_inductor.runtime import cuda_library
    from tests.support import fallbacks

    group = dist.new_group(list(range(size)))
    saved = cuda_library._outcome
    if rank == 1:
        cuda_library._outcome = "no nvcc found"
    try:
        for _ in range(20):
            assert gather(group, rank).sum() == 32 * sum(range(size))
    finally:
        cuda_library._outcome = saved
    return fallbacks()


def test_one_rank_without_a_library_sends_all_to_the_collectives() -> None:
    for counts in worlds.run(2, broken_library):
        assert counts["fallback.build"] == 20


def wrong_mapping(rank: int, size: int) -> tuple[dict[str, int], list[str]]:
    from dcp_inductor.runtime import symm_mem
    from tests.support import Log, fallbacks

    group = dist.new_group(list(range(size)))
    of_peer = symm_mem.SymmetricBuffer.of_peer
    if rank == 1:  # every address of a peer leads to this rank's own memory
        symm_mem.SymmetricBuffer.of_peer = lambda buffer, peer, start, nbytes: of_peer(
            buffer, rank, start, nbytes
        )
    try:
        with Log() as log:
            for _ in range(3):
                assert gather(group, rank).sum() == 32 * sum(range(size))
    finally:
        symm_mem.SymmetricBuffer.of_peer = of_peer
    return fallbacks(), log.messages


def test_addresses_are_tried_out_before_any_data() -> None:
    outcomes = worlds.run(2, wrong_mapping)
    for counts, _ in outcomes:
        assert counts == {"fallback.allocation": 3}
    [message] = outcomes[0][1]
    assert "does not hold what the ranks wrote" in message


def without_multicast(rank: int, size: int) -> int:
    from dcp_inductor.capability import Refusal
    from tests.support import fallbacks

    group = dist.new_group(list(range(size)))
    assert gather(group, rank).sum() == 32 * sum(range(size))
    ops.q_gather(draw(1, 2, 1, 64), TOKEN, group.group_name)
    ops.a2a_lse_reduce(draw(1, 2, size, 16), draw(2, 2, size), TOKEN, group.group_name)
    assert not fallbacks()
    workspace = cuda_registry.workspace_for(
        group.group_name, torch.device("cuda", torch.cuda.current_device())
    )
    assert not isinstance(workspace, Refusal)
    buffers = [workspace.control, *workspace.arenas.values()]
    return max(buffer._handle.multicast_ptr for buffer in buffers)


def test_everything_runs_direct_without_multicast() -> None:
    assert worlds.run(2, without_multicast) == [0, 0]


def fail_inside(graph, rows: torch.Tensor, name: str) -> None:
    with torch.cuda.graph(graph):
        ops.kv_gather(rows, TOKEN, name)
        raise RuntimeError("rank 1 has had enough")


def raises_inside_capture(rank: int, size: int) -> tuple[str, float]:
    group = dist.new_group(list(range(size)))
    rows = torch.full((2, 16), float(rank), device="cuda")
    gather(group, rank)
    torch.cuda.synchronize()
    dist.barrier()
    started = time.monotonic()
    graph = torch.cuda.CUDAGraph()
    with config.patch(timeout_s=2.0):
        if rank == 1:
            with pytest.raises(RuntimeError) as raised:
                fail_inside(graph, rows, group.group_name)
            message = str(raised.value)
        else:
            with torch.cuda.graph(graph):
                result = ops.kv_gather(rows, TOKEN, group.group_name)[0]
            graph.replay()
            torch.cuda.synchronize()
            assert result.isnan().any()
            with pytest.raises(DCPTimeoutError) as timeout:
                dcp_inductor.check(group)
            message = str(timeout.value)
    took = time.monotonic() - started
    dist.barrier()
    dcp_inductor.recover(group)
    assert gather(group, rank).sum() == 32 * sum(range(size))
    torch.cuda.synchronize()
    dcp_inductor.check(group)
    return message, took


def test_an_error_inside_one_ranks_capture_is_seen_and_ends_all() -> None:
    first, second = worlds.run(2, raises_inside_capture)
    assert "rank 1 has had enough" in second[0]
    assert "kv_gather: rank 0" in first[0]
    assert max(first[1], second[1]) < 30


def see_one_gpu(rank: int, size: int) -> int:
    """Before CUDA starts in this rank: its own GPU is the only one, and number 0."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    torch.cuda.set_device(0)
    return torch.cuda.device_count()


def hidden_peers(rank: int, size: int) -> dict[str, int]:
    from tests.support import fallbacks

    group = dist.new_group(list(range(size)))
    for _ in range(3):
        assert gather(group, rank).sum() == 32 * sum(range(size))
        ops.a2a_lse_reduce(
            draw(1, 2, size, 16), draw(2, 2, size), TOKEN, group.group_name
        )
    torch.cuda.synchronize()
    dcp_inductor.check(group)
    return fallbacks()


@pytest.mark.multi_gpu
def test_ranks_that_see_one_gpu_each_exchange_directly() -> None:
    world = World(2)
    try:
        assert world.run(see_one_gpu) == [1, 1]
        assert world.run(hidden_peers, limit_s=200) == [{}, {}]
    finally:
        world.close()
