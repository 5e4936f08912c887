"""``kv_gather_publish`` where it does nothing, and in a compiled graph."""

from __future__ import annotations

import pytest
import torch

from dcp_inductor import ops
from tests.support import fallbacks, group_name, world

TOKEN = torch.empty(0)


def sent_ahead(rank: int, size: int) -> int:
    name = group_name()
    every = torch.arange(size * 12.0).view(size, 3, 4)

    def step(rows: torch.Tensor) -> torch.Tensor:
        token = ops.kv_gather_publish(rows, TOKEN, name)
        other = rows.sum()
        return ops.kv_gather(rows, token, name)[0] + 0 * other

    assert torch.equal(step(every[rank]), every.flatten(0, 1))
    seen = []

    def keep(gm, inputs):
        seen.extend(str(node.target) for node in gm.graph.nodes)
        return gm

    assert torch.equal(
        torch.compile(step, backend=keep, fullgraph=True)(every[rank]),
        every.flatten(0, 1),
    )
    compiled = torch.compile(step, backend="inductor", fullgraph=True)
    assert torch.equal(compiled(every[rank]), every.flatten(0, 1))
    with pytest.raises(ValueError, match="kv_gather_publish: expected rows"):
        ops.kv_gather_publish(torch.tensor(1.0), TOKEN, name)
    assert not fallbacks()
    return sum("kv_gather_publish" in target for target in seen)


def test_a_gather_whose_rows_are_sent_ahead_is_the_same_gather() -> None:
    assert world(2).run(sent_ahead) == [1, 1]
