"""``python -m dcp_inductor``: what it prints and how it ends."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dcp_inductor import bench, cli, config, doctor, extension


def test_doctor_reports_a_sound_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    names = [line.split("  ")[1].strip() for line in printed.splitlines()]
    assert names[:4] == ["dcp_inductor", "python", "torch", "backend"]
    assert f"torch          {torch.__version__}" in printed
    assert "all knobs at their defaults" in printed
    assert "!!" not in printed
    [library] = [fact for fact in doctor.facts() if fact.name == "cpu library"]
    assert Path(library.value).is_file() or library.value == "loaded by another part"


def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "load_extension", lambda: "it is not there")


def no_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)


def no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SHM", Path("/nowhere"))


def full_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SHM_WANTED", 1 << 60)


def old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")


@pytest.mark.parametrize(
    ("breakage", "complaint", "remedy"),
    [
        (no_library, "not loaded: it is not there", "reinstall the package"),
        (no_entry_point, "not registered with torch.compile", "pip install ."),
        (no_shared_memory, "cannot write to /nowhere", "--shm-size"),
        (full_shared_memory, "MiB free", "at least 64 MiB"),
        (old_torch, "2.10.1", "install torch 2.11 or newer"),
        pytest.param(
            no_compiler,
            "none",
            "apt-get install g++",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="Inductor can do without one here"
            ),
        ),
    ],
)
def test_doctor_ends_with_1_and_a_remedy_where_something_is_broken(
    breakage: Callable[[pytest.MonkeyPatch], None],
    complaint: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    breakage(monkeypatch)
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    [number] = [n for n, line in enumerate(lines) if line.startswith("!!")]
    assert complaint in lines[number]
    assert lines[number + 1].strip().startswith("remedy: ")
    assert remedy in lines[number + 1]


def test_doctor_shows_knobs_that_were_set(capsys: pytest.CaptureFixture[str]) -> None:
    with config.patch(max_tokens=8):
        cli.main(["doctor"])
    assert "max_tokens=8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "complaint"),
    [
        ("DCP_INDUCTOR_TIMEOUT_S", "a positive number up to 1000000000, got 'soon'"),
        ("DCP_INDUCTOR_TIMEOUTS", "did you mean DCP_INDUCTOR_TIMEOUT_S?"),
    ],
)
def test_a_bad_variable_is_a_line_and_an_exit_code(
    variable: str, complaint: str
) -> None:
    for command, expected in (("doctor", 1), ("bench", 2)):
        run = subprocess.run(
            [sys.executable, "-m", "dcp_inductor", command],
            env=os.environ | {variable: "soon"}, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        assert run.returncode == expected, run.stderr
        assert "Traceback" not in run.stderr
        shown = run.stdout if command == "doctor" else run.stderr
        [line] = [line for line in shown.splitlines() if complaint in line][:1]
        assert variable in line


def test_bench_gets_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(bench, "main", lambda given: seen.append(given) or 3)
    assert cli.main(["bench", "--device", "cpu"]) == 3
    assert seen == [["--device", "cpu"]]


@pytest.mark.parametrize("arguments", [[], ["heal"]])
def test_a_wrong_command_is_an_error_with_the_choices(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "{doctor,bench}" in capsys.readouterr().err
