"""Merges whose result is split unevenly: ranks own different numbers of heads or
tokens.
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
from .combining import COMBINES
from .inputs import Problem


def heads_of(world_size: int, heads_per_rank: int) -> list[int]:
    """One head more on even ranks, one less on odd ones."""
    return [heads_per_rank + (1 if r % 2 == 0 else -1) for r in range(world_size)]


def _heads(ctx: Context) -> list[int]:
    return heads_of(ctx.world_size, ctx.heads_per_rank)


def _tokens(ctx: Context, num_tokens: int) -> list[int]:
    """As torch.tensor_split: the first ranks take one more."""
    n = ctx.world_size
    return [(num_tokens + n - 1 - r) // n for r in range(n)]


def uneven_heads(p: Problem, r: int) -> Tensor:
    g = p.geometry
    return p.output.split(heads_of(g.world_size, g.heads_per_rank), 1)[r]


def uneven_heads_lse(p: Problem, r: int) -> tuple[Tensor, Tensor]:
    g = p.geometry
    return uneven_heads(p, r), p.lse.split(heads_of(g.world_size, g.heads_per_rank), 1)[
        r
    ]


def uneven_heads_major(p: Problem, r: int) -> Tensor:
    return uneven_heads(p, r).transpose(0, 1)


def uneven_tokens(p: Problem, r: int) -> Tensor:
    return p.output.tensor_split(p.geometry.world_size, 0)[r]


def reduced(ctx: Context, o: Tensor, l: Tensor, *, cut: str, in_place: bool = False):
    """All-reduce, then the own heads at uneven offsets."""
    heads = _heads(ctx)
    start = sum(heads[: ctx.rank])
    x = o * sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))[..., None]
    if in_place:
        dist.all_reduce(x, group=ctx.group)
    else:
        x = sp.ar(ctx, x)
    match cut:
        case "slice":
            return x[:, start : start + heads[ctx.rank]].contiguous()
        case "narrow":
            return x.narrow(1, start, heads[ctx.rank])
        case "split":
            return x.split(heads, 1)[ctx.rank]
    raise ValueError(cut)


for _cut in ("slice", "narrow", "split"):
    add(f"FU-01 {_cut}", "U", partial(reduced, cut=_cut), "ol", uneven_heads)
add(
    "FU-01 in place",
    "U",
    partial(reduced, cut="slice", in_place=True),
    "ol",
    uneven_heads,
)


@case("FU-02", "U", "ol", uneven_heads)
def tree(ctx, o, l):
    heads = _heads(ctx)
    e = torch.exp(l - sp.ar(ctx, l, "max"))[..., None]
    out = sp.ar(ctx, o * e) / sp.ar(ctx, e)
    return out.split(heads, 1)[ctx.rank]


def _exchange(ctx: Context, x: Tensor, sizes: list[int]) -> Tensor:
    """Rows of dim 0 go to the ranks by ``sizes``; stacked by source [N, own, ...]."""
    own = sizes[ctx.rank]
    got = funcol.all_to_all_single(x, [own] * ctx.world_size, sizes, ctx.group_name)
    return got.view(ctx.world_size, own, *x.shape[1:])


@case("FU-03", "U", "head major", uneven_heads_major)
def head_major_exchange(ctx, o, l):
    O, L = (_exchange(ctx, x, _heads(ctx)) for x in (o, l))
    return COMBINES["softmax"](O, L)


@case("FU-03 token major", "U", "ol", uneven_heads_lse)
def token_major_exchange(ctx, o, l):
    """Transposed for the exchange and back."""
    O, L = (
        _exchange(ctx, x.transpose(0, 1).contiguous(), _heads(ctx)).transpose(1, 2)
        for x in (o, l)
    )
    g = torch.logsumexp(L, 0)
    return (O * torch.exp(L - g)[..., None]).sum(0), g


@case("FU-03 one exchange", "U", "head major", uneven_heads_major)
def one_exchange(ctx, o, l):
    got = _exchange(ctx, torch.cat([o.float(), l[..., None]], -1), _heads(ctx))
    return COMBINES["max exp div"](got[..., :-1], got[..., -1]).to(o.dtype)


@case("FU-04", "U", "ol", uneven_heads)
def gathered(ctx, o, l):
    """Everything is gathered, the own uneven heads are cut out."""
    O, L = sp.ag(ctx, o[None]), sp.ag(ctx, l[None])
    return COMBINES["logsumexp"](O, L).split(_heads(ctx), 1)[ctx.rank]


@case("FU-04 padded", "U", "ol", uneven_heads)
def padded_scatter(ctx, o, l):
    """Every rank's heads padded to the largest count, so that a reduce-scatter fits."""
    heads = _heads(ctx)
    x = o * sp.w_softmax_row(ctx, l, sp.stack_view(ctx, l))[..., None]
    most = max(heads)
    parts = [
        torch.nn.functional.pad(part, (0, 0, 0, most - part.shape[1]))
        for part in x.split(heads, 1)
    ]
    return sp.rs(ctx, torch.cat(parts, 1))[:, : heads[ctx.rank]]


@case(
    "FU-05", "U", "ol", uneven_tokens, unbacked=False, dynamic=False,
    token_for_every_rank=True,
)  # fmt: skip
def token_exchange(ctx, o, l):
    """Tokens that do not divide by the ranks."""
    sizes = _tokens(ctx, o.shape[0])
    O, L = _exchange(ctx, o, sizes), _exchange(ctx, l, sizes)
    return COMBINES["softmax"](O, L)


@case(
    "FU-05 reduced", "U", "ol", uneven_tokens, unbacked=False, token_for_every_rank=True
)
def token_slice(ctx, o, l):
    sizes = _tokens(ctx, o.shape[0])
    start = sum(sizes[: ctx.rank])
    x = sp.ar(ctx, o * sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))[..., None])
    return x[start : start + sizes[ctx.rank]]


@case(
    "FU-05 tensor_split",
    "U",
    "ol",
    uneven_tokens,
    unbacked=False,
    token_for_every_rank=True,
)
def token_tensor_split(ctx, o, l):
    O, L = sp.ag(ctx, o[None]), sp.ag(ctx, l[None])
    return COMBINES["softmax"](O, L).tensor_split(ctx.world_size, 0)[ctx.rank]
