"""Own-rank constants: how a peer's graph differs from this rank's, op by op.

Each mover gives the arguments that a peer has where this rank's node indexes a dim of
N, or None where the node holds no such constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from dcp_inductor.fx.nodes import tensor_val

if TYPE_CHECKING:
    from dcp_inductor.fx.lockstep import Lockstep

_aten = torch.ops.aten


def foreign_ranks(nodes: Sequence[Node], world_size: int, rank: int) -> set[int]:
    """Other ranks whose place in a dim or split of N the nodes read alone."""
    found: set[int] = set()
    for node in nodes:
        index = _lone_index(node, world_size)
        if index is not None and index % world_size != rank:
            found.add(index % world_size)
    return found


def _lone_index(node: Node, world_size: int) -> int | None:
    """The index that alone is read of a dim or split of N."""
    index: Any = None
    if node.op == "call_function" and node.target is _aten.select.int:
        dim = node.args[1]
        value = tensor_val(node.args[0])
        if value is not None and value.shape[dim] == world_size:
            alone = _num_read(node, 2, lambda user: bool(user.args[1] == dim)) == 1
            index = node.args[2] if alone else None
    elif node.op == "call_function" and node.target is operator.getitem:
        pieces = node.args[0].meta.get("val")
        if isinstance(pieces, (list, tuple)) and len(pieces) == world_size:
            alone = _num_read(node, 1, lambda user: True) == 1
            index = node.args[1] if alone else None
    return index if isinstance(index, int) else None


def _num_read(node: Node, position: int, same: Callable[[Node], bool]) -> int:
    """How many indices the users of the node's source read, the node's own included."""
    return len(
        {
            user.args[position]
            for user in node.args[0].users
            if user.target is node.target and same(user)
        }
    )


def _move_select(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    source, dim, index = node.args[0], node.args[1], node.args[2]
    value = tensor_val(source)
    if (
        value is None
        or not isinstance(index, int)
        or run.size(source, dim) != run.world_size
    ):
        return None
    if not run.moves(_num_read(node, 2, lambda user: user.args[1] == dim)):
        return None
    return [source, dim, run.shift(index % run.world_size, peer)]


def _move_getitem(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    source, index = node.args
    pieces = source.meta.get("val")
    if not isinstance(pieces, (list, tuple)) or len(pieces) != run.world_size:
        return None
    if not run.moves(_num_read(node, 1, lambda user: True)):
        return None
    return [source, run.shift(index, peer)]


def _move_slice(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    source = node.args[0]
    dim = run.number_argument(node, "dim") or 0
    size = run.size(source, dim)
    start = run.number_argument(node, "start") or 0
    end = run.number_argument(node, "end")
    end = size if end is None else min(end, size)
    step = run.number_argument(node, "step") or 1
    part = end - start
    if step != 1 or part <= 0 or size != part * run.world_size or start % part:
        return None
    starts = {
        run.number_argument(user, "start") or 0
        for user in source.users
        if user.target is node.target and (run.number_argument(user, "dim") or 0) == dim
    }
    if not run.moves(len(starts)):
        return None
    moved = run.shift(start // part, peer) * part
    return [source, dim, moved, moved + part]


def _move_slice_scatter(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    base, source = node.args[0], node.args[1]
    dim = run.number_argument(node, "dim") or 0
    part, size = run.size(source, dim), run.size(base, dim)
    start = run.number_argument(node, "start") or 0
    if part == 0 or size != part * run.world_size or start % part:
        return None
    run.moves(1)
    moved = run.shift(start // part, peer) * part
    return [base, source, dim, moved, moved + part]


def _move_select_scatter(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    base, source, dim, index = node.args
    if run.size(base, dim) != run.world_size or not isinstance(index, int):
        return None
    run.moves(1)
    return [base, source, dim, run.shift(index % run.world_size, peer)]


def _move_pad(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    source = node.args[0]
    value = tensor_val(source)
    assert value is not None
    pads = [run.symbols.number(pad) for pad in node.args[1]]
    moved = list(pads)
    for position in range(0, len(pads), 2):
        size = run.size(source, value.dim() - 1 - position // 2)
        low, high = pads[position], pads[position + 1]
        if low + high == (run.world_size - 1) * size and size and low % size == 0:
            run.moves(1)
            low = run.shift(low // size, peer) * size
            moved[position : position + 2] = [low, (run.world_size - 1) * size - low]
    return None if moved == pads else [source, moved, *node.args[2:]]


def _move_compare(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    """``arange(N) == rank`` and its kin."""
    source, other = node.args
    value = tensor_val(source)
    if value is None or value.is_floating_point() or not isinstance(other, int):
        return None
    if (
        run.world_size not in run.symbols.shape(value)
        or not 0 <= other < run.world_size
    ):
        return None
    run.moves(1)
    return [source, run.shift(other, peer)]


MOVERS: dict[Any, Callable[[Lockstep, Node, int], list[Any] | None]] = {
    _aten.select.int: _move_select,
    operator.getitem: _move_getitem,
    _aten.slice.Tensor: _move_slice,
    _aten.slice_scatter.default: _move_slice_scatter,
    _aten.select_scatter.default: _move_select_scatter,
    _aten.constant_pad_nd.default: _move_pad,
    _aten.eq.Scalar: _move_compare,
    _aten.ne.Scalar: _move_compare,
    _aten.le.Scalar: _move_compare,
    _aten.lt.Scalar: _move_compare,
    _aten.ge.Scalar: _move_compare,
    _aten.gt.Scalar: _move_compare,
}
