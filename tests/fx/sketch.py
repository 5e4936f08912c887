"""One rank's graph as Inductor hands it over, before and after the pass, in print.

``traced`` captures the graph of ``fn(ctx, *tensors)`` without compiling it; ``rewrite``
runs the pass on a fresh copy; ``sketch`` prints a graph so that it can stand in a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters

from dcp_inductor.fx import report
from dcp_inductor.fx.dcp_pass import DcpPass
from tests.formulations.fabric import fake_rank
from tests.formulations.harness import difference
from tests.formulations.inputs import Input
from tests.formulations.lockstep import run_graphs
from tests.formulations.tracing import STATIC, Traced, trace

HEADS_PER_RANK = 2
Model = Callable[..., Any]


def traced(
    fn: Model,
    tensors: Sequence[Tensor | Input],
    *,
    rank: int = 1,
    world_size: int = 2,
    form: str = STATIC,
    minimum: int | None = None,
    grid: bool = False,
) -> Traced:
    """The graph of ``fn(ctx, *tensors)`` on one rank; plain tensors: tokens first."""
    # Marks of a dynamic size stay on a tensor, so that it is traced under another name.
    inputs = [x if isinstance(x, Input) else Input(x.detach()) for x in tensors]
    with fake_rank(rank, world_size, HEADS_PER_RANK, grid=grid) as ctx:
        return trace(lambda *args: fn(ctx, *args), inputs, ctx, form, minimum)


@dataclass
class Rewritten:
    """What the pass made of a graph: the graph, its report, and what it counted."""

    module: fx.GraphModule
    report: report.GraphReport
    counts: dict[str, int]
    before: str

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def sites(self) -> list[report.SiteReport]:
        return self.report.sites

    @property
    def only(self) -> report.SiteReport:
        """The one site of the graph."""
        (site,) = self.report.sites
        return site

    @property
    def unchanged(self) -> bool:
        return sketch(self.graph) == self.before

    def calls(self, *stems: str) -> list[str]:
        """Ops of the graph, in order, among ``stems`` if given; waits are left out.

        A query gather is one whether its result is copied out or not.
        """
        found = [_stem(n.target) for n in self.graph.nodes if n.op == "call_function"]
        found = ["q_gather" if s == "q_gather_view" else s for s in found]
        return [s for s in found if (s in stems if stems else s in EXCHANGES)]


EXCHANGES = (
    "q_gather", "kv_gather", "a2a_lse_reduce", "all_gather_into_tensor", "all_reduce",
    "reduce_scatter_tensor", "all_to_all_single", "broadcast",
)  # fmt: skip


def rewrite(
    graph: Traced, *, is_inference: bool = True, **knobs: bool | int | str
) -> Rewritten:
    """Run the pass on a copy of the graph, on the rank that it was traced for."""
    module = graph.graph_module()
    before = sketch(module.graph)
    grid = len(graph.groups) > 1
    with (
        fake_rank(graph.rank, graph.world_size, HEADS_PER_RANK, grid=grid),
        report.collect() as reports,
    ):
        counters["dcp_inductor"].clear()
        DcpPass(knobs)(module.graph, is_inference)
    (told,) = reports or [report.GraphReport()]
    module.graph.lint()
    return Rewritten(module, told, dict(counters["dcp_inductor"]), before)


def passed(fn: Model, tensors: Sequence[Tensor | Input], **how: Any) -> Rewritten:
    """``rewrite(traced(...))``."""
    return rewrite(traced(fn, tensors, **how))


def deviation(
    fn: Model,
    per_rank: Sequence[Sequence[Tensor | Input]],
    others: Sequence[Sequence[Tensor]] = (),
    *,
    form: str = STATIC,
) -> tuple[list[Rewritten], float]:
    """Every rank's graph after the pass, and how far it is from the one before.

    Args:
        fn: the model.
        per_rank: inputs of each rank, to trace with and to run on.
        others: further inputs of each rank, perhaps of another size, to run on instead.
        form: of the token dim.
    """
    world_size = len(per_rank)
    graphs = [
        traced(fn, tensors, rank=rank, world_size=world_size, form=form)
        for rank, tensors in enumerate(per_rank)
    ]
    after = [rewrite(graph) for graph in graphs]
    data = [list(tensors) for tensors in others] or [
        [x.tensor if isinstance(x, Input) else x for x in tensors]
        for tensors in per_rank
    ]
    want = run_graphs(graphs, [graph.original for graph in graphs], data)
    got = run_graphs(graphs, [each.module for each in after], data)
    return after, difference(got, want, where_finite=True)


def partials(
    world_size: int,
    tokens: int = 3,
    *,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[tuple[Tensor, Tensor]]:
    """Partial output [T, H, D] and LSE [T, H] of every rank."""
    generator = torch.Generator().manual_seed(seed)
    heads = world_size * HEADS_PER_RANK
    return [
        (
            torch.randn(tokens, heads, head_dim, generator=generator).to(dtype),
            torch.randn(tokens, heads, generator=generator) * 3,
        )
        for _ in range(world_size)
    ]


def sketch(graph: fx.Graph) -> str:
    """The graph in print: ``name = op(args)`` a line, free of what varies by place.

    Names count the ops of a kind. A group's name and a site's line number differ from
    run to run and from edit to edit: the one is printed as GROUP, the other left out,
    as are keywords that have their default.
    """
    names: dict[fx.Node, str] = {}
    seen: Counter[str] = Counter()
    lines = []
    for node in graph.nodes:
        stem = "arg" if node.op == "placeholder" else _stem(node.target)
        names[node] = f"{stem}_{seen[stem]}" if seen[stem] else stem
        seen[stem] += 1
        if node.op == "output":
            lines.append(f"return {_argument(node.args[0], names)}")
        elif node.op == "placeholder":
            lines.append(f"{names[node]}: {_type(node)}")
        elif node.op == "get_attr":
            lines.append(f"{names[node]} = constant")
        else:
            lines.append(f"{names[node]} = {stem}({_arguments(node, names)})")
    return "\n".join(lines) + "\n"


def _stem(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return getattr(target, "__name__", str(target))


def _arguments(node: fx.Node, names: dict[fx.Node, str]) -> str:
    given = dict(node.kwargs)
    if isinstance(node.target, torch._ops.OpOverload):
        parameters = node.target._schema.arguments
        positional = [p.name for p in parameters[: len(node.args)]]
        defaults = {p.name: p.default_value for p in parameters}
        given = {k: v for k, v in given.items() if k != "site" and v != defaults[k]}
        groups = {"group_name", "group"}
        values = [
            "GROUP" if name in groups else _argument(value, names)
            for name, value in zip(positional, node.args, strict=True)
        ]
    else:
        values = [_argument(value, names) for value in node.args]
    values += [f"{key}={_argument(value, names)}" for key, value in given.items()]
    return ", ".join(values)


def _argument(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(item, names) for item in value)}]"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value)


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return "size"
    sizes = ["T" if isinstance(s, torch.SymInt) else str(s) for s in value.shape]
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
