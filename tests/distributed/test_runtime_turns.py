"""Micro-batches on threads whose calls take the collectives of one process group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
)
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dcp_inductor import close, config, ops, recover, reference, ubatch
from dcp_inductor.errors import DCPTimeoutError
from dcp_inductor.runtime import fallback, turns
from dcp_inductor.runtime.ubatch import current
from tests.support import combine, fresh_group, world

TOKEN = torch.empty(0)
ROWS = 300  # more than config.max_tokens


def kv_gather(name: str, rank: int, size: int, value: float) -> None:
    rows = torch.full((ROWS, 3), value + rank)
    got = ops.kv_gather(rows, TOKEN, name)[0]
    assert got[::ROWS, 0].tolist() == [value + r for r in range(size)]


def q_gather(name: str, rank: int, size: int, value: float) -> None:
    query = torch.full((ROWS, 1, 3), value + rank)
    got = ops.q_gather(query, TOKEN, name)[0]
    assert got[0, :, 0].tolist() == [value + r for r in range(size)]


def merge(name: str, rank: int, size: int, value: float) -> None:
    output, lse = torch.full((ROWS, size, 3), value), torch.zeros(ROWS, size)
    got = ops.a2a_lse_reduce(output, lse, TOKEN, name, return_lse=True, full_lse=True)
    torch.testing.assert_close(got[0], torch.full((ROWS, 1, 3), value))


def disable() -> AbstractContextManager[None]:
    """In this thread; patch() holds for all of them with torch 2.11."""
    kinds = ("direct_combine", "direct_query_gather", "direct_kv_gather")
    return config.arguments(dict.fromkeys(kinds, "disable"))


@contextmanager
def late_with(index: int) -> Iterator[None]:
    """Let one micro-batch of this rank be late to its collectives."""
    take = fallback.take

    def sleep_and_take(*arguments: object) -> None:
        if current() == index:
            time.sleep(0.2)
        take(*arguments)

    with mock.patch.object(fallback, "take", sleep_and_take):
        yield


def in_threads(*work: Callable[[], object], first: int = 0) -> None:
    """Run each in a thread of its own and micro-batch; those before ``first`` are not
    within ``ubatch``.
    """
    raised: list[BaseException] = []

    def run(index: int) -> None:
        try:
            with ubatch(index) if index >= first else nullcontext():
                work[index]()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not raised, raised


def crossed(rank: int, size: int, agreed: bool, set_up: bool, first: int) -> None:
    """The ranks' threads get to the collectives in opposite orders."""
    group = fresh_group(size)
    name = group.group_name
    if set_up:
        with config.patch(num_ubatches=2):
            combine(name, rank, size)

    def work(index: int) -> None:
        with ExitStack() as stack:
            if not set_up:
                stack.enter_context(config.patch(num_ubatches=1 + first))
            if not agreed:
                stack.enter_context(disable())
                time.sleep(0.2 * (index == rank))
            for step, op in enumerate((kv_gather, q_gather, merge)):
                op(name, rank, size, 1000.0 * index + 10 * step)

    with late_with(rank):
        in_threads(lambda: work(0), lambda: work(1), first=first)
    dist.barrier()


@pytest.mark.parametrize(
    ("agreed", "set_up"), [(True, True), (False, True), (False, False)]
)
@pytest.mark.parametrize("first", [0, 1])
def test_collectives_of_micro_batches_do_not_mix(
    agreed: bool, set_up: bool, first: int
) -> None:
    world(2).run(crossed, agreed, set_up, first)


def many(rank: int, size: int) -> None:
    group = fresh_group(size)
    name = group.group_name

    def work(index: int) -> None:
        for step in range(20):
            time.sleep(0.001 * ((step * (rank + 2) + index) % 3))
            op = (kv_gather, merge)[(step + index) % 2]
            op(name, rank, size, 1000.0 * index + 10 * step)
            if step % 5 == index:
                combine(name, rank, size, seed=step)

    with config.patch(num_ubatches=3):
        combine(name, rank, size)
    in_threads(*(lambda i=i: work(i) for i in range(3)))
    close(group)


def test_direct_calls_and_collectives_go_together() -> None:
    world(3).run(many)


def one_micro_batch(rank: int, size: int) -> None:
    group = fresh_group(size)
    with mock.patch.object(turns, "take", side_effect=AssertionError("a turn")):
        for op in (kv_gather, q_gather, merge):
            op(group.group_name, rank, size, 1.0)
            with disable():
                op(group.group_name, rank, size, 2.0)
            # Where there may be more, all take them, within ubatch() or not.
            several = config.patch(num_ubatches=2)
            with disable(), several, pytest.raises(AssertionError, match="a turn"):
                op(group.group_name, rank, size, 3.0)


def test_one_micro_batch_takes_no_turns() -> None:
    world(2).run(one_micro_batch)


def raising(rank: int, size: int) -> None:
    """A call that raises on all ranks gives the turn back."""
    group = fresh_group(size)
    name = group.group_name

    broken = mock.patch.object(reference, "kv_gather", side_effect=KeyboardInterrupt)

    def work() -> None:
        with disable():
            kv_gather(name, rank, size, 1.0)
            with broken, pytest.raises(KeyboardInterrupt):
                kv_gather(name, rank, size, 2.0)

    def other() -> None:
        with disable():
            for step in range(5):
                q_gather(name, rank, size, 10.0 * step)

    in_threads(work, other)
    in_threads(work, other)


def test_an_exception_gives_the_turn_back() -> None:
    world(2).run(raising)


def out_of_step(rank: int, size: int) -> str:
    """Rank 0 has had a turn that rank 1 does not know of: an error, until recover."""
    group = fresh_group(size)
    name, said = group.group_name, ""
    with disable(), ubatch(0):
        kv_gather(name, rank, size, 1.0)
        if rank == 0:
            with ubatch(1), turns.take(group, "kv_gather", ""):
                pass
        else:
            limited = config.patch(timeout_s=0.5)
            with limited, pytest.raises(DCPTimeoutError) as caught:
                kv_gather(name, rank, size, 2.0)
            said = str(caught.value)
            assert caught.value.record.op == "kv_gather"
        dist.barrier()
        recover(group)
        kv_gather(name, rank, size, 3.0)

    def work() -> None:
        with disable():
            merge(name, rank, size, 4.0)

    in_threads(work, work)
    return said


def test_a_turn_that_never_comes_is_an_error_and_recover_mends_it() -> None:
    said = world(2).run(out_of_step)[1]
    for part in ("rank 1", "waited 0.5 s", "micro-batch 0", "recover"):
        assert part in said, said
