"""Run a region of the graph for all ranks at once, on the CPU, with collectives
simulated.

The graph is one rank's; the others' differ from it only in own-rank constants
(``L[rank]``, ``x[:, rank * h:(rank + 1) * h]``). A reading says how such constants are
taken for a peer: "relative" moves an index with the rank where no other index of the
same dim is read, "rotating" moves indices of which fewer than N are read, "turning"
moves all, "ending" is "relative" where the last place of a running sum, the total,
stays, "exclusive_or" moves them as butterfly exchanges do, and "absolute" keeps
them. Peers are run only as far as their collectives, since nothing else of theirs
reaches this rank, unless all of theirs is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dcp_inductor.fx.collectives import (
    Collective,
    as_collective,
    inputs_of,
    is_wait,
    simulate,
)
from dcp_inductor.fx.nodes import Symbols, argument, carries, is_number, tensor_val
from dcp_inductor.fx.own_rank import MOVERS

_aten = torch.ops.aten
READINGS = ("relative", "rotating", "turning", "ending", "absolute", "exclusive_or")

_VIEWS = {
    _aten.view.default: _aten.reshape.default,
    _aten._unsafe_view.default: _aten.reshape.default,
}
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


class Looked(Unsupported):
    """The region computes with what it was only to carry along."""


class Lockstep:
    """Values of a region's nodes, given its leaves on all ranks.

    Args:
        region: nodes in graph order; every tensor input is a leaf, in the region, or a
        constant
            of the region.
        leaves: value of each leaf on each rank.
        world_size: N.
        rank: this process's rank in the group, to tell own-rank constants.
        symbols: numbers for symbolic sizes.
        exact: compute every float in float64, so that only algebra matters.
        reading: how a peer takes an own-rank constant, one of READINGS.
        every_rank: run peers to their end, as far as this rank's sizes allow.
        watched: what is NaN marks places that nothing may compute with.
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
        every_rank: bool = False,
        watched: bool = False,
    ) -> None:
        self._region = region
        self._watched = watched
        self._every_rank = every_rank
        self.world_size = world_size
        self._rank = rank
        self.symbols = symbols
        self._exact = exact
        self._reading = reading
        self._constants = constant_nodes(region)
        self._values: list[dict[Node, Any]] = [
            {node: self._leaf(values[r]) for node, values in leaves.items()}
            for r in range(world_size)
        ]
        # Whether the last place of a running sum is no rank's.
        self.keeps_last = reading == "ending"
        # Whether any constant may be an own-rank constant, so that the readings differ.
        self.has_rank_constants = False

    def run(self) -> dict[Node, Any]:
        """Run and return this rank's values.

        Raises:
            Looked: a watched region computes with NaN.
            Unsupported: some node cannot be run, with the reason.
        """
        needed = _feeds_a_collective(self._region)
        try:
            for node in self._region:
                collective = as_collective(node)
                if collective is not None:
                    self._exchange(collective)
                    continue
                for rank in range(self.world_size):
                    if rank == self._rank or node in needed:
                        self._values[rank][node] = self._evaluate(node, rank)
                    elif self._every_rank:
                        self._try(node, rank)
        except Unsupported:
            raise
        except Exception as error:  # any op may reject trial shapes in its own way
            raise Unsupported(
                f"{node.name}: {type(error).__name__}: {error}"
            ) from error
        return self._values[self._rank]

    def values_of(self, rank: int) -> dict[Node, Any]:
        """A rank's values after the run; of a peer only what it was run for."""
        return self._values[rank]

    def _try(self, node: Node, peer: int) -> None:
        # An uneven part has sizes of its own on every rank, and this graph's are ours.
        with contextlib.suppress(Exception):
            self._values[peer][node] = self._evaluate(node, peer)

    def _leaf(self, value: Tensor) -> Tensor:
        return value.double() if self._exact and value.is_floating_point() else value

    def _exchange(self, collective: Collective) -> None:
        sent = [
            [self._values[rank][source] for source in inputs_of(collective)]
            for rank in range(self.world_size)
        ]
        splits: list[tuple[Sequence[int], Sequence[int]]] = []
        if collective.kind == "all_to_all":
            splits = [
                self._splits(collective.node, rank) for rank in range(self.world_size)
            ]
        if self._watched and collective.reduce_op:
            for values in self._values:
                self._look_at(inputs_of(collective), values)
        results = simulate(collective, sent, self.symbols, splits)
        for rank in range(self.world_size):
            value = results[rank]
            self._values[rank][collective.node] = (
                value if collective.coalesced else value[0]
            )

    def _look_at(self, sources: Sequence[Node], values: Mapping[Node, Any]) -> None:
        """Ops that move elements put NaN to the same places whatever the numbers are,
        so one run shows what reaches an op that computes.
        """
        for source in sources:
            value = values.get(source)
            if isinstance(value, Tensor) and bool(value.isnan().any()):
                raise Looked(f"{source.name} holds more than the rows of the merge")

    def _splits(self, node: Node, peer: int) -> tuple[list[int], list[int]]:
        """Split sizes of all_to_all; one partner only means that the partner moves with
        us.
        """
        sizes = []
        for name in ("output_split_sizes", "input_split_sizes"):
            split = [self.symbols.number(size) for size in argument(node, name)]
            partners = [r for r, size in enumerate(split) if size]
            if (
                peer != self._rank
                and len(partners) == 1
                and self._reading != "absolute"
            ):
                moved = [0] * self.world_size
                moved[self.shift(partners[0], peer)] = split[partners[0]]
                self.has_rank_constants = True
                split = moved
            sizes.append(split)
        return sizes[0], sizes[1]

    def shift(self, index: int, peer: int) -> int:
        """Where the peer has what this rank has at ``index``."""
        if self._reading == "exclusive_or":
            return index ^ self._rank ^ peer
        return (index - self._rank + peer) % self.world_size

    def moves(self, num_read: int) -> bool:
        """Whether an index into a dim of N moves, ``num_read`` of which are read there.

        Code that reads all N mostly treats them alike and has no own place.
        """
        self.has_rank_constants = True
        if self._reading in ("relative", "ending"):
            return num_read == 1
        return num_read < self.world_size or self._reading != "rotating"

    def _evaluate(self, node: Node, rank: int) -> Any:
        values = self._values[rank]
        if is_wait(node):
            awaited = node.args[0]
            if isinstance(awaited, Node):
                return values[awaited]
            return [values[source] for source in awaited]
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
        if self._watched and not carries(node):
            self._look_at(node.all_input_nodes, values)
        result = target(
            *[self._resolve(value, values) for value in args],
            **{
                name: self._keyword(name, value, values)
                for name, value in kwargs.items()
            },
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
        if not size or joined.shape[dim] != size * self.world_size or before % size:
            return joined
        self.moves(1)
        return joined.roll(self.shift(before // size, peer) * size - before, dim)

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
        return self.symbols.number(value)

    def _moved_constants(self, node: Node, peer: int) -> list[Any] | None:
        """The node's arguments as ``peer`` has them, or None where they hold no
        own-rank constant.
        """
        mover = MOVERS.get(node.target)
        if mover is None or self._reading == "absolute":
            return None
        return mover(self, node, peer)

    def constant(self, value: Any) -> Tensor | None:
        """The tensor of a node that no leaf has a part in."""
        if not isinstance(value, Node) or value not in self._constants:
            return None
        held = self._values[self._rank].get(value)
        return held if isinstance(held, Tensor) else None

    def size(self, node: Node, dim: int) -> int:
        """Size of a dim of the node's result."""
        value = tensor_val(node)
        assert value is not None
        return int(self.symbols.number(value.shape[dim]))

    def number_argument(self, node: Node, name: str) -> Any:
        """A number that the node takes, None where it takes none."""
        value = argument(node, name)
        return None if value is None else self.symbols.number(value)


def constant_of(node: Node) -> Tensor:
    """The tensor that a get_attr node reads."""
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if not isinstance(value, Tensor):
        raise Unsupported(f"{node.name} is not a tensor constant")
    return value.detach().cpu()


def constant_nodes(region: Sequence[Node]) -> set[Node]:
    """Nodes of the region that no leaf has a part in."""
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
