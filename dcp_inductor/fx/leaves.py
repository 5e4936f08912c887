"""Tensors that hold several in one, taken apart for the search and put back after it.

Attention may hand over a row's maximum and sum in one tensor, the partial output with
its LSE as the last column, or the heads of a token in a row. A cut needs them apart, so
such a leaf is replaced by an equal tensor that is made of its parts. What no rewrite
took is as it was once ``put_back`` has run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from dcp_inductor.fx.apart import (
    behind,
    behind_collectives,
    is_leaf,
    place_of,
    split_read_part,
    split_rows,
    swap,
    turn_sign,
)
from dcp_inductor.fx.axes import statistic_axes
from dcp_inductor.fx.collectives import as_collective
from dcp_inductor.fx.emit import Emitter
from dcp_inductor.fx.nodes import argument, shape_key, tensor_val
from dcp_inductor.fx.rank_minor import split_heads

_aten = torch.ops.aten


@dataclass(frozen=True)
class Assembly:
    """A leaf, and the equal tensor that its users read meanwhile."""

    leaf: Node
    made: Node
    unread: tuple[Node, ...] = ()  # parts that no merge may look at


def take_apart(graph: Graph) -> list[Assembly]:
    """Replace leaves that hold several things by tensors made of their parts."""
    leaves = [node for node in graph.nodes if is_leaf(node) and _reaches(node)]
    made_of = split_rows(graph, leaves)
    leaves = [node for node in leaves if _dim(node) > 1]
    made_of |= split_heads(graph, [node for node in leaves if node not in made_of])
    # One tensor of each shape: layers repeat them, and only shapes are asked about.
    shapes = {_shape(node): node for node in leaves}
    for split in made_of.values():
        shapes |= {_shape(node): node for node in split.all_input_nodes}
    made: Node | None
    for take in (_flat, _pair, _with_column):
        for leaf in leaves:
            if leaf in made_of:
                continue
            others = [n for shape, n in shapes.items() if shape != _shape(leaf)]
            made = take(graph, leaf, others)
            if made is not None:
                made_of[leaf] = made
                shapes |= {_shape(node): node for node in made.all_input_nodes}
    unread: dict[Node, list[Node]] = {}
    by_shape: dict[tuple[str, ...], list[Node]] = {}
    for leaf in leaves:
        by_shape.setdefault(_shape(leaf), []).append(leaf)
    for shape, alike in by_shape.items():
        # Layers repeat shapes; of its own shape a leaf needs another one.
        around = {s: n[0] for s, n in by_shape.items() if s != shape or len(n) > 1}
        for leaf in alike:
            if leaf in made_of:
                continue
            parted = split_read_part(graph, leaf, around)
            if parted is not None:
                made_of[leaf], unread[leaf] = parted
                continue
            turned = turn_sign(graph, leaf, around)
            if turned is not None:
                made_of[leaf] = turned
    return [
        Assembly(leaf, made, tuple(unread.get(leaf, ())))
        for leaf, made in made_of.items()
    ]


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


def _dim(node: Node) -> int:
    return len(_shape(node))


def _shape(node: Node) -> tuple[str, ...]:
    value = tensor_val(node)
    assert value is not None
    return shape_key(value.shape)


def _reaches(leaf: Node) -> bool:
    return any(as_collective(node) is not None for node in behind(leaf))


def _pair(graph: Graph, leaf: Node, others: list[Node]) -> Node | None:
    """Two statistics of the rows of another leaf, along the first or last dim."""
    value = tensor_val(leaf)
    assert value is not None
    shape = shape_key(value.shape)
    for dim in (value.dim() - 1, 0):
        rest = shape[:dim] + shape[dim + 1 :]
        if shape[dim] != "2" or not any(_has_rows(other, rest) for other in others):
            continue
        with graph.inserting_before(place_of(leaf).next):
            emitter = Emitter(graph, leaf)
            parts = [emitter.call(_aten.select.int, leaf, dim, i) for i in (0, 1)]
            made = emitter.call(_aten.stack.default, parts, dim)
        return swap(leaf, made, emitter.created)
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
    if not any(_cuts_column(node, width) for node in behind_collectives(leaf)):
        return None
    with graph.inserting_before(place_of(leaf).next):
        emitter = Emitter(graph, leaf)
        rows = emitter.call(_aten.slice.Tensor, leaf, -1, 0, width - 1)
        column = emitter.call(_aten.select.int, leaf, -1, width - 1)
        column = emitter.call(_aten.unsqueeze.default, column, -1)
        made = emitter.call(_aten.cat.default, [rows, column], -1)
    return swap(leaf, made, emitter.created)


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
        with graph.inserting_before(place_of(leaf).next):
            emitter = Emitter(graph, leaf)
            apart = emitter.call(
                _aten.reshape.default, leaf, [-1, heads, width // heads]
            )
            made = emitter.call(_aten.reshape.default, apart, [-1, width])
        return swap(leaf, made, emitter.created)
    return None
