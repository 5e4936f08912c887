"""Gathers of the query: own heads of every rank, equal to a rank-major concat."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from . import spelling as sp
from .cases import EQUAL_OR_REFUSED, Context, add, case
from .inputs import Input, Problem

# Query gathers: own heads [T, h, D] of every rank -> [T, H, D].


def _query(p: Problem, rank: int) -> Tensor:
    h = p.geometry.heads_per_rank
    return p.query[:, rank * h : (rank + 1) * h].to(p.geometry.dtype).contiguous()


def _whole_query(p: Problem) -> Tensor:
    return p.query.to(p.geometry.dtype)


def query(p, r):
    return [Input(_query(p, r))]


def query_head_major(p, r):
    return [Input(_query(p, r).transpose(0, 1).contiguous(), 1)]


def query_parts(p, r):
    """Nope part [T, h, D - 2] and rope part [T, h, 2]."""
    q = _query(p, r)
    return [Input(q[..., :-2].contiguous()), Input(q[..., -2:].contiguous())]


def query_parts_head_major(p, r):
    return [Input(x.tensor.transpose(0, 1).contiguous(), 1) for x in query_parts(p, r)]


def query_four_dims(p, r):
    """[B, h, S, D], B the token count."""
    return [Input(torch.stack([_query(p, r), -_query(p, r)], 2))]


def query_whole(p, r):
    return [Input(_whole_query(p))]


def query_key_value(p, r):
    g = p.geometry
    parts = torch.randn((2, g.num_tokens, 1, g.head_dim), generator=p.generator(r))
    return [Input(parts[0].to(g.dtype)), Input(parts[1].to(g.dtype)), *query(p, r)]


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., :-2], x[..., -2:]


def _q_result(p, r):
    return _whole_query(p)


def _q_parts_result(p, r):
    return _parts(_whole_query(p))


def gather(ctx: Context, q: Tensor, *, how: str) -> Tensor:
    t, h, d = q.shape
    n = ctx.world_size
    match how:
        case "dim 1":
            return sp.ag(ctx, q, 1)
        case "view movedim":
            return sp.ag(ctx, q).view(n, t, h, d).movedim(0, 1).reshape(t, n * h, d)
        case "view transpose":
            return sp.ag(ctx, q).view(n, t, h, d).transpose(0, 1).reshape(t, -1, d)
        case "view permute flatten":
            return sp.ag(ctx, q).view(n, t, h, d).permute(1, 0, 2, 3).flatten(1, 2)
        case "unflatten":
            return sp.ag(ctx, q).unflatten(0, (n, t)).movedim(0, 1).flatten(1, 2)
        case "chunk cat":
            return torch.cat(sp.ag(ctx, q).chunk(n, 0), dim=1)
        case "split cat":
            return torch.cat(torch.split(sp.ag(ctx, q), t, dim=0), dim=1)
        case "transposed":
            return sp.ag(ctx, q.transpose(0, 1).contiguous()).transpose(0, 1)
        case "transposed contiguous":
            return sp.ag(ctx, q.movedim(1, 0).contiguous()).movedim(0, 1).contiguous()
        case "flatten heads":
            return sp.ag(ctx, q.flatten(1), 1).view(t, n * h, d)
        case "reshape heads":  # dim -1 does not trace at one token in torch 2.13
            return sp.ag(ctx, q.reshape(t, h * d), 1).reshape(t, -1, d)
        case "unsqueeze permute":
            return sp.ag(ctx, q.unsqueeze(0)).permute(1, 0, 2, 3).flatten(1, 2)
        case "unsqueeze unbind":
            return torch.cat(sp.ag(ctx, q.unsqueeze(0)).unbind(0), 1)
        case "unsqueeze index":
            stacked = sp.ag(ctx, q[None])
            return torch.cat([stacked[i] for i in range(n)], dim=1)
        case "into":
            return sp.stack_into(ctx, q).movedim(0, 1).reshape(t, n * h, d)
        case "list":
            parts = [torch.empty_like(q) for _ in range(n)]
            dist.all_gather(parts, q, group=ctx.group)
            return torch.cat(parts, dim=1)
        case "coalesced":
            (whole,) = sp.all_gather_coalesced([q], ctx.group_name)
            return whole.view(n, t, h, d).movedim(0, 1).flatten(1, 2)
    raise ValueError(how)


for _number, _how in {
    "G1": "dim 1",
    "G2": "view movedim",
    "G2 transpose": "view transpose",
    "G2 permute": "view permute flatten",
    "G2 unflatten": "unflatten",
    "G2 into": "into",
    "G3": "chunk cat",
    "G3 split": "split cat",
    "G3 list": "list",
    "G3 coalesced": "coalesced",
    "G4": "transposed",
    "G4 contiguous": "transposed contiguous",
    "G5": "flatten heads",
    "G5 reshape": "reshape heads",
    "G6": "unsqueeze permute",
    "G6b": "unsqueeze unbind",
    "G6b index": "unsqueeze index",
}.items():
    add(_number, "G", partial(gather, how=_how), query, _q_result)


@case("G7", "G", query_parts, _q_parts_result)
def parts_together(ctx, nope, pe):
    """Nope and rope parts travel as one row."""
    whole = sp.ag(ctx, torch.cat([nope, pe], -1), 1)
    return whole.split([nope.shape[-1], pe.shape[-1]], -1)


@case("G7 movedim", "G", query_parts, _q_parts_result)
def parts_together_movedim(ctx, nope, pe):
    q = torch.cat((nope, pe), dim=-1)
    whole = sp.stack_view(ctx, q).movedim(0, 1).flatten(1, 2)
    return whole[..., : nope.shape[-1]], whole[..., nope.shape[-1] :]


@case("G7 apart", "G", query_parts, _q_parts_result)
def parts_apart(ctx, nope, pe):
    return sp.ag(ctx, nope, 1), sp.ag(ctx, pe, 1)


@case("G7 coalesced", "G", query_parts, _q_parts_result)
def parts_coalesced(ctx, nope, pe):
    n, t = ctx.world_size, nope.shape[0]
    parts = sp.all_gather_coalesced([nope, pe], ctx.group_name)
    return tuple(
        x.view(n, t, -1, x.shape[-1]).movedim(0, 1).flatten(1, 2) for x in parts
    )


@case(
    "G8",
    "G",
    query_parts_head_major,
    lambda p, r: tuple(x.transpose(0, 1) for x in _parts(_whole_query(p))),
)
def parts_head_major(ctx, nope, pe):
    """As G7 in [h, T, .] and with the rope part first."""
    pe_whole, nope_whole = sp.ag(ctx, torch.cat([pe, nope], -1)).split(
        [pe.shape[-1], nope.shape[-1]], -1
    )
    return nope_whole, pe_whole


@case("G9", "G", query_whole, _q_result, expect=EQUAL_OR_REFUSED)
def replicated(ctx, q):
    """The query is whole already: there is no exchange and nothing to rewrite."""
    return q * 1


def padded_sum(ctx: Context, q: Tensor, *, how: str) -> Tensor:
    h, n, r = ctx.heads_per_rank, ctx.world_size, ctx.rank
    if how == "zeros":
        whole = q.new_zeros((q.shape[0], n * h, q.shape[2]))
        whole[:, r * h : (r + 1) * h] = q
    elif how == "pad":
        whole = torch.nn.functional.pad(q, (0, 0, r * h, (n - 1 - r) * h))
    else:
        parts = [q if i == r else torch.zeros_like(q) for i in range(n)]
        whole = torch.cat(parts, 1)
    return sp.ar(ctx, whole)


add("G10", "G", partial(padded_sum, how="zeros"), query, _q_result)
add("G10 pad", "G", partial(padded_sum, how="pad"), query, _q_result)
add("G10 cat", "G", partial(padded_sum, how="cat"), query, _q_result)


@case("G11", "G", query_whole, _q_result, expect=EQUAL_OR_REFUSED)
def broadcast(ctx, q):
    """The owner rank hands its whole query out: one source, not a gather."""
    return funcol.broadcast(q * 1, 0, ctx.group_name)


def _four_dims_result(p, r):
    whole = _whole_query(p)
    return torch.stack([whole, -whole], 2)


@case("G12", "G", query_four_dims, _four_dims_result)
def four_dims(ctx, q):
    return sp.ag(ctx, q, 1)


@case("G12 movedim", "G", query_four_dims, _four_dims_result)
def four_dims_movedim(ctx, q):
    return sp.ag(ctx, q[None]).movedim(0, 1).flatten(1, 2)


def _uneven(p: Problem, r: int) -> list[int]:
    h = p.geometry.heads_per_rank
    return [h - 1 if i % 2 else h for i in range(p.geometry.world_size)]


def query_uneven(p, r):
    return [Input(_query(p, r)[:, : _uneven(p, r)[r]].contiguous())]


def _uneven_result(p, r):
    heads = _uneven(p, r)
    return torch.cat([_query(p, i)[:, :k] for i, k in enumerate(heads)], 1)


def uneven_heads(ctx: Context, q: Tensor, *, unsqueeze: bool) -> Tensor:
    """Odd ranks own a head less: pad, gather, trim."""
    h, n = ctx.heads_per_rank, ctx.world_size
    heads = [h - 1 if i % 2 else h for i in range(n)]
    padded = torch.nn.functional.pad(q, (0, 0, 0, h - heads[ctx.rank]))
    if unsqueeze:
        parts = sp.ag(ctx, padded[None]).unbind(0)
    else:
        parts = sp.ag(ctx, padded, 1).split(h, 1)
    return torch.cat([x[:, :k] for x, k in zip(parts, heads, strict=True)], 1)


add("G13", "G", partial(uneven_heads, unsqueeze=False), query_uneven, _uneven_result)
add(
    "G13 stack",
    "G",
    partial(uneven_heads, unsqueeze=True),
    query_uneven,
    _uneven_result,
)

_WIRES = {
    "uint8": torch.uint8,
    "int16": torch.int16,
    "fp16": torch.float16,
    "int64": torch.int64,
}


def fp8(ctx: Context, q: Tensor, *, wire: str, dim: int = 1) -> Tensor:
    """An fp8 query travels as a dtype that the collectives know."""
    bits = q.to(torch.float8_e4m3fn).view(_WIRES[wire])
    whole = (
        sp.ag(ctx, bits, 1)
        if dim
        else sp.ag(ctx, bits[None]).movedim(0, 1).flatten(1, 2)
    )
    return whole.view(torch.float8_e4m3fn).to(q.dtype)


def _fp8_result(p, r):
    return _whole_query(p).to(torch.float8_e4m3fn).to(p.geometry.dtype)


for _wire in _WIRES:
    _suffix = "" if _wire == "uint8" else f" {_wire}"
    add(f"G14{_suffix}", "G", partial(fp8, wire=_wire), query, _fp8_result)
add("G14 stack", "G", partial(fp8, wire="uint8", dim=0), query, _fp8_result)


def _qkv_result(p, r):
    parts = [query_key_value(p, i) for i in range(p.geometry.world_size)]
    return tuple(torch.cat([x[i].tensor for x in parts], 1) for i in (2, 0, 1))


@case("G15", "G", query_key_value, _qkv_result)
def query_with_keys(ctx, k, v, q):
    """Keys, values and queries in one gather along the heads, cut apart afterwards."""
    whole = sp.ag(ctx, torch.cat([k, v, q], 1), 1)
    by_rank = whole.unflatten(1, (ctx.world_size, -1))
    k, v, q = by_rank.split([k.shape[1], v.shape[1], q.shape[1]], 2)
    return q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)


def _row_sequence(p, r):
    return torch.cat([_query(p, i) for i in range(r - r % 2, r - r % 2 + 2)], 0)


@case("G16", "G", query, _row_sequence, grid=True)
def sequence_in_row_group(ctx, q):
    """The tokens of the row group's ranks one after the other: dim 0."""
    return sp.all_gather(q, 0, ctx.row[0])


@case("G16 heads in row group", "G", query, None, grid=True)
def heads_in_row_group(ctx, q):
    return sp.all_gather(q, 1, ctx.row[0])


@case(
    "G17",
    "G",
    query,
    lambda p, r: (
        _whole_query(p)
        .unflatten(1, (p.geometry.world_size, p.geometry.heads_per_rank))
        .transpose(1, 2)
        .flatten(1, 2)
    ),
)
def key_head_major(ctx, q):
    """After the gather, heads are re-ordered so that equal local heads are
    neighbours.
    """
    whole = sp.ag(ctx, q, 1).unflatten(1, (ctx.world_size, ctx.heads_per_rank))
    return whole.transpose(1, 2).flatten(1, 2)


def _padded_result(p, r):
    return torch.nn.functional.pad(_whole_query(p), (0, 0, 0, 64 - p.geometry.heads))


def padded_heads(ctx: Context, q: Tensor, *, how: str) -> Tensor:
    """The kernel wants 64 heads: the gathered ones and zeros behind them."""
    whole = sp.ag(ctx, q, 1)
    more = 64 - ctx.heads
    if how == "pad":
        return torch.nn.functional.pad(whole, (0, 0, 0, more))
    if how == "cat":
        zeros = whole.new_zeros((whole.shape[0], more, whole.shape[2]))
        return torch.cat([whole, zeros], 1)
    buffer = whole.new_zeros((whole.shape[0], 64, whole.shape[2]))
    buffer[:, : ctx.heads] = whole
    return buffer


for _how in ("pad", "cat", "buffer"):
    add(f"G18 {_how}", "G", partial(padded_heads, how=_how), query, _padded_result)
