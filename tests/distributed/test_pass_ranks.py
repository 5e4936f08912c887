"""Compiled models on real ranks: order, agreement, and numbers over many steps."""

from __future__ import annotations

import importlib.util
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from dcp_inductor.errors import DCPMismatchError
from dcp_inductor.runtime import registry
from tests.formulations import family_a
from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.support import World, combine, fresh_group, world

HEADS = 2  # of a rank
HEAD_DIM = 16
# Inductor's passes that move collectives, in the versions that have them.
MOVERS = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_peak_memory": True,
    "reorder_for_locality": True,
}
if importlib.util.find_spec("triton") and torch.cuda.is_available():
    # Its cost model asks Triton for the bandwidth of a GPU, also for CPU tensors.
    MOVERS["aten_distributed_optimizations.enable_overlap_scheduling"] = True


def context(rank: int, size: int, group: dist.ProcessGroup) -> Context:
    return Context(rank, size, group.group_name, HEADS, group)


def inputs(rank: int, tokens: int, step: int) -> dict[str, Tensor]:
    """A step's own query heads and a residual, and this rank's share of the keys."""
    own = torch.Generator().manual_seed(step * 100 + rank)
    return {
        "query": torch.randn(tokens, HEADS, HEAD_DIM, generator=own),
        "keys": torch.randn(3 + rank, HEAD_DIM, generator=own),
        "aside": torch.randn(tokens, 5, generator=own),
    }


def attend(query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of [T, H, D] over the rows of ``keys``, and its LSE [T, H]."""
    scores = query @ keys.t()
    return torch.softmax(scores, -1) @ keys, torch.logsumexp(scores, -1)


def layer(ctx: Context, query: Tensor, keys: Tensor, aside: Tensor) -> tuple:
    """Gather, something unrelated of the same group, combine, and another sum."""
    whole = sp.ag(ctx, query, 1)
    total = sp.ar(ctx, aside * 2)
    merged = family_a.merge(ctx, *attend(whole, keys))
    return sp.ar(ctx, merged.flatten(1).sin()), total + 1


def expected(size: int, rank: int, tokens: int, step: int) -> tuple[Tensor, Tensor]:
    """What ``layer`` must give: all shards in one process."""
    parts = [inputs(r, tokens, step) for r in range(size)]
    query = torch.cat([part["query"] for part in parts], 1).double()
    merged = attend(query, torch.cat([part["keys"] for part in parts]).double())[0]
    own = torch.stack([x.flatten(1) for x in merged.chunk(size, 1)])
    total = torch.stack([part["aside"] for part in parts]).double().sum(0)
    return own.sin().sum(0), total * 2 + 1


def options(**given: Any) -> dict[str, Any]:
    """Those of the options that this version of Inductor knows."""
    known = inductor_config.get_config_copy()
    return {key: value for key, value in given.items() if key in known}


def steps(
    rank: int, size: int, counts: list[int], moved: bool
) -> tuple[dict[str, int], float, list[str]]:
    """Run ``layer`` for some token counts; counters, worst difference, options used."""
    torch._dynamo.reset()
    counters.clear()
    ctx = context(rank, size, fresh_group(size))
    chosen = options(**MOVERS) if moved else {}
    compiled = torch.compile(
        lambda *args: layer(ctx, *args), backend="dcp_inductor", options=chosen
    )
    worst = 0.0
    for step, tokens in enumerate(counts):
        given = inputs(rank, tokens, step)
        for name in ("query", "aside"):
            if tokens > 1:
                torch._dynamo.mark_dynamic(given[name], 0)
        if step % 3 == rank % 3:
            time.sleep(0.01)
        got = compiled(*given.values())
        want = expected(size, rank, tokens, step)
        for one, other in zip(got, want, strict=True):
            worst = max(worst, float((one - other).abs().max()))
    return dict(counters["dcp_inductor"]), worst, sorted(chosen)


@pytest.mark.parametrize("size", [2, 4])
def test_twenty_steps_of_changing_size(size: int) -> None:
    counts = [3, 5, 2, 7, 3, 11, 4, 6, 2, 9] * 2
    for told, worst, _ in world(size).run(steps, counts, False, limit_s=180):
        assert told["rewritten"] == 2
        assert not [key for key in told if key.startswith(("rejected", "fallback"))]
        assert worst < 1e-5


@pytest.mark.parametrize("size", [2, 4])
def test_passes_that_move_collectives(size: int) -> None:
    counts = [3, 5, 3, 8, 1, 4]
    for told, worst, chosen in world(size).run(steps, counts, True, limit_s=240):
        assert "reorder_for_compute_comm_overlap" in chosen
        assert told["rewritten"] >= 2
        assert worst < 1e-5


def first_row(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    """The weights of rank 0 on every rank; on rank 0 this is the merge itself."""
    weights = torch.softmax(sp.stack_view(ctx, lse), 0)[0]
    return sp.rs(ctx, output * weights[..., None])


def doubled_on_rank_zero(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    """The merge, but for a factor that only rank 0's graph has."""
    w = sp.w_logsumexp(ctx, lse, sp.stack_view(ctx, lse))
    return sp.rs(ctx, output * (w * (2.0 if ctx.rank == 0 else 1.0))[..., None])


MODELS = {"first row": first_row, "doubled": doubled_on_rank_zero}


def disagree(rank: int, size: int, which: str, late: int) -> tuple[str, str, float]:
    """Type and text of the error that a rank ends with, and how far off its number is.

    Ranks other than ``late`` begin some seconds before it. The group recovers from an
    error, also if ``late`` comes late to the recovery.
    """
    torch._dynamo.reset()
    counters.clear()
    group = fresh_group(size)
    ctx = context(rank, size, group)
    shards = []
    for r in range(size):
        generator = torch.Generator().manual_seed(r)
        output = torch.randn(3, HEADS * size, HEAD_DIM, generator=generator)
        shards.append((output, torch.randn(3, HEADS * size, generator=generator)))
    compiled = torch.compile(
        lambda *args: MODELS[which](ctx, *args),
        backend="dcp_inductor",
        options={"dcp_inductor.timeout_s": 20.0},
    )
    if rank == late:
        time.sleep(5)
    try:
        got = compiled(*shards[rank])
    except Exception as error:
        told = type(error).__name__, str(error), 0.0
        time.sleep(3 if rank == late else 0)
        registry.recover(group)
        combine(group.group_name, rank, size)
        return told
    weights = torch.softmax(torch.stack([lse for _, lse in shards]), 0)
    if which == "first row":
        weights = weights[:1].expand(size, -1, -1)
    elif which == "doubled":
        weights[0] *= 2
    whole = sum(w[..., None] * o for w, (o, _) in zip(weights, shards, strict=True))
    return "", "a number", float((got - whole.chunk(size, 1)[rank]).abs().max())


@pytest.mark.parametrize("late", [-1, 0, 1])
@pytest.mark.parametrize("which", ["first row", "doubled"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_read_one_graph_differently(
    size: int, which: str, late: int
) -> None:
    """An error on every rank that names site and ranks, in time; never a number.

    Where ranks meet before both have voted, the exchange itself tells them apart. A
    rank that nobody disputes with learns from the word of those that have left.
    """
    told = world(size).run(disagree, which, late, limit_s=90)
    for rank, (kind, text, _) in enumerate(told):
        assert kind in ("DCPDisagreementError", "DCPMismatchError"), (rank, kind, text)
        assert re.search(r"(test_pass_ranks|spelling)\.py:\d+#", text), text
        assert len(set(re.findall(r"\brank (\d)", text))) > 1, text


def other_dims(rank: int, size: int, dims: list[int]) -> str:
    """The error where one rank marks these dims of the partial output dynamic."""
    torch._dynamo.reset()
    group = fresh_group(size)
    ctx = context(rank, size, group)
    output, lse = torch.randn(3, HEADS * size, HEAD_DIM), torch.randn(3, HEADS * size)
    for dim in dims if rank == 1 else ():
        torch._dynamo.mark_dynamic(output, dim)
        if dim < lse.dim():
            torch._dynamo.mark_dynamic(lse, dim)
    compiled = torch.compile(
        lambda *args: family_a.merge(ctx, *args), backend="dcp_inductor"
    )
    text = ""
    try:
        compiled(output, lse)
    except DCPMismatchError as error:
        text = str(error)
    registry.recover(group)
    combine(group.group_name, rank, size)
    return text


def test_ranks_that_mark_other_dims_dynamic_are_told_of_the_sites() -> None:
    assert world(2).run(other_dims, [0, 1], limit_s=90) == ["", ""]
    for text in world(2).run(other_dims, [2], limit_s=90):
        # Equal calls, by what a user knows of them.
        calls = re.findall(r"came with (a2a_lse_reduce.*?), at site (\S+?)[;.] ", text)
        assert len({call for call, _ in calls}) == 1, text
        assert len({site for _, site in calls}) == 2, text
        assert "They differ in site." in text
        assert "compile alike on all ranks" in text


def test_ranks_that_share_a_cache(tmp_path: Path) -> None:
    """One rank's decision, kept on disk, is not another rank's.

    The graphs of both ranks are equal, and only on rank 0 is it that of the merge.
    """
    shared = World(
        2,
        {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        },
    )
    try:
        for late in (1, 0):
            told = shared.run(disagree, "first row", late, limit_s=90)
            for rank, (kind, text, off) in enumerate(told):
                assert kind or off < 1e-5, (rank, text, off)
    finally:
        shared.close()
