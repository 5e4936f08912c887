"""The benchmark runs, checks its results and writes what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcp_inductor import bench, cli
from dcp_inductor.bench import cpu


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


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", "3"], "expected a multiple of --ranks 3"),
        (["--ranks", "0"], "argument --ranks: expected a positive integer, got '0'"),
        (["--heads", "0"], "argument --heads: expected a positive integer, got '0'"),
        (["--query-dim", "-1"], "argument --query-dim: expected a positive integer"),
        (["--ranks", "1"], "at least 2 --ranks: one rank has nothing to exchange"),
        (["--json", "/nowhere/rows.json"], "/nowhere/rows.json: No such file"),
        (["--json", "."], "cannot write .: Is a directory"),
    ],
)
def test_bad_arguments_are_named_before_anything_runs(
    arguments: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "run", lambda options: pytest.fail("it ran"))
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert complaint in capsys.readouterr().err


def test_a_run_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: object) -> None:
        raise RuntimeError("the ranks did not finish")

    monkeypatch.setattr(cpu, "run", fail)
    old = tmp_path / "old.json"
    old.write_text("kept")
    for path in (tmp_path / "new.json", old):
        with pytest.raises(RuntimeError, match="did not finish"):
            bench.main(["--json", str(path)])
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert old.read_text() == "kept"


def test_help_names_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("default:") == 8
    assert "default: cpu: 1 2 4 8 16 32 64; cuda: 1 2" in said
    assert "(default: cpu: 32; cuda: 128)" in said
