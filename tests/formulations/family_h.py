"""Merges whose inputs hold several things in one tensor, and own rows that constants
pick out of the gathered ones.
"""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

import torch
from torch import Tensor

from . import spelling as sp
from .cases import Context, add, case
from .combining import COMBINES
from .inputs import INPUTS, Input

_combine = COMBINES["max pair div"]


def _pair_last(p, r):
    o, top, total = INPUTS["o, max, sum"](p, r)
    return [o, Input(torch.stack([top.tensor, total.tensor], -1))]


def _pair_first(p, r):
    o, top, total = INPUTS["o, max, sum"](p, r)
    return [o, Input(torch.stack([top.tensor, total.tensor], 0), 1)]


def _flat(p, r):
    o, l = INPUTS["ol"](p, r)
    return [Input(o.tensor.flatten(1)), l]


def _flat_and_pair(p, r):
    o, pair = _pair_last(p, r)
    return [Input(o.tensor.flatten(1)), pair]


def _column(p, r):
    """Partial output and LSE as the last column, in fp32 as a kernel's workspace is."""
    o, l = INPUTS["ol"](p, r)
    return [Input(torch.cat([o.tensor.float(), l.tensor[..., None]], -1))]


def _lse_of(top: Tensor, total: Tensor) -> Tensor:
    return top + torch.log(total)


@case("FH-01 a2a", "H", _pair_last)
def pair_exchanged(ctx, o, pair):
    O, S = (sp.a2a(ctx, sp.head_shards(ctx, x)) for x in (o, pair))
    top, total = S.unbind(-1)
    share = total * torch.exp(top - top.amax(0))
    return (O * (share / share.sum(0))[..., None]).sum(0)


@case("FH-01 gathered", "H", _pair_last)
def pair_gathered(ctx, o, pair):
    L = _lse_of(*sp.stack_view(ctx, pair).unbind(-1))
    own = _lse_of(pair[..., 0], pair[..., 1])
    return sp.rs(ctx, o * torch.exp(own - torch.logsumexp(L, 0))[..., None])


@case("FH-01 first dim", "H", _pair_first)
def pair_in_front(ctx, o, pair):
    L = _lse_of(*sp.stack_view(ctx, pair).unbind(1))
    own = _lse_of(pair[0], pair[1])
    return sp.rs(ctx, o * torch.exp(own - torch.logsumexp(L, 0))[..., None])


def _exchange_flat(ctx: Context, o: Tensor) -> Tensor:
    tokens = o.shape[0]
    sent = o.view(tokens, ctx.world_size, -1).transpose(0, 1).contiguous()
    taken = sp.a2a(ctx, sent)
    return taken.view(ctx.world_size, tokens, ctx.heads_per_rank, -1)


@case("FH-02", "H", _flat)
def flat_rows(ctx, o, l):
    L = sp.a2a(ctx, sp.head_shards(ctx, l))
    return _combine(_exchange_flat(ctx, o), L)


@case("FH-02 pair", "H", _flat_and_pair)
def flat_rows_and_pair(ctx, o, pair):
    S = sp.a2a(ctx, sp.head_shards(ctx, pair))
    return _combine(_exchange_flat(ctx, o), _lse_of(S[..., 0], S[..., 1]))


@case("FH-03", "H", _column, dtypes=(torch.float32,))
def column_behind(ctx, x):
    X = sp.a2a(ctx, sp.head_shards(ctx, x))
    return _combine(X[..., :-1], X[..., -1])


@case("FH-04", "H", "ol", lambda p, r: p.output[:, r :: p.geometry.world_size])
def rank_innermost(ctx, o, l):
    """Heads are numbered with the rank innermost, and weighted in that shape."""
    o, l = (x.unflatten(1, (-1, ctx.world_size)) for x in (o, l))
    L = sp.ag(ctx, l[None])
    weighted = o * torch.exp(l - torch.logsumexp(L, 0))[..., None]
    return sp.rs(ctx, weighted, 2)[:, :, 0]


_OWN_ROWS = {
    "index_select": lambda c, P: P.index_select(0, torch.tensor([c.rank]))[0],
    "gather": lambda c, P: P.gather(0, torch.full_like(P[:1], c.rank).long())[0],
    "one hot": lambda c, P: (P * torch.eye(c.world_size)[c.rank][:, None, None]).sum(0),
    "mask": lambda c, P: (
        torch.where(torch.eye(c.world_size).bool()[c.rank][:, None, None], P, 0.0)
    ).sum(0),
}


def _picked(ctx: Context, o: Tensor, l: Tensor, pick) -> Tensor:
    P = torch.softmax(sp.stack_view(ctx, l), 0)
    return sp.rs(ctx, o * pick(ctx, P)[..., None])


for _name, _pick in _OWN_ROWS.items():
    add(
        f"FH-05 {_name}",
        "H",
        lambda c, o, l, f=_pick: _picked(c, o, l, f),
    )


@case("FH-06", "H")
def padded_block(ctx, o, l):
    """Ranks padded to a power of two, as a Triton kernel's block is."""
    L = sp.stack_view(ctx, l)
    block = torch.nn.functional.pad(
        L, (0, 0, 0, 0, 0, 2 * ctx.world_size - ctx.world_size), value=-torch.inf
    )
    whole = torch.logsumexp(block, 0)
    return sp.rs(ctx, o * torch.exp(block[ctx.rank] - whole)[..., None])
