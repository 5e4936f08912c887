"""Runs a function on several ranks, each a process of this machine, and never hangs.

The parent watches: a rank that raises, dies or takes too long ends all of them.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


class RankError(RuntimeError):
    """A rank raised, died or ran out of time; the message says which and how."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float,
    on_progress: Callable[[str], None] | None = None,
) -> list[Any]:
    """``function(report, *args)`` on every rank of a new gloo group; results by rank.

    ``function`` must be importable, and its arguments and result picklable. What rank 0
    gives to ``report(text)`` reaches ``on_progress`` here; an empty text comes about
    every second in between.

    Raises:
        RankError: a rank failed; the others have been ended.
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    try:
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(there, rank, world_size, store.port, timeout_s, function, args),
                daemon=True,
            )
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        return _collect(processes, pipes, timeout_s, on_progress)
    finally:
        for process in processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(
    processes: list[Any],
    pipes: list[Connection],
    timeout_s: float,
    on_progress: Callable[[str], None] | None,
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    grace = None  # after a failure: time for the ranks that caused it to speak up, too
    while len(results) + len(failures) < len(pipes):
        open_ranks = [r for r in range(len(pipes)) if r not in results | failures]
        ready = wait([pipes[rank] for rank in open_ranks], timeout=1.0)
        for rank in open_ranks:
            if pipes[rank] not in ready:
                continue
            try:
                kind, value = pipes[rank].recv()
            except EOFError:
                processes[rank].join(5)
                failures[rank] = f"ended with exit code {processes[rank].exitcode}"
                continue
            if kind == "result":
                results[rank] = pickle.loads(value)
            elif kind == "error":
                failures[rank] = value
            elif on_progress is not None:
                on_progress(value)
        if on_progress is not None and not ready:
            on_progress("")
        if failures and grace is None:
            grace = time.monotonic() + 3
        if grace is not None and time.monotonic() > grace:
            break
        if time.monotonic() > deadline:
            raise RankError(
                f"ranks {open_ranks} were not done after {timeout_s:g} s and were ended"
            )
    if failures:
        lines = [f"rank {rank}: {failures[rank]}" for rank in sorted(failures)]
        raise RankError("\n".join(lines))
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe: Connection,
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    def report(text: str) -> None:
        if rank == 0:
            pipe.send(("progress", text))

    torch.set_num_threads(1)  # as many ranks as cores, or more
    try:
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("127.0.0.1", port, is_master=False),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = function(report, *args)
        # Pickled by value: multiprocessing would pass tensors as handles to memory that
        # dies with this process.
        pipe.send(("result", pickle.dumps(result)))
        # Leave together: a rank that is still busy may need this one's threads.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise SystemExit(1) from None
