"""Words for a refutation: which merge came nearest, and on which data it was left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from dcp_inductor.fx.hypothesis import Hypothesis
from dcp_inductor.fx.proof import Refuted
from dcp_inductor.fx.trial import Expected, Trial


class Nearest:
    """The hypothesis whose merge the exits of a region came nearest to."""

    def __init__(self) -> None:
        self._distance = float("inf")
        self._hypothesis: Hypothesis | None = None

    def look(
        self,
        values: Iterable[object],
        expected: Expected,
        hypothesis: Hypothesis,
        world_size: int,
        rank: int,
    ) -> None:
        """Note how far the exits' values are from the merge under a hypothesis."""
        for value in values:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            for part in _parts(expected.output, world_size, rank):
                if part.numel() != value.numel() or not value.numel():
                    continue
                # Sorted, since the order of elements is not known: no order of them
                # is nearer than this.
                ordered = [x.double().flatten().sort()[0] for x in (value, part)]
                distance = float((ordered[0] - ordered[1]).abs().max())
                if distance < self._distance:
                    self._distance, self._hypothesis = distance, hypothesis

    def __str__(self) -> str:
        if self._hypothesis is None:
            return "no result has the size of the merge or of a rank's part"
        return (
            f"nearest: {_named(self._hypothesis)}, from which ordinary data differ by "
            f"{self._distance:.1e}"
        )


def on_trial(refuted: Refuted, hypothesis: Hypothesis, trial: Trial) -> Refuted:
    """The refutation of a hypothesis that had held before, with both of them named."""
    reason = f"{refuted.reason} (nearest: {_named(hypothesis)}"
    if trial.seed > 2:  # the first two are ordinary
        reason += f", which holds on ordinary data and not on {_described(trial)}"
    return replace(refuted, reason=f"{reason})")


def _parts(whole: Tensor, world_size: int, rank: int) -> Iterable[Tensor]:
    yield whole
    for dim, size in enumerate(whole.shape):
        if size % world_size == 0:
            yield whole.chunk(world_size, dim)[rank]


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
