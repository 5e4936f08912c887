"""Gathered queries that stay in symmetric memory: bytes, lifetime, graphs, compiled
models.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._dynamo.utils import counters

import dcp_inductor
from dcp_inductor import explain, ops
from dcp_inductor.backend import dcp_inductor as backend
from dcp_inductor.capability import Refusal
from dcp_inductor.runtime import (
    cuda_exchange,
    cuda_launch_ops,
    cuda_layout,
    cuda_registry,
)
from dcp_inductor.runtime.cuda_workspace import Workspace
from tests.cuda import worlds
from tests.cuda.test_compiled import Skips, epoch
from tests.cuda.test_exchange import close, oracle
from tests.cuda.test_replay import MILLISECOND, captured, skew
from tests.cuda.virtual import VirtualRanks
from tests.cuda.worlds import TOKEN, draw
from tests.support import fallbacks, fresh_group

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]


def workspace_of(name: str) -> Workspace:
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = cuda_registry.workspace_for(name, device)
    assert not isinstance(workspace, Refusal), workspace
    return workspace


def in_arena(name: str, x: Tensor) -> bool:
    """Whether ``x`` lies within the data of a view arena of this rank."""
    for layout, arena in workspace_of(name).arenas.items():
        start = arena.tensor.data_ptr() + layout.data.offset
        if layout.kind == cuda_layout.VIEW and start <= x.data_ptr():
            if x.data_ptr() + x.nbytes <= start + layout.data.size:
                return True
    return False


def merge(name: str, size: int, rank: int, seed: int = 1) -> None:
    """A small merge of the group, checked."""
    outputs, lses = draw(seed, size, 2, size, 64), draw(seed + 1, size, 2, size)
    got = ops.a2a_lse_reduce(outputs[rank], lses[rank], TOKEN, name)[0]
    close(got, oracle(outputs, lses, "heads", None, rank)[0], torch.float32)


# Bytes.


def same_bytes(rank: int, size: int) -> None:
    name = fresh_group(size).group_name
    for tokens, heads, dim, dtype, padded in (
        (256, 4, 576, torch.bfloat16, 0),
        (256, 4, 576, torch.bfloat16, 4 * size + 5),
        (100, 16, 576, torch.bfloat16, 0),
        (1, 2, 576, torch.bfloat16, 0),  # by packets, to a tensor of its own
        (64, 16, 576, torch.float8_e4m3fn, 0),
        (129, 8, 576, torch.float8_e4m3fn, 8 * size + 1),
        (97, 3, 512, torch.float32, 3 * size + 3),
        (256, 4, 576, torch.bfloat16, 0),
    ):
        every = draw(20 + tokens, size, tokens, heads, dim).to(dtype)
        fresh = ops.q_gather(every[rank], TOKEN, name, padded_heads=padded)[0]
        # Whatever an earlier call of another T or padding has left there.
        for layout, arena in workspace_of(name).arenas.items():
            if layout.kind == cuda_layout.VIEW:
                arena.tensor[: layout.data.size].fill_(0xFF)
        torch.cuda.synchronize()
        dist.barrier()
        skew(tokens, rank, size)
        view = ops.q_gather_view(every[rank], TOKEN, name, padded_heads=padded)[0]
        nbytes = every[rank].nbytes
        slices = cuda_layout.gather_kernel(size, nbytes, True) == cuda_layout.SLICES
        assert slices is (tokens > 1)
        assert in_arena(name, view) is slices
        assert (view.shape, view.dtype) == (fresh.shape, dtype)
        assert view.is_contiguous()
        assert torch.equal(view.view(torch.uint8), fresh.view(torch.uint8))
        assert not view[:, size * heads :].float().any()
        merge(name, size, rank)
        strided = every[rank].transpose(0, 1).contiguous().transpose(0, 1)
        view = ops.q_gather_view(strided, TOKEN, name, padded_heads=padded)[0]
        assert in_arena(name, view) is slices
        assert torch.equal(view.view(torch.uint8), fresh.view(torch.uint8))
        merge(name, size, rank)
    cuda_registry.check()
    assert not fallbacks(), fallbacks()


@pytest.mark.parametrize("size", [2, 4])
def test_a_view_holds_the_bytes_of_a_copy(size: int) -> None:
    worlds.run(size, same_bytes, limit_s=200)


# How long it holds.


def lifetime(rank: int, size: int) -> None:
    group = fresh_group(size)
    name = group.group_name
    every = [draw(i, size, 256, 4, 576, dtype=torch.bfloat16) for i in range(4)]
    want = [x.transpose(0, 1).flatten(1, 2) for x in every]

    def gather(i: int) -> Tensor:
        got = ops.q_gather_view(every[i][rank], TOKEN, name)[0]
        assert torch.equal(got, want[i])
        return got

    first = gather(0)
    assert in_arena(name, first)
    # No merge since: these are copies, and what was read before stays what it was.
    assert not in_arena(name, gather(1))
    assert not in_arena(name, ops.q_gather(every[2][rank], TOKEN, name)[0])
    assert not in_arena(name, gather(3))
    assert torch.equal(first, want[0])
    # A merge that takes the collectives is no merge of this memory.
    outputs, lses = draw(5, size, 2, size, 64), draw(6, size, 2, size)
    refused = lses[rank].to(torch.float8_e5m2)
    ops.a2a_lse_reduce(outputs[rank], refused, TOKEN, name)
    assert fallbacks() == {"fallback.dtype": 1}
    assert not in_arena(name, gather(1))
    assert torch.equal(first, want[0])
    merge(name, size, rank)
    second = gather(2)
    assert second.data_ptr() == first.data_ptr()
    dcp_inductor.recover(group)
    assert in_arena(name, gather(3))
    # Under inference mode and outside it alike.
    with torch.inference_mode():
        merge(name, size, rank)
        assert in_arena(name, gather(0))
    merge(name, size, rank)
    assert in_arena(name, gather(1))
    assert workspace_of(name).view_unmerged


def test_a_view_holds_until_a_merge_lets_the_next_one_come() -> None:
    worlds.run(2, lifetime, limit_s=200)


def run_ahead(size: int, steps: int, merges: bool) -> list[list[Tensor]]:
    """What each rank read at each step, one rank in turn being late to read.

    Nothing but the exchanges holds the ranks together.
    """
    tokens, heads, dim = 16, 4, 576
    queries = [
        draw(i, size, tokens, heads, dim, dtype=torch.bfloat16) for i in range(steps)
    ]
    ranks = VirtualRanks(size)
    local = tokens * heads * dim * 2
    layout = cuda_layout.view_arena(size, local, size * local)
    arenas = ranks.arena(layout)
    tables = ranks.tables(
        arenas,
        cuda_layout.gather_words(
            cuda_layout.Q_GATHER, cuda_layout.SLICES, size * heads, layout
        ),
    )
    views = [
        arena[layout.data.offset :][: size * local]
        .view(torch.bfloat16)
        .view(tokens, size * heads, dim)
        for arena in arenas
    ]
    marked = cuda_layout.combine_arena(cuda_layout.MARKED, size, 2 * size, 128, 0)
    merging = ranks.tables(
        ranks.arena(marked),
        cuda_layout.combine_words(cuda_layout.MARKED, "none", True, [0] * size, marked),
    )
    partial = torch.ones(2, size, 64, device="cuda", dtype=torch.bfloat16)
    lse = torch.zeros(2, size, device="cuda")
    merged = [torch.zeros_like(partial) for _ in range(size)]
    read = [[torch.zeros_like(views[0]) for _ in range(steps)] for _ in range(size)]
    torch.cuda.synchronize()

    def merge_all(rank: int, _: int) -> None:
        cuda_launch_ops.symm_a2a_lse_reduce(
            partial, lse, None, None, merged[rank], None, False, merging[rank]
        )

    def step(rank: int, i: int) -> None:
        cuda_launch_ops.symm_gather(queries[i][rank], views[rank], tables[rank])
        if i % size == rank:
            torch.cuda._sleep(10 * MILLISECOND)
        read[rank][i].copy_(views[rank])
        if merges:
            merge_all(rank, i)

    # CUDA loads a kernel when it is first launched, which waits for what runs.
    torch.cuda._sleep(1)
    read[0][0].copy_(views[0])
    ranks.run(merge_all)
    ranks.check()
    ranks.run(step, steps)
    ranks.check()
    assert not merges or all(torch.equal(each, partial) for each in merged)
    want = [q.transpose(0, 1).flatten(1, 2) for q in queries]
    return [
        [
            got
            for got, right in zip(of, want, strict=True)
            if not torch.equal(got, right)
        ]
        for of in read
    ]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_no_peer_overwrites_a_view_before_the_merge(size: int) -> None:
    assert run_ahead(size, 6 * size, merges=True) == [[]] * size


def test_without_a_merge_between_a_view_is_overwritten() -> None:
    """The test above would see it: here the rule is broken on purpose."""
    late = run_ahead(2, 8, merges=False)
    assert all(late), [len(of) for of in late]


def replayed(rank: int, size: int, replays: int) -> None:
    """Captured steps of gather, readers and merge, replayed without a pause."""
    name = fresh_group(size).group_name
    graphs = {}
    for tokens in (256, 100):
        query = torch.zeros(tokens, 4, 576, device="cuda", dtype=torch.bfloat16)

        def step(query=query):
            token = TOKEN
            kept = []
            for layer in range(2):  # two views in a graph, a merge behind each
                whole, token = ops.q_gather_view(query + layer, token, name)
                if rank == layer:
                    torch.cuda._sleep(MILLISECOND)
                kept.append(whole.clone())
                partial = whole[..., :64] * (rank + 1)
                lse = whole.float().mean(-1) * (rank - 0.5)
                merged, _, token = ops.a2a_lse_reduce(partial, lse, token, name)
                kept.append(merged)
            return kept

        graph, kept = captured(step)
        graphs[tokens] = query, graph, kept
    seen = []
    for i in range(replays):
        tokens = (256, 100)[i * 7 % 3 % 2]
        query, graph, kept = graphs[tokens]
        every = draw(i, size, tokens, 4, 576, dtype=torch.bfloat16)
        query.copy_(every[rank])
        skew(i, rank, size)
        graph.replay()
        seen.append((every, [x.clone() for x in kept]))
    for every, kept in seen:
        for layer in range(2):
            whole = (every + layer).transpose(0, 1).flatten(1, 2)
            assert torch.equal(kept[2 * layer], whole)
            partials = torch.stack([whole[..., :64] * (r + 1) for r in range(size)])
            lses = whole.float().mean(-1)
            lses = torch.stack([lses * (r - 0.5) for r in range(size)])
            exact = oracle(partials, lses, "heads", None, rank)[0]
            close(kept[2 * layer + 1], exact, torch.bfloat16)
    cuda_registry.check()
    assert not fallbacks(), fallbacks()


@pytest.mark.parametrize(("size", "replays"), [(2, 30), (4, 12)])
def test_replays_with_changing_inputs(size: int, replays: int) -> None:
    worlds.run(size, replayed, replays, limit_s=300)


# Compiled models.


class Decode(torch.nn.Module):
    """Two layers of query gather, attention in plain torch, and merge."""

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        group = dist.group.WORLD
        size, rank = group.size(), group.rank()
        for _ in range(2):
            every = funcol.all_gather_tensor(query.contiguous(), 0, group)
            whole = every.view(size, *query.shape).transpose(0, 1).flatten(1, 2)
            scores = torch.einsum("thd,kd->thk", whole.float(), keys)
            lse = torch.logsumexp(scores, -1)
            out = torch.einsum("thk,kd->thd", scores.softmax(-1), keys)
            lses = funcol.all_gather_tensor(lse, 0, group).view(size, *lse.shape)
            scale = torch.exp(lses[rank] - torch.logsumexp(lses, 0))
            weighted = (out * scale[..., None]).transpose(0, 1).contiguous()
            merged = funcol.reduce_scatter_tensor(weighted, "sum", 0, group)
            query = torch.sin(merged.transpose(0, 1)).to(query.dtype)
        return query


def wanted(queries: Tensor, keys: Tensor, rank: int) -> Tensor:
    size = len(queries)
    for _ in range(2):
        whole = queries.transpose(0, 1).flatten(1, 2)
        every = keys.flatten(0, 1).double()
        scores = torch.einsum("thd,kd->thk", whole.double(), every)
        merged = torch.einsum("thk,kd->thd", scores.softmax(-1), every)
        queries = torch.stack(torch.sin(merged).to(queries.dtype).chunk(size, 1))
    return queries[rank]


@contextmanager
def watched(name: str) -> Iterator[list[bool]]:
    """Where the results of view gathers lie that the host sees: True, in the arena."""
    seen: list[bool] = []
    gather = cuda_exchange.q_gather_view

    def see(*args: Any) -> Any:
        result = gather(*args)
        seen.append(in_arena(name, result))
        return result

    cuda_exchange.q_gather_view = see
    try:
        yield seen
    finally:
        cuda_exchange.q_gather_view = gather


def compiled(rank: int, size: int, mode: str | None, steps: int) -> dict[str, int]:
    torch._dynamo.reset()
    counters.clear()
    skips = Skips()
    logging.getLogger("torch._inductor.cudagraph_trees").addHandler(skips)
    logging.getLogger("torch.__perf_hints").addHandler(skips)
    options = {"mode": mode} if mode else {}
    model = torch.compile(Decode(), backend=backend, dynamic=False, **options)
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad(), watched(worlds.name()) as seen:
        for i in range(steps):
            if i == steps // 2:  # every size has been met often enough to be recorded
                warm = epoch(device), len(seen)
            tokens = (128, 96, 2)[i % 3]  # the last by packets
            queries = draw(i, size, tokens, 4, 576, dtype=torch.bfloat16)
            keys = draw(500 + i, size, 6, 576) * 0.1
            skew(i, rank, size)
            got = model(queries[rank], keys[rank]).clone()
            torch.testing.assert_close(
                got.float(), wanted(queries, keys, rank).float(), rtol=2e-2, atol=2e-2
            )
        assert set(seen) == {True, False}  # few rows are copied
        # Two gathers and two merges a step; the replay of a graph is no host call.
        counted = steps - steps // 2
        assert epoch(device) - warm[0] == 4 * counted
        calls = len(seen) - warm[1]
        assert calls < counted if mode else calls == 2 * counted, calls
        rows = explain(Decode(), queries[rank], keys[rank]).rows
    told = [(r.op, r.result) for r in rows if r.kind == "query_gather"]
    assert (
        told
        == [("q_gather_view", "all heads, read in the workspace unless rows are few")]
        * 2
    ), [(r.kind, r.op, r.result, r.code) for r in rows]
    assert not skips.seen, skips.seen
    assert not fallbacks(), fallbacks()
    cuda_registry.check()
    return dict(counters["inductor"])


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_model_reads_its_queries_in_place(mode: str | None) -> None:
    for counts in worlds.run(2, compiled, mode, 18, limit_s=500):
        assert counts.get("cudagraph_skips", 0) == 0, counts
