"""The merge inside a model: how its inputs come about, what is around it, several
sites.

``leaves`` names the collectives that are no part of a site and have to stay.
"""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from . import family_a, family_b, family_c, family_d
from . import spelling as sp
from .cases import EQUAL_OR_REFUSED, Context, add, case
from .inputs import Input, Problem, _l, _o, _ol, _q

# Inputs that are parts of larger buffers, as attention kernels leave them.


def _strided(p: Problem, r: int, how: str) -> list[Input]:
    o, l = _o(p, r), _l(p, r)
    t, h, d = o.shape
    rows = t + 5
    match how:
        case "head major capacity":
            buffer = o.new_zeros(h, rows, d)
            view = buffer[:, :t].transpose(0, 1)
        case "token capacity":
            buffer = o.new_zeros(rows, h, d)
            view = buffer[:t]
        case "more heads":
            buffer = o.new_zeros(t, h + 2, d)
            view = buffer[:, :h]
        case "offset":
            view = torch.zeros(t * h * d + 1, dtype=o.dtype)[1:].view(t, h, d)
        case _:
            raise ValueError(how)
    view.copy_(o)
    lse = l.t().contiguous().t() if "capacity" in how else l
    return [Input(view), Input(lse)]


_MERGES = {
    "a": (family_a.merge, "HS"),
    "b": (family_b.tree, "FH"),
    "c": (family_c.merge, "HS"),
    "d": (family_d.merge, "FH"),
}
for _how in ("head major capacity", "token capacity", "more heads", "offset"):
    for _name, (_fn, _result) in _MERGES.items():
        add(f"FS-01 {_how} {_name}", "S", _fn, partial(_strided, how=_how), _result)


def _lse_of(p: Problem, r: int, dtype: torch.dtype) -> list[Input]:
    return [Input(_o(p, r)), Input(p.partial_lse[r].to(dtype))]


def _merged_as_given(p: Problem, r: int, dtype: torch.dtype, full: bool) -> Tensor:
    """Merge of the partials with the LSEs as rounded to ``dtype``."""
    weights = torch.softmax(p.partial_lse.to(dtype).double(), 0).nan_to_num(nan=0.0)
    merged = (weights[..., None] * p.partial_output).nan_to_num(nan=0.0).sum(0)
    return merged if full else merged.chunk(p.geometry.world_size, 1)[r]


for _dtype in (torch.float64, torch.float16, torch.bfloat16):
    for _name, (_fn, _result) in _MERGES.items():
        add(
            f"FS-02 {str(_dtype)[6:]} {_name}",
            "S",
            _fn,
            partial(_lse_of, dtype=_dtype),
            partial(_merged_as_given, dtype=_dtype, full=_result == "FH"),
            expect=EQUAL_OR_REFUSED,
            note="algebra in the dtype of the LSE; never reinterpreted",
            tolerance=4e-2,
        )


def widened(ctx: Context, o: Tensor, l: Tensor) -> Tensor:
    """A low-precision LSE is widened before anything is done with it."""
    return family_c.merge(ctx, o, l.float())


for _dtype in (torch.float16, torch.bfloat16):
    add(
        f"FS-02 widened {str(_dtype)[6:]}",
        "S",
        widened,
        partial(_lse_of, dtype=_dtype),
        partial(_merged_as_given, dtype=_dtype, full=False),
    )

# Attention as an opaque op of a library.

_LIBRARY = torch.library.Library("dcp_formulations", "FRAGMENT")
_LIBRARY.define("attention(Tensor query, Tensor rows) -> (Tensor, Tensor)")
_LIBRARY.define(
    "attention_out(Tensor query, Tensor rows, Tensor(a!) out, Tensor(b!) lse) -> ()"
)
_LIBRARY.define(
    "attention_list(Tensor[] parts, Tensor rows, Tensor? mask=None, float? scale=None)"
    " -> Tensor[]"
)


def _attention(query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("thd,kd->thk", query.float(), rows.float())
    out = torch.einsum("thk,kd->thd", scores.softmax(-1), rows.float())
    return out.to(query.dtype), torch.logsumexp(scores, -1)


def _attention_out(query: Tensor, rows: Tensor, out: Tensor, lse: Tensor) -> None:
    o, l = _attention(query, rows)
    out.copy_(o)
    lse.copy_(l)


def _attention_list(parts, rows, mask=None, scale=None) -> list[Tensor]:
    return list(_attention(torch.cat(parts, -1) * (scale or 1.0), rows))


_LIBRARY.impl("attention", _attention, "CPU")
_LIBRARY.impl("attention_out", _attention_out, "CPU")
_LIBRARY.impl("attention_list", _attention_list, "CPU")


@torch.library.register_fake("dcp_formulations::attention", lib=_LIBRARY)
def _(query, rows):
    return torch.empty_like(query), query.new_empty(
        query.shape[:2], dtype=torch.float32
    )


@torch.library.register_fake("dcp_formulations::attention_out", lib=_LIBRARY)
def _(query, rows, out, lse):
    return None


@torch.library.register_fake("dcp_formulations::attention_list", lib=_LIBRARY)
def _(parts, rows, mask=None, scale=None):
    t, h, d = parts[0].shape
    width = d + parts[1].shape[2]
    return [
        parts[0].new_empty((t, h, width)),
        parts[0].new_empty((t, h), dtype=torch.float32),
    ]


_ops = torch.ops.dcp_formulations


def query_rows(p: Problem, r: int) -> list[Input]:
    """Own query heads [T, h, D] and this rank's KV rows [6, D]."""
    g = p.geometry
    rows = torch.randn((6, g.head_dim), generator=p.generator(r), dtype=torch.float64)
    return [*_q(p, r), Input(rows.to(g.dtype), None)]


def attended(p: Problem, r: int) -> Tensor:
    """Own query heads against the KV rows of all ranks."""
    n = p.geometry.world_size
    rows = torch.cat([query_rows(p, s)[1].tensor for s in range(n)]).double()
    scores = torch.einsum("thd,kd->thk", _q(p, r)[0].tensor.double(), rows)
    return torch.einsum("thk,kd->thd", scores.softmax(-1), rows)


def _call(kind: str, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "functional":
        return _ops.attention(query, rows)
    if kind == "list":
        out, lse = _ops.attention_list([query[..., :3], query[..., 3:]], rows)
        return out, lse
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    _ops.attention_out(query, rows, out, lse)
    return out, lse


def decode(
    ctx: Context, query: Tensor, rows: Tensor, *, kind: str, merge: str
) -> Tensor:
    """Query gather, opaque attention, merge."""
    out, lse = _call(kind, sp.ag(ctx, query, 1), rows)
    return _MERGES[merge][0](ctx, out, lse).to(query.dtype)


for _kind in ("functional", "list", "mutating"):
    for _merge in ("a", "c"):
        add(
            f"FS-03 {_kind} {_merge}",
            "S",
            partial(decode, kind=_kind, merge=_merge),
            query_rows,
            attended,
        )


@case("FS-03 aten", "S", query_rows, attended)
def aten_attention(ctx, query, rows):
    """aten's own attention for CPUs, which returns [1, T, H, D] and an LSE [1, H,
    T].
    """
    whole = sp.ag(ctx, query, 1).transpose(0, 1)[None]  # [1, H, T, D]
    kv = rows[None, None].expand(1, whole.shape[1], -1, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        whole, kv, kv, scale=1.0
    )
    out, lse = out[0].transpose(0, 1), lse[0].transpose(0, 1)
    return family_a.merge(ctx, out, lse).to(query.dtype)


@case("FS-03 no gather", "S", "ol", "HS")
def replicated_query(ctx, o, l):
    """The query was whole already: a merge without a gather."""
    return family_a.merge(ctx, o * 1.0, l + 0.0)


# Other things in the graph.


@case("FS-04", "S", query_rows, attended, leaves=("all_reduce",))
def unrelated_between(ctx, query, rows):
    """A collective of the same group between gather and merge."""
    whole = sp.ag(ctx, query, 1)
    scale = sp.ar(ctx, rows.float().sum()) * 0.0 + 1.0
    out, lse = _ops.attention(whole, rows)
    return family_c.merge(ctx, out, lse).to(query.dtype) * scale.to(query.dtype)


@case("FS-04 reduce before", "S", "ol", None, leaves=("all_reduce",))
def reduced_input(ctx, o, l):
    """The partial itself depends on an all-reduce of the group."""
    bias = sp.ar(ctx, o.mean(-1, keepdim=True))
    return family_a.merge(ctx, o + bias, l)


@case("FS-05", "S", "ol", None)
def late_output(ctx, o, l):
    """The weights are ready long before the partial output is."""
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))
    for _ in range(3):
        o = torch.tanh(o) + o
    return sp.rs(ctx, o * w[..., None])


@case("FS-05 lse late", "S", "ol", None)
def late_lse(ctx, o, l):
    """The LSE is computed from the output and after it."""
    l = l + (o.float() * 0.1).sum(-1)
    return family_b.tree(ctx, o, l)


@case("FS-06", "S", "ol", None)
def partials_leave(ctx, o, l):
    """Partial output and LSE leave the graph as well."""
    o, l = o * 1.5, l + 0.5
    return family_c.merge(ctx, o, l), o, l


@case("FS-06 merged twice", "S", "ol", None)
def same_partial_twice(ctx, o, l):
    """The same partial goes into two merges."""
    return family_a.merge(ctx, o, l), family_b.tree(ctx, o, l + 0.25)


@case("FS-06 shared gather", "S", "ol", None)
def two_outputs_one_gather(ctx, o, l):
    """Two partial outputs (say, of two value heads) share one LSE and its gather."""
    w = sp.w_logsumexp(ctx, l, sp.stack_view(ctx, l))[..., None]
    return sp.rs(ctx, o * w), sp.rs(ctx, (o * 0.5 + 1) * w)


def layers_inputs(p: Problem, r: int) -> list[Input]:
    g = p.geometry
    hidden = torch.randn((g.num_tokens, 12), generator=p.generator(-1))
    weights = torch.Generator().manual_seed(p.seed * 7 + r)
    width = g.heads_per_rank * g.head_dim
    rand = lambda *shape: torch.randn(shape, generator=weights).to(g.dtype)  # noqa: E731
    return [
        Input(hidden.to(g.dtype)),
        Input(rand(6, g.head_dim) * 0.5, None),
        Input(rand(12, width) * 0.2, None),
        Input(rand(width, 12) * 0.05, None),
    ]


def layers(ctx: Context, hidden, rows, w_q, w_o, *, count: int, merge: str) -> Tensor:
    """Decode layers: project, gather, attend, merge, project back, all-reduce."""
    h = ctx.heads_per_rank
    for _ in range(count):
        x = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:])
        query = (x @ w_q).unflatten(1, (h, -1))
        out, lse = _ops.attention(sp.ag(ctx, query, 1), rows)
        out = _MERGES[merge][0](ctx, out, lse).to(hidden.dtype)
        hidden = hidden + sp.ar(ctx, out.flatten(1) @ w_o)
    return hidden


for _merge in ("a", "c"):
    for _count in (1, 3):
        add(
            f"FS-07 {_count} layers {_merge}",
            "S",
            partial(layers, count=_count, merge=_merge),
            layers_inputs,
            None,
            leaves=("all_reduce",) * _count,
        )


@case("FS-08", "S", query_rows, attended)
def process_group_object(ctx, query, rows):
    """The group is given as an object, not by name."""
    whole = sp.all_gather(query, 1, ctx.group)
    out, lse = _attention(whole, rows)
    g = torch.logsumexp(sp.all_gather(lse[None], 0, ctx.group), 0)
    x = out.float() * torch.exp(lse - g)[..., None]
    return sp.reduce_scatter(x, "sum", 1, ctx.group).to(query.dtype)


@case("FS-08 autograd forms", "S", "ol", "HS")
def autograd_collectives(ctx, o, l):
    """The differentiable forms of the collectives, in inference."""
    O, L = (
        funcol.all_to_all_single_autograd(sp.head_shards(ctx, x), None, None, ctx.group)
        for x in (o, l)
    )
    return (O * torch.softmax(L, 0)[..., None]).sum(0)


@case("FS-09", "S", "ol", "HS")
def lse_by_broadcasts(ctx, o, l):
    """Every rank hands its LSE out in turn."""
    L = torch.stack(
        [funcol.broadcast(l * 1.0, n, ctx.group_name) for n in range(ctx.world_size)]
    )
    return sp.rs(ctx, o * torch.exp(l - torch.logsumexp(L, 0))[..., None])


@case("FS-10", "S", query_rows, attended)
def scaled_scores(ctx, query, rows):
    """Base-2 softmax inside the attention, as kernels do it: the LSE comes in base
    2.
    """
    whole = sp.ag(ctx, query, 1).float()
    scores = torch.einsum("thd,kd->thk", whole, rows.float()) / math.log(2.0)
    m = scores.amax(-1, keepdim=True)
    e = torch.exp2(scores - m)
    total = e.sum(-1)
    o = torch.einsum("thk,kd->thd", e, rows.float()) / total[..., None]
    l = m[..., 0] + torch.log2(total)
    return family_a.base_two(ctx, o, l, power="exp2").to(query.dtype)


@case("FS-10 accumulators", "S", query_rows, attended)
def statistics_of_scores(ctx, query, rows):
    """The attention's own max and sum are merged, with an un-normalised accumulator."""
    whole = sp.ag(ctx, query, 1).float()
    scores = torch.einsum("thd,kd->thk", whole, rows.float())
    m = scores.amax(-1)
    e = torch.exp(scores - m[..., None])
    acc = torch.einsum("thk,kd->thd", e, rows.float())
    top = sp.ar(ctx, m, "max")
    k = torch.exp(m - top)
    num, den = sp.rs(ctx, acc * k[..., None]), sp.rs(ctx, e.sum(-1) * k)
    return (num / den[..., None]).to(query.dtype)


@case("FS-11", "S", _ol, "HS flat")
def flattened_result(ctx, o, l):
    """The result goes on as [T, h * D]."""
    return family_a.merge(ctx, o, l).reshape(o.shape[0], -1)
