"""Families E and F: KV gathers that attend once, and hybrids of the merge with other
steps.
"""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol

from . import family_a, family_b, family_c
from . import spelling as sp
from .cases import EQUAL_OR_REFUSED, GATHER_ONLY, LSE_ONLY, case
from .combining import COMBINES


def _pair(o1, l1, o2, l2):
    lse = torch.logaddexp(l1, l2)
    return o1 * torch.exp(l1 - lse)[..., None] + o2 * torch.exp(l2 - lse)[..., None]


@case("FC-58", "F", "ol, new token", "with new token")
def context_and_new_tokens(ctx, o, l, o_new, l_new):
    """The merged context is folded with the new tokens' attention of the own heads."""
    g = torch.logsumexp(sp.stack_view(ctx, l), 0)
    context = sp.rs(ctx, o * torch.exp(l - g)[..., None])
    return _pair(context, sp.own(ctx, g), o_new, l_new).to(o.dtype)


@case("FC-58 a2a", "F", "ol, new token", "with new token")
def context_and_new_tokens_a2a(ctx, o, l, o_new, l_new):
    context, lse = family_c.merge(ctx, o, l, returns_lse=True)
    top = torch.maximum(lse, l_new)
    p, q = torch.exp(lse - top)[..., None], torch.exp(l_new - top)[..., None]
    return ((context * p + o_new * q) / (p + q)).to(o.dtype)


@case("FC-58 sigmoid", "F", "ol, new token", "with new token")
def context_and_new_tokens_sigmoid(ctx, o, l, o_new, l_new):
    m = sp.ar(ctx, l, "max")
    g = m + torch.log(sp.ar(ctx, torch.exp(l - m)))
    context = sp.rs(ctx, o * torch.exp(l - g)[..., None])
    share = torch.sigmoid(sp.own(ctx, g) - l_new)[..., None]
    return share * context + (1 - share) * o_new


@case("FC-58 full", "F", "ol, new token", "with new token")
def context_and_new_tokens_full(ctx, o, l, o_new, l_new):
    context, lse = family_b.tree(ctx, o, l, returns_lse=True)
    return _pair(sp.own(ctx, context), sp.own(ctx, lse), o_new, l_new)


@case("FC-58 sink", "F", "ol, sink", "with sink")
def sink_afterwards(ctx, o, l, sink):
    """An attention sink has no value: it only takes its share of the weight, after the
    merge.
    """
    g = torch.logsumexp(sp.stack_view(ctx, l), 0)
    share = torch.sigmoid(g - sink)
    out = sp.rs(ctx, o * torch.exp(l - g)[..., None])
    return out * sp.own(ctx, share)[..., None]


@case("FC-58 sink on rank 0", "F", "ol, sink", "with sink", expect=LSE_ONLY)
def sink_folded_into_lse(ctx, o, l, sink):
    """The sink enters the global LSE before the weights are formed."""
    L = torch.cat([sp.stack_view(ctx, l), sink.expand(1, *l.shape)], 0)
    return sp.rs(ctx, o * torch.exp(l - torch.logsumexp(L, 0))[..., None])


@case("FC-58 two sites", "F", "ol", "two merges")
def two_sites(ctx, o, l):
    """Two merges in one graph; the second one's partial depends on the first one's
    result.
    """
    first = family_a.merge(ctx, o, l)
    again = o * sp.ag(ctx, first.to(o.dtype), 1)
    return family_c.merge(ctx, again, l + 1), first


_GRID = {"grid": True}


@case("FC-59", "F", result="row heads", **_GRID, expect=EQUAL_OR_REFUSED)
def two_level(ctx, o, l):
    """All-to-all inside the row group, all-gather inside the column group, one merge.

    Heads are scattered over the row group only: [T, H / 2, D].
    """
    row, _, n_row = ctx.row
    column, _, n_column = ctx.column
    x = (
        torch.cat([o.float(), l[..., None]], -1).permute(1, 2, 0).contiguous()
    )  # [H, D+1, T]
    x = funcol.all_to_all_single(x, None, None, row)
    x = sp.all_gather(x, 0, column)
    x = x.view(n_column * n_row, -1, *x.shape[1:]).permute(
        0, 3, 1, 2
    )  # [N, T, H/2, D+1]
    O, L = x.split([o.shape[-1], 1], -1)
    w = torch.exp(L - torch.logsumexp(L, 0, keepdim=True))
    return (O * w).sum(0).to(o.dtype)


@case("FC-59 nested", "F", **_GRID, world_sizes=(4,))
def nested_merges(ctx, o, l):
    """A full merge inside the row group, then a head-scattering one across the
    columns.
    """
    row, _, n_row = ctx.row
    column, column_rank, n_column = ctx.column
    L = sp.all_gather(l, 0, row).view(n_row, *l.shape)
    g = torch.logsumexp(L, 0)
    o = funcol.all_reduce(o * torch.exp(l - g)[..., None], "sum", row)
    L = sp.all_gather(g, 0, column).view(n_column, *g.shape)
    o = funcol.all_reduce(
        o * torch.softmax(L, 0)[column_rank][..., None], "sum", column
    )
    return sp.own(ctx, o)


@case("FC-59 row group only", "F", result="row merge", **_GRID)
def merge_in_sub_group(ctx, o, l):
    """The KV shards are those of the row group, a proper part of the world at 4
    ranks.
    """
    row, _, n_row = ctx.row
    L = sp.all_gather(l, 0, row).view(n_row, *l.shape)
    w = torch.exp(l - torch.logsumexp(L, 0))[..., None]
    return sp.reduce_scatter(o * w, "sum", 1, row)


@case("FC-59 row a2a", "F", result="row merge", **_GRID)
def a2a_in_sub_group(ctx, o, l):
    row, _, n_row = ctx.row
    h = ctx.heads // n_row
    send = lambda x: x.unflatten(1, (n_row, h)).transpose(0, 1).contiguous()  # noqa: E731
    O = funcol.all_to_all_single(send(o), None, None, row)
    L = funcol.all_to_all_single(send(l), None, None, row)
    return COMBINES["softmax"](O, L)


def _attend(query, rows):
    """Latent attention: every head reads the same rows."""
    scores = torch.einsum("thd,kd->thk", query, rows)
    return torch.einsum("thk,kd->thd", scores.softmax(-1), rows)


@case("FC-60", "E", "q, kv rows", "attention", expect=GATHER_ONLY)
def kv_gather_then_attention(ctx, query, rows):
    """The rows of all ranks are gathered and attended once."""
    return _attend(query, sp.ag(ctx, rows))


@case("FC-60 into", "E", "q, kv rows", "attention", expect=GATHER_ONLY)
def kv_gather_into(ctx, query, rows):
    return _attend(query, sp.stack_into(ctx, rows).flatten(0, 1))


@case("FC-60 chunked", "E", "q, kv rows", "attention", expect=GATHER_ONLY)
def kv_gather_per_chunk(ctx, query, rows):
    """Attended once per rank's chunk, folded locally: no merge across ranks."""
    chunks = sp.ag(ctx, rows[None])
    outs, lses = [], []
    for n in range(ctx.world_size):
        scores = torch.einsum("thd,kd->thk", query, chunks[n])
        lses.append(torch.logsumexp(scores, -1))
        outs.append(torch.einsum("thk,kd->thd", scores.softmax(-1), chunks[n]))
    return COMBINES["softmax"](torch.stack(outs), torch.stack(lses))


@case("FC-60 q and merge", "F", "q, kv rows", "attention")
def gather_query_attend_merge(ctx, query, rows):
    """The whole decode step: query gather, attention over the own shard, merge."""
    whole = sp.ag(ctx, query, 1)
    scores = torch.einsum("thd,kd->thk", whole.float(), rows.float())
    l = torch.logsumexp(scores, -1)
    o = torch.einsum("thk,kd->thd", scores.softmax(-1), rows.float()).to(query.dtype)
    return family_a.merge(ctx, o, l).to(query.dtype)


@case("FC-60 q and a2a", "F", "q, kv rows", "attention")
def gather_query_attend_exchange(ctx, query, rows):
    t, h, d = query.shape
    whole = sp.stack_view(ctx, query).movedim(0, 1).reshape(t, ctx.world_size * h, d)
    scores = torch.einsum("thd,kd->thk", whole, rows).float()
    l = torch.logsumexp(scores, -1)
    o = torch.einsum("thk,kd->thd", scores.softmax(-1).to(rows.dtype), rows)
    return family_c.merge(ctx, o, l, cast="after exchange")
