"""Facts about single FX nodes; no policy lives here."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._sympy.functions import FloorDiv

Arg = Any  # what FX allows as an argument: nodes, numbers, strings, nested lists

_VIEW_OPS = {
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.t.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.detach.default,
}
# Ops whose result holds elements of their inputs, whatever these are.
_MOVING_OPS = _VIEW_OPS | {
    operator.getitem,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int,
    torch.ops.aten.select_scatter.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.unbind.int,
    torch.ops.aten.cat.default,
    torch.ops.aten.stack.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_select.default,
    torch.ops.aten.flip.default,
    torch.ops.aten.roll.default,
    torch.ops.aten.copy.default,
    torch.ops.aten.view.dtype,
}
_CAST_OPS = {
    torch.ops.prims.convert_element_type.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.to.dtype,
}
# float8 types do not promote.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+)')
# What Dynamo calls the rest of a function behind a graph break.
_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<function>\S+)_at_(?P<line>\d+)")
_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_PURE_NAMESPACES = ("aten", "prims")
# Their result depends on the strides of real inputs, which a trial does not reproduce.
_STRIDE_READERS = {torch.ops.aten.as_strided.default}


def tensor_val(node: Node) -> torch.Tensor | None:
    """The fake tensor that describes the node's result, or None for anything else."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def is_number(node: Node) -> bool:
    """Whether the node stands for a (symbolic) number rather than a tensor."""
    return isinstance(
        node.meta.get("val"),
        (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool),
    )


def tensor_inputs(node: Node) -> list[Node]:
    """Input nodes that are tensors or lists of tensors."""
    return [source for source in node.all_input_nodes if not is_number(source)]


def is_pure(node: Node) -> bool:
    """Whether the node is plain functional tensor code, the same on every run."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in _PURE_NAMESPACES
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and target not in _STRIDE_READERS
    )


def reads_no_strides(node: Node) -> bool:
    """Whether the node means the same whatever the strides of its inputs are."""
    return node.op != "call_function" or node.target not in _STRIDE_READERS


def is_view_like(node: Node) -> bool:
    """Whether the node holds all elements of its first input, in some layout."""
    return node.op == "call_function" and node.target in _VIEW_OPS


def only_moves(node: Node) -> bool:
    """Whether the node copies elements and never looks at them."""
    return node.op == "call_function" and node.target in _MOVING_OPS


def carries(node: Node) -> bool:
    """Whether the node moves elements, pads them, or casts each to another float."""
    if node.op != "call_function":
        return True
    result = tensor_val(node)
    if result is not None and not result.dtype.is_floating_point:
        return False
    return (
        only_moves(node)
        or node.target in _CAST_OPS
        or node.target is torch.ops.aten.constant_pad_nd.default
    )


def is_widening_cast(node: Node) -> bool:
    """Whether the node only casts its input to a float type that holds it exactly."""
    if node.op != "call_function" or node.target not in _CAST_OPS:
        return False
    source = node.args[0]
    result = tensor_val(node)
    value = tensor_val(source) if isinstance(source, Node) else None
    if value is None or result is None:
        return False
    if value.dtype not in _FLOATS or result.dtype not in _FLOATS:
        return False
    return torch.promote_types(value.dtype, result.dtype) == result.dtype


def bits_matter(node: Node) -> bool:
    """Whether the node reads or makes the bit pattern of a float."""
    return node.op == "call_function" and node.target is torch.ops.aten.view.dtype


def argument(node: Node, name: str, default: Arg = None) -> Arg:
    """The node's argument called ``name`` in its schema."""
    if name in node.kwargs:
        return node.kwargs[name]
    for position, parameter in enumerate(node.target._schema.arguments):
        if parameter.name == name:
            if position < len(node.args):
                return node.args[position]
            return parameter.default_value if parameter.has_default_value() else default
    return default


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """The size as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def size_name(size: int | torch.SymInt) -> str:
    """The size in a form that compares and hashes without guarding on symbols."""
    return str(expression(size))


def is_pointwise(node: Node) -> bool:
    """Whether torch calls the op one of single elements."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def traced_size(size: int | torch.SymInt) -> int:
    """The size that the graph was traced with, without a guard on it; 0 if unknown."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 0


def shape_key(sizes: Iterable[int | torch.SymInt]) -> tuple[str, ...]:
    """Names of the sizes of a shape."""
    return tuple(map(size_name, sizes))


class Symbols(dict[sympy.Symbol, int]):
    """Concrete numbers for the symbolic sizes of a graph."""

    def number(self, value: Any) -> Any:
        """A number, symbolic number or node of one, as a plain number."""
        if isinstance(value, Node):
            value = value.meta["val"]
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            result = sympy.sympify(value.node.expr.xreplace(self))
            if result.free_symbols:
                raise ValueError(f"size {result} has no number in this trial")
            return int(result) if isinstance(value, torch.SymInt) else float(result)
        if isinstance(value, torch.SymBool):
            return bool(sympy.sympify(value.node.expr.xreplace(self)))
        return value

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The tensor's shape in plain numbers."""
        return tuple(self.number(size) for size in tensor.shape)


def step_of(tensors: Iterable[torch.Tensor]) -> int:
    """A number of which symbolic sizes must be multiples for the tensors' shapes to
    come out even.
    """
    step = 1
    for tensor in tensors:
        for size in tensor.shape:
            for division in expression(size).atoms(FloorDiv):
                if division.args[1].is_Integer:
                    step = math.lcm(step, int(division.args[1]))
    return step


def free_symbols(nodes: Iterable[Node]) -> list[sympy.Symbol]:
    """Symbols in the sizes of the nodes' results and in numbers that they read, in a
    stable order.
    """
    found: dict[sympy.Symbol, None] = {}
    for node in nodes:
        value = node.meta.get("val")
        tensors = list(value) if isinstance(value, (list, tuple)) else [value]
        tensors += [
            read.meta["val"]
            for read in node.all_input_nodes
            if isinstance(read.meta.get("val"), torch.SymInt)
        ]
        for tensor in tensors:
            sizes: Iterable[Any] = ()
            if isinstance(tensor, torch.Tensor):
                sizes = tensor.shape
            elif isinstance(tensor, torch.SymInt):
                sizes = [tensor]
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    for symbol in sorted(size.node.expr.free_symbols, key=str):
                        found.setdefault(symbol)
    return list(found)


def source_line(node: Node) -> str:
    """The innermost line of user code that led to the node: ``file:line code``."""
    return " ".join(_innermost(node)).strip()


def location(node: Node) -> str:
    """``file:line`` of it; paths may hold spaces."""
    return _innermost(node)[0]


def graph_break(nodes: Iterable[Node]) -> str:
    """Where the graph break is behind which the nodes' graph begins; "" without one."""
    for node in nodes:
        match = _RESUMED.search(node.meta.get("stack_trace") or "")
        if match:
            return f"line {match['line']} of {match['function']}"
    return ""


def _innermost(node: Node) -> tuple[str, str]:
    """Location and code; frames inside torch itself (the collectives' own wrappers) are
    passed over.
    """
    found = ("", "")
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    for position, line in enumerate(lines):
        match = _FRAME.match(line)
        if match is None or match["file"].startswith(_TORCH_FOLDER):
            continue
        code = lines[position + 1] if position + 1 < len(lines) else ""
        found = (f"{match['file']}:{match['line']}", code)
    return found


def copy_origin(source: Node, target: Node) -> None:
    """Let a new node carry the user's location of the one that it stands for."""
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten"):
        if key in source.meta:
            target.meta[key] = source.meta[key]


def map_arguments(value: Arg, convert: Mapping[type, Any]) -> Arg:
    """Rebuild nested arguments, converting each leaf by the first matching type."""
    if isinstance(value, (list, tuple)):
        return type(value)(map_arguments(item, convert) for item in value)
    for kind, function in convert.items():
        if isinstance(value, kind):
            return function(value)
    return value
