"""What CUDA ranks are told when a peer is late, lost or makes another call."""

from __future__ import annotations

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


def other_call(rank: int, size: int) -> str:
    group = dist.new_group(list(range(size)))
    for rows in (2, 3):
        gather(group, rank, rows)
    torch.cuda.synchronize()
    dist.barrier()
    with config.patch(timeout_s=20.0):
        gather(group, rank, 3 if rank == 1 else 2)
        torch.cuda.synchronize()
        with pytest.raises(DCPMismatchError) as raised:
            cuda_registry.check(group)
    dist.barrier()
    dcp_inductor.recover(group)
    gather(group, rank)
    torch.cuda.synchronize()
    cuda_registry.check(group)
    return str(raised.value)


def test_ranks_with_different_calls_are_told_both() -> None:
    for message in worlds.run(2, other_call):
        assert "kv_gather[2, 16]" in message
        assert "kv_gather[3, 16]" in message


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
