"""A graph's collectives and constants, and the region that a cut determines."""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from dcp_inductor.fx.collectives import Collective, as_collective, is_wait
from dcp_inductor.fx.nodes import (
    is_number,
    is_pure,
    is_view_like,
    shape_key,
    source_line,
    tensor_inputs,
    tensor_val,
)

# Nodes of one region; the longest public spelling has about 150.
_MAX_REGION = 600
# Elements of a constant that picks ranks' rows; a frozen weight has more.
_MAX_TABLE = 64 * 64

_aten = torch.ops.aten
# What tracing, export and freezing call the tensors that they took for constants.
_CONSTANT = re.compile(r"(_tensor_constant|_?lifted_tensor_|_frozen_param)\d+")
# Views that put whole dims in another order.
_TURNS = {_aten.permute.default, _aten.transpose.int, _aten.t.default}
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
    unread: tuple[Node, ...] = ()  # carried along, and not to be looked at

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

    def through(self, collective: Collective) -> Region:
        """The part of the region that knows of one of its exchanges only."""
        found = {collective.node}
        for node in self.nodes:
            made_of = [s for s in node.all_input_nodes if s in self.exchanged]
            alone = bool(made_of) and all(source in found for source in made_of)
            if alone and as_collective(node) is None:
                found.add(node)
        nodes = [n for n in self.nodes if n not in self.exchanged or n in found]
        return Region(
            self.leaves, tuple(nodes), (collective,), frozenset(found), self.upstream
        )

    def origin(self) -> Node:
        """The node whose line of the user's code stands for the region: the first that
        computes with what was exchanged.
        """
        located = [node for node in self.nodes if source_line(node)]
        for node in located:
            moved = (
                is_view_like(node) or is_wait(node) or as_collective(node) is not None
            )
            if node in self.exchanged and not moved and tensor_val(node) is not None:
                return node
        tensors = [node for node in located if tensor_val(node) is not None]
        return (tensors or self.exits())[-1]

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

    def __init__(self, graph: Graph, unread: Collection[Node] = ()) -> None:
        self.graph = graph
        self.unread = frozenset(unread)
        self.order: dict[Node, int] = {}
        self.constants: set[Node] = set()
        self.collectives: list[Collective] = []
        # What a collective leads to by anything but a matrix product.
        self.exchanged: set[Node] = set()
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
            opaque = not is_pure(node) or self._contracts(node)
            if (
                collective is not None
                or is_wait(node)
                or (
                    not opaque
                    and any(s in self.exchanged for s in node.all_input_nodes)
                )
            ):
                self.exchanged.add(node)

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
                plain = (is_pure(node) and not self._contracts(node)) or is_wait(node)
                known = "" if plain else "-"
            self._groups[node] = known
        return known in ("", group_name)

    def _contracts(self, node: Node) -> bool:
        """Whether attention or a projection may stand here: a matrix product, but with
        a table of constants, which only picks or adds.
        """
        if not is_contraction(node):
            return False
        tables = [source for source in tensor_inputs(node) if source in self.constants]
        values = [tensor_val(table) for table in tables]
        return not any(
            value is not None
            and all(isinstance(size, int) for size in value.shape)
            and value.numel() <= _MAX_TABLE
            for value in values
        )

    def _is_constant(self, node: Node) -> bool:
        if node.op == "get_attr":
            # Buffers and parameters that a graph reads from its module may change.
            return tensor_val(node) is not None and is_constant_name(node)
        if not is_pure(node) or is_number(node):
            return False
        return all(source in self.constants for source in tensor_inputs(node))

    def region(self, leaves: tuple[Node, ...], group_name: str) -> Region:
        """All that the leaves determine, forward, through collectives of the group."""
        known = {*leaves, *self.unread}
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
            self._unread_by(members),
        )

    def _unread_by(self, members: set[Node]) -> tuple[Node, ...]:
        carried = [
            node for node in self.unread if any(user in members for user in node.users)
        ]
        return tuple(sorted(carried, key=self.order.__getitem__))

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


def is_constant_name(node: Node) -> bool:
    """Whether tracing, export or freezing named what the node reads a constant."""
    return bool(_CONSTANT.fullmatch(str(node.target).rpartition(".")[2]))


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


def distinct_cuts(regions: Iterable[tuple[Cut, Region]]) -> list[tuple[Cut, Region]]:
    """The first of all cuts that differ in views of their leaves alone.

    A partial output may pass through several views before it meets its weights, and
    each of them is a cut with every statistic. They say the same of the same exits.
    """
    found: dict[tuple[Node, ...], tuple[Cut, Region]] = {}
    for cut, region in regions:
        found.setdefault(tuple(map(_viewed, cut.leaves)), (cut, region))
    return list(found.values())


def _viewed(node: Node) -> Node:
    """What a node has its elements and dims from, in another order perhaps, if nothing
    else reads that.
    """
    while is_view_like(node):
        source = node.args[0]
        if not isinstance(source, Node) or len(source.users) != 1:
            break
        new, old = (
            [size for size in shape_key(value.shape) if size != "1"]
            for value in map(tensor_val, (node, source))
            if value is not None
        )
        if node.target not in _TURNS and new != old:
            break
        node = source
    return node


def is_contraction(node: Node) -> bool:
    """Whether the node is a matrix product or a convolution."""
    return node.op == "call_function" and node.target in _CONTRACTIONS
