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
from types import ModuleType
from typing import NoReturn

import torch
from torch import Tensor

from dcp_inductor import geometry, groups

_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
_LIBRARY = torch.library.Library("dcp_inductor", "DEF")


def _refuse_none(op: str, name: str) -> NoReturn:
    # A schema's Tensor lets None through.
    raise ValueError(f"{op}: expected a tensor as {name}, got None")


def _check_partials(partial_output: Tensor, partial_lse: Tensor) -> None:
    if partial_output is None:
        _refuse_none("a2a_lse_reduce", "partial_output")
    if partial_lse is None:
        _refuse_none("a2a_lse_reduce", "partial_lse")


def _check_token(op: str, token: Tensor, **tensors: Tensor | None) -> None:
    # For fakes, which also run where one tensor of a call by hand is on meta.
    if token is None:
        _refuse_none(op, "token")
    geometry.check_devices(op, **tensors, token=token)
    torch._check(
        token.numel() == 0,
        lambda: f"order token: expected no elements, got shape {tuple(token.shape)}",
    )


def _check_empty(token: Tensor) -> None:
    # The quick form of _check_token, for calls.
    if token is None:
        raise ValueError(
            "order token: expected an empty tensor, torch.empty(0), got None"
        )
    if token.numel():
        raise ValueError(
            f"order token: expected no elements, got shape {tuple(token.shape)}"
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


# q_gather_view: q_gather whose result may lie in this rank's part of the workspace. The
# group's next q_gather_view stores there again, as soon as each rank gets there, so an
# a2a_lse_reduce of the group must follow whatever reads the result and stand before
# that gather. fx/query_view.py puts the op where a graph proves this; it is not for
# callers, and cannot be traced. Shapes, dtypes and errors are q_gather's. The token
# stands for the workspace: that the result aliases it keeps a compiler from writing
# into the result, and from handing its memory on to a later tensor.
_LIBRARY.define(
    "q_gather_view(Tensor query, Tensor(a) token, str group_name, *, "
    'int padded_heads=0, str site="") -> (Tensor(a), Tensor)',
    tags=_TAGS,
)
q_gather_view = torch.ops.dcp_inductor.q_gather_view.default


@torch.library.register_fake("dcp_inductor::q_gather")
@torch.library.register_fake("dcp_inductor::q_gather_view")
def _(query, token, group_name, *, padded_heads=0, site=""):
    if query is None:
        _refuse_none("q_gather", "query")
    torch._check(
        query.dim() == 3,
        lambda: f"q_gather: expected query [T, h, D], got {query.dim()} dims",
    )
    _check_token("q_gather", token, query=query)
    heads = geometry.gathered_heads(query, groups.size(group_name), padded_heads)
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
    if rows is None:
        _refuse_none("kv_gather", "rows")
    torch._check(
        rows.dim() >= 1, lambda: "kv_gather: expected rows [t, ...], got 0 dims"
    )
    _check_token("kv_gather", token, rows=rows)
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
    if rows is None:
        _refuse_none("kv_gather_publish", "rows")
    torch._check(
        rows.dim() >= 1, lambda: "kv_gather_publish: expected rows [t, ...], got 0 dims"
    )
    _check_token("kv_gather_publish", token, rows=rows)
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
    partials = {"partial_output": partial_output, "partial_lse": partial_lse}
    lengths = {"seq_lens": seq_lens, "query_start_loc": query_start_loc}
    _check_partials(partial_output, partial_lse)
    _check_token("a2a_lse_reduce", token, **partials, **lengths)
    group = groups.resolve(group_name)
    size, rank = group.size(), group.rank()
    options = geometry.MergeOptions(
        scatter,
        tuple(split_sizes),
        is_lse_base_on_e,
        return_lse,
        full_lse,
        output_dtype,
    )
    geometry.check_a2a_lse_reduce(
        partial_output, partial_lse, options, seq_lens, query_start_loc, size
    )
    output, lse = options.results(partial_output, partial_lse, size, rank)
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
    if x is None:
        _refuse_none("order_after", "x")
    _check_token("order_after", token, x=x)
    return x.clone()


@torch.library.register_fake("dcp_inductor::order_token")
def _(x, token):
    if x is None:
        _refuse_none("order_token", "x")
    _check_token("order_token", token, x=x)
    return torch.empty_like(token)


# site_guard: raises on ranks that refused a site where a peer accepted it.
_LIBRARY.define(
    "site_guard(Tensor token, str group_name, str site, str reason) -> Tensor",
    tags=_TAGS,
)
site_guard = torch.ops.dcp_inductor.site_guard.default


@torch.library.register_fake("dcp_inductor::site_guard")
def _(token, group_name, site, reason):
    _check_token("site_guard", token)
    return torch.empty_like(token)


# Implementations: the runtime is imported inside the dispatched bodies only.


@functools.cache
def _kernels() -> ModuleType:
    from dcp_inductor.runtime import kernels

    return kernels


def _q_gather(query, token, group_name, *, padded_heads=0, site=""):
    if query is None:
        _refuse_none("q_gather", "query")
    _check_empty(token)
    gathered = _kernels().q_gather(query, group_name, padded_heads, site)
    return gathered, torch.empty_like(token)


def _q_gather_view(query, token, group_name, *, padded_heads=0, site=""):
    if query is None:
        _refuse_none("q_gather", "query")
    _check_empty(token)
    gathered = _kernels().q_gather_view(query, group_name, padded_heads, site)
    return gathered, torch.empty_like(token)


def _kv_gather(rows, token, group_name, *, site=""):
    if rows is None:
        _refuse_none("kv_gather", "rows")
    _check_empty(token)
    gathered = _kernels().kv_gather(rows, group_name, site)
    return gathered, torch.empty_like(token)


def _kv_gather_publish(rows, token, group_name, *, site=""):
    if rows is None:
        _refuse_none("kv_gather_publish", "rows")
    _check_empty(token)
    _kernels().kv_gather_publish(rows, group_name, site)
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
    _check_partials(partial_output, partial_lse)
    _check_empty(token)
    options = geometry.MergeOptions(
        scatter,
        tuple(split_sizes),
        is_lse_base_on_e,
        return_lse,
        full_lse,
        output_dtype,
    )
    output, lse = _kernels().a2a_lse_reduce(
        partial_output,
        partial_lse,
        group_name,
        options,
        seq_lens,
        query_start_loc,
        site,
    )
    return output, lse, torch.empty_like(token)


def _order_after(x, token):
    if x is None or token is None:
        _refuse_none("order_after", "x" if x is None else "token")
    return x.clone()


def _order_token(x, token):
    if x is None or token is None:
        _refuse_none("order_token", "x" if x is None else "token")
    return torch.empty_like(token)


def _site_guard(token, group_name, site, reason):
    from dcp_inductor import votes

    votes.guard(group_name, site, reason)
    return torch.empty_like(token)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("q_gather", _q_gather, _key)
    _LIBRARY.impl("q_gather_view", _q_gather_view, _key)
    _LIBRARY.impl("kv_gather", _kv_gather, _key)
    _LIBRARY.impl("kv_gather_publish", _kv_gather_publish, _key)
    _LIBRARY.impl("a2a_lse_reduce", _a2a_lse_reduce, _key)
    _LIBRARY.impl("site_guard", _site_guard, _key)
    _LIBRARY.impl("order_after", _order_after, _key)
    _LIBRARY.impl("order_token", _order_token, _key)
