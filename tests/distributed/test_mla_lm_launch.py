"""The launcher of the example: a rank that fails never leaves the others hanging."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable

import pytest
import torch

from examples.mla_lm import cli
from examples.mla_lm.launch import RankError, run_ranks


def fail_on_rank_1(report: Callable[[str], None], how: str) -> None:
    rank = torch.distributed.get_rank()
    if rank == 1 and how == "raise":
        raise ValueError("the reason")
    if rank == 1 and how == "die":
        os._exit(7)
    torch.distributed.barrier()
    if how == "hang":
        time.sleep(600)


@pytest.mark.parametrize(
    ("how", "timeout_s", "message"),
    [
        ("raise", 60, "rank 1: .*ValueError: the reason"),
        ("die", 60, "rank 1: ended with exit code 7"),
        ("hang", 10, "not done after 10 s"),
    ],
)
def test_a_rank_that_fails_ends_the_run_with_its_reason(how, timeout_s, message):
    before = set(multiprocessing.active_children())
    start = time.monotonic()
    with pytest.raises(RankError, match=f"(?s){message}"):
        run_ranks(fail_on_rank_1, 2, how, timeout_s=timeout_s)
    assert time.monotonic() - start < 60
    assert set(multiprocessing.active_children()) <= before


def add_ranks(report: Callable[[str], None], start: int) -> torch.Tensor:
    report("adding")
    total = torch.tensor(start + torch.distributed.get_rank())
    torch.distributed.all_reduce(total)
    return total


def test_results_come_by_rank_and_progress_from_rank_0():
    said = []
    results = run_ranks(add_ranks, 2, 5, timeout_s=60, on_progress=said.append)
    assert [int(total) for total in results] == [11, 11]
    assert [text for text in said if text] == ["adding"]


def test_the_command_line_continues_a_prompt(monkeypatch, capsys):
    options = "mla_lm --eager --ranks 1 --max-new-tokens 13".split()
    monkeypatch.setattr("sys.argv", [*options, "Each rank"])
    assert cli.main() == 0
    assert "Each rank| has computed\n" in capsys.readouterr().out


def test_the_command_line_says_why_it_failed(monkeypatch, capsys):
    options = "mla_lm --eager --ranks 1 --dcp 2".split()
    monkeypatch.setattr("sys.argv", [*options, "Each rank"])
    assert cli.main() == 1
    assert "expected dcp_size 1 for one rank, got 2" in capsys.readouterr().err
