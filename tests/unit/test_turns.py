"""Turns of micro-batches over a store, with a thread for each rank and micro-batch."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dcp_inductor.errors import DCPError, DCPTimeoutError
from dcp_inductor.runtime import turns
from dcp_inductor.runtime.turns import Turns

TIMEOUT_S = 20.0


def ranks_of(store: dist.Store, size: int) -> list[Turns]:
    return [Turns(store, rank, "g") for rank in range(size)]


def in_thread(work: Callable[[], object]) -> Future[object]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("keys", [4096, 16])
def test_all_ranks_take_turns_in_the_order_of_rank_0(
    keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_KEYS", keys)
    size, micro_batches, calls = 3, 3, 30
    ranks = ranks_of(dist.HashStore(), size)
    orders: list[list[int]] = [[] for _ in range(size)]
    at_once = [0] * size
    meeting = {n: threading.Barrier(size) for n in range(micro_batches)}

    def work(rank: int, index: int) -> None:
        pause = random.Random(10 * rank + index)
        for _ in range(calls):
            time.sleep(pause.choice([0, 0, 0.002]))
            with ranks[rank].take(index, "q_gather", "", TIMEOUT_S):
                at_once[rank] += 1
                assert at_once[rank] == 1
                orders[rank].append(index)
                meeting[index].wait(TIMEOUT_S)  # as a collective does
                at_once[rank] -= 1

    places = [(rank, index) for rank in range(size) for index in range(micro_batches)]
    with ThreadPoolExecutor(len(places)) as pool:
        for future in [pool.submit(work, *place) for place in places]:
            future.result()
    assert orders[0] == orders[1] == orders[2]
    assert [orders[0].count(n) for n in range(micro_batches)] == [calls] * 3


def test_an_exception_gives_the_turn_back_on_every_rank() -> None:
    for rank in ranks_of(dist.HashStore(), 2):
        for _ in range(3):
            with (
                pytest.raises(KeyboardInterrupt),
                rank.take(1, "q_gather", "", TIMEOUT_S),
            ):
                raise KeyboardInterrupt
        with rank.take(0, "q_gather", "", TIMEOUT_S):
            pass


def test_a_wait_that_is_broken_off_leaves_nothing_behind() -> None:
    first, second = ranks_of(dist.HashStore(), 2)

    def look() -> None:
        raise DCPError("a peer has left")

    for rank in (first, second):
        with (
            rank.take(0, "q_gather", "", TIMEOUT_S)
            if rank is first
            else pytest.raises(DCPTimeoutError)
        ):
            other = in_thread(lambda rank=rank: enter(rank, 1, 5.0, look))
            with pytest.raises(DCPError, match="a peer has left"):
                other.result()
            if rank is second:
                enter(rank, 1, 0.05)
    for rank in (first, second):
        if rank is second:
            enter(rank, 0)
        enter(rank, 1)


def enter(
    rank: Turns,
    index: int,
    timeout_s: float = TIMEOUT_S,
    look: Callable[[], object] = lambda: None,
) -> None:
    with rank.take(index, "kv_gather", "here", timeout_s, look):
        pass


def test_a_turn_that_does_not_come_is_an_error_with_rank_and_op() -> None:
    first, second = ranks_of(dist.HashStore(), 2)
    with pytest.raises(DCPTimeoutError, match="turn 0 has not been given") as caught:
        enter(second, 1, 0.1)
    assert "recover" in str(caught.value)
    with first.take(0, "kv_gather", "here", TIMEOUT_S):
        late = in_thread(lambda: enter(first, 1, 0.1))
        with pytest.raises(DCPTimeoutError, match=r"rank 0 of group 'g' .* turn 0 is"):
            late.result()
        with pytest.raises(DCPTimeoutError) as caught:
            enter(second, 1, 0.1)
    for said in (
        "kv_gather at site here: rank 1 of group 'g' waited 0.1 s for micro-batch 1",
        "turn 0 is micro-batch 0's",
    ):
        assert said in str(caught.value)
    record = caught.value.record
    assert (record.op, record.site) == ("kv_gather", "here")
    assert (record.rank, record.peer) == (1, 0)
    # Nothing of this was a turn.
    enter(first, 1)
    enter(second, 0)
    enter(second, 1)


def test_rank_0_serves_its_threads_in_the_order_they_came() -> None:
    [first] = ranks_of(dist.HashStore(), 1)
    order = []

    def other() -> None:
        with first.take(1, "q_gather", "", TIMEOUT_S):
            order.append(1)

    with first.take(0, "q_gather", "", TIMEOUT_S):
        order.append(0)
        waiting = in_thread(other)
        until(lambda: first._waiting)
    with first.take(0, "q_gather", "", TIMEOUT_S):
        order.append(0)
    waiting.result()
    assert order == [0, 1, 0]
