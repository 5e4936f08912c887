"""What a test or the survey does with a case: trace it, run it, rewrite it, compare."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters

from .cases import EQUAL_OR_REFUSED, Case, Context
from .fabric import fake_rank, run_threads
from .inputs import INPUTS, RESULTS, Problem, make_problem
from .lockstep import run_graphs
from .tracing import FORMS, STATIC, Traced, case_geometry, trace, trace_case

__all__ = [
    "FORMS",
    "Verdict",
    "judge",
    "run_eager",
    "run_graphs",
    "trace",
    "trace_case",
]

# Largest difference to the dense result, relative to its scale of about one.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


def as_list(value: Tensor | tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def inputs_of(case: Case, problem: Problem) -> list[list[Tensor]]:
    """Input tensors of every rank."""
    ranks = range(problem.geometry.world_size)
    return [[i.tensor for i in INPUTS[case.inputs](problem, r)] for r in ranks]


def dense_of(case: Case, problem: Problem) -> list[list[Tensor]]:
    """What each rank's recipe must return, in float64."""
    ranks = range(problem.geometry.world_size)
    return [as_list(RESULTS[case.result](problem, r)) for r in ranks]


def run_eager(case: Case, problem: Problem) -> list[list[Tensor]]:
    """The recipe run eagerly on one thread per rank."""
    tensors = inputs_of(case, problem)

    def body(context: Context) -> list[Tensor]:
        out = as_list(case.fn(context, *tensors[context.rank]))
        return [x.wait() if hasattr(x, "wait") else x for x in out]

    geometry = problem.geometry
    return run_threads(
        body, geometry.world_size, geometry.heads_per_rank, grid=case.grid
    )


def difference(got: list[list[Tensor]], want: list[list[Tensor]]) -> float:
    """Largest absolute difference over ranks and outputs; inf where shapes or NaNs
    differ.
    """
    worst = 0.0
    for got_rank, want_rank in zip(got, want, strict=True):
        if len(got_rank) != len(want_rank):
            return float("inf")
        for g, w in zip(got_rank, want_rank, strict=True):
            if g.shape != w.shape:
                return float("inf")
            g, w = g.double(), w.double()
            same = (g == w) | (g.isnan() & w.isnan())
            delta = torch.where(same, 0.0, (g - w).abs())
            if delta.numel():
                worst = max(worst, float(delta.nan_to_num(nan=float("inf")).max()))
    return worst


def load_pass() -> type:
    """The pass under test, imported late so that the collection stands without it."""
    return importlib.import_module("dcp_inductor.fx.dcp_pass").DcpPass


def collectives(graph: fx.Graph) -> list[str]:
    """Stems of the functional collectives left in a graph."""
    names = []
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            namespace, _, stem = node.target._schema.name.partition("::")
            if namespace == "_c10d_functional" and stem != "wait_tensor":
                names.append(stem)
    return names


def direct_ops(graph: fx.Graph) -> list[str]:
    """Stems of the exchange ops of dcp_inductor in a graph."""
    names = ("q_gather", "kv_gather", "a2a_lse_reduce")
    return [
        stem
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        for namespace, _, stem in [node.target._schema.name.partition("::")]
        if namespace == "dcp_inductor" and stem in names
    ]


@dataclass
class Verdict:
    """What the pass did to one case in one form.

    ``outcome`` is "rewritten", "partly" (some collective is left), "refused" (graph
    left alone) or "gather only"; ``wrong`` the difference between the rewritten and the
    original graph where it is beyond tolerance; ``error`` anything that was raised.
    """

    case: Case
    outcome: str = ""
    refusals: list[str] = field(default_factory=list)
    direct: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    wrong: float | None = None
    error: str = ""
    pass_ms: float = 0.0

    @property
    def ok(self) -> bool:
        """True unless the case misses what the collection expects of it."""
        if self.error or self.wrong is not None:
            return False
        return self.case.expect == EQUAL_OR_REFUSED or self.outcome == "rewritten"


def apply_pass(
    case: Case, traced: list[Traced], heads_per_rank: int, verdict: Verdict
) -> list[fx.GraphModule]:
    """Every rank's graph after the pass; fills outcome, refusals and time of
    ``verdict``.
    """
    dcp_pass = load_pass()
    modules = []
    before = collectives(traced[0].original.graph)
    rewritten = 0
    for t in traced:
        module = t.graph_module()
        with fake_rank(t.rank, t.world_size, heads_per_rank, grid=case.grid):
            counters["dcp_inductor"].clear()
            start = time.perf_counter()
            dcp_pass()(module.graph)
            verdict.pass_ms = max(verdict.pass_ms, (time.perf_counter() - start) * 1e3)
        counts = counters["dcp_inductor"]
        rewritten += counts["rewritten"] >= 1
        verdict.refusals += [
            k.removeprefix("rejected.") for k in counts if k.startswith("rejected.")
        ]
        module.graph.lint()
        modules.append(module)
    graph = modules[0].graph
    verdict.left, verdict.direct = collectives(graph), direct_ops(graph)
    verdict.refusals = sorted(set(verdict.refusals))
    if not rewritten:
        verdict.outcome = "refused"
    elif rewritten < len(traced):
        verdict.outcome = "ranks disagree"
    else:
        verdict.outcome = "rewritten" if not verdict.left else "partly"
    if verdict.outcome == "refused" and verdict.left != before:
        verdict.error = (
            f"counted no rewrite, but collectives {before} became {verdict.left}"
        )
    return modules


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

    A rewritten graph is right when it is as close to the original as the dtype allows,
    on ordinary data and on other data of the same shapes.
    """
    verdict = Verdict(case)
    geometry = case_geometry(case, world_size, tokens, dtype)
    try:
        traced = [
            trace_case(
                case, r, world_size, tokens=tokens, form=form, dtype=dtype, cache=cache
            )
            for r in range(world_size)
        ]
    except Exception as error:
        verdict.error = f"trace: {type(error).__name__}: {str(error)[:300]}"
        return verdict
    try:
        modules = apply_pass(case, traced, geometry.heads_per_rank, verdict)
        if verdict.outcome == "ranks disagree":
            return verdict
        for seed in range(2):
            inputs = inputs_of(case, make_problem(geometry, seed))
            want = run_graphs(traced, [t.original for t in traced], inputs)
            got = run_graphs(traced, modules, inputs)
            delta = difference(got, want)
            if delta > TOLERANCE[dtype]:
                verdict.wrong = max(delta, verdict.wrong or 0.0)
    except Exception as error:
        verdict.error = f"{type(error).__name__}: {str(error)[:300]}"
    return verdict
