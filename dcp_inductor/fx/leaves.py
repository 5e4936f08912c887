"""Tensors that hold several in one, taken apart for the search and put back after it.

Attention may hand over a row's maximum and sum in one tensor, the partial output with
its LSE as the last column, or the heads of a token in a row. A cut needs them apart, so
such a leaf is replaced by an equal tensor that is made of its parts. What no rewrite
took is as it was once ``put_back`` has run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from dcp_inductor.fx.axes import statistic_axes
from dcp_inductor.fx.collectives import as_collective, is_wait
from dcp_inductor.fx.emit import Emitter
from dcp_inductor.fx.nodes import argument, is_number, is_pure, shape_key, tensor_val
from dcp_inductor.fx.region import is_contraction

_aten = torch.ops.aten
_MAX_FORWARD = 24  # nodes from a leaf to the collective that sends it


@dataclass(frozen=True)
class Assembly:
    """A leaf, and the equal tensor that its users read meanwhile."""

    leaf: Node
    made: Node


def take_apart(graph: Graph) -> list[Assembly]:
    """Replace leaves that hold several things by tensors made of their parts."""
    leaves = [node for node in graph.nodes if _is_leaf(node) and _reaches(node)]
    made_of: dict[Node, Node] = {}
    # One tensor of each shape: layers repeat them, and only shapes are asked about.
    shapes = {_shape(node): node for node in leaves}
    for take in (_flat, _pair, _with_column):
        for leaf in leaves:
            if leaf in made_of:
                continue
            others = [n for shape, n in shapes.items() if shape != _shape(leaf)]
            made = take(graph, leaf, others)
            if made is not None:
                made_of[leaf] = made
                shapes |= {_shape(node): node for node in made.all_input_nodes}
    return [Assembly(leaf, made) for leaf, made in made_of.items()]


def put_back(graph: Graph, assemblies: list[Assembly]) -> None:
    """Let users that are left read the leaves themselves again."""
    alive = set(graph.nodes) if assemblies else set()
    for assembly in assemblies:
        if assembly.made in alive:
            assembly.made.replace_all_uses_with(assembly.leaf)
        stack = [assembly.made]
        while stack:
            node = stack.pop()
            if node in alive and node is not assembly.leaf and not node.users:
                stack += node.all_input_nodes
                graph.erase_node(node)
                alive.remove(node)


def _shape(node: Node) -> tuple[str, ...]:
    value = tensor_val(node)
    assert value is not None
    return shape_key(value.shape)


def _is_leaf(node: Node) -> bool:
    """Whether a merge may start at the node because nothing is opened behind it."""
    value = tensor_val(node)
    if value is None or not value.dtype.is_floating_point or value.dim() < 2:
        return False
    if node.op == "placeholder":
        return True
    if node.op != "call_function" or as_collective(node) is not None or is_wait(node):
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and _is_opaque(source)
    return _is_opaque(node)


def _is_opaque(node: Node) -> bool:
    if as_collective(node) is not None or is_wait(node):
        return False
    return not is_pure(node) or is_contraction(node)


def _behind(leaf: Node) -> Iterator[Node]:
    """Plain tensor code and collectives behind the leaf, nearest first."""
    queue, seen = list(leaf.users), set(leaf.users)
    for _ in range(_MAX_FORWARD):
        if not queue:
            return
        node = queue.pop(0)
        yield node
        if as_collective(node) is not None or _is_opaque(node) or is_number(node):
            continue
        for user in node.users:
            if user not in seen:
                seen.add(user)
                queue.append(user)


def _reaches(leaf: Node) -> bool:
    return any(as_collective(node) is not None for node in _behind(leaf))


def _swap(leaf: Node, made: Node, own: list[Node]) -> Node:
    """Let the leaf's users read ``made``, but for the nodes that it is made by."""
    leaf.replace_all_uses_with(made, delete_user_cb=lambda user: user not in own)
    return made


def _place(leaf: Node) -> Node:
    """The node after which something may be made of the leaf."""
    place = leaf
    while place.next.op == "placeholder":
        place = place.next
    return place


def _pair(graph: Graph, leaf: Node, others: list[Node]) -> Node | None:
    """Two statistics of the rows of another leaf, along the first or last dim."""
    value = tensor_val(leaf)
    assert value is not None
    shape = shape_key(value.shape)
    for dim in (value.dim() - 1, 0):
        rest = shape[:dim] + shape[dim + 1 :]
        if shape[dim] != "2" or not any(_has_rows(other, rest) for other in others):
            continue
        with graph.inserting_before(_place(leaf).next):
            emitter = Emitter(graph, leaf)
            parts = [emitter.call(_aten.select.int, leaf, dim, i) for i in (0, 1)]
            made = emitter.call(_aten.stack.default, parts, dim)
        return _swap(leaf, made, emitter.created)
    return None


def _has_rows(node: Node, statistic: tuple[str, ...]) -> bool:
    value = tensor_val(node)
    assert value is not None
    shape = shape_key(value.shape)
    return len(shape) > len(statistic) and bool(statistic_axes(statistic, shape))


def _with_column(graph: Graph, leaf: Node, others: list[Node]) -> Node | None:
    """Rows of D numbers with one more behind them, which the code cuts off."""
    value = tensor_val(leaf)
    assert value is not None
    width = value.shape[-1]
    if value.dim() < 3 or not isinstance(width, int) or width < 3:
        return None
    if not any(_cuts_column(node, width) for node in _behind_collectives(leaf)):
        return None
    with graph.inserting_before(_place(leaf).next):
        emitter = Emitter(graph, leaf)
        rows = emitter.call(_aten.slice.Tensor, leaf, -1, 0, width - 1)
        column = emitter.call(_aten.select.int, leaf, -1, width - 1)
        column = emitter.call(_aten.unsqueeze.default, column, -1)
        made = emitter.call(_aten.cat.default, [rows, column], -1)
    return _swap(leaf, made, emitter.created)


def _behind_collectives(leaf: Node) -> Iterator[Node]:
    """The same as :func:`_behind`, and on through the collectives."""
    for node in _behind(leaf):
        yield node
        if as_collective(node) is not None:
            for wait in node.users:
                yield from _behind(wait)


def _cuts_column(node: Node, width: int) -> bool:
    """Whether the node separates the last of ``width`` columns from the others."""
    if (
        node.op != "call_function"
        or not node.args
        or not isinstance(node.args[0], Node)
    ):
        return False
    source = tensor_val(node.args[0])
    if source is None or source.dim() == 0:
        return False
    if node.target is _aten.split_with_sizes.default:
        dim, sizes = argument(node, "dim", 0), node.args[1]
        return dim in (-1, source.dim() - 1) and list(sizes) == [width - 1, 1]
    if node.target is _aten.slice.Tensor:
        dim = argument(node, "dim", 0)
        bounds = (argument(node, "start"), argument(node, "end"))
        at = {bound for bound in bounds if isinstance(bound, int)}
        last = dim in (-1, source.dim() - 1) and source.shape[dim] == width
        return last and bool(at & {width - 1, -1})
    if node.target is _aten.select.int:
        dim, index = node.args[1], node.args[2]
        last = dim in (-1, source.dim() - 1) and source.shape[dim] == width
        return last and index in (-1, width - 1)
    return False


def _flat(graph: Graph, leaf: Node, others: list[Node]) -> Node | None:
    """All heads of a token in a row, where another leaf has a number for each head."""
    value = tensor_val(leaf)
    assert value is not None
    width = value.shape[-1]
    if value.dim() != 2 or not isinstance(width, int):
        return None
    rows = shape_key(value.shape)[0]
    for other in others:
        lse = tensor_val(other)
        if lse is None or lse.dim() not in (2, 3):
            continue
        heads = lse.shape[1]
        if not isinstance(heads, int) or shape_key(lse.shape)[0] != rows:
            continue
        if lse.dim() == 3 and lse.shape[2] not in (1, 2):
            continue
        if heads < 2 or width % heads or width // heads < 2:
            continue
        with graph.inserting_before(_place(leaf).next):
            emitter = Emitter(graph, leaf)
            apart = emitter.call(
                _aten.reshape.default, leaf, [-1, heads, width // heads]
            )
            made = emitter.call(_aten.reshape.default, apart, [-1, width])
        return _swap(leaf, made, emitter.created)
    return None
