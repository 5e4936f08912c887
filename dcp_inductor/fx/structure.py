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
from torch.fx import Node

from dcp_inductor.fx.collectives import as_collective, is_wait
from dcp_inductor.fx.lockstep import constant_of
from dcp_inductor.fx.nodes import is_number, is_view_like, tensor_val
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
    sent: set[Node] = set()
    for node in reversed(nodes):
        if as_collective(node) is not None or any(user in sent for user in node.users):
            sent.add(node)
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
            steps.append(" ".join(step))
    parts += sorted(steps)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]


def _numbers(node: Node) -> list[str]:
    """Numbers that the op computes with; other integers are dims, sizes and places."""
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return [
        repr(float(value))
        for value in (*node.args, *node.kwargs.values())
        if isinstance(value, float)
        or (pointwise and isinstance(value, int) and not isinstance(value, bool))
    ]


def _constants(node: Node, variable: set[Node]) -> list[str]:
    """Values of the inputs that are one number, in whatever shape."""
    found = []
    for source in node.all_input_nodes:
        while (
            source not in variable
            and source.all_input_nodes
            and (source.target in _CARRIERS or is_view_like(source))
        ):
            source = source.all_input_nodes[0]
        value = tensor_val(source)
        if source in variable or value is None:
            continue
        if source.target in _FILLS:
            found += [
                repr(float(v)) for v in source.args if isinstance(v, (int, float))
            ]
        elif (
            source.op == "get_attr"
            and is_constant_name(source)
            and value.numel() <= _MAX_CONSTANT
        ):
            held = constant_of(source)
            # One that differs within picks a place, the rank's own mostly.
            if held.is_floating_point() and held.unique().numel() == 1:
                found.append(repr(float(held.flatten()[0])))
    return found


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
