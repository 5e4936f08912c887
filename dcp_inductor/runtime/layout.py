"""Byte layout of the shared memory of the CPU runtime; pure arithmetic.

``csrc/cpu/sync.h`` declares the same control block for the C++ side and asserts the
same offsets. Sizes are final running offsets, never sums kept beside them. All sizes
and offsets in bytes.
"""

from __future__ import annotations

import struct

CACHE_LINE = 64
PAGE = 4096

# One control block per rank and micro-batch.
TAG = 0  # uint64: who created the block
EPOCH = 64  # uint32: calls begun by the owner
FAULT_PEER = 68  # uint32: the peer for which the owner's last call did not end well
DEAD = 128  # uint32: the owner has given up
SLEEPERS = 192  # uint32: peers that sleep until the owner publishes
SLOTS = 256
SIGNATURE = 8  # within a slot, behind its published epoch
SIGNATURE_BYTES = 256
SLOT_BYTES = 320
CONTROL_BYTES = SLOTS + 2 * SLOT_BYTES

# The words of a launch table, ahead of the addresses.
TABLE_WORDS = ("world_size", "rank", "spin_ns", "patience_ns", "slot_bytes")

EPOCHS = 1 << 32
MAX_RANKS = 128


def align(offset: int, alignment: int) -> int:
    """``offset`` rounded up to a multiple of ``alignment``."""
    return -(-offset // alignment) * alignment


def control_offset(ubatch: int) -> int:
    """Where the control block of a micro-batch starts in a rank's control segment."""
    return ubatch * align(CONTROL_BYTES, PAGE)


def control_segment_bytes(num_ubatches: int) -> int:
    """Size of a rank's control segment."""
    return control_offset(num_ubatches)


def slot_offset(epoch: int) -> int:
    """Where, in a control block, the slot of call ``epoch`` starts."""
    return SLOTS + (epoch & 1) * SLOT_BYTES


def gather_slot_bytes(max_tokens: int, heads: int, row_bytes: int) -> int:
    """Bytes that a gather of ``[max_tokens, heads, row_bytes]`` needs in one slot."""
    return max_tokens * heads * row_bytes


def combine_lse_offset(tokens: int, heads: int, row_bytes: int) -> int:
    """Where the LSEs ``[tokens, heads]`` stand, behind the payload."""
    return align(tokens * heads * row_bytes, CACHE_LINE)


def combine_slot_bytes(max_tokens: int, heads: int, row_bytes: int) -> int:
    """Bytes that a combine of ``[max_tokens, heads, row_bytes]`` needs in one slot."""
    return combine_lse_offset(max_tokens, heads, row_bytes) + 4 * max_tokens * heads


def arena_slot_bytes(needed: int) -> int:
    """Slot size of the arena for ``needed`` bytes: a power of two, whole pages."""
    return max(PAGE, 1 << (needed - 1).bit_length()) if needed else PAGE


def arena_bytes(slot_bytes: int) -> int:
    """Size of a rank's arena: a slot for each parity of the epoch."""
    return 2 * slot_bytes


def payload_offset(epoch: int, slot_bytes: int) -> int:
    """Where, in an arena, the slot of call ``epoch`` starts."""
    return (epoch & 1) * slot_bytes


def next_epoch(epoch: int) -> int:
    """The epoch after ``epoch``; wraps."""
    return (epoch + 1) % EPOCHS


def is_later(epoch: int, other: int) -> bool:
    """Whether ``epoch`` comes after ``other``, across the wrap."""
    return 0 < (epoch - other) % EPOCHS < EPOCHS // 2


def table_words(
    rank: int,
    spin_ns: int,
    patience_ns: int,
    slot_bytes: int,
    controls: list[int],
    arenas: list[int],
) -> list[int]:
    """A launch table: ``TABLE_WORDS``, then both kinds of addresses by rank."""
    return [
        len(controls), rank, spin_ns, patience_ns, slot_bytes,
        *controls, *arenas,
    ]  # fmt: skip


def read_u32(block: memoryview, offset: int) -> int:
    """A uint32 of a control block."""
    return struct.unpack_from("=I", block, offset)[0]


def write_u32(block: memoryview, offset: int, value: int) -> None:
    """Set a uint32 of a control block."""
    struct.pack_into("=I", block, offset, value % EPOCHS)


def read_u64(block: memoryview, offset: int) -> int:
    """A uint64 of a control block."""
    return struct.unpack_from("=Q", block, offset)[0]


def write_u64(block: memoryview, offset: int, value: int) -> None:
    """Set a uint64 of a control block."""
    struct.pack_into("=Q", block, offset, value)
