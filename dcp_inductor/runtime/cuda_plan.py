"""What the plans of gathers and merges over symmetric memory have in common."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from dcp_inductor import config, votes
from dcp_inductor.capability import Refusal
from dcp_inductor.runtime import cuda_layout
from dcp_inductor.runtime.cuda_workspace import Workspace
from dcp_inductor.runtime.signature import Signature

CHUNK_BYTES = 16
_SETTINGS = (
    "max_tokens", "marked_bytes", "packet_bytes", "timeout_s", "launch_overlap",
)  # fmt: skip
_MAX_PIECES = 1 << 31  # the kernels divide numbers below


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as signatures spell it."""
    return str(dtype).removeprefix("torch.")


def aligned_rows(x: Tensor) -> Tensor:
    """``x`` if its rows are dense and start at multiples of 16 bytes, or a copy."""
    size = x.element_size()
    if (
        x.stride(-1) == 1
        and x.data_ptr() % CHUNK_BYTES == 0
        and all(stride * size % CHUNK_BYTES == 0 for stride in x.stride()[:-1])
    ):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def row_refusal(row_bytes: int) -> Refusal | None:
    """Why the kernels cannot move rows of ``row_bytes``, or None."""
    if row_bytes and row_bytes % CHUNK_BYTES == 0:
        return None
    return Refusal(
        "row_bytes",
        f"expected rows of a multiple of {CHUNK_BYTES} bytes, got {row_bytes}",
    )


def size_refusal(pieces: int, nbytes: int) -> Refusal | None:
    """Why the kernels cannot count a rank's ``pieces`` of ``nbytes``, or None."""
    if pieces < _MAX_PIECES:
        return None
    return Refusal(
        "size",
        f"expected fewer than {_MAX_PIECES} pieces of {nbytes} bytes from a rank, got "
        f"{pieces}",
    )


def plan_settings() -> tuple[object, ...]:
    """Knobs that a plan is made of; part of the key of every plan."""
    return tuple(map(config.read, _SETTINGS))


def launch_table(
    workspace: Workspace,
    layout: cuda_layout.ArenaLayout,
    call: Signature,
    words: list[int],
) -> Tensor | Refusal:
    """The launch table of ``call`` over the arena of ``layout``, made at need."""
    memory = workspace.memory
    arena = memory.arena(workspace, layout, call)
    if isinstance(arena, Refusal):
        return arena
    votes.runs(memory.group_name, call.site)
    packed = call.pack()
    checksum = zlib.crc32(packed)
    memory.post_signature(checksum, packed)
    channel = cuda_layout.channel_words(
        memory.rank, int(config.timeout_s * 1e9), checksum, memory.site_id(call.site),
        memory.num_ubatches, workspace.fault_address, workspace.control.addresses,
        arena.addresses, arena.multicast, config.launch_overlap,
    )  # fmt: skip
    return torch.tensor(channel + words, dtype=torch.int64)
