"""Gathers of KV rows along dim 0, equal to a rank-ordered concat or a reordering of
it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from . import spelling as sp
from .cases import case
from .inputs import Input, Problem

# KV gathers: rows [t, ...] of every rank in rank order.


def _randn(p: Problem, r: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=p.generator(r)).to(p.geometry.dtype)


def rows(p, r):
    """Latent rows [t, D], t the token count."""
    return [Input(_randn(p, r, p.geometry.num_tokens, p.geometry.head_dim))]


def keys_values(p, r):
    """Keys and values [t, 2, D]."""
    g = p.geometry
    x = _randn(p, r, 2, g.num_tokens, 2, g.head_dim)
    return [Input(x[0].clone()), Input(x[1].clone())]


def _all(inputs, p: Problem, index: int = 0) -> list[Tensor]:
    return [inputs(p, i)[index].tensor for i in range(p.geometry.world_size)]


def _rows_result(p, r):
    return torch.cat(_all(rows, p), 0)


def _kv_result(p, r):
    return tuple(torch.cat(_all(keys_values, p, i), 0) for i in (0, 1))


_KV = {"inputs": keys_values, "result": _kv_result}


@case("K0", "K", rows, _rows_result)
def plain(ctx, x):
    return sp.ag(ctx, x)


@case("K0 into", "K", rows, _rows_result)
def plain_into(ctx, x):
    return sp.stack_into(ctx, x).flatten(0, 1)


@case("K0 stack", "K", rows, lambda p, r: torch.stack(_all(rows, p), 0))
def plain_stack(ctx, x):
    return sp.ag(ctx, x[None])


def _per_request(p, r):
    stacked = torch.stack(_all(rows, p), 0)
    return torch.cat([stacked[:, :1].flatten(0, 1), stacked[:, 1:].flatten(0, 1)], 0)


@case("K1", "K", rows, _per_request)
def per_request(ctx, x):
    """Packed rows of two requests (one row, the rest), put back in request order."""
    stacked = sp.ag(ctx, x).view(ctx.world_size, *x.shape)
    return torch.cat([stacked[:, :1].flatten(0, 1), stacked[:, 1:].flatten(0, 1)], 0)


@case("K2", "K", **_KV)
def flattened_pair(ctx, k, v):
    """Keys and values as one flat buffer."""
    flat = sp.ag(ctx, torch.cat([k.flatten(), v.flatten()])[None])
    whole_k, whole_v = flat.chunk(2, 1)
    return whole_k.reshape(-1, *k.shape[1:]), whole_v.reshape(-1, *v.shape[1:])


@case("K3", "K", **_KV)
def stacked_pair(ctx, k, v):
    whole = sp.ag(ctx, torch.stack([k, v])[None])  # [N, 2, t, 2, D]
    return whole[:, 0].flatten(0, 1), whole[:, 1].flatten(0, 1)


@case("K3 permute", "K", **_KV)
def stacked_pair_permuted(ctx, k, v):
    whole = sp.ag(ctx, torch.stack([k, v])).view(ctx.world_size, 2, *k.shape)
    whole = whole.permute(1, 0, 2, 3, 4).reshape(2, -1, *k.shape[1:])
    return whole[0], whole[1]


@case("K3 last dim", "K", **_KV)
def pair_in_last_dim(ctx, k, v):
    return sp.ag(ctx, torch.cat([k, v], -1)).split([k.shape[-1], v.shape[-1]], -1)


@case("K3 apart", "K", **_KV)
def pair_apart(ctx, k, v):
    return sp.ag(ctx, k), sp.ag(ctx, v)


@case("K3 coalesced", "K", **_KV)
def pair_coalesced(ctx, k, v):
    return tuple(sp.all_gather_coalesced([k, v], ctx.group_name))


def sequence(p, r):
    """[2, 6, D]: a batch of two, the rows along dim 1."""
    return [Input(_randn(p, r, 2, 6, p.geometry.head_dim), None)]


def _zigzag(p, r):
    n = p.geometry.world_size
    halves = [h for x in _all(sequence, p) for h in x.transpose(0, 1).chunk(2, 0)]
    order = [2 * i for i in range(n)] + [2 * i + 1 for i in reversed(range(n))]
    return torch.cat([halves[i] for i in order], 0)


@case("K4", "K", sequence, _zigzag)
def zigzag(ctx, x):
    """Each rank holds a head half and a tail half; an index brings them into order."""
    n, t = ctx.world_size, x.shape[1]
    whole = sp.ag(ctx, x.movedim(1, 0).contiguous())
    half = t // 2
    starts = [i * t for i in range(n)] + [i * t + half for i in reversed(range(n))]
    index = torch.cat([torch.arange(s, s + half) for s in starts])
    return whole.index_select(0, index)


def _round_robin(p, r):
    return torch.stack(_all(rows, p), 0).transpose(0, 1).flatten(0, 1)


@case("K5", "K", rows, _round_robin)
def round_robin(ctx, x):
    """Row i lives on rank i % N."""
    stacked = sp.ag(ctx, x).view(ctx.world_size, *x.shape)
    return stacked.transpose(0, 1).reshape(-1, x.shape[1])


@case("K5 dim 1", "K", rows, _round_robin)
def round_robin_dim_1(ctx, x):
    return sp.ag(ctx, x[:, None], 1).flatten(0, 1)


def pages(p, r):
    """Pages [P, 4, D], P the token count; a page's rows are split over the ranks."""
    return [Input(_randn(p, r, p.geometry.num_tokens, 4, p.geometry.head_dim))]


@case(
    "K6",
    "K",
    pages,
    lambda p, r: torch.stack(_all(pages, p), 0).movedim(0, 2).flatten(1, 2),
)
def page_interleave(ctx, x):
    """Within a page, row i lives on rank i % N."""
    stacked = sp.ag(ctx, x).view(ctx.world_size, *x.shape)
    return stacked.movedim(0, 2).flatten(1, 2)


@case("K6 heads", "K", pages, lambda p, r: torch.cat(_all(pages, p), 1))
def page_blocks(ctx, x):
    """Within a page, the ranks' rows one after the other."""
    return sp.ag(ctx, x, 1)


@case("K8", "K", pages, lambda p, r: torch.cat(_all(pages, p), 1))
def list_and_cat(ctx, x):
    parts = [torch.empty_like(x) for _ in range(ctx.world_size)]
    dist.all_gather(parts, x, group=ctx.group)
    return torch.cat(parts, dim=1)


def uneven_rows(p, r):
    """Rank r holds r rows less than 6."""
    return [Input(_randn(p, r, 6 - r, p.geometry.head_dim), None)]


@case("K9", "K", uneven_rows, lambda p, r: torch.cat(_all(uneven_rows, p), 0))
def padded_rows(ctx, x):
    lengths = [6 - r for r in range(ctx.world_size)]
    padded = torch.nn.functional.pad(x, (0, 0, 0, 6 - x.shape[0]))
    whole = sp.ag(ctx, padded).view(ctx.world_size, 6, -1)
    return torch.cat([whole[r, :k] for r, k in enumerate(lengths)], 0)


@case(
    "K9 new buffer", "K", uneven_rows, lambda p, r: torch.cat(_all(uneven_rows, p), 0)
)
def padded_rows_in_buffer(ctx, x):
    """The padded buffer is allocated and written, not padded."""
    buffer = x.new_zeros((6, x.shape[1]))
    buffer[: x.shape[0]] = x
    parts = sp.stack_into(ctx, buffer).unbind(0)
    return torch.cat([part[: 6 - r] for r, part in enumerate(parts)], 0)
