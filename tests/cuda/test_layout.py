"""Arithmetic of the CUDA runtime's layouts and tables; needs no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dcp_inductor import config
from dcp_inductor.runtime import cuda_launch_ops, cuda_layout


def fields(struct: str, source: str) -> int:
    """Words of a struct of ``csrc/cuda/tables.h``, its channel left out."""
    body = re.search(rf"struct {struct} {{(.*?)}};", source, re.DOTALL)
    assert body
    code = re.sub(r"//.*", "", body[1])
    words = 0
    for names in re.findall(r"int64_t ([^;]*);", code):
        for name in names.split(","):
            words += cuda_layout.MAX_RANKS if "[kMaxRanks]" in name else 1
    return words


def test_tables_have_the_words_that_the_launcher_reads(root: Path) -> None:
    source = (root / "csrc/cuda/tables.h").read_text()
    channel = cuda_layout.channel_words(0, 1, 2, 3, 1, 5, [1, 2], [3, 4])
    assert len(channel) == fields("ChannelTable", source)
    alone = cuda_layout.channel_words(0, 1, 2, 3, 1, 5, [1, 2], [3, 4], overlap=False)
    assert [i for i, word in enumerate(channel) if word != alone[i]] == [6]
    names = re.findall(r"int64_t (\w+)", source[source.index("struct ChannelTable") :])
    assert names[6] == "overlap"
    layout = cuda_layout.combine_arena(cuda_layout.TILED, 2, 10, 1024, 7)
    combine = cuda_layout.combine_words(1, "heads", True, [2, 3], layout)
    assert len(combine) == fields("CombineTable", source)
    gather = cuda_layout.gather_words(
        cuda_layout.Q_GATHER, 0, 4, cuda_layout.gather_arena(0, 2, 100)
    )
    assert len(gather) == fields("GatherTable", source)
    view = cuda_layout.gather_words(
        cuda_layout.Q_GATHER, 1, 4, cuda_layout.view_arena(2, 100, 200)
    )
    assert (gather[-1], view[-1], len(view)) == (0, 1, len(gather))
    protocol = re.search(r"kCudaProtocol = (\d+);", source)
    assert protocol
    assert int(protocol[1]) == cuda_launch_ops.PROTOCOL


def test_limits_are_those_of_the_kernels(root: Path) -> None:
    source = (root / "csrc/cuda/params.h").read_text()
    for name, value in (
        ("kMaxRanks", cuda_layout.MAX_RANKS),
        ("kFirstEpoch", cuda_layout.FIRST_EPOCH),
        ("kTileUnits", cuda_layout._TILE_UNITS),
        ("kNumSlots", cuda_layout._SLOTS),
    ):
        found = re.search(rf"{name} = (\d+);", source)
        assert found, name
        assert int(found[1]) == value, name
    assert f"sizeof(ChannelHeader) == {cuda_layout.HEADER_BYTES}" in source
    assert f"sizeof(FaultRecord) == {4 * cuda_layout.FAULT_WORDS}" in source


@pytest.mark.parametrize("world_size", [1, 2, 8, 16])
@pytest.mark.parametrize("kernel", [cuda_layout.MARKED, cuda_layout.TILED])
def test_sections_hold_what_a_combine_writes(world_size: int, kernel: int) -> None:
    for rows, row_bytes, full in ((1, 16, 0), (33, 144, 5), (4096, 1024, 32768)):
        layout = cuda_layout.combine_arena(kernel, world_size, rows, row_bytes, full)
        units = rows * -(-row_bytes // 512)
        assert layout.data.capacity >= rows * row_bytes
        assert layout.words.capacity >= units
        assert layout.full_lse.capacity >= full
        if kernel == cuda_layout.TILED:
            assert layout.flags.capacity >= -(-units // 32)
        regions = 2 * world_size
        assert layout.data.size == regions * layout.data.capacity
        assert layout.words.size == regions * layout.words.capacity * 8
        armed = kernel == cuda_layout.MARKED
        assert layout.data.fill == layout.words.fill == (0xFF if armed else 0)
        assert layout.full_lse.fill == 0xFF
        end = 0
        for section in layout.sections:
            assert section.offset >= end
            assert section.offset % 256 == 0
            end = section.offset + section.size
        assert layout.size >= end + cuda_layout.TAIL_BYTES


@pytest.mark.parametrize("world_size", [1, 2, 8, 16])
def test_sections_hold_what_a_gather_writes(world_size: int) -> None:
    for local in (16, 4096, 1 << 20):
        packets = cuda_layout.gather_arena(cuda_layout.PACKETS, world_size, local)
        assert packets.data.capacity >= 2 * local
        assert packets.words.capacity * 32 * 16 >= local
        slices = cuda_layout.gather_arena(cuda_layout.SLICES, world_size, local)
        assert slices.data.capacity >= local
        assert slices.words.capacity * 256 * 16 >= local


@pytest.mark.parametrize("world_size", [1, 2, 8, 16])
def test_a_view_has_one_place_and_flags_like_any_gather(world_size: int) -> None:
    for local in (16, 4096, 1 << 20):
        result = world_size * local + 48  # with padding heads
        view = cuda_layout.view_arena(world_size, local, result)
        slices = cuda_layout.gather_arena(cuda_layout.SLICES, world_size, local)
        assert view.data.capacity == view.data.size >= result
        assert view.words.capacity == slices.words.capacity
        assert view.words.size == slices.words.size
        assert view.words.offset >= view.data.offset + view.data.size
        assert view.size >= view.words.offset + view.words.size + cuda_layout.TAIL_BYTES


def test_one_arena_serves_neighbouring_sizes() -> None:
    sizes = {cuda_layout.combine_arena(0, 8, rows, 1024, 0) for rows in range(65, 129)}
    assert len(sizes) == 1
    with config.patch(marked_bytes=5000, packet_bytes=7000):
        assert cuda_layout.combine_kernel(5000) == cuda_layout.MARKED
        assert cuda_layout.combine_kernel(5001) == cuda_layout.TILED
        assert cuda_layout.packet_bytes(8) == 1000
        assert cuda_layout.packet_bytes(8, in_place=True) == 500
    for needed in range(1, 70):
        assert cuda_layout._class(needed, 64) in (64, 128)
    for needed in ((1 << 20) + 1, 3 << 20, (9 << 30) + 4096):
        capacity = cuda_layout._class(needed, 64)
        assert needed <= capacity <= needed * 9 / 8
        assert capacity % (1 << 16) == 0  # whatever is aligned stays so
    limit = cuda_layout.packet_bytes(8)
    assert cuda_layout.gather_kernel(8, limit) == cuda_layout.PACKETS
    assert cuda_layout.gather_kernel(8, limit + 1) == cuda_layout.SLICES
    assert cuda_layout.gather_kernel(1, 1) == cuda_layout.PACKETS


def test_the_table_of_faults_names_tests_that_exist(root: Path) -> None:
    folder = root / "tests/cuda"
    named = re.findall(r"`(test_\w+)`", (folder / "README.md").read_text())
    code = "".join(path.read_text() for path in folder.glob("test_*.py"))
    assert len(named) > 20
    assert [name for name in named if f"def {name}(" not in code] == []
