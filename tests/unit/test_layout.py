"""The byte layout of the shared memory, and its agreement with the C++ side."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dcp_inductor import launch_ops
from dcp_inductor.runtime import layout
from tests import support  # noqa: F401  (loads the profile for hypothesis)

SYNC = (Path(__file__).parents[2] / "csrc/cpu/sync.h").read_text()
COUNTS = st.integers(1, 1 << 20)
EPOCHS = st.integers(0, layout.EPOCHS - 1)


def constant(name: str) -> int:
    found = re.search(rf"constexpr \w+ {name} = (\d+);", SYNC)
    assert found, name
    return int(found[1])


def test_both_sides_declare_the_same_layout() -> None:
    assert constant("kProtocol") == launch_ops.PROTOCOL
    assert constant("kSignatureBytes") == layout.SIGNATURE_BYTES
    assert constant("kMaxRanks") == layout.MAX_RANKS
    assert constant("kCacheLine") == layout.CACHE_LINE
    for text in (
        f"sizeof(Slot) == {layout.SLOT_BYTES}",
        f"offsetof(Slot, signature) == {layout.SIGNATURE}",
        f"sizeof(Control) == {layout.CONTROL_BYTES}",
        f"offsetof(Control, slots) == {layout.SLOTS}",
    ):
        assert text in SYNC, text
    words = re.search(r"struct Table \{(.*?)addresses", SYNC, re.DOTALL)
    assert words
    declared = re.findall(r"int64_t (\w+);", words[1])
    assert tuple(declared) == layout.TABLE_WORDS


def test_status_codes_are_the_same_on_both_sides() -> None:
    for name, value in (
        ("kDone", launch_ops.DONE),
        ("kPending", launch_ops.PENDING),
        ("kMismatch", launch_ops.MISMATCH),
    ):
        assert re.search(rf"{name} = {value},", SYNC), name


@given(st.integers(0, 1 << 60), st.sampled_from([1, 8, 64, 4096]))
def test_align(offset: int, alignment: int) -> None:
    aligned = layout.align(offset, alignment)
    assert aligned % alignment == 0
    assert 0 <= aligned - offset < alignment


@given(COUNTS, st.integers(1, 4096), st.integers(1, 1 << 16))
def test_regions_of_a_slot_do_not_overlap(tokens: int, heads: int, row: int) -> None:
    payload_end = tokens * heads * row
    lse = layout.combine_lse_offset(tokens, heads, row)
    end = layout.combine_slot_bytes(tokens, heads, row)
    assert payload_end <= lse <= payload_end + layout.CACHE_LINE
    assert lse % 4 == 0
    assert end == lse + 4 * tokens * heads
    slot = layout.arena_slot_bytes(end)
    assert end <= slot
    assert slot % layout.PAGE == 0
    assert slot < 2 * max(end, layout.PAGE)
    # Fewer tokens fit into what was made for more, wherever their LSEs start.
    fewer = tokens // 2 + 1
    assert layout.combine_slot_bytes(min(fewer, tokens), heads, row) <= end


@given(EPOCHS, COUNTS)
def test_successive_calls_use_different_slots(epoch: int, size: int) -> None:
    following = layout.next_epoch(epoch)
    assert layout.is_later(following, epoch)
    assert not layout.is_later(epoch, following)
    assert layout.slot_offset(epoch) != layout.slot_offset(following)
    assert layout.slot_offset(epoch) == layout.slot_offset(layout.next_epoch(following))
    starts = {layout.payload_offset(e, size) for e in (epoch, following)}
    assert starts == {0, size}
    assert max(starts) + size == layout.arena_bytes(size)
    last = max(layout.slot_offset(e) for e in (epoch, following))
    assert last + layout.SLOT_BYTES == layout.CONTROL_BYTES


@given(st.integers(1, 64))
def test_control_blocks_of_micro_batches_do_not_overlap(count: int) -> None:
    starts = [layout.control_offset(index) for index in range(count)]
    ends = [start + layout.CONTROL_BYTES for start in starts]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] <= layout.control_segment_bytes(count)


def test_host_arithmetic_reaches_beyond_32_bits() -> None:
    # W = 8, T = 32768, 16 heads a rank, D = 576, bf16.
    needed = layout.gather_slot_bytes(32768, 16, 576 * 2)
    slot = layout.arena_slot_bytes(needed)
    assert needed == 603_979_776
    assert layout.arena_bytes(slot) == 1 << 31
    assert layout.combine_slot_bytes(32768, 128, 512 * 2) == 4_311_744_512
    words = layout.table_words(1, 0, 0, slot, [1 << 47, 2], [3, (1 << 47) + 7])
    assert words == [2, 1, 0, 0, slot, 1 << 47, 2, 3, (1 << 47) + 7]
