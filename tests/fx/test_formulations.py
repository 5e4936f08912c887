"""The collected spellings: right in eager mode, recognised, unchanged in value.

One setting per case here, in turn through world sizes, token counts, forms and dtypes
(for most variants the plainest one); ``python -m tests.formulations.survey --full``
runs every setting of every case.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.formulations import harness, judging
from tests.formulations.cases import EQUAL_OR_REFUSED, Case
from tests.formulations.inputs import EMPTY_SHARDS, Geometry, make_problem
from tests.formulations.lockstep import LockstepError
from tests.formulations.recipes import REGISTRY
from tests.formulations.tracing import DYNAMIC, STATIC, UNBACKED

# The spellings themselves run with two ranks, some of their variants with four.
SETTINGS = {
    2: [
        (2, 3, STATIC, torch.float32),
        (2, 3, DYNAMIC, torch.bfloat16),
        (2, 1, STATIC, torch.bfloat16),
        (2, 3, UNBACKED, torch.float32),
        (2, 3, DYNAMIC, torch.float32),
    ],
    4: [
        (4, 3, STATIC, torch.bfloat16),
        (4, 1, STATIC, torch.float32),
        (4, 3, DYNAMIC, torch.float32),
    ],
}
EVERY = 12


def _is_variant(case: Case) -> bool:
    return " " in case.id or "/" in case.id


def _fits(case: Case, setting: tuple[int, int, str, torch.dtype]) -> bool:
    world_size, _, form, dtype = setting
    return (
        world_size in case.world_sizes
        and dtype in case.dtypes
        and (case.unbacked or form != UNBACKED)
        and (case.dynamic or form == STATIC)
    )


def _selection() -> list:
    chosen = []
    turns = {n: itertools.cycle(settings) for n, settings in SETTINGS.items()}
    for index, case in enumerate(REGISTRY):
        if not case.traceable or (_is_variant(case) and index % EVERY):
            continue
        pair = 2 in case.world_sizes and not _is_variant(case)
        world_size = 2 if pair or 4 not in case.world_sizes else 4
        setting = next(s for s in turns[world_size] if _fits(case, s))
        world_size, tokens, form, dtype = setting
        name = f"{case.id}-N{world_size}-T{tokens}-{form}-{str(dtype)[6:]}"
        chosen.append(pytest.param(case, setting, id=name.replace(" ", "_")))
    return chosen


EAGER = [
    pytest.param(case, id=case.id.replace(" ", "_"))
    for case in REGISTRY
    if case.traceable and 4 in case.world_sizes
]


@pytest.mark.parametrize("case", EAGER)
def test_recipe_against_dense_attention(case: Case) -> None:
    dtype = case.dtypes[0]
    problem = harness.case_problem(case, 4, 3, dtype)
    got = harness.run_eager(case, problem)
    if case.result is None:
        assert all(torch.isfinite(x.float()).all() for rank in got for x in rank)
        return
    error = harness.dense_difference(case, problem, got)
    if case.deviates:
        assert error > 1e-2
    elif case.slight:
        assert 1e-4 < error < 0.3
    else:
        assert error <= (case.tolerance or harness.TOLERANCE[dtype])


@pytest.mark.parametrize(("case", "setting"), _selection())
def test_pass_on_formulation(case: Case, setting) -> None:
    world_size, tokens, form, dtype = setting
    verdict = judging.judge(
        case, world_size, tokens=tokens, form=form, dtype=dtype, cache=False
    )
    assert verdict.ok, str(verdict)


PLAIN = (2, 3, STATIC, torch.float32)
LATE = pytest.mark.xfail(
    reason="a statistic that is made from the partial output is not looked for",
    strict=True,
)
VARIANTS = [
    pytest.param(
        case,
        id=case.id.replace(" ", "_"),
        marks=LATE if case.id == "FS-05 lse late" else (),
    )
    for index, case in enumerate(REGISTRY)
    if case.traceable and _is_variant(case) and index % EVERY and _fits(case, PLAIN)
]


@pytest.mark.parametrize("case", VARIANTS)
def test_pass_on_every_other_variant(case: Case) -> None:
    world_size, tokens, form, dtype = PLAIN
    verdict = judging.judge(
        case, world_size, tokens=tokens, form=form, dtype=dtype, cache=False
    )
    assert verdict.ok, str(verdict)


def test_ranks_judge_a_fold_of_roundings_alike() -> None:
    """Every rank tries other rows; a tolerance that few roundings use up parts them."""
    case = REGISTRY["FC-06 logaddexp"]
    verdict = judging.judge(case, 4, tokens=1, form=STATIC, dtype=torch.float32)
    assert verdict.ok, str(verdict)


def test_tokens_sent_by_a_share_that_changes_with_their_count_are_refused() -> None:
    case = REGISTRY["FU-05"]
    verdict = judging.judge(case, 2, form=DYNAMIC, dtype=torch.float32)
    assert (verdict.outcome, verdict.refusals) == ("refused", ["layout"])


UNSEEN = [
    case.id for case in REGISTRY if case.id.startswith(("NM-51", "NM-58", "NM-59"))
]


@pytest.mark.parametrize("name", [name.replace(" ", "_") for name in UNSEEN])
def test_what_ordinary_data_does_not_show_is_no_merge(name: str) -> None:
    """Limits beyond the traced tokens, and numbers that no draw hits."""
    case = REGISTRY[name.replace("_", " ")]
    form = DYNAMIC if case.other_tokens else STATIC
    verdict = judging.judge(case, 2, form=form, dtype=torch.float32)
    assert verdict.ok, str(verdict)


def test_lanes_that_look_like_heads_are_left_alone() -> None:
    verdict = judging.judge(REGISTRY["FI-05 8"], 4, tokens=1)
    assert verdict.refusals == ["not_equivalent"], verdict
    assert "a2a_lse_reduce" not in verdict.direct, verdict
    assert (verdict.wrong, verdict.error) == (None, ""), verdict


def test_statistics_may_be_computed_from_keys_next_to_the_merge() -> None:
    """The sum over a row's exponentials is one, and what it sums is none."""
    case = REGISTRY["FS-10 accumulators"]
    for world_size, form in ((2, STATIC), (4, DYNAMIC)):
        verdict = judging.judge(case, world_size, form=form, dtype=torch.float32)
        assert verdict.ok, str(verdict)


def test_collection_is_large_enough() -> None:
    recipes = [c for c in REGISTRY if c.expect != EQUAL_OR_REFUSED]
    assert len(recipes) >= 300
    assert len(REGISTRY) - len(recipes) >= 100
    numbers = {c.id.split()[0] for c in REGISTRY}
    missing = [f"FC-{n:02}" for n in range(1, 61) if f"FC-{n:02}" not in numbers]
    assert missing == []


def test_dense_result_is_the_merge_of_the_partials() -> None:
    problem = make_problem(Geometry(4, 6), empty=EMPTY_SHARDS)
    weights = torch.softmax(problem.partial_lse, 0).nan_to_num(nan=0.0)
    merged = (weights[..., None] * problem.partial_output).sum(0)
    torch.testing.assert_close(merged, problem.output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.logsumexp(problem.partial_lse, 0), problem.lse, rtol=1e-12, atol=1e-12
    )
    assert (problem.output[2] == 0).all()


SAMPLE = [
    "FC-01", "FC-13 in place", "FC-29 coalesced", "FC-42", "FC-45", "FC-51 ring",
    "FC-59", "FC-60 q and merge", "G10", "G13", "K4", "NM-37 Ulysses",
]  # fmt: skip


@pytest.mark.parametrize("case_id", SAMPLE)
def test_lockstep_run_equals_threads(case_id: str) -> None:
    case = REGISTRY[case_id]
    dtype = case.dtypes[0]
    traced = harness.trace_ranks(case, 2, form=DYNAMIC, dtype=dtype, cache=False)
    problem = harness.case_problem(case, 2, 5, dtype, seed=5)
    got = harness.run_graphs(
        traced, [t.original for t in traced], harness.inputs_of(case, problem)
    )
    want = harness.run_eager(case, problem)
    assert harness.difference(got, want) <= harness.TOLERANCE[dtype] / 4


class _Scaled:
    """A pass whose rewrite is off by a thousandth."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        output = graph.output_node()
        value = output.args[0][0]
        with graph.inserting_before(output):
            scaled = graph.call_function(torch.ops.aten.mul.Tensor, (value, 1.001))
        scaled.meta["val"] = value.meta["val"]
        output.args = ((scaled, *output.args[0][1:]),)
        torch._dynamo.utils.counters["dcp_inductor"]["rewritten"] += 1


class _ScaledOnLargeScores(_Scaled):
    """A pass whose rewrite is off only where an output is large."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        output = graph.output_node()
        value = output.args[0][0]
        with graph.inserting_before(output):
            capped = graph.call_function(
                torch.ops.aten.clamp.default, (value, -8.0, 8.0)
            )
        output.args = ((capped, *output.args[0][1:]),)
        torch._dynamo.utils.counters["dcp_inductor"]["rewritten"] += 1


class _SwapsReduceOp:
    """A pass that changes one rank's collective only."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        if torch.distributed.get_rank() == 0:
            for node in graph.nodes:
                if (
                    node.target
                    is torch.ops._c10d_functional.reduce_scatter_tensor.default
                ):
                    node.update_arg(1, "avg")
        torch._dynamo.utils.counters["dcp_inductor"]["rewritten"] += 1


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (_Scaled, "WRONG"),
        (_ScaledOnLargeScores, "large scores"),
        (_SwapsReduceOp, "different exchanges"),
    ],
)
def test_harness_catches_a_wrong_rewrite(monkeypatch, broken, complaint) -> None:
    monkeypatch.setattr(judging, "load_pass", lambda: broken)
    verdict = judging.judge(REGISTRY["FC-01"], 2, cache=False)
    assert not verdict.ok
    assert complaint in str(verdict)


def test_lockstep_refuses_ranks_that_never_meet() -> None:
    case = REGISTRY["FC-01"]
    traced = harness.trace_ranks(case, 2, cache=False)
    modules = [t.graph_module() for t in traced]
    graph = modules[1].graph
    first = next(n for n in graph.nodes if "all_gather" in str(n.target))
    with graph.inserting_after(first):
        twice = graph.call_function(torch.ops.aten.cat.default, ([first.args[0]] * 2,))
    first.replace_all_uses_with(twice)
    graph.erase_node(first)
    inputs = harness.inputs_of(case, harness.case_problem(case, 2, 3, torch.float32))
    with pytest.raises(LockstepError, match="different exchanges"):
        harness.run_graphs(traced, modules, inputs)
