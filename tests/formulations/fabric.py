"""Process groups without processes: one fake rank for tracing, N threads for eager
runs.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.fake_pg import FakeStore

from .cases import Context

THREAD_TIMEOUT_S = 60


def grid_groups(world_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Ranks of the row groups (two neighbours) and of the column groups of a grid."""
    rows = [[first, first + 1] for first in range(0, world_size, 2)]
    columns = [list(range(first, world_size, 2)) for first in range(2)]
    return rows, columns


def _make_context(
    rank: int, world_size: int, heads_per_rank: int, grid: bool
) -> Context:
    world = dist.group.WORLD
    if not grid:
        return Context(rank, world_size, world.group_name, heads_per_rank, world)
    mine = []
    for groups in grid_groups(world_size):
        for ranks in groups:
            group = dist.new_group(ranks)
            if rank in ranks:
                mine.append((group.group_name, ranks.index(rank), len(ranks)))
    return Context(rank, world_size, world.group_name, heads_per_rank, world, *mine)


def group_ranks(context: Context) -> dict[str, tuple[int, ...]]:
    """Global ranks of each group that ``context`` names."""
    members = {context.group_name: tuple(range(context.world_size))}
    for (name, _, _), groups in zip(
        (context.row, context.column), grid_groups(context.world_size), strict=True
    ):
        if name:
            members[name] = next(tuple(g) for g in groups if context.rank in g)
    return members


@contextlib.contextmanager
def fake_rank(
    rank: int, world_size: int, heads_per_rank: int = 5, *, grid: bool = False
) -> Iterator[Context]:
    """This process as one rank of a world whose other ranks do not exist.

    A live fake world of the same rank is not shared: entering replaces nothing and
    raises if a default group exists already.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield _make_context(rank, world_size, heads_per_rank, grid)
    finally:
        dist.destroy_process_group()


def run_threads(
    body: Callable[[Context], object],
    world_size: int,
    heads_per_rank: int = 5,
    *,
    grid: bool = False,
) -> list:
    """``body(context)`` on one thread per rank with real collectives; results by rank.

    Raises the first exception of any rank; TimeoutError if a rank is left waiting.
    """
    results: list = [None] * world_size
    errors: list[BaseException] = []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()

    def worker(rank: int) -> None:
        dist.init_process_group(
            "threaded", rank=rank, world_size=world_size, store=store
        )
        try:
            context = _make_context(rank, world_size, heads_per_rank, grid)
            with torch.no_grad():
                results[rank] = body(context)
        except BaseException as error:
            errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [
        threading.Thread(target=worker, args=(r,), daemon=True)
        for r in range(world_size)
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(THREAD_TIMEOUT_S)
    finally:
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(
            f"a rank of {world_size} waited for more than {THREAD_TIMEOUT_S} s"
        )
    return results
