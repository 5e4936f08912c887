"""Shared helpers of the tests: worlds of real processes, kept alive between tests.

A worker imports torch once and then runs one function after another, so that a test
costs what it does and not what a process start costs. The parent is the watchdog: a
world that does not answer in time is killed and the test fails.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import mmap
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import hypothesis
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dcp_inductor import extension, launch_ops, ops, reference
from dcp_inductor.capability import Refusal
from dcp_inductor.runtime import layout, registry

# Examples are the same on every run, and a busy machine is no failure.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.load_profile("steady")

WATCHDOG_S = 60.0
# Importing torch, and compiling the library once, on a busy machine.
START_S = 180.0
# After one rank has failed the others may hang in what they were doing with it.
_GRACE_S = 10.0

_worlds: dict[int, World] = {}


class HangError(AssertionError):
    """Ranks that did not answer before the watchdog's limit."""


class World:
    """``size`` processes with a gloo group, each waiting for functions to run."""

    def __init__(self, size: int, environment: dict[str, str] | None = None) -> None:
        self.size = size
        self._directory = tempfile.TemporaryDirectory(prefix="dcp-test-")
        rendezvous = str(Path(self._directory.name) / "store")
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self.processes = []
        changed = {
            "OMP_NUM_THREADS": "1",
            # Below the watchdog, so that a lost rank is an error with a record.
            "DCP_INDUCTOR_TIMEOUT_S": "30",
            **(environment or {}),
        }
        saved = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_work, args=(rank, size, rendezvous, theirs), daemon=True
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self.processes.append(process)
        finally:
            for name, value in saved.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        self._collect(START_S, ())

    def run(
        self, function: Callable[..., Any], *args: Any, limit_s: float = WATCHDOG_S
    ) -> list[Any]:
        """``function(rank, world_size, *args)`` on every rank; results by rank.

        Raises:
            HangError: some rank did not answer within ``limit_s``.
            AssertionError: some rank raised; has every traceback.
        """
        outcomes = self.outcomes(function, *args, limit_s=limit_s)
        failures = [
            f"rank {rank}:\n{value}"
            for rank, (ok, value) in enumerate(outcomes)
            if not ok
        ]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [value for _, value in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        limit_s: float = WATCHDOG_S,
        may_die: tuple[int, ...] = (),
    ) -> list[tuple[bool, Any]]:
        """Per rank, True and the result, or False and the traceback."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._collect(limit_s, may_die)

    def _collect(
        self, limit_s: float, may_die: tuple[int, ...]
    ) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + limit_s
        while len(answers) < self.size:
            pending = [p for r, p in enumerate(self._pipes) if r not in answers]
            ready = wait(pending, timeout=max(deadline - time.monotonic(), 0))
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, "the process ended")
                if not answers[rank][0] and rank not in may_die:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            if not ready:
                missing = sorted(set(range(self.size)) - set(answers))
                told = "\n".join(str(v) for ok, v in answers.values() if not ok)
                self.close()
                raise HangError(f"no answer from ranks {missing}\n{told}")
        return [answers[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes, at once."""
        if _worlds.get(self.size) is self:
            del _worlds[self.size]
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._directory.cleanup()


def world(size: int) -> World:
    """The shared world of ``size`` ranks; made anew after a test that broke it."""
    if size not in _worlds:
        _worlds[size] = World(size)
    return _worlds[size]


@atexit.register
def _close_all() -> None:
    for each in list(_worlds.values()):
        each.close()


def group_name() -> str:
    """Name of the world's group, within a worker."""
    return dist.group.WORLD.group_name


def fallbacks() -> dict[str, int]:
    """Calls of this test that took the reference, by reason, within a worker."""
    counts = _counters()
    return {k: v for k, v in counts.items() if k.startswith("fallback.") and v}


def _counters() -> dict[str, int]:
    # The first fallback imports it, which takes a second; none has happened without.
    utils = sys.modules.get("torch._dynamo.utils")
    return utils.counters["dcp_inductor"] if utils else {}


def combine(
    name: str, rank: int, size: int, tokens: int = 3, seed: int = 0
) -> torch.Tensor:
    """One combine over heads, checked; returns the result."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(size, tokens, 2 * size, 16, generator=generator)
    lses = torch.randn(size, tokens, 2 * size, generator=generator)
    got = ops.a2a_lse_reduce(outputs[rank], lses[rank], torch.empty(0), name)[0]
    exact = reference.merge(outputs, lses)[0].chunk(size, 1)[rank]
    torch.testing.assert_close(got, exact, atol=1e-5, rtol=1e-5)
    return got


def gather(name: str, rank: int, size: int, tokens: int = 3) -> None:
    """One query gather, checked."""
    rows = torch.arange(tokens * 4, dtype=torch.float32).view(tokens, 1, 4)
    got = ops.q_gather(rows + 100 * rank, torch.empty(0), name)[0]
    assert torch.equal(got, torch.cat([rows + 100 * r for r in range(size)], 1))


def epoch(name: str) -> int:
    """Exchanges that this rank has begun in a group that exchanges directly."""
    workspace = registry.workspace_for(name)
    assert not isinstance(workspace, Refusal), workspace
    return workspace.epoch


def fresh_group(world_size: int) -> dist.ProcessGroup:
    """A group of all ranks with no history."""
    return dist.new_group(list(range(world_size)))


class Log(logging.Handler):
    """Messages of dcp_inductor at warning level and above, while it is in use."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> Log:
        logging.getLogger("dcp_inductor").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("dcp_inductor").removeHandler(self)


class VirtualRanks:
    """The launch tables of ``size`` ranks of one process, whose waits return at once.

    A rank's call publishes and says pending; the ranks' calls are then resumed in any
    order. So every interleaving of publishing and reading can be played, and the
    memory between them read or damaged.
    """

    def __init__(self, size: int, slot_bytes: int) -> None:
        self.size = size
        self.slot_bytes = slot_bytes
        self._maps = [
            (mmap.mmap(-1, layout.CONTROL_BYTES), mmap.mmap(-1, 2 * slot_bytes))
            for _ in range(size)
        ]
        self.controls = [memoryview(control) for control, _ in self._maps]
        self.arenas = [memoryview(arena) for _, arena in self._maps]
        addresses = [[_address(m) for m in pair] for pair in self._maps]
        self.tables = [
            torch.tensor(
                layout.table_words(
                    rank, 0, 0, slot_bytes, *map(list, zip(*addresses, strict=True))
                )
            )
            for rank in range(size)
        ]

    def launch(self, launch: Callable[[int, bool], int]) -> list[int]:
        """``launch(rank, resume)`` of every rank to its end; statuses by rank."""
        started = [launch(rank, False) for rank in range(self.size)]
        return [
            launch(rank, True) if status == launch_ops.PENDING else status
            for rank, status in enumerate(started)
        ]

    def set_epoch(self, epoch: int) -> None:
        """Let every rank stand at the end of call ``epoch``."""
        for control in self.controls:
            layout.write_u32(control, layout.EPOCH, epoch)
            layout.write_u32(control, layout.slot_offset(epoch), epoch)
            layout.write_u32(control, layout.slot_offset(epoch - 1), epoch - 1)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _work(rank: int, size: int, rendezvous: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    pipe.send((True, extension.load_extension()))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            _counters().clear()
            outcome = (True, function(rank, size, *args))
        except BaseException:
            outcome = (False, traceback.format_exc())
        pipe.send(outcome)
