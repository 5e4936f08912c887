"""Own-rank constants: how a peer's graph differs from this rank's, op by op.

Each mover gives the arguments that a peer has where this rank's node indexes a dim of
N, or None where the node holds no such constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from dcp_inductor.fx.collectives import as_collective
from dcp_inductor.fx.nodes import (
    Symbols,
    argument,
    is_pointwise,
    shape_key,
    tensor_val,
)

if TYPE_CHECKING:
    from dcp_inductor.fx.lockstep import Lockstep

_aten = torch.ops.aten
_MAX_BEHIND = 64  # nodes from a padded tensor up to a collective
_FLIPS = {_aten.flip.default, torch.ops.prims.rev.default}
_SPLITS = {
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
}
_MAX_POINTWISE = 16  # nodes from a padded block to the row that is read of it


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
    if value is None or not isinstance(index, int):
        return None
    if run.size(source, dim) != run.world_size:
        # A kernel's block may be padded to a power of two, behind the ranks.
        padded = _padded(source)
        if padded is None or run.size(padded, dim) != run.world_size:
            return None
        if not 0 <= index < run.world_size:
            return None
    if run.keeps_last and source.target is _aten.cumsum.default:
        if source.args[1] % value.dim() == dim and (index + 1) % run.world_size == 0:
            return None
    if not run.moves(_num_read(node, 2, lambda user: user.args[1] == dim)):
        return None
    index %= run.world_size
    if source.target in _FLIPS and dim in source.args[1]:
        last = run.world_size - 1
        return [source, dim, last - run.shift(last - index, peer)]
    return [source, dim, run.shift(index, peer)]


def _padded(node: Node) -> Node | None:
    """What the node's elements were before they were padded, where nothing between
    changed their places.
    """
    value = tensor_val(node)
    for _ in range(_MAX_POINTWISE):
        if node.target is _aten.constant_pad_nd.default:
            source = node.args[0]
            return source if isinstance(source, Node) else None
        if value is None or not is_pointwise(node):
            return None
        alike = [s for s in node.all_input_nodes if _same_shape(s, value)]
        if not alike:
            return None
        node = alike[-1]
    return None


def _same_shape(node: Node, model: Tensor) -> bool:
    value = tensor_val(node)
    return value is not None and shape_key(value.shape) == shape_key(model.shape)


def _move_getitem(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    source, index = node.args
    pieces = source.meta.get("val")
    if source.target not in _SPLITS or len(pieces) != run.world_size:
        return None  # the values and indices of a maximum are two, too
    if not run.moves(_num_read(node, 1, lambda user: True)):
        return None
    return [source, run.shift(index, peer)]


def _move_slice(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    source = node.args[0]
    dim = run.number_argument(node, "dim") or 0
    start, part, size = _bounds(run, node, dim, 1)
    step = run.number_argument(node, "step") or 1
    if step == run.world_size and size % step == 0 and start + part == size:
        # Every N-th from the own place on.
        if start >= step or not run.moves(len(_starts(run, node, dim))):
            return None
        return [source, dim, run.shift(start, peer), size, step]
    if step != 1 or part <= 0 or size != part * run.world_size or start % part:
        return None
    # A slice of 5 of 10 is a half by chance where it is one of T of T + 5.
    _, larger, whole = _bounds(run, node, dim, 7)
    if whole != larger * run.world_size:
        return None
    if not run.moves(len(_starts(run, node, dim))):
        return None
    moved = run.shift(start // part, peer) * part
    return [source, dim, moved, moved + part]


def _starts(run: Lockstep, node: Node, dim: int) -> set[int]:
    """Where slices of the same dim begin, the node's own included."""
    return {
        run.number_argument(user, "start") or 0
        for user in node.args[0].users
        if user.target is node.target and (run.number_argument(user, "dim") or 0) == dim
    }


def _bounds(run: Lockstep, node: Node, dim: int, factor: int) -> tuple[int, int, int]:
    """Start and length of a slice and the size that it is of, where all symbols are
    larger by a factor.
    """
    symbols = Symbols({symbol: n * factor for symbol, n in run.symbols.items()})
    value = tensor_val(node.args[0])
    assert value is not None
    size = int(symbols.number(value.shape[dim]))
    start = symbols.number(argument(node, "start")) or 0
    end = symbols.number(argument(node, "end"))
    end = size if end is None else min(end, size)
    return start, end - start, size


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
    if len(node.args) > 2 and node.args[2] != 0:
        return None  # no slot to be summed over
    if _is_exchanged(source):
        return None  # a kernel's block, whose first places are the ranks'
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


def _is_exchanged(node: Node) -> bool:
    """Whether the node depends on a collective."""
    stack, seen = [node], {node}
    while stack and len(seen) < _MAX_BEHIND:
        for source in stack.pop().all_input_nodes:
            if as_collective(source) is not None:
                return True
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return False


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


def _move_index_select(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    source, dim, index = node.args
    moved = _moved_index(run, source, dim, index, peer)
    return None if moved is None else [source, dim, moved]


def _move_gather(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    source, dim, index, *rest = node.args
    moved = _moved_index(run, source, dim, index, peer)
    return None if moved is None else [source, dim, moved, *rest]


def _move_index(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    source, indices = node.args
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if len(dims) != 1:
        return None
    moved = _moved_index(run, source, dims[0], indices[dims[0]], peer)
    if moved is None:
        return None
    return [source, [moved if i is not None else None for i in indices]]


def _move_index_put(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    base, indices, *rest = node.args
    if len(indices) != 1:
        return None
    moved = _moved_index(run, base, 0, indices[0], peer)
    return None if moved is None else [base, [moved], *rest]


def _moved_index(
    run: Lockstep, source: Node, dim: int, index: Any, peer: int
) -> Tensor | None:
    """A constant index tensor that reads one place of a dim of N."""
    held = run.constant(index)
    if held is None or run.size(source, dim) != run.world_size or not held.numel():
        return None
    place = int(held.flatten()[0])
    if held.is_floating_point() or bool((held != place).any()):
        return None
    if not run.moves(1):
        return None
    return torch.full_like(held, run.shift(place % run.world_size, peer))


def _move_mask(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    """A constant that is zero but in one place of a dim of N: the own row's mask."""
    for position, value in enumerate(node.args):
        held = run.constant(value)
        if held is None or held.dim() == 0 or (held.dtype is torch.bool and position):
            continue
        for dim in range(held.dim()):
            rest = [d for d in range(held.dim()) if d != dim]
            filled = (held != 0).any(rest) if rest else held != 0
            if held.shape[dim] != run.world_size or int(filled.sum()) != 1:
                continue
            run.moves(1)
            place = int(filled.nonzero()[0])
            moved = held.roll(run.shift(place, peer) - place, dim)
            return [*node.args[:position], moved, *node.args[position + 1 :]]
    return None


MOVERS: dict[Any, Callable[[Lockstep, Node, int], list[Any] | None]] = {
    _aten.select.int: _move_select,
    operator.getitem: _move_getitem,
    _aten.slice.Tensor: _move_slice,
    _aten.slice_scatter.default: _move_slice_scatter,
    _aten.select_scatter.default: _move_select_scatter,
    _aten.constant_pad_nd.default: _move_pad,
    _aten.index_select.default: _move_index_select,
    _aten.gather.default: _move_gather,
    _aten.index.Tensor: _move_index,
    _aten.index_put.default: _move_index_put,
    _aten.mul.Tensor: _move_mask,
    _aten.mm.default: _move_mask,
    _aten.bmm.default: _move_mask,
    _aten.where.self: _move_mask,
    _aten.eq.Scalar: _move_compare,
    _aten.ne.Scalar: _move_compare,
    _aten.le.Scalar: _move_compare,
    _aten.lt.Scalar: _move_compare,
    _aten.ge.Scalar: _move_compare,
    _aten.gt.Scalar: _move_compare,
}
