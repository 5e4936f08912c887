"""What ranks are told that met in different exchanges."""

from __future__ import annotations

import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcp_inductor.errors import DCPMismatchError
from dcp_inductor.runtime import cuda_layout, cuda_workspace
from dcp_inductor.runtime.cuda_workspace import GroupMemory, Workspace
from dcp_inductor.runtime.signature import Signature, contrast

CALL = Signature("kv_gather", (2, 16), "float32", "", "", "model.py:3#abc")
SITE = "compile alike on all ranks"
KNOBS = "set max_tokens (256 on rank 0)"


def said(**other: Any) -> str:
    return contrast(0, CALL.pack(), 1, replace(CALL, **other).pack())


@pytest.mark.parametrize(
    ("other", "differ"),
    [
        ({"op": "q_gather"}, "op"),
        ({"shape": (3, 16)}, "shape"),
        ({"dtype": "float16"}, "dtype"),
        ({"options": "lse"}, "options"),
        ({"shape": (3, 16), "site": "model.py:9#abc"}, "shape and site"),
        ({"dtype": "float16", "route": "set-up of 8 bytes"}, "dtype and route"),
    ],
)
def test_other_exchanges_are_told_in_what_they_differ(other, differ: str) -> None:
    text = said(**other)
    assert f"They differ in {differ}. Every rank must make the same sequence" in text
    assert SITE not in text
    assert KNOBS not in text


def test_equal_hashes_at_different_lines_point_to_the_cache() -> None:
    text = said(site="model.py:9#abc")
    assert "They differ in site." in text
    assert "clear the cache (TORCHINDUCTOR_CACHE_DIR) on all ranks" in text
    assert "compile alike" not in text


@pytest.mark.parametrize("site", ["model.py:3#def", "model.py:9#def", ""])
def test_equal_calls_at_different_sites_point_to_the_compilation(site: str) -> None:
    text = said(site=site)
    assert "They differ in site." in text
    assert (
        "a site names the exchange in a compiled graph: file:line, and a hash" in text
    )
    assert SITE in text
    assert "mark_dynamic" in text
    assert KNOBS not in text


def test_equal_calls_that_go_different_ways_point_to_the_knobs() -> None:
    text = said(route="collectives (rows)")
    assert "They differ in route." in text
    assert KNOBS in text
    assert SITE not in text
    both = said(route="collectives (rows)", site="")
    assert "They differ in route and site." in both
    assert KNOBS in both
    assert SITE in both


def test_a_slice_that_is_one_ranks_share_is_named_as_a_cause() -> None:
    own, other = (
        replace(CALL, options=f"scatter={scatter} base=e").pack()
        for scatter in ("tokens", "none")
    )
    assert "They differ in scatter" in contrast(0, own, 1, other)
    alike = replace(CALL, options="scatter=tokens base=2").pack()
    assert "They differ in scatter" not in contrast(0, own, 1, alike)


class Memory(GroupMemory):
    """Of two ranks, without a GPU and without the other one."""

    def __init__(self) -> None:
        self.group_name, self.rank, self.world_size = "g", 0, 2
        self.num_ubatches = 1
        self.sites, self.workspaces = [""], []
        stored: dict[str, bytes] = {}
        self._store = SimpleNamespace(
            set=lambda key, value: stored.update({key: value.encode()}),
            get=stored.__getitem__,
            check=lambda keys: all(key in stored for key in keys),
        )


class Heard(Exception):
    """Has what a rank says first when it wants memory."""


def wants(layout: cuda_layout.ArenaLayout, peer: dict[str, str] | None = None) -> None:
    def exchange(own: dict[str, str]) -> list[dict[str, str]]:
        if peer is None:
            raise Heard(own)
        return [own, peer]

    memory = Memory()
    memory.session = lambda: SimpleNamespace(exchange=exchange)
    memory._create_arena(layout, CALL, None)


def test_memory_of_another_size_on_a_gpu_points_to_the_knobs() -> None:
    small, large = (
        cuda_layout.gather_arena(cuda_layout.PACKETS, 2, size) for size in (4096, 8192)
    )
    for own, other in ((small, large), (large, small)):
        with pytest.raises(Heard) as heard:
            wants(other)
        with pytest.raises(DCPMismatchError) as raised:
            wants(own, peer=heard.value.args[0])
        text = str(raised.value)
        assert (
            f"rank 0 came with kv_gather[2, 16] float32, by set-up of {own.size}"
            in (text.split("first use of group 'g' for an exchange: ")[1])
        )
        assert f"by set-up of {other.size} bytes" in text
        assert "They differ in route." in text
        assert KNOBS in text


def fault(own: int, other: int) -> torch.Tensor:
    """What the device writes for a mismatch of these checksums."""
    words = torch.zeros(cuda_layout.FAULT_WORDS, dtype=torch.int32)
    words[:11] = torch.tensor([1, 2, 3, 0, 0, 1, 7, 7, 0, own, other])
    return words


def test_a_gpu_tells_sites_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_workspace.votes, "check_departures", lambda *_: None)
    memory, checksums = Memory(), []
    for site in (CALL.site, "model.py:3#def"):
        packed = replace(CALL, site=site).pack()
        checksum = zlib.crc32(packed)
        memory.post_signature(checksum, packed)
        checksums.append(checksum - (1 << 32) * (checksum >> 31))  # as an int32
    workspace = Workspace(memory, None, fault(*checksums))
    with pytest.raises(DCPMismatchError) as raised:
        workspace.check()
    text = str(raised.value)
    assert "rank 0 came with kv_gather[2, 16] float32, at site model.py:3#abc" in text
    assert "rank 1 came with kv_gather[2, 16] float32, at site model.py:3#def" in text
    assert "They differ in site." in text
    assert SITE in text


def test_a_gpu_tells_what_it_knows_of_a_signature_that_is_not_stored() -> None:
    memory = Memory()
    text = contrast(0, CALL.pack(), 1, memory.signature(-2))
    assert "rank 1 came with an exchange of checksum fffffffe. They differ" in text
