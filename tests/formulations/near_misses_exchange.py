"""Near misses in what is exchanged: groups, layouts, folds, what happens on the way."""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

from functools import partial

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from . import family_a
from . import spelling as sp
from .cases import Context, case
from .combining import COMBINES
from .inputs import Input, Problem, _ol, _q
from .near_misses import MISS, SAME, miss, weighted


@case(
    "NM-14",
    "NM",
    result=None,
    grid=True,
    note="LSEs of the row group, reduced over all",
    **SAME,
)
def other_group(ctx, o, l):
    L = sp.all_gather(l, 0, ctx.row[0]).view(ctx.row[2], *l.shape)
    return weighted(ctx, o, torch.exp(l - torch.logsumexp(L, 0)))


@case(
    "NM-14 reduce",
    "NM",
    grid=True,
    result=None,
    note="reduced in the row group",
    **SAME,
)
def other_group_reduce(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    return funcol.all_reduce(o * w[..., None], "sum", ctx.row[0])


@case("NM-15", "NM", note="heads interleaved rank-minor at the scatter", **MISS)
def rank_minor_scatter(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    x = (o * w[..., None]).unflatten(1, (ctx.heads_per_rank, ctx.world_size))
    return sp.rs(ctx, x.permute(2, 0, 1, 3).contiguous(), 0).squeeze(0)


@case("NM-15 query", "NM", _q, "q", note="heads interleaved rank-minor", **MISS)
def rank_minor_query(ctx, q):
    stacked = sp.ag(ctx, q).view(ctx.world_size, *q.shape)
    return stacked.permute(1, 2, 0, 3).flatten(1, 2)


def permuted_heads(ctx: Context, o: Tensor, l: Tensor, *, what: str) -> Tensor:
    """Heads re-ordered in o, in l, or in both; undone on neither side."""
    turn = lambda x: x.flip(1)  # noqa: E731
    o = turn(o) if what != "l" else o
    l = turn(l) if what != "o" else l
    return family_a.merge(ctx, o, l)


miss("NM-16", partial(permuted_heads, what="o"), note="heads of o alone re-ordered")
miss("NM-16 l", partial(permuted_heads, what="l"), note="heads of l alone re-ordered")
miss(
    "NM-16 both",
    partial(permuted_heads, what="both"),
    note="both: merges, other heads land",
)


@case("NM-17", "NM", note="LSE rounded to bf16 in the packed row", slight=True, **SAME)
def packed_rounded(ctx, o, l):
    rows = torch.cat([o.to(torch.bfloat16), l.to(torch.bfloat16)[..., None]], -1)
    got = sp.a2a(ctx, sp.head_shards(ctx, rows))
    O, L = got[..., :-1].float(), got[..., -1].float()
    return COMBINES["softmax"](O, L).to(o.dtype)


@case("NM-18", "NM", note="LSE rounded to bf16 before the gather", slight=True, **SAME)
def rounded_lse(ctx, o, l):
    L = sp.stack_view(ctx, l.to(torch.bfloat16)).float()
    return weighted(ctx, o, torch.softmax(L, 0)[ctx.rank])


@case(
    "NM-18 own exact",
    "NM",
    note="others' LSEs rounded, own one exact",
    slight=True,
    **SAME,
)
def rounded_lse_own_exact(ctx, o, l):
    L = sp.stack_view(ctx, l.to(torch.float16)).float()
    return weighted(ctx, o, torch.exp(l - torch.logsumexp(L, 0)))


def wrong_fold(
    ctx: Context, o: Tensor, l: Tensor, *, weight_sign: int, lse_sign: int
) -> Tensor:
    O, L = (sp.a2a(ctx, sp.head_shards(ctx, x)) for x in (o, l))
    a, z = O[0], L[0]
    for n in range(1, ctx.world_size):
        a = a - torch.sigmoid(weight_sign * (L[n] - z))[..., None] * (a - O[n])
        z = z - torch.nn.functional.logsigmoid(lse_sign * (z - L[n]))
    return a


miss("NM-19", partial(wrong_fold, weight_sign=-1, lse_sign=1), note="sigmoid flipped")
miss(
    "NM-20",
    partial(wrong_fold, weight_sign=1, lse_sign=-1),
    note="logsigmoid flipped: harmless for two ranks, wrong for four",
    world_sizes=(4,),
)


def with_shared_token(p: Problem, r: int):
    g = torch.Generator().manual_seed(p.seed)
    shared = torch.randn((*p.lse.shape, p.geometry.head_dim), generator=g)
    return [
        *_ol(p, r),
        Input(shared.to(p.geometry.dtype)),
        Input(torch.randn(p.lse.shape, generator=g)),
    ]


@case(
    "NM-21",
    "NM",
    with_shared_token,
    note="the new token is counted on every rank",
    **MISS,
)
def shared_token(ctx, o, l, o_new, l_new):
    lse = torch.logaddexp(l, l_new)
    o = o * torch.exp(l - lse)[..., None] + o_new * torch.exp(l_new - lse)[..., None]
    return family_a.merge(ctx, o, lse)


@case(
    "NM-22",
    "NM",
    "ol, sink",
    "with sink",
    note="the sink counts once per rank",
    **MISS,
)
def sink_on_every_rank(ctx, o, l, sink):
    lse = torch.logaddexp(l, sink)
    return family_a.merge(ctx, o * torch.exp(l - lse)[..., None], lse)


@case(
    "NM-23", "NM", "[B,S,H,D], l [B,H,S]", None, note="[B,H,1] times [B,1,H,D]", **SAME
)
def broadcast_trap(ctx, o, l):
    """Right for one batch entry; for more the product is [B, B, H, D]."""
    return sp.ar(ctx, o * torch.exp(l - torch.logsumexp(sp.ag(ctx, l[None]), 0)))


@case("NM-24", "NM", result=None, note="weights of one head on all heads", **SAME)
def one_heads_weight(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    return weighted(ctx, o, w[:, :1].expand_as(w))


@case(
    "NM-24 token 0",
    "NM",
    result=None,
    note="weights of the first token on all",
    **SAME,
)
def one_tokens_weight(ctx, o, l):
    """Equal to the merge for a single token."""
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    return weighted(ctx, o, w[:1].expand_as(w))


_NON_LINEAR = {
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "clamp": lambda x: x.clamp(-0.1, 0.1),
    "clamp wide": lambda x: x.clamp(-6.0, 6.0),
    "norm": lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:]),
    "fp8": lambda x: x.to(torch.float8_e4m3fn).to(x.dtype),
    "square": lambda x: x * x,
    "bias": lambda x: x + 0.25,
    "round": lambda x: (x * 64).round() / 64,
}
for _name, _function in _NON_LINEAR.items():
    miss(
        f"NM-25 {_name}",
        lambda ctx, o, l, f=_function: sp.rs(
            ctx, f(o * sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))[..., None])
        ),
        note=f"{_name} between weighting and reduce",
        deviates=_name not in ("clamp wide", "fp8", "round"),
        slight=_name in ("fp8", "round"),
    )
for _name in ("gelu", "clamp wide", "norm"):
    miss(
        f"NM-26 {_name}",
        lambda ctx, o, l, f=_NON_LINEAR[_name]: f(family_a.merge(ctx, o, l)),
        note=f"{_name} after the merge, which stays a merge",
        deviates=_name != "clamp wide",
    )


def flipped(ctx: Context, o: Tensor, l: Tensor, *, what: str) -> Tensor:
    O, L = (sp.a2a(ctx, sp.head_shards(ctx, x)) for x in (o, l))
    O = O.flip(0) if what != "l" else O
    L = L.flip(0) if what != "o" else L
    return COMBINES["softmax"](O, L)


miss("NM-33", partial(flipped, what="l"), note="receive order flipped for l only")
miss("NM-34", partial(flipped, what="o"), note="receive order flipped for o only")
miss(
    "NM-34 both",
    partial(flipped, what="both"),
    note="flipped for both: equal",
    deviates=False,
)
miss(
    "NM-34 rolled",
    lambda ctx, o, l: COMBINES["softmax"](
        sp.a2a(ctx, sp.head_shards(ctx, o)),
        sp.a2a(ctx, sp.head_shards(ctx, l)).roll(1, 0),
    ),
    note="l rolled by one rank",
)


@case(
    "NM-35",
    "NM",
    token_multiple_of_ranks=True,
    note="tokens scattered, seen as heads",
    **MISS,
)
def tokens_as_heads(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    out = sp.rs(ctx, o * w[..., None], 0)
    return out.reshape(o.shape[0], ctx.heads_per_rank, o.shape[2])


def others_heads(ctx: Context, o: Tensor, l: Tensor, *, step: int) -> Tensor:
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    full = sp.ar(ctx, o * w[..., None])
    return full.chunk(ctx.world_size, 1)[(ctx.rank + step) % ctx.world_size]


miss("NM-36", partial(others_heads, step=1), note="heads of the next rank")
miss(
    "NM-36 first",
    lambda ctx, o, l: others_heads(ctx, o, l, step=-ctx.rank),
    note="rank 0's heads on every rank",
    ambiguous=True,
)


def tensor_parallel(p: Problem, r: int):
    g = p.geometry
    weight = torch.randn((g.heads_per_rank * g.head_dim, 6), generator=p.generator(r))
    return [*_q(p, r), Input(weight.to(g.dtype), None)]


@case("NM-37", "NM", tensor_parallel, None, note="ordinary tensor parallelism", **SAME)
def ordinary_projection(ctx, heads, weight):
    return sp.ar(ctx, heads.flatten(1) @ weight)


@case(
    "NM-37 Ulysses", "NM", "ol", None, note="heads for tokens and back, no LSE", **SAME
)
def ulysses(ctx, o, l):
    """Attention stands for any op between the two exchanges."""
    x = sp.a2a(ctx, sp.head_shards(ctx, o)).flatten(0, 1)
    x = torch.softmax(x @ x.transpose(-1, -2), -1) @ x
    return (
        sp.a2a(ctx, x).unflatten(0, (ctx.world_size, -1)).transpose(0, 1).flatten(1, 2)
    )


@case(
    "NM-37 softmax", "NM", result=None, note="vocabulary-parallel log-softmax", **SAME
)
def vocabulary_parallel(ctx, o, l):
    m = sp.ar(ctx, o.amax(-1), "max")
    return (
        o - (m + torch.log(sp.ar(ctx, torch.exp(o - m[..., None]).sum(-1))))[..., None]
    )


@case("NM-38", "NM", result=None, note="gathered LSEs leave the graph as well", **SAME)
def gathered_lse_escapes(ctx, o, l):
    L = sp.stack_view(ctx, l)
    return weighted(ctx, o, torch.softmax(L, 0)[ctx.rank]), L


@case(
    "NM-38 weights",
    "NM",
    result=None,
    note="own weights leave the graph as well",
    **SAME,
)
def weights_escape(ctx, o, l):
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    return weighted(ctx, o, w), w


@case("NM-38 full", "NM", result=None, note="full heads leave beside own heads", **SAME)
def full_heads_escape(ctx, o, l):
    full = sp.ar(ctx, o * sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))[..., None])
    return sp.own(ctx, full) * 2, full


@case(
    "NM-39",
    "NM",
    _q,
    None,
    note="gathered query padded into a buffer of 64 heads",
    **SAME,
)
def padded_workspace(ctx, q):
    whole = sp.ag(ctx, q, 1)
    buffer = whole.new_zeros((whole.shape[0], 64, whole.shape[2]))
    buffer[:, : ctx.heads].copy_(whole)
    return buffer, whole * 2
