"""Family C: all-to-all of partials and LSEs, then a local combine over the received
shards.
"""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from . import spelling as sp
from .cases import Context, add, case
from .combining import COMBINES

LN2 = 0.6931471805599453


def merge(
    ctx: Context,
    o: Tensor,
    l: Tensor,
    *,
    shards: str = "view",
    exchange: str = "a2a",
    combine: str = "softmax",
    cast: str = "promote",
    returns_lse: bool = False,
):
    """Two exchanges, one for partials and one for LSEs."""
    x = o.float() if cast == "before exchange" else o
    O = sp.EXCHANGES[exchange](ctx, sp.SHARDS[shards](ctx, x))
    L = sp.EXCHANGES[exchange](ctx, sp.SHARDS[shards](ctx, l))
    if cast == "after exchange":
        O = O.float()
    out = COMBINES[combine](O, L)
    out = out if cast == "promote" else out.to(o.dtype)
    return (out, torch.logsumexp(L, 0)) if returns_lse else out


add("FC-38", "C", merge)
add("FC-38 logsumexp", "C", partial(merge, combine="logsumexp"))
add("FC-38 max exp div", "C", partial(merge, combine="max exp div"))
add("FC-38 cast", "C", partial(merge, cast="after exchange"))
add("FC-38 wide wire", "C", partial(merge, cast="before exchange"))
add("FC-38 lse", "C", partial(merge, returns_lse=True), result="HS+lse")
add("FC-39", "C", partial(merge, shards="stack"))

# Every transport with a combine, every combine with a transport.
for _exchange, _shards, _combine in zip(
    cycle(sp.EXCHANGES), cycle(sp.SHARDS), COMBINES, strict=False
):
    add(
        f"C/{_exchange}/{_shards}/{_combine}",
        "C",
        partial(
            merge,
            exchange=_exchange,
            shards=_shards,
            combine=_combine,
            cast="after exchange",
        ),
    )


@case("FC-40", "C")
def one_exchange_of_rows(ctx, o, l):
    """One exchange of fp32 rows with the LSE as column D."""
    rows = torch.cat([o.float(), l[..., None]], -1)
    got = sp.a2a(ctx, sp.head_shards(ctx, rows))
    O, L = got[..., :-1], got[..., -1]
    return (torch.softmax(L, 0)[..., None] * O).sum(0).to(o.dtype)


@case("FC-40 flat", "C")
def one_flat_exchange_of_rows(ctx, o, l):
    rows = torch.cat([o.float(), l.unsqueeze(-1)], dim=-1)
    send = sp.head_shards(ctx, rows)
    got = sp.a2a(ctx, send.view(-1)).view(send.shape)
    O, L = torch.split(got, [o.shape[-1], 1], dim=-1)
    w = torch.exp(L - torch.logsumexp(L, 0, keepdim=True))
    return (O * w).sum(0).to(o.dtype)


@case("FC-40 lse first", "C")
def lse_in_first_column(ctx, o, l):
    send = sp.head_shards_stack(ctx, torch.cat([l[..., None], o.float()], -1))
    got = sp.exchange_splits(ctx, send)
    return COMBINES["max exp div"](got[..., 1:], got[..., 0]).to(o.dtype)


def packed(
    ctx: Context,
    o: Tensor,
    l: Tensor,
    *,
    wire: str = "bf16",
    flat: bool = True,
    unpack: str = "select",
) -> Tensor:
    """One exchange of 16-bit rows whose last two columns are the bits of the fp32
    LSE.
    """
    d = o.shape[-1]
    half = o.to(torch.bfloat16) if o.dtype == torch.float32 else o
    columns = l.unsqueeze(-1).view(half.dtype)  # [T, H, 2]
    rows = torch.cat([half, columns], -1)
    send = sp.head_shards(ctx, rows)
    if wire != "bf16":
        send = send.view(
            {"uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32}[wire]
        )
    got = sp.exchange_flat(ctx, send) if flat else sp.exchange(ctx, send)
    got = got.view(half.dtype)
    if unpack == "select":
        L = got.view(torch.float32)[..., d // 2]
    else:
        L = got[..., d:].contiguous().view(torch.float32).squeeze(-1)
    O = got[..., :d]
    m = L.amax(0)
    e = torch.exp(L - m)
    return ((O.float() * (e / e.sum(0))[..., None]).sum(0)).to(o.dtype)


# In fp32 the recipe itself rounds the partials to bf16 on the wire.
_HALF = {"dtypes": (torch.bfloat16,)}
add("FC-41", "C", packed, **_HALF)
add("FC-41 slice", "C", partial(packed, unpack="slice"), **_HALF)
add("FC-41 not flat", "C", partial(packed, flat=False), **_HALF)
add("FC-42", "C", partial(packed, wire="uint8"), **_HALF)
add(
    "FC-42 uint8 slice",
    "C",
    partial(packed, wire="uint8", unpack="slice", flat=False),
    **_HALF,
)
add("FC-42 int16", "C", partial(packed, wire="int16"), **_HALF)
add("FC-42 int32", "C", partial(packed, wire="int32", flat=False), **_HALF)


@case("FC-42 hi lo", "C", **_HALF)
def packed_by_shifts(ctx, o, l):
    """Low half first, put together with integer shifts."""
    bits = l.view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int16)
    high = (bits >> 16).to(torch.int16)
    columns = torch.stack([low, high], -1).view(torch.bfloat16)
    got = sp.a2a(ctx, sp.head_shards(ctx, torch.cat([o, columns], -1)))
    tail = got[..., -2:].contiguous().view(torch.int16).to(torch.int32)
    L = ((tail[..., 0] & 0xFFFF) | (tail[..., 1] << 16)).view(torch.float32)
    w = torch.softmax(L, 0)[..., None]
    return (got[..., :-2].float() * w).sum(0).to(o.dtype)


@case("FC-42 bytes", "C")
def packed_as_bytes(ctx, o, l):
    """Any dtype: rows of bytes, partial first, LSE behind it."""
    rows = torch.cat(
        [o.contiguous().view(torch.uint8), l[..., None].view(torch.uint8)], -1
    )
    got = sp.a2a(ctx, sp.head_shards(ctx, rows))
    width = o.shape[-1] * o.element_size()
    O = got[..., :width].contiguous().view(o.dtype)
    L = got[..., width:].contiguous().view(torch.float32).squeeze(-1)
    return (O.float() * torch.softmax(L, 0)[..., None]).sum(0).to(o.dtype)


def statistics(
    ctx: Context, o: Tensor, mx: Tensor, sm: Tensor, *, apart: bool = False
) -> Tensor:
    O = sp.a2a(ctx, sp.head_shards(ctx, o))
    if apart:
        mx, sm = (sp.a2a(ctx, sp.head_shards(ctx, x))[..., None] for x in (mx, sm))
    else:
        got = sp.a2a(ctx, sp.head_shards(ctx, torch.stack([mx, sm], -1)))
        mx, sm = got[..., 0:1], got[..., 1:2]
    k = sm * torch.exp(mx - mx.max(0, keepdim=True)[0])
    return (O * (k / k.sum(0))).sum(0)


add("FC-43", "C", statistics, "o, max, sum")
add("FC-43 apart", "C", partial(statistics, apart=True), "o, max, sum")


@case("FC-43 packed", "C", "o, max, sum")
def statistics_packed(ctx, o, mx, sm):
    """Helix: partial, max and sum in one fp32 row."""
    rows = torch.cat([o.float(), mx[..., None], sm[..., None]], -1)
    got = sp.a2a(ctx, sp.head_shards(ctx, rows))
    O, mx, sm = got.split([o.shape[-1], 1, 1], -1)
    k = sm * torch.exp(mx - mx.amax(0, keepdim=True))
    return ((O * k).sum(0) / k.sum(0)).to(o.dtype)


@case("FC-43 max plus log sum", "C", "o, max, sum")
def statistics_to_lse(ctx, o, mx, sm):
    """Ascend: the LSE is formed from max and sum before the exchange."""
    return merge(ctx, o, mx + torch.log(sm))


@case("FC-43 accumulator", "C", "accumulator, max, sum")
def accumulator_exchange(ctx, a, mx, sm):
    A, M, S = (sp.a2a(ctx, sp.head_shards(ctx, x)) for x in (a, mx, sm))
    k = torch.exp(M - M.amax(0))
    return (A * k[..., None]).sum(0) / (S * k).sum(0)[..., None]


@case("FC-44", "C", "ol base 2")
def base_two(ctx, o, l):
    O, L = (sp.a2a(ctx, sp.head_shards(ctx, x)) for x in (o, l))
    m = L.amax(0)
    e = torch.exp2(L - m)
    return (O * (e / e.sum(0))[..., None]).sum(0)


@case("FC-44 pow lse", "C", "ol base 2", "HS+lse2")
def base_two_lse(ctx, o, l):
    O, L = (sp.a2a(ctx, sp.head_shards(ctx, x)) for x in (o, l))
    m = L.max(0)[0]
    g = m + torch.log2(torch.pow(2.0, L - m).sum(0))
    return (O * torch.pow(2.0, L - g)[..., None]).sum(0), g


@case("FC-44 converted", "C", "ol base 2")
def base_two_converted(ctx, o, l):
    O, L = (sp.a2a(ctx, sp.head_shards(ctx, x)) for x in (o, l))
    return COMBINES["logsumexp"](O, L * LN2)


_TOKENS = {"result": "TS", "token_multiple_of_ranks": True}


@case("FC-45", "C", **_TOKENS)
def scatter_tokens(ctx, o, l):
    """The tokens are scattered: dim 0 goes straight into the exchange."""
    n = ctx.world_size
    O = sp.a2a(ctx, o).view(n, o.shape[0] // n, *o.shape[1:])
    L = sp.a2a(ctx, l).view(n, l.shape[0] // n, *l.shape[1:])
    return (torch.softmax(L, 0)[..., None] * O).sum(0)


@case("FC-45 unflatten", "C", **_TOKENS)
def scatter_tokens_unflatten(ctx, o, l):
    O = sp.a2a(ctx, o).unflatten(0, (ctx.world_size, -1))
    L = sp.a2a(ctx, l).unflatten(0, (ctx.world_size, -1))
    return COMBINES["logsumexp"](O, L)


@case("FC-45 chunks", "C", **_TOKENS)
def scatter_tokens_chunks(ctx, o, l):
    O = torch.stack(sp.a2a(ctx, o).chunk(ctx.world_size, 0))
    L = torch.stack(sp.a2a(ctx, l).chunk(ctx.world_size, 0))
    return COMBINES["max exp div"](O, L)


@case("FC-45 lse", "C", result="TS+lse", token_multiple_of_ranks=True)
def scatter_tokens_lse(ctx, o, l):
    O = sp.a2a(ctx, o).unflatten(0, (ctx.world_size, -1))
    L = sp.a2a(ctx, l).unflatten(0, (ctx.world_size, -1))
    g = torch.logsumexp(L, 0)
    return (O * torch.exp(L - g)[..., None]).sum(0), g


@case("FC-45 reduce-scatter", "A", **_TOKENS)
def scatter_tokens_rs(ctx, o, l):
    """Family A with the reduce-scatter along the tokens."""
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))[..., None]
    return sp.rs(ctx, o * w, 0)


@case("FC-46", "C")
def list_style_send(ctx, o, l):
    """Send buffers filled rank by rank."""
    n, h = ctx.world_size, ctx.heads_per_rank
    send_o = o.new_empty((n, o.shape[0], h, o.shape[2]))
    send_l = l.new_empty((n, l.shape[0], h))
    for peer in range(n):
        send_o[peer] = o[:, peer * h : (peer + 1) * h]
        send_l[peer].copy_(l[:, peer * h : (peer + 1) * h])
    return COMBINES["softmax"](sp.a2a(ctx, send_o), sp.a2a(ctx, send_l))


@case("FC-46 head major", "C", "head major", "HM")
def head_major(ctx, o, l):
    """Head-major partials need no permutation before the exchange."""
    n, h = ctx.world_size, ctx.heads_per_rank
    O = sp.a2a(ctx, o).view(n, h, *o.shape[1:])
    L = sp.a2a(ctx, l).view(n, h, *l.shape[1:])
    return (torch.softmax(L, 0)[..., None] * O).sum(0)


@case("FC-46 head major in, token major out", "C", "head major")
def head_major_back(ctx, o, l):
    n = ctx.world_size
    O = sp.a2a(ctx, o).unflatten(0, (n, -1)).transpose(1, 2)
    L = sp.a2a(ctx, l).unflatten(0, (n, -1)).transpose(1, 2)
    return COMBINES["max exp div"](O, L)


@case("FC-46 rows gathered", "C")
def lse_gathered_output_exchanged(ctx, o, l):
    """Partials by all-to-all, the LSEs by an all-gather of all heads."""
    O = sp.a2a(ctx, sp.head_shards(ctx, o))
    L = torch.stack([sp.own(ctx, x) for x in sp.stack_view(ctx, l)])
    return COMBINES["softmax"](O, L)


@case("FC-46 weighted before", "C")
def weighted_before_exchange(ctx, o, l):
    """Weights from gathered LSEs, weighted partials exchanged and only summed."""
    w = sp.w_exp_div(ctx, l, sp.stack_view(ctx, l))
    return sp.a2a(ctx, sp.head_shards(ctx, o * w[..., None])).sum(dim=0)


add("FC-47", "C", partial(merge, combine="sigmoid fold"))
add("FC-47 log1p", "C", partial(merge, combine="log1p fold"))
add("FC-48", "C", partial(merge, combine="max exp div", cast="after exchange"))
add("FC-48 python sum", "C", partial(merge, combine="python sum"))
add("FC-49", "C", partial(merge, combine="einsum"))
add("FC-49 matmul", "C", partial(merge, combine="matmul"))


def masked(ctx: Context, o: Tensor, l: Tensor, *, mask_output: bool) -> Tensor:
    """FC-50: the LSE is sanitised on receipt; (a) masks the partials too, (b) does
    not.
    """
    O = sp.a2a(ctx, sp.head_shards(ctx, o))
    L = sp.a2a(ctx, sp.head_shards(ctx, l))
    L = torch.where(torch.isnan(L) | torch.isinf(L), float("-inf"), L)
    m = L.amax(0)
    m = torch.where(m == float("-inf"), 0.0, m)
    w = torch.exp(L - m)
    den = w.sum(0)
    w = torch.where(den > 0, w / den, 0.0)[..., None]
    parts = torch.where(w > 0, O * w, 0.0) if mask_output else O * w
    return parts.sum(0)


add("FC-50", "C", partial(masked, mask_output=True))
add("FC-50 b", "C", partial(masked, mask_output=False))


@case("FC-50 nan_to_num", "C")
def masked_by_nan_to_num(ctx, o, l):
    O = sp.a2a(ctx, sp.head_shards(ctx, torch.nan_to_num(o)))
    L = sp.a2a(ctx, sp.head_shards(ctx, l))
    w = torch.nan_to_num(torch.exp(L - torch.logsumexp(L, 0)), nan=0.0)
    return (O * w[..., None]).sum(0).to(o.dtype)


@case("FC-50 flash layout", "C", "o [T,H,D], l [H,T]", "HS+lse [h,T]")
def varlen_layout(ctx, o, l):
    """LSE [H, T] as flash attention's varlen kernels return it; heads scatter along dim
    0.
    """
    O = sp.a2a(ctx, sp.head_shards(ctx, o))
    L = sp.a2a(ctx, l).unflatten(0, (ctx.world_size, -1))  # [N, h, T]
    g = torch.logsumexp(L, 0)
    w = torch.exp(L - g).transpose(1, 2)
    return (O * w[..., None]).sum(0), g
