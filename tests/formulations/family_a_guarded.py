"""Family A with guards: sanitised LSEs, weights and outputs, masked rows."""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from . import spelling as sp
from .cases import Context, add


def sanitise(l: Tensor, how: str) -> Tensor:
    """NaN and infinite LSEs become those of an empty shard."""
    match how:
        case "isnan or isinf":
            return torch.where(torch.isnan(l) | torch.isinf(l), float("-inf"), l)
        case "isfinite":
            return torch.where(torch.isfinite(l), l, float("-inf"))
        case "isfinite to -1e30":
            return torch.where(torch.isfinite(l), l, -1e30)
        case "masked_fill":
            return l.masked_fill(~torch.isfinite(l), float("-inf"))
        case "nan_to_num":
            return torch.nan_to_num(l, nan=float("-inf"), posinf=float("-inf"))
        case "isneginf keeps":
            return torch.where(l == float("inf"), float("-inf"), l)
    raise ValueError(how)


def sanitised(
    ctx: Context,
    o: Tensor,
    l: Tensor,
    *,
    lse: str,
    weight: str,
    output: str,
    den: str = "",
) -> Tensor:
    """FC-02 and relatives: the guards of the serving stacks around the same algebra."""
    L = sp.stack_view(ctx, l)
    if lse:
        l, L = sanitise(l, lse), sanitise(L, lse)
    m = L.amax(0)
    m = torch.where(m == float("-inf"), 0.0, m)
    total = torch.exp(L - m).sum(0)
    if den:
        total = total.clamp(min=float(den))
    w = torch.exp(l - m - torch.log(total))
    match weight:
        case "nan_to_num":
            w = torch.nan_to_num(w, nan=0.0, posinf=0.0, neginf=0.0)
        case "isneginf":
            w = torch.where(torch.isneginf(l), 0.0, w)
        case "isnan":
            w = torch.where(torch.isnan(w), torch.zeros_like(w), w)
    w = w[..., None]
    match output:
        case "where weight":
            x = torch.where(w == 0, 0.0, o * w)
        case "nan_to_num":
            x = torch.nan_to_num(o, nan=0.0, posinf=0.0, neginf=0.0) * w
        case "masked_fill":
            x = (o * w).masked_fill(w == 0, 0.0)
        case "where greater":
            x = torch.where(w > 0, w * o, torch.zeros_like(o))
        case _:
            x = o * w
    return sp.rs(ctx, x.to(o.dtype))


for _name, _how in {
    "FC-02": dict(lse="isnan or isinf", weight="", output=""),
    "FC-02 nan_to_num": dict(lse="isnan or isinf", weight="nan_to_num", output=""),
    "FC-02 isfinite": dict(lse="isfinite", weight="nan_to_num", output="nan_to_num"),
    "FC-02 -1e30": dict(lse="isfinite to -1e30", weight="", output=""),
    "FC-02 masked_fill": dict(
        lse="masked_fill", weight="isneginf", output="masked_fill"
    ),
    "FC-02 lse nan_to_num": dict(lse="nan_to_num", weight="isnan", output="nan_to_num"),
    "FC-02 clamp 1e-8": dict(lse="", weight="", output="", den="1e-8"),
    "FC-02 clamp 1e-10": dict(lse="isfinite", weight="", output="", den="1e-10"),
    "FC-02 clamp 1e-30": dict(
        lse="", weight="isnan", output="where greater", den="1e-30"
    ),
    "FC-18": dict(lse="isnan or isinf", weight="isneginf", output="where weight"),
    "FC-18 greater": dict(lse="isfinite", weight="isnan", output="where greater"),
    "FC-18 posinf": dict(lse="isneginf keeps", weight="isnan", output="where weight"),
}.items():
    add(_name, "A", partial(sanitised, **_how))


def row_masked(ctx, o, l, start, lengths, *, zero_output: bool = False):
    tokens = torch.arange(o.shape[0], device=o.device)
    request = torch.searchsorted(start[1:], tokens, right=True)
    empty_row = (lengths == 0)[request]
    l = l.masked_fill(empty_row[:, None], float("-inf"))
    if zero_output:
        o = o.masked_fill(empty_row[:, None, None], 0.0)
    L = sp.stack_view(ctx, l)
    m = L.amax(0)
    m = torch.where(m == float("-inf"), 0.0, m)
    w = torch.nan_to_num(torch.exp(l - m - torch.log(torch.exp(L - m).sum(0))))
    x = torch.where(w[..., None] == 0, 0.0, o * w[..., None])
    return sp.rs(ctx, x.to(o.dtype))


add("FC-19", "A", row_masked, "ol, query_start_loc, lengths")
add(
    "FC-19 zero output",
    "A",
    partial(row_masked, zero_output=True),
    "ol, query_start_loc, lengths",
)
