"""Name the exits of a region: which of its values are the merge, its LSE, or parts of
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node

from dcp_inductor.fx.hypothesis import Hypothesis
from dcp_inductor.fx.layout import Summed, find_layout
from dcp_inductor.fx.proof import Exit
from dcp_inductor.fx.region import Region
from dcp_inductor.fx.trial import Expected

Equal = Callable[[Tensor, Tensor], bool]


class Values:
    """What a rank holds after a trial, ready to be held against one merge after
    another.
    """

    def __init__(self, values: dict[Node, Tensor]) -> None:
        self._values = values
        self._known: dict[Node, Summed | None] = {}

    def get(self, node: Node) -> Summed | None:
        """The value of a node in float64; None where it is no float or not finite."""
        if node not in self._known:
            value: object = self._values.get(node)
            known = None
            if isinstance(value, Tensor) and value.is_floating_point():
                known = Summed(value.double())
                # One element that is not finite makes the sum so.
                known = known if math.isfinite(known.total) else None
            self._known[node] = known
        return self._known[node]


class Wholes:
    """What a hypothesis expects of a trial: the merge, and its LSE in either base."""

    def __init__(self, hypothesis: Hypothesis, expected: Expected) -> None:
        self.hypothesis = hypothesis
        self.output = Summed(expected.output)
        self._lse = expected.lse
        self._scaled: dict[float, Summed] = {}

    def lse(self, scale: float) -> Summed:
        if scale not in self._scaled:
            self._scaled[scale] = Summed(self._lse * scale)
        return self._scaled[scale]


class Namer:
    """Names exits of one region.

    Args:
        region: what the cut determines.
        partial_output: of the cut.
        world_size: ranks of the group.
        rank: this process's rank in it.
        eps: relative rounding of the region's values.
    """

    def __init__(
        self,
        region: Region,
        partial_output: Node,
        world_size: int,
        rank: int,
        eps: float,
    ) -> None:
        self._region = region
        self._world_size = world_size
        self._rank = rank
        self._eps = eps
        self._issued = {collective.node for collective in region.collectives}
        self._behind = region.behind(partial_output)
        self._exits = region.exits()

    @property
    def has_output(self) -> bool:
        """Whether any exit depends on the partial output."""
        return any(node in self._behind for node in self._exits)

    def results(self, values: Values) -> list[Summed]:
        """Values of the exits that depend on the partial output."""
        found = [values.get(node) for node in self._exits if node in self._behind]
        return [value for value in found if value is not None]

    def solve(
        self, values: Values, wholes: Wholes, equal: Equal, failed: set[Node]
    ) -> list[Exit] | None:
        """Name every exit behind the partial output, or what it is made of, as the
        merge's.

        Other exits come from the statistics alone. Those that are the merged LSE are
        named too, unless the partial output depends on them; the rest keep what they
        are made of.
        """
        found: dict[Node, Exit] = {}
        for required in (True, False):
            stack = [node for node in self._exits if (node in self._behind) == required]
            seen: set[Node] = set()
            while stack:
                node = stack.pop()
                if node in seen:
                    continue
                seen.add(node)
                match = None
                if node not in failed:
                    match = self._name(node, values, wholes, equal)
                if match is not None and node not in self._region.upstream:
                    found[node] = match
                elif required:
                    made_of = [
                        s for s in node.all_input_nodes if s in self._region.exchanged
                    ]
                    # An exchange of statistics may stay for the sake of something else.
                    if node in self._issued and not made_of and node in self._behind:
                        return None
                    stack += made_of
            if not any(match.what == "output" for match in found.values()):
                return None
        return list(found.values())

    def _name(
        self, node: Node, values: Values, wholes: Wholes, equal: Equal
    ) -> Exit | None:
        if node in self._issued:
            return None  # not waited for yet
        value = values.get(node)
        if value is None:
            return None
        place = (self._world_size, self._rank, equal, self._eps)
        layout = find_layout(value, wholes.output, *place)
        if layout is not None and layout.dim != wholes.hypothesis.feature_dim:
            return Exit(node, "output", layout, 1.0)
        sign = -1.0 if node.target is torch.ops.aten.neg.default else 1.0
        for scale in (sign * scale for scale in wholes.hypothesis.lse_scales):
            layout = find_layout(value, wholes.lse(scale), *place)
            if layout is not None:
                return Exit(node, "lse", layout, scale)
        return None
