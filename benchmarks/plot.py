"""Draws docs/benchmarks.png from a result file of benchmarks/cuda/bench.cu.

    python benchmarks/plot.py benchmarks/results/h200.json docs/benchmarks.png

Needs matplotlib, which nothing else here does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

RANKS = (2, 4, 8)
HEADS = 128
DIRECT = ("lamport", "tiled")


def times(
    rows: list[dict[str, Any]], op: str, ranks: int
) -> dict[str, dict[int, float]]:
    """Microseconds by variant and T, for ``op`` with ``HEADS`` heads."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if (row["op"], row["N"], row["H"]) == (op, ranks, HEADS):
            found.setdefault(row["variant"], {})[row["T"]] = row["us"]
    return found


def main(source: str, target: str) -> None:
    """Read ``source``, write ``target``."""
    result = json.loads(Path(source).read_text())
    figure, axes = pyplot.subplots(2, 3, figsize=(9.6, 5.6), sharex=True)
    for column, ranks in enumerate(RANKS):
        combine = times(result["rows"], "a2a_lse_reduce", ranks)
        best = {
            tokens: min(combine[v][tokens] for v in DIRECT if tokens in combine[v])
            for tokens in combine["four_launch"]
        }
        axis = axes[0][column]
        axis.plot(*zip(*combine["four_launch"].items(), strict=True), "o-", ms=3)
        axis.plot(*zip(*best.items(), strict=True), "s-", ms=3)
        axis.axhline(result["empty_launch_us"][str(ranks)], ls=":", c="gray")
        axis.set_title(f"combine, N = {ranks}", fontsize=9)
        gather = times(result["rows"], "q_gather", ranks)
        axis = axes[1][column]
        for variant in ("packets", "slices"):
            axis.plot(*zip(*gather[variant].items(), strict=True), "o-", ms=3)
        axis.set_title(f"query gather, N = {ranks}", fontsize=9)
        axis.set_xlabel("tokens")
    for row, names in zip(
        axes,
        (("four launches", "direct", "empty launch"), ("packets", "slices")),
        strict=True,
    ):
        row[0].set_ylabel("us per call, all ranks")
        row[0].legend(names, fontsize=7)
        for axis in row:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
    figure.suptitle(
        f"{result['gpu']}, virtual ranks, H = {HEADS}, bf16, commit {result['commit']}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(target, dpi=90)


if __name__ == "__main__":
    main(*sys.argv[1:])
