"""What the pass does to a case: applied on every rank, run against the original
graphs.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import fx
from torch._dynamo.utils import counters

from .cases import EQUAL_OR_REFUSED, LSE_ONLY, Case
from .fabric import fake_rank
from .harness import (
    TOLERANCE,
    case_problem,
    dense_difference,
    difference,
    inputs_of,
    trace_ranks,
)
from .inputs import EMPTY_SHARDS, EMPTY_SHARDS_NAN, SPECIAL, Problem
from .lockstep import LockstepError, run_graphs
from .tracing import DYNAMIC, STATIC, UNBACKED, Traced, case_geometry

# Scores and values this many times larger than in the ordinary problem.
LARGE = 8.0


def load_pass() -> type:
    """The pass under test, imported late so that the collection stands without it."""
    return importlib.import_module("dcp_inductor.fx.dcp_pass").DcpPass


def _stems(graph: fx.Graph, namespace: str) -> list[str]:
    names = [
        node.target._schema.name.partition("::")
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    ]
    return [stem for space, _, stem in names if space == namespace]


def collectives(graph: fx.Graph) -> list[str]:
    """Stems of the functional collectives left in a graph."""
    return [s for s in _stems(graph, "_c10d_functional") if s != "wait_tensor"]


def direct_ops(graph: fx.Graph) -> list[str]:
    """Stems of the exchange ops of dcp_inductor in a graph; views are gathers too."""
    exchanges = ("q_gather", "kv_gather", "a2a_lse_reduce")
    stems = [s.removesuffix("_view") for s in _stems(graph, "dcp_inductor")]
    return [s for s in stems if s in exchanges]


@dataclass
class Verdict:
    """What the pass did to one case in one form.

    ``outcome``: "rewritten", "partly" (a collective is left), "refused" (the graph is
    as it was), "ranks disagree" (a run ends in an error) or "failed". ``wrong``:
    difference between the rewritten and the original graph where it is beyond
    tolerance, and on which data.
    """

    case: Case
    outcome: str = "failed"
    refusals: list[str] = field(default_factory=list)
    direct: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    wrong: float | None = None
    wrong_on: str = ""
    error: str = ""
    pass_ms: float = 0.0
    votes: list[dict[str, str]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True unless the case misses what the collection expects of it."""
        if self.error or self.wrong is not None:
            return False
        if self.case.expect == EQUAL_OR_REFUSED:
            return self.outcome != "ranks disagree" or self.case.ambiguous
        if self.case.expect == LSE_ONLY:
            return self.direct == ["kv_gather"]
        return self.outcome == "rewritten"

    def __str__(self) -> str:
        parts = [self.outcome]
        if self.direct:
            parts.append("to " + ", ".join(self.direct))
        if self.refusals:
            parts.append("codes " + ", ".join(self.refusals))
        if self.left and self.outcome != "refused":
            parts.append("left " + ", ".join(self.left))
        if self.wrong is not None:
            parts.append(f"WRONG by {self.wrong:.3g} on {self.wrong_on}")
        if self.error:
            parts.append(self.error.splitlines()[0])
        return "; ".join(parts)


@contextlib.contextmanager
def _recorded_votes(record: dict[str, str]) -> Iterator[None]:
    """Keep what a rank tells its peers about its sites."""
    votes = importlib.import_module("dcp_inductor.votes")

    def post(group_name: str, site: str, vote: str) -> None:
        record[site] = vote

    with mock.patch.object(votes, "post", post):
        yield


def apply_pass(
    case: Case, traced: list[Traced], heads_per_rank: int, verdict: Verdict
) -> list[fx.GraphModule]:
    """Every rank's graph after the pass; fills all of ``verdict`` but the
    comparison.
    """
    dcp_pass = load_pass()
    modules, refusals = [], set()
    rewritten = 0
    for t in traced:
        module = t.graph_module()
        votes: dict[str, str] = {}
        grid = fake_rank(t.rank, t.world_size, heads_per_rank, grid=case.grid)
        with grid, _recorded_votes(votes):
            counters["dcp_inductor"].clear()
            start = time.perf_counter()
            dcp_pass()(module.graph)
            verdict.pass_ms = max(verdict.pass_ms, (time.perf_counter() - start) * 1e3)
        counts = counters["dcp_inductor"]
        rewritten += counts["rewritten"] >= 1
        refusals |= {k for k in counts if k.startswith("rejected.")}
        module.graph.lint()
        modules.append(module)
        verdict.votes.append(votes)
    verdict.refusals = sorted(k.removeprefix("rejected.") for k in refusals)
    left = [collectives(m.graph) for m in modules]
    direct = [direct_ops(m.graph) for m in modules]
    verdict.left, verdict.direct = max(left, key=len), max(direct, key=len)
    if any(x != direct[0] for x in direct):
        verdict.outcome = "ranks disagree"
    elif not rewritten:
        verdict.outcome = "refused"
        if left[0] != collectives(traced[0].original.graph):
            verdict.error = f"counted no rewrite, but the collectives became {left[0]}"
    else:
        stays = sorted(verdict.left) == sorted(case.leaves)
        verdict.outcome = "rewritten" if stays else "partly"
    return modules


def trial_problems(
    case: Case, world_size: int, tokens: int, form: str, dtype: torch.dtype
) -> Iterator[tuple[str, Problem, bool]]:
    """Data to compare a rewritten graph on: (name, problem, whether shards are empty).

    A symbolic graph has to hold for other token counts than the one it was traced with.
    """
    others = {STATIC: [], DYNAMIC: [2, 7], UNBACKED: [1, 7]}[form]
    if form != STATIC:
        others += case.other_tokens
    if tokens == 1 and form == DYNAMIC:
        others = []
    for count in [tokens, *others]:
        make = lambda seed, n=count, **data: case_problem(  # noqa: E731
            case, world_size, n, dtype, seed, **data
        )
        yield f"T={count}", make(0), False
        yield f"T={count}, NaN in empty shards", make(3, empty=EMPTY_SHARDS_NAN), True
        if count == tokens:
            yield f"T={count}, large scores", make(1, scale=LARGE), False
            yield f"T={count}, empty shards", make(2, empty=EMPTY_SHARDS), True
            yield f"T={count}, zeros and ties", make(4, empty=SPECIAL), False


def compare(
    verdict: Verdict,
    traced: list[Traced],
    modules: list[fx.GraphModule],
    setting: tuple[int, int, str, torch.dtype],
) -> None:
    """Run original and rewritten graphs on all trial data; fills ``wrong``.

    Where shards are empty the original's NaN may become a number, and nothing else may
    change.
    """
    accepted = [
        {site for site, vote in votes.items() if vote == "accepted"}
        for votes in verdict.votes
    ]
    dtype = setting[3]
    for name, problem, empty in trial_problems(verdict.case, *setting):
        inputs = inputs_of(verdict.case, problem)
        want = run_graphs(traced, [t.original for t in traced], inputs)
        got = run_graphs(traced, modules, inputs, accepted)
        delta = difference(got, want, where_finite=empty)
        limit = TOLERANCE[dtype] * problem.scale
        if delta > limit and not _nearer(verdict.case, problem, got, want, limit):
            if delta > (verdict.wrong or 0.0):
                verdict.wrong, verdict.wrong_on = delta, name


def _nearer(case: Case, problem: Problem, got: list, want: list, limit: float) -> bool:
    """Whether a rewrite that is far from its original is nearer to the dense result.

    An original that does its algebra in 16 bits is far from it itself.
    """
    if case.deviates or case.slight or case.result is None:
        return False
    error = dense_difference(case, problem, got)
    return error <= limit or error <= dense_difference(case, problem, want)


def judge(
    case: Case,
    world_size: int,
    *,
    tokens: int = 3,
    form: str = STATIC,
    dtype: torch.dtype = torch.float32,
    cache: bool = True,
) -> Verdict:
    """Trace a case on every rank, apply the pass, and run both graphs against each
    other.
    """
    verdict = Verdict(case)
    heads_per_rank = case_geometry(case, world_size, tokens, dtype).heads_per_rank
    try:
        traced = trace_ranks(
            case, world_size, tokens=tokens, form=form, dtype=dtype, cache=cache
        )
    except Exception as error:
        verdict.error = f"does not trace: {type(error).__name__}: {str(error)[:300]}"
        return verdict
    try:
        modules = apply_pass(case, traced, heads_per_rank, verdict)
    except Exception as error:
        verdict.error = f"pass: {type(error).__name__}: {str(error)[:300]}"
        return verdict
    if verdict.outcome == "refused":
        return verdict
    try:
        compare(verdict, traced, modules, (world_size, tokens, form, dtype))
    except LockstepError as error:
        if not case.ambiguous:
            verdict.error = f"LockstepError: {str(error)[:300]}"
        verdict.outcome = "ranks disagree"
    except Exception as error:
        verdict.error = f"run: {type(error).__name__}: {str(error)[:300]}"
    return verdict
