"""Puts our pass behind whatever sits in one of Inductor's pass hooks already.

The hook holds one pass, since torch 2.13 also a list of passes. A chain is one
pass everywhere, and the FX graph cache treats it as it would treat its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

AnyPass = CustomGraphPass | Callable[..., object]

# torch 2.11 lacks this class and calls every pass with the graph alone.
InferenceAwarePass: Any = getattr(
    custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass
)


class PassChain(InferenceAwarePass):
    """Passes that run one after the other; ``cached`` False keeps caches out."""

    def __init__(self, passes: Sequence[AnyPass], *, cached: bool = True) -> None:
        self.passes = tuple(passes)
        self.cached = cached

    def __call__(self, graph: Graph, is_inference: bool = True) -> None:
        for each in self.passes:
            # Where the two classes are one, torch itself does not tell passes either.
            aware = InferenceAwarePass is not CustomGraphPass
            if aware and isinstance(each, InferenceAwarePass):
                each(graph, is_inference=is_inference)
            else:
                each(graph)

    def uuid(self) -> Any | None:
        """The parts' ids, or None (do not cache) where a part has none.

        Inductor bypasses its cache for a bare function in the hook, because it cannot
        tell two versions of it apart; so does a chain with one in it.
        """
        ids = [
            each.uuid() if isinstance(each, CustomGraphPass) else None
            for each in self.passes
        ]
        cached = self.cached and all(ids)
        return ("dcp_inductor.PassChain", *ids) if cached else None


def flatten(hook: Any) -> list[AnyPass]:
    """The passes in a hook's value: none, one, a list of them, or a chain."""
    if hook is None:
        return []
    if isinstance(hook, (list, tuple)):
        return [each for item in hook for each in flatten(item)]
    return list(hook.passes) if isinstance(hook, PassChain) else [hook]


def append(hook: Any, last: CustomGraphPass, *, cached: bool = True) -> AnyPass:
    """A value for the hook that runs what is there and then ``last``.

    A pass of ``last``'s class that is there already gives way to it. Without ``cached``
    the graph comes from no cache and goes to none, whatever the settings are.
    """
    before = [each for each in flatten(hook) if not isinstance(each, type(last))]
    if cached and not before:
        return last
    return PassChain([*before, last], cached=cached)
