"""Ranks that share one process and one GPU, each with memory and a stream of its own.

They go through the launch ops and layouts that real ranks use, without a group. Fast,
since nothing switches between processes; what a process boundary adds is for the
worlds of real processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from dcp_inductor.runtime import cuda_launch_ops, cuda_layout, cuda_library, symm_mem

# Ranks wait for each other, so no two may share a hardware queue. Read as CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


class VirtualRanks:
    """The channels of ``size`` ranks.

    Args:
        size: number of ranks.
        timeout_s: of every wait.
    """

    def __init__(self, size: int, timeout_s: float = 10.0) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        problem = cuda_library.load(symm_mem.facts(device)["capability"])
        assert not problem, problem
        self.size = size
        self.timeout_s = timeout_s
        self.streams = [torch.cuda.Stream() for _ in range(size)]
        self.faults = [
            torch.zeros(cuda_layout.FAULT_WORDS, dtype=torch.int32, pin_memory=True)
            for _ in range(size)
        ]
        self._arenas: list[Tensor] = []  # kept, since tables hold their addresses only
        self.controls = [_zeros(cuda_layout.HEADER_BYTES) for _ in range(size)]
        for control in self.controls:
            control[cuda_layout.EPOCH].view(torch.int32).fill_(cuda_layout.FIRST_EPOCH)

    def arena(self, layout: cuda_layout.ArenaLayout) -> list[Tensor]:
        """Payload memory of all ranks, armed; data that needs no mark is left as is."""
        arenas = []
        for _ in range(self.size):
            arena = torch.empty(layout.size, dtype=torch.uint8, device="cuda")
            for section in layout.sections:
                if section is not layout.data or layout.kind in ("marked", "packets"):
                    stretch = arena[section.offset : section.offset + section.size]
                    stretch.fill_(section.fill)
            arenas.append(arena)
        self._arenas += arenas
        return arenas

    def tables(self, arenas: list[Tensor], words: list[int]) -> list[Tensor]:
        """Launch tables by rank."""
        return [
            torch.tensor(
                cuda_layout.channel_words(
                    rank, int(self.timeout_s * 1e9), 7, 0, self.size,
                    self.faults[rank].data_ptr(),
                    [control.data_ptr() for control in self.controls],
                    [arena.data_ptr() for arena in arenas],
                )
                + words
            )
            for rank in range(self.size)
        ]  # fmt: skip

    def run(self, launch: Callable[[int, int], object], steps: int = 1) -> None:
        """``launch(rank, step)`` on every rank's stream; they start and end together.

        Within a run nothing but the exchanges holds ranks together. A graph with all
        ranks in it may run few of them at a time, so only two of them go into one.
        """
        current = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(current)
        for step in range(steps):
            for rank, stream in enumerate(self.streams):
                with torch.cuda.stream(stream):
                    launch(rank, step)
        for stream in self.streams:
            current.wait_stream(stream)

    def check(self) -> None:
        """Wait for the launches and fail on what they reported."""
        torch.cuda.synchronize()
        records = [fault.tolist()[:11] for fault in self.faults if fault[0]]
        assert not records, records


def combine(
    ranks: VirtualRanks,
    tables: list[Tensor],
    partials: list[Tensor],
    lses: list[Tensor],
    outputs: list[Tensor],
) -> None:
    """Queue one merge of all ranks' ``[T, H, D]`` into ``outputs``."""
    ranks.run(
        lambda rank, _: cuda_launch_ops.symm_a2a_lse_reduce(
            partials[rank], lses[rank], None, None, outputs[rank], None, False,
            tables[rank],
        )
    )  # fmt: skip


def _zeros(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
