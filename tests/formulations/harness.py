"""Running a case: traced or eager, on every rank, against the dense result."""

from __future__ import annotations

import torch
from torch import Tensor

from .cases import Case, Context
from .fabric import run_threads
from .inputs import Problem, make_problem, rank_inputs, rank_result
from .lockstep import run_graphs
from .tracing import FORMS, STATIC, Traced, case_geometry, trace, trace_case

__all__ = ["FORMS", "run_eager", "run_graphs", "trace", "trace_case"]

# Largest difference to the dense result, relative to its scale of about one.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


def as_list(value: Tensor | tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def inputs_of(case: Case, problem: Problem) -> list[list[Tensor]]:
    """Input tensors of every rank."""
    ranks = range(problem.geometry.world_size)
    return [[i.tensor for i in rank_inputs(case.inputs, problem, r)] for r in ranks]


def dense_of(case: Case, problem: Problem) -> list[list[Tensor]]:
    """What each rank's recipe must return, in float64."""
    ranks = range(problem.geometry.world_size)
    return [as_list(rank_result(case.result, problem, r)) for r in ranks]


def run_eager(case: Case, problem: Problem) -> list[list[Tensor]]:
    """The recipe run eagerly on one thread per rank, with real collectives."""
    tensors = inputs_of(case, problem)

    def body(context: Context) -> list[Tensor]:
        out = as_list(case.fn(context, *tensors[context.rank]))
        return [x.wait() if hasattr(x, "wait") else x for x in out]

    geometry = problem.geometry
    return run_threads(
        body, geometry.world_size, geometry.heads_per_rank, grid=case.grid
    )


def trace_ranks(
    case: Case,
    world_size: int,
    *,
    tokens: int = 3,
    form: str = STATIC,
    dtype: torch.dtype = torch.float32,
    cache: bool = True,
) -> list[Traced]:
    """The case's graph on every rank."""
    return [
        trace_case(
            case, r, world_size, tokens=tokens, form=form, dtype=dtype, cache=cache
        )
        for r in range(world_size)
    ]


def difference(
    got: list[list[Tensor]], want: list[list[Tensor]], *, where_finite: bool = False
) -> float:
    """Largest absolute difference over ranks and outputs.

    Infinite where shapes differ or one value alone is not a number; ``where_finite``
    leaves out elements whose wanted value is NaN.
    """
    worst = 0.0
    for got_rank, want_rank in zip(got, want, strict=True):
        if len(got_rank) != len(want_rank):
            return float("inf")
        for g, w in zip(got_rank, want_rank, strict=True):
            if g.shape != w.shape:
                return float("inf")
            g, w = g.double(), w.double()
            same = (g == w) | (w.isnan() & (g.isnan() | where_finite))
            delta = torch.where(same, 0.0, (g - w).abs())
            if delta.numel():
                worst = max(worst, float(delta.nan_to_num(nan=float("inf")).max()))
    return worst


def dense_difference(case: Case, problem: Problem, got: list[list[Tensor]]) -> float:
    """Largest difference to the dense result."""
    return difference(got, dense_of(case, problem))


def case_problem(
    case: Case,
    world_size: int,
    tokens: int,
    dtype: torch.dtype,
    seed: int = 0,
    **data: float | str,
) -> Problem:
    """A problem of the size that the case needs for ``tokens`` tokens."""
    return make_problem(case_geometry(case, world_size, tokens, dtype), seed, **data)
