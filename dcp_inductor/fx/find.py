"""Candidates: where a merge of partial attention results may stand in a graph.

A merge starts at a *cut*: a partial output O and its statistics (an LSE, or max and
sum), from which everything up to the result is plain tensor code and collectives of one
group. ``cuts`` proposes cuts by shape alone; what they compute is for ``prove`` to find
out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from torch.fx import Node

from dcp_inductor.fx.axes import statistic_axes
from dcp_inductor.fx.collectives import Collective, as_collective, inputs_of, is_wait
from dcp_inductor.fx.nodes import (
    is_number,
    is_pure,
    is_view_like,
    is_widening_cast,
    tensor_val,
)
from dcp_inductor.fx.region import Cut, GraphIndex, is_contraction

# Bounds of the search, in nodes. The longest public spelling needs about half of each.
_MAX_BACKWARD = 32  # from a collective up to its partial output
_MAX_STATISTICS = 120  # from the join of output and weights up to the statistics
_MAX_JOINS = 4
_MAX_FRONTIER = 16


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
        if node in index.unread:
            continue
        seen.add(node)
        for candidate in reversed(_same_elements(node)):
            value = tensor_val(candidate)
            if value is not None and value.dtype.is_floating_point and value.dim() >= 2:
                yield candidate
        if is_pure(node) and not is_contraction(node):
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
            if not (s in reached or s in index.constants or s in index.unread)
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
        openable = [node for node in frontier if node not in closed]
        # A view of a statistic's shape may be of a tensor that has another, and there
        # the walk would end.
        openable = [
            node
            for node in openable
            if not (is_view_like(node) and _is_statistic(index, node, shape))
            or any(
                index.can_open(source, group_name)
                or _is_statistic(index, source, shape)
                for source in index.inputs(node)
            )
        ]
        if not openable:
            return
        latest = max(
            openable,
            key=lambda n: (
                is_view_like(n),
                not _ends_statistics(index, n, shape, reached),
                index.order[n],
            ),
        )
        frontier.discard(latest)
        frontier.update(
            source
            for source in index.inputs(latest)
            if not (
                source in reached or source in index.constants or source in index.unread
            )
        )


def _ends_statistics(
    index: GraphIndex, node: Node, shape: tuple[str, ...], reached: set[Node]
) -> bool:
    """Whether the node is a statistic, and what it is made of none: the sum over a
    row's keys. Behind it there is no cut, so others are opened first.
    """
    if node in index.exchanged or not _is_statistic(index, node, shape):
        return False
    return any(
        source not in reached
        and source not in index.constants
        and not _is_statistic(index, source, shape)
        for source in index.inputs(node)
    )


def _is_statistic(index: GraphIndex, node: Node, shape: tuple[str, ...]) -> bool:
    """Whether the node has one number for each row of a partial output of ``shape``."""
    value = tensor_val(node)
    if value is None or not value.dtype.is_floating_point:
        return False
    if sum(size != "1" for size in index.shape(node)) >= len(shape):
        return False
    return bool(statistic_axes(index.shape(node), shape))
