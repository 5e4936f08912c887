"""Numbers of ranks that are no power of two, between real processes."""

from __future__ import annotations

import pytest
import torch

from dcp_inductor import ops
from dcp_inductor.bench.variants import one_kernel_for_all
from dcp_inductor.capability import Refusal
from dcp_inductor.runtime import cuda_registry
from tests.cuda import worlds
from tests.cuda.test_exchange import close, oracle
from tests.cuda.test_replay import captured
from tests.cuda.worlds import TOKEN, draw
from tests.support import fallbacks, fresh_group

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]


def exchanges(rank: int, size: int) -> None:
    """Every op by the kernels for few rows, then by those for many."""
    with one_kernel_for_all("packets"):
        assert check(rank, size) == {"marked", "packets"}
    with one_kernel_for_all("slices"):
        assert check(rank, size) == {"tiled", "slices"}
    assert not fallbacks(), fallbacks()


def check(rank: int, size: int) -> set[str]:
    """Eager calls and replays in turn; the kinds of memory that they took."""
    name = fresh_group(size).group_name
    heads, dtype = 2 * size + 1, torch.bfloat16
    splits = [2] * (size - 1) + [3]
    query = torch.zeros(5, 2, 576, device="cuda", dtype=dtype)
    rows = torch.zeros(33, 576, device="cuda", dtype=dtype)
    partial = torch.zeros(5, heads, 512, device="cuda", dtype=dtype)
    lse = torch.zeros(5, heads, device="cuda")

    def step():
        return (
            ops.q_gather(query, TOKEN, name, padded_heads=heads)[0],
            ops.kv_gather(rows, TOKEN, name)[0],
            ops.a2a_lse_reduce(partial, lse, TOKEN, name, split_sizes=splits)[0],
        )

    graph, replayed = captured(step)
    for i in range(6):
        queries = draw(i, size, *query.shape, dtype=dtype)
        every = draw(100 + i, size, *rows.shape, dtype=dtype)
        outputs = draw(200 + i, size, *partial.shape, dtype=dtype)
        lses = draw(300 + i, size, *lse.shape)
        query.copy_(queries[rank])
        rows.copy_(every[rank])
        partial.copy_(outputs[rank])
        lse.copy_(lses[rank])
        if i % 3 == 0:
            whole, gathered, merged = step()
        else:
            graph.replay()
            whole, gathered, merged = replayed
        assert torch.equal(whole[:, :-1], queries.transpose(0, 1).flatten(1, 2))
        assert not whole[:, -1].any()
        assert torch.equal(gathered, every.flatten(0, 1))
        close(merged, oracle(outputs, lses, "heads", splits, rank)[0], dtype)
    cuda_registry.check()
    workspace = cuda_registry.workspace_for(name, query.device)
    assert not isinstance(workspace, Refusal)
    return {layout.kind for layout in workspace.arenas}


@pytest.mark.parametrize("size", [3, 5, 6], ids="N{}".format)
def test_any_number_of_ranks_exchanges_directly(size: int) -> None:
    with worlds.own_world(size) as world:
        world.run(exchanges, limit_s=300)
