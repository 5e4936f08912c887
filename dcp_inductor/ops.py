"""The graph ops of dcp_inductor: schema, tags, fake and handle, declared here and
nowhere else.

Graph ops are functional and hold no pointer, rank or workspace, so a graph with them
can be cached and shared. Every one takes and returns an order token (a zero-size
tensor): exchanges of one group must run in the same order on every rank, and the token
is what stops a scheduler from swapping two of them. ``site`` names the place in the
user's graph for error messages and for the ranks' agreement; it changes nothing in the
result.

Shapes: T tokens, N ranks, h = heads of a rank, H = N * h heads, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

import torch
from torch import Tensor

from dcp_inductor import groups

_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
_LIBRARY = torch.library.Library("dcp_inductor", "DEF")

SCATTER_MODES = ("heads", "tokens", "none")


def _check_token(token: Tensor) -> None:
    torch._check(
        token.numel() == 0,
        lambda: f"order token: expected no elements, got shape {tuple(token.shape)}",
    )


# q_gather: [T, h, D] of every rank -> [T, H or padded_heads, D], rank-major heads.
# Any dtype, moved as bytes. padded_heads > H appends zero heads. The result is a fresh
# tensor.
_LIBRARY.define(
    "q_gather(Tensor query, Tensor token, str group_name, *, int padded_heads=0, "
    'str site="") -> (Tensor, Tensor)',
    tags=_TAGS,
)
q_gather = torch.ops.dcp_inductor.q_gather.default


def gathered_heads(query: Tensor, world_size: int, padded_heads: int) -> int:
    """Heads of q_gather's result.

    Raises:
        ValueError: ``padded_heads`` cannot hold the heads of all ranks.
    """
    heads = query.shape[1] * world_size
    if padded_heads and padded_heads < heads:
        raise ValueError(
            f"q_gather: expected padded_heads of 0 or at least {heads}, got "
            f"{padded_heads}"
        )
    return padded_heads or heads


@torch.library.register_fake("dcp_inductor::q_gather")
def _(query, token, group_name, *, padded_heads=0, site=""):
    torch._check(
        query.dim() == 3,
        lambda: f"q_gather: expected query [T, h, D], got {query.dim()} dims",
    )
    _check_token(token)
    heads = gathered_heads(query, groups.size(group_name), padded_heads)
    return (
        query.new_empty((query.shape[0], heads, query.shape[2])),
        torch.empty_like(token),
    )


# kv_gather: [t, ...] of every rank -> [N * t, ...] in rank order. Any dtype, moved as
# bytes. The result is a fresh tensor.
_LIBRARY.define(
    'kv_gather(Tensor rows, Tensor token, str group_name, *, str site="") '
    "-> (Tensor, Tensor)",
    tags=_TAGS,
)
kv_gather = torch.ops.dcp_inductor.kv_gather.default


@torch.library.register_fake("dcp_inductor::kv_gather")
def _(rows, token, group_name, *, site=""):
    torch._check(
        rows.dim() >= 1, lambda: "kv_gather: expected rows [t, ...], got 0 dims"
    )
    _check_token(token)
    world_size = groups.size(group_name)
    return (
        rows.new_empty((world_size * rows.shape[0], *rows.shape[1:])),
        torch.empty_like(token),
    )


# kv_gather_publish: lets the kv_gather of the same rows, which must be the group's next
# exchange, begin here: the rows are sent now, and only the gather waits for the peers'.
# Changes nothing in any result; where it cannot be done it does nothing.
_LIBRARY.define(
    'kv_gather_publish(Tensor rows, Tensor token, str group_name, *, str site="") '
    "-> Tensor",
    tags=_TAGS,
)
kv_gather_publish = torch.ops.dcp_inductor.kv_gather_publish.default


@torch.library.register_fake("dcp_inductor::kv_gather_publish")
def _(rows, token, group_name, *, site=""):
    torch._check(
        rows.dim() >= 1, lambda: "kv_gather_publish: expected rows [t, ...], got 0 dims"
    )
    _check_token(token)
    return torch.empty_like(token)


# a2a_lse_reduce: partial outputs [T, H, D] and LSEs [T, H] of every rank -> merged,
#     out[t, j] = sum_r w_r[t, j] * partial_output_r[t, j]
#     w_r = exp(lse_r) / sum_s exp(lse_s)
# in fp32 and rank order. LSE NaN or +inf counts as -inf (empty shard); a source of
# weight 0 is never read; a row empty on all ranks is 0 with LSE -inf.
# scatter: "heads", this rank's heads [T, h, D]; "tokens", this rank's tokens
# [T / N, H, D]; "none", all of it on every rank [T, H, D]. split_sizes: heads (tokens)
# of each rank where they are uneven. lse: merged LSE in the base of the input, fp32,
# scattered like the output or, with full_lse, [T, H]; [0] unless return_lse. seq_lens
# [B] (local KV lengths) and query_start_loc [B + 1] mark rows without local KV and
# padding rows as empty at the source.
_LIBRARY.define(
    "a2a_lse_reduce(Tensor partial_output, Tensor partial_lse, Tensor token, "
    "str group_name, *, "
    'str scatter="heads", SymInt[] split_sizes=[], bool is_lse_base_on_e=True, '
    "bool return_lse=False, bool full_lse=False, ScalarType? output_dtype=None, "
    'Tensor? seq_lens=None, Tensor? query_start_loc=None, str site="") '
    "-> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
a2a_lse_reduce = torch.ops.dcp_inductor.a2a_lse_reduce.default


def check_a2a_lse_reduce(
    partial_output: Tensor,
    partial_lse: Tensor,
    scatter: str,
    split_sizes: Sequence[int],
    seq_lens: Tensor | None,
    query_start_loc: Tensor | None,
    world_size: int,
    output_dtype: torch.dtype | None = None,
) -> None:
    """Check arguments of a2a_lse_reduce that no rank could serve.

    Raises:
        ValueError: a wrong number of dims, dtype, scatter mode or split, or sizes that
            are known to differ; with what was expected and what was given.
    """
    if partial_output.dim() != 3:
        _refuse("partial_output [T, H, D]", f"{partial_output.dim()} dims")
    if not partial_output.dtype.is_floating_point:
        _refuse("a floating-point partial_output", f"{partial_output.dtype}")
    if partial_lse.dim() != 2:
        _refuse("partial_lse [T, H]", f"{partial_lse.dim()} dims")
    if not partial_lse.dtype.is_floating_point:
        _refuse("a floating-point partial_lse", f"{partial_lse.dtype}")
    for dim, name in enumerate("TH"):
        of_output, of_lse = partial_output.shape[dim], partial_lse.shape[dim]
        if _differ(of_output, of_lse):
            _refuse(
                f"equal {name} in partial_output and partial_lse",
                f"{of_output} and {of_lse}",
            )
    if scatter not in SCATTER_MODES:
        _refuse(f"scatter in {SCATTER_MODES}", repr(scatter))
    if split_sizes and (scatter == "none" or len(split_sizes) != world_size):
        _refuse(
            f"no split_sizes, or one per rank ({world_size}) with scatter 'heads' or "
            "'tokens'",
            f"{len(split_sizes)} with {scatter!r}",
        )
    if any(isinstance(size, int) and size < 0 for size in split_sizes):
        _refuse("split_sizes of 0 or more", f"{list(split_sizes)}")
    if (seq_lens is None) != (query_start_loc is None):
        _refuse("both of seq_lens and query_start_loc or neither", "one of them")
    check_lengths(seq_lens, query_start_loc)
    if output_dtype is not None and not output_dtype.is_floating_point:
        _refuse("a floating-point output_dtype", f"{output_dtype}")
    if scatter == "none":
        return
    total = partial_output.shape[1 if scatter == "heads" else 0]
    if split_sizes:
        if _differ(sum(split_sizes), total):
            _refuse(f"split_sizes that add up to {total}", f"{sum(split_sizes)}")
    elif _differ(total % world_size, 0):
        _refuse(
            f"{scatter} that split evenly over {world_size} ranks, or split_sizes",
            f"{total} {scatter}",
        )


def check_lengths(seq_lens: Tensor | None, query_start_loc: Tensor | None) -> None:
    """Check the two tensors of a row mask against each other; their batch may change
    from call to call.

    Raises:
        ValueError: they are not ``[B]`` and ``[B + 1]``, or do not hold integers.
    """
    if seq_lens is None or query_start_loc is None:
        return
    for name, lengths in (("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        if lengths.dim() != 1:
            _refuse(f"{name} with 1 dim", f"{lengths.dim()} dims")
        if lengths.dtype.is_floating_point or lengths.dtype.is_complex:
            _refuse(f"{name} of integers", f"{lengths.dtype}")
    batch, starts = seq_lens.shape[0], query_start_loc.shape[0]
    if _differ(starts, batch + 1):
        _refuse(
            "query_start_loc [B + 1] and seq_lens [B]",
            f"{starts} entries and {batch}",
        )


def _refuse(expected: str, got: str) -> NoReturn:
    raise ValueError(f"a2a_lse_reduce: expected {expected}, got {got}")


def _differ(size: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two sizes are known to differ; symbols are left to the run, unguarded."""
    if isinstance(size, int) and isinstance(other, int):
        return size != other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size != other)


def scattered_shape(partial_lse, scatter, split_sizes, world_size, rank):
    """Leading dims ``(tokens, heads)`` of this rank's part of the merged result."""
    tokens, heads = partial_lse.shape
    if scatter == "heads":
        heads = split_sizes[rank] if split_sizes else heads // world_size
    elif scatter == "tokens":
        tokens = split_sizes[rank] if split_sizes else tokens // world_size
    return tokens, heads


@torch.library.register_fake("dcp_inductor::a2a_lse_reduce")
def _(
    partial_output,
    partial_lse,
    token,
    group_name,
    *,
    scatter="heads",
    split_sizes=(),
    is_lse_base_on_e=True,
    return_lse=False,
    full_lse=False,
    output_dtype=None,
    seq_lens=None,
    query_start_loc=None,
    site="",
):
    group = groups.resolve(group_name)
    world_size = group.size()
    check_a2a_lse_reduce(
        partial_output,
        partial_lse,
        scatter,
        split_sizes,
        seq_lens,
        query_start_loc,
        world_size,
        output_dtype,
    )
    _check_token(token)
    shape = scattered_shape(partial_lse, scatter, split_sizes, world_size, group.rank())
    output = partial_output.new_empty(
        (*shape, partial_output.shape[2]), dtype=output_dtype or partial_output.dtype
    )
    lse_shape = (0,) if not return_lse else partial_lse.shape if full_lse else shape
    lse = partial_lse.new_empty(lse_shape, dtype=torch.float32)
    return output, lse, torch.empty_like(token)


# order_after: a copy of x, available only after the exchange that made ``token``. Not
# x itself: an op that returns a view cannot be functionalised.
# order_token: a token that is available only after x.
_LIBRARY.define("order_after(Tensor x, Tensor token) -> Tensor", tags=_TAGS)
order_after = torch.ops.dcp_inductor.order_after.default
_LIBRARY.define("order_token(Tensor x, Tensor token) -> Tensor", tags=_TAGS)
order_token = torch.ops.dcp_inductor.order_token.default


@torch.library.register_fake("dcp_inductor::order_after")
def _(x, token):
    _check_token(token)
    return x.clone()


@torch.library.register_fake("dcp_inductor::order_token")
def _(x, token):
    _check_token(token)
    return torch.empty_like(token)


# site_guard: raises on ranks that refused a site where a peer accepted it.
_LIBRARY.define(
    "site_guard(Tensor token, str group_name, str site, str reason) -> Tensor",
    tags=_TAGS,
)
site_guard = torch.ops.dcp_inductor.site_guard.default


@torch.library.register_fake("dcp_inductor::site_guard")
def _(token, group_name, site, reason):
    _check_token(token)
    return torch.empty_like(token)


# Implementations: the runtime is imported inside the dispatched bodies only.


@functools.cache
def _kernels() -> ModuleType:
    from dcp_inductor.runtime import kernels

    return kernels


def _q_gather(query, token, group_name, *, padded_heads=0, site=""):
    gathered = _kernels().q_gather(query, group_name, padded_heads, site)
    return gathered, torch.empty_like(token)


def _kv_gather(rows, token, group_name, *, site=""):
    gathered = _kernels().kv_gather(rows, group_name, site)
    return gathered, torch.empty_like(token)


def _kv_gather_publish(rows, token, group_name, *, site=""):
    from dcp_inductor.runtime import kernels

    kernels.kv_gather_publish(rows, group_name, site)
    return torch.empty_like(token)


def _a2a_lse_reduce(
    partial_output,
    partial_lse,
    token,
    group_name,
    *,
    scatter="heads",
    split_sizes=(),
    is_lse_base_on_e=True,
    return_lse=False,
    full_lse=False,
    output_dtype=None,
    seq_lens=None,
    query_start_loc=None,
    site="",
):
    output, lse = _kernels().a2a_lse_reduce(
        partial_output,
        partial_lse,
        group_name,
        scatter=scatter,
        split_sizes=split_sizes,
        is_lse_base_on_e=is_lse_base_on_e,
        return_lse=return_lse,
        full_lse=full_lse,
        output_dtype=output_dtype,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        site=site,
    )
    return output, lse, torch.empty_like(token)


def _site_guard(token, group_name, site, reason):
    from dcp_inductor import votes

    votes.guard(group_name, site, reason)
    return torch.empty_like(token)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("q_gather", _q_gather, _key)
    _LIBRARY.impl("kv_gather", _kv_gather, _key)
    _LIBRARY.impl("kv_gather_publish", _kv_gather_publish, _key)
    _LIBRARY.impl("a2a_lse_reduce", _a2a_lse_reduce, _key)
    _LIBRARY.impl("site_guard", _site_guard, _key)
    _LIBRARY.impl("order_after", lambda x, token: x.clone(), _key)
    _LIBRARY.impl("order_token", lambda x, token: torch.empty_like(token), _key)
