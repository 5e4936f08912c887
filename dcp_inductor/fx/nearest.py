"""Words for a refutation: which merge came nearest, and on which data it was left."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from dcp_inductor.fx.exits import Equal, Wholes
from dcp_inductor.fx.hypothesis import Hypothesis
from dcp_inductor.fx.layout import Summed
from dcp_inductor.fx.proof import Refuted
from dcp_inductor.fx.trial import Trial

# Of so few numbers one may be a multiple of another by chance.
_FEW = 4
# Nearer to one than this is no factor to speak of.
_ONE = 1e-4
# A merge in base 2 is named where it fits this much better than the same in base e,
# since near the weights' bounds the one may lie nearer by chance.
_CLEARLY = 2.0


class Nearest:
    """The hypothesis whose merge the exits of a region came nearest to."""

    def __init__(self) -> None:
        self._distances: dict[Hypothesis, float] = {}
        self._factors: dict[Hypothesis, float] = {}

    def look(
        self,
        values: Iterable[Summed],
        wholes: Wholes,
        equal: Equal,
        world_size: int,
        rank: int,
    ) -> None:
        """Note how far the exits' values are from the merge under a hypothesis."""
        hypothesis = wholes.hypothesis
        parts = list(_parts(wholes, world_size, rank))
        for value in values:
            for part in parts:
                if part.numel != value.numel or not value.numel:
                    continue
                # Sorted, since the order of elements is not known: no order of them
                # is nearer than this.
                distance = float((value.ordered - part.ordered).abs().max())
                if distance < self._distances.get(hypothesis, math.inf):
                    self._distances[hypothesis] = distance
                factor = _factor(value, part, equal)
                if factor is not None:
                    self._factors.setdefault(hypothesis, factor)

    @property
    def nearness(self) -> int:
        """As in a ``Refuted``."""
        return 2 if self._factors else 1 if self._distances else 0

    def __str__(self) -> str:
        if not self._distances:
            return "no result has the size of the merge or of a rank's part"
        if self._factors:
            nearest, factor = next(iter(self._factors.items()))
            is_what = f"; the result is {factor:.4g} times the merge, and"
        else:
            nearest = min(self._distances, key=self._distances.__getitem__)
            natural = replace(nearest, is_base_e=True)
            most = _CLEARLY * self._distances[nearest]
            if self._distances.get(natural, math.inf) < most:
                nearest = natural
            is_what = "; the result is"
        return (
            f"nearest: {_named(nearest)}{is_what} on ordinary data off by "
            f"at least {self._distances[nearest]:.1e}"
        )


def _factor(value: Summed, part: Summed, equal: Equal) -> float | None:
    """What the elements of the part are multiplied by to give those of the value."""
    if value.numel < _FEW:
        return None
    size = value.norm / part.norm if part.norm else 0.0
    if not 0.0 < size < math.inf:
        return None
    if equal(value.ordered / size, part.ordered):
        # Of size one it is the merge, with its elements elsewhere.
        return size if abs(size - 1.0) > _ONE else None
    return -size if equal(-value.ordered.flip(0) / size, part.ordered) else None


def on_trial(refuted: Refuted, hypothesis: Hypothesis, trial: Trial) -> Refuted:
    """The refutation of a hypothesis that had held before, with both of them named."""
    reason = f"{refuted.reason} (nearest: {_named(hypothesis)}"
    if trial.seed > 2:  # the first two are ordinary
        reason += f", which holds on ordinary data and not on {_described(trial)}"
    return replace(refuted, reason=f"{reason})", nearness=3)


def _parts(wholes: Wholes, world_size: int, rank: int) -> Iterable[Summed]:
    whole = wholes.output
    yield whole
    for dim, size in enumerate(whole.tensor.shape):
        if size % world_size == 0 and dim != wholes.hypothesis.feature_dim:
            yield Summed(whole.tensor.chunk(world_size, dim)[rank])


def _named(hypothesis: Hypothesis) -> str:
    base = "e" if hypothesis.is_base_e else "2"
    if hypothesis.kind == "lse":
        return f"the merge by an LSE of base {base}"
    statistics = "the shards' weights"
    if hypothesis.kind == "max_log_sum":
        statistics = f"maximum and logarithm of the sum in base {base}"
    if hypothesis.kind == "max_sum":
        statistics = f"maximum and sum in base {base}"
    divided = "" if hypothesis.normalised else " of outputs not yet divided by them"
    return f"the merge by {statistics}{divided}"


def _described(trial: Trial) -> str:
    where = "in float64" if trial.exact else "in the graph's own dtypes"
    if trial.empty == "marked":
        what = "rows of LSE -1e30"
    elif trial.empty:
        payload = "NaN" if trial.empty == "nan" else "0"
        what = f"rows where shards are empty (LSE -inf, payload {payload})"
    elif trial.far:
        what = f"LSEs of {trial.far:.0e}"
    elif trial.skewed:
        what = "LSEs far from zero"
    elif trial.scale != 1.0:
        what = f"outputs times {trial.scale:g}"
    elif trial.special:
        what = "LSEs of zero, ties and payload of round numbers"
    elif trial.beyond:
        what = f"sizes above {trial.beyond}"
    else:
        what = "data"
    return f"{what} {where}"
