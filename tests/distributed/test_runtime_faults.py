"""Ranks that are late, gone or out of step: an error says so, and there is a way on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_inductor import config, ops, reference, votes
from dcp_inductor.errors import (
    DCPDisagreementError,
    DCPError,
    DCPMismatchError,
    DCPTimeoutError,
)
from dcp_inductor.runtime import layout, registry, shm
from tests.support import World, fallbacks, group_name, world

TOKEN = torch.empty(0)


def combine(name: str, rank: int, size: int, tokens: int = 2, site: str = "") -> None:
    """One combine, checked."""
    generator = torch.Generator().manual_seed(tokens)
    outputs = torch.randn(size, tokens, size, 8, generator=generator)
    lses = torch.randn(size, tokens, size, generator=generator)
    got = ops.a2a_lse_reduce(outputs[rank], lses[rank], TOKEN, name, site=site)[0]
    exact = reference.merge(outputs, lses)[0].chunk(size, 1)[rank]
    torch.testing.assert_close(got, exact, atol=1e-5, rtol=1e-5)


def gather(name: str, rows: int = 2, site: str = "", **options: Any) -> None:
    ops.q_gather(torch.zeros(rows, 1, 8), TOKEN, name, site=site, **options)


def raised(call: Callable[[], object], kind: type[Exception]) -> Exception:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


# --- late ------------------------------------------------------------------------


def late_peer(rank: int, size: int) -> float:
    name = group_name()
    combine(name, rank, size)
    dist.barrier()
    waited = 0.0
    with config.patch(timeout_s=0.5):
        if rank == 0:
            start = time.monotonic()
            error = raised(
                lambda: combine(name, rank, size, site="here"), DCPTimeoutError
            )
            waited = time.monotonic() - start
            workspace = registry.workspace_for(name)
            record = error.record
            assert (record.op, record.site) == ("a2a_lse_reduce", "here")
            assert (record.rank, record.peer) == (0, 1)
            assert record.group_name == name
            assert record.epoch_wanted == workspace.epoch
            assert record.epoch_seen == workspace.epoch - 1
            for part in ("rank 0", "rank 1", str(record.epoch_wanted), "0.5 s", "here"):
                assert part in str(error)
            # From here on, at once, until all have recovered.
            again = raised(lambda: combine(name, rank, size), DCPError)
            assert "recover" in str(again)
            dist.barrier()
        else:
            dist.barrier()
            # Rank 0 had sent its part, so this call is whole. In the next one the late
            # rank learns that rank 0 has given up, long before its own limit.
            combine(name, rank, size, site="here")
            with config.patch(timeout_s=50.0):
                error = raised(lambda: combine(name, rank, size), DCPError)
            assert "rank 0 has given up" in str(error)
            assert error.record.peer == 0
    registry.recover()
    for tokens in range(1, 5):
        combine(name, rank, size, tokens)
    assert registry.workspace_for(name).epoch < 20
    assert not fallbacks()
    return waited


def test_a_late_peer_is_named_and_the_group_can_go_on() -> None:
    waited = world(2).run(late_peer)[0]
    assert 0.5 <= waited < 20


def one_call_more(rank: int, size: int) -> str:
    name = group_name()
    combine(name, rank, size)
    combine(name, rank, size)
    message = ""
    if rank == 1:
        with config.patch(timeout_s=0.3):
            message = str(raised(lambda: combine(name, rank, size), DCPTimeoutError))
        epoch = registry.workspace_for(name).epoch
        assert f"epoch {epoch} of rank 0, which is at epoch {epoch - 1}" in message
    dist.barrier()
    registry.recover()
    combine(name, rank, size)
    return message


def test_a_rank_that_makes_one_call_more_is_told_both_counts() -> None:
    world(2).run(one_call_more)


def missing_from_set_up(rank: int, size: int) -> None:
    group = dist.new_group(list(range(size)))
    name = group.group_name
    if rank == 0:
        with config.patch(timeout_s=0.3):
            error = raised(lambda: combine(name, rank, size), DCPTimeoutError)
        assert error.record.op == "set-up"
        assert error.record.peer == 1
    dist.barrier()
    for _ in range(3):
        combine(name, rank, size)
    assert registry.workspace_for(name).epoch > 0


def test_a_rank_missing_from_the_set_up_is_named() -> None:
    world(2).run(missing_from_set_up)


def slow_peers(rank: int, size: int) -> None:
    name = group_name()
    for step in range(8):
        time.sleep(0.15 * (step % size == rank))
        combine(name, rank, size, tokens=1 + step % 3)
        gather(name)


def test_waits_longer_than_a_launch_resume() -> None:
    world(4).run(slow_peers)


def long_wait(rank: int, size: int) -> float:
    name = group_name()
    combine(name, rank, size)
    if rank == 1:
        time.sleep(2.0)
    start = time.process_time()
    combine(name, rank, size)
    return time.process_time() - start


def test_a_long_wait_sleeps() -> None:
    assert world(2).run(long_wait)[0] < 0.5


# --- doing something else -----------------------------------------------------------


def mismatches(rank: int, size: int) -> list[str]:
    name = group_name()
    combine(name, rank, size)
    gather(name)
    odd = rank == size - 1
    messages = []
    for call in (
        lambda: gather(name, rows=3 if odd else 4),
        lambda: combine(name, rank, size) if odd else gather(name),
        lambda: gather(name, padded_heads=9 if odd else 0),
        lambda: gather(name, site="left" if odd else "right"),
        lambda: ops.q_gather(
            torch.zeros(2, 1, 8, dtype=torch.float16 if odd else torch.bfloat16),
            TOKEN,
            name,
        ),
        # One of them beyond the capacity: direct here, collectives there.
        lambda: gather(name, rows=config.max_tokens + 1 if odd else 2),
        # One of them in need of a bigger arena.
        lambda: ops.kv_gather(torch.zeros(1, 1 << 20 if odd else 8), TOKEN, name),
    ):
        messages.append(str(raised(call, DCPMismatchError)))
        # All ranks have seen it, and all are still in step.
        combine(name, rank, size)
    return messages


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_come_with_different_exchanges_are_both_named(size: int) -> None:
    answers = world(size).run(mismatches)
    said = answers[0]
    assert "rank 0 came with q_gather[4, 1, 8] float32" in said[0]
    assert f"rank {size - 1} came with q_gather[3, 1, 8] float32" in said[0]
    assert "q_gather" in said[1]
    assert "a2a_lse_reduce" in said[1]
    assert "padded_heads=9" in said[2]
    assert "at site right" in said[3]
    assert "at site left" in said[3]
    assert "bfloat16" in said[4]
    assert "collectives (rows)" in said[5]
    assert "kv_gather[1, 1048576] float32, by set-up of" in said[6]


def refused_here(rank: int, size: int) -> str:
    name = group_name()
    combine(name, rank, size)
    site = f"site-{time.monotonic_ns()}" if rank == 0 else ""
    shared: list[Any] = [site]
    dist.broadcast_object_list(shared)
    site = shared[0]
    if rank == 1:
        votes.post(name, site, "not_proven: no hypothesis fits")
        dist.barrier()
        dist.barrier()
        error = raised(
            lambda: votes.guard(name, site, "not_proven"), DCPDisagreementError
        )
    else:
        dist.barrier()
        with config.patch(timeout_s=30.0):
            error = raised(
                lambda: combine(name, rank, size, site=site), DCPDisagreementError
            )
        assert "rank 1: not_proven: no hypothesis fits" in str(error)
        dist.barrier()
    assert site in str(error)
    registry.recover()
    combine(name, rank, size)
    return str(error)


def test_a_site_that_a_peer_refused_is_named_on_both_sides() -> None:
    start = time.monotonic()
    world(2).run(refused_here)
    assert time.monotonic() - start < 25


# --- gone --------------------------------------------------------------------------


def killed(rank: int, size: int) -> tuple[str, float]:
    name = group_name()
    combine(name, rank, size)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    error = raised(lambda: combine(name, rank, size), DCPTimeoutError)
    return str(error), time.monotonic() - start


def test_a_killed_rank_is_noticed_long_before_the_limit_and_leaves_nothing() -> None:
    doomed = World(3)
    try:
        outcomes = doomed.outcomes(killed, may_die=(2,))
        for ok, value in outcomes[:2]:
            assert ok, value
            message, waited = value
            assert waited < 20
            assert "of rank 2 (pid" in message or "has given up" in message
        assert any("has ended" in value[0] for _, value in outcomes[:2])
        assert outcomes[2] == (False, "the process ended")
        pids = {str(process.pid) for process in doomed.processes}
        left = [p.name for p in shm.DIRECTORY.glob("dcp_inductor-*")]
        assert not [name for name in left if name.split("-")[3] in pids]
    finally:
        doomed.close()


def test_segments_of_dead_creators_are_swept_and_others_kept() -> None:
    code = (
        "from dcp_inductor.runtime import shm; import os, signal; "
        "print(shm.create(4096).name, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    dead = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    ).stdout.strip()
    assert (shm.DIRECTORY / dead).exists()
    live = shm.create(4096)
    try:
        assert shm.sweep() >= 1
        assert not (shm.DIRECTORY / dead).exists()
        assert (shm.DIRECTORY / live.name).exists()
    finally:
        live.unlink()


def test_a_segment_that_does_not_fit_is_refused_and_not_left_behind() -> None:
    before = set(shm.DIRECTORY.glob("dcp_inductor-*"))
    with pytest.raises(OSError, match=r"space|large"):
        shm.create(1 << 50)
    assert set(shm.DIRECTORY.glob("dcp_inductor-*")) <= before


def test_attaching_checks_owner_size_and_name() -> None:
    mine = shm.create(4096)
    try:
        with pytest.raises(OSError, match="8192 bytes, got"):
            shm.attach(mine.name, 8192)
        for name in ("../etc/passwd", "other", ""):
            with pytest.raises(OSError, match="expected the name of a segment"):
                shm.attach(name, 4096)
        layout.write_u64(mine.view, layout.TAG, 7)
        other = shm.attach(mine.name, 4096)
        assert layout.read_u64(other.view, layout.TAG) == 7
        assert other.address != mine.address
    finally:
        mine.unlink()
