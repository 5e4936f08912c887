"""Run a region of the graph for all ranks at once, on the CPU, with collectives simulated.

The graph is one rank's; the others' differ from it only in own-rank constants (``L[rank]``,
``x[:, rank * h:(rank + 1) * h]``). A reading says how such constants are taken for a peer:
"relative" moves an index with the rank where no other index of the same dim is read,
"rotating" moves indices of which fewer than N are read, "turning" moves all, "exclusive_or"
moves them as butterfly exchanges do, and "absolute" keeps them. Peers are run only as far as
their collectives, since nothing else of theirs reaches this rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dcp_inductor.fx.collectives import Collective, as_collective, inputs_of, is_wait, simulate
from dcp_inductor.fx.nodes import Symbols, argument, is_number, tensor_val

_aten = torch.ops.aten
READINGS = ("relative", "rotating", "turning", "absolute", "exclusive_or")

_VIEWS = {_aten.view.default: _aten.reshape.default, _aten._unsafe_view.default: _aten.reshape.default}
# Contents are undefined: NaN shows when a region depends on them.
_UNINITIALISED = {
    _aten.empty.memory_format,
    _aten.new_empty.default,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty_strided.default,
}
_SOFTMAX = {_aten._softmax.default, _aten._log_softmax.default}


class Unsupported(Exception):
    """The region cannot be run as asked; the candidate is refused, nothing else."""


class Lockstep:
    """Values of a region's nodes, given its leaves on all ranks.

    Args:
        region: nodes in graph order; every tensor input is a leaf, in the region, or a constant
            of the region.
        leaves: value of each leaf on each rank.
        world_size: N.
        rank: this process's rank in the group, to tell own-rank constants.
        symbols: numbers for symbolic sizes.
        exact: compute every float in float64, so that only algebra matters.
        reading: how a peer takes an own-rank constant, one of READINGS.
    """

    def __init__(
        self,
        region: Sequence[Node],
        leaves: Mapping[Node, Sequence[Tensor]],
        *,
        world_size: int,
        rank: int,
        symbols: Symbols,
        exact: bool,
        reading: str = "relative",
    ) -> None:
        self._region = region
        self._world_size = world_size
        self._rank = rank
        self._symbols = symbols
        self._exact = exact
        self._reading = reading
        self._constants = _constants(region)
        self._values: list[dict[Node, Any]] = [
            {node: self._leaf(values[r]) for node, values in leaves.items()}
            for r in range(world_size)
        ]
        # Whether any constant may be an own-rank constant, so that the readings differ.
        self.has_rank_constants = False

    def run(self) -> dict[Node, Any]:
        """Run and return this rank's values.

        Raises:
            Unsupported: some node cannot be run, with the reason.
        """
        needed = _feeds_a_collective(self._region)
        try:
            for node in self._region:
                collective = as_collective(node)
                if collective is not None:
                    self._exchange(collective)
                    continue
                for rank in range(self._world_size):
                    if rank == self._rank or node in needed:
                        self._values[rank][node] = self._evaluate(node, rank)
        except Unsupported:
            raise
        except Exception as error:  # any op may reject trial shapes in its own way
            raise Unsupported(f"{node.name}: {type(error).__name__}: {error}") from error
        return self._values[self._rank]

    def _leaf(self, value: Tensor) -> Tensor:
        return value.double() if self._exact and value.is_floating_point() else value

    def _exchange(self, collective: Collective) -> None:
        sent = [
            [self._values[rank][source] for source in inputs_of(collective)]
            for rank in range(self._world_size)
        ]
        splits: list[tuple[Sequence[int], Sequence[int]]] = []
        if collective.kind == "all_to_all":
            splits = [self._splits(collective.node, rank) for rank in range(self._world_size)]
        results = simulate(collective, sent, self._symbols, splits)
        for rank in range(self._world_size):
            value = results[rank]
            self._values[rank][collective.node] = value if collective.coalesced else value[0]

    def _splits(self, node: Node, peer: int) -> tuple[list[int], list[int]]:
        """Split sizes of all_to_all; one partner only means that the partner moves with us."""
        sizes = []
        for name in ("output_split_sizes", "input_split_sizes"):
            split = [self._symbols.number(size) for size in argument(node, name)]
            partners = [r for r, size in enumerate(split) if size]
            if peer != self._rank and len(partners) == 1 and self._reading != "absolute":
                moved = [0] * self._world_size
                moved[self._shift(partners[0], peer)] = split[partners[0]]
                self.has_rank_constants = True
                split = moved
            sizes.append(split)
        return sizes[0], sizes[1]

    def _shift(self, index: int, peer: int) -> int:
        if self._reading == "exclusive_or":
            return index ^ self._rank ^ peer
        return (index - self._rank + peer) % self._world_size

    def moves(self, num_read: int) -> bool:
        """Whether an index into a dim of N moves, ``num_read`` of which are read there.

        Code that reads all N mostly treats them alike and has no own place.
        """
        self.has_rank_constants = True
        if self._reading == "relative":
            return num_read == 1
        return num_read < self._world_size or self._reading != "rotating"

    def _evaluate(self, node: Node, rank: int) -> Any:
        if is_wait(node):
            return self._values[rank][node.args[0]]
        values = self._values[rank]
        if node.op == "get_attr":
            return self._leaf(constant_of(node))
        target = _VIEWS.get(node.target, node.target)
        args, kwargs = list(node.args), dict(node.kwargs)
        if rank != self._rank:
            moved = self._moved_constants(node, rank)
            if moved is not None:
                args = moved
        if node.target in _SOFTMAX and self._exact:
            args[2] = False
        result = target(
            *[self._resolve(value, values) for value in args],
            **{name: self._keyword(name, value, values) for name, value in kwargs.items()},
        )
        if node.target is _aten.cat.default and rank != self._rank:
            result = self._moved_slot(node, rank, result)
        if node.target in _UNINITIALISED and result.is_floating_point():
            result.fill_(float("nan"))
        return result

    def _moved_slot(self, node: Node, peer: int, joined: Tensor) -> Tensor:
        """``cat(zeros, own, zeros)`` with the own part in the peer's slot."""
        parts = node.args[0]
        values = [self._values[peer][part] for part in parts]
        own = [i for i, part in enumerate(parts) if part not in self._constants]
        if self._reading == "absolute" or len(own) != 1 or len(parts) == 1:
            return joined
        dim = argument(node, "dim")
        size = values[own[0]].shape[dim]
        before = sum(value.shape[dim] for value in values[: own[0]])
        if not size or joined.shape[dim] != size * self._world_size or before % size:
            return joined
        self.moves(1)
        return joined.roll(self._shift(before // size, peer) * size - before, dim)

    def _resolve(self, value: Any, values: Mapping[Node, Any]) -> Any:
        if isinstance(value, Node):
            return values[value] if value in values else self._number(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._resolve(item, values) for item in value)
        if isinstance(value, torch.dtype):
            return torch.float64 if self._exact and value.is_floating_point else value
        return self._number(value)

    def _keyword(self, name: str, value: Any, values: Mapping[Node, Any]) -> Any:
        if name == "device" or (name == "pin_memory" and value):
            return torch.device("cpu") if name == "device" else None
        return self._resolve(value, values)

    def _number(self, value: Any) -> Any:
        if isinstance(value, Node) and not is_number(value):
            raise Unsupported(f"{value.name} has no value in the region")
        return self._symbols.number(value)

    def _moved_constants(self, node: Node, peer: int) -> list[Any] | None:
        """The node's arguments as ``peer`` has them, or None where they hold no own-rank constant."""
        mover = _MOVERS.get(node.target)
        if mover is None or self._reading == "absolute":
            return None
        return mover(self, node, peer)

    def size(self, node: Node, dim: int) -> int:
        """Size of a dim of the node's result."""
        value = tensor_val(node)
        assert value is not None
        return int(self._symbols.number(value.shape[dim]))

    def number_argument(self, node: Node, name: str) -> Any:
        """A number that the node takes, None where it takes none."""
        value = argument(node, name)
        return None if value is None else self._symbols.number(value)


def constant_of(node: Node) -> Tensor:
    """The tensor that a get_attr node reads."""
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if not isinstance(value, Tensor):
        raise Unsupported(f"{node.name} is not a tensor constant")
    return value.detach().cpu()


def foreign_ranks(nodes: Sequence[Node], world_size: int, rank: int) -> set[int]:
    """Other ranks whose place in a dim of N, or in a split of N, the nodes read alone."""
    found: set[int] = set()
    for node in nodes:
        if node.op != "call_function":
            continue
        index: Any = None
        if node.target is _aten.select.int and 1 == _num_read(
            node, 2, lambda user, dim=node.args[1]: user.args[1] == dim
        ):
            value = tensor_val(node.args[0])
            if value is not None and value.shape[node.args[1]] == world_size:
                index = node.args[2]
        elif node.target is operator.getitem and 1 == _num_read(node, 1, lambda user: True):
            pieces = node.args[0].meta.get("val")
            if isinstance(pieces, (list, tuple)) and len(pieces) == world_size:
                index = node.args[1]
        if isinstance(index, int) and index % world_size != rank:
            found.add(index % world_size)
    return found


def _constants(region: Sequence[Node]) -> set[Node]:
    found: set[Node] = set()
    for node in region:
        made = node.op == "get_attr" or (
            as_collective(node) is None
            and all(s in found for s in node.all_input_nodes if not is_number(s))
        )
        if made:
            found.add(node)
    return found


def _feeds_a_collective(region: Sequence[Node]) -> set[Node]:
    needed: set[Node] = set()
    for node in reversed(region):
        if node in needed or as_collective(node) is not None:
            needed.update(node.all_input_nodes)
    return needed


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
    if value is None or not isinstance(index, int) or run.size(source, dim) != run._world_size:
        return None
    if not run.moves(_num_read(node, 2, lambda user: user.args[1] == dim)):
        return None
    return [source, dim, run._shift(index % run._world_size, peer)]


def _move_getitem(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    source, index = node.args
    pieces = source.meta.get("val")
    if not isinstance(pieces, (list, tuple)) or len(pieces) != run._world_size:
        return None
    if not run.moves(_num_read(node, 1, lambda user: True)):
        return None
    return [source, run._shift(index, peer)]


def _move_slice(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    source = node.args[0]
    dim = run.number_argument(node, "dim") or 0
    size = run.size(source, dim)
    start = run.number_argument(node, "start") or 0
    end = run.number_argument(node, "end")
    end = size if end is None else min(end, size)
    step = run.number_argument(node, "step") or 1
    part = end - start
    if step != 1 or part <= 0 or size != part * run._world_size or start % part:
        return None
    starts = {
        run.number_argument(user, "start") or 0
        for user in source.users
        if user.target is node.target and (run.number_argument(user, "dim") or 0) == dim
    }
    if not run.moves(len(starts)):
        return None
    moved = run._shift(start // part, peer) * part
    return [source, dim, moved, moved + part]


def _move_slice_scatter(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    base, source = node.args[0], node.args[1]
    dim = run.number_argument(node, "dim") or 0
    part, size = run.size(source, dim), run.size(base, dim)
    start = run.number_argument(node, "start") or 0
    if part == 0 or size != part * run._world_size or start % part:
        return None
    run.moves(1)
    moved = run._shift(start // part, peer) * part
    return [base, source, dim, moved, moved + part]


def _move_select_scatter(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    base, source, dim, index = node.args
    if run.size(base, dim) != run._world_size or not isinstance(index, int):
        return None
    run.moves(1)
    return [base, source, dim, run._shift(index % run._world_size, peer)]


def _move_pad(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    source = node.args[0]
    value = tensor_val(source)
    assert value is not None
    pads = [run._symbols.number(pad) for pad in node.args[1]]
    moved = list(pads)
    for position in range(0, len(pads), 2):
        size = run.size(source, value.dim() - 1 - position // 2)
        low, high = pads[position], pads[position + 1]
        if low + high == (run._world_size - 1) * size and size and low % size == 0:
            run.moves(1)
            low = run._shift(low // size, peer) * size
            moved[position : position + 2] = [low, (run._world_size - 1) * size - low]
    return None if moved == pads else [source, moved, *node.args[2:]]


def _move_compare(run: Lockstep, node: Node, peer: int) -> list[Any] | None:
    """``arange(N) == rank`` and its kin."""
    source, other = node.args
    value = tensor_val(source)
    if value is None or value.is_floating_point() or not isinstance(other, int):
        return None
    if run._world_size not in run._symbols.shape(value) or not 0 <= other < run._world_size:
        return None
    run.moves(1)
    return [source, run._shift(other, peer)]


_MOVERS: dict[Any, Callable[[Lockstep, Node, int], list[Any] | None]] = {
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
