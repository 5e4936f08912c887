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
COMBINES = {"four_launch": "four launches", "lamport": "marked", "tiled": "tiled"}
GATHERS = {"packets": "packets", "slices": "slices"}


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
    commit = result.get("commit", "unknown")  # noted by hand
    figure, axes = pyplot.subplots(2, 3, figsize=(9.6, 5.6), sharex=True)
    for column, ranks in enumerate(RANKS):
        for axis, op, variants in (
            (axes[0][column], "a2a_lse_reduce", COMBINES),
            (axes[1][column], "q_gather", GATHERS),
        ):
            measured = times(result["rows"], op, ranks)
            for variant, name in variants.items():
                points = zip(*measured[variant].items(), strict=True)
                axis.plot(*points, "o-", ms=3, label=name)
        axes[0][column].axhline(
            result["empty_launch_us"][str(ranks)],
            ls=":",
            c="gray",
            label="empty launch",
        )
        axes[0][column].set_title(f"combine, N = {ranks}", fontsize=9)
        axes[1][column].set_title(f"query gather, N = {ranks}", fontsize=9)
        axes[1][column].set_xlabel("tokens")
    for row in axes:
        row[0].set_ylabel("us per call, all ranks")
        row[0].legend(fontsize=7)
        for axis in row:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
    figure.suptitle(
        f"{result['gpu']}, virtual ranks, H = {HEADS}, bf16, commit {commit}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(target, dpi=90)


if __name__ == "__main__":
    main(*sys.argv[1:])
