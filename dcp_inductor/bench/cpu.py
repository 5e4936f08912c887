"""Times the direct exchanges against the collectives they replace, in the same run.

Spawns the ranks itself. Every row is checked for equal results before it is timed; the
two variants take turns, and a row shows the slowest rank's median. The collectives are
those that the pass finds in a graph: gather the LSEs, weight, reduce-scatter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from dcp_inductor import config, ops

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Ranks that gloo woke on one processor need some milliseconds to part.
_BLOCKS, _DIRECT_CALLS, _BASELINE_CALLS = 10, 200, 3
_DIRECT_WARM_UP, _BASELINE_WARM_UP = 400, 3
_LIMIT_S = 600.0

_graph_ops = torch.ops._c10d_functional


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of all ops and token counts, from ``options.ranks`` processes.

    Raises:
        RuntimeError: the ranks did not finish within ten minutes.
    """
    with tempfile.TemporaryDirectory(prefix="dcp-bench-") as directory:
        context = mp.spawn(
            _work, args=(options, directory), nprocs=options.ranks, join=False
        )
        deadline = time.monotonic() + _LIMIT_S
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise RuntimeError(f"the ranks did not finish within {_LIMIT_S:g} s")
        every = [
            json.loads((Path(directory) / f"{rank}.json").read_text())
            for rank in range(options.ranks)
        ]
    rows = []
    for same_row in zip(*every, strict=True):
        row = dict(same_row[0])
        for name in ("direct_us", "baseline_us"):
            row[name] = round(max(each[name] for each in same_row), 1)
        row["ratio"] = round(row["baseline_us"] / row["direct_us"], 2)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The rows for people."""
    lines = [", ".join(f"{name}: {value}" for name, value in facts.items()), ""]
    form = "{:<16}{:>3}{:>5}{:>5}{:>5}  {:<6}{:>11}{:>16}{:>8}"
    lines.append(
        form.format(
            "op", "N", "T", "H", "D", "dtype", "direct us", "collectives us", "ratio"
        )
    )
    for row in rows:
        numbers = (f"{row[name]:.1f}" for name in ("direct_us", "baseline_us", "ratio"))
        words = (row[name] for name in ("op", "N", "T", "H", "D", "dtype"))
        lines.append(form.format(*words, *numbers))
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the times depend on."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _work(rank: int, options: argparse.Namespace, directory: str) -> None:
    size = options.ranks
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    store = dist.FileStore(str(Path(directory) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        most = max(config.max_tokens, *options.tokens)
        with config.patch(
            max_tokens=most,
            direct_combine="force",
            direct_query_gather="force",
            direct_kv_gather="force",
        ):
            rows = list(_rows(rank, options))
        (Path(directory) / f"{rank}.json").write_text(json.dumps(rows))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _rows(rank: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    group = _group_name()
    token = torch.empty(0)
    size, heads = options.ranks, options.heads
    dtype = DTYPES[options.dtype]
    for tokens in options.tokens:
        generator = torch.Generator().manual_seed(rank)
        output = torch.randn(tokens, heads, options.head_dim, generator=generator)
        output = output.to(dtype)
        lse = torch.randn(tokens, heads, generator=generator)
        query = torch.randn(
            tokens, heads // size, options.query_dim, generator=generator
        ).to(dtype)
        rows = query[:, 0].contiguous()
        cases: dict[str, tuple[int, Callable[[], Tensor], Callable[[], Tensor]]] = {
            "a2a_lse_reduce": (
                options.head_dim,
                partial(_first, ops.a2a_lse_reduce, output, lse, token, group),
                partial(_combine, output, lse, size, rank),
            ),
            "q_gather": (
                options.query_dim,
                partial(_first, ops.q_gather, query, token, group),
                partial(_gather_heads, query, size),
            ),
            "kv_gather": (
                options.query_dim,
                partial(_first, ops.kv_gather, rows, token, group),
                partial(_gather_rows, rows, size),
            ),
        }
        for op, (width, direct, baseline) in cases.items():
            _check(op, direct(), baseline(), dtype)
            direct_us, baseline_us = _medians(direct, baseline)
            yield {
                "op": op,
                "N": size,
                "T": tokens,
                "H": 1 if op == "kv_gather" else heads,
                "D": width,
                "dtype": options.dtype,
                "direct_us": direct_us,
                "baseline_us": baseline_us,
            }


def _check(op: str, got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    if op != "a2a_lse_reduce":
        equal = torch.equal(got, wanted)
    else:
        # The baseline rounds every rank's share before it adds them.
        tolerance = 4 * torch.finfo(dtype).eps
        equal = torch.allclose(got, wanted, atol=tolerance, rtol=tolerance)
    if not equal:
        raise AssertionError(f"{op}: the direct exchange and the collectives differ")


def _medians(
    direct: Callable[[], Tensor], baseline: Callable[[], Tensor]
) -> tuple[float, float]:
    """Microseconds per call of both, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    variants = (
        (direct, _DIRECT_CALLS, _DIRECT_WARM_UP),
        (baseline, _BASELINE_CALLS, _BASELINE_WARM_UP),
    )
    for block in range(_BLOCKS + 1):
        for (call, count, warm_up), kept in zip(variants, times, strict=True):
            dist.barrier()
            for index in range(count + warm_up):
                start = time.perf_counter()
                call()
                if block and index >= warm_up:
                    kept.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[0]), statistics.median(times[1])


def _group_name() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def _first(op: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> Tensor:
    return op(*arguments)[0]


def _gather(x: Tensor, size: int) -> Tensor:
    pending = _graph_ops.all_gather_into_tensor(x, size, _group_name())
    return _graph_ops.wait_tensor(pending).view(size, *x.shape)


def _gather_rows(rows: Tensor, size: int) -> Tensor:
    return _gather(rows, size).flatten(0, 1)


def _gather_heads(query: Tensor, size: int) -> Tensor:
    return _gather(query, size).transpose(0, 1).flatten(1, 2)


def _combine(output: Tensor, lse: Tensor, size: int, rank: int) -> Tensor:
    lses = _gather(lse, size)
    share = torch.exp(lses[rank] - torch.logsumexp(lses, 0))
    weighted = (output * share.unsqueeze(-1)).to(output.dtype)
    by_head = weighted.transpose(0, 1).contiguous()
    pending = _graph_ops.reduce_scatter_tensor(by_head, "sum", size, _group_name())
    return _graph_ops.wait_tensor(pending).transpose(0, 1).contiguous()
