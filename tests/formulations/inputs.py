"""Inputs of the recipes from real attention in float64: partial results over each
rank's shard of keys and values, and the dense result over all of them.
"""

# ruff: noqa: E741  (o and l are the letters of the formulas)

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LN2 = math.log(2.0)


@dataclass(frozen=True)
class Geometry:
    """Sizes of a run; the defaults keep all of T, h, H, D and N apart from each
    other.
    """

    world_size: int
    num_tokens: int
    dtype: torch.dtype = torch.float32
    heads_per_rank: int = 5
    head_dim: int = 8
    keys_per_rank: int = 7

    @property
    def heads(self) -> int:
        return self.world_size * self.heads_per_rank


@dataclass
class Problem:
    """Partial attention of all ranks and its dense counterpart, in float64.

    ``partial_output`` [N, T, H, D], ``row_max`` and ``row_sum`` [N, T, H] (sum of
    exp(score - row_max)), ``output`` [T, H, D], ``lse`` [T, H], natural log.
    """

    geometry: Geometry
    query: Tensor
    partial_output: Tensor
    row_max: Tensor
    row_sum: Tensor
    output: Tensor
    lse: Tensor
    seed: int
    scale: float = 1.0
    empty: Tensor | None = None  # [N, T], True where a rank has no keys for a token

    @property
    def partial_lse(self) -> Tensor:
        return self.row_max + self.row_sum.log()

    def generator(self, rank: int) -> torch.Generator:
        """A source of further inputs; equal on all ranks for ``rank`` -1."""
        return torch.Generator().manual_seed(self.seed * 1000 + rank + 1)


EMPTY_SHARDS, EMPTY_SHARDS_NAN = "empty", "empty with NaN"
SPECIAL = "special"


def make_problem(
    geometry: Geometry, seed: int = 0, *, scale: float = 1.0, empty: str = ""
) -> Problem:
    """Random attention whose ranks carry clearly different weights per row.

    ``scale`` multiplies scores and values. With ``empty`` the last rank has no keys for
    token 0, the first none for token 1, and no rank any for token 2; the partial
    outputs of an empty shard are 0 or NaN, its LSE is -inf. SPECIAL ones are not empty:
    token 0 has LSE 0 on all ranks and zero payload on the first, token 1 has payload
    that is equal on all ranks.
    """
    g = torch.Generator().manual_seed(seed)
    n, k = geometry.world_size, geometry.keys_per_rank
    t, h, d = geometry.num_tokens, geometry.heads, geometry.head_dim
    rand = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)  # noqa: E731
    query = rand(t, h, d) * 0.8
    keys, values = rand(n, k, h, d), rand(n, k, h, d) * scale
    scores = torch.einsum("thd,nkhd->nthk", query, keys) * scale
    none = torch.zeros(n, t, dtype=torch.bool)
    if empty in (EMPTY_SHARDS, EMPTY_SHARDS_NAN):
        none[-1, 0] = True
        none[0, 1:2] = True
        none[:, 2:3] = True
    row_max = scores.amax(-1)
    weights = (scores - row_max[..., None]).exp()
    row_sum = weights.sum(-1)
    partial = torch.einsum("nthk,nkhd->nthd", weights, values) / row_sum[..., None]
    partial[none] = float("nan") if empty == EMPTY_SHARDS_NAN else 0.0
    row_max[none], row_sum[none] = -math.inf, 0.0
    scores[none] = -math.inf
    dense = scores.permute(1, 2, 0, 3).flatten(2)  # [T, H, N * K]
    lse = torch.logsumexp(dense, -1)
    dense = dense.softmax(-1).nan_to_num(nan=0.0)
    output = torch.einsum("thk,khd->thd", dense, values.flatten(0, 1))
    if empty == SPECIAL:
        row_max[:, 0], row_sum[:, 0] = 0.0, 1.0
        partial[0, 0] = 0.0
        partial[:, 1:2] = partial[:1, 1:2].clone()
        levels = row_max + row_sum.log()
        lse = torch.logsumexp(levels, 0)
        output = torch.einsum("nthd,nth->thd", partial, torch.softmax(levels, 0))
    return Problem(
        geometry, query, partial, row_max, row_sum, output, lse, seed, scale,
        none if none.any() else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Input:
    """A tensor of one rank; ``token_dim`` is the dim that grows with the token
    count.
    """

    tensor: Tensor
    token_dim: int | None = 0


def _o(p: Problem, r: int) -> Tensor:
    return p.partial_output[r].to(p.geometry.dtype)


def _l(p: Problem, r: int) -> Tensor:
    return p.partial_lse[r].float()


def _ol(p, r):
    return [Input(_o(p, r)), Input(_l(p, r))]


def _ol2(p, r):
    return [Input(_o(p, r)), Input((p.partial_lse[r] / LN2).float())]


def _o_lt(p, r):
    return [Input(_o(p, r)), Input(_l(p, r).t().contiguous(), 1)]


def _ol1(p, r):
    return [Input(_o(p, r)), Input(_l(p, r)[..., None])]


def _ol_q(p, r):
    """LSE in the dtype of the output, as some kernels return it."""
    return [Input(_o(p, r)), Input(p.partial_lse[r].to(p.geometry.dtype))]


def _hm(p, r):
    return [
        Input(_o(p, r).transpose(0, 1).contiguous(), 1),
        Input(_l(p, r).t().contiguous(), 1),
    ]


def _o4(p, r):
    """[B, H, S, D] and [B, H, S] with B the token count and S == 2 equal positions."""
    return [
        Input(torch.stack([_o(p, r), _o(p, r) * 0.5], 2).contiguous()),
        Input(torch.stack([_l(p, r)] * 2, 2).contiguous()),
    ]


def _o4_seq(p, r):
    """[1, H, S, D] and [1, H, S] with S the token count."""
    return [
        Input(_o(p, r).transpose(0, 1)[None].contiguous(), 2),
        Input(_l(p, r).t()[None].contiguous(), 2),
    ]


def _bshd(p, r):
    """[B, S, H, D] with [B, H, S], as flash attention returns them: B the token count,
    S == 1.
    """
    return [
        Input(_o(p, r)[:, None].contiguous()),
        Input(_l(p, r)[..., None].contiguous()),
    ]


def _stats(p, r):
    return [
        Input(_o(p, r)),
        Input(p.row_max[r].float()),
        Input(p.row_sum[r].float()),
    ]


def _acc(p, r):
    return [
        Input((p.partial_output[r] * p.row_sum[r][..., None]).to(p.geometry.dtype)),
        Input(p.row_max[r].float()),
        Input(p.row_sum[r].float()),
    ]


def _mask(p, r):
    """Partial output, LSE, query_start_loc and local lengths; one request per token.

    Rows of requests without local keys are garbage, which the recipe has to mask.
    """
    o, l = _o(p, r), _l(p, r)
    t = p.geometry.num_tokens
    lengths = torch.full((t,), p.geometry.keys_per_rank, dtype=torch.int32)
    if p.empty is not None:
        lengths[p.empty[r]] = 0
        l[p.empty[r]] = 5.0
    start = torch.arange(t + 1, dtype=torch.int32)
    return [Input(o), Input(l), Input(start, None), Input(lengths, None)]


def _proj(p, r):
    g = p.geometry
    weight = torch.randn(
        (g.heads * g.head_dim, 6), generator=p.generator(-1), dtype=torch.float64
    )
    return [Input(_o(p, r)), Input(_l(p, r)), Input(weight.to(g.dtype) * 0.2, None)]


def _up(p, r):
    g = p.geometry
    weight = torch.randn((g.heads, g.head_dim, 6), generator=p.generator(-1))
    return [Input(_o(p, r)), Input(_l(p, r)), Input(weight.to(g.dtype) * 0.2, None)]


def _new_token(p, r):
    """The merged context plus one more partial for this rank's own heads [T, h, D], [T,
    h].
    """
    g = p.geometry
    own = slice(r * g.heads_per_rank, (r + 1) * g.heads_per_rank)
    o, l = new_token_partial(p)
    return [*_ol(p, r), Input(o[:, own].to(g.dtype)), Input(l[:, own].float())]


def new_token_partial(p: Problem) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and LSE [T, H] over the new tokens, in float64, equal on all
    ranks.
    """
    g = torch.Generator().manual_seed(p.seed + 77)
    o = torch.randn(p.output.shape, generator=g, dtype=torch.float64)
    return o, p.lse + torch.randn(p.lse.shape, generator=g, dtype=torch.float64)


def _sink(p, r):
    g = p.geometry
    return [*_ol(p, r), Input(torch.linspace(-1.0, 1.0, g.heads), None)]


def _q(p, r):
    g = p.geometry
    own = p.query[:, r * g.heads_per_rank : (r + 1) * g.heads_per_rank]
    return [Input(own.to(g.dtype).contiguous())]


def _q_kv(p, r):
    """Own query heads [T, h, D] and this rank's KV rows [6, D]."""
    g = p.geometry
    rows = torch.randn((6, g.head_dim), generator=p.generator(r), dtype=torch.float64)
    return [*_q(p, r), Input(rows.to(g.dtype), None)]


INPUTS: dict[str, Callable[[Problem, int], list[Input]]] = {
    "ol": _ol,
    "ol base 2": _ol2,
    "o [T,H,D], l [H,T]": _o_lt,
    "o [T,H,D], l [T,H,1]": _ol1,
    "ol of o's dtype": _ol_q,
    "head major": _hm,
    "[B,H,S,D]": _o4,
    "[1,H,S,D]": _o4_seq,
    "[B,S,H,D], l [B,H,S]": _bshd,
    "o, max, sum": _stats,
    "accumulator, max, sum": _acc,
    "ol, query_start_loc, lengths": _mask,
    "ol, projection": _proj,
    "ol, value up": _up,
    "ol, new token": _new_token,
    "ol, sink": _sink,
    "q": _q,
    "q, kv rows": _q_kv,
}


def _own(p: Problem, x: Tensor, r: int) -> Tensor:
    h = p.geometry.heads_per_rank
    return x[:, r * h : (r + 1) * h]


def _tokens(p: Problem, x: Tensor, r: int) -> Tensor:
    return x.chunk(p.geometry.world_size, 0)[r]


def _merge_two(o: Tensor, l: Tensor, o2: Tensor, l2: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(l, l2)
    return o * (l - lse).exp()[..., None] + o2 * (l2 - lse).exp()[..., None], lse


def _with_sink(p, r):
    sink = torch.linspace(-1.0, 1.0, p.geometry.heads).double()
    return _own(p, p.output * torch.sigmoid(p.lse - sink)[..., None], r)


def _projected(p, r):
    return p.output.flatten(1) @ _proj(p, r)[2].tensor.double()


def _valued_up(p, r):
    return _own(
        p, torch.einsum("thd,hdv->thv", p.output, _up(p, r)[2].tensor.double()), r
    )


def _row_heads(p, r):
    """Merged over all ranks, heads scattered over the row group of two."""
    return p.output.chunk(2, 1)[r % 2]


def _row_merge(p, r):
    """Merged over and scattered within the row group of two only."""
    row = slice(r - r % 2, r - r % 2 + 2)
    weights = torch.softmax(p.partial_lse[row], 0)[..., None]
    return (weights * p.partial_output[row]).sum(0).chunk(2, 1)[r % 2]


def _two_merges(p, r):
    weights = torch.softmax(p.partial_lse, 0)[..., None]
    second = (weights * p.partial_output * p.output).sum(0)
    return _own(p, second, r), _own(p, p.output, r)


def _attention(p, r):
    """Own query heads against the KV rows of all ranks."""
    n = p.geometry.world_size
    rows = torch.cat([_q_kv(p, s)[1].tensor for s in range(n)]).double()
    scores = torch.einsum("thd,kd->thk", _q(p, r)[0].tensor.double(), rows)
    return torch.einsum("thk,kd->thd", scores.softmax(-1), rows)


# Dense value of what a recipe returns, by result tag: (problem, rank) -> tensor or
# tuple.
RESULTS: dict[str, Callable[[Problem, int], Tensor | tuple[Tensor, ...]]] = {
    "HS": lambda p, r: _own(p, p.output, r),
    "HS+lse": lambda p, r: (_own(p, p.output, r), _own(p, p.lse, r)),
    "HS+full lse": lambda p, r: (_own(p, p.output, r), p.lse),
    "HS+lse2": lambda p, r: (_own(p, p.output, r), _own(p, p.lse, r) / LN2),
    "HS+lse [h,T]": lambda p, r: (_own(p, p.output, r), _own(p, p.lse, r).t()),
    "HS+flags": lambda p, r: (
        _own(p, p.output, r),
        (p.partial_lse.float() > 0).sum(0),
    ),
    "HS flat": lambda p, r: _own(p, p.output, r).flatten(1),
    "HM": lambda p, r: _own(p, p.output, r).transpose(0, 1),
    "HM [1,h,T,D]": lambda p, r: _own(p, p.output, r).transpose(0, 1)[None],
    "HM full": lambda p, r: p.output.transpose(0, 1),
    "FH": lambda p, r: p.output,
    "FH+lse": lambda p, r: (p.output, p.lse),
    "FH flat": lambda p, r: p.output.flatten(1),
    "TS": lambda p, r: _tokens(p, p.output, r),
    "TS+lse": lambda p, r: (_tokens(p, p.output, r), _tokens(p, p.lse, r)),
    "[B,h,S,D]": lambda p, r: torch.stack(
        [_own(p, p.output, r), _own(p, p.output, r) * 0.5], 2
    ),
    "[B,H,S,D]": lambda p, r: torch.stack([p.output, p.output * 0.5], 2),
    "[B,S,h,D]": lambda p, r: _own(p, p.output, r)[:, None],
    "[1,H,S,D]": lambda p, r: p.output.transpose(0, 1)[None],
    "projected": _projected,
    "valued up": _valued_up,
    "with sink": _with_sink,
    "with new token": lambda p, r: _own(
        p, _merge_two(p.output, p.lse, *new_token_partial(p))[0], r
    ),
    "row heads": _row_heads,
    "row merge": _row_merge,
    "two merges": _two_merges,
    "attention": _attention,
    "q": lambda p, r: p.query,
}


def rank_inputs(inputs: str | Callable, p: Problem, rank: int) -> list[Input]:
    """Inputs of one rank by key of :data:`INPUTS` or by a function of the same kind."""
    return (INPUTS[inputs] if isinstance(inputs, str) else inputs)(p, rank)


def rank_result(result: str | Callable, p: Problem, rank: int):
    """Dense result on one rank by key of :data:`RESULTS` or by a function of its
    kind.
    """
    return (RESULTS[result] if isinstance(result, str) else result)(p, rank)
