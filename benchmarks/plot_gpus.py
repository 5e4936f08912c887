"""Draws docs/benchmarks_gpus.png from results of ``bench --device cuda --ranks N``.

    python benchmarks/plot_gpus.py docs/benchmarks_gpus.png RESULT.json...

Needs matplotlib, as plot.py does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

OPS = ("a2a_lse_reduce", "q_gather", "kv_gather")
STYLES = {
    "marked": "s-", "packets": "s-", "tiled": "D-", "slices": "D-",
    "four_launch": "o-", "nccl_all_to_all": "^--", "nccl": "^--",
    "nccl_gather_reduce_scatter": "v--", "torch_symm_mem": "x:",
}  # fmt: skip


def draw(axes: Any, result: dict[str, Any]) -> None:
    """One result on a row of axes."""
    rows: list[dict[str, Any]] = [row for row in result["rows"] if row["us"]]
    for axis, op in zip(axes, OPS, strict=True):
        mine = [row for row in rows if row["op"] == op]
        for variant in dict.fromkeys(row["variant"] for row in mine):
            points = [(r["T"], r["us"]) for r in mine if r["variant"] == variant]
            label = variant.replace("_", " ")
            axis.plot(*zip(*points, strict=True), STYLES[variant], ms=3, label=label)
        floors = {row["T"]: row["floor_us"] for row in mine}
        axis.plot(*zip(*floors.items(), strict=True), c="gray", lw=1, label="floor")
        commit = result["machine"].get("commit", "unknown")
        title = f"{op}, N = {mine[0]['N']}, H = {mine[0]['H']}, commit {commit}"
        axis.set_title(title, fontsize=8)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("us per call")


def main(target: str, *sources: str) -> None:
    """Read ``sources``, write ``target``."""
    results = [json.loads(Path(source).read_text()) for source in sources]
    figure, axes = pyplot.subplots(
        len(results), len(OPS), figsize=(11.5, 3.4 * len(results)), sharey=True,
        squeeze=False,
    )  # fmt: skip
    for row, result in zip(axes, results, strict=True):
        draw(row, result)
    for axis, op in zip(axes[-1], OPS, strict=True):
        axis.set_xlabel("tokens" if op != "kv_gather" else "rows of a rank")
    for axis in axes[0]:
        axis.legend(fontsize=6)
    gpu = results[0]["machine"]["gpu"]
    figure.suptitle(f"{gpu} over NVLink, bf16", fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=90)


if __name__ == "__main__":
    main(*sys.argv[1:])
