"""A rank has ended: what the others are told to do, and that it works."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._dynamo.utils import counters

import dcp_inductor
from dcp_inductor import config
from dcp_inductor.errors import WAY_ON, DCPError
from dcp_inductor.runtime import registry
from tests.support import World, combine, epoch

SIZE = 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(rank: int, size: int, port: int) -> None:
    """A world whose store is in rank 0's process, as torch makes it."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)


def lose(rank: int, size: int, ending: int) -> list[str]:
    """Errors of the next exchanges, of a recovery, and of a set-up, after ``ending``
    has ended.
    """
    name = dist.group.WORLD.group_name
    combine(name, rank, size)
    if rank == ending:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    exchange = partial(combine, name, rank, size)
    told = [failure(call) for call in (exchange, exchange, dcp_inductor.recover)]
    if ending == 0:  # else the set-up waits for as long as timeout_s
        registry._groups.pop(dist.group.WORLD, None)  # as if it had never been set up
        told.append(failure(exchange))
    assert time.monotonic() - start < 20  # which is below timeout_s
    return told


def failure(call: Callable[[], object]) -> str:
    with pytest.raises(DCPError) as raised:
        call()
    return str(raised.value)


def decode(group: dist.ProcessGroup) -> int:
    """A model compiled for ``group`` and run; sites that were rewritten."""
    rank, size = group.rank(), group.size()

    def model(output: Tensor, lse: Tensor) -> Tensor:
        lses = funcol.all_gather_tensor(lse[None], 0, group)
        weight = torch.exp(lse - torch.logsumexp(lses, 0))
        weighted = output * weight[..., None]
        return funcol.reduce_scatter_tensor(weighted, "sum", 1, group) + 1

    generator = torch.Generator().manual_seed(5)
    outputs = torch.randn(size, 3, 2 * size, 8, generator=generator)
    lses = torch.randn(size, 3, 2 * size, generator=generator)
    counters.clear()
    got = torch.compile(model, backend="dcp_inductor")(outputs[rank], lses[rank])
    merged = (outputs * torch.softmax(lses, 0)[..., None]).sum(0)
    torch.testing.assert_close(got, merged.chunk(size, 1)[rank] + 1)
    return counters["dcp_inductor"]["rewritten"]


def regroup(rank: int, size: int, ending: int, port: int) -> dist.ProcessGroup:
    """The group of the others, made as the errors say."""
    ranks = [r for r in range(size) if r != ending]
    if ending:
        return dist.new_group(ranks, use_local_synchronization=True)
    with pytest.raises(dist.DistError):  # its store went with rank 0
        dist.new_group(ranks, use_local_synchronization=True)
    dist.destroy_process_group()
    meet(ranks.index(rank), len(ranks), port)
    return dist.group.WORLD


def survive(rank: int, size: int, ending: int, ports: list[int]) -> list[str]:
    dist.destroy_process_group()
    meet(rank, size, ports[0])
    told = lose(rank, size, ending)
    group = regroup(rank, size, ending, ports[1])
    for seed in range(4):
        combine(group.group_name, group.rank(), group.size(), seed=seed)
    assert epoch(group.group_name) >= 4
    assert decode(group) == 1
    return told


@pytest.mark.parametrize("ending", [2, 0])
def test_the_others_go_on_in_a_group_of_their_own(ending: int) -> None:
    ranks = World(SIZE)
    try:
        ports = [free_port(), free_port()]
        outcomes = ranks.outcomes(survive, ending, ports, may_die=(ending,))
    finally:
        ranks.close()
    assert outcomes.pop(ending) == (False, "the process ended")
    for ok, told in outcomes:
        assert ok, told
        first, again, recovery, *set_up = told
        assert f"rank {ending} (pid" in first or "has given up" in first
        assert f"the process of rank {ending} (pid" in recovery
        for text in (first, again, recovery):
            assert text.count(WAY_ON) == 1
        if ending == 0:
            assert "the store of the process group cannot be reached" in set_up[0]
            assert "init_process_group(...) at another address" in set_up[0]


def test_the_way_on_names_both_cases() -> None:
    for part in (
        "every rank of the group still runs, call dcp_inductor.recover(group) on all",
        "If one has ended, make a new group of the others",
        "new_group(ranks, use_local_synchronization=True)",
        "destroy_process_group() and init_process_group(...) at another address",
        "compile the model for that group",
    ):
        assert part in WAY_ON


def stop(rank: int, size: int, port: int, exchanged: bool) -> tuple[str, float]:
    """Rank 0, which holds the store, is stopped until its peer has an error."""
    dist.destroy_process_group()
    meet(rank, size, port)
    name = dist.group.WORLD.group_name
    pids: list[int] = [0] * size
    dist.all_gather_object(pids, os.getpid())
    with config.patch(timeout_s=3.0):
        if exchanged:
            combine(name, rank, size)
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            return "", 0.0
        time.sleep(0.5)
        start = time.monotonic()
        try:
            told = failure(partial(combine, name, rank, size))
        finally:
            waited = time.monotonic() - start
            os.kill(pids[0], signal.SIGCONT)
    return told, waited


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_stopped_process_with_the_store_stops_no_other(exchanged: bool) -> None:
    ranks = World(2)
    try:
        _, (told, waited) = ranks.run(stop, free_port(), exchanged)
    finally:
        ranks.close()
    assert 2.5 < waited < 10.0
    if exchanged:
        assert "rank 1 of group '0' waited for epoch " in told
        assert " after 3 s" in told
    else:
        assert "the store of the process group cannot be reached" in told
        assert "no answer within 3 s" in told
