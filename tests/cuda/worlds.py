"""Worlds of real processes for CUDA tests: a GPU each, or all of them on one.

On one GPU the processes take turns, some ten milliseconds an exchange: right for
correctness across address spaces, useless for timing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.support import World, group_name

TOKEN = torch.empty(0)
_worlds: dict[int, World] = {}


def cuda_world(size: int) -> World:
    """The shared CUDA world of ``size`` ranks; made anew after a test that broke it."""
    world = _worlds.get(size)
    if world is None or not all(process.is_alive() for process in world.processes):
        world = _worlds[size] = _new(size)
    return world


@contextmanager
def own_world(size: int) -> Iterator[World]:
    """Ranks in processes that have exchanged nothing yet and end with the block."""
    world = _new(size)
    try:
        yield world
    finally:
        world.close()


def _new(size: int) -> World:
    world = World(
        size,
        {
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
            # The driver's default. With the 32 that virtual.py sets, an H200 gives the
            # 18th process no context: it is out of hardware queues, not of memory.
            "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        },
    )
    world.run(start, limit_s=400)
    return world


def start(rank: int, world_size: int) -> str:
    """Choose this rank's GPU."""
    count = torch.cuda.device_count()
    torch.cuda.set_device(rank % count)
    torch.zeros(1, device="cuda")
    return f"{os.getpid()}"


def run(
    size: int, function: Callable[..., Any], *args: Any, limit_s: float = 120.0
) -> Any:
    """``function(rank, size, *args)`` on every rank of the CUDA world of ``size``."""
    return cuda_world(size).run(function, *args, limit_s=limit_s)


def name() -> str:
    """Name of the world's group, within a worker."""
    return group_name()


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same normal numbers on every rank that asks with this seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to("cuda", dtype)
