"""What a region computes from sizes, and which sizes a trial must exceed to see it.

Symbolic sizes become small numbers in a trial. A region whose values depend on a size
(a mask by position, a factor of the token count) may behave otherwise from some size
on: 32, say. Such a number stands in the graph, and a trial beyond it shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from dcp_inductor.fx.lockstep import constant_nodes
from dcp_inductor.fx.nodes import argument, expression, is_number, tensor_val

_aten = torch.ops.aten
# Ops that take sizes to say what shape they make.
_SHAPE_OPS = {
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
    _aten.expand.default,
    _aten.repeat.default,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.slice_scatter.default,
    _aten.empty.memory_format,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.zeros.default,
    _aten.ones.default,
    _aten.roll.default,
}
# Ops whose values are positions, or depend on them.
_POSITION_OPS = {
    _aten.arange.default,
    _aten.arange.start,
    _aten.arange.start_step,
    torch.ops.prims.iota.default,
    _aten.tril.default,
    _aten.triu.default,
    _aten.tril_indices.default,
    _aten.triu_indices.default,
}
_SHIFTS = {
    _aten.bitwise_left_shift.Tensor_Scalar,
    _aten.bitwise_right_shift.Tensor_Scalar,
    _aten.__lshift__.Scalar,
    _aten.__rshift__.Scalar,
}
# Ops by which a limit on the result says little of the one on the position.
_CURVES = {
    "log", "log2", "log10", "log1p", "exp", "exp2", "expm1", "sqrt", "rsqrt", "pow",
    "sin", "cos", "tan", "tanh", "sigmoid", "reciprocal", "erf", "atan", "asinh",
}  # fmt: skip
# From where on an integer of the type is no longer itself.
_LIMITS: dict[torch.dtype, list[float]] = {
    torch.int8: [128.0],
    torch.uint8: [256.0],
    torch.int16: [32768.0],
}
_STEPS = (sympy.Max, sympy.Min, sympy.Piecewise, sympy.floor, sympy.ceiling)
_NO_END = 1 << 31
# Constants of so many elements are tables, and not limits.
_MAX_CONSTANTS = 64


def largest_threshold(nodes: Sequence[Node], needed: Sequence[Node]) -> float | None:
    """The largest number in the region that a size or a position may be held against.

    None where no value depends on a symbolic size; infinity where a position goes
    through a curve, so that a small number may stand for a far one.

    Args:
        nodes: of the region.
        needed: those that the results of interest are made of.
    """
    found: list[float] = []
    depends = False
    for node in nodes:
        if node.op != "call_function":
            continue
        limits = _slice_limits(node)
        if limits:
            depends = True
            found += limits
        sizes = [e for e in _symbolic_arguments(node) if e.free_symbols]
        is_shape_op = node.target in _SHAPE_OPS
        for size in sizes:
            steps = list(_step_numbers(size))
            found += steps
            if not is_shape_op or steps:
                depends = True
        if node.target is _aten.constant_pad_nd.default and sizes:
            found += [float(n) for e in sizes for n in e.atoms(sympy.Integer)]
        if node.target in _POSITION_OPS and (sizes or _has_symbolic_size(node)):
            depends = True
    if not depends:
        return None
    for node in nodes:
        found += _constants(node)
    positions = _positions(needed)
    if any(map(_bends, positions)):
        return math.inf
    found += _combined(positions)
    return max((abs(n) for n in found if abs(n) < _NO_END), default=0.0)


def _positions(nodes: Sequence[Node]) -> list[Node]:
    """Nodes that are made of positions alone, along a symbolic size."""
    constants = constant_nodes(nodes)
    found: dict[Node, None] = {}
    for node in nodes:
        if node not in constants or node.op != "call_function":
            continue
        along = any(e.free_symbols for e in _symbolic_arguments(node))
        starts = node.target in _POSITION_OPS and (along or _has_symbolic_size(node))
        if starts or any(source in found for source in node.all_input_nodes):
            found[node] = None
    return list(found)


def _bends(node: Node) -> bool:
    """Whether a position comes out as no multiple of itself; also in a float of few
    digits, which a trial in float64 does not show.
    """
    value = tensor_val(node)
    rounds = value is not None and value.dtype in (torch.bfloat16, torch.float16)
    _, _, name = str(node.target).partition(".")  # namespace.op.overload
    return rounds or name.partition(".")[0] in _CURVES


def _combined(positions: Sequence[Node]) -> list[float]:
    """Where steps by two numbers in a row (``arange // 16 < 8``), a shift or a narrow
    integer may have their limit.
    """
    numbers = {abs(n) for node in positions for n in _constants(node) if n}
    found = [a * b for a in numbers for b in numbers]
    found += [a / b for a in numbers for b in numbers]
    for node in positions:
        if node.target in _SHIFTS:
            found += [2.0 ** abs(n) for n in _constants(node) if abs(n) < 31]
        value = tensor_val(node)
        found += [] if value is None else _LIMITS.get(value.dtype, [])
    return found


def _symbolic_arguments(node: Node) -> Iterator[sympy.Expr]:
    for value in _flat((node.args, tuple(node.kwargs.values()))):
        if isinstance(value, Node) and is_number(value):
            value = value.meta["val"]
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield value.node.expr


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _step_numbers(size: sympy.Expr) -> Iterator[float]:
    """Numbers inside what is not smooth in the sizes: minima, divisions, comparisons.

    Torch has functions of its own for most of these; a sum, product or power is smooth.
    """
    for part in sympy.preorder_traversal(size):
        smooth = part.is_Atom or isinstance(part, (sympy.Add, sympy.Mul, sympy.Pow))
        if not smooth or isinstance(part, _STEPS):
            yield from (float(n) for n in part.atoms(sympy.Number) if n.is_finite)


def _slice_limits(node: Node) -> list[float]:
    """Fixed bounds of a slice of a dim whose size is a symbol."""
    if node.target not in (_aten.slice.Tensor, _aten.slice_scatter.default):
        return []
    source = tensor_val(node.args[0]) if isinstance(node.args[0], Node) else None
    dim = argument(node, "dim", 0)
    if source is None or not expression(source.shape[dim]).free_symbols:
        return []
    bounds = [argument(node, "start"), argument(node, "end")]
    return [float(b) for b in bounds if isinstance(b, int) and 0 < abs(b) < _NO_END]


def _has_symbolic_size(node: Node) -> bool:
    value = tensor_val(node)
    sizes: Iterable[Any] = () if value is None else value.shape
    return any(expression(size).free_symbols for size in sizes)


def _constants(node: Node) -> list[float]:
    """Numbers that a node computes with, or that a constant holds."""
    if node.op == "get_attr":
        held: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            held = getattr(held, part, None)
        if isinstance(held, Tensor) and 0 < held.numel() <= _MAX_CONSTANTS:
            values = held.detach().cpu().double().flatten()
            return values[values.isfinite()].tolist()
        return []
    if node.op != "call_function" or node.target in _SHAPE_OPS:
        return []
    numbers = _flat((node.args, tuple(node.kwargs.values())))
    return [
        float(n)
        for n in numbers
        if isinstance(n, (int, float)) and not isinstance(n, bool) and abs(n) < _NO_END
    ]
