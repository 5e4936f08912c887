"""The README's example, as a reader would run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist


def test_the_example_runs_as_printed(root: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.S)
    [example] = [block for block in blocks if "init_process_group" in block]
    if not hasattr(dist, "all_gather_single"):  # torch before 2.13
        example = example.replace("_single(", "_tensor(")
    (tmp_path / "merge.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         "--nproc-per-node", "2", "merge.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert re.search(r"merge\.py:\d+\S*  rewritten  a2a_lse_reduce", done.stdout)
    assert "rewrote 1 of 1 sites in 1 graph" in done.stdout
    [error] = re.findall(r"largest difference to the collectives: (\S+)", done.stdout)
    assert float(error) < 1e-5
