"""Find gathers of one tensor over all ranks and prove them exactly.

Every rank's elements get numbers of their own, so that a gathered tensor tells where
each of its elements came from; a layout that fits them is a proof. An all-gather is a
gather at least as the stack [N, *source]; a sum of tensors that are zero outside the
own slot, or a broadcast, may be.
"""

from __future__ import annotations

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from dcp_inductor.fx.collectives import Collective, inputs_of
from dcp_inductor.fx.layout import Layout, find_layout
from dcp_inductor.fx.lockstep import Lockstep, Unsupported
from dcp_inductor.fx.nodes import (
    Symbols,
    expression,
    free_symbols,
    is_pure,
    is_view_like,
    tensor_val,
)
from dcp_inductor.fx.proof import Refuted
from dcp_inductor.fx.region import GraphIndex, Region
from dcp_inductor.fx.site import GatherExit

_MAX_ELEMENTS = 1 << 24
_SIZES = (3, 5, 2, 7)
_MAX_BACKWARD = 12


def gather_sources(
    index: GraphIndex, collective: Collective, world_size: int
) -> list[Node]:
    """Tensors that the collective may gather, best first; empty if it cannot be a
    gather.
    """
    if collective.kind == "all_gather":
        sources: list[Node] = []
        for node in inputs_of(collective):
            chain = [node]
            while is_view_like(chain[-1]) and isinstance(chain[-1].args[0], Node):
                chain.append(chain[-1].args[0])
            sources += reversed(chain)
        return sources
    if collective.kind == "all_reduce" and collective.reduce_op == "sum":
        return _padded_sources(index, collective, world_size)
    return []


def _padded_sources(
    index: GraphIndex, collective: Collective, world_size: int
) -> list[Node]:
    """Tensors that the collective may hold between zeros: an N-th of its elements."""
    found: list[Node] = []
    held = tensor_val(inputs_of(collective)[0])
    if held is None:
        return []
    queue = list(inputs_of(collective))
    seen: set[Node] = set()
    while queue and len(seen) < _MAX_BACKWARD:
        node = queue.pop(0)
        if node in seen or node in index.constants:
            continue
        seen.add(node)
        value = tensor_val(node)
        if value is not None and _numel(value) * world_size == _numel(held):
            found.append(node)
        if is_pure(node):
            queue += node.all_input_nodes
    return found


def _numel(value: Tensor) -> sympy.Expr:
    return sympy.prod(expression(size) for size in value.shape)


def prove_gather(
    region: Region, source: Node, world_size: int, rank: int
) -> tuple[tuple[GatherExit, ...], int] | Refuted:
    """Layouts of the region's exits as stacks of all ranks' ``source``, and trials
    taken.

    Args:
        region: what ``source`` alone determines.
        source: this rank's tensor.
        world_size: ranks of the group.
        rank: this process's rank in it.
    """
    value = tensor_val(source)
    if value is None or not region.collectives:
        return Refuted("no_exchange", "the tensor meets no collective of the group")
    exits: tuple[GatherExit, ...] | None = None
    for draw in (0, 1):
        outcome = _trial(region, source, value, world_size, rank, draw)
        if isinstance(outcome, Refuted):
            return outcome
        if exits is not None and exits != outcome:
            return Refuted(
                "layout", "the gathered tensor's layout changes with its size"
            )
        exits = outcome
    assert exits is not None
    return exits, 2


def _trial(
    region: Region, source: Node, value: Tensor, world_size: int, rank: int, draw: int
) -> tuple[GatherExit, ...] | Refuted:
    for stretch in (1, world_size):
        symbols = Symbols(
            {
                symbol: stretch * _SIZES[(position + draw) % len(_SIZES)]
                for position, symbol in enumerate(free_symbols((source, *region.nodes)))
            }
        )
        try:
            shape = symbols.shape(value)
            numel = int(torch.Size(shape).numel())
            if numel == 0 or numel * world_size > _MAX_ELEMENTS:
                return Refuted(
                    "too_large", f"a trial of shape {shape} would take too long"
                )
            stack = _numbers(value.dtype, (world_size, *shape), draw)
            if stack is None:
                return Refuted(
                    "dtype", f"{value.dtype} has too few values to tell elements apart"
                )
            run = Lockstep(
                region.nodes,
                {source: list(stack.unbind(0))},
                world_size=world_size,
                rank=rank,
                symbols=symbols,
                exact=False,
            )
            values = run.run()
        except (Unsupported, ValueError, RuntimeError) as error:
            failure = Refuted(
                "not_runnable", f"the region does not run on a trial: {error}"
            )
            continue
        return _solve(region, values, stack)
    return failure


def _numbers(dtype: torch.dtype, shape: tuple[int, ...], draw: int) -> Tensor | None:
    """Distinct values of the dtype, shuffled, without zero: padding is zero."""
    count = int(torch.Size(shape).numel())
    order = torch.randperm(
        count, generator=torch.Generator("cpu").manual_seed(draw), device="cpu"
    )
    if dtype.is_floating_point and dtype.itemsize >= 4:
        return (order + 1).to(dtype).reshape(shape)
    if dtype.itemsize >= 4 and not dtype.is_complex:
        return (order + 1).to(dtype).reshape(shape)
    # Few values: codes of several digits cannot be told from one run, so elements
    # repeat and the layout must fit random contents instead, in both trials.
    if dtype is torch.bool or dtype.is_complex:
        return None
    bits = torch.randint(
        1,
        120,
        shape,
        generator=torch.Generator("cpu").manual_seed(draw + 1),
        device="cpu",
    )
    if dtype.itemsize == 1:
        return bits.to(torch.uint8).view(dtype)
    fine = torch.randint(
        1,
        30000,
        shape,
        generator=torch.Generator("cpu").manual_seed(draw + 1),
        device="cpu",
    )
    return fine.to(torch.int16).view(dtype)


def _solve(
    region: Region, values: dict[Node, Tensor], stack: Tensor
) -> tuple[GatherExit, ...] | Refuted:
    """Walk from the region's exits up to nodes that hold the whole stack."""
    found: dict[Node, GatherExit] = {}
    pending = region.exits()
    seen: set[Node] = set()
    issued = {collective.node for collective in region.collectives}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        layout = None if node in issued else _layout(values.get(node), stack)
        if layout is not None:
            found[node] = GatherExit(node, layout)
            continue
        if node in issued:
            return Refuted(
                "not_a_gather", "the result does not hold the ranks' data in order"
            )
        pending += [s for s in node.all_input_nodes if s in region.exchanged]
    if not found:
        return Refuted("unused", "nothing uses the gathered tensor")
    order = {node: position for position, node in enumerate(region.nodes)}
    return tuple(sorted(found.values(), key=lambda e: order[e.node]))


def _layout(value: object, stack: Tensor) -> Layout | None:
    if not isinstance(value, Tensor) or value.numel() != stack.numel():
        return None
    if value.dtype != stack.dtype:
        return None
    whole, held = stack, value
    if value.dtype.itemsize <= 2:
        bits = torch.uint8 if value.dtype.itemsize == 1 else torch.int16
        whole, held = stack.view(bits), value.contiguous().view(bits)
    return find_layout(held.double(), whole.double(), 1, 0, torch.equal)
