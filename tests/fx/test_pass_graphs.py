"""Whole graphs: sizes in every form, every kind of attention, many layers."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from torch import Tensor

import dcp_inductor
from tests.formulations import family_c
from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.formulations.inputs import Input
from tests.formulations.surroundings import decode
from tests.formulations.tracing import DYNAMIC, FORMS, STATIC, UNBACKED
from tests.fx.models import fake_group, plain
from tests.fx.sketch import (
    HEADS_PER_RANK,
    Rewritten,
    deviation,
    partials,
    passed,
    rewrite,
    traced,
)

LIMIT = 1e-5


def queries(world_size: int, tokens: int = 3) -> list[list[Tensor | Input]]:
    """Own query heads and own KV rows of every rank."""
    generator = torch.Generator().manual_seed(tokens)
    return [
        [
            torch.randn(tokens, HEADS_PER_RANK, 8, generator=generator),
            Input(torch.randn(6, 8, generator=generator), None),
        ]
        for _ in range(world_size)
    ]


# Sizes.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("merge", ["a", "c"])
def test_rewrites_do_not_depend_on_the_form_of_the_size(
    merge: str, tokens: int, form: str
) -> None:
    model = partial(decode, kind="functional", merge=merge)
    after = passed(model, queries(2, tokens)[1], form=form, minimum=1)
    assert after.counts == {"found": 2, "rewritten": 2}
    assert len(after.calls()) == 2
    assert after.calls()[-1] == "a2a_lse_reduce"


@pytest.mark.parametrize("form", [DYNAMIC, UNBACKED])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
def test_graph_of_a_symbolic_size_holds_for_others(tokens: int, form: str) -> None:
    model = partial(decode, kind="functional", merge="c")
    others = [
        [x.tensor if isinstance(x, Input) else x for x in rank]
        for rank in queries(2, tokens)
    ]
    after, error = deviation(model, queries(2), others, form=form)
    assert [each.counts["rewritten"] for each in after] == [2, 2]
    assert error < LIMIT


def test_one_token_first_and_then_seven() -> None:
    """As many rewrites whether the size was one, then another, then anything."""
    model = partial(decode, kind="functional", merge="a")
    rewritten = [
        passed(model, queries(2, tokens)[0], form=form, rank=0).counts["rewritten"]
        for tokens, form in ((1, STATIC), (7, DYNAMIC), (7, STATIC), (1, DYNAMIC))
    ]
    assert rewritten == [2] * 4


# Attention.


@pytest.mark.parametrize("kind", ["functional", "list", "mutating"])
@pytest.mark.parametrize("merge", ["a", "c"])
def test_attention_as_an_opaque_op(kind: str, merge: str) -> None:
    model = partial(decode, kind=kind, merge=merge)
    after, error = deviation(model, queries(2))
    for each in after:
        assert each.counts == {"found": 2, "rewritten": 2}
        assert each.calls() == ["q_gather", "a2a_lse_reduce"]
    assert error < LIMIT


@pytest.mark.parametrize("version", [1, 2])
def test_attention_that_writes_its_outputs(version: int) -> None:
    """auto_functionalized and its second version, which hands out views of bases."""
    model = partial(decode, kind="mutating", merge="c")
    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        graph = traced(model, queries(2)[1])
    wanted = "auto_functionalized" + ("_v2" if version == 2 else "")
    names = {str(n.target) for n in graph.original.graph.nodes}
    assert wanted in names
    after = rewrite(graph)
    assert after.counts == {"found": 2, "rewritten": 2}
    assert after.calls() == ["q_gather", "a2a_lse_reduce"]
    assert wanted in {str(n.target) for n in after.graph.nodes}


# Where things stand.


def test_inputs_that_are_ready_late() -> None:
    """The LSE is gathered at once; the output that it weighs comes much later."""

    def model(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        weight = sp.w_logsumexp(ctx, lse, sp.stack_view(ctx, lse))
        for _ in range(4):
            output = torch.tanh(output) + output
        return sp.rs(ctx, output * weight[..., None]) * 2

    after, error = deviation(model, partials(2))
    assert error < LIMIT
    for each in after:
        assert each.calls() == ["a2a_lse_reduce"]
        order = {node: i for i, node in enumerate(each.graph.nodes)}
        (op,) = [n for n in order if "a2a_lse_reduce" in str(n.target)]
        assert all(order[source] < order[op] for source in op.all_input_nodes)
        each.graph.lint()


def test_lse_that_is_ready_after_the_output() -> None:
    def model(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        for _ in range(4):
            lse = torch.tanh(lse) + lse
        return family_c.merge(ctx, output, lse) * 2

    after, error = deviation(model, partials(2))
    assert [each.calls() for each in after] == [["a2a_lse_reduce"]] * 2
    assert error < LIMIT


def test_reader_of_the_lse_that_stands_before_the_merge() -> None:
    """A result of the site is used before the site's last input exists."""

    def model(
        ctx: Context, output: Tensor, lse: Tensor, other: Tensor
    ) -> tuple[Tensor, Tensor]:
        whole = torch.logsumexp(sp.stack_view(ctx, lse), 0)
        early = torch.logaddexp(sp.own(ctx, whole), other)
        for _ in range(3):
            output = torch.tanh(output) + output
        return sp.rs(ctx, output * torch.exp(lse - whole)[..., None]), early

    inputs = [(o, lse, lse[:, :HEADS_PER_RANK] * 0.5) for o, lse in partials(2)]
    after, error = deviation(model, inputs)
    assert [each.calls() for each in after] == [["a2a_lse_reduce"]] * 2
    assert error < LIMIT


def test_output_that_depends_on_the_merged_lse() -> None:
    """Both in one op would be a cycle, so the LSE keeps its own exchange."""

    def model(ctx: Context, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.logsumexp(sp.stack_view(ctx, lse), 0)
        output = output * torch.tanh(whole)[..., None]
        return sp.rs(ctx, output * torch.exp(lse - whole)[..., None]), whole * 2

    after, error = deviation(model, partials(2))
    assert error < LIMIT
    for each in after:
        each.graph.lint()
        assert all(site.code != "cycle" for site in each.sites)


# Many layers.


def layers(ctx: Context, hidden: Tensor, rows: Tensor, *, count: int) -> Tensor:
    """Decode layers: gather, opaque attention, merge, sum over the ranks."""
    for _ in range(count):
        query = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:])
        merged = decode(ctx, query, rows, kind="functional", merge="a")
        hidden = hidden + sp.ar(ctx, torch.tanh(merged))
    return hidden


def test_sixty_one_layers_prove_one_site(record_property) -> None:
    # Sizes of this test alone, so that nothing has proven them before.
    tensors = [torch.zeros(3, HEADS_PER_RANK, 9), Input(torch.zeros(6, 9), None)]
    graph = traced(lambda ctx, *args: layers(ctx, *args, count=61), tensors)
    start = time.perf_counter()
    after = rewrite(graph)
    elapsed = time.perf_counter() - start
    print(
        f"61 layers, {after.report.num_nodes} nodes: "
        f"pass {after.report.pass_ms:.0f} ms, with copy and lint {elapsed:.2f} s"
    )
    record_property("pass_ms", after.report.pass_ms)
    assert after.counts == {"found": 122, "rewritten": 122}
    for kind in ("combine", "query_gather"):
        sites = [site for site in after.sites if site.kind == kind]
        assert len(sites) == 61
        assert len([site for site in sites if site.trials]) <= 1
    assert [s.trials > 0 for s in after.sites if s.kind == "combine"].index(True) == 0
    assert after.calls("all_reduce") == ["all_reduce"] * 61


# Nothing is passed over in silence.


def test_model_without_a_rewritten_site_is_reported() -> None:
    def model(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        lses = sp.stack_view(ctx, lse)
        return sp.rs(ctx, output * torch.exp(lse - lses.amax(0))[..., None])

    after = rewrite(traced(model, partials(2)[1]), direct_kv_gather="disable")
    assert (after.report.found, after.report.rewritten) == (2, 0)
    assert all(site.reason and site.source for site in after.sites)
    assert after.unchanged


def test_graph_report_of_a_model_that_only_reduces() -> None:
    """Ordinary tensor parallelism: nothing to merge, nothing claimed."""

    def model(ctx: Context, x: Tensor, weight: Tensor) -> Tensor:
        return sp.ar(ctx, torch.relu(x @ weight))

    after: Rewritten = passed(model, [torch.zeros(3, 4), torch.zeros(4, 4)])
    assert after.unchanged
    assert (after.counts, after.sites) == ({}, [])
    assert after.report.num_nodes > 0


def test_explain_says_so_too() -> None:
    with fake_group():
        told = dcp_inductor.explain(plain, torch.zeros(3, 4), torch.zeros(4, 4))
    assert "found no exchange" in str(told)
