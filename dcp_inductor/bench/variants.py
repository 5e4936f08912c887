"""What ``bench.gpus`` compares: each exchange in every way, a call without arguments.

A variant returns this rank's result. torch's own symmetric memory is composed to the
same job from its collectives, none of which uses multicast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcp_inductor import config, ops, reference
from dcp_inductor.bench.four_launch import FourLaunch

Variants = dict[str, Callable[[], Tensor]]
_EVERY_SIZE = 1 << 40


class Exchanges:
    """The variants over one group.

    Args:
        group: NCCL, a GPU each.
        four_launch: the baseline, or None where it could not be built.
    """

    def __init__(
        self, group: dist.ProcessGroup, four_launch: FourLaunch | None
    ) -> None:
        self._group, self._four_launch = group, four_launch
        self._name, self._size = group.group_name, group.size()
        self._token = torch.empty(0)
        self._kept: list[Any] = []

    def combine(self, output: Tensor, lse: Tensor) -> Variants:
        """``[T, H, D]`` and ``[T, H]`` to ``[T, H / N, D]``."""
        from dcp_inductor.runtime import collective_combine

        variants: Variants = {
            name: partial(
                _first, ops.a2a_lse_reduce, output, lse, self._token, self._name, name
            )
            for name in ("marked", "tiled")
        }
        bf16 = output.dtype == torch.bfloat16
        if self._four_launch is not None and bf16 and self._size <= 8:
            variants["four_launch"] = partial(self._four_launch, output, lse)
        variants["nccl_all_to_all"] = lambda: collective_combine.packed_all_to_all(
            output, lse, self._name
        )[0]
        variants["nccl_gather_reduce_scatter"] = lambda: (
            collective_combine.corrected_reduce(output, lse, self._name)[0]
        )
        variants["torch_symm_mem"] = self._torch_combine(output, lse)
        return variants

    def q_gather(self, query: Tensor) -> Variants:
        """``[T, h, D]`` to ``[T, H, D]``."""
        gathered = self._torch_gather(query)

        def torch_symm_mem() -> Tensor:
            every = gathered().view(self._size, *query.shape)
            return every.transpose(0, 1).flatten(1, 2)

        return {
            **self._gathers(ops.q_gather, query),
            "nccl": lambda: reference.q_gather(query, self._name),
            "torch_symm_mem": torch_symm_mem,
        }

    def kv_gather(self, rows: Tensor) -> Variants:
        """``[t, D]`` to ``[N * t, D]``."""
        return {
            **self._gathers(ops.kv_gather, rows),
            "nccl": lambda: reference.kv_gather(rows, self._name),
            "torch_symm_mem": self._torch_gather(rows),
        }

    def _gathers(self, op: Callable[..., Any], x: Tensor) -> Variants:
        return {
            name: partial(_first, op, x, self._token, self._name, name)
            for name in ("packets", "slices")
        }

    def _symmetric(self, like: Tensor) -> Tensor:
        from dcp_inductor.runtime import symm_mem

        nbytes = like.numel() * like.element_size()
        tensor = symm_mem.allocate(nbytes, like.device)
        self._kept.append(symm_mem.SymmetricBuffer(tensor, self._group))
        return tensor.view(like.dtype).view(like.shape)

    def _torch_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Rows that are in symmetric memory already, pulled by the copy engines."""
        mine = self._symmetric(x).copy_(x)

        def call() -> Tensor:
            pending = torch.ops.symm_mem._low_contention_all_gather(mine, self._name)
            return torch.ops._c10d_functional.wait_tensor(pending)

        return call

    def _torch_combine(self, output: Tensor, lse: Tensor) -> Callable[[], Tensor]:
        """LSEs by a one-shot sum of disjoint slots, weights, one reduce-scatter."""
        from dcp_inductor.triton import combine

        tokens, heads, head_dim = output.shape
        lses = self._symmetric(lse.new_empty((self._size, tokens, heads)))
        lses.zero_()
        weighted = self._symmetric(output.view(-1))
        rank = self._group.rank()

        def call() -> Tensor:
            lses[rank].copy_(lse)
            every = torch.ops.symm_mem.one_shot_all_reduce(lses, "sum", self._name)
            combine.weigh(
                output, every, rank, self._size, False, True, False, into=weighted
            )
            result = output.new_empty(output.numel() // self._size)
            torch.ops.symm_mem.reduce_scatter_out(weighted, self._name, False, result)
            return result.view(tokens, -1, head_dim)

        return call

    def close(self) -> None:
        """Give back what was allocated since the last time; on all ranks together."""
        for buffer in self._kept:
            buffer.close()
        self._kept.clear()


@contextlib.contextmanager
def one_kernel_for_all(name: str) -> Iterator[None]:
    """Let every exchange within take the kernel ``name`` (or, of the other op, the one
    for as few or many rows) whatever its size: finds the crossover.
    """
    bound = _EVERY_SIZE if name in ("marked", "packets") else 1
    with config.patch(marked_bytes=bound, packet_bytes=bound):
        yield


def _first(op: Callable[..., Any], *arguments: Any) -> Tensor:
    # The last one names the kernel, and the site.
    with one_kernel_for_all(arguments[-1]):
        return op(*arguments[:-1], site=arguments[-1])[0]
