"""Near misses in the form of the inputs: a sign, a part or a place that is not where
the merge needs it.
"""

# ruff: noqa: E741  (l and L are the letters of the formulas)

from __future__ import annotations

import torch

from . import spelling as sp
from .cases import Context, case
from .combining import COMBINES
from .family_i import (
    OWN_ROWS,
    _accumulator_log_sums,
    _flat_lse,
    _log_sums,
    _negative,
    _row_weight,
    _rows,
    in_lanes,
    padded,
    weigh,
)
from .near_misses import MISS, SAME, miss, weighted

# A negative LSE.


@case("NM-45 own", "NM", _negative, note="the own LSE keeps its sign", **MISS)
def own_sign_kept(ctx, o, negative):
    return weigh(ctx, o, negative, -sp.stack_view(ctx, negative))


@case("NM-45 one rank", "NM", _negative, note="rank 0's LSE keeps its sign", **MISS)
def one_sign_kept(ctx, o, negative):
    gathered = sp.stack_view(ctx, negative)
    L = torch.cat([gathered[:1], -gathered[1:]])
    return weighted(ctx, o, torch.softmax(L, 0)[ctx.rank])


@case(
    "NM-45 magnitude",
    "NM",
    _negative,
    result=None,
    note="the sign of every LSE is lost, which many data do not show",
    **SAME,
)
def sign_lost(ctx, o, negative):
    L = sp.stack_view(ctx, negative).abs()
    return weighted(ctx, o, torch.softmax(L, 0)[ctx.rank])


# A maximum and the logarithm of a sum.


@case("NM-46 own", "NM", _log_sums, note="the own sum is left out", **MISS)
def own_sum_left_out(ctx, o, top, log_total):
    L = sp.stack_view(ctx, top) + sp.stack_view(ctx, log_total)
    return weigh(ctx, o, top, L)


@case("NM-46 base", "NM", _log_sums, note="the sum is taken in base 2", **MISS)
def sum_in_base_2(ctx, o, top, log_total):
    share = torch.exp(top - sp.ar(ctx, top, "max")) * torch.exp2(log_total)
    return weighted(ctx, o, share / sp.ar(ctx, share))


@case(
    "NM-46 swapped",
    "NM",
    _accumulator_log_sums,
    note="accumulators weighted by their sum in place of their maximum",
    **MISS,
)
def pair_swapped(ctx, a, top, log_total):
    m = sp.ar(ctx, top, "max")
    total = sp.ar(ctx, torch.exp(top - m + log_total))
    return sp.rs(ctx, a * (torch.exp(log_total - m) / total)[..., None])


@case(
    "NM-46 clamp",
    "NM",
    _log_sums,
    result=None,
    note="sums below one count as one, which those of whole rows never are",
    **SAME,
)
def small_sums_lost(ctx, o, top, log_total):
    L = sp.stack_view(ctx, top) + sp.stack_view(ctx, log_total.clamp(min=0.0))
    return weighted(ctx, o, torch.softmax(L, 0)[ctx.rank])


@case(
    "NM-46 cap",
    "NM",
    _log_sums,
    result=None,
    note="sums of more than e^20 count as e^20",
    **SAME,
)
def large_sums_lost(ctx, o, top, log_total):
    L = sp.stack_view(ctx, top) + sp.stack_view(ctx, log_total.clamp(max=20.0))
    return weighted(ctx, o, torch.softmax(L, 0)[ctx.rank])


# Lanes and padding.

_DIFFERENT = in_lanes(16, 0.5)


@case("NM-47", "NM", _DIFFERENT, note="own LSE of another lane", **MISS)
def other_lane(ctx, o, l):
    return weigh(ctx, o, l[..., 1], sp.stack_view(ctx, l)[..., 0])


@case("NM-47 by rank", "NM", _DIFFERENT, note="every rank's LSE of its lane", **MISS)
def lane_of_the_rank(ctx, o, l):
    L = sp.stack_view(ctx, l)
    L = torch.stack([L[n, ..., n] for n in range(ctx.world_size)])
    return weighted(ctx, o, torch.softmax(L, 0)[ctx.rank])


@case(
    "NM-47 mean",
    "NM",
    in_lanes(16),
    result=None,
    note="the mean of lanes that only the kernel knows to be equal",
    **SAME,
)
def mean_of_lanes(ctx, o, l):
    L = sp.stack_view(ctx, l)
    return weigh(ctx, o, l[..., 0], L[..., 0] * 0.5 + L.mean(-1) * 0.5)


@case(
    "NM-47 condition",
    "NM",
    in_lanes(16),
    result=None,
    note="another lane above 30 ends the weight: differs on large scores",
    **SAME,
)
def lane_as_condition(ctx, o, l):
    L = sp.stack_view(ctx, l)
    weight = torch.softmax(L[..., 0], 0)[ctx.rank]
    return weighted(ctx, o, torch.where(L[0].amax(-1) > 30.0, 0.0, weight))


@case("NM-48", "NM", padded, note="the first row is cut off, not the padding", **MISS)
def row_cut_off(ctx, o, l):
    L = sp.ag(ctx, l[None])[..., 1 : o.shape[0] + 1]
    return weighted(ctx, o, torch.softmax(L, 0)[ctx.rank].t())


@case("NM-48 leak", "NM", padded, note="the padding is part of the sum", **MISS)
def padding_in_the_sum(ctx, o, l):
    T = o.shape[0]
    e = torch.exp(sp.ag(ctx, l[None]))
    total = e[..., :T].sum(0) + e[0, :, T : T + 1]
    return weighted(ctx, o, (e[ctx.rank, :, :T] / total).t())


@case(
    "NM-48 shift",
    "NM",
    padded,
    result=None,
    note="the padding is part of the maximum, and may be NaN",
    **SAME,
)
def padding_in_the_maximum(ctx, o, l):
    L = sp.ag(ctx, l[None])
    e = torch.exp(L - L.amax((0, 2), keepdim=True))[..., : o.shape[0]]
    return weighted(ctx, o, (e[ctx.rank] / e.sum(0)).t())


# Rows of all heads in one dim.


@case(
    "NM-49",
    "NM",
    _rows,
    unbacked=False,
    note="LSEs of the rows in the order of heads",
    **MISS,
)
def rows_in_another_order(ctx, o, l):
    turned = l.view(-1, ctx.heads).t().reshape(-1)
    weight = _row_weight(ctx, turned)
    return sp.rs(ctx, (o * weight).view(-1, ctx.heads, o.shape[1]))


@case(
    "NM-49 flat",
    "NM",
    _flat_lse,
    unbacked=False,
    note="the flat LSE is read heads first",
    **MISS,
)
def flat_heads_first(ctx, o, l):
    L = sp.ag(ctx, l).view(ctx.world_size, o.shape[1], o.shape[0]).mT
    return weighted(ctx, o, torch.softmax(L, 0)[ctx.rank])


@case(
    "NM-49 shifted",
    "NM",
    _rows,
    unbacked=False,
    note="each row has the weight of the row before",
    **MISS,
)
def rows_shifted(ctx, o, l):
    weight = _row_weight(ctx, l).roll(1, 0)
    return sp.rs(ctx, (o * weight).view(-1, ctx.heads, o.shape[1]))


# The own row.


class _Neighbour:
    """The context of a rank, but for the place that it takes for its own."""

    def __init__(self, ctx: Context) -> None:
        self.world_size = ctx.world_size
        self.rank = (ctx.rank + 1) % ctx.world_size


for _name in OWN_ROWS:

    def next_row(ctx, o, l, pick=OWN_ROWS[_name]):
        P = torch.softmax(sp.stack_view(ctx, l), 0)
        return weighted(ctx, o, pick(_Neighbour(ctx), P))

    miss(f"NM-55 {_name}", next_row, note="weight of the next rank")


@case(
    "NM-55 running sum",
    "NM",
    note="the sum up to the own rank; on the last rank the graph is that of the merge",
    ambiguous=True,
    **MISS,
)
def sum_up_to_own(ctx, o, l):
    L = sp.stack_view(ctx, l)
    e = torch.exp(L - L.amax(0))
    return weighted(ctx, o, e[ctx.rank] / e.cumsum(0)[ctx.rank])


@case("NM-55 slots", "NM", note="each LSE in the slot of the next rank", **MISS)
def slot_of_the_next(ctx, o, l):
    slots = l.new_zeros((ctx.world_size, *l.shape))
    place = torch.tensor([(ctx.rank + 1) % ctx.world_size])
    L = sp.ar(ctx, slots.index_copy(0, place, l[None]))
    return weighted(ctx, o, torch.softmax(L, 0)[ctx.rank])


@case("NM-56", "NM", note="outputs scattered with the rank innermost, LSEs not", **MISS)
def lse_in_another_order(ctx, o, l):
    by_rank = o.unflatten(1, (-1, ctx.world_size)).movedim(2, 0).contiguous()
    O, L = sp.a2a(ctx, by_rank), sp.a2a(ctx, sp.head_shards(ctx, l))
    return COMBINES["max pair div"](O, L)


@case("NM-56 weights", "NM", note="weights of the heads of another rank", **MISS)
def weights_in_another_order(ctx, o, l):
    N = ctx.world_size
    weight = torch.softmax(sp.stack_view(ctx, l), 0)[ctx.rank]
    by_rank = o.unflatten(1, (-1, N)).permute(2, 0, 1, 3)
    weight = weight.unflatten(1, (N, -1)).permute(1, 0, 2)[..., None]
    return sp.rs(ctx, (by_rank * weight).contiguous(), 0)[0]
