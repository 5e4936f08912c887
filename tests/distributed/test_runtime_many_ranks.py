"""Groups that are larger than the CUDA kernels serve, played with a smaller limit.

The CUDA runtime decides about a group before it touches a GPU, so tensors on the CPU
can stand in for its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dcp_inductor import config, ops, reference
from dcp_inductor.runtime import cuda_exchange, cuda_layout, kernels
from tests.support import Log, combine, fallbacks, fresh_group, gather, world


@contextmanager
def cuda_kernels_serve(ranks: int) -> Iterator[None]:
    """Let CPU tensors take the CUDA runtime, whose kernels serve this many ranks."""
    saved = kernels._DIRECT["cpu"], cuda_layout.MAX_RANKS
    kernels._DIRECT["cpu"], cuda_layout.MAX_RANKS = cuda_exchange, ranks
    try:
        yield
    finally:
        kernels._DIRECT["cpu"], cuda_layout.MAX_RANKS = saved


def too_many(rank: int, size: int) -> list[str]:
    group = fresh_group(size)
    name = group.group_name
    with cuda_kernels_serve(size - 1), Log() as log:
        for seed in range(3):
            combine(name, rank, size, seed=seed)
            gather(name, rank, size)
            rows = torch.full((2, 3), float(rank))
            got = ops.kv_gather(rows, torch.empty(0), name)[0]
            assert torch.equal(got, reference.kv_gather(rows, name))
        assert fallbacks() == {"fallback.ranks": 9}
        with config.patch(direct_kv_gather="force"):
            with pytest.raises(RuntimeError, match=f"{size} ranks are more than"):
                ops.kv_gather(rows, torch.empty(0), name)
    return log.messages


def test_a_group_beyond_the_kernels_takes_the_collectives_on_all_ranks() -> None:
    first, *others = world(4).run(too_many)
    # Once for each op, on one rank.
    assert len(first) == 3, first
    assert all("uses the collectives: 4 ranks are more than 3" in m for m in first)
    assert others == [[], [], []]
