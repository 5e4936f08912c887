"""Heads that are numbered with the rank innermost: rank r has heads r, r + N, ...

A merge over them is one over [T, h, N, D], scattered along N. Where the code shows that
order only behind the weighting, the leaves are given these dims first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from dcp_inductor import groups
from dcp_inductor.fx.apart import behind, place_of, swap
from dcp_inductor.fx.collectives import as_collective
from dcp_inductor.fx.emit import Emitter
from dcp_inductor.fx.nodes import is_view_like, shape_key, tensor_val

_aten = torch.ops.aten
_VIEWS = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}


def split_heads(graph: Graph, leaves: Sequence[Node]) -> dict[Node, Node]:
    """Give the ranks a dim of their own in partial outputs and statistics whose heads
    are scattered with the rank innermost.

    Returns:
        For each leaf that was split the tensor that its users read now.
    """
    found: dict[int, int] = {}
    for leaf in leaves:
        if _val(leaf).dim() > 2:
            found |= _rank_minor(leaf)
    made_of: dict[Node, Node] = {}
    for heads, world_size in found.items():
        for leaf in leaves:
            made = _split(graph, leaf, heads, world_size)
            if made is not None and leaf not in made_of:
                made_of[leaf] = made
    return made_of


def _rank_minor(leaf: Node) -> dict[int, int]:
    """Number of heads, and of ranks, where a view behind the leaf ends them by the
    ranks and what follows sends each rank its share.
    """
    found: dict[int, int] = {}
    for node in behind(leaf):
        if node.op != "call_function" or node.target not in _VIEWS:
            continue
        value, source = tensor_val(node), tensor_val(node.args[0])
        if value is None or source is None or value.dim() != source.dim() + 1:
            continue
        for user in node.users:
            if user.target is not _aten.permute.default:
                continue
            place = user.args[1][0] % value.dim()
            inner = value.shape[place]
            if place == 0 or inner != _ranks_behind(user):
                continue
            outer, heads = value.shape[place - 1], source.shape[place - 1]
            if isinstance(heads, int) and outer * inner == heads and outer > 1:
                found[heads] = int(inner)
    return found


def _ranks_behind(node: Node) -> int | None:
    """Size of the group that the node is sent to as it is."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        collective = as_collective(node)
        if collective is not None:
            try:
                return int(groups.resolve(collective.group_name).size())
            except ValueError:
                return None
        if not is_view_like(node):
            return None
    return None


def _split(graph: Graph, leaf: Node, heads: int, world_size: int) -> Node | None:
    shape = shape_key(_val(leaf).shape)
    if shape.count(str(heads)) != 1 or len(shape) < 2:
        return None
    sizes = [int(size) if size.isdigit() else -1 for size in shape]
    if sizes.count(-1) > 1:
        return None
    at = shape.index(str(heads))
    apart = [*sizes[:at], heads // world_size, world_size, *sizes[at + 1 :]]
    with graph.inserting_before(place_of(leaf).next):
        emitter = Emitter(graph, leaf)
        made = emitter.call(_aten.reshape.default, leaf, apart)
        made = emitter.call(_aten.reshape.default, made, sizes)
    return swap(leaf, made, emitter.created)


def _val(node: Node) -> torch.Tensor:
    value = tensor_val(node)
    assert value is not None
    return value
