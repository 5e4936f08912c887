"""Near misses inside of attention, whose own tensors look like partial outputs and
statistics: what is tried there, what is told, and under which name.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dcp_inductor.fx import prove, search
from dcp_inductor.fx.lockstep import Lockstep
from dcp_inductor.fx.report import SiteReport
from dcp_inductor.fx.structure import Memo
from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.formulations.recipes import REGISTRY
from tests.formulations.tracing import DYNAMIC, STATIC
from tests.fx.sketch import HEADS_PER_RANK, Model, Rewritten, passed

LATENT, ROPE, HIDDEN = 6, 2, 10
Weights = Callable[[Tensor, Tensor], Tensor]


def own(lse: Tensor, every: Tensor) -> Tensor:
    return torch.exp(lse - every.logsumexp(0))


def clamped(lse: Tensor, every: Tensor) -> Tensor:
    return own(lse, every).clamp(max=0.7)


def halved(lse: Tensor, every: Tensor) -> Tensor:
    return own(lse, every) / 2


def undivided(lse: Tensor, every: Tensor) -> Tensor:
    return torch.exp(lse - every.amax(0))


def merge(weights: Weights) -> Model:
    def model(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        weight = weights(lse, sp.stack_view(ctx, lse))
        return sp.rs(ctx, output * torch.nan_to_num(weight)[..., None])

    return model


def layer(weights: Weights) -> Model:
    """Attention over a latent cache of own rows, its merge, and a projection."""

    def model(ctx: Context, x: Tensor, kv: Tensor, lens: Tensor, *w: Tensor) -> Tensor:
        query = (x @ w[0]).view(-1, HEADS_PER_RANK, LATENT + ROPE)
        scores = torch.einsum("thd,tsd->ths", sp.ag(ctx, query, 1), kv)
        padding = torch.arange(kv.shape[1])[None] >= lens[:, None]
        scores = scores.masked_fill(padding[:, None], float("-inf"))
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
        output = torch.einsum("ths,tsd->thd", p, kv[..., :LATENT])
        merged = merge(weights)(ctx, output, lse)
        return merged.reshape(-1, HEADS_PER_RANK * LATENT) @ w[1]

    return model


def layer_inputs() -> list[Tensor]:
    shapes = [(HIDDEN, HEADS_PER_RANK * (LATENT + ROPE)), (HEADS_PER_RANK * LATENT, 10)]
    matrices = [torch.zeros(shape) for shape in shapes]
    tokens = [torch.zeros(5, HIDDEN), torch.zeros(5, 7, LATENT + ROPE)]
    return [*tokens, torch.full((5,), 7), *matrices]


def bare_inputs() -> list[Tensor]:
    heads = 2 * HEADS_PER_RANK
    return [torch.zeros(5, heads, LATENT), torch.zeros(5, heads)]


def merge_of(after: Rewritten) -> SiteReport:
    [row] = [site for site in after.sites if site.kind == "combine"]
    return row


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the lockstep runs of merges' proofs, of which none is known before."""
    made: list[int] = []

    class Counted(Lockstep):
        def __init__(self, *args, **kwargs) -> None:
            made.append(1)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(prove, "Lockstep", Counted)
    monkeypatch.setattr(search, "_proofs", Memo())
    return made


@pytest.mark.parametrize("weights", [own, clamped, halved, undivided])
def test_trials_in_the_report_are_all_that_were_made(weights: Weights, runs) -> None:
    row = merge_of(passed(layer(weights), layer_inputs()))
    assert row.decision == ("rewritten" if weights is own else "rejected")
    assert row.trials == len(runs)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["FC-27", "FC-38", "FC-41"])
def test_a_merge_takes_over_the_trials_of_its_near_misses(
    name: str, dynamic: bool, runs
) -> None:
    """The softmax of attention looks like a merge by maximum and sum as well, from each
    of the collectives that the merge has.
    """
    case = REGISTRY[name]

    def model(ctx: Context, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.einsum("thd,sd->ths", query, key)
        output = torch.einsum("ths,sd->thd", scores.softmax(-1), value)
        return case.fn(ctx, output, scores.logsumexp(-1))

    heads = 2 * HEADS_PER_RANK
    tensors = [torch.zeros(5, heads, LATENT), *[torch.zeros(7, LATENT)] * 2]
    row = merge_of(passed(model, tensors, form=DYNAMIC if dynamic else STATIC))
    assert row.decision == "rewritten"
    assert row.trials == len(runs) > 0


@pytest.mark.parametrize("weights", [clamped, halved, undivided])
def test_a_near_miss_takes_few_trials(weights: Weights, runs) -> None:
    merge_of(passed(layer(weights), layer_inputs()))
    assert len(runs) < 100


def test_views_of_a_partial_output_are_tried_once(runs) -> None:
    def turned(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        output = output.transpose(1, 2).unsqueeze(0).permute(0, 1, 3, 2)[0]
        return merge(clamped)(ctx, output, lse)

    straight = merge_of(passed(merge(clamped), bare_inputs())).trials
    heads = 2 * HEADS_PER_RANK
    tensors = [torch.zeros(5, LATENT, heads), torch.zeros(5, heads)]

    def moved(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        return merge(clamped)(ctx, output.transpose(1, 2).contiguous(), lse)

    assert merge_of(passed(moved, tensors)).trials == straight > 0
    assert merge_of(passed(turned, bare_inputs())).trials <= straight


def test_a_view_that_something_else_reads_is_tried_by_itself() -> None:
    """Behind it stands a merge, while the partial output also goes elsewhere."""

    def model(ctx: Context, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return merge(own)(ctx, output.mT, lse), sp.ar(ctx, output.exp())

    tensors = [bare_inputs()[0].mT.contiguous(), bare_inputs()[1]]
    assert merge_of(passed(model, tensors)).decision == "rewritten"


@pytest.mark.parametrize("weights", [clamped, halved, undivided])
def test_attention_around_it_does_not_change_what_is_told(weights: Weights) -> None:
    told = [
        re.sub(
            r"off by at least \S+$",
            "",
            merge_of(passed(model(weights), tensors)).reason,
        )
        for model, tensors in ((merge, bare_inputs()), (layer, layer_inputs()))
    ]
    assert told[0] == told[1]
    assert "nearest: the merge by an LSE of base e" in told[0]


@pytest.mark.parametrize("divisor", [2, 4, -3])
def test_a_multiple_of_the_merge_is_told_by_its_factor(divisor: int) -> None:
    model = merge(lambda lse, every: own(lse, every) / divisor)
    reason = merge_of(passed(model, bare_inputs())).reason
    factor = f"{1 / divisor:.4g}"
    assert f"an LSE of base e; the result is {factor} times the merge" in reason


def test_a_merge_in_another_order_is_no_multiple() -> None:
    def model(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        weighted = output * own(lse, sp.stack_view(ctx, lse))[..., None]
        return sp.rs(ctx, weighted.flip(2))

    reason = merge_of(passed(model, bare_inputs())).reason
    assert "an LSE of base e; the result is on ordinary data off by at least" in reason


@pytest.mark.parametrize("weights", [clamped, halved, undivided])
def test_a_near_miss_in_attention_has_one_name_on_all_ranks(weights: Weights) -> None:
    names = {
        merge_of(passed(layer(weights), layer_inputs(), rank=rank)).site
        for rank in (0, 1)
    }
    assert len(names) == 1
