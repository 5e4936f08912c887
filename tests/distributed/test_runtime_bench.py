"""The benchmark runs, checks its results and writes what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcp_inductor import bench, cli


def test_rows_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    arguments = ["--device", "cpu", "--tokens", "1", "3", "--json", str(path)]
    sizes = ["--heads", "4", "--head-dim", "16", "--query-dim", "24"]
    assert cli.main(["bench", *arguments, *sizes]) == 0
    report = json.loads(path.read_text())
    assert report["machine"]["cores"] >= 1
    rows = report["rows"]
    seen = {(row["op"], row["T"], row["H"], row["D"]) for row in rows}
    assert seen == {
        (op, tokens, heads, width)
        for tokens in (1, 3)
        for op, heads, width in (
            ("a2a_lse_reduce", 4, 16),
            ("q_gather", 4, 24),
            ("kv_gather", 1, 24),
        )
    }
    printed = capsys.readouterr().out
    for row in rows:
        assert row["N"] == 2
        assert row["dtype"] == "bf16"
        assert row["ratio"] == round(row["baseline_us"] / row["direct_us"], 2)
        assert f"{row['direct_us']:.1f}" in printed


def test_bad_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--ranks", "3"])
    assert "expected a multiple of --ranks 3" in capsys.readouterr().err
