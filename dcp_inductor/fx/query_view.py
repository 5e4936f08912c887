"""Leave a gathered query in the workspace where a merge ends every use of it.

A ``q_gather_view`` writes where the one before it wrote, on all ranks. Nobody may read
the earlier result by then, and what tells a peer so is a merge of the same group that
this rank begins after the last reader. So a gather becomes a view only if

- whatever reads its result, itself or through anything that may share its memory or be
  computed anew where it is used, is needed by one merge: it runs before that merge
  however a scheduler orders the graph;
- that merge comes before the group's next gather of a query;
- nothing writes to the result, returns it, or hands it out of a CUDA graph.

Anything that is not understood is a reason to copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor import lowering
from torch._inductor import utils as inductor_utils
from torch.fx import Graph, Node

from dcp_inductor import config, ops
from dcp_inductor.fx.nodes import is_number, only_moves, tensor_val
from dcp_inductor.fx.order import group_of_direct

_aten = torch.ops.aten
# Their results hold nothing of what their inputs hold.
_METADATA_OPS = {
    _aten.sym_size.int,
    _aten.sym_stride.int,
    _aten.sym_numel.default,
    _aten.sym_storage_offset.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
}
# Inductor lowers these itself: it may fuse them into what uses them, drop them, or let
# the result share memory with an input.
_COMPILED = ("aten", "prims", "_c10d_functional", "inductor_prims")
_GATHERS = (ops.q_gather, ops.q_gather_view)
_FUNCTIONALIZED = ("auto_functionalized", "auto_functionalized_v2")
_TRITON_OPS = ("triton_kernel_wrapper_functional", "flex_attention")


def place_views(graph: Graph) -> dict[Node, str]:
    """Make views of the gathered queries that may be.

    Returns:
        For each query gather, why its result is copied out, or "" for a view.
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    exchanges: dict[str, list[Node]] = {}
    for node in nodes:
        group = group_of_direct(node)
        if group is not None:
            exchanges.setdefault(group, []).append(node)
    reasons: dict[Node, str] = {}
    ends: list[Node] | None = None
    for of_group in exchanges.values():
        for i, node in enumerate(of_group):
            if node.target is not ops.q_gather:
                continue
            if ends is None:
                ends = _ends_of_cuda_graphs(nodes, node)
            reasons[node] = _reason_to_copy(node, of_group[i + 1 :], position, ends)
            if not reasons[node]:
                node.target = ops.q_gather_view
    return reasons


def query_gather_of(result: Node) -> Node | None:
    """The query gather whose result, in another layout, this is; None: of another."""
    node = result
    while node.target not in _GATHERS:
        if not node.all_input_nodes or group_of_direct(node) is not None:
            return None
        node = node.all_input_nodes[0]
    return node


def _reason_to_copy(
    gather: Node, later: list[Node], position: dict[Node, int], ends: list[Node]
) -> str:
    """Why the result of ``gather`` must be copied out, or "".

    Args:
        gather: a query gather.
        later: exchanges of the group behind it, in order.
        position: of every node in the graph.
        ends: nodes at which a CUDA graph may end.
    """
    if not config.query_view:
        return "query_view is off"
    following = [i for i, node in enumerate(later) if node.target in _GATHERS]
    merges = [
        node
        for node in later[: following[0] if following else None]
        if node.target is ops.a2a_lse_reduce
    ]
    if not merges and following:
        return "the group gathers another query before it merges"
    if not merges:
        return "no merge of the group follows in this graph"
    try:
        uses = list(_uses(gather))
    except _Escapes as escape:
        return str(escape)
    reason = ""
    for merge in merges:
        needed = _needed_by(merge, position[gather], position)
        late = [use for use in uses if use not in needed]
        if not late:
            return _leaves_cuda_graph(gather, merge, ends) if ends else ""
        reason = reason or _late(late[0])
    return reason


def _late(use: Node) -> str:
    return f"{use.name} may read it after the merge"


class _Escapes(Exception):
    """A use of a tensor that rules out that it lies in the workspace."""


def _uses(gather: Node) -> Iterator[Node]:
    """Nodes that read the gathered tensor, or what may share memory with it.

    Raises:
        _Escapes: one of them writes to it, returns it, or is not understood.
    """
    items = [user for user in gather.users if user.args[1:] == (0,)]
    stack, seen = list(items), set(items)
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.op == "call_function" and user.target in _METADATA_OPS:
                continue
            _check_use(user, node)
            if user in seen:
                continue
            seen.add(user)
            compiled = _is_compiled(user)
            if compiled and not user.users and not user.is_impure():
                continue  # nobody will run it
            yield user
            if compiled:
                stack.append(user)


def _check_use(user: Node, node: Node) -> None:
    """Raise _Escapes unless ``user`` only reads ``node``, in a way that is known."""
    if user.op == "output":
        if only_moves(node):
            raise _Escapes(f"the graph returns {node.name}")
        raise _Escapes(_late(node))
    if user.op != "call_function":
        raise _Escapes(f"{user.name} is not an op")
    target = user.target
    if target is operator.getitem:
        return
    if isinstance(target, torch._ops.OpOverload):
        _check_schema(user, node, target, dict(user.kwargs), user.args)
        return
    name = target.name() if isinstance(target, torch._ops.HigherOrderOperator) else ""
    arguments: Any = user.kwargs
    if name == "auto_functionalized":
        _check_schema(user, node, user.args[0], dict(user.kwargs), ())
    elif name == "auto_functionalized_v2":
        if _holds(arguments["_all_bases"], node):
            raise _Escapes(f"{user.name} writes to it")
    elif name == "triton_kernel_wrapper_functional":
        written = [arguments["kwargs"][key] for key in arguments["tensors_to_clone"]]
        if _holds(written, node):
            raise _Escapes(f"{user.name} writes to it")
    elif name != "flex_attention":
        raise _Escapes(f"what {user.name} does with it is not known")


def _check_schema(
    user: Node, node: Node, op: object, kwargs: dict[str, object], args: object
) -> None:
    """Raise _Escapes if ``op`` writes to ``node`` or returns an unknown view of it."""
    assert isinstance(op, torch._ops.OpOverload)
    assert isinstance(args, tuple)
    parameters = op._schema.arguments
    given = dict(zip((p.name for p in parameters), args, strict=False)) | kwargs
    for parameter in parameters:
        alias = parameter.alias_info
        if alias is None or not _holds(given.get(parameter.name), node):
            continue
        if alias.is_write:
            raise _Escapes(f"{user.name} writes to it")
        if op.namespace not in _COMPILED:
            raise _Escapes(f"{user.name} returns a view of it")


def _holds(value: object, node: Node) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds(item, node) for item in value)
    return value is node


def _is_compiled(node: Node) -> bool:
    """Whether the node need not be a launch of its own with a result of its own."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    return target.namespace in _COMPILED or (
        target in lowering.lowerings and target not in lowering.fallbacks
    )


def _needed_by(merge: Node, floor: int, position: dict[Node, int]) -> set[Node]:
    """The merge and all behind ``floor`` whose data it cannot be computed without."""
    stack, seen = [merge], {merge}
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node.target in _METADATA_OPS:
            continue
        for source in node.all_input_nodes:
            if source not in seen and position[source] >= floor:
                seen.add(source)
                stack.append(source)
    return seen


def _leaves_cuda_graph(gather: Node, merge: Node, ends: list[Node]) -> str:
    """Why a CUDA graph of Inductor's may end between the two, or "".

    The result would then be an output of that CUDA graph, all of which must lie in the
    graph's own memory.
    """
    before = _reach(gather, lambda node: node.all_input_nodes)
    behind = _reach(merge, lambda node: list(node.users))
    for node in ends:
        if node not in before and node not in behind:
            return f"a CUDA graph may end at {node.name}, before the merge"
    return ""


def _reach(node: Node, step: Callable[[Node], list[Node]]) -> set[Node]:
    stack, seen = [node], {node}
    while stack:
        for other in step(stack.pop()):
            if other not in seen:
                seen.add(other)
                stack.append(other)
    return seen


def _ends_of_cuda_graphs(nodes: list[Node], gather: Node) -> list[Node]:
    """Nodes that Inductor may keep out of CUDA graphs, where it makes any in parts."""
    partitions = getattr(inductor_config, "graph_partition", True)
    if not (inductor_config.triton.cudagraphs and partitions):
        return []
    device = gather.meta["val"][0].device
    return [node for node in nodes if _ends_cuda_graph(node, device)]


def _ends_cuda_graph(node: Node, device: torch.device) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(v, torch.Tensor) and v.device != device for v in values):
        return True
    op: object = node.target
    if is_number(node):
        reads = any(tensor_val(source) is not None for source in node.all_input_nodes)
        return reads and op not in _METADATA_OPS
    if isinstance(op, torch._ops.HigherOrderOperator):
        if op.name() in _TRITON_OPS:
            return False
        if op.name() not in _FUNCTIONALIZED:
            return True
        op = node.args[0]
    if not isinstance(op, torch._ops.OpOverload):
        return True
    apart = inductor_config.custom_should_partition_ops
    unsafe = getattr(inductor_utils, "is_cudagraph_unsafe_fx_node", None)
    return (
        op.name() in apart
        or f"{op.name()}.{op._overloadname}" in apart
        or getattr(torch.Tag, "cudagraph_unsafe", None) in op.tags
        or (unsafe is not None and unsafe(node))
    )
