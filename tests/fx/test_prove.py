"""What a proof says of a merge: base, statistics, layouts; and what it refutes.

Every accepted graph also runs against its original on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from dcp_inductor import groups
from dcp_inductor.fx.proof import Proof
from dcp_inductor.fx.search import find_merges
from dcp_inductor.fx.site import MergeSite
from tests.formulations import family_a, family_b, family_c, family_d
from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.formulations.fabric import fake_rank
from tests.formulations.tracing import DYNAMIC, STATIC, Traced
from tests.fx.sketch import (
    HEADS_PER_RANK,
    Model,
    Rewritten,
    deviation,
    partials,
    passed,
    traced,
)

LN2 = math.log(2.0)
LIMIT = 1e-5


def proof_of(graph: Traced) -> Proof:
    """The proof of the one merge of a graph, which is left as it is."""
    with fake_rank(graph.rank, graph.world_size, HEADS_PER_RANK):
        (candidate,) = find_merges(graph.graph_module().graph)
    assert isinstance(candidate.site, MergeSite), candidate.reject
    return candidate.site.proof


def op_of(after: Rewritten) -> fx.Node:
    (node,) = [n for n in after.graph.nodes if "a2a_lse_reduce" in str(n.target)]
    return node


def holds(
    fn: Model, tensors: Sequence[Sequence[Tensor]], *, form: str = STATIC
) -> list[Rewritten]:
    """Rewritten on all ranks, with nothing left, and equal to the graphs before."""
    after, error = deviation(fn, tensors, form=form)
    assert [each.calls() for each in after] == [["a2a_lse_reduce"]] * len(after)
    assert error < LIMIT
    return after


def statistics(world_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Partial output, maximum and sum of exponentials of every rank."""
    generator = torch.Generator().manual_seed(5)
    return [
        (output, lse - 1.5, torch.rand(lse.shape, generator=generator) * 3 + 1)
        for output, lse in partials(world_size)
    ]


# The base.


def base_two(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    return family_a.base_two(ctx, output, lse, power="exp2")


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("fn", "base_e"), [(family_a.merge, True), (base_two, False)])
def test_base(fn: Model, base_e: bool, world_size: int) -> None:
    after = holds(fn, partials(world_size))
    for each in after:
        assert op_of(each).kwargs["is_lse_base_on_e"] is base_e
        assert f"base {'e' if base_e else '2'}" in each.only.family


def test_base_does_not_follow_from_the_spelling() -> None:
    """exp2 of an LSE times log2(e) weighs as exp of the LSE does."""

    def scaled(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        w = sp.w_exp2_scaled(ctx, lse, sp.stack_view(ctx, lse))
        return sp.rs(ctx, output * w[..., None])

    for each in holds(scaled, partials(2)):
        assert op_of(each).kwargs["is_lse_base_on_e"] is True


# Statistics.


def test_maximum_and_sum() -> None:
    def merge(ctx: Context, output: Tensor, top: Tensor, total: Tensor) -> Tensor:
        return family_b.statistics(ctx, output, top, total, scatter=True)

    graph = traced(merge, statistics(2)[1])
    hypothesis = proof_of(graph).hypothesis
    assert (hypothesis.kind, hypothesis.normalised) == ("max_sum", True)
    holds(merge, statistics(2))


def test_unnormalised_accumulator() -> None:
    inputs = [(o * s[..., None], m, s) for o, m, s in statistics(2)]
    graph = traced(family_b.accumulators_scattered, inputs[1])
    hypothesis = proof_of(graph).hypothesis
    assert (hypothesis.kind, hypothesis.normalised) == ("max_sum", False)
    holds(family_b.accumulators_scattered, inputs)


def test_accumulator_taken_for_a_normalised_output() -> None:
    """The LSE from the statistics is right, but the output lacks its division."""

    def merge(ctx: Context, acc: Tensor, top: Tensor, total: Tensor) -> Tensor:
        return family_c.merge(ctx, acc, top + torch.log(total))

    inputs = [(o * s[..., None], m, s) for o, m, s in statistics(2)]
    # As an LSE merge of whatever the accumulator is, it is an equal rewrite.
    holds(merge, inputs)


def by_weights(ctx: Context, output: Tensor, total: Tensor) -> Tensor:
    """Weights in proportion to the totals, whatever these are."""
    return sp.rs(ctx, output * (total / sp.ar(ctx, total))[..., None])


def test_weights_that_may_be_negative() -> None:
    """No LSE stands for a negative weight; only an exponential is known to be none."""

    def from_lse(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        return by_weights(ctx, output, torch.exp(lse))

    refused = passed(by_weights, partials(2)[1])
    assert refused.counts == {"found": 1, "rejected.sign": 1}
    assert "the weights may be negative" in refused.only.reason
    assert refused.unchanged
    holds(from_lse, partials(2))


# Exits.


def lse_exit(how: str) -> Model:
    def merge(ctx: Context, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        g = torch.logsumexp(sp.stack_view(ctx, lse), 0)
        out = sp.rs(ctx, output * torch.exp(lse - g)[..., None])
        match how:
            case "own":
                return out, sp.own(ctx, g) * 1.0
            case "own heads first":
                return out, sp.own(ctx, g).t().contiguous()
            case "full":
                return out, g * 1.0
            case "other base":
                return out, sp.own(ctx, g) / LN2
        raise ValueError(how)

    return merge


@pytest.mark.parametrize("form", [STATIC, DYNAMIC])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("how", ["own", "own heads first", "full", "other base"])
def test_lse_is_a_result_too(how: str, world_size: int, form: str) -> None:
    for each in holds(lse_exit(how), partials(world_size), form=form):
        given = op_of(each).kwargs
        assert given["return_lse"] is True
        assert given["full_lse"] is (how == "full")
        assert given["scatter"] == "heads"
        assert each.only.result == "own heads and LSE"


def test_lse_in_another_base_is_scaled() -> None:
    proof = proof_of(traced(lse_exit("other base"), partials(2)[1]))
    scales = {e.what: e.lse_scale for e in proof.exits}
    assert scales["output"] == 1.0
    assert scales["lse"] in (
        pytest.approx(1 / LN2),
        1.0,
    )  # the division may stay outside


def test_token_scatter() -> None:
    def merge(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        received = [sp.a2a(ctx, x.contiguous()) for x in (output, lse)]
        outputs, lses = (x.view(ctx.world_size, -1, *x.shape[1:]) for x in received)
        return (outputs * torch.softmax(lses, 0)[..., None]).sum(0)

    for form in (STATIC, DYNAMIC):
        for each in holds(merge, partials(2, 4), form=form):
            assert op_of(each).kwargs["scatter"] == "tokens"
            assert each.only.result == "own tokens"


@pytest.mark.parametrize("fn", [family_b.tree, family_d.merge])
def test_everything_on_every_rank(fn: Model) -> None:
    for each in holds(fn, partials(2)):
        assert op_of(each).kwargs["scatter"] == "none"
        assert each.only.result == "all heads"


def test_two_parts_of_one_result() -> None:
    """Full heads for one reader and own heads for another: all receive everything."""

    def merge(ctx: Context, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        w = sp.w_logsumexp(ctx, lse, sp.stack_view(ctx, lse))
        whole = sp.ar(ctx, output * w[..., None])
        return whole * 2.0, sp.own(ctx, whole) * 3.0

    for each in holds(merge, partials(2)):
        assert op_of(each).kwargs["scatter"] == "none"


def test_four_dims() -> None:
    """[B, H, S, D], scattered by heads."""

    def merge(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        w = sp.w_logsumexp(ctx, lse, sp.stack_reshape(ctx, lse))
        return sp.rs(ctx, output * w[..., None])

    inputs = [
        (o.view(3, 4, 2, 4).contiguous(), torch.stack([lse, lse + 1], 2))
        for o, lse in partials(2)
    ]
    for form in (STATIC, DYNAMIC):
        for each in holds(merge, inputs, form=form):
            (output, lse, *_) = op_of(each).args
            assert len(output.meta["val"].shape) == 3
            assert len(lse.meta["val"].shape) == 2
            assert op_of(each).kwargs["scatter"] == "heads"


@pytest.mark.parametrize("spelling", ["reduced", "gathered"])
def test_uneven_slices_are_cut_from_the_whole(spelling: str) -> None:
    """Three heads here, one there: every rank receives all and slices."""

    def merge(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        start, stop = ((0, 3), (3, 4))[ctx.rank]
        if spelling == "reduced":
            w = sp.w_logsumexp(ctx, lse, sp.stack_view(ctx, lse))
            return sp.ar(ctx, output * w[..., None])[:, start:stop] * 1.0
        outputs, lses = (sp.ag(ctx, x[None]) for x in (output, lse))
        return (outputs * torch.softmax(lses, 0)[..., None]).sum(0)[:, start:stop] * 1.0

    for rank, each in enumerate(holds(merge, partials(2))):
        assert op_of(each).kwargs["scatter"] == "none"
        assert "slice" in [
            n.target._schema.name.split("::")[1]
            for n in each.graph.nodes
            if isinstance(n.target, torch._ops.OpOverload)
        ], rank


# Near misses: refused, or rewritten to an equal op; never a changed value.


def subset(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    lses = sp.stack_view(ctx, lse)[: ctx.world_size - 1]
    return sp.rs(ctx, output * torch.exp(lse - torch.logsumexp(lses, 0))[..., None])


def over_heads(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    weights = torch.softmax(sp.stack_view(ctx, lse), 2)[ctx.rank]
    return sp.rs(ctx, output * weights[..., None])


def over_tokens(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    weights = torch.softmax(sp.stack_view(ctx, lse), 1)[ctx.rank]
    return sp.rs(ctx, output * weights[..., None])


def lses_swapped(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    outputs, lses = (sp.a2a(ctx, sp.head_shards(ctx, x)) for x in (output, lse))
    return (outputs * torch.softmax(lses.flip(0), 0)[..., None]).sum(0)


def both_swapped(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    outputs, lses = (sp.a2a(ctx, sp.head_shards(ctx, x)).flip(0) for x in (output, lse))
    return (outputs * torch.softmax(lses, 0)[..., None]).sum(0)


def averaged(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    return sp.rs(ctx, output) / ctx.world_size


def averaged_merge(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    w = sp.w_logsumexp(ctx, lse, sp.stack_view(ctx, lse))
    return sp.rs(ctx, output * w[..., None], 1, "avg")


NEAR = [subset, over_heads, over_tokens, lses_swapped, averaged, averaged_merge]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("fn", NEAR)
def test_near_miss(fn: Model, world_size: int) -> None:
    # As many tokens as ranks, so that a wrong axis does not show in the shape.
    after, error = deviation(fn, partials(world_size, world_size))
    assert error < LIMIT
    for each in after:
        assert "a2a_lse_reduce" not in each.calls()
        if fn is averaged:
            assert each.counts == {}  # not even a near miss: nothing is exponentiated
        else:
            assert [s.code for s in each.sites if s.kind == "combine"] == [
                "not_equivalent"
            ]


def test_order_that_both_share_is_no_matter() -> None:
    for each in holds(both_swapped, partials(2)):
        assert each.only.code == ""


def test_ranks_agree_on_the_op() -> None:
    """Everything but own-rank constants of the model is equal on the ranks."""
    after = holds(family_a.merge, partials(4))
    texts = {str(sorted(op_of(each).kwargs.items(), key=str)) for each in after}
    assert len(texts) == 1
    assert len({each.only.site for each in after}) == 1


def padded_merge(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    merged = family_a.merge(ctx, output, lse)
    return F.pad(merged, (0, 0, 0, 3)) if ctx.rank == 1 else merged


def padded_gather(ctx: Context, query: Tensor, _: Tensor) -> Tensor:
    gathered = sp.ag(ctx, query, 1)
    return F.pad(gathered, (0, 0, 0, 3)) if ctx.rank == 1 else gathered


@pytest.mark.parametrize("fn", [padded_merge, padded_gather])
def test_padding_on_one_rank_does_not_rename_a_site(fn: Model) -> None:
    """Inductor pads what goes into a matrix product, by timings of its own rank."""
    for form in (STATIC, DYNAMIC):
        after, error = deviation(fn, partials(4), form=form)
        assert error < LIMIT
        assert [each.only.code for each in after] == [""] * 4
        assert len({each.only.site for each in after}) == 1


def test_trials_are_few_and_remembered() -> None:
    def merge(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
        return family_a.merge(ctx, output * 0.75, lse - 0.375)

    graph = traced(merge, partials(2, 5, head_dim=11)[1])
    first, again = passed(merge, partials(2, 5, head_dim=11)[1]), None
    assert 0 < first.only.trials < 40
    again = passed(merge, partials(2, 5, head_dim=11)[1])
    assert again.only.trials == 0
    assert proof_of(graph).trials >= 7  # kept with the proof


def test_group_of_a_proof_is_resolved_by_name() -> None:
    with pytest.raises(ValueError, match="name of a live process group, got 'nowhere'"):
        groups.resolve("nowhere")
