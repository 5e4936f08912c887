"""When a gathered query stays in a GPU's workspace; memory and launches are stood in
for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dcp_inductor import config
from dcp_inductor.capability import Refusal
from dcp_inductor.geometry import DEFAULT_MERGE
from dcp_inductor.runtime import (
    cuda_exchange,
    cuda_gather,
    cuda_launch_ops,
    cuda_layout,
    cuda_registry,
)
from dcp_inductor.runtime.cuda_workspace import Workspace
from tests.unit.test_cuda_workspace import Memory

VIEW, COPY = "view", "copy"


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Of rank 0 of eight, whose launches go nowhere."""
    found = Memory().workspaces[0]
    monkeypatch.setattr(cuda_registry, "workspace_for", lambda name, device: found)
    monkeypatch.setattr(cuda_launch_ops, "symm_gather", lambda *args: None)
    monkeypatch.setattr(cuda_launch_ops, "symm_a2a_lse_reduce", lambda *args: None)
    return found


def query(tokens: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(tokens, 16, 576, device="meta", dtype=dtype)


def gather(workspace: Workspace, x: Tensor, **options: Any) -> str:
    """Where the result of a view gather lies."""
    padded = options.get("padded_heads", 0)
    got = cuda_gather.q_gather_view("g", x, padded, "a site")
    assert isinstance(got, Tensor)
    assert got.shape == (x.shape[0], padded or 8 * x.shape[1], x.shape[2])
    assert got.dtype == x.dtype
    assert got.is_contiguous()
    return VIEW if got._base is not None else COPY


def merge(workspace: Workspace, dtype: torch.dtype = torch.bfloat16) -> None:
    partial = torch.empty(64, 128, 512, device="meta", dtype=dtype)
    lse = torch.empty(64, 128, device="meta")
    got = cuda_exchange.a2a_lse_reduce(
        partial, lse, "g", DEFAULT_MERGE, None, None, "another"
    )
    assert isinstance(got, Refusal) is (dtype == torch.float64)


def kinds(workspace: Workspace) -> set[str]:
    return {layout.kind for layout in workspace.arenas}


def test_a_merge_between_lets_the_next_be_a_view_again(workspace: Workspace) -> None:
    for _ in range(3):
        assert gather(workspace, query()) == VIEW
        merge(workspace)
    assert kinds(workspace) == {"view", "marked"}
    assert gather(workspace, query()) == VIEW
    # Its readers may not be done: no merge has begun behind them.
    assert [gather(workspace, query()) for _ in range(3)] == [COPY] * 3
    assert "slices" in kinds(workspace)
    merge(workspace)
    assert gather(workspace, query()) == VIEW


def test_a_merge_by_the_collectives_does_not_count(workspace: Workspace) -> None:
    assert gather(workspace, query()) == VIEW
    merge(workspace, torch.float64)
    assert gather(workspace, query()) == COPY


def test_other_gathers_neither_are_views_nor_open_the_way(workspace: Workspace) -> None:
    fresh = cuda_gather.q_gather("g", query(), 0, "a site")
    assert isinstance(fresh, Tensor)
    assert fresh._base is None
    assert gather(workspace, query()) == VIEW
    cuda_gather.q_gather("g", query(), 0, "a site")
    rows = torch.empty(8, 576, device="meta")
    cuda_gather.kv_gather("g", rows, "a site")
    assert gather(workspace, query()) == COPY


def test_few_rows_go_by_packets_to_a_tensor_of_their_own(workspace: Workspace) -> None:
    assert gather(workspace, query(1)) == COPY
    assert kinds(workspace) == {"packets"}
    assert not workspace.view_unmerged
    assert gather(workspace, query()) == VIEW


def test_sizes_share_the_place_and_padding_has_room(workspace: Workspace) -> None:
    views = []
    with config.patch(max_tokens=250):
        for tokens, padded in ((64, 0), (250, 0), (17, 0), (250, 130)):
            got = cuda_gather.q_gather_view("g", query(tokens), padded, "a site")
            assert isinstance(got, Tensor)
            views.append(got)
            merge(workspace)
    # 250 tokens of 128 heads are 35.2 MiB, of 130 heads 35.7: both within 36.
    [layout] = [layout for layout in workspace.arenas if layout.kind == "view"]
    assert layout.data.capacity == 36 << 20
    assert {view.untyped_storage().nbytes() for view in views} == {layout.size}
    assert max(view.nbytes for view in views) == 250 * 130 * 576 * 2


def test_a_peer_that_copies_out_is_a_mismatch(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    memory = workspace.memory
    monkeypatch.setattr(memory, "post_signature", lambda crc, packed: said.append(crc))
    for tokens in (64, 1):
        gather(workspace, query(tokens))
        workspace.view_unmerged = False
        cuda_gather.q_gather("g", query(tokens), 0, "a site")
    assert said[0] != said[1]
    assert said[2] == said[3]  # packets are packets


def test_more_rows_than_the_workspace_holds_are_refused(workspace: Workspace) -> None:
    got = cuda_gather.q_gather_view("g", query(config.max_tokens + 1), 0, "a site")
    assert isinstance(got, Refusal)
    assert got.code == "rows"
    assert not workspace.view_unmerged


def test_bytes_are_seen_in_the_dtype_of_the_query(workspace: Workspace) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float32, torch.bfloat16):
        assert gather(workspace, query(256, dtype)) == VIEW
        merge(workspace)
    layout = cuda_layout.view_arena(8, 256 * 16 * 576, 256 * 128 * 576)
    assert layout in workspace.arenas
