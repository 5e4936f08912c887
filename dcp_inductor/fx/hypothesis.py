"""What the statistics of a cut may mean, and what they then say of a row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from dcp_inductor.fx.axes import statistic_axes

_LN2 = math.log(2.0)


@dataclass(frozen=True)
class Hypothesis:
    """What the statistics of a cut may mean.

    ``kind`` "lse": one LSE; "max_sum": row maximum and sum of exponentials;
    "max_log_sum": row maximum and the logarithm of that sum, in one base; "sum": the
    weight of the shard itself. ``normalised`` tells whether the partial output was
    divided by its sum. ``axes`` holds, for each statistic, the partial output's dims
    that its dims are.
    """

    kind: str
    is_base_e: bool
    normalised: bool
    swapped: bool
    feature_dim: int
    axes: tuple[tuple[int, ...], ...]

    @property
    def factor(self) -> float:
        """From a logarithm in the statistics' base to a natural one."""
        return 1.0 if self.is_base_e else _LN2

    @property
    def lse_is_base_e(self) -> bool:
        """Whether an LSE that is made of the statistics is a natural logarithm."""
        return self.is_base_e or self.kind == "max_sum"

    @property
    def lse_scales(self) -> tuple[float, float]:
        """Factors by which a merged LSE may leave: none, and into the other base."""
        return 1.0, 1 / _LN2 if self.is_base_e else _LN2

    def statistics(self, level: Tensor, weight: Tensor) -> list[Tensor]:
        """Statistics of rows with this LSE or maximum, and this sum."""
        if self.kind == "lse":
            return [level]
        if self.kind == "sum":
            return [weight]
        total = weight.log() if self.kind == "max_log_sum" else weight
        return [total, level] if self.swapped else [level, total]

    def meaning(self, statistics: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Natural LSE of the rows, and the sum that their output is yet to be divided
        by.
        """
        first = statistics[0]
        if self.kind == "lse":
            return first * self.factor, None
        if self.kind == "sum":
            level, total = first.log(), first
        else:
            top, total = statistics[:: -1 if self.swapped else 1]
            if self.kind == "max_sum":
                level = top * self.factor + total.log()
            else:
                level = (top + total) * self.factor
                total = (total * self.factor).exp()
        return level, None if self.normalised else total


def families(
    statistics: Sequence[tuple[str, ...]], shape: tuple[str, ...], weights: bool
) -> Iterator[list[Hypothesis]]:
    """Hypotheses that share their values on ordinary data, the likelier ones first.

    Args:
        statistics: names of their sizes.
        shape: of the partial output.
        weights: take the one statistic for the shard's weight instead of its LSE.
    """
    ways = [statistic_axes(statistic, shape) for statistic in statistics]
    for combination in itertools.product(*ways):
        if len({feature for feature, _ in combination}) != 1:
            continue
        axes = tuple(axes for _, axes in combination)
        for swapped in (False, True) if len(ways) == 2 else (False,):
            kinds = ["sum" if weights else "lse"]
            if len(ways) == 2:
                kinds = ["max_sum", "max_log_sum"]
            yield [
                Hypothesis(
                    kind, is_base_e, normalised, swapped, combination[0][0], axes
                )
                for kind in kinds
                for is_base_e in ((True,) if kind == "sum" else (True, False))
                for normalised in ((True,) if kind == "lse" else (True, False))
            ]
