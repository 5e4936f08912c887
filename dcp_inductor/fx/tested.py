"""What a region tests its values for, so that a trial holds what no draw would hit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from dcp_inductor.fx.lockstep import constant_of
from dcp_inductor.fx.nodes import tensor_val
from dcp_inductor.fx.region import is_constant_name

_aten = torch.ops.aten
_EQUALITIES = {
    _aten.eq.Scalar,
    _aten.ne.Scalar,
    _aten.eq.Tensor,
    _aten.ne.Tensor,
}
_OF_NAN = {_aten.isnan.default, _aten.nan_to_num.default, _aten.isfinite.default}
_OF_INFINITY = {
    _aten.isinf.default,
    _aten.isposinf.default,
    _aten.isfinite.default,
    _aten.nan_to_num.default,
}
# Beyond this, bounds and marks count as none (docs/recognition.md, Limits).
_MOST = 1e9
_MAX_NUMBERS = 16


@dataclass(frozen=True)
class Tested:
    """Numbers that values are compared with, and whether NaN and infinity are."""

    numbers: tuple[float, ...]
    nan: bool
    infinity: bool


def tested(nodes: Sequence[Node]) -> Tested:
    """What the nodes test for."""
    numbers: dict[float, None] = {}
    nan = infinity = False
    for node in nodes:
        nan = nan or node.target in _OF_NAN
        infinity = infinity or node.target in _OF_INFINITY
        if node.target not in _EQUALITIES or _guards_a_maximum(node):
            continue
        # How isnan() is decomposed, and isinf().
        nan = nan or node.args[0] is node.args[1]
        for number in _compared(node):
            infinity = infinity or math.isinf(number)
            if 0 < abs(number) <= _MOST:
                numbers[number] = None
    return Tested(tuple(numbers)[:_MAX_NUMBERS], nan, infinity)


def _guards_a_maximum(node: Node) -> bool:
    """Whether this is logsumexp's own look at its maximum, which is zero instead where
    it is infinite: that gives no infinity a meaning that the exponentials do not.
    """
    absolute = node.args[0]
    if not isinstance(absolute, Node) or absolute.target is not _aten.abs.default:
        return False
    maximum = absolute.args[0]
    return (
        isinstance(maximum, Node)
        and maximum.target is _aten.amax.default
        and list(_compared(node)) == [math.inf]
        and all(
            user.target is _aten.where.self
            and user.args[0] is node
            and user.args[2] is maximum
            and _is_zero(user.args[1])
            for user in node.users
        )
    )


def _is_zero(node: object) -> bool:
    return (
        isinstance(node, Node)
        and node.target is _aten.full.default
        and bool(node.args[1] == 0)
    )


def _compared(node: Node) -> Iterator[float]:
    for value in node.args:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield float(value)
        elif not isinstance(value, Node):
            continue
        elif value.target is _aten.full.default and isinstance(
            value.args[1], (int, float)
        ):
            yield float(value.args[1])
        elif value.op == "get_attr" and is_constant_name(value):
            held = tensor_val(value)
            if held is not None and held.numel() == 1:
                yield float(constant_of(value))
