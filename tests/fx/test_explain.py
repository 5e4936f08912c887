"""``explain``: the report, and what it must leave alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

import dcp_inductor
from dcp_inductor import config
from tests.fx.models import fake_group, merge, merge_inputs, plain

BREAKS = "a merge that is parted by a graph break is not seen as one: TORCH_LOGS=graph"


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with fake_group():
        yield


class Model(torch.nn.Module):
    """Writes to a buffer, as a model with a KV cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, partial_output: Tensor, partial_lse: Tensor) -> Tensor:
        self.calls += 1
        return merge(partial_output * 2, partial_lse)


def test_a_site_is_a_row_of_the_table_and_of_the_data() -> None:
    explanation = dcp_inductor.explain(Model(), *merge_inputs())
    assert (explanation.found, explanation.rewritten) == (1, 1)
    [row] = explanation.rows
    assert (row.kind, row.decision, row.op) == (
        "combine",
        "rewritten",
        "a2a_lse_reduce",
    )
    assert row.workspace_bytes > 0
    text = str(explanation)
    header, first = text.splitlines()[:2]
    assert header.split() == ["site", "decision", "op", "trials", "workspace"]
    assert first.split()[1:3] == ["rewritten", "a2a_lse_reduce"]
    size = f"{row.workspace_bytes} B"
    for part in (row.site, row.source, row.family, size, "rewrote 1 of 1 sites"):
        assert part
        assert part in text
    assert repr(explanation) == text
    assert explanation.output.shape == (4, 3, 16)


def test_the_model_runs_once_and_may_take_keywords() -> None:
    model = Model()
    output, lse = merge_inputs()
    dcp_inductor.explain(model, output, partial_lse=lse)
    assert model.calls == 1


def test_compiled_code_of_the_caller_stays() -> None:
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, backend="dcp_inductor")
    compiled(*merge_inputs())
    before = [id(entry) for entry in _debug_get_cache_entry_list(Model.forward)]
    counters.clear()
    for _ in range(2):
        assert dcp_inductor.explain(compiled, *merge_inputs()).rewritten == 1
    assert [id(entry) for entry in _debug_get_cache_entry_list(Model.forward)] == before
    counters.clear()
    compiled(*merge_inputs())
    assert counters["stats"]["unique_graphs"] == 0


def in_place(**kwargs) -> Model:
    model = Model()
    model.compile(**kwargs)
    return model


@pytest.mark.parametrize(
    "compiled",
    [
        lambda **kwargs: torch.compile(Model(), **kwargs),
        lambda **kwargs: torch.compile(merge, **kwargs),
        in_place,
    ],
    ids=["module", "function", "in place"],
)
def test_options_of_a_compiled_model_are_taken_over(compiled) -> None:
    options = {"dcp_inductor.direct_combine": "disable"}
    ours = compiled(backend="dcp_inductor", options=options)
    rows = dcp_inductor.explain(ours, *merge_inputs()).rows
    assert ("combine", "rejected") in [(row.kind, row.decision) for row in rows]
    off = compiled(backend="dcp_inductor", options={"dcp_inductor.enable": False})
    assert not dcp_inductor.explain(off, *merge_inputs()).enabled
    other = compiled(backend="inductor", mode="reduce-overhead")
    assert dcp_inductor.explain(other, *merge_inputs()).rewritten == 1


@pytest.mark.parametrize("dims", [(), (0,), (1,), (0, 1)])
def test_dynamic_heads_count_as_they_are(dims: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    inputs = merge_inputs()
    for tensor in inputs:
        for dim in dims:
            torch._dynamo.mark_dynamic(tensor, dim)
    [row] = dcp_inductor.explain(merge, *inputs).rows
    _, heads, head_dim = inputs[0].shape
    size = inputs[0].element_size()
    assert row.workspace_bytes == 2 * 256 * heads * (head_dim * size + 4)


def test_a_rejection_gives_its_code_and_reason() -> None:
    with config.patch(direct_combine="disable"):
        explanation = dcp_inductor.explain(merge, *merge_inputs())
    [row] = [row for row in explanation.rows if row.kind == "combine"]
    assert f"rejected ({row.code})" in str(explanation)
    assert row.reason
    assert row.reason in str(explanation)


@pytest.mark.parametrize("model", [None, 3])
def test_what_is_no_model_is_named(model) -> None:
    with pytest.raises(TypeError, match=f"a module or a function, got {model}"):
        dcp_inductor.explain(model)


def test_a_compiled_function_is_explained_too() -> None:
    compiled = torch.compile(merge, backend="eager")
    assert dcp_inductor.explain(compiled, *merge_inputs()).rewritten == 1


def test_nothing_to_report_is_said_in_words() -> None:
    none = dcp_inductor.explain(plain, torch.ones(4, 8), torch.ones(8, 8))
    assert str(none) == "found no exchange of decode context parallelism in 1 graph"
    with config.patch(enable=False):
        off = dcp_inductor.explain(merge, *merge_inputs())
    assert str(off).startswith("dcp_inductor is off")
    assert off.rows == []


def test_graphs_on_both_sides_of_a_break_are_reported() -> None:
    def model(partial_output: Tensor, partial_lse: Tensor) -> Tensor:
        first = merge(partial_output, partial_lse)
        torch._dynamo.graph_break()
        return first.sum() + merge(partial_output, partial_lse)

    explanation = dcp_inductor.explain(model, *merge_inputs())
    assert [graph.rewritten for graph in explanation.graphs] == [1, 1]
    assert "rewrote 2 of 2 sites in 2 graphs" in str(explanation)
    assert BREAKS in str(explanation)
    assert BREAKS not in str(dcp_inductor.explain(merge, *merge_inputs()))


def parted(partial_output: Tensor, partial_lse: Tensor) -> Tensor:
    """A merge with a break between its exchanges."""
    group = dist.group.WORLD
    lses = funcol.all_gather_tensor(partial_lse[None], 0, group)
    torch._dynamo.graph_break()
    weight = torch.exp(partial_lse - torch.logsumexp(lses, 0))
    weighted = partial_output * weight[..., None]
    return funcol.reduce_scatter_tensor(weighted, "sum", 1, group) + 1


def parted_behind(partial_output: Tensor, partial_lse: Tensor) -> Tensor:
    """The same with the weights on the other side, so that a plain sum is left."""
    group = dist.group.WORLD
    lses = funcol.all_gather_tensor(partial_lse[None], 0, group)
    weight = torch.exp(partial_lse - torch.logsumexp(lses, 0))
    torch._dynamo.graph_break()
    weighted = partial_output * weight[..., None]
    return funcol.reduce_scatter_tensor(weighted, "sum", 1, group) + 1


def test_a_merge_that_a_graph_break_parts_is_told_of_it() -> None:
    explanation = dcp_inductor.explain(parted, *merge_inputs())
    [row] = [row for row in explanation.rows if row.kind == "combine"]
    line = parted.__code__.co_firstlineno + 4
    assert row.code == "not_equivalent"
    assert f"begins behind a graph break at line {line} of parted" in row.reason
    assert BREAKS in str(explanation)
    explanation = dcp_inductor.explain(parted_behind, *merge_inputs())
    assert "combine" not in [row.kind for row in explanation.rows]
    assert BREAKS in str(explanation)


def bounded(partial_output: Tensor, partial_lse: Tensor) -> Tensor:
    torch._check(partial_lse.shape[0] > 0)
    return merge(partial_output, partial_lse)


def test_unbacked_tokens_that_there_are_some_of() -> None:
    """Output and LSE have two sizes that nothing relates; that is not in the way."""
    for model in (bounded, merge):
        inputs = merge_inputs()
        for tensor in inputs:
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        explanation = dcp_inductor.explain(model, *inputs)
        [row] = [row for row in explanation.rows if row.kind == "combine"]
        if len(explanation.graphs) == 1:
            assert row.decision == "rewritten"
        else:  # torch breaks the graph at logsumexp, which asks for a number
            assert model is merge
            assert "behind a graph break at line" in row.reason


def test_equal_layers_share_a_row() -> None:
    def layers(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.stack([merge(*pair) for pair in pairs]).sum()

    pairs = [merge_inputs(seed=seed) for seed in range(5)]
    explanation = dcp_inductor.explain(layers, pairs)
    assert len(explanation.rows) == 5
    lines = str(explanation).splitlines()
    [row] = [line for line in lines if " rewritten " in line]
    assert row.startswith(f"5x {explanation.rows[0].site}")
    assert "rewrote 5 of 5 sites" in lines[-1]
    again = str(dcp_inductor.explain(layers, pairs)).splitlines()
    assert " known " in again[1]


def gather_and_use(x: Tensor) -> Tensor:
    rows = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
    rows = rows.view(2, 3, 2, 4).transpose(0, 1)
    return rows.reshape(3, 4, 4) * 2


def test_a_gather_is_placed_at_its_call() -> None:
    [row] = dcp_inductor.explain(gather_and_use, torch.ones(3, 2, 4)).rows
    assert (row.kind, row.decision) == ("query_gather", "rewritten")
    first = gather_and_use.__code__.co_firstlineno
    assert re.search(rf"test_explain\.py:{first + 1} rows = funcol\.all", row.source)
    assert row.site.startswith(f"test_explain.py:{first + 1}#")


def test_that_no_graph_was_captured_is_said() -> None:
    model = torch.compiler.disable(merge)
    explanation = dcp_inductor.explain(model, *merge_inputs())
    assert explanation.graphs == []
    assert "captured no graph" in str(explanation)
    assert "torch.compiler.disable" in str(explanation)


def test_a_refusal_leads_to_the_document() -> None:
    with config.patch(direct_combine="disable", direct_kv_gather="disable"):
        text = str(dcp_inductor.explain(merge, *merge_inputs()))
    assert "docs/recognition.md says what to do about each refusal: disabled" in text
    assert "recognition.md" not in str(dcp_inductor.explain(merge, *merge_inputs()))
