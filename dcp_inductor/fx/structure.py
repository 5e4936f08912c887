"""The structure of a region as a value: what two regions share when one proof serves
both.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from dcp_inductor.fx.collectives import as_collective, is_wait
from dcp_inductor.fx.lockstep import Lockstep, Unsupported, constant_of
from dcp_inductor.fx.nodes import (
    Symbols,
    expression,
    is_number,
    is_pointwise,
    is_view_like,
    tensor_val,
)
from dcp_inductor.fx.region import Region, is_constant_name

_aten = torch.ops.aten
# Ops that move elements without computing. T = 1 and T > 1 differ in these alone, and
# so do ranks of which one pads the operands of a matrix product, as Inductor does on
# each rank by timings of its own.
_MOVERS = {
    operator.getitem,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.cat.default,
    _aten.stack.default,
    _aten.expand.default,
    _aten.constant_pad_nd.default,
    _aten.copy.default,
    _aten.empty.memory_format,
    torch.ops.prims.convert_element_type.default,
    _aten._to_copy.default,
}


# What a constant passes through unchanged.
_CARRIERS = _MOVERS | {
    _aten.clone.default,
    _aten.lift_fresh_copy.default,
    _aten.alias.default,
}
_MAX_CONSTANT = 4096  # elements looked at; a frozen weight has more
_MAX_FOLDED = 64  # nodes of constants behind one
_MARK = 1e4
_SUMS = {
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten.mean.default,
    _aten.mean.dim,
    _aten.prod.default,
    _aten.prod.dim_int,
}
_TERMS = {_aten.add.Tensor, _aten.sub.Tensor}
_CHOICES = {
    _aten.where.self,
    _aten.masked_fill.Scalar,
    _aten.masked_fill.Tensor,
    _aten.maximum.default,
    _aten.minimum.default,
    _aten.clamp.Tensor,
    _aten.eq.Tensor,
    _aten.ne.Tensor,
    _aten.lt.Tensor,
    _aten.le.Tensor,
    _aten.gt.Tensor,
    _aten.ge.Tensor,
    _aten.logical_and.default,
    _aten.logical_or.default,
    _aten.logical_xor.default,
    _aten.bitwise_and.Tensor,
    _aten.bitwise_or.Tensor,
    _aten.bitwise_xor.Tensor,
}
_FILLS = {_aten.full.default, _aten.scalar_tensor.default}


def fingerprint(region: Region) -> tuple[Any, ...]:
    """A hashable value, equal for regions that differ only in names of nodes and
    symbols.
    """
    number: dict[Node, int] = {}
    symbols: dict[sympy.Symbol, str] = {}

    def size(value: Any) -> Any:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            expr = value.node.expr
            for symbol in sorted(expr.free_symbols, key=str):
                symbols.setdefault(symbol, f"s{len(symbols)}")
            return str(expr.xreplace({s: sympy.Symbol(n) for s, n in symbols.items()}))
        return value

    def argument(value: Any) -> Any:
        if isinstance(value, Node):
            if value in number:
                return ("node", number[value])
            return (
                ("size", size(value.meta.get("val"))) if is_number(value) else "outside"
            )
        if isinstance(value, (list, tuple)):
            return tuple(argument(item) for item in value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return ("size", size(value))
        if isinstance(value, float):
            return ("float", repr(value))  # NaN equals itself here
        if isinstance(value, (int, str, bool, type(None))):
            return (type(value).__name__, value)
        return str(value)

    rows: list[Any] = []
    given = (*region.leaves, *region.unread)
    for node in (*given, *region.nodes):
        number[node] = len(number)
        if node in given:
            value = tensor_val(node)
            assert value is not None
            rows.append((str(value.dtype), tuple(size(s) for s in value.shape)))
        elif node.op == "get_attr":
            rows.append(("constant", _digest(node)))
        else:
            keywords = tuple((k, argument(v)) for k, v in sorted(node.kwargs.items()))
            rows.append((str(node.target), argument(node.args), keywords))
    exits = tuple(number[node] for node in region.exits())
    return (tuple(rows), len(region.leaves), exits)


def _digest(node: Node) -> str:
    value = constant_of(node).clone(memory_format=torch.contiguous_format)
    data = value.view(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype}{tuple(value.shape)}{hashlib.sha256(data).hexdigest()}"


def site_key(kind: str, nodes: Sequence[Node], world_size: int, feature: Any) -> str:
    """A short name of a site's structure, free of T and of rank constants.

    Ranks that compiled the same site at different T, or whose graphs differ in own-rank
    constants or in padding, arrive at the same key, so that they find each other's
    votes. Ranks that send what they computed with other numbers do not: a proof takes a
    peer's for its own rank's. Numbers behind all collectives are each rank's affair.
    """
    parts: list[str] = [kind, str(world_size), str(feature)]
    steps = []
    variable = set(nodes)
    sent = set(sent_from(nodes))
    for node in nodes:
        collective = as_collective(node)
        if collective is not None:
            steps.append(f"{collective.kind} {collective.reduce_op}")
        elif (
            node.op == "call_function"
            and node.target not in _MOVERS
            and not is_view_like(node)
            and not is_wait(node)
            and not is_number(node)
        ):
            step = [str(node.target)]
            if node in sent:
                step += [*_numbers(node), *_constants(node, variable)]
                step += _summands(node)
            steps.append(" ".join(step))
    parts += sorted(steps)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]


def sent_from(nodes: Sequence[Node]) -> list[Node]:
    """The collectives among the nodes, and what leads to them, last ones first."""
    sent: dict[Node, None] = {}
    for node in reversed(nodes):
        if as_collective(node) is not None or any(user in sent for user in node.users):
            sent[node] = None
    return list(sent)


def _numbers(node: Node) -> list[str]:
    """Numbers that the op computes with; other integers are dims, sizes and places."""
    pointwise = is_pointwise(node)
    return [
        repr(float(value))
        for value in (*node.args, *node.kwargs.values())
        if isinstance(value, float)
        or (pointwise and isinstance(value, int) and not isinstance(value, bool))
    ]


def _summands(node: Node) -> list[str]:
    """How many elements make one of a sum, a mean or a product, if that is static."""
    if node.target not in _SUMS:
        return []
    source, result = tensor_val(node.args[0]), tensor_val(node)
    if source is None or result is None:
        return []
    count = sympy.cancel(_elements(source) / _elements(result))
    return [str(count)] if count.is_Integer else []


def _elements(value: Tensor) -> sympy.Expr:
    return sympy.prod(map(expression, value.shape))


def _constants(node: Node, variable: set[Node]) -> list[str]:
    """Values of the inputs that no leaf has a part in, in whatever shape."""
    found = []
    for source in node.all_input_nodes:
        value = tensor_val(source)
        if source in variable or value is None:
            continue
        computes = value.is_floating_point() or is_pointwise(node)
        held = folded(source) if computes else None
        if held is not None:
            found += _values(held, node)
            continue
        while source.all_input_nodes and (
            source.target in _CARRIERS or is_view_like(source)
        ):
            source = source.all_input_nodes[0]
            if source in variable:
                break
        if source.target in _FILLS:
            found += [
                repr(float(v)) for v in source.args if isinstance(v, (int, float))
            ]
    return found


def _values(held: Tensor, node: Node) -> list[str]:
    """What tells numbers of one rank from another's.

    None where ``node`` does no more with them than to mark places, the rank's own
    mostly: factors of zero and one, terms of zero and of what is as good as infinite,
    and any of these to choose by.
    """
    values = held.double().flatten()
    marks = torch.zeros_like(values, dtype=torch.bool)
    if node.target in _CHOICES or node.target in _TERMS:
        marks |= (values == 0) | ~(values.abs() < _MARK)
    if node.target in _CHOICES or node.target is _aten.mul.Tensor:
        marks |= (values == 0) | (values == 1)
    if bool(marks.all()):
        return []
    if not bool((values != values[0]).any()):
        return [repr(float(values[0]))]  # in whatever shape
    return [hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]]


def folded(node: Node) -> Tensor | None:
    """The value of a node that depends on constants alone, or None: it has an input, a
    symbolic size, or too many elements.
    """
    needed: dict[Node, None] = {}
    stack = [node]
    while stack:
        each = stack.pop()
        value = tensor_val(each)
        small = value is not None and not any(
            isinstance(size, torch.SymInt) for size in value.shape
        )
        named = each.op == "call_function" or (
            each.op == "get_attr" and is_constant_name(each)
        )
        if (
            not named
            or not small
            or value.numel() > _MAX_CONSTANT
            or as_collective(each) is not None
            or len(needed) > _MAX_FOLDED
        ):
            return None
        if each not in needed:
            needed[each] = None
            stack += each.all_input_nodes
    run = Lockstep(
        sorted(needed), {}, world_size=1, rank=0, symbols=Symbols(), exact=False,
        reading="absolute",
    )  # fmt: skip
    try:
        result = run.run()[node]
    except (Unsupported, ValueError):
        return None
    return result if isinstance(result, Tensor) else None


class Memo:
    """Results by structure, the oldest dropped when full."""

    def __init__(self, capacity: int = 512) -> None:
        self._capacity = capacity
        self._entries: dict[Any, Any] = {}

    def get(self, key: Any, make: Callable[[], Any]) -> tuple[Any, bool]:
        """The entry of the key, made if missing, and whether it was there."""
        if key in self._entries:
            return self._entries[key], True
        if len(self._entries) >= self._capacity:
            self._entries.pop(next(iter(self._entries)))
        self._entries[key] = make()
        return self._entries[key], False
