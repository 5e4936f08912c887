"""Add nodes to a graph, each with the metadata that later passes and lowerings read."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._sympy.functions import FloorDiv

from dcp_inductor.fx.nodes import (
    copy_origin,
    expression,
    shape_key,
    size_name,
    tensor_val,
)

_aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default

Size = int | Node  # an argument that stands for a size: a number or a node of one


class CannotExpress(Exception):
    """The views that a rewrite needs cannot be written for these symbolic sizes."""


class Emitter:
    """Creates nodes at the graph's insertion point, with fake results and the user's
    location.
    """

    def __init__(self, graph: Graph, origin: Node) -> None:
        self._graph = graph
        self._origin = origin
        self.created: list[Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call of ``target`` whose fake result is in ``meta["val"]``."""
        node = self._graph.call_function(target, args, kwargs)
        with self._mode() as mode:
            fakes = torch.fx.node.map_arg((args, kwargs), partial(_fake_in, mode))
            node.meta["val"] = target(*fakes[0], **fakes[1])
        copy_origin(self._origin, node)
        self.created.append(node)
        return node

    def _mode(self) -> Any:
        return _val(self._origin).fake_mode  # type: ignore[attr-defined]

    def item(self, node: Node, index: int) -> Node:
        """One result of a node with several."""
        result = self._graph.call_function(operator.getitem, (node, index))
        result.meta["val"] = node.meta["val"][index]
        copy_origin(self._origin, result)
        self.created.append(result)
        return result

    def permute(self, node: Node, order: Sequence[int]) -> Node:
        """The node's dims in another order."""
        if list(order) == list(range(len(order))):
            return node
        return self.call(_aten.permute.default, node, list(order))

    def reshape(self, node: Node, sizes: Sequence[int | torch.SymInt]) -> Node:
        """The node in another shape.

        Raises:
            CannotExpress: two sizes of the shape are symbolic and not sizes of the
            node.
        """
        if shape_key(_val(node).shape) == shape_key(sizes):
            return node
        return self.call(_aten.reshape.default, node, self._size_arguments(node, sizes))

    def _undo(self) -> None:
        """Erase what was added: the rewrite gives up."""
        for node in reversed(self.created):
            self._graph.erase_node(node)

    def _size_arguments(
        self, node: Node, sizes: Sequence[int | torch.SymInt]
    ) -> list[Size]:
        known = {size_name(size): dim for dim, size in enumerate(_val(node).shape)}
        sizes = [_plain(size, _val(node).shape) for size in sizes]
        arguments: list[Size] = []
        inferred = 0
        symbolic = [size for size in sizes if not size_name(size).isdigit()]
        for size in sizes:
            name = size_name(size)
            if name.isdigit():
                arguments.append(int(name))
            elif len(symbolic) > 1 and name in known:
                arguments.append(self.call(_aten.sym_size.int, node, known[name]))
            else:
                inferred += 1
                arguments.append(-1)
        if inferred > 1:
            self._undo()
            raise CannotExpress(f"no views make shape {shape_key(sizes)}")
        return arguments

    def narrow(self, node: Node, dim: int, start: int, length: int) -> Node:
        """A part of one dim."""
        return self.call(_aten.slice.Tensor, node, dim, start, start + length)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """The node in another dtype."""
        return node if _val(node).dtype == dtype else self.call(_convert, node, dtype)

    def like(self, node: Node, model: Tensor) -> Node:
        """The node in ``model``'s dtype, and contiguous where the model is."""
        node = self.cast(node, model.dtype)
        if _is_contiguous(model) and not _is_contiguous(_val(node)):
            node = self.call(
                _aten.clone.default, node, memory_format=torch.contiguous_format
            )
        return node


def _plain(size: int | torch.SymInt, known: torch.Size) -> int | torch.SymInt:
    """The size as a number where that follows from a division of a known size, which
    comes out even: s // (s // 10) is 10.
    """
    even = {
        division.args[0]: division.args[1]
        * sympy.Symbol("k", positive=True, integer=True)
        for other in known
        for division in expression(other).atoms(FloorDiv)
        if division.args[0].is_Symbol and division.args[1].is_Integer
    }
    plain = expression(size).xreplace(even)
    return int(plain) if plain.is_Integer else size


def _is_contiguous(tensor: Tensor) -> bool:
    """Whether the strides are a contiguous tensor's, asking no symbol's value."""
    expected = sympy.Integer(1)
    for size, stride in zip(
        reversed(tensor.shape), reversed(tensor.stride()), strict=True
    ):
        if size_name(size) == "1":
            continue
        if expression(stride) != expected:
            return False
        expected *= expression(size)
    return True


def _val(node: Node) -> Tensor:
    value = tensor_val(node)
    assert value is not None
    return value


def _fake_in(mode: Any, node: Node) -> Any:
    """The node's fake result under ``mode``.

    make_fx on real inputs describes every node under a mode of its own; sizes are plain
    numbers there.
    """
    value = node.meta["val"]
    if not isinstance(value, Tensor) or value.fake_mode is mode:  # type: ignore[attr-defined]
        return value
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    )
