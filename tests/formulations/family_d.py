"""Family D: gather all partials and LSEs, combine locally."""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from . import spelling as sp
from .cases import Context, add, case
from .combining import COMBINES


def merge(
    ctx: Context,
    o: Tensor,
    l: Tensor,
    *,
    stack: str = "unsqueeze",
    combine: str = "softmax",
    own: str = "",
    cast: bool = False,
):
    O, L = sp.STACKS[stack](ctx, o), sp.STACKS[stack](ctx, l)
    out = COMBINES[combine](O.float() if cast else O, L)
    out = out.to(o.dtype) if cast else out
    return sp.OWN[own](ctx, out) if own else out


add("FC-51", "D", partial(merge, combine="sigmoid fold"), result="FH")
add("FC-52", "D", partial(merge, combine="log1p fold"), result="FH")
for _name in (
    "max min fold",
    "maximum fold",
    "softplus fold",
    "logaddexp fold",
    "log exp fold",
):
    add(f"FC-52 {_name}", "D", partial(merge, combine=_name), result="FH")
add("FC-54", "D", partial(merge, combine="online max"), result="FH")
add("FC-56", "D", partial(merge, combine="python sum"), result="FH")
add("FC-56 python loop", "D", partial(merge, combine="python loop"), result="FH")
add("FC-56 own", "D", partial(merge, combine="python sum", own="contiguous"))

_TRACEABLE = [name for name in sp.STACKS if name != "into stacked"]
for _stack, _combine, _own in zip(
    cycle(_TRACEABLE), COMBINES, cycle([*sp.OWN, ""]), strict=False
):
    add(
        f"D/{_stack}/{_combine}/{_own or 'all heads'}",
        "D",
        partial(merge, stack=_stack, combine=_combine, own=_own, cast=True),
        result="HS" if _own else "FH",
    )


@case("FC-51 wrapping", "D", result="FH")
def sigmoid_fold_from_own_rank(ctx, o, l):
    """Folded in ring order: own shard first, then the predecessors."""
    O, L = sp.ag(ctx, o[None]), sp.ag(ctx, l[None])
    order = [(ctx.rank - step) % ctx.world_size for step in range(ctx.world_size)]
    return COMBINES["sigmoid fold"](
        torch.stack([O[n] for n in order]), torch.stack([L[n] for n in order])
    )


@case("FC-51 own partial", "D", result="FH")
def sigmoid_fold_own_partial(ctx, o, l):
    """As the ring does it: the own shard is not read back from the gather."""
    O, L = sp.ag(ctx, o[None]), sp.ag(ctx, l[None])
    a, z = o, l
    for step in range(1, ctx.world_size):
        n = (ctx.rank + step) % ctx.world_size
        a = a - torch.sigmoid(L[n] - z)[..., None] * (a - O[n])
        z = z - torch.nn.functional.logsigmoid(z - L[n])
    return a


@case("FC-51 trailing one", "D", result="FH+lse")
def sigmoid_fold_trailing_one(ctx, o, l):
    """diffusers and torch context parallel: the LSE keeps a trailing one, both are
    fp32.
    """
    O = sp.ag(ctx, o[None]).to(torch.float32)
    L = sp.ag(ctx, l[None]).unsqueeze(-1)
    out, lse = O[0], L[0]
    for n in range(1, ctx.world_size):
        block_out, block_lse = O[n], L[n]
        out = out - torch.nn.functional.sigmoid(block_lse - lse) * (out - block_out)
        lse = lse - torch.nn.functional.logsigmoid(lse - block_lse)
    return out.to(o.dtype), lse.squeeze(-1)


@case("FC-51 ring", "D", result="FH")
def ring_of_permutes(ctx, o, l):
    """Partials travel around the ring one step at a time instead of being gathered."""
    n = ctx.world_size
    order = [(r + 1) % n for r in range(n)]
    a, z, o_n, l_n = o, l, o, l
    for _ in range(1, n):
        o_n, l_n = sp.permute(ctx, o_n, order), sp.permute(ctx, l_n, order)
        new = torch.logaddexp(z, l_n)
        a = a * torch.exp(z - new)[..., None] + o_n * torch.exp(l_n - new)[..., None]
        z = new
    return a


def one_gather(
    ctx: Context, o: Tensor, l: Tensor, *, split: str, order: str = "o first"
) -> Tensor:
    d = o.shape[-1]
    x = [o.float(), l[..., None]]
    X = sp.ag(ctx, torch.cat(x if order == "o first" else x[::-1], -1)[None])
    if order != "o first":
        L, O = X[..., 0], X[..., 1:]
    elif split == "split":
        O, L = torch.split(X, [d, 1], -1)
        L = L.squeeze(-1)
    elif split == "slices":
        O, L = X[..., :-1], X[..., -1:]
        L = L[..., 0]
    else:
        O, L = X[..., :d], X.select(-1, d)
    w = torch.exp(L - torch.logsumexp(L, 0))
    return (O * w[..., None]).sum(0).to(o.dtype)


add("FC-53", "D", partial(one_gather, split="split"), result="FH")
add("FC-53 slices", "D", partial(one_gather, split="slices"), result="FH")
add("FC-53 select", "D", partial(one_gather, split="select"), result="FH")
add(
    "FC-53 lse first",
    "D",
    partial(one_gather, split="", order="lse first"),
    result="FH",
)


@case("FC-53 view", "D", result="FH")
def one_gather_view(ctx, o, l):
    x = torch.cat([o.to(l.dtype), l.unsqueeze(-1)], dim=-1)
    X = sp.ag(ctx, x).view(ctx.world_size, -1, *x.shape[1:])
    O, L = X[..., :-1], X[..., -1:]
    e = torch.exp(L - L.max(dim=0, keepdim=True)[0])
    return ((O * e).sum(0) / e.sum(0)).to(o.dtype)


@case("FC-53 own", "D")
def one_gather_own(ctx, o, l):
    return sp.own(ctx, one_gather(ctx, o, l, split="split"))


@case("FC-53 head major", "D", "head major", "HM full")
def one_gather_head_major(ctx, o, l):
    X = sp.ag(ctx, torch.cat([o.float(), l[..., None]], -1)[None])
    O, L = X.split([o.shape[-1], 1], -1)
    return (O * torch.softmax(L, 0)).sum(0).to(o.dtype)


@case("FC-53 coalesced", "D", result="FH")
def coalesced_gather(ctx, o, l):
    O, L = sp.all_gather_coalesced([o, l], ctx.group_name)
    O, L = O.view(ctx.world_size, *o.shape), L.view(ctx.world_size, *l.shape)
    return COMBINES["softmax"](O, L)


def online_pairs(ctx: Context, o: Tensor, mx: Tensor, sm: Tensor) -> Tensor:
    """MindSpeed: (max, sum) pairs updated shard by shard with ratio weights."""
    O, M, S = (sp.ag(ctx, x[None]) for x in (o, mx, sm))
    out, m, s = O[0], M[0], S[0]
    for n in range(1, ctx.world_size):
        top = torch.maximum(m, M[n])
        p, q = s * torch.exp(m - top), S[n] * torch.exp(M[n] - top)
        t = p + q
        out = out * (p / t)[..., None] + O[n] * (q / t)[..., None]
        m, s = top, t
    return out


add("FC-55", "D", online_pairs, "o, max, sum", "FH")


@case("FC-55 one pass", "D", "o, max, sum", "FH")
def pairs_at_once(ctx, o, mx, sm):
    O, M, S = (sp.ag(ctx, x[None]) for x in (o, mx, sm))
    k = S * torch.exp(M - M.amax(0))
    return (O * (k / k.sum(0))[..., None]).sum(0)


@case("FC-55 accumulators", "D", "accumulator, max, sum", "FH+lse")
def accumulator_pairs(ctx, a, mx, sm):
    """Paged attention v2: accumulators, exp sums and max logits of every partition."""
    A, M, S = (sp.ag(ctx, x[None]) for x in (a, mx, sm))
    top = M.max(dim=0)[0]
    k = torch.exp(M - top)
    total = (S * k).sum(0)
    return (A * k[..., None]).sum(0) / total[..., None], top + torch.log(total)


def own_heads_first(
    ctx: Context, o: Tensor, l: Tensor, *, combine: str, own: str
) -> Tensor:
    """Everything is gathered, own heads are cut out before the combine."""
    O = sp.ag(ctx, o[None])
    L = sp.ag(ctx, l[None])
    cut = sp.OWN[own]
    O = torch.stack([cut(ctx, x) for x in O.unbind(0)])
    L = torch.stack([cut(ctx, x) for x in L.unbind(0)])
    return COMBINES[combine](O, L)


add("FC-57", "D", partial(own_heads_first, combine="softmax", own="slice"))
add("FC-57 chunk", "D", partial(own_heads_first, combine="max exp div", own="chunk"))


@case("FC-57 sliced stack", "D")
def own_heads_of_stack(ctx, o, l):
    start = ctx.rank * ctx.heads_per_rank
    mine = slice(start, start + ctx.heads_per_rank)
    O, L = sp.stack_view(ctx, o)[:, :, mine], sp.stack_view(ctx, l)[:, :, mine]
    return (torch.softmax(L, 0)[..., None] * O).sum(0)


@case("FC-57 tokens", "D", result="TS", token_multiple_of_ranks=True)
def own_tokens_of_stack(ctx, o, l):
    O = sp.stack_view(ctx, o).chunk(ctx.world_size, 1)[ctx.rank]
    L = sp.stack_view(ctx, l).chunk(ctx.world_size, 1)[ctx.rank]
    return COMBINES["logsumexp"](O, L)


@case("FC-58 [B,H,S,D]", "D", "[B,H,S,D]", "[B,H,S,D]")
def gather_four_dims(ctx, o, l):
    O, L = sp.ag(ctx, o[None]), sp.ag(ctx, l[None])
    return (O * torch.exp(L - torch.logsumexp(L, 0)).unsqueeze(-1)).sum(0)


@case("FC-58 flattened", "D", result="FH flat")
def gather_flat_output(ctx, o, l):
    O, L = sp.stack_view(ctx, o.flatten(1)), sp.stack_view(ctx, l)
    O = O.view(ctx.world_size, *o.shape)
    return COMBINES["softmax"](O, L).to(o.dtype).flatten(1)


@case("FC-58 last dim", "D", result="FH")
def gather_on_last_dim(ctx, o, l):
    """Rank axis last: outputs [T, H, D, N] and LSEs [T, H, N]."""
    O = sp.ag(ctx, o[..., None], 3)
    L = sp.ag(ctx, l[..., None], 2)
    return (O * torch.softmax(L, -1)[..., None, :]).sum(-1)


@case("FC-58 token dim", "D", result="FH")
def gather_rank_axis_second(ctx, o, l):
    """Rank axis second: [T, N, H, D]."""
    O = sp.ag(ctx, o[:, None], 1)
    L = sp.ag(ctx, l[:, None], 1)
    w = torch.exp(L - torch.logsumexp(L, 1, keepdim=True))
    return torch.einsum("tnhd,tnh->thd", O.float(), w).to(o.dtype)
