"""Graphs that look like the merge and are not, or are it only under a condition.

After the pass each must give what its graph computed, whether it was refused or
rewritten to an equal op. ``note`` says what it computes; those that ``deviate`` are far
from the dense result, the others are equal to it on ordinary data or have no dense
counterpart.
"""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from . import family_a
from . import spelling as sp
from .cases import EQUAL_OR_REFUSED, Context, add, case
from .combining import COMBINES
from .inputs import Input, Problem, _ol

MISS = {"expect": EQUAL_OR_REFUSED, "deviates": True}
SAME = {"expect": EQUAL_OR_REFUSED}


def miss(
    case_id: str, fn, inputs="ol", result="HS", note: str = "", **attributes
) -> None:
    add(case_id, "NM", fn, inputs, result, note=note, **{**MISS, **attributes})


def weighted(ctx: Context, o: Tensor, w: Tensor) -> Tensor:
    return sp.rs(ctx, o * w[..., None])


def with_foreign_lse(p: Problem, r: int):
    other = torch.randn(p.lse.shape, generator=p.generator(r)) * 2
    return [*_ol(p, r), Input(other)]


@case("NM-01", "NM", with_foreign_lse, note="LSE of another attention call", **MISS)
def foreign_lse(ctx, o, l, other):
    return family_a.merge(ctx, o, other)


@case(
    "NM-01 own row",
    "NM",
    with_foreign_lse,
    note="own row foreign, others right",
    **MISS,
)
def foreign_own_row(ctx, o, l, other):
    return weighted(
        ctx, o, torch.exp(other - torch.logsumexp(sp.stack_view(ctx, l), 0))
    )


miss("NM-02", family_a.merge, "ol base 2", note="base-2 LSE merged with exp")
miss(
    "NM-02 exp2",
    partial(family_a.base_two, power="exp2"),
    note="natural LSE merged with exp2",
)


@case("NM-02 mixed", "NM", note="sum in base e, weight in base 2", **MISS)
def mixed_bases(ctx, o, l):
    return weighted(ctx, o, torch.exp2(l - torch.logsumexp(sp.stack_view(ctx, l), 0)))


@case("NM-03", "NM", note="no division anywhere", **MISS)
def undivided(ctx, o, l):
    return weighted(ctx, o, torch.exp(l - sp.stack_view(ctx, l).amax(0)))


@case("NM-04", "NM", note="denominator of the own shard only", **MISS)
def own_denominator(ctx, o, l):
    m = sp.ar(ctx, l, "max")
    e = torch.exp(l - m)
    return sp.rs(ctx, o * e[..., None]) / sp.own(ctx, e)[..., None]


@case("NM-04 twice", "NM", note="divided by the denominator twice", **MISS)
def divided_twice(ctx, o, l):
    L = sp.stack_view(ctx, l)
    den = torch.exp(L - L.amax(0)).sum(0)
    return weighted(ctx, o, torch.softmax(L, 0)[ctx.rank] / den)


for _op in ("max", "min", "product"):
    miss(
        f"NM-05 {_op}",
        lambda ctx, o, l, op=_op: sp.own(
            ctx,
            sp.ar(
                ctx, o * sp.w_softmax_row(ctx, l, sp.stack_view(ctx, l))[..., None], op
            ),
        ),
        note=f"weighted partials reduced with {_op}",
    )


@case("NM-06", "NM", note="shift is the own LSE, not the maximum", **MISS)
def own_shift(ctx, o, l):
    m = l + 0.1
    e = torch.exp(l - m)
    return sp.rs(ctx, o * e[..., None]) / sp.rs(ctx, e)[..., None]


@case("NM-06 sum shift", "NM", note="shift by the mean of the LSEs: equal", **SAME)
def mean_shift(ctx, o, l):
    m = sp.ar(ctx, l) / ctx.world_size
    e = torch.exp(l - m)
    return sp.rs(ctx, o * e[..., None]) / sp.rs(ctx, e)[..., None]


miss("NM-07", lambda ctx, o, l: sp.rs(ctx, o) / ctx.world_size, note="plain average")
miss(
    "NM-07 all-reduce",
    lambda ctx, o, l: sp.own(ctx, sp.ar(ctx, o) / ctx.world_size),
    note="plain average by all-reduce",
)
miss(
    "NM-08",
    lambda ctx, o, l: sp.rs(
        ctx, o * sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))[..., None], 1, "avg"
    ),
    note="weighted partials averaged: 1 / N of the merge",
)


def row_of(ctx: Context, o: Tensor, l: Tensor, *, row: str) -> Tensor:
    n, r = ctx.world_size, ctx.rank
    index = {"first": 0, "last": n - 1, "next": (r + 1) % n, "mirror": n - 1 - r}[row]
    return weighted(ctx, o, torch.softmax(sp.stack_view(ctx, l), 0)[index])


miss(
    "NM-09",
    partial(row_of, row="first"),
    note="weight of rank 0 on every rank; on rank 0 the graph is that of the merge",
    ambiguous=True,
)
miss(
    "NM-09 last",
    partial(row_of, row="last"),
    note="weight of the last rank on every rank",
    ambiguous=True,
)
miss("NM-10", partial(row_of, row="next"), note="weight of the next rank")
miss("NM-10 mirror", partial(row_of, row="mirror"), note="weight of the mirrored rank")


@case("NM-11", "NM", note="dropout between attention and merge", result=None, **SAME)
def dropout(ctx, o, l):
    return family_a.merge(ctx, torch.nn.functional.dropout(o, 0.5, True), l)


@case("NM-11 weights", "NM", note="dropout on the weights", result=None, **SAME)
def dropout_on_weights(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    return weighted(ctx, o, torch.nn.functional.dropout(w, 0.5, True))


@case("NM-12", "NM", note="softmax at half temperature", **MISS)
def temperature(ctx, o, l):
    return weighted(ctx, o, torch.softmax(sp.stack_view(ctx, l) * 0.5, 0)[ctx.rank])


@case("NM-12 square root", "NM", note="square roots of the weights", **MISS)
def square_roots(ctx, o, l):
    return weighted(ctx, o, sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l)).sqrt())


def wrong_axis(ctx: Context, o: Tensor, l: Tensor, *, dim: int, how: str) -> Tensor:
    L = sp.stack_view(ctx, l)
    if how == "softmax":
        w = torch.softmax(L, dim)[ctx.rank]
    else:
        w = torch.exp(l - torch.logsumexp(L, dim, keepdim=True)[0])
    return weighted(ctx, o, w)


for _dim, _name in ((1, "tokens"), (2, "heads")):
    miss(
        f"NM-13 {_name}",
        partial(wrong_axis, dim=_dim, how="softmax"),
        note=f"over {_name}",
    )
    miss(
        f"NM-13 {_name} T = N",
        partial(wrong_axis, dim=_dim, how="logsumexp"),
        note=f"over {_name}, with as many tokens as ranks at one token a rank",
        token_multiple_of_ranks=True,
    )


@case("NM-13 token rank T = N", "NM", token_multiple_of_ranks=True, result=None, **SAME)
def gathered_along_tokens(ctx, o, l):
    """The gathered LSEs [N * T, H] folded back with tokens and ranks exchanged."""
    L = sp.ag(ctx, l).view(-1, ctx.world_size, l.shape[1]).transpose(0, 1)
    return weighted(ctx, o, torch.softmax(L, 0)[ctx.rank])


@case("NM-27", "NM", note="weights renormalised over the heads", **MISS)
def renormalised(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    return weighted(ctx, o, w / w.sum(1, keepdim=True))


@case("NM-28", "NM", note="weights below 0.2 dropped", **MISS)
def pruned(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    return weighted(ctx, o, torch.where(w > 0.2, w, 0.0))


@case("NM-28 clamped weight", "NM", note="weights at least 0.1", **MISS)
def clamped_weight(ctx, o, l):
    return weighted(
        ctx, o, sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l)).clamp(min=0.1)
    )


@case("NM-28 hard", "NM", note="the rank with the largest LSE takes all", **MISS)
def hard_max(ctx, o, l):
    best = sp.stack_view(ctx, l).argmax(0)
    return weighted(ctx, o, (best == ctx.rank).to(o.dtype))


@case("NM-29", "NM", note="numerator and denominator with different shifts", **MISS)
def different_shifts(ctx, o, l):
    m = sp.ar(ctx, l, "max")
    num = sp.rs(ctx, o * torch.exp(l - m)[..., None])
    return num / sp.rs(ctx, torch.exp(l))[..., None]


@case("NM-30", "NM", note="a large constant in the denominator", **MISS)
def large_epsilon(ctx, o, l):
    e = torch.exp(l - sp.ar(ctx, l, "max"))
    return sp.rs(ctx, o * e[..., None]) / (sp.rs(ctx, e)[..., None] + 0.5)


@case(
    "NM-30 clamp at one half",
    "NM",
    note="clamp never bites: the sum is at least 1",
    **SAME,
)
def idle_clamp(ctx, o, l):
    e = torch.exp(l - sp.ar(ctx, l, "max"))
    return sp.rs(ctx, o * e[..., None]) / sp.rs(ctx, e).clamp(min=0.5)[..., None]


@case("NM-30 clamp at two", "NM", note="clamp bites where one shard dominates", **MISS)
def biting_clamp(ctx, o, l):
    e = torch.exp(l - sp.ar(ctx, l, "max"))
    return sp.rs(ctx, o * e[..., None]) / sp.rs(ctx, e).clamp(min=2.0)[..., None]


def subset(ctx: Context, o: Tensor, l: Tensor, *, which: str) -> Tensor:
    n, r = ctx.world_size, ctx.rank
    L = sp.stack_view(ctx, l)
    if which == "without last":
        L = L[: n - 1]
    elif which == "prefix":
        L = L[: r + 1]
    elif which == "mask":
        keep = torch.arange(n) <= r
        L = torch.where(keep[:, None, None], L, float("-inf"))
    else:
        L = torch.stack([L[i] for i in range(n) if i != r])
    return weighted(ctx, o, torch.exp(l - torch.logsumexp(L, 0)))


for _which in ("without last", "prefix", "mask", "others"):
    miss(
        f"NM-31 {_which}",
        partial(subset, which=_which),
        note=f"LSE over {_which}",
        ambiguous=_which in ("prefix", "mask"),
    )


@case(
    "NM-32",
    "NM",
    note="only the first half of the ranks contributes; their graphs are the merge's",
    ambiguous=True,
    **MISS,
)
def half_of_the_ranks(ctx, o, l):
    if ctx.rank >= ctx.world_size // 2:
        o = o * 0
    return family_a.merge(ctx, o, l)


@case(
    "NM-32 rank 0 doubled",
    "NM",
    note="rank 0's graph has a factor that others lack",
    ambiguous=True,
    **MISS,
)
def factor_on_rank_zero(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    return weighted(ctx, o, w * (2.0 if ctx.rank == 0 else 1.0))


@case(
    "NM-32 causal",
    "NM",
    note="ranks above the own one are left out of the combine",
    ambiguous=True,
    **MISS,
)
def causal_combine(ctx, o, l):
    O, L = (sp.a2a(ctx, sp.head_shards(ctx, x)) for x in (o, l))
    return COMBINES["softmax"](O[: ctx.rank + 1], L[: ctx.rank + 1])
