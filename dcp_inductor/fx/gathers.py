"""Find gathers of one tensor over all ranks and prove them exactly.

Every rank's elements get numbers of their own, so that a gathered tensor tells where
each of its elements came from. Behind the collective a gather is only followed through
ops that move elements: of what looks at them no trial shows everything. An all-gather
is a gather at least as the stack [N, *source]; a sum of tensors that are zero outside
the own slot, or a broadcast, may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from dcp_inductor.fx.collectives import Collective, inputs_of, is_wait
from dcp_inductor.fx.layout import Layout, find_layout
from dcp_inductor.fx.lockstep import Lockstep, Unsupported
from dcp_inductor.fx.nodes import (
    Symbols,
    expression,
    free_symbols,
    is_pure,
    is_view_like,
    only_moves,
    tensor_val,
)
from dcp_inductor.fx.proof import Refuted
from dcp_inductor.fx.region import GraphIndex, Region
from dcp_inductor.fx.site import GatherExit
from dcp_inductor.fx.thresholds import largest_threshold

_MAX_ELEMENTS = 1 << 24
_SIZES = (3, 5, 2, 7)
_MAX_BACKWARD = 12
_BITS = {1: torch.uint8, 2: torch.int16}


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
    beyond = largest_threshold(region.nodes, region.nodes)
    draws = [Draw(0), Draw(1), Draw(2, wild=True), Draw(3, wild=True, finite=False)]
    if beyond == math.inf:
        return Refuted(
            "layout", "places depend on positions by a curve, which no trial can follow"
        )
    if beyond is not None:
        draws.append(Draw(4, wild=True, beyond=max(int(beyond), _SIZES[-1])))
    trials = []
    for draw in draws:
        trial = _trial(region, source, value, world_size, rank, draw)
        if isinstance(trial, Refuted):
            return trial
        trials.append(trial)
    outcome = _solve(region, trials)
    return outcome if isinstance(outcome, Refuted) else (outcome, len(trials))


@dataclass(frozen=True)
class Draw:
    """How the numbers of a trial are chosen.

    Tame numbers tell elements apart, and so name a layout; wild ones, of any sign, size
    and fraction, show what else is done to them. ``finite`` leaves out NaN and
    infinities. Symbolic sizes exceed ``beyond``.
    """

    seed: int
    wild: bool = False
    finite: bool = True
    beyond: int = 0


@dataclass(frozen=True)
class _Trial:
    draw: Draw
    values: dict[Node, Tensor]
    stack: Tensor  # [N, *source]


def _trial(
    region: Region,
    source: Node,
    value: Tensor,
    world_size: int,
    rank: int,
    draw: Draw,
) -> _Trial | Refuted:
    free = free_symbols((source, *region.nodes))
    for stretch in (1, world_size):
        # One for each symbol, so that none can stand for another unseen.
        most = max(_SIZES) + 1
        sizes = [*_SIZES, *range(most, most + len(free) - len(_SIZES))]
        symbols = Symbols(
            {
                symbol: stretch
                * (sizes[(position + draw.seed) % len(sizes)] + draw.beyond)
                for position, symbol in enumerate(free)
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
            return _Trial(draw, run.run(), stack)
        except (Unsupported, ValueError, RuntimeError) as error:
            failure = Refuted(
                "not_runnable", f"the region does not run on a trial: {error}"
            )
    return failure


def _numbers(dtype: torch.dtype, shape: tuple[int, ...], draw: Draw) -> Tensor | None:
    """Values of the dtype; None where there are too few to tell elements apart."""
    if dtype is torch.bool or dtype.is_complex:
        return None
    generator = torch.Generator("cpu").manual_seed(draw.seed)
    count = int(torch.Size(shape).numel())
    if draw.wild:
        return _wild(dtype, count, generator, draw.finite).reshape(shape)
    if dtype.itemsize >= 4:
        # Distinct and shuffled, without zero: padding is zero.
        order = torch.randperm(count, generator=generator, device="cpu")
        return (order + 1).to(dtype).reshape(shape)
    # Few values: codes of several digits cannot be told from one run, so elements
    # repeat and the layout must fit random contents instead, in every trial.
    high = 120 if dtype.itemsize == 1 else 30000
    bits = torch.randint(1, high, shape, generator=generator, device="cpu")
    return bits.to(_BITS[dtype.itemsize]).view(dtype)


def _wild(
    dtype: torch.dtype, count: int, generator: torch.Generator, finite: bool
) -> Tensor:
    """Any bit patterns of the dtype, and some that code asks about."""
    every_byte = torch.randint(
        0, 256, (count, dtype.itemsize), generator=generator, device="cpu"
    )
    values = every_byte.to(torch.uint8).view(dtype).flatten()
    if dtype.itemsize == 1:
        return values
    asked_about = [0.0, 1.0, -1.0] if dtype.is_floating_point else [0, 1, -1]
    if dtype.is_floating_point and not finite:
        asked_about += [math.inf, -math.inf, math.nan]
    elif dtype.is_floating_point:
        values = torch.where(values.isfinite(), values, torch.ones_like(values))
    for number in asked_about:
        where = torch.rand(count, generator=generator, device="cpu") < 0.04
        values = values.masked_fill(where, number)
    return values


def _solve(
    region: Region, trials: Sequence[_Trial]
) -> tuple[GatherExit, ...] | Refuted:
    """Walk from the region's exits up to nodes that hold the whole stack."""
    found: dict[Node, GatherExit] = {}
    pending = region.exits()
    seen: set[Node] = set()
    issued = {collective.node for collective in region.collectives}
    moved = _only_moved(region, issued)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        layout = _layout(node, trials) if node in moved - issued else None
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


def _only_moved(region: Region, issued: set[Node]) -> set[Node]:
    """Nodes that hold what a collective gave, in some order: a trial shows what became
    of its numbers, and no trial has all numbers.
    """
    moved = set(issued)
    for node in region.nodes:
        sources = [s for s in node.all_input_nodes if s in region.exchanged]
        if sources and all(source in moved for source in sources):
            if only_moves(node) or is_wait(node):
                moved.add(node)
    return moved


def _layout(node: Node, trials: Sequence[_Trial]) -> Layout | None:
    """The layout by which the node holds the stack, in every trial."""
    first, *others = trials
    value, stack = first.values.get(node), first.stack
    if not _comparable(value, stack):
        return None
    held, whole = (x.double() for x in _readable(value, stack))
    layout = find_layout(held, whole, 1, 0, torch.equal)
    for trial in others:
        value, stack = trial.values.get(node), trial.stack
        if layout is None or not _comparable(value, stack):
            return None
        held, whole = _readable(value, stack)
        wanted = layout.apply(whole, held.shape, 1, 0)
        if wanted is None or not _same(held, wanted, trial.draw):
            return None
    return layout


def _comparable(value: object, stack: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.numel() == stack.numel()
        and value.dtype == stack.dtype
    )


def _readable(*tensors: Tensor) -> list[Tensor]:
    """The tensors, or the bits of those that have too few values to be numbers."""
    itemsize = tensors[0].dtype.itemsize
    if itemsize > 2 or (itemsize == 2 and tensors[0].is_floating_point()):
        return list(tensors)
    return [x.contiguous().view(_BITS[itemsize]) for x in tensors]


def _same(value: Tensor, wanted: Tensor, draw: Draw) -> bool:
    if not value.is_floating_point():
        return torch.equal(value, wanted)
    # A slot of zeros made by a product is NaN beside an infinity: the op's number is an
    # answer there.
    known = ~value.isnan() if not draw.finite else torch.ones_like(value).bool()
    both_nan = value.isnan() & wanted.isnan()
    return not bool((known & ~both_nan & (value != wanted)).any())
