"""What the benchmark between GPUs compares; needs none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcp_inductor import config
from dcp_inductor.bench.variants import Exchanges


def test_every_call_of_a_variant_plans_with_its_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Graphs are captured from later calls, so a plan made in the first is not enough.
    seen: list[tuple[str, int, int]] = []

    def op(*arguments: Any, site: str) -> tuple[torch.Tensor]:
        seen.append((site, config.marked_bytes, config.packet_bytes))
        return (arguments[0],)

    group: Any = SimpleNamespace(group_name="0", size=lambda: 2)
    exchanges = Exchanges(group, None)
    monkeypatch.setattr(exchanges, "_torch_combine", lambda output, lse: None)
    monkeypatch.setattr("dcp_inductor.ops.a2a_lse_reduce", op)
    x = torch.zeros(2, 2, 8)
    calls = exchanges.combine(x, x[..., 0]) | exchanges._gathers(op, x)
    for _ in range(2):
        for name in ("marked", "tiled", "packets", "slices"):
            assert calls[name]() is x
    few, many = 1 << 40, 1
    wanted = [("marked", few), ("tiled", many), ("packets", few), ("slices", many)] * 2
    assert seen == [(name, bound, bound) for name, bound in wanted]
