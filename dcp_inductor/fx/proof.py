"""What a proof says: the meaning of a region's exits, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from dcp_inductor.fx.hypothesis import Hypothesis
from dcp_inductor.fx.layout import Layout


@dataclass(frozen=True)
class Exit:
    """A node whose value is known in terms of the merge."""

    node: Node
    what: str  # "output" or "lse"
    layout: Layout
    lse_scale: float  # factor from an LSE in the statistics' base; 1.0 for outputs


@dataclass(frozen=True)
class Proof:
    """A merge that agreed on every trial."""

    hypothesis: Hypothesis
    exits: tuple[Exit, ...]
    trials: int


@dataclass(frozen=True)
class Refuted:
    """Why a region is not known to be a merge: a code and a sentence."""

    code: str
    reason: str
    trials: int = 0
    # How much it says, among those of one code: 0, nothing was of the merge's size; 1,
    # the distance to a merge; 2, a multiple of one; 3, on which data it is none.
    nearness: int = 0
