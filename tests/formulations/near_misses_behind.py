"""Near misses in what stands around an exchange: ops that most numbers pass unchanged,
limits beyond the traced token count, bounds that ordinary data do not reach, and merges
that only some ranks' parts show.
"""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

import torch
from torch import Tensor

from . import family_b
from . import spelling as sp
from .cases import EQUAL_OR_REFUSED, add
from .gathers import query
from .gathers_kv import rows
from .inputs import Input
from .near_misses import weighted

_SAME = {"expect": EQUAL_OR_REFUSED, "result": None}


def _add(case_id: str, fn, inputs="ol", note: str = "", **attributes) -> None:
    add(case_id, "NM", fn, inputs, note=note, **{**_SAME, **attributes})


def numbers(p, r):
    """Block numbers [t, 4] with -1 for none."""
    size = (p.geometry.num_tokens, 4)
    drawn = torch.randint(-1, 5000, size, generator=p.generator(r), dtype=torch.int32)
    return [Input(drawn)]


# Behind a gather: the identity on some numbers, and not on others.

_ON_FLOATS = {
    "relu": torch.relu,
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(min=0),
    "clamp wide": lambda x: x.clamp(-0.9, 448.0),
    "round": torch.round,
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "where": lambda x: torch.where(x > 0, x, x * 0.5),
    "root of square": lambda x: (x * x).sqrt(),
    "through int": lambda x: x.to(torch.int32).to(x.dtype),
    "through 8 bits": lambda x: x.to(torch.float8_e4m3fn).to(x.dtype),
    "fill": lambda x: x.masked_fill(x < -1, -5.0),
}
_ON_INTS = {
    "clamp": lambda x: x.clamp(min=0),
    "abs": torch.abs,
    "remainder": lambda x: torch.remainder(x, 4096),
    "where": lambda x: torch.where(x < 0, 0, x),
    "mask": lambda x: x & 0xFFF,
    "through 16 bits": lambda x: (x * 16).to(torch.int16).to(torch.int32),
}
for _name, _op in _ON_FLOATS.items():
    _add(f"NM-50 q {_name}", lambda c, q, f=_op: f(sp.ag(c, q, 1)), query)
    _add(f"NM-50 k {_name}", lambda c, x, f=_op: f(sp.ag(c, x)), rows)
    _add(
        f"NM-50 padded {_name}",
        lambda c, q, f=_op: f(sp.ar(c, _own_slot(c, f(q)))),
        query,
    )
for _name, _op in _ON_INTS.items():
    _add(f"NM-50 ids {_name}", lambda c, x, f=_op: f(sp.ag(c, x)), numbers)


def _own_slot(ctx, q: Tensor) -> Tensor:
    heads = q.shape[1]
    after = (ctx.world_size - 1 - ctx.rank) * heads
    return torch.nn.functional.pad(q, (0, 0, ctx.rank * heads, after))


# Limits that the traced token count does not reach.

_LIMITS = {
    "mask": lambda x, t: x * (torch.arange(t) < 32)[:, None],
    "steps": lambda x, t: x * (1 + t // 32),
    "at least": lambda x, t: x * (max(t, 30) / 30),
    "tail": lambda x, t: torch.cat([x[:40], torch.zeros_like(x[40:])]),
}
# Limits that stand in the graph as two numbers, in a type, or behind a curve.
_POSITIONS = {
    "blocks": lambda t: torch.arange(t) // 16 < 8,
    "shift": lambda t: torch.arange(t) >> 6 == 0,
    "scaled": lambda t: torch.arange(t) / 64 < 2,
    "falling": lambda t: 1 - 0.008 * torch.arange(t) > 0,
    "8 bits": lambda t: torch.arange(t).to(torch.int8) >= 0,
    "few digits": lambda t: torch.arange(t).bfloat16().long() == torch.arange(t),
    "logarithm": lambda t: torch.log2(torch.arange(t) + 1.0) < 7,
    "root": lambda t: torch.arange(t).float().sqrt() < 11.5,
}
_LIMITS |= {
    name: lambda x, t, keep=keep: x * keep(t)[:, None]
    for name, keep in _POSITIONS.items()
}
_BEYOND = {"other_tokens": (64, 300)}


def _limited_gather(ctx, x: Tensor, limit) -> Tensor:
    tokens = x.shape[0]
    whole = sp.ag(ctx, x, 1) if x.dim() == 3 else sp.ag(ctx, x)[:tokens]
    return limit(whole.flatten(1), tokens)


for _name, _limit in _LIMITS.items():
    _add(
        f"NM-51 weights {_name}",
        lambda c, o, l, f=_limit: weighted(
            c, o, f(sp.w_logsumexp(c, l, sp.stack_view(c, l)), o.shape[0])
        ),
        **_BEYOND,
    )
    _add(
        f"NM-51 merged {_name}",
        lambda c, o, l, f=_limit: f(family_b.tree(c, o, l).flatten(1), o.shape[0]),
        **_BEYOND,
    )
    _add(
        f"NM-51 query {_name}",
        lambda c, q, f=_limit: _limited_gather(c, q, f),
        query,
        **_BEYOND,
    )


# Bounds beside weights that may have any size.


def _quotient(bound, shift: float = 0.0):
    def merge(ctx, o: Tensor, l: Tensor) -> Tensor:
        e = torch.exp(l - shift)[..., None]
        return sp.ar(ctx, o * e) / bound(sp.ar(ctx, e))

    return merge


_add("NM-52 epsilon", _quotient(lambda d: d + 1e-2, 20.0))
_add("NM-52 at least", _quotient(lambda d: d.clamp(min=1e-2), 20.0))
_add("NM-52 at most", _quotient(lambda d: d.clamp(max=10.0)))
_add("NM-52 small", _quotient(lambda d: torch.where(d > 1e-2, d, 1.0), 20.0))


def _sums(bound):
    def merge(ctx, o: Tensor, top: Tensor, total: Tensor) -> Tensor:
        tops = sp.stack_view(ctx, top)
        shares = sp.stack_view(ctx, bound(total)) * torch.exp(tops - tops.amax(0))
        return weighted(ctx, o, (shares / shares.sum(0))[ctx.rank])

    return merge


_add("NM-52 sums at most", _sums(lambda s: s.clamp(max=2.0)), "o, max, sum")
_add("NM-52 sums above", _sums(lambda s: torch.where(s > 2, 1.0, s)), "o, max, sum")


# Numbers that stand for an empty shard, and bounds on the result.


def _marked(p, r):
    """LSEs of -1e30 in the first row on all ranks, whose payload is not zero."""
    o, l = p.partial_output[r].clone(), p.partial_lse[r].clone()
    l[0] = -1e30
    return [Input(o.to(p.geometry.dtype)), Input(l)]


def _mark_is_empty(ctx, o: Tensor, l: Tensor) -> Tensor:
    L = sp.stack_view(ctx, l)
    w = torch.where(L <= -1e29, 0.0, torch.exp(L - L.amax(0)))
    total = w.sum(0)
    return weighted(ctx, o, w[ctx.rank] / torch.where(total == 0, 1.0, total))


def _bounded_lse(ctx, o: Tensor, l: Tensor) -> Tensor:
    L = sp.stack_view(ctx, l * 1000.0)
    return sp.rs(ctx, o), torch.logsumexp(L, 0).clamp(-2000.0, 2000.0)


_add("NM-53 mark", _mark_is_empty, _marked)
_add("NM-53 bounded lse", _bounded_lse)


# Merges in the parts of some ranks only.


def _masked_heads(ctx, o: Tensor, l: Tensor) -> Tensor:
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    return weighted(ctx, o, w * (torch.arange(o.shape[1]) < o.shape[1] - 2))


def _turned_heads(ctx, o: Tensor, l: Tensor) -> Tensor:
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    turned = torch.arange(o.shape[1]).roll(2)
    return sp.rs(ctx, (o * w[..., None])[:, turned])


def _last_tokens(ctx, o: Tensor, l: Tensor) -> Tensor:
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    w = w * (torch.arange(o.shape[0]) < o.shape[0] - 1)[:, None]
    return sp.rs(ctx, o * w[..., None], 0)


_add("NM-54 masked heads", _masked_heads)
_add("NM-54 turned heads", _turned_heads)
_add("NM-54 last tokens", _last_tokens, token_multiple_of_ranks=True)
