"""Near misses in the values: factors, caps and limits that show on some data or sizes
only.
"""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

import torch

from . import family_a, family_c
from . import spelling as sp
from .cases import case
from .inputs import INPUTS, Input
from .near_misses import MISS, SAME, miss, weighted


@case("NM-40", "NM", note="scaled by 1.0005", slight=True, **SAME)
def slightly_scaled(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    return weighted(ctx, o, w * 1.0005)


@case("NM-40 doubled", "NM", note="twice the merge", **MISS)
def doubled(ctx, o, l):
    return weighted(ctx, o, sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l)) * 2)


@case(
    "NM-41",
    "NM",
    result=None,
    note="a factor of T / 3, which is 1 at the traced size",
    **SAME,
)
def token_factor(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    return weighted(ctx, o, w * (o.shape[0] / 3))


@case(
    "NM-41 rows",
    "NM",
    result=None,
    note="rows from the sixth on get no output",
    **SAME,
)
def rows_cut(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    row = torch.arange(o.shape[0])[:, None]
    return weighted(ctx, o, torch.where(row < 5, w, 0.0))


@case("NM-41 one row", "NM", result=None, note="the first row gets no output", **SAME)
def row_cut(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    row = torch.arange(o.shape[0])[:, None]
    return weighted(ctx, o, torch.where(row == 0, 0.0, w))


@case(
    "NM-42",
    "NM",
    result=None,
    note="LSE clamped to +-20: differs on large scores",
    **SAME,
)
def clamped_lse(ctx, o, l):
    return family_a.merge(ctx, o, l.clamp(-20.0, 20.0))


@case("NM-42 cap", "NM", result=None, note="soft cap on the LSE", **SAME)
def capped_lse(ctx, o, l):
    return family_a.merge(ctx, o, 30.0 * torch.tanh(l / 30.0))


@case("NM-42 output", "NM", result=None, note="partials clamped to +-10", **SAME)
def clamped_output(ctx, o, l):
    return family_a.merge(ctx, o.clamp(-10.0, 10.0), l)


@case(
    "NM-43",
    "NM",
    result=None,
    note="the LSE that leaves is that of the own shard",
    **SAME,
)
def own_lse_leaves(ctx, o, l):
    return family_a.merge(ctx, o, l), sp.own(ctx, l) * 1.0


@case(
    "NM-43 max",
    "NM",
    result=None,
    note="the maximum leaves in place of the LSE",
    **SAME,
)
def max_leaves(ctx, o, l):
    L = sp.stack_view(ctx, l)
    return weighted(ctx, o, torch.softmax(L, 0)[ctx.rank]), sp.own(ctx, L.amax(0))


@case("NM-43 base", "NM", result=None, note="the LSE leaves in the other base", **SAME)
def lse_in_other_base(ctx, o, l):
    g = torch.logsumexp(sp.stack_view(ctx, l), 0)
    return weighted(ctx, o, torch.exp(l - g)), sp.own(ctx, g) * family_a.LOG2E


miss(
    "NM-44",
    lambda ctx, o, mx, sm: family_c.merge(ctx, o, mx),
    "o, max, sum",
    note="the maximum alone taken for an LSE",
)
miss(
    "NM-44 sum",
    lambda ctx, o, mx, sm: family_c.merge(ctx, o, mx + sm),
    "o, max, sum",
    note="max + sum in place of max + log(sum)",
)
miss(
    "NM-44 accumulator",
    lambda ctx, a, mx, sm: family_c.merge(ctx, a, mx + torch.log(sm)),
    "accumulator, max, sum",
    note="an un-normalised accumulator merged as if it were normalised",
)


# What code tests for and no draw of random numbers hits: zeros, whole numbers, ties.
_MASKS = {
    "zero LSE": lambda o, l: l == 0,
    "zero LSE by not": lambda o, l: l.logical_not(),
    "whole LSE": lambda o, l: l == l.round(),
    "zero payload": lambda o, l: (o == 0).all(-1),
    "no payload": lambda o, l: ~(o != 0).any(-1),
    "a zero in the payload": lambda o, l: (o == 0).any(-1),
    "counted": lambda o, l: torch.count_nonzero(o, -1) < o.shape[-1],
}


def _marked_behind(ctx, o, l, mask):
    """Every rank's rows gathered, and some taken for empty by what they hold."""
    O, L = sp.stack_view(ctx, o), sp.stack_view(ctx, l)
    L = torch.where(mask(O, L), -torch.inf, L)
    merged = (O * torch.softmax(L, 0)[..., None]).sum(0)
    return sp.own(ctx, merged)


for _name, _mask in _MASKS.items():
    case(
        f"NM-57 {_name}", "NM", result=None,
        note="rows taken for empty by numbers that no draw hits", **SAME,
    )(lambda ctx, o, l, mask=_mask: _marked_behind(ctx, o, l, mask))  # fmt: skip


# Numbers of the graph's own that it tests for, and values that are no number.


def _holds(number: float, on_all: bool):
    """LSEs of ``number`` in the first row, of one rank or of all."""

    def inputs(p, r):
        o, l = INPUTS["ol"](p, r)
        lse = l.tensor.clone()
        if on_all or r == 0:
            lse[0] = number
        return [o, Input(lse)]

    return inputs


def _cleaned(ctx, o, l, clean):
    w = torch.softmax(clean(sp.stack_view(ctx, l)), 0)
    return weighted(ctx, o, torch.nan_to_num(w)[ctx.rank])


for _number in (1000.0, -10000.0, 0.5, 65504.0):
    for _on_all in (False, True):
        case(
            f"NM-58 {_number:g} {'on all' if _on_all else 'on one'}", "NM",
            _holds(_number, _on_all), result=None,
            note="a number of the graph's own taken for an empty shard", **SAME,
        )(
            lambda ctx, o, l, x=_number: _cleaned(
                ctx, o, l, lambda L: L.masked_fill(L == x, -torch.inf)
            )
        )  # fmt: skip

_UNDEFINED = {
    "NaN as zero": (torch.nan, lambda L: L.nan_to_num(nan=0.0, neginf=-torch.inf)),
    "infinity as 50": (
        torch.inf,
        lambda L: L.nan_to_num(nan=-torch.inf, posinf=50.0, neginf=-torch.inf),
    ),
    "NaN on any rank": (
        torch.nan,
        lambda L: torch.where(L.isnan().any(0), torch.zeros_like(L), L),
    ),
}
for _name, (_number, _clean) in _UNDEFINED.items():
    case(
        f"NM-59 {_name}", "NM", _holds(_number, False), result=None,
        note="an LSE that is no number means something else", **SAME,
    )(lambda ctx, o, l, f=_clean: _cleaned(ctx, o, l, f))  # fmt: skip


@case("NM-57 weight", "NM", result=None, note="no weight where the LSE is 0", **SAME)
def weight_dropped_at_zero(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    return weighted(ctx, o, torch.where(l == 0, 0.0, w))


@case("NM-57 tie", "NM", result=None, note="nothing where all ranks tie", **SAME)
def nothing_in_a_tie(ctx, o, l):
    L = sp.stack_view(ctx, l)
    w = torch.softmax(L, 0)[ctx.rank]
    return weighted(ctx, o, torch.where((L == L[:1]).all(0), 0.0, w))


@case("NM-57 alike", "NM", result=None, note="other if all payloads are equal", **SAME)
def other_if_all_alike(ctx, o, l):
    O, L = sp.stack_view(ctx, o), sp.stack_view(ctx, l)
    merged = (O * torch.softmax(L, 0)[..., None]).sum(0)
    return sp.own(ctx, torch.where((O == O[:1]).all(), 2 * merged, merged))
