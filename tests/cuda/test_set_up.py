"""Setting a group up, and what a first use within a capture is told."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dcp_inductor
from dcp_inductor import config, ops
from dcp_inductor.errors import DCPError
from dcp_inductor.runtime import cuda_registry
from tests.cuda import worlds
from tests.cuda.worlds import TOKEN
from tests.support import fallbacks

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]


def capture_fails(call) -> str:
    """Message of ``call``, which must fail, within a capture."""
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(DCPError) as raised, torch.cuda.graph(graph):
        call()
    torch.cuda.synchronize()
    return str(raised.value)


def set_up_inside_capture(rank: int, size: int) -> tuple[str, str]:
    group = dist.new_group(list(range(size)))
    name = group.group_name
    rows = torch.ones(2, 16, device="cuda")
    partial = torch.ones(64, 2 * size, 512, device="cuda")
    lse = torch.zeros(64, 2 * size, device="cuda")
    unprepared = capture_fails(lambda: ops.kv_gather(rows, TOKEN, name))
    assert cuda_registry.memory_bytes(group) == 0
    assert dcp_inductor.prepare(group)
    controls = cuda_registry.memory_bytes(group)
    assert controls > 0
    # The group is set up, but not the memory for an exchange of this kind.
    new_kind = capture_fails(lambda: ops.kv_gather(rows, TOKEN, name))
    assert "kv_gather[2, 16]" in new_kind
    got = ops.kv_gather(rows * rank, TOKEN, name)[0]
    assert got.sum() == 32 * sum(range(size))
    # Nor for one of another size: 64 tokens take another kernel than 2.
    ops.a2a_lse_reduce(partial[:2], lse[:2], TOKEN, name)
    with config.patch(marked_bytes=partial[:2].nbytes):
        new_size = capture_fails(lambda: ops.a2a_lse_reduce(partial, lse, TOKEN, name))
        assert "a2a_lse_reduce[64" in new_size
        ops.a2a_lse_reduce(partial, lse, TOKEN, name)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            merged = ops.a2a_lse_reduce(partial, lse, TOKEN, name)[0]
        graph.replay()
        assert torch.equal(merged, partial[:, :2])
    assert not fallbacks(), fallbacks()
    assert cuda_registry.memory_bytes(group) > controls
    torch.cuda.synchronize()
    cuda_registry.close(group)
    assert cuda_registry.memory_bytes(group) == 0
    return unprepared, new_kind


def test_first_use_inside_a_capture_says_what_to_do() -> None:
    for unprepared, new_kind in worlds.run(2, set_up_inside_capture):
        assert "dcp_inductor.prepare(group) on all ranks before the capture" in (
            unprepared
        )
        assert "run what is captured once on all ranks" in new_kind
