"""Draws docs/benchmarks_gpus.png from a result of ``bench --device cuda --ranks N``.

    python benchmarks/plot_gpus.py RESULT.json docs/benchmarks_gpus.png

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


def main(source: str, target: str) -> None:
    """Read ``source``, write ``target``."""
    result = json.loads(Path(source).read_text())
    rows: list[dict[str, Any]] = [row for row in result["rows"] if row["us"]]
    machine = result["machine"]
    figure, axes = pyplot.subplots(1, len(OPS), figsize=(11.5, 4.0), sharey=True)
    for axis, op in zip(axes, OPS, strict=True):
        mine = [row for row in rows if row["op"] == op]
        for variant in dict.fromkeys(row["variant"] for row in mine):
            points = [(r["T"], r["us"]) for r in mine if r["variant"] == variant]
            label = variant.replace("_", " ")
            axis.plot(*zip(*points, strict=True), STYLES[variant], ms=3, label=label)
        floors = {row["T"]: row["floor_us"] for row in mine}
        axis.plot(*zip(*floors.items(), strict=True), c="gray", lw=1, label="floor")
        axis.set_title(f"{op}, N = {mine[0]['N']}, H = {mine[0]['H']}", fontsize=9)
        axis.set_xlabel("tokens" if op != "kv_gather" else "rows of a rank")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    axes[0].set_ylabel("us per call")
    title = f"{machine['gpu']} over NVLink, bf16, commit {machine['commit']}"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=90)


if __name__ == "__main__":
    main(*sys.argv[1:])
