"""What a group holds on a GPU, counted and told; the memory itself is stood in for."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dcp_inductor import config
from dcp_inductor.capability import Refusal
from dcp_inductor.errors import DCPError
from dcp_inductor.geometry import MergeOptions
from dcp_inductor.runtime import (
    cuda_exchange,
    cuda_gather,
    cuda_layout,
    cuda_registry,
    cuda_workspace,
    symm_mem,
)
from dcp_inductor.runtime.cuda_workspace import GroupMemory, Workspace
from dcp_inductor.runtime.signature import Signature

CALL = Signature("kv_gather", (2, 16), "float32", "", "", "a site")
SMALL = cuda_layout.gather_arena(cuda_layout.PACKETS, 8, 4096)
LARGE = cuda_layout.combine_arena(cuda_layout.MARKED, 8, 256 * 16, 1024, 0)


class Memory(GroupMemory):
    """A group of eight whose arenas are made without peers, of no GPU's memory."""

    def __init__(self, num_ubatches: int = 1) -> None:
        group = SimpleNamespace(group_name="g", rank=lambda: 0, size=lambda: 8)
        stores = pytest.MonkeyPatch()
        with stores.context() as patch:
            patch.setattr(cuda_workspace.groups, "store", lambda group: None)
            super().__init__(group, torch.device("cpu"), num_ubatches)
        self._store = SimpleNamespace(set=lambda key, value: None)
        for _ in range(num_ubatches):
            fault = torch.zeros(cuda_layout.FAULT_WORDS, dtype=torch.int32)
            self.workspaces.append(Workspace(self, buffer(1000), fault))

    def _create_arena(self, layout, call, workspace):
        for owner in self.workspaces:
            owner.arenas[layout] = buffer(layout.size)
        self._log_memory(call, layout)
        return workspace.arenas[layout]


def buffer(nbytes: int):
    tensor = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    return SimpleNamespace(tensor=tensor, addresses=[0] * 8, multicast=0)


@pytest.mark.parametrize("num_ubatches", [1, 3])
def test_bytes_of_a_site_and_of_the_group(num_ubatches: int) -> None:
    memory = Memory(num_ubatches)
    assert memory.nbytes == 1000 * num_ubatches
    assert memory.site_bytes("a site") == 0
    first = memory.workspaces[0]
    for _ in range(2):  # of which the second finds what it needs
        memory.arena(first, SMALL, CALL)
    assert memory.site_bytes("a site") == num_ubatches * SMALL.size
    memory.arena(first, LARGE, CALL)
    other = Signature("kv_gather", (2, 16), "float32", "", "", "another")
    memory.arena(first, LARGE, other)  # shared between the two
    assert memory.site_bytes("another") == num_ubatches * LARGE.size
    assert memory.site_bytes("a site") == num_ubatches * (SMALL.size + LARGE.size)
    assert memory.nbytes == num_ubatches * (1000 + SMALL.size + LARGE.size)


def test_bytes_of_a_decode_step_by_hand() -> None:
    # Eight ranks, 256 tokens, 16 heads a rank, 512 bfloat16: two slots of eight
    # sources, each with 4 MiB of data and an 8-byte LSE word per half-kilobyte of it.
    data, words = 4 << 20, (4 << 20) // 512 * 8
    assert LARGE.size == 2 * 8 * (data + words) + cuda_layout.TAIL_BYTES


def test_memory_is_told_once_at_info(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory()
    with caplog.at_level(logging.DEBUG, "dcp_inductor.runtime.cuda_workspace"):
        for layout in (SMALL, LARGE):
            memory.arena(memory.workspaces[0], layout, CALL)
    assert [r.levelno for r in caplog.records] == [logging.INFO, logging.DEBUG]
    first = caplog.records[0].getMessage()
    assert f"group 'g': {1000 + SMALL.size} bytes of symmetric memory" in first
    assert "kv_gather[2, 16] float32" in first


def test_what_is_missing_within_a_capture_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory()
    memory.arena(memory.workspaces[0], SMALL, CALL)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert memory.arena(memory.workspaces[0], SMALL, CALL)  # is there already
    with pytest.raises(DCPError, match=r"kv_gather\[2, 16\].*run what is captured"):
        memory.arena(memory.workspaces[0], LARGE, CALL)
    with pytest.raises(DCPError, match=r"call dcp_inductor\.prepare\(group\)"):
        cuda_workspace.refuse_capture("g")


def facts(*seats: tuple[str, int]) -> list[dict[str, str]]:
    return [{"device_uuid": u, "device_index": str(index)} for u, index in seats]


@pytest.mark.parametrize(
    ("said", "hidden"),
    [
        (facts(("a", 0), ("b", 1)), False),
        (facts(("a", 0), ("b", 0)), True),  # each rank sees its own GPU only
        (facts(("a", 0), ("b", 1), ("c", 0)), True),
        (facts(("a", 0), ("a", 0)), False),  # one GPU, which torch must refuse
        (facts(("a", 0), ("a", 0), ("b", 0)), False),
    ],
)
def test_gpus_are_told_apart_by_identity(said, hidden: bool) -> None:
    assert symm_mem.hides_peers(said) is hidden


def test_torch_is_told_only_where_it_would_confuse_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
    monkeypatch.delenv(name, raising=False)
    seen: list[str | None] = []

    def rendezvous(tensor, group):
        seen.append(os.environ.get(name))
        return SimpleNamespace(buffer_ptrs=[1, 2])

    monkeypatch.setattr(symm_mem._symmetric_memory, "rendezvous", rendezvous)
    for hidden in (False, True):
        symm_mem.SymmetricBuffer(torch.empty(1), None, hidden)
        assert name not in os.environ
    monkeypatch.setenv(name, "0")
    symm_mem.SymmetricBuffer(torch.empty(1), None, True)
    assert os.environ[name] == "0"
    assert seen == [None, "1", "1"]


def test_what_the_kernels_cannot_count_is_refused_by_shape() -> None:
    workspace = Memory().workspaces[0]
    with config.patch(max_tokens=1 << 30):
        for rows, refused in (((1 << 31) // 64, True), ((1 << 31) // 64 - 1, False)):
            call = replace(CALL, shape=(rows, 256))
            plan = cuda_gather._plan_gather(
                workspace, call, cuda_layout.KV_GATHER, rows, 1024, 1024, 0, (rows, 256)
            )
            assert isinstance(plan, Refusal) is refused, plan
            if refused:
                assert plan.code == "size"
        lse = torch.empty(1 << 22, 512, device="meta")
        partial = torch.empty(1 << 22, 512, 256, device="meta")  # 2^31 rows
        plan = cuda_exchange._plan_combine(
            workspace, partial, lse, MergeOptions("none"), ""
        )
        assert isinstance(plan, Refusal)
        assert plan.code == "size"


def test_nothing_comes_between_the_two_halves_of_a_gather() -> None:
    workspace = Memory().workspaces[0]
    assert workspace.finish("rows") is None
    workspace.refuse_unfinished("q_gather")
    workspace.unfinished = "rows", "a plan"
    with pytest.raises(DCPError, match=r"q_gather over group 'g': expected the kv_"):
        workspace.refuse_unfinished("q_gather")
    with pytest.raises(DCPError, match="kv_gather of other"):
        workspace.finish("other")
    assert workspace.finish("rows") == "a plan"
    workspace.refuse_unfinished("q_gather")


def test_a_recovery_forgets_why_a_group_has_no_memory() -> None:
    """Its next exchange finds out again, as the first one did."""
    group = type("Group", (), {})()
    cuda_registry._groups[group] = Refusal("config", "rank 1 has max_tokens 4")
    assert cuda_registry.recover(group) is False
    assert group not in cuda_registry._groups


class Session:
    """A round of answers in which rank 0 says what it is given."""

    def __init__(self, *peers: bool) -> None:
        self.peers = peers
        self.rounds = 0

    def exchange(self, payload):
        self.rounds += 1
        return [payload, *({"multicast": peer} for peer in self.peers)]


def shared(monkeypatch, own: list[int], *peers: bool) -> list[int]:
    """Multicast addresses that are used, where this rank's buffers have ``own``."""
    buffers = []
    for address in own:
        handle = SimpleNamespace(buffer_ptrs=[1], multicast_ptr=address)
        monkeypatch.setattr(
            symm_mem._symmetric_memory, "rendezvous", lambda *_, handle=handle: handle
        )
        buffers.append(symm_mem.SymmetricBuffer(torch.empty(1), None))
    assert [buffer.multicast for buffer in buffers] == [0] * len(own)
    session = Session(*peers)
    symm_mem.share_multicast(session, buffers)
    assert session.rounds == 1  # whatever this rank has, it must not stay away
    return [buffer.multicast for buffer in buffers]


def test_multicast_is_used_where_every_rank_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shared(monkeypatch, [7, 8], True, True) == [7, 8]
    assert shared(monkeypatch, [7, 8], True, False) == [0, 0]
    assert shared(monkeypatch, [0], True, True) == [0]
    assert shared(monkeypatch, [7, 0], True, True) == [0, 0]


def test_multicast_is_off_unless_asked_for() -> None:
    assert config.multicast is False
    assert Memory().multicast is False
    words = cuda_layout.channel_words(0, 1, 2, 3, 1, 5, [1, 2], [3, 4])
    with_it = cuda_layout.channel_words(0, 1, 2, 3, 1, 5, [1, 2], [3, 4], 99)
    assert [w for w, o in zip(with_it, words, strict=True) if w != o] == [99]
