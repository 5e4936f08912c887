"""The graph of a recipe exactly as Inductor hands it to ``post_grad_custom_pre_pass``.

The recipe goes through ``torch.compile(fullgraph=True)`` and Inductor's own front half;
the hook keeps the graph and unwinds, so that no code is generated. Graphs are kept
serialised, and on disk too: a survey traces each of thousands once per change of its
recipe.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from . import combining
from .cases import Case, Context
from .fabric import fake_rank, group_ranks
from .inputs import Geometry, Input, make_problem, rank_inputs

STATIC, DYNAMIC, UNBACKED = FORMS = ("static", "dynamic", "unbacked")
CACHE = Path(__file__).parent / ".traces"
TRACE_VERSION = 1  # of what this file does to a recipe; kept traces are of one version


class _Captured(BaseException):
    """Unwinds a compilation whose graph has been seen; no user error, so no
    Exception.
    """


# Torch 2.11 has the other kind only.
_GraphPass = getattr(
    custom_graph_pass,
    "CustomInferenceAwareGraphPass",
    custom_graph_pass.CustomGraphPass,
)


class _CapturePass(_GraphPass):
    graph_module: torch.fx.GraphModule | None = None

    def __call__(self, graph: torch.fx.Graph, is_inference: bool = True) -> None:
        self.graph_module = graph.owning_module
        raise _Captured

    def uuid(self) -> None:
        return None


@dataclass
class Traced:
    """One rank's captured graph.

    ``bindings`` gives for each placeholder the index of the input it takes, or None for
    a symbolic size; ``groups`` the global ranks behind each group name in the graph.
    """

    pickled: bytes
    bindings: list[int | None]
    groups: dict[str, tuple[int, ...]]
    rank: int
    world_size: int
    form: str

    def graph_module(self) -> torch.fx.GraphModule:
        """A fresh copy of the graph, with fake values in ``meta['val']``."""
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        return GraphPickler.loads(self.pickled, mode)

    @cached_property
    def original(self) -> torch.fx.GraphModule:
        """A copy to look at and run, never to change."""
        return self.graph_module()


def mark(inputs: list[Input], form: str, minimum: int | None = None) -> None:
    """Mark the token dim of every input as ``form`` asks; ``minimum`` if unbacked."""
    for item in inputs:
        if item.token_dim is None:
            continue
        if form == UNBACKED:
            torch._dynamo.decorators.mark_unbacked(
                item.tensor, item.token_dim, shape_id="tokens", min=minimum
            )
        elif form == DYNAMIC and item.tensor.shape[item.token_dim] > 1:
            torch._dynamo.mark_dynamic(item.tensor, item.token_dim)


def trace(
    fn: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: list[Input],
    context: Context,
    form: str = STATIC,
    minimum: int | None = None,
) -> Traced:
    """Capture the graph of ``fn(*tensors)`` on the live fake rank of ``context``.

    A token count of 1 is static whatever ``form`` DYNAMIC says, as it is in torch
    itself.
    """
    tensors = [item.tensor for item in inputs]
    mark(inputs, form, minimum)
    capture = _CapturePass()
    bindings: list[int | None] = []

    def backend(graph_module, example_inputs):
        for example in example_inputs:
            index = [i for i, x in enumerate(tensors) if x is example]
            bindings.append(index[0] if index else None)
        return compile_fx(graph_module, example_inputs)

    torch._dynamo.reset()
    compiled = torch.compile(
        fn, backend=backend, fullgraph=True, dynamic=False if form == STATIC else None
    )
    with (
        torch.no_grad(),
        inductor_config.patch(
            post_grad_custom_pre_pass=capture, force_disable_caches=True
        ),
    ):
        try:
            compiled(*tensors)
        except _Captured:
            pass
        finally:
            torch._dynamo.reset()
    if capture.graph_module is None:
        raise RuntimeError("expected Inductor to call the post-grad hook, it never did")
    pickled = GraphPickler.dumps(capture.graph_module, Options(ops_filter=None))
    return Traced(
        pickled, bindings, group_ranks(context), context.rank, context.world_size, form
    )


def case_geometry(
    case: Case, world_size: int, tokens: int, dtype: torch.dtype
) -> Geometry:
    return Geometry(world_size, case.num_tokens(tokens, world_size), dtype)


def _digest(case: Case, inputs: list[Input]) -> str:
    """Hash of what a case's graph comes from: torch, the recipe's files, its inputs."""
    fn = case.fn
    while isinstance(fn, partial):
        fn = fn.func
    recipe = inspect.getmodule(fn)
    paths = {Path(recipe.__file__), Path(combining.__file__)}
    for value in vars(recipe).values():
        if inspect.ismodule(value) and value.__name__.startswith(__package__):
            paths.add(Path(value.__file__))
    digest = hashlib.sha256(f"{torch.__version__} {TRACE_VERSION}".encode())
    for path in sorted(paths):
        digest.update(path.read_bytes())
    for item in inputs:
        x = item.tensor
        digest.update(str((x.shape, x.stride(), x.dtype, item.token_dim)).encode())
    return digest.hexdigest()


def trace_case(
    case: Case,
    rank: int,
    world_size: int,
    *,
    tokens: int = 3,
    form: str = STATIC,
    dtype: torch.dtype = torch.float32,
    cache: bool = True,
) -> Traced:
    """Graph of a case on one rank, from the disk cache where its source has not
    changed.
    """
    name = f"{case.id}-n{world_size}r{rank}-t{tokens}-{form}-{str(dtype)[6:]}"
    path = CACHE / (name.replace("/", "_").replace(" ", "_") + ".pkl")
    geometry = case_geometry(case, world_size, tokens, dtype)
    problem = make_problem(geometry)
    digest = _digest(case, rank_inputs(case.inputs, problem, rank))
    if cache and path.exists():
        stored_digest, traced = pickle.loads(path.read_bytes())
        if stored_digest == digest:
            return traced
    with fake_rank(
        rank, world_size, geometry.heads_per_rank, grid=case.grid
    ) as context:

        def run(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
            return case.fn(context, *tensors)

        try:
            traced = trace(run, rank_inputs(case.inputs, problem, rank), context, form)
        except torch._dynamo.exc.UserError:
            if form != UNBACKED:
                raise
            # logsumexp asks whether there are elements; only a lower bound helps.
            inputs = rank_inputs(case.inputs, problem, rank)
            traced = trace(run, inputs, context, form, minimum=1)
    if cache:
        CACHE.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps((digest, traced)))
    return traced
