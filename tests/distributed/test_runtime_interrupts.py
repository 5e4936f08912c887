"""Calls that a signal breaks off: no later call may meet a peer's other one."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dcp_inductor import launch_ops, ops, recover, reference
from dcp_inductor.errors import DCPError, DCPTimeoutError
from dcp_inductor.runtime import registry
from dcp_inductor.runtime.workspace import Workspace
from tests.support import combine, group_name, world

TOKEN = torch.empty(0)


class Interrupted(BaseException):
    """As KeyboardInterrupt, which would end the worker."""


def interrupt(*_: object) -> None:
    raise Interrupted


@contextmanager
def alarm(after_s: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def gathered(value: float, rows: int = 2) -> list[float]:
    got = ops.kv_gather(torch.full((rows, 3), value), TOKEN, group_name())[0]
    return got[::rows, 0].tolist()


def after(call: Callable[..., Any], error: type[BaseException]) -> Callable[..., Any]:
    """``call``, and then a signal's handler raises."""

    def broken(*arguments: Any, **options: Any) -> Any:
        status = call(*arguments, **options)
        while isinstance(status, int) and status != launch_ops.DONE:
            status = call(*arguments[:-1], True)
        raise error

    return broken


def refused_after(
    break_off: Callable[[], None], needs_peer: bool = False
) -> Callable[[int, int], None]:
    """Rank 0 breaks one call off; it may then make no other, nor may its peers.

    ``needs_peer``: it is broken off when the peer has come, who else comes late.
    """

    def run(rank: int, size: int) -> None:
        gathered(0.0)
        dist.barrier()
        if rank == 0:
            with pytest.raises(Interrupted):
                break_off()
            for _ in range(2):
                with pytest.raises(DCPError, match=r"out of use.*recover"):
                    gathered(1.0)
            dist.barrier()
        else:
            if not needs_peer:
                time.sleep(1.0)
            # Rank 0 had sent its rows, so this call is whole; the next is not.
            assert gathered(7.0) == [6.0, 7.0]
            with pytest.raises(DCPTimeoutError, match="rank 0 has given up"):
                gathered(1.0)
            dist.barrier()
        recover()
        assert gathered(float(rank)) == [0.0, 1.0]

    return run


def early() -> None:
    with alarm(0.03):
        gathered(6.0)


def late() -> None:
    with alarm(0.3):
        gathered(6.0)


def when_done() -> None:
    broken = after(launch_ops.shm_gather, Interrupted)
    with mock.patch.object(launch_ops, "shm_gather", broken):
        gathered(6.0)


def twice() -> None:
    """Another signal comes before the first has been dealt with."""
    with alarm(0.03), mock.patch.object(Workspace, "mark_dead", side_effect=interrupt):
        gathered(6.0)


def break_off_early(rank: int, size: int) -> None:
    refused_after(early)(rank, size)


def break_off_late(rank: int, size: int) -> None:
    refused_after(late)(rank, size)


def break_off_when_done(rank: int, size: int) -> None:
    refused_after(when_done, needs_peer=True)(rank, size)


def break_off_twice(rank: int, size: int) -> None:
    refused_after(twice)(rank, size)


@pytest.mark.parametrize(
    "broken_off",
    [break_off_early, break_off_late, break_off_when_done, break_off_twice],
)
def test_a_call_that_was_published_is_not_made_again(
    broken_off: Callable[[int, int], None],
) -> None:
    world(2).run(broken_off)


def before_it_is_published(rank: int, size: int) -> None:
    gathered(0.0)
    for _ in range(2):
        if rank == 0:
            broken = mock.Mock(side_effect=Interrupted)
            with (
                mock.patch.object(launch_ops, "shm_gather", broken),
                pytest.raises(Interrupted),
            ):
                gathered(9.0)
        assert gathered(float(rank)) == [0.0, 1.0]


def test_a_call_that_was_not_published_can_be_made_again() -> None:
    world(2).run(before_it_is_published)


def in_the_set_up(rank: int, size: int) -> None:
    group = dist.new_group(list(range(size)))
    name = group.group_name
    combine(name, rank, size)
    wide = torch.full((2, 1 << 16), float(rank))
    if rank == 0:
        broken = after(Workspace._create_arena, Interrupted)
        with (
            mock.patch.object(Workspace, "_create_arena", broken),
            pytest.raises(Interrupted),
        ):
            ops.kv_gather(wide, TOKEN, name)
        with pytest.raises(DCPError, match="broken off by Interrupted"):
            ops.kv_gather(wide, TOKEN, name)
    else:
        with pytest.raises(DCPTimeoutError, match="rank 0 has given up"):
            ops.kv_gather(wide, TOKEN, name)
    recover(group)
    assert ops.kv_gather(wide, TOKEN, name)[0][::2, 0].tolist() == [0.0, 1.0]


def test_a_set_up_that_was_broken_off_is_not_gone_on_with() -> None:
    world(2).run(in_the_set_up)


def in_collectives(rank: int, size: int) -> None:
    rows = 300  # more than config.max_tokens
    assert gathered(float(rank), rows) == [0.0, 1.0]
    if rank == 0:
        broken = after(reference.kv_gather, Interrupted)
        with (
            mock.patch.object(reference, "kv_gather", broken),
            pytest.raises(Interrupted),
        ):
            gathered(6.0, rows)
        with pytest.raises(DCPError, match="kv_gather was broken off by Interrupted"):
            gathered(1.0, rows)
    else:
        assert gathered(7.0, rows) == [6.0, 7.0]
        with pytest.raises(DCPTimeoutError, match="rank 0 has given up"):
            gathered(1.0, rows)
    recover()
    assert gathered(float(rank), rows) == [0.0, 1.0]


def test_collectives_that_stand_in_are_not_made_again_either() -> None:
    world(2).run(in_collectives)


def handler_calls(rank: int, size: int) -> None:
    """An exchange from a handler within an exchange of the same thread."""
    gathered(0.0)
    workspace = registry.workspace_for(group_name())
    dist.barrier()
    if rank == 0:

        def nested(*_: object) -> int:
            gathered(5.0)
            return launch_ops.DONE

        with pytest.raises(DCPError, match="has not ended, which a signal"):
            workspace.run(nested, (), "kv_gather", "")
        dist.barrier()
    else:
        dist.barrier()
    recover()
    assert gathered(float(rank)) == [0.0, 1.0]


def test_an_exchange_within_an_exchange_is_refused() -> None:
    world(2).run(handler_calls)
