"""How near to the merge a value must be, and what it is when it is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dcp_inductor.fx.proof import Refuted
from dcp_inductor.fx.trial import ORDINARY, SKEW, UNDEFINED, Trial


class Judge:
    """Tolerances of one region.

    Args:
        world_size: ranks of the group.
        exact: whether its algebra is tried in float64.
        eps: of the coarsest float in it.
        statistics: dtypes of its statistics.
    """

    def __init__(
        self,
        world_size: int,
        exact: bool,
        eps: float,
        statistics: Sequence[torch.dtype],
    ) -> None:
        self._world_size = world_size
        self._exact = exact
        self._eps = eps
        self._statistic_eps = max(torch.finfo(dtype).eps for dtype in statistics)

    def differs(self, value: Tensor, wanted: Tensor, trial: Trial) -> Refuted | None:
        """How an exit's value is not what the merge gives; None where it is."""
        if trial.empty or trial.far:
            # Where the graph gives NaN for an empty shard, the op's finite result is an
            # answer.
            known = ~value.isnan()
            same = (value == wanted) | self._close(value, wanted, trial)
            if trial.empty == "marked":
                # Beside such a number sums are lost, and weights with them; but code
                # that takes it for an empty shard gives zero.
                same |= value != 0
            if trial.empty in UNDEFINED:
                # Where all weights come out as zero, NaN that the graph makes zero, or
                # the infinity itself as the merged LSE.
                same |= (value == 0) | value.isinf()
            if bool((known & ~same).any()):
                if trial.far:
                    return Refuted(
                        "not_equivalent", "an LSE far from zero is treated apart"
                    )
                return Refuted(
                    "empty_shards", "rows with empty shards come out differently"
                )
            return None
        finite = value.isfinite()
        if not bool(finite.all()):
            if not trial.skewed or trial.exact:
                return Refuted(
                    "not_finite", "the result is not finite on ordinary data"
                )
            value, wanted = value[finite], wanted[finite]
        if not self.equal(trial)(value, wanted):
            if trial.skewed:
                return Refuted(
                    "precision",
                    "an LSE of large magnitude loses precision on the way",
                )
            most = float((value - wanted).abs().max())
            return Refuted(
                "not_equivalent", f"results differ from the merge by {most:.1e}"
            )
        return None

    def equal(self, trial: Trial) -> Callable[[Tensor, Tensor], bool]:
        """Decides whether a value is the wanted one, for a trial."""
        most, typical = self._tolerance(trial)

        def equal(value: Tensor, wanted: Tensor) -> bool:
            if value.numel() == 0:
                return True
            difference = (value - wanted).abs()
            largest = wanted.abs().max().clamp(min=1.0)
            usual = wanted.square().mean().sqrt().clamp(min=0.05)
            return bool(difference.max() <= most * largest) and bool(
                difference.square().mean().sqrt() <= typical * usual
            )

        return equal

    def _tolerance(self, trial: Trial) -> tuple[float, float]:
        """Difference to allow: the largest relative to the largest value, and the
        root mean square relative to the values' own.
        """
        if trial.exact:
            return 1e-5, 2e-6
        most, typical = 32 * self._eps, 4 * self._eps
        if trial.skewed or self._exact:
            # An LSE of this size is only known to this much, whatever is computed from
            # it, and a fold over the ranks rounds it once a rank. Ranks see different
            # rows: what one of them must accept, none may refuse narrowly. (Where the
            # algebra is not proven in float64, ordinary trials stay strict.)
            size = SKEW if trial.skewed else ORDINARY
            rounding = self._world_size * size * self._statistic_eps
            most, typical = most + 4 * rounding, typical + rounding
        return most, typical

    def _close(self, value: Tensor, wanted: Tensor, trial: Trial) -> Tensor:
        most, _ = self._tolerance(trial)
        return (value - wanted).abs() <= most * wanted.abs().clamp(min=1.0)
