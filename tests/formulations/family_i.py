"""Merges whose inputs come in a form that no other family has: rows of all heads in one
dim, an LSE with its sign turned or in two parts, an LSE inside a larger tensor; and
further ways to pick the own row.
"""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

import torch
from torch import Tensor

from . import spelling as sp
from .cases import Context, add, case
from .combining import COMBINES
from .inputs import INPUTS, LN2, Input


def weigh(ctx: Context, o: Tensor, l: Tensor, L: Tensor) -> Tensor:
    return sp.rs(ctx, o * torch.exp(l - torch.logsumexp(L, 0))[..., None])


# Rows of all heads in one dim: [T * H, D] and [T * H].


def _rows(p, r):
    return [Input(x.tensor.flatten(0, 1)) for x in INPUTS["ol"](p, r)]


def _flat_lse(p, r):
    o, l = INPUTS["ol"](p, r)
    return [o, Input(l.tensor.flatten())]


def _head_major_rows(p, r):
    return [Input(x.tensor.flatten(0, 1)) for x in INPUTS["head major"](p, r)]


def _row_weight(ctx: Context, l: Tensor) -> Tensor:
    L = sp.ag(ctx, l).view(ctx.world_size, -1)
    return torch.exp(l - torch.logsumexp(L, 0))[:, None]


@case("FI-01", "I", _rows, unbacked=False)
def rows(ctx, o, l):
    weighted = o * _row_weight(ctx, l)
    return sp.rs(ctx, weighted.view(-1, ctx.heads, o.shape[1]))


@case("FI-01 by rank", "I", _rows, unbacked=False)
def rows_by_rank(ctx, o, l):
    weighted = (o * _row_weight(ctx, l)).view(
        -1, ctx.world_size, ctx.heads_per_rank, o.shape[1]
    )
    return sp.rs(ctx, weighted.permute(1, 0, 2, 3).contiguous(), 0)[0]


@case("FI-01 head major", "I", _head_major_rows, "HM", unbacked=False)
def head_major_rows(ctx, o, l):
    weighted = o * _row_weight(ctx, l)
    return sp.rs(ctx, weighted.view(ctx.heads, -1, o.shape[1]), 0)


@case("FI-01 flattened here", "I")
def flattened_here(ctx, o, l):
    return rows(ctx, o.flatten(0, 1), l.flatten())


@case("FI-01 all", "I", _rows, lambda p, r: p.output.flatten(0, 1), unbacked=False)
def all_rows(ctx, o, l):
    m = sp.ar(ctx, l, "max")
    e = torch.exp(l - m)[:, None]
    return sp.ar(ctx, o * e) / sp.ar(ctx, e)


@case("FI-02", "I", _flat_lse, unbacked=False)
def flat_lse(ctx, o, l):
    L = sp.ag(ctx, l).view(ctx.world_size, *o.shape[:2])
    return sp.rs(ctx, o * torch.softmax(L, 0)[ctx.rank][..., None])


@case("FI-02 stacked", "I", _flat_lse, unbacked=False)
def flat_lse_stacked(ctx, o, l):
    L = sp.ag(ctx, l[None])
    weight = torch.exp(l - torch.logsumexp(L, 0))
    return sp.rs(ctx, o * weight.view(o.shape[:2])[..., None])


# An LSE with its sign turned, or in two parts.


def _negative(p, r):
    o, l = INPUTS["ol"](p, r)
    return [o, Input(-l.tensor)]


def _negative2(p, r):
    o, l = INPUTS["ol base 2"](p, r)
    return [o, Input(-l.tensor)]


def _log_sums(p, r, scale: float = 1.0):
    o, top, total = INPUTS["o, max, sum"](p, r)
    return [o, Input(top.tensor / scale), Input(total.tensor.log() / scale)]


def _accumulator_log_sums(p, r):
    a, top, total = INPUTS["accumulator, max, sum"](p, r)
    return [a, top, Input(total.tensor.log())]


@case("FI-03", "I", _negative)
def softmin(ctx, o, negative):
    gathered = sp.stack_view(ctx, negative)
    weight = torch.nn.functional.softmin(gathered, dim=0)[ctx.rank]
    return sp.rs(ctx, o * weight[..., None])


@case("FI-03 base 2", "I", _negative2, "HS+lse2")
def softmin_base_2(ctx, o, negative):
    L = -sp.stack_view(ctx, negative)
    m = L.amax(0)
    g = m + torch.log2(torch.exp2(L - m).sum(0))
    merged = sp.rs(ctx, o * torch.exp2(-negative - g)[..., None])
    return merged, sp.own(ctx, g)


@case("FI-03 result", "I", _negative, lambda p, r: (p.output, -p.lse))
def negative_result(ctx, o, negative):
    O, L = sp.ag(ctx, o[None]), sp.stack_view(ctx, -negative)
    g = torch.logsumexp(L, 0)
    return (O * torch.exp(L - g)[..., None]).sum(0), -g


@case("FI-03 undone first", "I", _negative)
def undone_first(ctx, o, negative):
    return weigh(ctx, o, -negative, sp.stack_view(ctx, -negative))


@case("FI-04", "I", _log_sums)
def log_sums(ctx, o, top, log_total):
    L = sp.stack_view(ctx, top) + sp.stack_view(ctx, log_total)
    return sp.rs(ctx, o * torch.softmax(L, 0)[ctx.rank][..., None])


@case("FI-04 packed", "I", _log_sums)
def log_sums_packed(ctx, o, top, log_total):
    pair = sp.stack_view(ctx, torch.stack([top, log_total], -1))
    L = pair[..., 0] + pair[..., 1]
    return weigh(ctx, o, top + log_total, L)


@case("FI-04 base 2", "I", lambda p, r: _log_sums(p, r, LN2))
def log_sums_base_2(ctx, o, top, log_total):
    L = sp.stack_view(ctx, top) + sp.stack_view(ctx, log_total)
    e = torch.exp2(L - L.amax(0))
    return sp.rs(ctx, o * (e[ctx.rank] / e.sum(0))[..., None])


@case("FI-04 accumulator", "I", _accumulator_log_sums)
def log_sums_accumulator(ctx, a, top, log_total):
    m = sp.ar(ctx, top, "max")
    share = torch.exp(top - m)
    total = sp.rs(ctx, share * torch.exp(log_total))
    return sp.rs(ctx, a * share[..., None]) / total[..., None]


for _name in ("unflatten", "into", "list", "zero slots"):
    add(
        f"FI-03 {_name}",
        "I",
        lambda c, o, n, f=sp.STACKS[_name]: weigh(c, o, -n, -f(c, n)),
        _negative,
    )


# An LSE inside a larger tensor: one lane of a tile, some rows of a padded one.


def in_lanes(count: int, step: float = 0.0):
    """The LSE in the first of ``count`` lanes, in the others more by ``step`` each."""

    def inputs(p, r):
        o, l = INPUTS["ol"](p, r)
        return [o, Input(l.tensor[..., None] + step * torch.arange(float(count)))]

    return inputs


def padded(p, r):
    """LSE [H, T] in rows of 32, with what was in memory behind."""
    o, l = INPUTS["ol"](p, r)
    rows = torch.full((p.geometry.heads, 32), 7.0)
    rows[:, : l.tensor.shape[0]] = l.tensor.t()
    return [o, Input(rows, None)]


for _count in (8, 16, 128):
    add(
        f"FI-05 {_count}",
        "I",
        lambda c, o, l: weigh(c, o, l[..., 0], sp.ag(c, l[None])[..., 0]),
        in_lanes(_count),
        # Of one token, lanes as many as heads look like them.
        world_sizes=(2,) if _count == 8 else (2, 4),
    )


@case("FI-05 own row", "I", in_lanes(16))
def lanes_own_row(ctx, o, l):
    L = sp.stack_view(ctx, l)[..., 0]
    return sp.rs(ctx, o * torch.softmax(L, 0)[ctx.rank][..., None])


@case("FI-05 kept dim", "I", in_lanes(16, 0.5))
def lanes_kept_dim(ctx, o, l):
    L = sp.stack_view(ctx, l)[..., 3:4] - 1.5
    return sp.rs(ctx, o * torch.softmax(L, 0)[ctx.rank])


@case("FI-05 a2a", "I", in_lanes(16))
def lanes_exchanged(ctx, o, l):
    O, L = (sp.a2a(ctx, sp.head_shards(ctx, x)) for x in (o, l))
    return COMBINES["max pair div"](O, L[..., 0])


@case("FI-06", "I", padded)
def trimmed(ctx, o, l):
    L = sp.ag(ctx, l[None])[..., : o.shape[0]]
    weight = torch.softmax(L, 0)[ctx.rank].t()
    return sp.rs(ctx, o * weight[..., None])


@case("FI-06 padded here", "I", "o [T,H,D], l [H,T]")
def padded_here(ctx, o, l):
    T = l.shape[1]
    rows = torch.nn.functional.pad(l, (0, 5), value=3.0)
    L = sp.ag(ctx, rows[None])[..., :T]
    weight = torch.softmax(L, 0)[ctx.rank].t()
    return sp.rs(ctx, o * weight[..., None])


# The own row of the gathered weights.


def _block(ctx: Context, P: Tensor) -> Tensor:
    """A kernel's block of twice the ranks, scrubbed before the own row is read."""
    block = torch.nn.functional.pad(P, (0, 0, 0, 0, 0, ctx.world_size))
    return torch.where(torch.isnan(block), 0.0, block)[ctx.rank]


OWN_ROWS = {
    "einsum": lambda c, P: torch.einsum(
        "n,nth->th", torch.eye(c.world_size)[c.rank], P
    ),
    "matrix": lambda c, P: (
        torch.eye(c.world_size)[c.rank : c.rank + 1] @ P.flatten(1)
    ).view(P.shape[1:]),
    "stride": lambda c, P: P[c.rank :: c.world_size][0],
    "flipped": lambda c, P: P.flip(0)[c.world_size - 1 - c.rank],
    "block": _block,
}

for _name, _pick in OWN_ROWS.items():
    add(
        f"FI-07 {_name}",
        "I",
        lambda c, o, l, f=_pick: sp.rs(
            c, o * f(c, torch.softmax(sp.stack_view(c, l), 0))[..., None]
        ),
    )


@case("FI-07 running sum", "I")
def running_sum(ctx, o, l):
    L = sp.stack_view(ctx, l)
    e = torch.exp(L - L.amax(0))
    return sp.rs(ctx, o * (e[ctx.rank] / e.cumsum(0)[-1])[..., None])


@case("FI-07 maximum pair", "I")
def maximum_pair(ctx, o, l):
    """Values and indices of a maximum are as many as two ranks."""
    L = sp.stack_view(ctx, l)
    L = torch.where(torch.isnan(L), -torch.inf, L)
    e = torch.exp(L - L.max(0)[0])
    return sp.rs(ctx, o * (e[ctx.rank] / e.sum(0))[..., None])


@case("FI-08", "I")
def index_copied(ctx, o, l):
    slots = l.new_zeros((ctx.world_size, *l.shape))
    slots = slots.index_copy(0, torch.tensor([ctx.rank]), l[None])
    return weigh(ctx, o, l, sp.ar(ctx, slots))


# Heads scattered with the rank innermost, which the code shows behind the weighting.


@case("FI-09", "I", "ol", lambda p, r: p.output[:, r :: p.geometry.world_size])
def rank_innermost_behind(ctx, o, l):
    weighted = o * torch.exp(l - torch.logsumexp(sp.stack_view(ctx, l), 0))[..., None]
    by_rank = weighted.unflatten(1, (-1, ctx.world_size)).permute(2, 0, 1, 3)
    return sp.rs(ctx, by_rank.contiguous(), 0)[0]


@case(
    "FI-09 exchanged",
    "I",
    "o [T,H,D], l [H,T]",
    lambda p, r: p.output[:, r :: p.geometry.world_size],
)
def rank_innermost_exchanged(ctx, o, l):
    l = l.t().contiguous()
    O, L = (
        sp.a2a(ctx, x.unflatten(1, (-1, ctx.world_size)).movedim(2, 0).contiguous())
        for x in (o, l)
    )
    return COMBINES["max pair div"](O, L)
