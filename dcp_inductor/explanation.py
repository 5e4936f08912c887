"""``explain``: what the pass would make of a model, site by site.

The model is compiled afresh for this one question. Dynamo keeps compiled code per code
object and backend; ``explain`` brings a code object and a backend of its own, so that
what the caller has compiled stays as it is. Caches on disk are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dcp_inductor import backend, config, groups
from dcp_inductor.fx import report


@dataclass(repr=False)
class Explanation:
    """What happened to each site; prints as a table.

    Attributes:
        graphs: one report per graph that was compiled; a graph break makes several.
        output: what the model returned.
        enabled: whether the rewrite was on (``config.enable``).
        switch: words for what it is switched by.
        memory: bytes of symmetric memory that each group (by name) holds on this
            rank's GPU after the run, all sites together; empty without a GPU.
    """

    graphs: list[report.GraphReport]
    output: Any
    enabled: bool
    switch: str = ""
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> list[report.SiteReport]:
        """The sites of all graphs."""
        return [site for graph in self.graphs for site in graph.sites]

    @property
    def found(self) -> int:
        """Number of candidate sites."""
        return sum(graph.found for graph in self.graphs)

    @property
    def rewritten(self) -> int:
        """Number of sites where a direct op stands now."""
        return sum(graph.rewritten for graph in self.graphs)

    def __str__(self) -> str:
        if not self.enabled:
            return (
                f"dcp_inductor is off by {self.switch}; the backend is plain Inductor"
            )
        pass_ms = sum(graph.pass_ms for graph in self.graphs)
        graphs = "1 graph" if len(self.graphs) == 1 else f"{len(self.graphs)} graphs"
        if not self.graphs:
            return (
                "torch.compile captured no graph of this model, so nothing could be "
                "looked at: see whether it is disabled (torch.compiler.disable, "
                "TORCHDYNAMO_DISABLE) or falls back to eager mode at once "
                "(TORCH_LOGS=graph_breaks tells)"
            )
        parted = ""
        if len(self.graphs) > 1:
            parted = (
                "a merge that is parted by a graph break is not seen as one: "
                "TORCH_LOGS=graph_breaks tells where they are, and why"
            )
        if not self.rows:
            found = f"found no exchange of decode context parallelism in {graphs}"
            return "\n".join(line for line in (found, parted) if line)
        summary = (
            f"rewrote {self.rewritten} of {self.found} sites in {graphs}; "
            f"the pass took {pass_ms:.1f} ms"
        )
        memory = [
            f"group '{group_name}' holds {nbytes} B of symmetric memory on this GPU"
            for group_name, nbytes in self.memory.items()
        ]
        advice = [
            "docs/recognition.md says what to do about each refusal: "
            + ", ".join(dict.fromkeys(row.code for row in self.rows if row.code))
        ]
        advice = advice if self.rewritten < self.found else []
        lines = [*_table(self.rows), summary, *advice, parted, *memory]
        return "\n".join(line for line in lines if line)

    __repr__ = __str__


def explain(model: Callable[..., Any], /, *inputs: Any, **kwargs: Any) -> Explanation:
    """Compile ``model`` afresh with this backend, run it once, and say what was done.

    Every rank must call this, since the model's exchanges run. Side effects of the
    model (a KV cache that it writes, random numbers) happen once, as in any call.

    Args:
        model: a module or function, compiled or not. The options that it was compiled
            with are taken over, where that was for this backend.
        inputs: its arguments.
        kwargs: its keyword arguments.

    Raises:
        TypeError: ``model`` cannot be called.
    """
    if not callable(model):
        raise TypeError(f"explain: expected a module or a function, got {model!r}")
    given = _compiled_with(model)
    options = given.get("options") or {}
    model = getattr(model, "_orig_mod", model)
    disabled = getattr(model, "_torchdynamo_disable", False)
    if not isinstance(model, torch.nn.Module) and not disabled:
        model = getattr(model, "_torchdynamo_orig_callable", model)

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        return backend.dcp_inductor(
            gm, example_inputs, mode=given.get("mode"), options=options
        )

    def run(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_name="explained_model")
    # Keeps what a graph break compiles of the model's own code apart, too. Torch 2.11
    # lacks it; there such code only counts towards the recompilation limit.
    apart: dict[str, Any] = {"isolate_recompiles": True}
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        apart = {}
    with report.collect() as graphs:  # which also keeps graphs out of caches
        output = torch.compile(run, backend=compile_graph, **apart)(*inputs, **kwargs)
    knobs = {
        key.removeprefix("dcp_inductor."): value
        for key, value in options.items()
        if key.startswith("dcp_inductor.")
    }
    with config.arguments(knobs):
        explanation = Explanation(
            graphs, output, config.read("enable"), config.setter("enable")
        )
    _measure(explanation)
    return explanation


def _measure(explanation: Explanation) -> None:
    """Put what exchanges on this GPU really took in the place of the pass's estimate.

    The payload of a site is what the pass can know. On GPUs every source rank has a
    region of its own, rounded up, and arrival marks beside it.
    """
    from dcp_inductor.runtime import cuda_registry

    for row in explanation.rows:
        if row.decision != "rewritten":
            continue
        row.workspace_bytes = (
            cuda_registry.site_bytes(row.group_name, row.site) or row.workspace_bytes
        )
        if nbytes := cuda_registry.memory_bytes(groups.resolve(row.group_name)):
            explanation.memory[row.group_name] = nbytes


def _compiled_with(model: Any) -> dict[str, Any]:
    """Mode and options that a compiled model was given for this backend, if any."""
    step: Any = getattr(getattr(model, "dynamo_ctx", None), "callback", None)
    if step is None:  # a function, or a module compiled in place (Module.compile)
        function = getattr(model, "_compiled_call_impl", None) or model
        if hasattr(function, "_torchdynamo_orig_callable"):
            step = inspect.getclosurevars(function).nonlocals.get("callback")
    while hasattr(step, "_torchdynamo_orig_backend"):
        step = step._torchdynamo_orig_backend
    ours = getattr(step, "compiler_fn", None) is backend.dcp_inductor
    return dict(getattr(step, "kwargs", {})) if ours else {}


def _table(rows: list[report.SiteReport]) -> list[str]:
    cells = [("site", "decision", "op", "trials", "workspace")]
    details = []
    for alike in _alike(rows):
        row = alike[0]
        decision = row.decision + (f" ({row.code})" if row.code else "")
        size = f"{row.workspace_bytes} B" if row.workspace_bytes else "-"
        times = f"{len(alike)}x " if len(alike) > 1 else ""
        # The proof of an equal site is remembered for as long as the process lives.
        trials = str(sum(each.trials for each in alike) or "known")
        cells.append((times + row.site, decision, row.op or "-", trials, size))
        group = f"{row.kind} over group '{row.group_name}' of {row.world_size}"
        found = ", ".join(filter(None, (group, row.family, row.result)))
        details.append([row.source, found, row.reason])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line, told in zip(cells, [[], *details], strict=True):
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("  ".join(padded).rstrip())
        lines += [f"    {detail}" for detail in told if detail]
    return lines


def _alike(rows: list[report.SiteReport]) -> list[list[report.SiteReport]]:
    """Rows that differ in nothing but their proof together, as of equal layers."""
    found: dict[str, list[report.SiteReport]] = {}
    for row in rows:
        shown = repr(replace(row, trials=0, proof_ms=0.0))
        found.setdefault(shown, []).append(row)
    return list(found.values())
