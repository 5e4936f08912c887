"""Which part of a whole a tensor holds, and in which order of dims.

A ``Layout`` is found by comparing numbers once and is then used in two ways: to predict
the tensor's value in the next trial, and to write the views that make it out of an op's
result.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

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


class Summed:
    """A tensor and its sums, each made once however often the tensor is compared."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.numel = tensor.numel()
        self._windows: dict[tuple[int, int], list[float]] = {}
        self._parts: dict[int, list[float]] = {}

    @cached_property
    def total(self) -> float:
        """Sum of all elements."""
        return float(self.tensor.sum())

    @cached_property
    def norm(self) -> float:
        """Length of a random walk whose steps are the elements."""
        return float(torch.linalg.vector_norm(self.tensor))

    @cached_property
    def ordered(self) -> Tensor:
        """The elements by size, where their places are not known."""
        return self.tensor.flatten().sort()[0]

    def parts(self, numel: int) -> list[float]:
        """Sums of all parts of this many elements, in rising order."""
        known = self._parts.get(numel)
        if known is None:
            known = [self.total] if numel == self.numel else []
            for dim, size in enumerate(self.tensor.shape if not known else ()):
                length, rest = divmod(numel * size, self.numel)
                if not rest and 0 < length < size:
                    known += self.windows(dim, length)
            known.sort()
            self._parts[numel] = known
        return known

    def windows(self, dim: int, length: int) -> list[float]:
        """Sums of all parts of this length along a dim, by where they start."""
        known = self._windows.get((dim, length))
        if known is None:
            tensor = self.tensor
            others = [d for d in range(tensor.dim()) if d != dim]
            running = tensor.sum(others).cumsum(0) if others else tensor.cumsum(0)
            sums = running[length - 1 :].clone()
            sums[1:] -= running[: tensor.shape[dim] - length]
            known = self._windows[dim, length] = sums.tolist()
        return known


def find_layout(
    value: Tensor | Summed,
    whole: Tensor | Summed,
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
    values = value if isinstance(value, Summed) else Summed(value)
    wholes = whole if isinstance(whole, Summed) else Summed(whole)
    if values.numel == 0 or values.numel > wholes.numel:
        return None
    # Most values are no part of anything, which their sums tell.
    sums = wholes.parts(values.numel)
    if not sums:
        return None
    slack = _slack(values, eps)
    first = bisect.bisect_left(sums, values.total - slack)
    if first == len(sums) or sums[first] > values.total + slack:
        return None
    value, whole = values.tensor, wholes.tensor
    head = value.reshape(-1)[:_HEAD]
    for dim, start, length in _parts(values, wholes, world_size, rank, slack):
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


def _slack(value: Summed, eps: float) -> float:
    """What the sums of equal tensors may differ by.

    Rounding errors add up like steps of a random walk; eight times that, and a little
    of the most that a straight walk can come to, as ``equal`` decides anyway.
    """
    walk = value.norm
    return 8 * max(eps, 1e-6) * (walk + 1e-3) + 1e-6 * value.numel**0.5 * walk


def _parts(
    value: Summed, whole: Summed, world_size: int, rank: int, slack: float
) -> Iterator[tuple[int | None, int | None, int | None]]:
    """Parts of the whole with as many elements and the same sum, the even share first.

    The sum does not depend on the order of dims, so it spares nearly all permutations.
    """
    total = value.total
    if value.numel == whole.numel:
        if abs(whole.total - total) <= slack:
            yield None, None, None
        return
    for dim, size in enumerate(whole.tensor.shape):
        length, rest = divmod(value.numel * size, whole.numel)
        if rest or not 0 < length < size:
            continue
        sums = whole.windows(dim, length)
        starts = [i for i, x in enumerate(sums) if abs(x - total) <= slack]
        even = rank * length if length * world_size == size else None
        if even in starts:
            yield dim, None, None
        for start in starts:
            if start != even:
                yield dim, start, length
