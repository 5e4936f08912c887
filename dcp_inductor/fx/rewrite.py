"""Write a proven site as one graph op and the views around it.

New nodes go behind the last of the site's inputs; users that stood before them are
moved by the final topological sort of the pass. Old nodes go as soon as nothing uses
them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Graph, Node

from dcp_inductor import ops
from dcp_inductor.fx.emit import Emitter
from dcp_inductor.fx.layout import Layout
from dcp_inductor.fx.nodes import expression, size_name, tensor_val
from dcp_inductor.fx.proof import Exit
from dcp_inductor.fx.site import GatherSite, MergeSite

_aten = torch.ops.aten
_LN2 = math.log(2.0)
# A flat buffer has no rows; it moves as rows of at most this many elements.
_FLAT_ROW = 8192


@dataclass(frozen=True)
class Plan:
    """How a merge maps to the op: ``dims`` are the output's dims in the op's order."""

    scatter: str  # the op's argument
    dim: int | None  # output dim that is scattered
    dims: tuple[int, ...]  # permutation of the partial output's dims, feature dim last
    split: int  # dims[:split] form the op's tokens, dims[split:-1] its heads


def plan_merge(site: MergeSite) -> Plan:
    """Choose what the ranks receive: the common part of all exits, else everything."""
    shape = _val(site.cut.partial_output).shape
    feature = site.proof.hypothesis.feature_dim
    rows = [dim for dim in range(len(shape)) if dim != feature]
    outputs = [e.layout for e in site.proof.exits if e.what == "output"]
    parts = {(layout.dim, layout.start, layout.length) for layout in outputs}
    part = next(iter(parts))
    if len(parts) != 1 or part[0] is None or part[2] is not None:
        return Plan("none", None, (*rows, feature), max(len(rows) - 1, 0))
    dim = part[0]
    others = [other for other in rows if other != dim]
    if dim == rows[0] and others:
        return Plan("tokens", dim, (dim, *others, feature), 1)
    return Plan("heads", dim, (*others, dim, feature), len(others))


def merge_rows(site: MergeSite) -> int | torch.SymInt:
    """Tokens of the op that the site becomes; a workspace holds ``max_tokens``."""
    plan = plan_merge(site)
    shape = _val(site.cut.partial_output).shape
    return math.prod(shape[dim] for dim in plan.dims[: plan.split])


def gather_rows(site: GatherSite) -> int | torch.SymInt:
    """Tokens of a query gather, or this rank's rows of a KV gather."""
    before, behind = _stack_order(site)
    shape = _val(site.source).shape
    if before:
        return math.prod(shape[label - 1] for label in before)
    return shape[behind[0] - 1] if behind else 1


def _stack_order(site: GatherSite) -> tuple[list[int], list[int]]:
    """Dims of the stack before and behind the rank's, in the gathered tensor's order.

    0 is the rank and d + 1 the source's dim d. Dims of size 1 are not in the layout and
    lead.
    """
    order = site.exits[0].layout.order
    named = [label for label in order if label]
    ones = [d + 1 for d in range(_val(site.source).dim()) if d + 1 not in named]
    position = order.index(0) if 0 in order else 0
    if position == 0:
        return [], [*ones, *named]
    return [*ones, *named[:position]], named[position:]


def rewrite_merge(
    graph: Graph, site: MergeSite, token: Node
) -> list[tuple[Node, Node]]:
    """Replace the site's exits by a2a_lse_reduce and views of its results.

    Returns:
        ``(old, new)`` for each exit.
    """
    writer = _MergeWriter(graph, site, plan_merge(site), token)
    replacements = [(found.node, writer.exit(found)) for found in site.proof.exits]
    _replace(replacements)
    _erase(graph, site.region.nodes)
    return replacements


class _MergeWriter:
    def __init__(self, graph: Graph, site: MergeSite, plan: Plan, token: Node) -> None:
        self.site = site
        self.plan = plan
        self.emit = Emitter(graph, site.origin)
        self.anchor = _Anchor(graph, _last((*site.cut.leaves, token)))
        self.hypothesis = site.proof.hypothesis
        self.shape = _val(site.cut.partial_output).shape
        with self.anchor:
            partial_lse = self._lse()
            partial_output = self._output()
        lses = [e.layout for e in site.proof.exits if e.what == "lse"]
        self.full_lse = plan.dim is not None and any(
            layout.dim is None
            or layout.length is not None
            or self._label(layout.dim, "lse") != plan.dim
            for layout in lses
        )
        dtypes = [_val(e.node).dtype for e in site.proof.exits if e.what == "output"]
        dtype = dtypes[0]
        for other in dtypes[1:]:
            dtype = torch.promote_types(dtype, other)
        with self.anchor:
            self.op = self.emit.call(
                ops.a2a_lse_reduce,
                partial_output,
                partial_lse,
                token,
                site.group.name,
                scatter=plan.scatter,
                is_lse_base_on_e=self.hypothesis.lse_is_base_e,
                return_lse=bool(lses),
                full_lse=self.full_lse,
                output_dtype=dtype,
                site=site.name,
            )
            self.output = self.emit.item(self.op, 0)
            self.lse = self.emit.item(self.op, 1) if lses else None

    def _label(self, dim: int, what: str) -> int:
        """The partial output's dim that a layout's dim is; LSEs have no feature dim."""
        return dim + 1 if what == "lse" and dim >= self.hypothesis.feature_dim else dim

    def _flatten(self, node: Node, dims: Sequence[int]) -> Node:
        """Merge the op's token dims and its head dims, ``dims`` being the node's in op
        order.
        """
        value = _val(node)
        split = self.plan.split
        tokens = math.prod(value.shape[:split])
        heads = math.prod(value.shape[split : len(self.plan.dims) - 1])
        rest = list(value.shape[len(self.plan.dims) - 1 :])
        return self.emit.reshape(node, [tokens, heads, *rest])

    def _output(self) -> Node:
        node = self.site.cut.partial_output
        if self.hypothesis.normalised:
            node = self.emit.permute(node, self.plan.dims)
        else:
            node = self.emit.cast(node, torch.float32)
            node = self.emit.permute(node, self.plan.dims)
            total = self.emit.call(
                _aten.unsqueeze.default, self._total(), len(self.plan.dims) - 1
            )
            node = self.emit.call(_aten.div.Tensor, node, total)
        return self._flatten(node, self.plan.dims)

    def _total(self) -> Node:
        """The sum that the partial output is yet to be divided by."""
        if self.hypothesis.kind == "sum":
            return self._statistic(0)
        total = self._statistic(1)
        if self.hypothesis.kind == "max_log_sum":
            power = _aten.exp if self.hypothesis.is_base_e else _aten.exp2
            return self.emit.call(power.default, total)
        return total

    def _lse(self) -> Node:
        kind = self.hypothesis.kind
        if kind == "lse":
            node = self._statistic(0, keep_dtype=True)
        elif kind == "sum":
            node = self.emit.call(_aten.log.default, self._statistic(0))
        else:
            top, total = self._statistic(0), self._statistic(1)
            if kind == "max_sum":
                if not self.hypothesis.is_base_e:
                    top = self.emit.call(_aten.mul.Tensor, top, _LN2)
                total = self.emit.call(_aten.log.default, total)
            node = self.emit.call(_aten.add.Tensor, top, total)
        return self._flatten(node, self.plan.dims[:-1])

    def _statistic(self, position: int, keep_dtype: bool = False) -> Node:
        """A statistic with the partial output's row dims, in the op's order."""
        if self.hypothesis.swapped:
            position = 1 - position
        node = self.site.cut.statistics[position]
        if not keep_dtype:
            node = self.emit.cast(node, torch.float32)
        axes = self.hypothesis.axes[position]
        value = _val(node)
        named = [
            dim for dim in range(value.dim()) if size_name(value.shape[dim]) != "1"
        ]
        ones = [dim for dim in range(value.dim()) if dim not in named]
        wanted = [dim for dim in self.plan.dims[:-1] if dim in axes]
        order = [named[axes.index(dim)] for dim in wanted]
        node = self.emit.permute(node, [*ones, *order])
        return self.emit.reshape(node, [self.shape[dim] for dim in self.plan.dims[:-1]])

    def exit(self, found: Exit) -> Node:
        """The node that stands for an exit."""
        with self.anchor:
            if found.what == "output":
                return self._view(self.output, found, self.plan.dims, self.plan.dim)
            assert self.lse is not None
            node = self.lse
            scale = found.lse_scale
            if self.hypothesis.lse_is_base_e != self.hypothesis.is_base_e:
                scale /= _LN2  # the op worked in base e, the graph in base 2
            if not math.isclose(scale, 1.0):
                node = self.emit.call(_aten.mul.Tensor, node, scale)
            have = None if self.full_lse else self.plan.dim
            return self._view(node, found, self.plan.dims[:-1], have)

    def _view(
        self, node: Node, found: Exit, dims: Sequence[int], scattered: int | None
    ) -> Node:
        """Bring an op result whose dims are ``dims`` into the exit's layout."""
        layout = found.layout
        sizes = [
            _share(self.shape[dim], self.site.group.world_size)
            if dim == scattered
            else self.shape[dim]
            for dim in dims
        ]
        node = self.emit.reshape(node, sizes)
        if layout.dim is not None:
            split_dim = self._label(layout.dim, found.what)
            if split_dim != scattered:
                node = self._own_part(node, layout, list(dims).index(split_dim))
        order = [list(dims).index(self._label(dim, found.what)) for dim in layout.order]
        rest = [position for position in range(len(dims)) if position not in order]
        node = self.emit.permute(node, [*rest, *order])
        model = _val(found.node)
        return self.emit.like(self.emit.reshape(node, list(model.shape)), model)

    def _own_part(self, node: Node, layout: Layout, position: int) -> Node:
        group = self.site.group
        size = _val(node).shape[position]
        if layout.length is not None:
            assert layout.start is not None
            return self.emit.narrow(node, position, layout.start, layout.length)
        share = _share(size, group.world_size)
        if not isinstance(share, int):
            length = self.emit.call(_aten.sym_size.int, node, position)
            length = self.emit.call(operator.floordiv, length, group.world_size)
            pieces = self.emit.call(_aten.split.Tensor, node, length, position)
            return self.emit.item(pieces, group.rank)
        return self.emit.narrow(node, position, group.rank * share, share)


class _Anchor:
    """Insert each batch of nodes behind the previous one, starting behind a node."""

    def __init__(self, graph: Graph, after: Node) -> None:
        self._graph = graph
        self._next = after.next

    def __enter__(self) -> None:
        self._scope = self._graph.inserting_before(self._next)
        self._scope.__enter__()

    def __exit__(self, *error: object) -> None:
        self._scope.__exit__(*error)


def rewrite_gather(
    graph: Graph, site: GatherSite, token: Node
) -> list[tuple[Node, Node]]:
    """Replace the site's exits by a direct gather and views of its result.

    Returns:
        ``(old, new)`` for each exit.
    """
    anchor = _Anchor(graph, _last((site.source, token)))
    emit = Emitter(graph, site.origin)
    source = _val(site.source)
    world_size = site.group.world_size
    before, behind = _stack_order(site)
    sizes = {label: source.shape[label - 1] for label in (*before, *behind)}
    with anchor:
        node = emit.permute(site.source, [label - 1 for label in (*before, *behind)])
        if before:
            # With one head a rank its dim is none of these; rows stay whole then.
            heads, width = (behind[:1], behind[1:]) if behind[1:] else ((), behind)
            node = emit.reshape(
                node,
                [
                    math.prod(sizes[label] for label in labels)
                    for labels in (before, heads, width)
                ],
            )
            op = emit.call(ops.q_gather, node, token, site.group.name, site=site.name)
        else:
            if source.dim() < 2:
                node = emit.reshape(node, _flat_rows(source))
            op = emit.call(ops.kv_gather, node, token, site.group.name, site=site.name)
        gathered = emit.item(op, 0)
        stacked = [*before, 0, *behind]
        gathered = emit.reshape(
            gathered, [world_size if label == 0 else sizes[label] for label in stacked]
        )
        replacements = []
        for found in site.exits:
            lead = [label for label in stacked if label not in found.layout.order]
            turned = emit.permute(
                gathered,
                [stacked.index(label) for label in (*lead, *found.layout.order)],
            )
            model = _val(found.node)
            turned = emit.like(emit.reshape(turned, list(model.shape)), model)
            replacements.append((found.node, turned))
    _replace(replacements)
    _erase(graph, site.region.nodes)
    return replacements


def _flat_rows(source: torch.Tensor) -> list[int | torch.SymInt]:
    """Rows and row length to move a flat buffer by."""
    size = source.shape[0]
    terms = sympy.Add.make_args(expression(size))
    coefficient = int(sympy.gcd_list([term.as_coeff_Mul()[0] for term in terms]))
    width = max(
        w for w in range(1, min(coefficient, _FLAT_ROW) + 1) if coefficient % w == 0
    )
    return [size // width, width]


def _share(size: int | torch.SymInt, world_size: int) -> int | torch.SymInt:
    return size // world_size


def _val(node: Node) -> torch.Tensor:
    value = tensor_val(node)
    assert value is not None
    return value


def _last(nodes: Sequence[Node]) -> Node:
    """The node that comes last in its graph; placeholders count as their last one."""
    last = max(nodes)
    while last.next.op == "placeholder":
        last = last.next
    return last


def _replace(replacements: Sequence[tuple[Node, Node]]) -> None:
    for old, new in replacements:
        old.replace_all_uses_with(new)


def _erase(graph: Graph, nodes: Sequence[Node]) -> None:
    for node in reversed(nodes):
        if not node.users and node.op == "call_function":
            graph.erase_node(node)
