"""How the dims of a statistic (an LSE, say) match the dims of a partial output."""

from __future__ import annotations

import functools
from collections.abc import Iterator


# Layers ask the same again and again.
@functools.lru_cache(maxsize=1024)
def statistic_axes(
    statistic: tuple[str, ...], shape: tuple[str, ...]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Ways to read a statistic's dims as dims of the partial output.

    Returns:
        ``(feature_dim, axes)``: the output dim that the statistic lacks, and for each
        dim of the statistic that is not 1 the output dim that it is. Several where
        sizes coincide; dims of size 1 carry no information and are left out.
    """
    named = tuple(size for size in statistic if size != "1")
    ways: list[tuple[int, tuple[int, ...]]] = []
    for feature in range(len(shape) - 1, -1, -1):
        rows = [
            dim for dim in range(len(shape)) if dim != feature and shape[dim] != "1"
        ]
        if len(rows) != len(named):
            continue
        ways += [(feature, axes) for axes in _assign(named, rows, shape)]
    return tuple(ways)


def _assign(
    named: tuple[str, ...], rows: list[int], shape: tuple[str, ...]
) -> Iterator[tuple[int, ...]]:
    if not named:
        yield ()
        return
    for dim in rows:
        if _may_equal(shape[dim], named[0]):
            rest = [other for other in rows if other != dim]
            for tail in _assign(named[1:], rest, shape):
                yield (dim, *tail)


def _may_equal(size: str, other: str) -> bool:
    """Equal, or two symbols: Dynamo may name one size twice (output's and LSE's T)."""
    return size == other or not (size.isdigit() or other.isdigit())
