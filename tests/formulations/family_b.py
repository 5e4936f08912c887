"""Family B: all-reduce the max, then sum numerator and denominator over the ranks
("tree").
"""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from . import spelling as sp
from .cases import Context, add, case


def tree(
    ctx: Context,
    o: Tensor,
    l: Tensor,
    *,
    eps: float | None = None,
    in_place: bool = False,
    cast: str = "",
    returns_lse: bool = False,
    own: str | None = None,
):
    """Max, numerator and denominator each by an all-reduce."""
    if in_place:
        m = l.clone()
        dist.all_reduce(m, op=dist.ReduceOp.MAX, group=ctx.group)
    else:
        m = sp.ar(ctx, l, "max")
    den = torch.exp(l - m)
    num = o * den[..., None]
    if cast == "numerator":
        num = num.to(o.dtype)
    elif cast == "both":
        num, den = num.to(o.dtype), den.to(o.dtype)
    if in_place:
        dist.all_reduce(num, group=ctx.group)
        dist.all_reduce(den, group=ctx.group)
    else:
        num, den = sp.ar(ctx, num), sp.ar(ctx, den)
    d = den if eps is None else den.clamp(min=eps)
    out = num / d[..., None]
    if cast == "result":
        out = out.to(o.dtype)
    if own:
        out = sp.OWN[own](ctx, out)
    return (out, m + torch.log(den)) if returns_lse else out


add("FC-27", "B", tree, result="FH")
for _eps in (1e-8, 1e-10, 1e-30):
    add(f"FC-27 clamp {_eps:g}", "B", partial(tree, eps=_eps), result="FH")
add("FC-27 in place", "B", partial(tree, in_place=True, eps=1e-8), result="FH")
add("FC-27 lse", "B", partial(tree, returns_lse=True), result="FH+lse")
add("FC-27 numerator cast", "B", partial(tree, cast="numerator"), result="FH")
add(
    "FC-27 both cast",
    "B",
    partial(tree, cast="both"),
    result="FH",
)
add("FC-27 result cast", "B", partial(tree, cast="result"), result="FH")
add("FC-27 own", "B", partial(tree, own="slice"))
add("FC-27 own chunk", "B", partial(tree, own="chunk", in_place=True))


@case("FC-27 trailing one", "B", "[B,H,S,D]", "[B,H,S,D]")
def tree_decoding(ctx, o, l):
    """lucidrains: statistics keep a trailing one, numerator and denominator are
    cloned.
    """
    l = l[..., None]
    top = l.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=ctx.group)
    den = (l - top).exp()
    num = o * den
    dist.all_reduce(den, group=ctx.group)
    dist.all_reduce(num, group=ctx.group)
    return num.div(den.clamp(min=1e-8))


@case("FC-27 exact helper", "B", "[1,H,S,D]", "[1,H,S,D]")
def tree_sequence(ctx, o, l):
    m = sp.ar(ctx, l, "max")
    e = torch.exp(l - m).unsqueeze(-1)
    return sp.ar(ctx, o * e) / sp.ar(ctx, e)


@case("FC-27 base 2", "B", "ol base 2", "FH")
def tree_base_two(ctx, o, l):
    m = sp.ar(ctx, l, "max")
    e = torch.exp2(l - m)
    return sp.ar(ctx, o * e[..., None]) / sp.ar(ctx, e)[..., None]


@case("FC-28", "B", result="FH")
def tree_sanitised(ctx, o, l):
    """Empty shards add nothing; an all-empty row divides by the clamp."""
    m = sp.ar(ctx, l, "max")
    m = torch.where(torch.isinf(m), torch.zeros_like(m), m)
    e = torch.exp(l - m)
    x = torch.where(e[..., None] > 0, o * e[..., None], 0.0)
    return sp.ar(ctx, x) / torch.clamp(sp.ar(ctx, e), min=1e-8)[..., None]


@case("FC-28 eps added", "B", result="FH")
def tree_eps_added(ctx, o, l):
    m = sp.ar(ctx, l, "max")
    e = torch.exp(l - m)
    return sp.ar(ctx, o * e[..., None]) / (sp.ar(ctx, e)[..., None] + 1e-10)


@case("FC-28 maximum", "B", result="FH")
def tree_maximum(ctx, o, l):
    m = sp.ar(ctx, l, "max")
    e = torch.exp(l - m)
    den = torch.maximum(sp.ar(ctx, e), torch.tensor(1e-30))
    return sp.ar(ctx, o * e[..., None]) / den[..., None]


@case("FC-28 where", "B", result="FH")
def tree_where(ctx, o, l):
    m = sp.ar(ctx, l, "max")
    e = torch.exp(l - m)
    den = sp.ar(ctx, e)[..., None]
    return torch.where(den > 0, sp.ar(ctx, o * e[..., None]) / den, 0.0)


@case("FC-29", "B")
def tree_scattered(ctx, o, l):
    m = sp.ar(ctx, l, "max")
    e = torch.exp(l - m)
    return sp.rs(ctx, o * e[..., None]) / sp.rs(ctx, e)[..., None]


@case("FC-29 lse", "B", result="HS+lse")
def tree_scattered_lse(ctx, o, l):
    m = sp.ar(ctx, l, "max")
    e = torch.exp(l - m)
    den = sp.rs(ctx, e)
    return sp.rs(ctx, o * e[..., None]) / den[..., None], sp.own(ctx, m) + den.log()


@case("FC-29 one reduce-scatter", "B")
def tree_scattered_packed(ctx, o, l):
    """Denominator as one more column of the numerator."""
    m = sp.ar(ctx, l, "max")
    e = torch.exp(l - m)[..., None]
    x = sp.rs(ctx, torch.cat([o * e, e], -1))
    return x[..., :-1] / x[..., -1:]


@case("FC-29 coalesced", "B")
def tree_scattered_coalesced(ctx, o, l):
    e = torch.exp(l - sp.ar(ctx, l, "max"))[..., None]
    num, den = sp.reduce_scatter_coalesced([o * e, e], "sum", [1, 1], ctx.group_name)
    return num / den


@case("FC-29 movedim", "B")
def tree_scattered_movedim(ctx, o, l):
    e = torch.exp(l - sp.ar(ctx, l, "max"))
    num = sp.scatter_movedim(ctx, o * e[..., None])
    return num * sp.scatter_movedim(ctx, e).reciprocal()[..., None]


@case("FC-30", "B", result="FH")
def one_all_reduce(ctx, o, l):
    """Numerator and denominator in one buffer, denominator in the last column."""
    m = sp.ar(ctx, l, "max")
    e = torch.exp(l - m)[..., None]
    x = sp.ar(ctx, torch.cat([o * e, e], -1))
    return x[..., :-1] / x[..., -1:]


@case("FC-30 split", "B", result="FH")
def one_all_reduce_split(ctx, o, l):
    m = sp.ar(ctx, l, "max")
    e = torch.exp(l - m).unsqueeze(-1)
    num, den = sp.ar(ctx, torch.cat((o.float() * e, e), dim=-1)).split(
        [o.shape[-1], 1], -1
    )
    return (num / den).to(o.dtype)


@case("FC-30 coalesced", "B", result="FH")
def coalesced_all_reduce(ctx, o, l):
    e = torch.exp(l - sp.ar(ctx, l, "max"))[..., None]
    num, den = funcol.all_reduce_coalesced([o * e, e], "sum", ctx.group_name)
    return num / den


def lse_by_reduce(ctx: Context, o: Tensor, l: Tensor, *, scatter: str = "rs") -> Tensor:
    """No LSE gather: the global LSE from two all-reduces, then weights as in family
    A.
    """
    m = sp.ar(ctx, l, "max")
    g = m + torch.log(sp.ar(ctx, torch.exp(l - m)))
    return sp.SCATTERS[scatter](ctx, (o * torch.exp(l - g)[..., None]).to(o.dtype))


add("FC-31", "B", lse_by_reduce)
for _scatter in (
    "rs movedim",
    "rs view",
    "rs flat",
    "rs into",
    "ar",
    "ar in place",
    "a2a sum",
):
    add(f"FC-31 {_scatter}", "B", partial(lse_by_reduce, scatter=_scatter))


@case("FC-31 full heads", "B", result="FH")
def lse_by_reduce_full(ctx, o, l):
    m = sp.ar(ctx, l, "max")
    g = m + torch.log(sp.ar(ctx, torch.exp(l - m)))
    return sp.ar(ctx, o * torch.exp(l - g)[..., None])


@case("FC-31 lse", "B", result="HS+full lse")
def lse_by_reduce_lse(ctx, o, l):
    m = sp.ar(ctx, l, "max")
    g = m + torch.log(sp.ar(ctx, torch.exp(l - m)))
    return sp.rs(ctx, o * torch.exp(l - g)[..., None]), g


@case("FC-32", "B")
def no_max_reduce(ctx, o, l):
    """Sums of exp(l) without a shift, as small test references write it."""
    z = torch.exp(l)
    return sp.rs(ctx, o * z[..., None]) / sp.rs(ctx, z)[..., None]


@case("FC-32 full", "B", result="FH")
def no_max_all_reduce(ctx, o, l):
    z = torch.exp(l)[..., None]
    return sp.ar(ctx, o * z) / sp.ar(ctx, z)


@case("FC-32 weight", "B")
def no_max_weight(ctx, o, l):
    z = torch.exp(l)
    return sp.rs(ctx, o * (z / sp.ar(ctx, z))[..., None])


def statistics(
    ctx: Context, o: Tensor, mx: Tensor, sm: Tensor, *, scatter: bool
) -> Tensor:
    top = sp.ar(ctx, mx, "max")
    s = sm * torch.exp(mx - top)
    w = (s / sp.ar(ctx, s))[..., None]
    return sp.rs(ctx, o * w) if scatter else sp.ar(ctx, o * w)


add("FC-33", "B", partial(statistics, scatter=False), "o, max, sum", "FH")
add("FC-33 scattered", "B", partial(statistics, scatter=True), "o, max, sum", "HS")


@case("FC-33 lse", "B", "o, max, sum", "FH+lse")
def statistics_lse(ctx, o, mx, sm):
    top = sp.ar(ctx, mx, "max")
    s = sm * torch.exp(mx - top)
    den = sp.ar(ctx, s)
    return sp.ar(ctx, o * (s / den)[..., None]), top + den.log()


@case("FC-34", "B", "accumulator, max, sum", "FH")
def accumulators(ctx, a, mx, sm):
    """The un-normalised accumulator and its max and sum are what is shared."""
    top = sp.ar(ctx, mx, "max")
    k = torch.exp(mx - top)
    return sp.ar(ctx, a * k[..., None]) / sp.ar(ctx, sm * k)[..., None]


@case("FC-34 scattered", "B", "accumulator, max, sum", "HS")
def accumulators_scattered(ctx, a, mx, sm):
    k = torch.exp(mx - sp.ar(ctx, mx, "max"))
    return sp.rs(ctx, a * k[..., None]) / sp.rs(ctx, sm * k)[..., None]


@case("FC-34 gathered max", "B", "accumulator, max, sum", "HS")
def accumulators_gathered(ctx, a, mx, sm):
    k = torch.exp(mx - sp.stack_view(ctx, mx).amax(0))
    return sp.rs(ctx, a * k[..., None]) / sp.rs(ctx, sm * k)[..., None]


@case("FC-35", "B", "o, max, sum", "FH")
def stacked_all_reduce(ctx, o, mx, sm):
    """Max by gather, one all-reduce over the stacked denominator and numerator."""
    top = torch.max(sp.stack_view(ctx, mx), 0)[0]
    s = (sm * torch.exp(mx - top))[..., None]
    stacked = torch.stack(
        (s.expand(o.shape).to(torch.float32), (o * s).to(torch.float32))
    )
    den, num = sp.ar(ctx, stacked)
    return torch.where(den > 0, num / den, 0.0).to(o.dtype)


@case("FC-35 from lse", "B", result="FH")
def stacked_all_reduce_lse(ctx, o, l):
    top = sp.stack_view(ctx, l).max(dim=0).values
    e = torch.exp(l - top)[..., None]
    both = sp.ar(ctx, torch.stack([o * e, e.expand_as(o)]))
    return torch.where(both[1] > 0, both[0] / both[1], torch.zeros_like(both[0]))


@case("FC-36", "B")
def gathered_max(ctx, o, l):
    """Max from gathered LSEs, sums by reduce-scatter."""
    m = sp.stack_view(ctx, l).amax(0)
    e = torch.exp(l - m)
    return sp.rs(ctx, o * e[..., None]) / sp.rs(ctx, e)[..., None]


@case("FC-36 den gathered", "B")
def gathered_denominator(ctx, o, l):
    """Denominator from gathered LSEs, numerator by reduce-scatter, divided
    afterwards.
    """
    L = sp.stack_view(ctx, l)
    m = L.amax(0)
    num = sp.rs(ctx, o * torch.exp(l - m)[..., None])
    return num / sp.own(ctx, torch.exp(L - m).sum(0))[..., None]


@case("FC-36 times reciprocal", "B", result="FH")
def gathered_reciprocal(ctx, o, l):
    L = sp.stack_view(ctx, l)
    m = L.amax(0)
    return (
        sp.ar(ctx, o * torch.exp(l - m)[..., None])
        * torch.exp(L - m).sum(0).reciprocal()[..., None]
    )


@case("FC-37", "B", result=None, traceable=False)
def reduce_to_owner(ctx, o, l):
    """Numerator and denominator to one rank by dist.reduce, which breaks the graph on
    2.13.
    """
    m = sp.ar(ctx, l, "max")
    den = torch.exp(l - m)
    num = o * den[..., None]
    dist.reduce(num, 0, group=ctx.group)
    dist.reduce(den, 0, group=ctx.group)
    return num / den[..., None]
