"""What the pass takes at its word: its own knobs, and constants of the graph."""

from __future__ import annotations

import pytest
import torch

from dcp_inductor import DcpPass
from dcp_inductor.fx.region import GraphIndex
from tests.formulations import spelling as sp
from tests.fx.sketch import traced

ROWS = torch.zeros(3, 8)


def test_knobs_of_the_pass_are_checked_when_it_is_made() -> None:
    with pytest.raises(AttributeError, match="does not exist"):
        DcpPass({"max_token": 3})
    with pytest.raises(ValueError, match="max_tokens: expected a positive integer"):
        DcpPass({"max_tokens": 0})


def test_buffers_of_the_module_are_no_constants() -> None:
    """What a graph reads from its module may have another value at the next call."""
    graph = traced(
        lambda ctx, *args: sp.ag(ctx, args[0]) * args[1], [ROWS, ROWS[:1, :1]]
    )
    module = graph.graph_module()
    scale = [n for n in module.graph.nodes if n.op == "placeholder"][1]
    for name, constant in (("_tensor_constant0", True), ("scale", False)):
        module.register_buffer(name, torch.ones(1, 1))
        with module.graph.inserting_before(scale):
            read = module.graph.get_attr(name)
        read.meta["val"] = scale.meta["val"]
        assert (read in GraphIndex(module.graph).constants) == constant
