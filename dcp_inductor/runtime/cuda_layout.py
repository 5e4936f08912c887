"""Byte layout of the CUDA runtime's symmetric memory and launch tables; arithmetic.

``csrc/cuda/params.h`` and ``csrc/cuda/tables.h`` declare the same for the C++ side. An
arena is one symmetric buffer: sections in a row, each with a fill byte that says "not
arrived". In a section there is one region per slot and source rank. Offsets and
capacities in bytes, those of LSE and flag sections in 8-byte words.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from dcp_inductor import config

MAX_RANKS = 16
HEADER_BYTES = 512
EPOCH = slice(4, 8)  # bytes of the header that hold the epoch
FIRST_EPOCH = 2
FAULT_WORDS = 16  # uint32
TAIL_BYTES = 64 * 1024  # mapped behind every buffer: readers may run past the end
CONTROL_BYTES = HEADER_BYTES + TAIL_BYTES
_SLOTS = 2
_ALIGNMENT = 256
_TILE_UNITS = 32
_UNIT_BYTES = 512  # what one warp moves with one 16-byte chunk a lane
ARMED = 0xFF  # fill of words that carry their own arrival mark

MARKED, TILED = 0, 1  # CombineKernel
PACKETS, SLICES = 0, 1  # GatherKernel
COMBINE_KERNELS = ("marked", "tiled")
GATHER_KERNELS = ("packets", "slices")
Q_GATHER, KV_GATHER = 2, 3  # Op
VIEW = "view"  # kind of the arena whose data is a result
SCATTER = {"heads": 0, "tokens": 1, "none": 2}


@dataclass(frozen=True)
class Section:
    """``regions`` regions of ``capacity`` (bytes or words) from ``offset`` bytes on."""

    offset: int
    capacity: int
    size: int
    fill: int


@dataclass(frozen=True)
class ArenaLayout:
    """What an arena holds; equal layouts are one arena."""

    kind: str
    data: Section
    words: Section  # LSEs of a combine, headers or flags of a gather
    flags: Section  # flags by tile; empty but for the tiled combine
    full_lse: Section

    @property
    def size(self) -> int:
        """Bytes of the arena, the tail included."""
        last = self.full_lse
        return last.offset + align(last.size, _ALIGNMENT) + TAIL_BYTES

    def as_words(self) -> list[Any]:
        """The layout for a peer to read; see :meth:`of_words`."""
        return [self.kind, *(list(astuple(section)) for section in self.sections)]

    @classmethod
    def of_words(cls, words: list[Any]) -> ArenaLayout:
        """The layout of which a peer says :meth:`as_words`."""
        kind, *sections = words
        return cls(kind, *(Section(*section) for section in sections))

    @property
    def sections(self) -> tuple[Section, ...]:
        """All sections, in order."""
        return self.data, self.words, self.flags, self.full_lse


def align(offset: int, alignment: int) -> int:
    """``offset`` rounded up to a multiple of ``alignment``."""
    return -(-offset // alignment) * alignment


def _class(needed: int, least: int) -> int:
    """Capacity that serves ``needed`` and its neighbours, or 0.

    A power of two or, above a megabyte, a multiple of an eighth of the one below.
    """
    if needed <= 0:
        return 0
    bits = (needed - 1).bit_length()
    step = 1 << (bits - 4 if bits > 20 else bits)
    return max(least, align(needed, step))


def arena(
    kind: str,
    world_size: int,
    data_bytes: int,
    words: int,
    flags: int,
    full_lse: int,
    fill: int,
    data_regions: int = 0,
) -> ArenaLayout:
    """Layout with at least these capacities a region.

    ``data_regions``: of the data, where it is not one per slot and source.
    """
    offset = 0
    sections = []
    regions = _SLOTS * world_size
    for capacity, unit, section_fill, count in (
        (_class(data_bytes, 4096), 1, fill, data_regions or regions),
        (_class(words, 64), 8, fill, regions),
        (_class(flags, 64), 8, 0, regions),
        (_class(full_lse, 64), 8, ARMED, regions),
    ):
        size = count * capacity * unit
        sections.append(Section(offset, capacity, size, section_fill))
        offset = align(offset + size, _ALIGNMENT)
    return ArenaLayout(kind, *sections)


def combine_kernel(payload_bytes: int) -> int:
    """Which combine kernel serves a rank's partial output of this size."""
    return MARKED if payload_bytes <= config.marked_bytes else TILED


def combine_arena(
    kernel: int,
    world_size: int,
    rows: int,
    row_bytes: int,
    full_lse_rows: int,
) -> ArenaLayout:
    """For combines of at most ``rows`` rows from each source to any one rank."""
    units = rows * -(-row_bytes // _UNIT_BYTES)
    tiled = kernel == TILED
    return arena(
        COMBINE_KERNELS[kernel], world_size, rows * row_bytes, units,
        -(-units // _TILE_UNITS) if tiled else 0, full_lse_rows, 0 if tiled else ARMED,
    )  # fmt: skip


def packet_bytes(world_size: int, in_place: bool = False) -> int:
    """Most bytes of a rank's rows that go by packets.

    Args:
        world_size: number of ranks.
        in_place: slices would leave the result where it arrives.
    """
    # Half in place: the copy's time on one GPU taken off, not measured over NVLink.
    received = config.packet_bytes // (2 if in_place else 1)
    return received // max(world_size - 1, 1)


def gather_kernel(world_size: int, local_bytes: int, in_place: bool = False) -> int:
    """Which gather kernel serves a rank's rows of this many bytes together."""
    few = local_bytes <= packet_bytes(world_size, in_place)
    return PACKETS if few else SLICES


def gather_arena(kernel: int, world_size: int, local_bytes: int) -> ArenaLayout:
    """For gathers of at most ``local_bytes`` from each rank."""
    packets = kernel == PACKETS
    # A packet is half data; a header goes with 32 chunks, a flag with 256 or more.
    words = -(-local_bytes // (16 * (32 if packets else 256)))
    return arena(
        GATHER_KERNELS[kernel], world_size,
        local_bytes * (2 if packets else 1), words, 0, 0, 0,
    )  # fmt: skip


def view_arena(world_size: int, local_bytes: int, result_bytes: int) -> ArenaLayout:
    """For gathers by slices whose result, in one slot, is what the callers get."""
    words = -(-local_bytes // (16 * 256))
    return arena(VIEW, world_size, result_bytes, words, 0, 0, 0, data_regions=1)


def channel_words(
    rank: int,
    timeout_ns: int,
    signature: int,
    site: int,
    share: int,
    fault: int,
    headers: list[int],
    peers: list[int],
    multicast: int = 0,
    overlap: bool = True,
) -> list[int]:
    """The words of a ``ChannelTable``."""
    padding = [0] * (MAX_RANKS - len(peers))
    return [
        len(peers), rank, timeout_ns, signature, site, share, int(overlap), fault,
        multicast,
        *headers, *padding, *peers, *padding,
    ]  # fmt: skip


def combine_words(
    kernel: int, scatter: str, is_lse_base_on_e: bool, splits: list[int],
    layout: ArenaLayout,
) -> list[int]:  # fmt: skip
    """The words of a ``CombineTable`` behind its channel."""
    splits = splits + [0] * (MAX_RANKS - len(splits))
    words = [kernel, SCATTER[scatter], int(is_lse_base_on_e), *splits]
    for section in layout.sections:
        words += [section.offset, section.capacity]
    return words


def gather_words(
    op: int,
    kernel: int,
    padded_heads: int,
    layout: ArenaLayout,
    publish: bool = True,
    wait: bool = True,
) -> list[int]:
    """The words of a ``GatherTable`` behind its channel."""
    data, flags = layout.data, layout.words
    return [
        op, kernel, padded_heads,
        data.offset, data.capacity, flags.offset, flags.capacity,
        int(publish), int(wait), int(layout.kind == VIEW),
    ]  # fmt: skip
