"""torch.compile on CUDA: rewritten graphs, CUDA graph trees, and the example model."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from dcp_inductor import config, explain
from dcp_inductor.backend import dcp_inductor
from dcp_inductor.capability import Refusal
from dcp_inductor.runtime import cuda_exchange, cuda_layout, cuda_registry
from tests.cuda import worlds
from tests.cuda.test_exchange import close, oracle
from tests.cuda.test_replay import skew
from tests.cuda.worlds import draw
from tests.support import fallbacks

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]


class Merge(torch.nn.Module):
    """All-gather the LSEs, weight, reduce-scatter over heads; some work around it."""

    def forward(self, out, lse):
        group = dist.group.WORLD
        size, rank = group.size(), group.rank()
        out = out * 1.5
        every = funcol.all_gather_tensor(lse.contiguous(), 0, group)
        every = every.view(size, *lse.shape)
        total = torch.logsumexp(every, 0)
        weighted = out.float() * torch.exp(every[rank] - total).unsqueeze(-1)
        merged = funcol.reduce_scatter_tensor(
            weighted.transpose(0, 1).contiguous(), "sum", 0, group
        )
        return merged.transpose(0, 1).to(out.dtype).relu()


class Skips(logging.Handler):
    """Reasons for which Inductor does without CUDA graphs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "skipping cudagraphs" in record.getMessage():
            self.seen.append(record.getMessage())


@contextmanager
def counted_merges() -> Iterator[list[str]]:
    """Sites of the merges that the host begins; the replay of a graph begins none."""
    sites: list[str] = []
    merge = cuda_exchange.a2a_lse_reduce

    def count(*args: Any) -> Any:
        sites.append(args[-1])
        return merge(*args)

    cuda_exchange.a2a_lse_reduce = count
    try:
        yield sites
    finally:
        cuda_exchange.a2a_lse_reduce = merge


def compiled(rank: int, size: int, mode: str | None, steps: int) -> dict[str, int]:
    """As many steps to warm up as are counted behind them."""
    if mode:  # so this mode's warm-up makes the memory
        assert cuda_registry.memory_bytes(dist.group.WORLD) == 0
    torch._dynamo.reset()
    counters.clear()
    skips = Skips()
    log = logging.getLogger("torch._inductor.cudagraph_trees")
    log.addHandler(skips)
    logging.getLogger("torch.__perf_hints").addHandler(skips)
    options = {"mode": mode} if mode else {}
    model = torch.compile(Merge(), backend=dcp_inductor, options=None, **options)
    device = torch.device("cuda", torch.cuda.current_device())
    with counted_merges() as calls:
        for i in range(2 * steps):
            tokens = (4, 1, 4, 2)[i % 4]
            outputs = draw(i, size, tokens, 2 * size, 64, dtype=torch.bfloat16)
            lses = draw(500 + i, size, tokens, 2 * size)
            with torch.no_grad():
                got = model(outputs[rank], lses[rank]).clone()
            exact = oracle(outputs * 1.5, lses, "heads", None, rank)[0].relu()
            close(got, exact, torch.bfloat16)
            if i == steps - 1:
                warm = epoch(device)
                calls.clear()
    # Every step exchanges on the device, whoever began it.
    assert epoch(device) - warm == steps
    assert not skips.seen, skips.seen
    assert not fallbacks(), fallbacks()
    return dict(counters["dcp_inductor"]) | {
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
        "host_calls": len(calls),
    }


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_merge_runs_direct(mode: str | None) -> None:
    steps = 12
    with worlds.own_world(2) if mode else nullcontext(worlds.cuda_world(2)) as world:
        found = world.run(compiled, mode, steps, limit_s=400)
    for counts in found:
        assert counts["rewritten"] >= 1, counts
        assert counts["cudagraph_skips"] == 0, counts
        if mode:
            assert counts["host_calls"] < steps, counts  # graphs are replayed
        else:
            assert counts["host_calls"] == steps, counts


def capacity(rank: int, size: int) -> None:
    """Sizes around what a workspace holds, compiled once for all of them."""
    torch._dynamo.reset()
    counters.clear()
    model = torch.compile(Merge(), backend=dcp_inductor, dynamic=True)
    beyond = 0
    graphs = []
    with config.patch(max_tokens=16), torch.no_grad():
        for i, tokens in enumerate((15, 1, 15, 16, 17, 64, 16, *[16] * 10)):
            outputs = draw(i, size, tokens, 2 * size, 64, dtype=torch.bfloat16)
            lses = draw(500 + i, size, tokens, 2 * size)
            skew(i, rank, size)
            got = model(outputs[rank], lses[rank])
            exact = oracle(outputs * 1.5, lses, "heads", None, rank)[0].relu()
            close(got, exact, torch.bfloat16)
            beyond += tokens > 16
            graphs.append(counters["stats"]["unique_graphs"])
            assert sum(fallbacks().values()) == beyond, fallbacks()
    assert graphs[1] <= 2, graphs  # one for all sizes, perhaps one for a single token
    assert graphs[1:] == graphs[1:2] * len(graphs[1:]), graphs


def test_sizes_around_the_capacity_take_no_new_graph() -> None:
    worlds.run(2, capacity, limit_s=200)


class Layer(torch.nn.Module):
    """Query gather, a collective of the same group that stays, and the merge."""

    def forward(self, query, extra, out, lse, weight):
        group = dist.group.WORLD
        size, rank = group.size(), group.rank()
        heads = funcol.all_gather_tensor(query.transpose(0, 1).contiguous(), 0, group)
        other = funcol.all_reduce(extra @ weight, "sum", group)
        every = funcol.all_gather_tensor(lse, 0, group).view(size, *lse.shape)
        scale = torch.exp(every[rank] - torch.logsumexp(every, 0))
        weighted = (out.float() * scale[..., None]).transpose(0, 1).contiguous()
        merged = funcol.reduce_scatter_tensor(weighted, "sum", 0, group)
        return heads.transpose(0, 1) * 1, other * 1, merged.transpose(0, 1)


def ordered(rank: int, size: int, settings: dict[str, object]) -> dict[str, int]:
    torch._dynamo.reset()
    counters.clear()
    tokens, heads, dim, steps = 4, 2 * size, 64, 8
    weight = draw(0, dim, dim)
    device = torch.device("cuda", torch.cuda.current_device())
    with torch._inductor.config.patch(settings), torch.no_grad():
        model = torch.compile(Layer(), backend=dcp_inductor, dynamic=False)
        for i in range(steps):
            queries = draw(i, size, tokens, 2, dim)
            extras = draw(100 + i, size, tokens, dim)
            outputs = draw(200 + i, size, tokens, heads, dim)
            lses = draw(300 + i, size, tokens, heads)
            skew(i, rank, size)
            got = model(queries[rank], extras[rank], outputs[rank], lses[rank], weight)
            assert torch.equal(got[0], queries.transpose(0, 1).flatten(1, 2))
            torch.testing.assert_close(
                got[1], (extras @ weight).sum(0), rtol=1e-2, atol=1e-2
            )
            close(got[2], oracle(outputs, lses, "heads", None, rank)[0], torch.float32)
            if i == 0:
                epochs = [epoch(device)]
    epochs.append(epoch(device))
    # Two exchanges a step and no other: the ops were never run to be timed.
    assert epochs[1] - epochs[0] == 2 * (steps - 1), epochs
    assert not fallbacks(), fallbacks()
    cuda_registry.check()
    return {"rewritten": counters["dcp_inductor"]["rewritten"], "epoch": epochs[1]}


def epoch(device: torch.device) -> int:
    """Number of the world's next exchange on this rank."""
    workspace = cuda_registry.workspace_for(worlds.name(), device)
    assert not isinstance(workspace, Refusal)
    torch.cuda.synchronize()
    return int(workspace.control.tensor[cuda_layout.EPOCH].view(torch.int32))


@pytest.mark.parametrize(
    "settings",
    [
        {"reorder_for_compute_comm_overlap": True},
        {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON"},
    ],
    ids=["reordered", "autotuned"],
)
def test_order_and_number_of_exchanges_hold(settings: dict[str, object]) -> None:
    counts = worlds.run(2, ordered, settings, limit_s=300)
    assert counts[0] == counts[1]
    assert counts[0]["rewritten"] == 2, counts


def explained(rank: int, size: int) -> tuple[str, int, int]:
    outputs = draw(1, size, 4, 2 * size, 72, dtype=torch.bfloat16)
    lses = draw(2, size, 4, 2 * size)
    with torch.no_grad():
        found = explain(Merge(), outputs[rank], lses[rank])
    [row] = [row for row in found.rows if row.decision == "rewritten"]
    held = cuda_registry.memory_bytes(dist.group.WORLD)
    assert found.memory == {worlds.name(): held}
    return str(found), row.workspace_bytes, held


def test_explain_shows_the_memory_that_exchanges_take() -> None:
    # 256 tokens of 2 heads, 144 bytes a row: two slots of two sources.
    layout = cuda_layout.combine_arena(cuda_layout.MARKED, 2, 256 * 2, 144, 0)
    for text, of_site, held in worlds.run(2, explained):
        assert of_site == layout.size
        assert f"  {layout.size} B\n" in text
        assert f"holds {held} B of symmetric memory on this GPU" in text
        assert held >= layout.size


def example_model(rank: int, size: int) -> tuple[float, float, int]:
    from examples.mla_lm.parallel import create_layout
    from tests.cuda.example_model import errors, through_the_host

    torch._dynamo.reset()
    counters.clear()
    # A group of its own, so that it can be told from the tensor-parallel one.
    dcp_group = dist.new_group(list(range(size)))
    layout = dataclasses.replace(create_layout(size), dcp_group=dcp_group)
    through_the_host(dcp_group)
    # Inductor pads products where it has measured a gain: on one rank, say.
    padding = {"shape_padding": rank == 1, "force_shape_pad": rank == 1}
    with inductor_config.patch(padding):
        eager, compiled = errors(layout, dcp_inductor, 6)
    assert not fallbacks(), fallbacks()
    return eager, compiled, counters["dcp_inductor"]["rewritten"]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_example_model_in_bf16(size: int) -> None:
    for eager, compiled, rewritten in worlds.run(size, example_model, limit_s=280):
        assert rewritten > 0
        assert max(eager, compiled) < 8.0, (eager, compiled)
