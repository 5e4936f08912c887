"""Which part of a whole a tensor holds, and in which order of dims.

A ``Layout`` is found by comparing numbers once and is then used in two ways: to predict
the tensor's value in the next trial, and to write the views that make it out of an op's
result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """``whole`` narrowed to this rank's part of ``dim``, permuted by ``order``,
    reshaped.

    ``dim`` None means all of the whole. ``start`` and ``length`` are None where the
    part is the rank's even share. ``order`` names the part's dims of size > 1 in the
    tensor's order.
    """

    dim: int | None
    start: int | None
    length: int | None
    order: tuple[int, ...]

    def part(self, whole: Tensor, world_size: int, rank: int) -> Tensor:
        """This rank's part of the whole, dims in the whole's order."""
        if self.dim is None:
            return whole
        if self.length is None:
            share = whole.shape[self.dim] // world_size
            return whole.narrow(self.dim, rank * share, share)
        assert self.start is not None
        return whole.narrow(self.dim, self.start, self.length)

    def is_uneven(self, whole: Tensor, world_size: int) -> bool:
        """Whether the part is not an N-th of the whole's dim."""
        if self.dim is None or self.length is None:
            return False
        return self.length * world_size != whole.shape[self.dim]

    def apply(
        self, whole: Tensor, shape: torch.Size, world_size: int, rank: int
    ) -> Tensor | None:
        """The tensor of ``shape`` that this layout makes of the whole; None if it
        cannot.
        """
        part = self.part(whole, world_size, rank)
        if part.numel() != shape.numel():
            return None
        rest = [dim for dim in range(part.dim()) if dim not in self.order]
        return part.permute(*rest, *self.order).reshape(shape)


Equal = Callable[[Tensor, Tensor], bool]

# Elements that are compared before all of them are.
_HEAD = 64


def find_layout(
    value: Tensor,
    whole: Tensor,
    world_size: int,
    rank: int,
    equal: Equal,
    eps: float = 0.0,
) -> Layout | None:
    """The layout by which ``value`` is this rank's part, or all, of ``whole``.

    Args:
        value: the tensor to name.
        whole: what it may be made of.
        world_size: ranks of the group.
        rank: this process's rank in it.
        equal: decides whether a tensor is the candidate.
        eps: relative rounding of the elements of ``value``.

    Returns:
        None if it is neither.
    """
    if value.numel() == 0 or value.numel() > whole.numel():
        return None
    head = value.reshape(-1)[:_HEAD]
    for dim, start, length in _parts(value, whole, world_size, rank, eps):
        part = Layout(dim, start, length, ()).part(whole, world_size, rank)
        dims = [d for d in range(part.dim()) if part.shape[d] != 1]
        for order in itertools.permutations(dims):
            layout = Layout(dim, start, length, order)
            candidate = layout.apply(whole, value.shape, world_size, rank)
            if candidate is None or not equal(head, candidate.reshape(-1)[:_HEAD]):
                continue
            if equal(value, candidate):
                return layout
    return None


def _parts(
    value: Tensor, whole: Tensor, world_size: int, rank: int, eps: float
) -> Iterator[tuple[int | None, int | None, int | None]]:
    """Parts of the whole with as many elements and the same sum, the even share first.

    The sum does not depend on the order of dims, so it spares nearly all permutations.
    """
    total = value.sum()
    # Rounding errors add up like steps of a random walk; eight times that, as ``equal``
    # decides anyway.
    walk = value.square().mean().sqrt() * value.numel() ** 0.5
    slack = 8 * max(eps, 1e-6) * (walk + 1e-3) + 1e-6 * value.abs().sum()
    if value.numel() == whole.numel():
        if (whole.sum() - total).abs() <= slack:
            yield None, None, None
        return
    for dim in range(whole.dim()):
        size = whole.shape[dim]
        length, rest = divmod(value.numel() * size, whole.numel())
        if rest or not 0 < length < size:
            continue
        others = [d for d in range(whole.dim()) if d != dim]
        running = whole.sum(others).cumsum(0) if others else whole.cumsum(0)
        sums = running[length - 1 :].clone()
        sums[1:] -= running[: size - length]
        starts = ((sums - total).abs() <= slack).nonzero().flatten().tolist()
        even = rank * length if length * world_size == size else None
        if even in starts:
            yield dim, None, None
        for start in starts:
            if start != even:
                yield dim, start, length
