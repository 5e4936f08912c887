"""Leaves whose shape hides a merge: rows of all heads in one dim, and a statistic that
lies in a larger tensor.

``fx/leaves.py`` calls these in turn. Each puts an equal tensor, made of the parts, in
the leaf's place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from dcp_inductor.fx.axes import statistic_axes
from dcp_inductor.fx.collectives import as_collective, is_wait
from dcp_inductor.fx.emit import Emitter
from dcp_inductor.fx.nodes import (
    argument,
    carries,
    expression,
    is_number,
    is_pure,
    shape_key,
    size_name,
    tensor_val,
)
from dcp_inductor.fx.region import is_contraction

_aten = torch.ops.aten
_MAX_FORWARD = 24  # nodes from a leaf to the collective that sends it
_VIEWS = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}

Sizes = tuple[int | torch.SymInt, ...]
Shapes = Mapping[tuple[str, ...], Node]


def is_leaf(node: Node) -> bool:
    """Whether a merge may start at the node because nothing is opened behind it."""
    value = tensor_val(node)
    if value is None or not value.dtype.is_floating_point or value.dim() < 1:
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


def behind(leaf: Node) -> Iterator[Node]:
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


def behind_collectives(leaf: Node) -> Iterator[Node]:
    """The same as :func:`behind`, and on through the collectives."""
    for node in behind(leaf):
        yield node
        if as_collective(node) is not None:
            for wait in node.users:
                yield from behind(wait)


def swap(leaf: Node, made: Node, own: Sequence[Node]) -> Node:
    """Let the leaf's users read ``made``, but for the nodes that it is made by."""
    leaf.replace_all_uses_with(made, delete_user_cb=lambda user: user not in own)
    return made


def place_of(leaf: Node) -> Node:
    """The node after which something may be made of the leaf."""
    place = leaf
    while place.next.op == "placeholder":
        place = place.next
    return place


def split_rows(graph: Graph, leaves: Sequence[Node]) -> dict[Node, Node]:
    """Give the heads of [T * H, D] and [T * H] a dim of their own, where views behind
    them do.

    Returns:
        For each leaf that was split the tensor that its users read now.
    """
    by_rows: dict[str, list[Node]] = {}
    for leaf in leaves:
        shape = shape_key(_val(leaf).shape)
        if len(shape) <= 2:
            by_rows.setdefault(shape[0], []).append(leaf)
    made_of: dict[Node, Node] = {}
    for members in by_rows.values():
        statistics = [leaf for leaf in members if _is_column(leaf)]
        if not statistics:
            continue
        outputs = [leaf for leaf in members if not _is_column(leaf)]
        factors = next(filter(None, map(_factors, (*outputs, *statistics))), None)
        if factors is None:
            continue
        if not outputs and not any(_has_dims(leaf, factors) for leaf in leaves):
            continue
        for leaf in members:
            made = _split(graph, leaf, factors)
            if made is not None:
                made_of[leaf] = made
    return made_of


def _is_column(leaf: Node) -> bool:
    return shape_key(_val(leaf).shape)[1:] in ((), ("1",))


def _has_dims(leaf: Node, factors: Sizes) -> bool:
    shape = shape_key(_val(leaf).shape)
    return len(shape) > len(factors) and set(shape_key(factors)) <= set(shape)


def _factors(leaf: Node) -> Sizes | None:
    """The dims that a view behind the leaf makes of its first one."""
    rows = _val(leaf).shape[0]
    for node in behind_collectives(leaf):
        if node.op != "call_function" or node.target not in _VIEWS:
            continue
        source, result = tensor_val(node.args[0]), tensor_val(node)
        if source is None or result is None:
            continue
        # A size that the view is given; torch may describe the result's otherwise.
        sizes = tuple(
            given if isinstance(given, int) and given > 0 else size
            for given, size in zip(node.args[1], result.shape, strict=True)
        )
        whole, parts = _differing(tuple(source.shape), sizes)
        parts = tuple(size for size in parts if shape_key([size]) != ("1",))
        if len(whole) != 1 or len(parts) < 2:
            continue
        if shape_key(whole) == shape_key([rows]):
            return parts
        # All ranks' rows, of which each rank has one part.
        if len(parts) > 2 and expression(whole[0]) == (
            expression(parts[0]) * expression(rows)
        ):
            return parts[1:]
    return None


def _differing(before: Sizes, after: Sizes) -> tuple[Sizes, Sizes]:
    """Two shapes without the sizes in which they begin and end alike."""
    names, others = shape_key(before), shape_key(after)
    most = min(len(names), len(others))
    front = 0
    while front < most and names[front] == others[front]:
        front += 1
    back = 0
    while back < most - front and names[-1 - back] == others[-1 - back]:
        back += 1
    return before[front : len(before) - back], after[front : len(after) - back]


def _split(graph: Graph, leaf: Node, factors: Sizes) -> Node | None:
    rest = [int(size) for size in shape_key(_val(leaf).shape)[1:] if size.isdigit()]
    sizes = [int(size) if size.isdigit() else -1 for size in shape_key(factors)]
    if sizes.count(-1) > 1 or len(rest) != _val(leaf).dim() - 1:
        return None
    with graph.inserting_before(place_of(leaf).next):
        emitter = Emitter(graph, leaf)
        apart = emitter.call(_aten.reshape.default, leaf, [*sizes, *rest])
        made = emitter.call(_aten.reshape.default, apart, [-1, *rest])
    # Torch describes 10 of s rows as s // (s // 10).
    value = _val(apart)
    pairs = zip([*sizes, *rest], value.shape, strict=True)
    described = [given if given > 0 else size for given, size in pairs]
    apart.meta["val"] = value.new_empty(described)
    made.meta["val"] = value.new_empty(_val(leaf).shape)
    return swap(leaf, made, emitter.created)


def split_read_part(
    graph: Graph, leaf: Node, others: Shapes
) -> tuple[Node, list[Node]] | None:
    """Part a statistic from what surrounds it: the other lanes of a kernel's tile, or
    the padding of its rows.

    Args:
        graph: to add the parts to.
        leaf: of one of its dims only one place or slice is read behind it.
        others: shapes of the other leaves, and a leaf of each.

    Returns:
        The equal tensor that is made of the parts, and those that nothing may read.
    """
    shape = shape_key(_val(leaf).shape)
    if len(shape) < 2 or _is_statistic(shape, others):
        return None
    for dim in range(len(shape) - 1, -1, -1):
        if not shape[dim].isdigit():
            continue
        reads = (_part_read(node, shape, dim) for node in behind_collectives(leaf))
        parts = {part for part in reads if part is not None}
        if len(parts) != 1:
            continue
        start, stop = parts.pop()
        kept = "1" if stop == str(start + 1) else stop
        if stop.isdigit():
            kept = str(int(stop) - start)
        kept_shape = (*shape[:dim], kept, *shape[dim + 1 :])
        if _is_statistic(kept_shape, others):
            return _cut_out(graph, leaf, dim, (start, stop), others)
    return None


def _cut_out(
    graph: Graph,
    leaf: Node,
    dim: int,
    part: tuple[int, str],
    others: Shapes,
) -> tuple[Node, list[Node]] | None:
    start, stop = part
    size = int(shape_key(_val(leaf).shape)[dim])
    sized = [
        (other, shape.index(stop))
        for shape, other in others.items()
        if stop in shape and (other < leaf or other.op == leaf.op == "placeholder")
    ]
    if not stop.isdigit() and not sized:
        return None
    with graph.inserting_before(place_of(leaf).next):
        emitter = Emitter(graph, leaf)
        end: int | Node
        if stop.isdigit():
            end = int(stop)
        else:
            end = emitter.call(_aten.sym_size.int, *sized[0])
        pieces = [
            emitter.call(_aten.slice.Tensor, leaf, dim, low, high)
            for low, high in ((0, start), (start, end), (end, size))
            if low != high
        ]
        made = emitter.call(_aten.cat.default, pieces, dim)
    made.meta["val"] = _val(leaf)
    swap(leaf, made, emitter.created)
    read = pieces[1 if start else 0]
    return made, [piece for piece in pieces if piece is not read]


def _part_read(node: Node, shape: Sequence[str], dim: int) -> tuple[int, str] | None:
    """Where the places begin and end that the node takes out of a leaf's dim, which
    moves along with the leaf's last dims.
    """
    if node.op != "call_function":
        return None
    if node.target not in (_aten.select.int, _aten.slice.Tensor):
        return None
    source = tensor_val(node.args[0])
    if source is None:
        return None
    at, size = argument(node, "dim", 0) % source.dim(), int(shape[dim])
    if source.dim() - at != len(shape) - dim or source.shape[at] != size:
        return None
    if node.target is _aten.select.int:
        place = argument(node, "index")
        if not isinstance(place, int):
            return None
        return place % size, str(place % size + 1)
    start, stop = argument(node, "start") or 0, argument(node, "end")
    if isinstance(stop, Node) and start == 0:
        return 0, size_name(stop.meta["val"])
    stop = size if stop is None else stop
    if not isinstance(start, int) or not isinstance(stop, int):
        return None
    start, stop, _ = slice(start, stop).indices(size)
    whole = (start, stop) == (0, size) or start >= stop
    return None if whole or argument(node, "step") != 1 else (start, str(stop))


def turn_sign(graph: Graph, leaf: Node, others: Shapes) -> Node | None:
    """Turn the sign of a statistic twice, where all that computes with it turns it: a
    kernel's negative LSE.

    Nothing else is taken for negative: of two ranks' softmax, one row is what the other
    would be by negative LSEs.
    """
    if not _is_statistic(shape_key(_val(leaf).shape), others):
        return None
    carried, stack = {leaf}, list(leaf.users)
    turned = False
    while stack:
        node = stack.pop()
        if node in carried:
            continue
        moves = carries(node) or is_wait(node) or as_collective(node) is not None
        if node.op == "call_function" and moves and len(carried) < _MAX_FORWARD:
            carried.add(node)
            stack += node.users
        elif not _turns(node, carried):
            return None
        turned = turned or node not in carried
    if not turned:
        return None
    with graph.inserting_before(place_of(leaf).next):
        emitter = Emitter(graph, leaf)
        made = emitter.call(_aten.neg.default, emitter.call(_aten.neg.default, leaf))
    return swap(leaf, made, emitter.created)


def _turns(node: Node, carried: set[Node]) -> bool:
    """Whether the node takes the numbers with their sign turned, and only so."""
    if node.op != "call_function":
        return False
    if node.target in (_aten.mul.Tensor, _aten.mul.Scalar):
        factor = node.args[1]
        return isinstance(factor, (int, float)) and factor < 0
    if node.target is _aten.sub.Tensor:
        return node.args[0] not in carried and node.args[1] in carried
    return node.target is _aten.neg.default


def _is_statistic(shape: Sequence[str], others: Iterable[tuple[str, ...]]) -> bool:
    """Whether a tensor of the shape has one number for each row of another leaf."""
    named = tuple(size for size in shape if size != "1")
    return any(
        len(other) > len(named) and bool(statistic_axes(named, other))
        for other in others
    )


def _val(node: Node) -> torch.Tensor:
    value = tensor_val(node)
    assert value is not None
    return value
