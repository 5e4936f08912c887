"""The functional collectives that the pass understands, and what each one computes.

Everything else with a group argument counts as opaque: it stays where it is and no
region reaches through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from dcp_inductor.fx.nodes import Symbols, argument

_NAMESPACE = "_c10d_functional"
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
_REDUCE = {
    "sum": lambda x: x.sum(0),
    "avg": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "product": lambda x: x.prod(0),
}


@dataclass(frozen=True)
class Collective:
    """One functional collective of the graph."""

    node: Node
    kind: (
        str  # "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast"
    )
    group_name: str
    coalesced: bool

    @property
    def reduce_op(self) -> str:
        return str(argument(self.node, "reduce_op", "")).lower()


def _name(node: Node) -> str | None:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    namespace, _, name = target._schema.name.partition("::")
    return name if namespace == _NAMESPACE else None


def is_wait(node: Node) -> bool:
    """Whether the node waits for a collective's result, or for several."""
    return _name(node) in ("wait_tensor", "wait_tensors")


def as_collective(node: Node) -> Collective | None:
    """The collective that the node issues, or None."""
    name = _name(node)
    kind = _KINDS.get(name or "")
    if kind is None:
        return None
    group = argument(node, "group_name")
    if group is None:
        group = argument(node, "group")
    # compile_on_one_rank puts the group itself into the graph in place of its name.
    name_of_group = (
        group if isinstance(group, str) else getattr(group, "group_name", None)
    )
    if name_of_group is None:
        return None
    return Collective(
        node, kind, name_of_group, name is not None and "coalesced" in name
    )


def issues_exchange(node: Node) -> bool:
    """Whether the node starts communication of any kind that the pass can name."""
    return as_collective(node) is not None


def inputs_of(collective: Collective) -> list[Node]:
    """Tensors that the collective sends."""
    first = collective.node.args[0]
    return list(first) if isinstance(first, (list, tuple)) else [first]


def simulate(
    collective: Collective,
    sent: Sequence[Sequence[Tensor]],
    symbols: Symbols,
    splits: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> list[list[Tensor]]:
    """Results on every rank, given what every rank sends.

    Args:
        collective: what to run.
        sent: per rank, the input tensors (one unless coalesced).
        symbols: numbers for symbolic arguments.
        splits: per rank, all_to_all's (output, input) split sizes.
    """
    world_size = len(sent)
    results: list[list[Tensor]] = [[] for _ in range(world_size)]
    for position in range(len(sent[0])):
        tensors = [inputs[position] for inputs in sent]
        for rank, result in enumerate(_one(collective, tensors, symbols, splits)):
            results[rank].append(result)
    return results


def _one(collective, tensors, symbols, splits):
    world_size = len(tensors)
    if collective.kind == "all_gather":
        return [torch.cat(tensors, 0)] * world_size
    if collective.kind == "broadcast":
        return [tensors[symbols.number(argument(collective.node, "src"))]] * world_size
    if collective.kind == "all_to_all":
        parts = [x.split(list(s[1]), 0) for x, s in zip(tensors, splits, strict=True)]
        return [
            torch.cat([parts[source][rank] for source in range(world_size)], 0)
            for rank in range(world_size)
        ]
    reduced = _REDUCE[collective.reduce_op](torch.stack(tensors))
    if collective.kind == "all_reduce":
        return [reduced] * world_size
    if reduced.shape[0] % world_size:
        raise ValueError(
            f"cannot scatter {reduced.shape[0]} rows over {world_size} ranks"
        )
    return list(reduced.chunk(world_size, 0))


def split_coalesced_gathers(graph: Graph) -> None:
    """Issue coalesced all-gathers one by one, so that each can be judged by itself."""
    single = torch.ops._c10d_functional.all_gather_into_tensor.default
    for node in list(graph.nodes):
        collective = as_collective(node)
        if (
            collective is None
            or collective.kind != "all_gather"
            or not collective.coalesced
        ):
            continue
        for user in list(node.users):
            with graph.inserting_before(user):
                source = inputs_of(collective)[user.args[1]]
                issued = graph.call_function(single, (source, *node.args[1:]))
            issued.meta.update(user.meta)
            user.replace_all_uses_with(issued)
            graph.erase_node(user)
        graph.erase_node(node)
    _split_waits(graph)


def _split_waits(graph: Graph) -> None:
    """Wait for all-gathers one by one, where torch waits for all that it coalesced."""
    single = torch.ops._c10d_functional.wait_tensor.default
    for node in list(graph.nodes):
        if _name(node) != "wait_tensors":
            continue
        awaited = [as_collective(source) for source in node.args[0]]
        if not any(c is not None and c.kind == "all_gather" for c in awaited):
            continue
        for user in list(node.users):
            with graph.inserting_before(user):
                waited = graph.call_function(single, (node.args[0][user.args[1]],))
            waited.meta.update(user.meta)
            user.replace_all_uses_with(waited)
            graph.erase_node(user)
        graph.erase_node(node)
