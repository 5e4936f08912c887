"""Prove that a region merges partial attention results by their log-sum-exp.

The region runs for all ranks in lockstep on small random tensors and is compared with
the merge in float64 under each hypothesis about its statistics. First every float is
computed in float64 (the algebra must agree to 1e-5), then in the graph's own dtypes (to
their precision), with skewed LSEs of large magnitude (which show a narrowed LSE) and
with empty shards. Only what agrees on every trial is a merge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from dcp_inductor.fx.exits import Namer, Values, Wholes
from dcp_inductor.fx.hypothesis import Hypothesis, families
from dcp_inductor.fx.judge import Judge
from dcp_inductor.fx.lockstep import READINGS, Lockstep, Looked, Unsupported
from dcp_inductor.fx.nearest import Nearest, on_trial
from dcp_inductor.fx.nodes import (
    Symbols,
    bits_matter,
    expression,
    free_symbols,
    shape_key,
    size_name,
    step_of,
    tensor_val,
)
from dcp_inductor.fx.proof import Exit, Proof, Refuted
from dcp_inductor.fx.region import Cut, Region
from dcp_inductor.fx.structure import sent_from
from dcp_inductor.fx.tested import tested
from dcp_inductor.fx.thresholds import largest_threshold
from dcp_inductor.fx.trial import (
    FAR,
    MARK,
    Data,
    Trial,
)

# Elements of all ranks' partial outputs in one trial; above it a proof would cost
# seconds.
_MAX_ELEMENTS = 1 << 26
_MAX_RETREATS = 4
_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23)


def prove_merge(
    region: Region, cut: Cut, world_size: int, rank: int, *, weights: bool = False
) -> Proof | Refuted:
    """Find the hypothesis under which the region is a merge, or say why there is none.

    Args:
        region: all that the cut determines.
        cut: partial output and statistics.
        world_size: ranks of the group.
        rank: this process's rank in it.
        weights: take the one statistic for the shard's weight instead of its LSE.
    """
    if not region.collectives or not region.exits():
        return Refuted(
            "no_exchange", "the partial results meet no collective of the group"
        )
    shapes = [shape_key(v.shape) for v in map(tensor_val, cut.leaves) if v is not None]
    if any("0" in shape for shape in shapes[1:]):
        return Refuted(
            "no_tokens",
            f"there are no tokens: a partial output of [{', '.join(shapes[0])}] holds "
            "nothing to exchange, nor to try",
        )
    coarse = [v.dtype for v in map(tensor_val, region.nodes) if v is not None]
    if any(dtype.is_floating_point and dtype.itemsize < 2 for dtype in coarse):
        return Refuted("precision", "values are rounded to 8-bit floats on the way")
    if region.unread and any(bits_matter(node) for node in region.nodes):
        return Refuted("not_equivalent", "parts of a tensor are read as other numbers")
    sizes = set(free_symbols(sent_from(region.nodes)))
    if sizes - set(free_symbols(region.leaves)):
        return Refuted(
            "not_equivalent",
            "what is sent depends on a dynamic size that the partial output does not "
            "have, and a peer may have another",
            nearness=3,
        )
    return _Prover(region, cut, world_size, rank, weights).run()


class _Prover:
    def __init__(
        self, region: Region, cut: Cut, world_size: int, rank: int, weights: bool
    ) -> None:
        self.region = region
        self.weights = weights
        self.cut = cut
        self.world_size = world_size
        self.rank = rank
        self.trials = 0
        self.nearest = Nearest()
        self.failed: Node | None = None  # the exit that a trial did not confirm
        self.uses_rank = False  # in the run of all ranks to their end
        sums = any(n.target is torch.ops.aten.cumsum.default for n in region.nodes)
        self.readings = [r for r in READINGS if sums or r != "ending"]
        self.exact = not any(bits_matter(node) for node in region.nodes)
        nodes = (*region.leaves, *region.nodes)
        self.symbols = free_symbols(nodes)
        dtypes = {v.dtype for v in map(tensor_val, nodes) if v is not None}
        self.eps = max(
            (torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0
        )
        statistics = [self._value(statistic).dtype for statistic in cut.statistics]
        self.judge = Judge(world_size, self.exact, self.eps, statistics)
        eps = 0.0 if self.exact else self.eps
        self.namer = Namer(region, cut.partial_output, world_size, rank, eps)
        # Symbolic sizes are multiples of it, so that rows of all heads come out even;
        # and of N, too, where a run shows that a split must.
        self.stretch = step_of(map(self._value, cut.leaves))
        self.stretched = False

    def run(self) -> Proof | Refuted:
        if not self.namer.has_output:
            return Refuted(
                "not_equivalent",
                "this is no merge; no result depends on the partial output",
            )
        failure: Refuted | None = None
        shape = shape_key(self._value(self.cut.partial_output).shape)
        statistics = [shape_key(self._value(s).shape) for s in self.cut.statistics]
        for hypotheses in families(statistics, shape, self.weights):
            for reading in self.readings:
                outcome, uses_rank = self._first_trial(hypotheses, reading)
                if isinstance(outcome, Proof):
                    return outcome
                if outcome is not None:
                    failure = outcome
                if not uses_rank:
                    break
        if failure is None:
            reason = f"this is no merge; {self.nearest}"
            nearness = self.nearest.nearness
            failure = Refuted("not_equivalent", reason, nearness=nearness)
        return replace(failure, trials=self.trials)

    def _first_trial(
        self, hypotheses: list[Hypothesis], reading: str
    ) -> tuple[Proof | Refuted | None, bool]:
        trial = Trial(seed=1, exact=self.exact)
        ran = self._run(trial, hypotheses[0], reading)
        if isinstance(ran, Refuted):
            return ran, False
        run, data = ran
        values, uses_rank = Values(run.values_of(self.rank)), run.has_rank_constants
        equal = self.judge.equal(trial)
        refuted: Refuted | None = None
        for hypothesis in hypotheses:
            wholes = Wholes(hypothesis, data.expected(hypothesis))
            # What fails on other data may be made of what does not: a slice of the
            # merge, or its LSE behind a clamp.
            failed: set[Node] = set()
            for _ in range(_MAX_RETREATS):
                exits = self.namer.solve(values, wholes, equal, failed)
                if exits is None:
                    self.nearest.look(
                        self.namer.results(values),
                        wholes,
                        equal,
                        self.world_size,
                        self.rank,
                    )
                    break
                refuted = self._confirm(hypothesis, exits, reading)
                uses_rank = uses_rank or self.uses_rank
                if refuted is None:
                    return Proof(hypothesis, tuple(exits), self.trials), uses_rank
                if self.failed is None:
                    break
                failed.add(self.failed)
        return refuted, uses_rank

    def _confirm(
        self, hypothesis: Hypothesis, exits: Sequence[Exit], reading: str
    ) -> Refuted | None:
        """Repeat on other data; the first disagreement refutes."""
        self.failed = None
        trials = [Trial(seed=2, exact=self.exact), Trial(3, self.exact, skewed=True)]
        # A clamp or a threshold shows where the data lie far from ordinary.
        narrow = self._value(self.cut.partial_output).dtype == torch.float16
        scales = (1e6, 1e-6) if self.exact and not narrow else (1e3, 1e-3)
        trials += [Trial(10, self.exact, scale=scale) for scale in scales]
        if self.exact:
            trials.append(Trial(4, False))
            # A few rows may round by chance to what they were; three draws do not.
            trials += [Trial(seed, False, skewed=True) for seed in (5, 8, 9)]
        trials += [
            Trial(14, self.exact, special="some"),
            Trial(15, self.exact, special="all"),
            Trial(6, self.exact, empty="zero"),
            Trial(7, self.exact, empty="nan"),
        ]
        narrow = any(
            torch.finfo(self._value(s).dtype).max < -MARK for s in self.cut.statistics
        )
        if self.exact and not narrow and hypothesis.kind == "lse":
            trials.append(Trial(13, True, empty="marked"))
        if self.exact:
            trials += [Trial(11, True, skewed=True, far=far) for far in FAR]
        needed = self._made_of([found.node for found in exits])
        asked = tested(needed)
        if hypothesis.kind == "lse":
            if asked.numbers:
                trials.append(Trial(16, self.exact, numbers=asked.numbers))
            if asked.nan:
                trials.append(Trial(17, self.exact, empty="nan_lse"))
            if asked.infinity:
                trials.append(Trial(18, self.exact, empty="inf_lse"))
        beyond = largest_threshold(self.region.nodes, needed)
        if beyond is not None:
            if beyond == math.inf:
                return Refuted(
                    "not_equivalent",
                    "values depend on positions by a curve, which no trial can follow",
                )
            most = max(int(beyond), _PRIMES[-1])
            trials.append(Trial(12, self.exact, beyond=most))
        # A merge that one rank's part shows and another's does not (a mask of the last
        # heads, a rounding at the limit) would be rewritten by some ranks only. Where
        # all ranks hold the whole, one look at the peers will do.
        parts = any(found.layout.dim is not None for found in exits)
        for trial in trials:
            with_peers = parts or trial is trials[0]
            ran = self._run(trial, hypothesis, reading, with_peers)
            if isinstance(ran, Refuted):
                return ran
            run, data = ran
            self.uses_rank = self.uses_rank or run.has_rank_constants
            expected = data.expected(hypothesis)
            for found in exits:
                whole = expected.output if found.what == "output" else expected.lse
                refuted = self._check(found, run, whole * found.lse_scale, trial)
                if refuted is not None:
                    self.failed = found.node
                    return on_trial(refuted, hypothesis, trial)
        return None

    def _made_of(self, ends: Sequence[Node]) -> list[Node]:
        """The nodes of the region that the ends depend on, in order."""
        needed = set(ends)
        for node in reversed(self.region.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        return [node for node in self.region.nodes if node in needed]

    def _check(
        self, found: Exit, run: Lockstep, whole: Tensor, trial: Trial
    ) -> Refuted | None:
        """Hold an exit, on every rank that has it, against its part of the whole."""
        uneven = found.layout.is_uneven(whole, self.world_size)
        for seat in range(self.world_size):
            value = run.values_of(seat).get(found.node)
            if seat != self.rank and (uneven or not isinstance(value, Tensor)):
                continue  # an uneven part has a size on each rank that this graph lacks
            value = value.double()
            problem = Refuted("layout", "the result's layout changes with its size")
            # A place that no reading moves is this rank's, on every rank.
            for place in dict.fromkeys((seat, self.rank)):
                wanted = found.layout.apply(whole, value.shape, self.world_size, place)
                if wanted is not None:
                    scale = trial.scale if found.what == "output" else 1.0
                    differs = self.judge.differs(value / scale, wanted / scale, trial)
                    if differs is None:
                        break
                    problem = differs
            else:
                return problem
        return None

    def _run(
        self,
        trial: Trial,
        hypothesis: Hypothesis,
        reading: str,
        every_rank: bool = False,
    ) -> tuple[Lockstep, Data] | Refuted:
        """One lockstep run, with symbolic sizes in multiples of N where it must be."""
        while True:
            self.trials += 1
            try:
                symbols = self._numbers(trial, hypothesis)
                shape = symbols.shape(self._value(self.cut.partial_output))
                if math.prod(shape) * self.world_size > _MAX_ELEMENTS:
                    return Refuted(
                        "too_large", f"a trial of shape {shape} would take too long"
                    )
                data = Data(self.cut, hypothesis, trial, symbols, self.world_size)
                run = Lockstep(
                    self.region.nodes,
                    data.leaves | self._unread(symbols),
                    world_size=self.world_size,
                    rank=self.rank,
                    symbols=symbols,
                    exact=trial.exact,
                    reading=reading,
                    every_rank=every_rank,
                    watched=bool(self.region.unread) and trial.seed <= 2,
                )
                run.run()
                return run, data
            except Looked as error:
                return Refuted("not_equivalent", str(error), nearness=3)
            except (Unsupported, ValueError, RuntimeError) as error:
                if self.symbols and not self.stretched:
                    self.stretch = math.lcm(self.stretch, self.world_size)
                    self.stretched = True
                    continue
                return Refuted(
                    "not_runnable", f"the region does not run on a trial: {error}"
                )

    def _unread(self, symbols: Symbols) -> dict[Node, list[Tensor]]:
        """NaN for what the region may carry along and not look at."""
        values: dict[Node, list[Tensor]] = {}
        for node in self.region.unread:
            fake = self._value(node)
            shape = symbols.shape(fake)
            nan = torch.full(shape, math.nan, dtype=fake.dtype, device="cpu")
            values[node] = [nan] * self.world_size
        return values

    def _size(self, draw: int, beyond: int) -> int:
        # No two symbols of a trial may have the same size: what one of them does in the
        # place of the other would go unseen.
        count = len(self.symbols)
        if self.stretch > 1:
            return self.stretch * (beyond + 1 + draw % max(3, count))
        draw %= max(len(_PRIMES), count)
        if beyond:
            return int(sympy.nextprime(beyond, 1 + draw))
        if draw < len(_PRIMES):
            return _PRIMES[draw]
        return int(sympy.nextprime(max(_PRIMES), 1 + draw - len(_PRIMES)))

    def _numbers(self, trial: Trial, hypothesis: Hypothesis) -> Symbols:
        """A prime for each symbol; the same one where a statistic's dim is an output's
        dim.
        """
        symbols = Symbols(
            {
                symbol: self._size(i + trial.seed, trial.beyond)
                for i, symbol in enumerate(self.symbols)
            }
        )
        output = self._value(self.cut.partial_output)
        for node, axes in zip(self.cut.statistics, hypothesis.axes, strict=True):
            sizes = [size for size in self._value(node).shape if size_name(size) != "1"]
            for size, axis in zip(sizes, axes, strict=True):
                symbol = expression(size)
                if isinstance(symbol, sympy.Symbol):
                    symbols[symbol] = symbols.number(output.shape[axis])
        return symbols

    @staticmethod
    def _value(node: Node) -> Tensor:
        value = tensor_val(node)
        assert value is not None
        return value
