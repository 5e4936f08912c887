"""Ranks that make memory together or report a fault: a thread each, no GPU's memory."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_inductor import config, votes
from dcp_inductor.bounded_store import BoundedStore
from dcp_inductor.capability import Refusal
from dcp_inductor.errors import DCPMismatchError, DCPTimeoutError
from dcp_inductor.runtime import (
    cuda_buffers,
    cuda_layout,
    cuda_registry,
    cuda_workspace,
    rendezvous,
    symm_mem,
)
from dcp_inductor.runtime.cuda_workspace import GroupMemory, Workspace
from dcp_inductor.runtime.signature import Signature

NBYTES = 4096
CPU = torch.device("cpu")
CALL = Signature("kv_gather", (5, 16), "float32", "", "packets", "a site")
SMALL = cuda_layout.gather_arena(cuda_layout.PACKETS, 2, 4096)
OTHER = cuda_layout.gather_arena(cuda_layout.SLICES, 2, 4096)


def ranks(run: Callable[[int], Any], size: int = 2) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


class Buffer:
    """Memory of this process that all ranks can address."""

    def __init__(self, everyones: list[torch.Tensor], rank: int) -> None:
        self.tensor = everyones[rank]
        self.everyones = everyones
        self.addresses = [tensor.data_ptr() for tensor in everyones]
        self.multicast = 0

    def of_peer(self, rank: int, start: int, nbytes: int) -> torch.Tensor:
        return self.everyones[rank][start : start + nbytes]


def made(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Buffer], None]) -> list[Any]:
    """What two ranks get of ``cuda_buffers.create``; rank 1's buffer is spoilt."""
    everyones = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(2)]
    by_rank = {tensor.data_ptr(): rank for rank, tensor in enumerate(everyones)}
    rank_of = contextvars.ContextVar[int]("rank_of")

    def buffer(tensor: torch.Tensor, group: Any, hidden_peers: bool) -> Buffer:
        new = Buffer(everyones, by_rank[tensor.data_ptr()])
        if group.rank() == 1:
            spoil(new)
        return new

    def allocate(*_: Any) -> torch.Tensor:
        # The calling thread's allocations may belong to a graph that is warmed up.
        assert threading.current_thread().name.startswith("dcp_inductor_buffers")
        return everyones[rank_of.get()]

    monkeypatch.setattr(symm_mem, "allocate", allocate)
    monkeypatch.setattr(symm_mem, "SymmetricBuffer", buffer)
    store = dist.HashStore()

    def create(rank: int) -> Any:
        rank_of.set(rank)
        session = rendezvous.Session(store, rank, 2, 10.0)
        group = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
        return cuda_buffers.create(session, group, CPU, 1, NBYTES, False, False)

    return ranks(create)


def test_buffers_that_all_ranks_reach_are_taken(monkeypatch) -> None:
    for rank, buffers in enumerate(made(monkeypatch, lambda buffer: None)):
        assert [buffer.tensor.data_ptr() for buffer in buffers] == [
            buffers[0].addresses[rank]
        ]


def test_addresses_are_those_that_are_tried_out(monkeypatch) -> None:
    """The kernels get the addresses, the trial goes through tensors."""

    def spoil(buffer: Buffer) -> None:
        buffer.addresses[0] += 256

    for refusal in made(monkeypatch, spoil):
        assert refusal == Refusal(
            "allocation",
            "rank 1: the address of rank 0's memory is not where its tensor is",
        )


def test_memory_that_leads_elsewhere_is_refused(monkeypatch) -> None:
    def spoil(buffer: Buffer) -> None:
        elsewhere = torch.zeros(NBYTES, dtype=torch.uint8)
        buffer.everyones = [elsewhere, buffer.everyones[1]]
        buffer.addresses[0] = elsewhere.data_ptr()

    for refusal in made(monkeypatch, spoil):
        assert isinstance(refusal, Refusal)
        assert "memory of rank 0 does not hold" in refusal.detail


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list]]:
    """Makes the memories of two ranks of one group, with micro-batches."""
    store = dist.HashStore()

    def create(session, group, device, count, nbytes, hidden_peers, multicast):
        session.exchange({})  # as the real one, it meets
        return [
            SimpleNamespace(
                tensor=torch.zeros(nbytes, dtype=torch.uint8), addresses=[0, 0],
                multicast=0,
            )
            for _ in range(count)
        ]  # fmt: skip

    monkeypatch.setattr(cuda_buffers, "create", create)
    bounded = BoundedStore(store)
    monkeypatch.setattr(cuda_workspace.groups, "store", lambda group: bounded)
    monkeypatch.setattr(cuda_workspace.groups, "resolve", lambda name: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)

    def make(num_ubatches: int) -> list[GroupMemory]:
        both = []
        for rank in range(2):
            group = SimpleNamespace(
                group_name="g", rank=lambda rank=rank: rank, size=lambda: 2
            )
            memory = GroupMemory(group, CPU, num_ubatches)
            for _ in range(num_ubatches):
                fault = torch.zeros(cuda_layout.FAULT_WORDS, dtype=torch.int32)
                control = SimpleNamespace(tensor=torch.zeros(8), addresses=[0, 0])
                memory.workspaces.append(Workspace(memory, control, fault))
            both.append(memory)
        return both

    with config.patch(timeout_s=20.0):
        yield make


@pytest.mark.parametrize("layouts", [(SMALL, SMALL), (SMALL, OTHER)])
def test_micro_batches_that_differ_may_come_in_any_order(memories, layouts) -> None:
    """On each rank another thread is first to need memory, with a call of its own."""
    both = memories(2)

    def exchange(rank: int) -> list[Any]:
        order = (0, 1) if rank == 0 else (1, 0)
        memory = both[rank]
        found = []
        for i in order:
            call = replace(CALL, shape=(5 + i, 16))
            found.append(memory.arena(memory.workspaces[i], layouts[i], call))
        return found

    for rank, found in enumerate(ranks(exchange)):
        assert not any(isinstance(arena, Refusal) for arena in found)
        for workspace in both[rank].workspaces:
            assert set(workspace.arenas) == {*layouts}


def test_a_first_use_for_other_calls_is_a_mismatch(memories) -> None:
    both = memories(1)

    def exchange(rank: int) -> str:
        call = replace(CALL, shape=(5 + rank, 16))
        with pytest.raises(DCPMismatchError) as caught:
            both[rank].arena(both[rank].workspaces[0], SMALL, call)
        return str(caught.value)

    for text in ranks(exchange):
        assert "They differ in shape" in text


def test_a_rank_that_comes_late_has_time_for_what_it_does_then(memories) -> None:
    """The one that waited for it would run out of time in the rounds that follow."""
    both = memories(1)
    with config.patch(timeout_s=1.5):
        store = dist.HashStore()

    def meet(rank: int) -> int:
        if rank == 1:
            threading.Event().wait(1.0)
        session = rendezvous.Session(store, rank, 2, 1.5)
        if rank == 1:
            threading.Event().wait(1.0)
        return len(session.exchange({}))

    assert ranks(meet) == [2, 2]
    assert both


def faulty(memory: GroupMemory, row: int, op: int = 1) -> Workspace:
    """A workspace whose device has reported that rank 1 did not come."""
    workspace = memory.workspaces[0]
    memory.site_id("file.py:1#abc")
    words = [1, 1, op, 1, 0, 1, 9, 8, row, 0, 0]
    workspace.fault[: len(words)] = torch.tensor(words, dtype=torch.int32)
    return workspace


@pytest.mark.parametrize("error", [dist.DistNetworkError, ValueError])
def test_a_store_that_died_with_its_rank_does_not_hide_the_fault(
    memories, monkeypatch, error: type[Exception]
) -> None:
    """Rank 0 mostly holds the store, so the peers of the commonest death lose it."""

    def gone(*_: object) -> None:
        raise error("recv: connection reset")

    for name in ("post", "check", "check_departures"):
        monkeypatch.setattr(votes, name, gone)
    workspace = faulty(memories(1)[0], row=7)
    with pytest.raises(DCPTimeoutError) as caught:
        workspace.check()
    assert caught.value.record.peer == 1
    assert caught.value.record.site == "file.py:1#abc"


@pytest.mark.parametrize(
    ("op", "row", "where"), [(1, 7, "its row 7"), (1, -1, "a part"), (3, 7, "a part")]
)
def test_a_timeout_names_a_row_where_there_is_one(
    memories, monkeypatch, op: int, row: int, where: str
) -> None:
    for name in ("post", "check", "check_departures"):
        monkeypatch.setattr(votes, name, lambda *_: None)
    with pytest.raises(DCPTimeoutError) as caught:
        faulty(memories(1)[0], row, op).check()
    assert caught.value.__notes__ == [
        f"of the result {where} did not come; rows that lack a peer are NaN"
    ]


def test_ranks_must_agree_on_where_kernels_cross_over() -> None:
    facts = dict.fromkeys(
        ("max_tokens", "multicast", "marked_bytes", "packet_bytes"), "4"
    ) | {"symmetric_memory": "CUDA"}
    assert cuda_registry._differing_settings([facts, dict(facts)]) is None
    for knob in ("marked_bytes", "packet_bytes"):
        refusal = cuda_registry._differing_settings([facts, facts | {knob: "5"}])
        assert refusal == Refusal("config", f"rank 1 has {knob} 5, rank 0 has 4")
