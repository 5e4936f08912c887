"""Candidates: where a merge of partial attention results may stand in a graph.

A merge starts at a *cut*: a partial output O and its statistics (an LSE, or max and
sum), from which everything up to the result is plain tensor code and collectives of one
group. ``cuts`` proposes cuts by shape alone; what they compute is for ``prove`` to find
out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from dcp_inductor.fx.axes import statistic_axes
from dcp_inductor.fx.collectives import Collective, as_collective, inputs_of, is_wait
from dcp_inductor.fx.nodes import (
    is_number,
    is_pure,
    is_view_like,
    is_widening_cast,
    shape_key,
    tensor_inputs,
    tensor_val,
)

# Bounds of the search, in nodes. The longest public spelling needs about half of each.
_MAX_BACKWARD = 32  # from a collective up to its partial output
_MAX_STATISTICS = 120  # from the join of output and weights up to the statistics
_MAX_JOINS = 4
_MAX_FRONTIER = 16
_MAX_REGION = 600


_aten = torch.ops.aten
_CONTRACTIONS = {
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.matmul.default,
    _aten.linear.default,
    _aten.convolution.default,
}


@dataclass(frozen=True)
class Cut:
    """Where a merge starts: a partial output and its one or two statistics."""

    partial_output: Node
    statistics: tuple[Node, ...]

    @property
    def leaves(self) -> tuple[Node, ...]:
        return (self.partial_output, *self.statistics)


@dataclass(frozen=True)
class Region:
    """All that a cut determines: nodes in graph order, constants included."""

    leaves: tuple[Node, ...]
    nodes: tuple[Node, ...]
    collectives: tuple[Collective, ...]
    exchanged: frozenset[Node]  # nodes that depend on a collective of the region
    upstream: frozenset[Node]  # exchanged nodes that a leaf depends on

    def behind(self, leaf: Node) -> set[Node]:
        """Nodes that depend on one of the leaves."""
        found = {leaf}
        for node in self.nodes:
            if any(source in found for source in node.all_input_nodes):
                found.add(node)
        return found

    def feeding(self, results: Iterable[Node]) -> set[Node]:
        """The results and the exchanged nodes that they are made of."""
        stack = [node for node in results if node in self.exchanged]
        found = set(stack)
        while stack:
            for source in stack.pop().all_input_nodes:
                if source in self.exchanged and source not in found:
                    found.add(source)
                    stack.append(source)
        return found

    def origin(self) -> Node:
        """The node whose line of the user's code stands for the region: the first that
        computes with what was exchanged.
        """
        for node in self.nodes:
            moved = (
                is_view_like(node) or is_wait(node) or as_collective(node) is not None
            )
            if node in self.exchanged and not moved and tensor_val(node) is not None:
                return node
        return self.exits()[-1]

    def exits(self) -> list[Node]:
        """Exchanged nodes that something outside of the region uses, in graph order."""
        members = set(self.nodes)
        return [
            node
            for node in self.nodes
            if node in self.exchanged
            and any(user not in members for user in node.users)
        ]


class GraphIndex:
    """Order, constants and collectives of a graph, read once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order: dict[Node, int] = {}
        self.constants: set[Node] = set()
        self.collectives: list[Collective] = []
        self._shapes: dict[Node, tuple[str, ...]] = {}
        self._inputs: dict[Node, list[Node]] = {}
        # Group of a collective, "" for plain nodes, "-" for what no merge reaches
        # through.
        self._groups: dict[Node, str] = {}
        for position, node in enumerate(graph.nodes):
            self.order[node] = position
            collective = as_collective(node)
            if collective is not None:
                self.collectives.append(collective)
            elif self._is_constant(node):
                self.constants.add(node)

    def shape(self, node: Node) -> tuple[str, ...]:
        """Names of the sizes of a tensor node."""
        known = self._shapes.get(node)
        if known is None:
            value = tensor_val(node)
            known = self._shapes[node] = (
                shape_key(value.shape) if value is not None else ()
            )
        return known

    def inputs(self, node: Node) -> list[Node]:
        """Tensor inputs of a node."""
        known = self._inputs.get(node)
        if known is None:
            known = self._inputs[node] = tensor_inputs(node)
        return known

    def can_open(self, node: Node, group_name: str) -> bool:
        """Whether a merge may reach up through the node.

        Not through a matrix product, which is where attention or a projection begins.
        """
        known = self._groups.get(node)
        if known is None:
            collective = as_collective(node)
            if collective is not None:
                known = collective.group_name
            else:
                plain = (is_pure(node) and not _is_contraction(node)) or is_wait(node)
                known = "" if plain else "-"
            self._groups[node] = known
        return known in ("", group_name)

    def _is_constant(self, node: Node) -> bool:
        if node.op == "get_attr":
            return tensor_val(node) is not None
        if not is_pure(node) or is_number(node):
            return False
        return all(source in self.constants for source in tensor_inputs(node))

    def region(self, leaves: tuple[Node, ...], group_name: str) -> Region:
        """All that the leaves determine, forward, through collectives of the group."""
        known = set(leaves)
        members: set[Node] = set()
        exchanged: set[Node] = set()
        collectives: list[Collective] = []
        queue: list[tuple[int, Node]] = []
        queued: set[Node] = set()

        def push_users(node: Node) -> None:
            for user in node.users:
                if user not in queued and user in self.order:
                    queued.add(user)
                    heapq.heappush(queue, (self.order[user], user))

        for leaf in leaves:
            push_users(leaf)
        while queue and len(members) < _MAX_REGION:
            _, node = heapq.heappop(queue)
            if node in known or is_number(node):
                continue
            collective = as_collective(node)
            if collective is not None:
                if collective.group_name != group_name:
                    continue
            elif not is_pure(node) and not is_wait(node):
                continue
            inputs = self.inputs(node)
            if not all(
                source in known or source in self.constants for source in inputs
            ):
                continue
            known.add(node)
            members.add(node)
            if collective is not None:
                collectives.append(collective)
            if collective is not None or any(source in exchanged for source in inputs):
                exchanged.add(node)
            push_users(node)
        constants = self._constants_of(members)
        nodes = sorted(members | constants, key=self.order.__getitem__)
        return Region(
            leaves,
            tuple(nodes),
            tuple(collectives),
            frozenset(exchanged),
            self._ancestors(leaves, exchanged),
        )

    def _ancestors(self, nodes: tuple[Node, ...], among: set[Node]) -> frozenset[Node]:
        """Those ``among`` some nodes that the given nodes depend on."""
        if not among:
            return frozenset()
        floor = min(self.order[node] for node in among)
        stack, seen = list(nodes), set(nodes)
        while stack:
            for source in stack.pop().all_input_nodes:
                if source not in seen and self.order.get(source, floor) >= floor:
                    seen.add(source)
                    stack.append(source)
        return frozenset(seen & among)

    def _constants_of(self, members: set[Node]) -> set[Node]:
        found: set[Node] = set()
        stack = [source for node in members for source in tensor_inputs(node)]
        while stack:
            node = stack.pop()
            if node in self.constants and node not in found:
                found.add(node)
                stack.extend(tensor_inputs(node))
        return found


def is_minimal(index: GraphIndex, region: Region) -> bool:
    """Whether no leaf is determined by the others: such a cut stands inside another
    region.
    """
    known = {*region.leaves, *region.nodes, *index.constants}
    return not any(
        leaf.op == "call_function"
        and all(source in known for source in tensor_inputs(leaf))
        for leaf in region.leaves
    )


def cuts(index: GraphIndex, collective: Collective, tried: set[Node]) -> Iterator[Cut]:
    """Cuts of merges that the collective may belong to, nearest first.

    Args:
        index: facts of the graph.
        collective: where to look from.
        tried: partial outputs that were looked at already; extended by this call.
    """
    for partial_output in _partial_outputs(index, collective):
        if partial_output in tried:
            continue
        tried.add(partial_output)
        yield from _cuts_of(index, partial_output, collective.group_name)


def _partial_outputs(index: GraphIndex, collective: Collective) -> Iterator[Node]:
    """Float tensors of two or more dims behind the collective, the less processed
    first.
    """
    seen: set[Node] = set()
    queue = list(inputs_of(collective))
    while queue and len(seen) < _MAX_BACKWARD:
        node = queue.pop(0)
        if node in seen or node in index.constants or not isinstance(node, Node):
            continue
        seen.add(node)
        for candidate in reversed(_same_elements(node)):
            value = tensor_val(candidate)
            if value is not None and value.dtype.is_floating_point and value.dim() >= 2:
                yield candidate
        if is_pure(node) and not _is_contraction(node):
            queue.extend(index.inputs(node))


def _same_elements(node: Node) -> list[Node]:
    """The node and what it is a mere view or widening cast of, nearest first."""
    chain = [node]
    while is_view_like(chain[-1]) or is_widening_cast(chain[-1]):
        source = chain[-1].args[0]
        if not isinstance(source, Node):
            break
        chain.append(source)
    return chain


def _cuts_of(index: GraphIndex, partial_output: Node, group_name: str) -> Iterator[Cut]:
    given: set[Cut] = set()
    for reached, side in _joins(index, partial_output):
        for cut in _statistics(index, partial_output, reached, side, group_name):
            if cut not in given:
                given.add(cut)
                yield cut


def _joins(
    index: GraphIndex, partial_output: Node
) -> Iterator[tuple[set[Node], list[Node]]]:
    """Where other tensors meet what the partial output leads to.

    Yields, join by join, the nodes reached so far and all that met them: weights may
    come at one place and the sum to divide by at another.
    """
    reached = {partial_output}
    side: list[Node] = []
    queue = [
        (index.order[user], user)
        for user in partial_output.users
        if user in index.order
    ]
    heapq.heapify(queue)
    seen = {node for _, node in queue}
    joins = 0
    while queue and joins < _MAX_JOINS and len(seen) < _MAX_STATISTICS:
        _, node = heapq.heappop(queue)
        plain = is_pure(node) or is_wait(node) or as_collective(node) is not None
        if not plain or is_number(node):
            continue
        met = [
            s
            for s in index.inputs(node)
            if s not in reached and s not in index.constants
        ]
        if met:
            joins += 1
            side += met
            yield set(reached), list(side)
        reached.add(node)
        for user in node.users:
            if user not in seen and user in index.order:
                seen.add(user)
                heapq.heappush(queue, (index.order[user], user))


def _statistics(
    index: GraphIndex,
    partial_output: Node,
    reached: set[Node],
    side: list[Node],
    group_name: str,
) -> Iterator[Cut]:
    """Walk up from the join's other inputs; every frontier of statistics' shape is a
    cut.
    """
    shape = index.shape(partial_output)
    frontier = set(side)
    for _ in range(_MAX_STATISTICS):
        if not frontier or len(frontier) > _MAX_FRONTIER:
            return
        closed = [node for node in frontier if not index.can_open(node, group_name)]
        # What cannot be opened stays in every later frontier.
        if len(closed) > 2 or not all(
            _is_statistic(index, node, shape) for node in closed
        ):
            return
        if len(frontier) <= 2 and all(
            _is_statistic(index, node, shape) for node in frontier
        ):
            ordered = tuple(sorted(frontier, key=index.order.__getitem__))
            if not any(as_collective(n) is not None or is_wait(n) for n in ordered):
                yield Cut(partial_output, ordered)
        if len(closed) == len(frontier):
            return
        latest = max(
            (node for node in frontier if node not in closed),
            key=lambda n: (is_view_like(n), index.order[n]),
        )
        frontier.discard(latest)
        for source in index.inputs(latest):
            if source not in reached and source not in index.constants:
                frontier.add(source)


def _is_contraction(node: Node) -> bool:
    return node.op == "call_function" and node.target in _CONTRACTIONS


def _is_statistic(index: GraphIndex, node: Node, shape: tuple[str, ...]) -> bool:
    """Whether the node has one number for each row of a partial output of ``shape``."""
    value = tensor_val(node)
    if value is None or not value.dtype.is_floating_point:
        return False
    if sum(size != "1" for size in index.shape(node)) >= len(shape):
        return False
    return bool(statistic_axes(index.shape(node), shape))
