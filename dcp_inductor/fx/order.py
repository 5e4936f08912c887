"""Thread the order token through the exchanges of a group.

Exchanges of one group must run in the same order on every rank, and nothing but data
dependence binds a scheduler. Direct ops hand the token on; a functional collective of
the group that stays in the graph is tied in by order_after and order_token, unless data
ties it already.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from dcp_inductor import ops
from dcp_inductor.fx.collectives import as_collective, inputs_of, is_wait
from dcp_inductor.fx.emit import Emitter
from dcp_inductor.fx.nodes import tensor_val

DIRECT_OPS = (ops.q_gather, ops.q_gather_view, ops.kv_gather, ops.a2a_lse_reduce)


def group_of_direct(node: Node) -> str | None:
    """Group of a direct op, None for any other node."""
    if node.op != "call_function" or node.target not in DIRECT_OPS:
        return None
    return node.args[2 if node.target is not ops.a2a_lse_reduce else 3]  # type: ignore[return-value]


def thread_token(graph: Graph, group_name: str) -> None:
    """Give every exchange of the group the token of the one before it."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    token: Node | None = None  # made by ``last``
    last: Node | None = None
    items: list[Node] = []
    pending: list[Node] = []  # waits of collectives since then
    for node in list(graph.nodes):
        if group_of_direct(node) == group_name:
            slot = 1 if node.target is not ops.a2a_lse_reduce else 2
            current = token if token is not None else node.args[slot]
            for wait in pending:
                if not _depends(node, wait, position):
                    with graph.inserting_before(node):
                        current = Emitter(graph, wait).call(
                            ops.order_token, wait, current
                        )
                    _move_before(graph, wait, current, position)
            node.update_arg(slot, current)
            with graph.inserting_after(node):
                token = Emitter(graph, node).item(node, -1)
            token = _as_last_item(node, token)
            last, pending = node, []
            items.append(token)
            continue
        collective = as_collective(node)
        if collective is None or collective.group_name != group_name:
            continue
        if (
            last is not None
            and token is not None
            and not _depends(node, last, position)
        ):
            _put_behind(graph, node, token)
        waited = _wait_of(node)
        if waited is not None:
            pending.append(waited)
    for item in items:
        if not item.users:
            graph.erase_node(item)


def insert_guard(graph: Graph, node: Node, site: str, reason: str) -> None:
    """Put a site_guard before a collective whose site a peer may read otherwise."""
    collective = as_collective(node)
    assert collective is not None
    source = inputs_of(collective)[0]
    emit = Emitter(graph, source)
    with graph.inserting_before(node):
        token = emit.call(
            torch.ops.aten.empty.memory_format,
            [0],
            dtype=torch.uint8,
            device=source.meta["val"].device,
        )
        token = emit.call(ops.site_guard, token, collective.group_name, site, reason)
    _put_behind(graph, node, token)


def _as_last_item(node: Node, item: Node) -> Node:
    """``item`` with the index counted from the front, as later passes expect."""
    item.update_arg(1, len(node.meta["val"]) - 1)
    return item


def _put_behind(graph: Graph, node: Node, token: Node) -> None:
    """Let a collective's input be there only after the token."""
    first = node.args[0]
    source = first[0] if isinstance(first, (list, tuple)) else first
    assert isinstance(source, Node)
    with graph.inserting_before(node):
        tied = Emitter(graph, source).call(ops.order_after, source, token)
    if isinstance(first, (list, tuple)):
        node.update_arg(0, [tied, *first[1:]])
    else:
        node.update_arg(0, tied)


def _wait_of(node: Node) -> Node | None:
    """A wait on the collective's result."""
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if is_wait(user):
            # A wait for several gives a list, whose items are tensors.
            tensors = [n for n in (user, *user.users) if tensor_val(n) is not None]
            return tensors[0] if tensors else None
        if user.target.__class__.__name__ == "builtin_function_or_method":  # getitem
            stack.extend(user.users)
    return None


def _move_before(
    graph: Graph, wait: Node, user: Node, position: dict[Node, int]
) -> None:
    """A wait that stood behind its new user moves in front of it; it depends on no
    exchange.
    """
    if position.get(wait, 0) > position.get(user.next, len(position)):
        user.prepend(wait)


def _depends(node: Node, on: Node, position: dict[Node, int]) -> bool:
    """Whether data already makes ``node`` run after ``on``."""
    floor = position.get(on, -1)
    stack, seen = list(node.all_input_nodes), set()
    while stack:
        source = stack.pop()
        if source is on:
            return True
        if source in seen or position.get(source, floor + 1) < floor:
            continue
        seen.add(source)
        stack.extend(source.all_input_nodes)
    return False
