"""One trial of a proof: random partial results of all ranks, and what they merge to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from dcp_inductor.fx.hypothesis import Hypothesis
from dcp_inductor.fx.nodes import Symbols, tensor_val
from dcp_inductor.fx.region import Cut

# Most LSEs of an ordinary trial are below this.
ORDINARY = 8.0
# Largest LSE of a skewed trial: exp of it and of its sum over ranks still fit in fp32.
SKEW = 70.0
# The same in float64, beyond any plausible clamp of an LSE.
EXACT_SKEW = 500.0
# Far beyond any LSE of attention, where bounds may stand.
FAR = (1e4, 1e9)
# A finite number that code takes for an empty shard.
MARK = -1e30
# What an LSE may be where attention has seen no key; a merge of ours takes it for that.
UNDEFINED = {"nan_lse": math.nan, "inf_lse": math.inf}


@dataclass(frozen=True)
class Trial:
    seed: int
    exact: bool
    skewed: bool = False
    scale: float = 1.0  # of the partial outputs
    # "zero" or "nan": payload of empty shards; "marked": rows of MARK on all ranks;
    # "nan_lse" or "inf_lse": what stands for -inf in empty shards.
    empty: str = ""
    numbers: tuple[float, ...] = ()  # which some rows hold, and the code compares with
    far: float = 0.0  # distance of all LSEs of a row from zero, instead of the skew
    # "some" or "all": rows with the numbers that code tests for and that no draw hits.
    special: str = ""
    beyond: int = 0  # symbolic sizes exceed this


@dataclass(frozen=True)
class Expected:
    output: Tensor  # partial output's shape, float64
    lse: Tensor  # the same without the feature dim, in the statistics' base


class Data:
    """Random partial results of all ranks, in the graph's dtypes and shapes."""

    def __init__(
        self,
        cut: Cut,
        hypothesis: Hypothesis,
        trial: Trial,
        symbols: Symbols,
        world_size: int,
    ) -> None:
        generator = torch.Generator("cpu").manual_seed(trial.seed)

        def normal(*size: int) -> Tensor:
            # Drawn in float32, which takes a fifth of the time.
            return torch.randn(
                size, generator=generator, dtype=torch.float32, device="cpu"
            ).double()

        output_value = tensor_val(cut.partial_output)
        assert output_value is not None
        shape = symbols.shape(output_value)
        dtypes = [v.dtype for v in map(tensor_val, cut.leaves) if v is not None]
        feature = hypothesis.feature_dim
        rows = [size for dim, size in enumerate(shape) if dim != feature]
        output = normal(world_size, *shape) * trial.scale
        level = normal(world_size, *rows) * (2.0 if trial.skewed else 3.0)
        if trial.skewed:
            # Far from zero throughout, where 16-bit floats are coarse.
            side = torch.rand(rows, generator=generator, device="cpu").double() - 0.5
            reach = EXACT_SKEW if trial.exact else SKEW
            reach = trial.far or reach
            level = level + side.sign() * (0.65 + 0.7 * side.abs()) * reach
        empty = torch.zeros(world_size, *rows, dtype=torch.bool, device="cpu")
        if trial.empty:
            empty = (
                torch.rand(world_size, *rows, generator=generator, device="cpu") < 0.5
            )
            if trial.empty == "marked":
                level = level.masked_fill(empty[:1], MARK)
                empty = torch.zeros_like(empty)
            elif trial.empty in UNDEFINED:
                level = level.masked_fill(empty, UNDEFINED[trial.empty])
                # A row without any key may be the average of its zeros.
                nowhere = empty.all(0, keepdim=True).expand_as(empty)
                output = output.masked_fill(nowhere.unsqueeze(feature + 1), 0.0)
            else:
                level = level.masked_fill(empty, -math.inf)
                payload = 0.0 if trial.empty == "zero" else math.nan
                output = output.masked_fill(empty.unsqueeze(feature + 1), payload)
        weight = (
            torch.rand(world_size, *rows, generator=generator, device="cpu").double()
            + 0.5
        )
        if trial.skewed:
            # Decades apart from row to row: beside these an epsilon or a bound shows.
            decades = _decades(hypothesis.kind, dtypes, trial.exact)
            exponent = torch.empty(rows, dtype=torch.float64, device="cpu")
            weight = weight * 10 ** exponent.uniform_(*decades, generator=generator)
        weight = weight.masked_fill(empty, 0.0)
        if trial.special:
            whole = trial.special == "all"
            output, level, weight = _special(
                output, level, weight, feature, whole, generator
            )
        statistics = hypothesis.statistics(level, weight)
        if trial.numbers:
            statistics = [_holding(s, trial.numbers, generator) for s in statistics]
            moved = output.movedim(feature + 1, -1)
            held = _holding(moved[..., :1], trial.numbers, generator)
            output = torch.where(
                held == moved[..., :1], moved, held.expand_as(moved)
            ).movedim(-1, feature + 1)

        self.leaves: dict[Node, list[Tensor]] = {}
        self._output = self._add(cut.partial_output, output, shape)
        self._statistics = [
            self._add_statistic(node, value, axes, feature, symbols)
            for node, value, axes in zip(
                cut.statistics, statistics, hypothesis.axes, strict=True
            )
        ]
        self._feature = feature
        self._has_empty = bool(trial.empty)

    def _add(self, node: Node, value: Tensor, shape: Sequence[int]) -> Tensor:
        """Round to the leaf's dtype, remember, and return it in float64."""
        fake = tensor_val(node)
        assert fake is not None
        rounded = value.to(fake.dtype)
        self.leaves[node] = [v.reshape(tuple(shape)).contiguous() for v in rounded]
        return rounded.double()

    def _add_statistic(
        self,
        node: Node,
        value: Tensor,
        axes: Sequence[int],
        feature: int,
        symbols: Symbols,
    ) -> Tensor:
        fake = tensor_val(node)
        assert fake is not None
        dims = [axis if axis < feature else axis - 1 for axis in axes]
        rest = [dim for dim in range(value.dim() - 1) if dim not in dims]
        order = [0, *(dim + 1 for dim in (*rest, *dims))]
        turned = self._add(node, value.permute(order), symbols.shape(fake))
        back = [order.index(dim) for dim in range(value.dim())]
        return turned.permute(back)

    def expected(self, hypothesis: Hypothesis) -> Expected:
        """The merge of the data under a hypothesis."""
        output = self._output
        level, total = hypothesis.meaning(self._statistics)
        level = torch.where(level < math.inf, level, -math.inf)
        if total is not None:
            output = output / total.unsqueeze(self._feature + 1)
        lse = torch.logsumexp(level, 0)
        # Not level - lse: beside a number of many digits the sum is lost.
        weight = torch.softmax(level, 0).nan_to_num(0.0)
        # An empty shard is NaN, by its payload or by the division: no product with 0.
        last = output.movedim(self._feature + 1, -1)
        if self._has_empty:
            last = last.masked_fill((weight == 0).unsqueeze(-1), 0.0)
        merged = torch.einsum("n...d,n...->...d", last, weight)
        return Expected(merged.movedim(-1, self._feature), lse / hypothesis.factor)


def _special(
    output: Tensor,
    level: Tensor,
    weight: Tensor,
    feature: int,
    whole: bool,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Round numbers: LSEs of zero and ties between ranks; sums of one; payload that is
    zero, whole, or equal on all ranks. All of it is ordinary to a merge.

    Args:
        output: of all ranks, ``[N, ...]``.
        level: of its rows, ``[N, ...]``.
        weight: likewise.
        feature: the partial output's feature dim.
        whole: make all rows tie at zero, with equal payload, instead of some.
    """
    if whole:
        payload = output[:1].expand_as(output).clone()
        return payload, torch.zeros_like(level), torch.ones_like(weight)

    def some(share: float, like: Tensor) -> Tensor:
        draw = torch.rand(like.shape, generator=generator, device="cpu")
        return draw < share

    level = torch.where(some(0.5, level), level.round(), level)
    level = level.masked_fill(some(0.3, level), 0.0)
    level = torch.where(some(0.2, level[:1]), level[:1], level)
    weight = weight.masked_fill(some(0.5, weight), 1.0)
    last = output.movedim(feature + 1, -1)
    last = torch.where(some(0.3, level).unsqueeze(-1), last.round(), last)
    last = torch.where(some(0.2, level[:1]).unsqueeze(-1), last[:1], last)
    last = last.masked_fill(some(0.3, level).unsqueeze(-1), 0.0)
    return last.movedim(-1, feature + 1), level, weight


def _holding(
    value: Tensor, numbers: Sequence[float], generator: torch.Generator
) -> Tensor:
    """Some of the values replaced by one of the numbers each."""
    choices = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    draw = torch.rand(value.shape, generator=generator, device="cpu")
    which = (draw * 2 * len(numbers)).long()  # half of them stay
    replaced = which < len(numbers)
    return torch.where(replaced, choices[which.clamp(max=len(numbers) - 1)], value)


def _decades(
    kind: str, dtypes: Sequence[torch.dtype], exact: bool
) -> tuple[float, float]:
    """Range of the decimal exponents of weights, or of sums of exponentials."""
    if kind == "max_log_sum" and exact:
        # Their logarithms may lie as far from zero as an LSE, whatever they are.
        return -0.4 * EXACT_SKEW, 0.4 * EXACT_SKEW
    most = min(math.log10(torch.finfo(dtype).max) for dtype in dtypes)
    if kind == "sum":
        return -0.7 * most, 0.7 * most
    # A maximum leaves a sum of at least one, where it is the row's own; the keys of a
    # long context add up to some millions.
    return -3.0, min(6.0, 0.7 * most)
