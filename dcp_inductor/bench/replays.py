"""Times calls inside CUDA graphs, several variants in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Several in both graphs: a graph of one launch starts in another way than longer ones.
FEW, MANY = 4, 24
_ROUNDS, _WARM_UP = 40, 4
_HEAD_START_CYCLES = 800_000  # about 400 us, in which the host queues all that follows

Call = Callable[[], Any]


@dataclass
class Captured:
    """A graph of some calls, and the result of the last one."""

    graph: torch.cuda.CUDAGraph
    result: Tensor


def capture(call: Call, count: int) -> Captured:
    """``count`` calls in one graph. The call must have run before, on all ranks."""
    graph = torch.cuda.CUDAGraph()
    # The thread that watches NCCL's work queries events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            result = call()
    return Captured(graph, result)


def both(call: Call) -> tuple[Captured, Captured]:
    """The two graphs that :func:`medians` takes."""
    return capture(call, FEW), capture(call, MANY)


def medians(
    graphs: Mapping[str, tuple[Captured, Captured]], align: Call, meet: Call
) -> dict[str, float]:
    """Microseconds per call of each variant: (t_24 - t_4) / 20, of medians.

    Args:
        graphs: of ``FEW`` and of ``MANY`` calls, by variant.
        align: queues what lets this rank's stream go on only together with its peers'.
        meet: a barrier of the hosts.
    """
    times: dict[tuple[str, int], list[float]] = {}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(_ROUNDS + _WARM_UP):
        for name, pair in graphs.items():
            for which, captured in enumerate(pair):
                meet()
                torch.cuda._sleep(_HEAD_START_CYCLES)
                align()
                begin.record()
                captured.graph.replay()
                end.record()
                end.synchronize()
                if turn >= _WARM_UP:
                    elapsed = begin.elapsed_time(end) * 1e3
                    times.setdefault((name, which), []).append(elapsed)
    return {
        name: (statistics.median(times[name, 1]) - statistics.median(times[name, 0]))
        / (MANY - FEW)
        for name in graphs
    }
