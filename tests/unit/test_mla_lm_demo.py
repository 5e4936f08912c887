"""The demo's verdict: every way to be wrong ends with exit code 1 and says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dcp_inductor.fx.report import GraphReport, SiteReport
from examples.mla_lm import demo
from examples.mla_lm.launch import RankError

TOKENS = [[1, 2, 257], [3, 4, 5]]
SITE = SiteReport(
    site="a.py:1#abc",
    kind="combine",
    group_name="0",
    world_size=2,
    source="a.py:1 merge()",
    family="all_gather + reduce_scatter",
    trials=16,
    proof_ms=1.0,
    decision="rewritten",
    code="",
    reason="",
    op="a2a_lse_reduce",
    result="own heads",
    workspace_bytes=64,
)


def rank_result(**changes):
    both = ("inductor", "dcp_inductor")
    result = demo.RankResult(
        tokens={how: [list(row) for row in TOKENS] for how in both},
        logits={how: torch.zeros(3, 2, 8) for how in both},
        step_ms=dict.fromkeys(both, 1.0),
        graphs=[GraphReport([SITE])],
        fallbacks={},
        cache_bytes=64,
    )
    return replace(result, **changes)


def test_equal_tokens_give_the_largest_logit_difference():
    result = rank_result()
    result.logits["dcp_inductor"][1, 0, 3] = 1e-5
    assert demo.compare([rank_result(), result], TOKENS, torch.zeros(3, 2, 8)) == (
        pytest.approx(1e-5)
    )


def test_what_follows_an_end_token_is_not_compared():
    result = rank_result(tokens={"dcp_inductor": [[1, 257], [3, 4, 5]]})
    result.logits["dcp_inductor"][2, 0] = 7.0
    assert demo.compare([result], [[1, 257], [3, 4, 5]], torch.zeros(3, 2, 8)) == 0


@pytest.mark.parametrize("how", ["inductor", "dcp_inductor"])
def test_another_token_on_any_rank_is_a_failure(how):
    wrong = rank_result()
    wrong.tokens[how][1][2] = 6
    with pytest.raises(demo.DemoError, match=f"rank 1 with backend='{how}'"):
        demo.compare([rank_result(), wrong], TOKENS, torch.zeros(3, 2, 8))


@pytest.mark.parametrize("value", [0.01, float("nan")])
def test_other_logits_are_a_failure(value):
    wrong = rank_result()
    wrong.logits["dcp_inductor"][0, 1, 0] = value
    with pytest.raises(demo.DemoError, match=r"logits"):
        demo.compare([rank_result(), wrong], TOKENS, torch.zeros(3, 2, 8))


@pytest.mark.parametrize(
    ("graphs", "why"),
    [
        ([], "found no site"),
        ([GraphReport([])], "found no site"),
        ([GraphReport([replace(SITE, decision="rejected")])], "rewrote none of 1"),
    ],
)
def test_no_rewritten_site_is_a_failure(graphs, why):
    with pytest.raises(demo.DemoError, match=why):
        demo.show_sites([rank_result(graphs=graphs)])


def test_ranks_that_disagree_about_a_site_are_a_failure():
    other = rank_result(graphs=[GraphReport([replace(SITE, decision="rejected")])])
    with pytest.raises(demo.DemoError, match="rank 1 decided differently"):
        demo.show_sites([rank_result(), other])


def test_fallbacks_are_told(capsys):
    sites = demo.show_sites([rank_result(fallbacks={"fallback.hosts": 3})])
    assert (sites.rewritten, sites.found) == (1, 1)
    assert "rank 0 used the fallback collectives" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error", [demo.DemoError("why"), RankError("why"), KeyError("why")]
)
def test_every_error_ends_with_one_line_and_exit_code_1(monkeypatch, capsys, error):
    def run():
        raise error

    monkeypatch.setattr(demo, "run", run)
    assert demo.main([]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("demo: FAILED ")
    assert "why" in last


def test_success_ends_with_exit_code_0(monkeypatch, capsys):
    monkeypatch.setattr(demo, "run", lambda: "demo: ok")
    assert demo.main([]) == 0
    assert capsys.readouterr().out == "demo: ok\n"


def test_help_says_what_the_demo_does(monkeypatch, capsys):
    monkeypatch.setattr(demo, "run", lambda: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        demo.main(["--help"])
    assert ended.value.code == 0
    assert "split its KV cache" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit) as ended:
        demo.main(["--fast"])
    assert ended.value.code == 2
