"""Family A: gather the LSEs, weight the own partial, reduce over the ranks."""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from . import spelling as sp
from .cases import EQUAL_OR_REFUSED, LSE_ONLY, Context, add, case

LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634


def merge(
    ctx: Context,
    o: Tensor,
    l: Tensor,
    *,
    stack: str = "view",
    weight: str = "max sum log",
    scatter: str = "rs",
    cast: str = "promote",
) -> Tensor:
    """The plain form: one spelling for each step. ``cast`` says where the dtype
    returns.
    """
    L = sp.STACKS[stack](ctx, l)
    w = sp.WEIGHTS[weight](ctx, l, L)[..., None]
    if cast == "weight first":
        return sp.SCATTERS[scatter](ctx, o * w.to(o.dtype))
    if cast == "before reduce":
        return sp.SCATTERS[scatter](ctx, (o.float() * w).to(o.dtype))
    if cast == "after reduce":
        return sp.SCATTERS[scatter](ctx, o.float() * w).to(o.dtype)
    if cast == "type_as":
        return sp.SCATTERS[scatter](ctx, (w * o).type_as(o))
    return sp.SCATTERS[scatter](ctx, o * w)


add("FC-01", "A", merge)
add("FC-01 max pair", "A", partial(merge, weight="max pair"))
add("FC-01 logsumexp", "A", partial(merge, weight="logsumexp"))


add("FC-03", "A", partial(merge, weight="softmax row"))
add("FC-03 log_softmax", "A", partial(merge, weight="log_softmax row"))
add("FC-03 exp row div", "A", partial(merge, weight="exp row div"))
add("FC-04", "A", partial(merge, weight="exp div"))
add("FC-05", "A", partial(merge, weight="reciprocal"))
add("FC-06", "A", partial(merge, weight="log_softmax row", scatter="rs transpose"))
add("FC-06 one over", "A", partial(merge, weight="one over"))
add("FC-06 logaddexp", "A", partial(merge, weight="logaddexp"))
add("FC-06 sigmoid of the rest", "A", partial(merge, weight="sigmoid of the rest"))


def base_two(
    ctx: Context, o: Tensor, l: Tensor, *, power: str, returns_lse: bool = False
):
    L = sp.stack_view(ctx, l)
    m = torch.amax(L, 0)
    raised = {
        "exp2": torch.exp2,
        "pow": lambda x: torch.pow(2.0, x),
        "**": lambda x: 2.0**x,
        "exp ln2": lambda x: torch.exp(x * LN2),
    }[power]
    g = m + torch.log2(raised(L - m).sum(0))
    out = sp.rs(ctx, o * raised(l - g)[..., None])
    return (out, sp.own(ctx, g)) if returns_lse else out


for _power in ("exp2", "pow", "**", "exp ln2"):
    _suffix = "" if _power == "exp2" else f" {_power}"
    add(f"FC-07{_suffix}", "A", partial(base_two, power=_power), "ol base 2")
add(
    "FC-07 lse",
    "A",
    partial(base_two, power="exp2", returns_lse=True),
    "ol base 2",
    "HS+lse2",
)


@case("FC-08", "A", "ol base 2")
def base_two_converted(ctx, o, l):
    """The LSE goes to base e before it is gathered."""
    return merge(ctx, o, l * LN2)


@case("FC-08 after gather", "A", "ol base 2")
def base_two_converted_late(ctx, o, l):
    L = sp.stack_view(ctx, l) * LN2
    return sp.rs(ctx, o * torch.softmax(L, 0)[ctx.rank][..., None])


@case("FC-08 divided", "A", "ol base 2", "HS+lse2")
def base_two_back(ctx, o, l):
    """Merged in base e, the global LSE handed back in base 2."""
    L = sp.stack_view(ctx, l / LOG2E)
    g = torch.logsumexp(L, 0)
    return sp.rs(ctx, o * torch.exp(l / LOG2E - g)[..., None]), sp.own(ctx, g) * LOG2E


@case("FC-09", "A")
def natural_through_exp2(ctx, o, l):
    scaled = l * LOG2E
    L = sp.stack_view(ctx, scaled)
    m = L.amax(0)
    g = m + torch.log2(torch.exp2(L - m).sum(0))
    return sp.rs(ctx, o * torch.exp2(scaled - g)[..., None])


@case("FC-09 scaled difference", "A")
def natural_through_exp2_late(ctx, o, l):
    L = sp.stack_view(ctx, l)
    m = L.amax(0)
    e = torch.exp2((L - m) * LOG2E)
    return sp.rs(ctx, o * (torch.exp2((l - m) * LOG2E) / e.sum(0))[..., None])


for _cast in ("weight first", "before reduce", "after reduce", "type_as"):
    _suffix = "" if _cast == "before reduce" else f" {_cast}"
    add(f"FC-10{_suffix}", "A", partial(merge, cast=_cast))


def head_major(ctx: Context, o: Tensor, l: Tensor, *, back: bool) -> Tensor:
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    x = o.transpose(0, 1).float() * w.transpose(0, 1)[..., None]
    out = sp.rs(ctx, x, 0).to(o.dtype)  # [h, T, D]
    return out.transpose(0, 1) if back else out


add("FC-11", "A", partial(head_major, back=False), result="HM")
add("FC-11 back", "A", partial(head_major, back=True))


@case("FC-11 cast first", "A", result="HM")
def head_major_low_precision_wire(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    x = (o.transpose(0, 1) * w.t()[..., None]).to(o.dtype).contiguous()
    return sp.rs(ctx, x, 0)


@case("FC-12", "A", "head major", "HM")
def head_major_input(ctx, o, l):
    """Partials arrive as [H, T, D] and [H, T]."""
    L = sp.ag(ctx, l[None])
    return sp.rs(ctx, o * torch.exp(l - torch.logsumexp(L, 0))[..., None], 0).to(
        o.dtype
    )


def all_reduced(
    ctx: Context, o: Tensor, l: Tensor, *, own: str, in_place: bool = False
):
    """SGLang MHA: sanitised weights and outputs, all-reduce, own heads."""
    L = sp.stack_view(ctx, l)
    m = L.max(0)[0]
    g = m + torch.exp(L - m).sum(0).log()
    w = torch.nan_to_num(torch.exp(l - g), nan=0.0, posinf=0.0, neginf=0.0)
    x = torch.nan_to_num(o, nan=0.0, posinf=0.0, neginf=0.0) * w[..., None]
    if in_place:
        dist.all_reduce(x, group=ctx.group)
        total = x
    else:
        total = sp.ar(ctx, x)
    return sp.OWN[own](ctx, total).contiguous()


for _own in sp.OWN:
    _suffix = "" if _own == "slice" else f" {_own}"
    add(f"FC-13{_suffix}", "A", partial(all_reduced, own=_own))
add("FC-13 in place", "A", partial(all_reduced, own="slice", in_place=True))
add("FC-13 in place chunk", "A", partial(all_reduced, own="chunk", in_place=True))


@case("FC-14", "A", result="FH")
def full_heads(ctx, o, l):
    return sp.ar(ctx, o * sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))[..., None])


@case("FC-14 lse", "A", result="FH+lse")
def full_heads_lse(ctx, o, l):
    g = torch.logsumexp(sp.stack_view(ctx, l), 0)
    return sp.ar(ctx, o * torch.exp(l - g)[..., None]), g


def last_dim(ctx: Context, o: Tensor, l: Tensor, *, weight: str) -> Tensor:
    L = sp.ag(ctx, l[..., None], 2)  # [T, H, N]
    if weight == "softmax":
        w = torch.softmax(L, -1)[..., ctx.rank]
    elif weight == "log_softmax":
        w = torch.log_softmax(L, dim=-1)[..., ctx.rank].exp()
    else:
        w = torch.exp(l - torch.logsumexp(L, -1))
    return sp.rs(ctx, o * w[..., None])


add("FC-15", "A", partial(last_dim, weight="logsumexp"))
add("FC-15 softmax", "A", partial(last_dim, weight="softmax"))
add("FC-15 log_softmax", "A", partial(last_dim, weight="log_softmax"))


@case("FC-16", "A", "o [T,H,D], l [T,H,1]")
def trailing_one(ctx, o, l):
    L = sp.stack_view(ctx, l)
    return sp.rs(ctx, o * torch.exp(l - torch.logsumexp(L, 0)))


@case("FC-16 last dim", "A", "o [T,H,D], l [T,H,1]")
def trailing_one_last_dim(ctx, o, l):
    L = sp.ag(ctx, l, 2)
    return sp.rs(ctx, o * torch.exp(l - torch.logsumexp(L, -1, keepdim=True)))


@case("FC-16 squeeze", "A", "o [T,H,D], l [T,H,1]")
def trailing_one_squeezed(ctx, o, l):
    return merge(ctx, o, l.squeeze(-1), weight="softmax row")


@case("FC-17", "A", "o [T,H,D], l [H,T]")
def transposed_lse(ctx, o, l):
    L = sp.stack_view(ctx, l)  # [N, H, T]
    w = torch.exp(l - torch.logsumexp(L, 0))
    return sp.rs(ctx, o * w.transpose(0, 1).unsqueeze(-1))


@case("FC-17 transpose first", "A", "o [T,H,D], l [H,T]", "HS+lse [h,T]")
def transposed_lse_back(ctx, o, l):
    l = l.transpose(0, 1).contiguous()
    g = torch.logsumexp(sp.stack_view(ctx, l), 0)
    out = sp.rs(ctx, o * torch.exp(l - g)[..., None])
    return out, sp.own(ctx, g).transpose(0, 1).contiguous()


@case("FC-20", "A", result="HS+lse")
def merged_lse_own_heads(ctx, o, l):
    """The global LSE is a second output, sliced to own heads."""
    m = (L := sp.stack_view(ctx, l)).amax(0)
    g = m + torch.log(torch.exp(L - m).sum(0))
    return sp.rs(ctx, o * torch.exp(l - g)[..., None]), sp.own(ctx, g)


@case("FC-20 full lse", "A", result="HS+full lse")
def merged_lse_all_heads(ctx, o, l):
    g = torch.logsumexp(sp.stack_view(ctx, l), 0)
    return sp.rs(ctx, o * torch.exp(l - g)[..., None]), g


@case("FC-20 chunk", "A", result="HS+lse")
def merged_lse_chunk(ctx, o, l):
    g = torch.logsumexp(sp.stack_unsqueeze(ctx, l), 0)
    out = sp.scatter_all_reduce_in_place(ctx, o * torch.exp(l - g)[..., None])
    return out, g.chunk(ctx.world_size, 1)[ctx.rank].contiguous()


def deferred(ctx, o, l, projection, *, in_place: bool = False):
    """The sum over the shards happens in the all-reduce of the output projection."""
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))[..., None]
    y = (o * w).to(o.dtype).flatten(1) @ projection
    if not in_place:
        return sp.ar(ctx, y)
    dist.all_reduce(y, group=ctx.group)
    return y


# Nothing in a graph proves that a projection is the same on all ranks, so the merge
# cannot be drawn out of it: only the LSE gather is rewritten.
add("FC-21", "A", deferred, "ol, projection", "projected", expect=LSE_ONLY)
add(
    "FC-21 in place",
    "A",
    partial(deferred, in_place=True),
    "ol, projection",
    "projected",
    expect=LSE_ONLY,
)


@case("FC-22", "A", "ol, value up", "valued up", expect=LSE_ONLY)
def value_up_before_reduce(ctx, o, l, up):
    """The value projection of every head comes before the reduce, as it commutes with
    it.
    """
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))[..., None]
    return sp.rs(ctx, torch.einsum("thd,hdv->thv", (o * w).to(o.dtype), up))


@case("FC-22 after", "A", "ol, value up", "valued up")
def value_up_after_reduce(ctx, o, l, up):
    h, r = ctx.heads_per_rank, ctx.rank
    out = merge(ctx, o, l).to(o.dtype)
    return torch.bmm(out.transpose(0, 1), up[r * h : (r + 1) * h]).transpose(0, 1)


@case("FC-23", "A", "ol base 2")
def no_max_base_two(ctx, o, l):
    z = torch.exp2(sp.stack_view(ctx, l))
    return sp.rs(ctx, o * (z / z.sum(0))[ctx.rank][..., None])


add("FC-23 base e", "A", partial(merge, weight="no max"))


@case("FC-23 own", "A")
def no_max_own(ctx, o, l):
    w = torch.exp(l) / torch.exp(sp.stack_view(ctx, l)).sum(0)
    return sp.rs(ctx, o * w[..., None])


@case("FC-24", "A", "ol of o's dtype")
def lse_of_output_dtype(ctx, o, l):
    """The LSE travels in the dtype of the output and is widened for the algebra."""
    L = sp.stack_view(ctx, l).float()
    w = torch.softmax(L, 0)[ctx.rank]
    return sp.rs(ctx, (o.float() * w[..., None]).to(o.dtype))


@case("FC-25", "A", "[B,H,S,D]", "[B,h,S,D]")
def four_dims(ctx, o, l):
    L = sp.ag(ctx, l).view(ctx.world_size, *l.shape)
    return sp.rs(ctx, o * torch.exp(l - torch.logsumexp(L, 0))[..., None], 1)


@case("FC-25 all-reduce", "A", "[B,H,S,D]", "[B,H,S,D]")
def four_dims_all_reduce(ctx, o, l):
    L = sp.ag(ctx, l[None])
    return sp.ar(ctx, o * torch.softmax(L, 0)[ctx.rank].unsqueeze(-1))


@case("FC-26", "A", "[B,S,H,D], l [B,H,S]", "[B,S,h,D]")
def flash_layout(ctx, o, l):
    """Output [B, S, H, D] with an LSE [B, H, S]."""
    w = torch.exp(l - torch.logsumexp(sp.ag(ctx, l[None]), 0))
    return sp.rs(ctx, o * w.transpose(1, 2)[..., None], 2)


@case("FC-26 [1,H,S,D]", "A", "[1,H,S,D]", "HM [1,h,T,D]")
def sequence_layout(ctx, o, l):
    """Output [1, H, S, D] with the tokens along S."""
    w = torch.exp(l - torch.logsumexp(sp.ag(ctx, l), 0, keepdim=True))
    return sp.rs(ctx, o * w[..., None], 1)


@case("FC-26 sequence scattered in head dim", "A", "o [T,H,D], l [H,T]", "HM")
def rs_of_transposed(ctx, o, l):
    w = torch.softmax(sp.ag(ctx, l[None]), 0)[ctx.rank]
    return sp.rs(ctx, (o.transpose(0, 1) * w[..., None]).contiguous(), 0)


def coalesced(ctx, o, l):
    """LSE gathered together with an unrelated flag tensor, as engines batch small
    tensors.
    """
    L, flags = sp.all_gather_coalesced([l, (l > 0).float()], ctx.group_name)
    L = L.view(ctx.world_size, *l.shape)
    out = sp.rs(ctx, o * torch.exp(l - torch.logsumexp(L, 0))[..., None])
    return out, flags.view(L.shape).sum(0)


add("FC-01 coalesced", "A", coalesced, result="HS+flags", expect=EQUAL_OR_REFUSED)

# The steps vary independently in the field: every spelling of each step once, with the
# others running through theirs.
for _stack, _weight, _scatter in zip(
    [name for name in sp.STACKS if name != "into stacked"] * 2,
    cycle(sp.WEIGHTS),
    cycle(sp.SCATTERS),
    strict=False,
):
    add(
        f"A/{_stack}/{_weight}/{_scatter}",
        "A",
        partial(
            merge, stack=_stack, weight=_weight, scatter=_scatter, cast="before reduce"
        ),
    )

# Dynamo copies the flat gather into the buffer without a view, which fails in 2.13.
add("A/into stacked", "A", partial(merge, stack="into stacked"), traceable=False)
