"""Pieces that the recipes are put together from, each spelled in the ways found in the
field.

T tokens, h heads of a rank, H = N * h heads, D head dim; ``l`` is an LSE [T, H] and
``L`` the gathered LSEs [N, T, H].
"""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from .cases import Context

all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
# Torch 2.11 breaks the graph where its gather joins another dim than the first.
_TRACES_GATHER_DIMS = torch.__version__.split(".")[:2] != ["2", "11"]
reduce_scatter = (
    getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
)
all_gather_coalesced = (
    getattr(funcol, "all_gather_single_coalesced", None)
    or funcol.all_gather_into_tensor_coalesced
)
reduce_scatter_coalesced = (
    getattr(funcol, "reduce_scatter_single_coalesced", None)
    or funcol.reduce_scatter_tensor_coalesced
)


def ag(ctx: Context, x: Tensor, dim: int = 0) -> Tensor:
    if dim and not _TRACES_GATHER_DIMS:
        parts = all_gather(x, 0, ctx.group_name).chunk(ctx.world_size, 0)
        return torch.cat(parts, dim)
    return all_gather(x, dim, ctx.group_name)


def rs(ctx: Context, x: Tensor, dim: int = 1, op: str = "sum") -> Tensor:
    return reduce_scatter(x, op, dim, ctx.group_name)


def ar(ctx: Context, x: Tensor, op: str = "sum") -> Tensor:
    return funcol.all_reduce(x, op, ctx.group_name)


def a2a(ctx: Context, x: Tensor, splits: list[int] | None = None) -> Tensor:
    return funcol.all_to_all_single(x, splits, splits, ctx.group_name)


# One tensor of every rank, stacked [N, ...].


def stack_view(ctx: Context, x: Tensor) -> Tensor:
    return ag(ctx, x.contiguous()).view(ctx.world_size, *x.shape)


def stack_reshape(ctx: Context, x: Tensor) -> Tensor:
    return ag(ctx, x).reshape((ctx.world_size, *x.shape))


def stack_unsqueeze(ctx: Context, x: Tensor) -> Tensor:
    return ag(ctx, x[None])


def stack_chunks(ctx: Context, x: Tensor) -> Tensor:
    return torch.stack(ag(ctx, x).chunk(ctx.world_size, 0), 0)


def stack_unflatten(ctx: Context, x: Tensor) -> Tensor:
    return ag(ctx, x).unflatten(0, (ctx.world_size, x.shape[0]))


def stack_into(ctx: Context, x: Tensor) -> Tensor:
    gathered = x.new_empty((ctx.world_size * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(gathered, x, group=ctx.group)
    return gathered.view(ctx.world_size, *x.shape)


def stack_into_stacked(ctx: Context, x: Tensor) -> Tensor:
    gathered = torch.empty((ctx.world_size, *x.shape), dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=ctx.group)
    return gathered


def stack_list(ctx: Context, x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(ctx.world_size)]
    dist.all_gather(parts, x, group=ctx.group)
    return torch.stack(parts, 0)


def stack_zeros(ctx: Context, x: Tensor) -> Tensor:
    """Own slot of a zero buffer, summed over the ranks."""
    slots = x.new_zeros((ctx.world_size, *x.shape))
    slots[ctx.rank] = x
    return ar(ctx, slots)


STACKS: dict[str, Callable[[Context, Tensor], Tensor]] = {
    "view": stack_view,
    "reshape": stack_reshape,
    "unsqueeze": stack_unsqueeze,
    "chunks": stack_chunks,
    "unflatten": stack_unflatten,
    "into": stack_into,
    "into stacked": stack_into_stacked,
    "list": stack_list,
    "zero slots": stack_zeros,
}


# Own heads of a full tensor [T, H, ...].


def _bounds(ctx: Context) -> tuple[int, int]:
    return ctx.rank * ctx.heads_per_rank, (ctx.rank + 1) * ctx.heads_per_rank


def own(ctx: Context, x: Tensor) -> Tensor:
    start, end = _bounds(ctx)
    return x[:, start:end]


OWN: dict[str, Callable[[Context, Tensor], Tensor]] = {
    "slice": own,
    "narrow": lambda ctx, x: x.narrow(
        1, ctx.rank * ctx.heads_per_rank, ctx.heads_per_rank
    ),
    "chunk": lambda ctx, x: x.chunk(ctx.world_size, 1)[ctx.rank],
    "split": lambda ctx, x: torch.split(x, ctx.heads_per_rank, dim=1)[ctx.rank],
    "tensor_split": lambda ctx, x: x.tensor_split(ctx.world_size, dim=1)[ctx.rank],
    "index_select": lambda ctx, x: x.index_select(1, torch.arange(*_bounds(ctx))),
    "view select": lambda ctx, x: x.unflatten(1, (ctx.world_size, ctx.heads_per_rank))[
        :, ctx.rank
    ],
    "contiguous": lambda ctx, x: own(ctx, x).contiguous(),
    "clone": lambda ctx, x: own(ctx, x).clone(),
}


# Sum over ranks, own heads of it.


def scatter_funcol(ctx: Context, x: Tensor) -> Tensor:
    return rs(ctx, x, 1)


def scatter_movedim(ctx: Context, x: Tensor) -> Tensor:
    return rs(ctx, x.movedim(0, 1).contiguous(), 0).movedim(0, 1)


def scatter_movedim_contiguous(ctx: Context, x: Tensor) -> Tensor:
    return rs(ctx, x.transpose(0, 1).contiguous(), 0).transpose(0, 1).contiguous()


def scatter_view(ctx: Context, x: Tensor) -> Tensor:
    t, _, d = x.shape
    by_rank = x.view(t, ctx.world_size, ctx.heads_per_rank, d).permute(1, 0, 2, 3)
    return rs(ctx, by_rank.contiguous(), 0).squeeze(0)


def scatter_chunks(ctx: Context, x: Tensor) -> Tensor:
    return rs(ctx, torch.cat(x.chunk(ctx.world_size, 1), 0), 0)


def scatter_into(ctx: Context, x: Tensor) -> Tensor:
    by_head = x.movedim(1, 0).contiguous()
    out = by_head.new_empty((ctx.heads_per_rank, *by_head.shape[1:]))
    dist.reduce_scatter_tensor(out, by_head, group=ctx.group)
    return out.movedim(0, 1)


def scatter_flat_last(ctx: Context, x: Tensor) -> Tensor:
    """Heads and head dim flattened, scattered along the last dim."""
    return rs(ctx, x.flatten(1), 1).view(-1, ctx.heads_per_rank, x.shape[2])


def scatter_all_reduce(ctx: Context, x: Tensor) -> Tensor:
    return own(ctx, ar(ctx, x))


def scatter_all_reduce_in_place(ctx: Context, x: Tensor) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x, group=ctx.group)
    return own(ctx, x).contiguous()


def scatter_a2a_sum(ctx: Context, x: Tensor) -> Tensor:
    return a2a(ctx, head_shards(ctx, x)).sum(0)


def scatter_gather_sum(ctx: Context, x: Tensor) -> Tensor:
    return own(ctx, ag(ctx, x[None]).sum(0))


SCATTERS: dict[str, Callable[[Context, Tensor], Tensor]] = {
    "rs": scatter_funcol,
    "rs movedim": scatter_movedim,
    "rs transpose": scatter_movedim_contiguous,
    "rs view": scatter_view,
    "rs chunks": scatter_chunks,
    "rs into": scatter_into,
    "rs flat": scatter_flat_last,
    "ar": scatter_all_reduce,
    "ar in place": scatter_all_reduce_in_place,
    "a2a sum": scatter_a2a_sum,
    "ag sum": scatter_gather_sum,
}


# Weight of the own shard [T, H] from its LSE and all LSEs.


def _max(L: Tensor) -> Tensor:
    return L.max(0)[0]


def w_max_sum_log(ctx: Context, l: Tensor, L: Tensor) -> Tensor:
    m = L.amax(0)
    return torch.exp(l - (m + torch.log(torch.exp(L - m).sum(0))))


def w_max_pair(ctx: Context, l: Tensor, L: Tensor) -> Tensor:
    m = L.max(dim=0).values
    return (l - (m + (L - m.unsqueeze(0)).exp().sum(dim=0).log())).exp()


def w_logsumexp(ctx: Context, l: Tensor, L: Tensor) -> Tensor:
    return torch.exp(l - torch.logsumexp(L, dim=0))


def w_softmax_row(ctx: Context, l: Tensor, L: Tensor) -> Tensor:
    return torch.softmax(L, 0)[ctx.rank]


def w_log_softmax_row(ctx: Context, l: Tensor, L: Tensor) -> Tensor:
    return torch.log_softmax(L, 0)[ctx.rank].exp()


def w_exp_div(ctx: Context, l: Tensor, L: Tensor) -> Tensor:
    m = L.amax(0)
    return torch.exp(l - m) / torch.exp(L - m).sum(0)


def w_exp_row_div(ctx: Context, l: Tensor, L: Tensor) -> Tensor:
    e = torch.exp(L - L.amax(0, keepdim=True))
    return e[ctx.rank] / e.sum(0)


def w_reciprocal(ctx: Context, l: Tensor, L: Tensor) -> Tensor:
    m = L.amax(0)
    return torch.exp(l - m) * torch.reciprocal(torch.exp(L - m).sum(0))


def w_one_over(ctx: Context, l: Tensor, L: Tensor) -> Tensor:
    """1 / sum of exp of differences: no max at all, stable by pairs."""
    return 1.0 / torch.exp(L - l).sum(0)


def w_no_max(ctx: Context, l: Tensor, L: Tensor) -> Tensor:
    z = torch.exp(L)
    return (z / z.sum(0))[ctx.rank]


def w_logaddexp(ctx: Context, l: Tensor, L: Tensor) -> Tensor:
    g = L[0]
    for n in range(1, ctx.world_size):
        g = torch.logaddexp(g, L[n])
    return torch.exp(l - g)


def w_sigmoid(ctx: Context, l: Tensor, L: Tensor) -> Tensor:
    """Weight against the rest: sigmoid(l - logsumexp of the other ranks)."""
    others = [L[n] for n in range(ctx.world_size) if n != ctx.rank]
    return torch.sigmoid(l - torch.logsumexp(torch.stack(others), 0))


def w_exp2_scaled(ctx: Context, l: Tensor, L: Tensor) -> Tensor:
    scale = 1.4426950408889634
    m = L.amax(0) * scale
    return torch.exp2(l * scale - m) / torch.exp2(L * scale - m).sum(0)


WEIGHTS: dict[str, Callable[[Context, Tensor, Tensor], Tensor]] = {
    "max sum log": w_max_sum_log,
    "max pair": w_max_pair,
    "logsumexp": w_logsumexp,
    "softmax row": w_softmax_row,
    "log_softmax row": w_log_softmax_row,
    "exp div": w_exp_div,
    "exp row div": w_exp_row_div,
    "reciprocal": w_reciprocal,
    "one over": w_one_over,
    "no max": w_no_max,
    "logaddexp": w_logaddexp,
    "sigmoid of the rest": w_sigmoid,
    "exp2 scaled": w_exp2_scaled,
}


# Head shards for an all-to-all: [T, H, ...] -> [N, T, h, ...].


def head_shards(ctx: Context, x: Tensor) -> Tensor:
    t, _, *rest = x.shape
    by_rank = x.view(t, ctx.world_size, ctx.heads_per_rank, *rest)
    return by_rank.transpose(0, 1).contiguous()


def head_shards_permute(ctx: Context, x: Tensor) -> Tensor:
    t, _, *rest = x.shape
    by_rank = x.reshape(t, ctx.world_size, ctx.heads_per_rank, *rest)
    return by_rank.permute(1, 0, *range(2, by_rank.dim())).contiguous()


def head_shards_stack(ctx: Context, x: Tensor) -> Tensor:
    return torch.stack(x.chunk(ctx.world_size, 1), 0)


SHARDS: dict[str, Callable[[Context, Tensor], Tensor]] = {
    "view": head_shards,
    "permute": head_shards_permute,
    "stack": head_shards_stack,
}


def exchange(ctx: Context, x: Tensor) -> Tensor:
    return a2a(ctx, x)


def exchange_splits(ctx: Context, x: Tensor) -> Tensor:
    return a2a(ctx, x, [1] * ctx.world_size)


def exchange_flat(ctx: Context, x: Tensor) -> Tensor:
    return a2a(ctx, x.view(-1)).view(x.shape)


def exchange_in_place(ctx: Context, x: Tensor) -> Tensor:
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=ctx.group)
    return received


def permute(ctx: Context, x: Tensor, order: list[int]) -> Tensor:
    """``x`` sent to rank ``order[rank]``; permute_tensor counts elements, so it goes
    flat.
    """
    return funcol.permute_tensor(x.reshape(-1), order, ctx.group).view(x.shape)


def exchange_permute_tensor(ctx: Context, x: Tensor) -> Tensor:
    """Shards rotated by one step at a time; own shard stays."""
    n = ctx.world_size
    parts: list[Tensor | None] = [None] * n
    parts[ctx.rank] = x[ctx.rank]
    for step in range(1, n):
        to = (ctx.rank + step) % n
        order = [(r + step) % n for r in range(n)]
        parts[(ctx.rank - step) % n] = permute(ctx, x[to], order)
    return torch.stack(parts, 0)


EXCHANGES: dict[str, Callable[[Context, Tensor], Tensor]] = {
    "a2a": exchange,
    "splits": exchange_splits,
    "flat": exchange_flat,
    "in place": exchange_in_place,
    "permute_tensor": exchange_permute_tensor,
}
