"""Kernels of a combine that travels over collectives: pack, merge and weigh.

Rows of ``[T, H]`` are numbered by destination: peer p gets rows p * rows_per_peer and
on, token-major within its part. Sums run in rank order in fp32, as in ``reference``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_REQUESTS = 128  # entries of query_start_loc that are compared at once
_ELEMENTS = 2048  # of a program's block, rows times padded head dim


@triton.jit
def _place(row, rows_per_peer, first, part, num_heads, BY_TOKENS: tl.constexpr):
    """Peer, row within the peer's part, token and head of a row."""
    peer = row // rows_per_peer
    local = row % rows_per_peer
    if BY_TOKENS:
        token = first + peer * part + local // num_heads
        head = local % num_heads
    else:
        token = local // part
        head = first + peer * part + local % part
    return peer, local, token, head


@triton.jit
def _power(x, BASE_E: tl.constexpr):
    if BASE_E:
        result = tl.exp(x)
    else:
        result = tl.exp2(x)
    return result


# Not specialised: what changes from call to call, so that it does not compile anew.
@triton.jit(
    do_not_specialize=["num_requests", "num_rows", "rows_per_peer", "first", "part"]
)
def _pack_kernel(
    partial, lse, payload, words, seq_lens, starts, num_requests,
    num_rows, rows_per_peer, first, part, num_heads, head_dim,
    partial_stride_t, partial_stride_h, partial_stride_d,
    lse_stride_t, lse_stride_h, payload_step, words_step,
    BY_TOKENS: tl.constexpr, HAS_LENGTHS: tl.constexpr, WITH_PAYLOAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCKS_B: tl.constexpr,
):  # fmt: skip
    """Rows to their peers' segments; empty shards get an LSE of -inf."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    peer, local, token, head = _place(
        row, rows_per_peer, first, part, num_heads, BY_TOKENS
    )
    value = tl.load(
        lse + token.to(tl.int64) * lse_stride_t + head.to(tl.int64) * lse_stride_h,
        mask=is_row, other=0.0,
    ).to(tl.float32)  # fmt: skip
    if HAS_LENGTHS:
        # The last sequence that starts at or before the token: all entries at once,
        # since a search would be a chain of dependent loads.
        owner = tl.full([ROWS], -1, tl.int32)
        for block in range(BLOCKS_B):
            entry = block * BLOCK_B + tl.arange(0, BLOCK_B)
            exists = entry <= num_requests
            start = tl.load(starts + entry, mask=exists, other=0)
            before = (start[None, :] <= token[:, None]) & exists[None, :]
            owner += tl.sum(before.to(tl.int32), 1)
        inside = (owner >= 0) & (owner < num_requests)
        length = tl.load(seq_lens + owner, mask=is_row & inside, other=0)
        value = tl.where(inside & (length > 0), value, float("-inf"))
    unknown = (value != value) | (value == float("inf"))
    value = tl.where(unknown, float("-inf"), value)
    peer = peer.to(tl.int64)
    tl.store(words + peer * words_step + local, value, mask=is_row)
    if WITH_PAYLOAD:
        column = tl.arange(0, BLOCK_D)[None, :]
        is_value = is_row[:, None] & (column < head_dim)
        source = token.to(tl.int64) * partial_stride_t
        source += head.to(tl.int64) * partial_stride_h
        data = tl.load(
            partial + source[:, None] + column * partial_stride_d, mask=is_value
        )
        target = peer * payload_step + local.to(tl.int64) * head_dim
        tl.store(payload + target[:, None] + column, data, mask=is_value)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    payload, words, output, lse_output,
    num_rows, payload_step, words_step, head_dim,
    NUM_RANKS: tl.constexpr, BASE_E: tl.constexpr, WITH_LSE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """This rank's rows from all sources' segments."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    # Steps add up in the pointer: their product with the source may not fit in 32 bits.
    word = words + row
    for _ in range(NUM_RANKS):
        value = tl.load(word, is_row, float("-inf"))
        word += words_step
        highest = tl.maximum(highest, value)
    # -inf - -inf is NaN: rows that are empty everywhere are measured from 0 instead.
    origin = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([ROWS], tl.float32)
    word = words + row
    for _ in range(NUM_RANKS):
        value = tl.load(word, is_row, float("-inf"))
        word += words_step
        total += _power(value - origin, BASE_E)
    divisor = tl.where(total == 0.0, 1.0, total)
    column = tl.arange(0, BLOCK_D)[None, :]
    offset = row.to(tl.int64)[:, None] * head_dim + column
    is_value = is_row[:, None] & (column < head_dim)
    merged = tl.zeros([ROWS, BLOCK_D], tl.float32)
    at = payload + offset
    word = words + row
    for _ in range(NUM_RANKS):
        value = tl.load(word, is_row, float("-inf"))
        word += words_step
        share = _power(value - origin, BASE_E) / divisor
        # A source of weight 0 is not read: its payload may be NaN.
        data = tl.load(at, mask=is_value & (share > 0)[:, None], other=0.0)
        merged += share[:, None] * data.to(tl.float32)
        at += payload_step
    tl.store(output + offset, merged.to(output.dtype.element_ty), mask=is_value)
    if WITH_LSE:
        scale: tl.constexpr = 0.6931471805599453 if BASE_E else 1.0
        tl.store(lse_output + row, origin + tl.log2(total) * scale, mask=is_row)


@triton.jit(do_not_specialize=["rank", "num_rows", "rows_per_peer", "part"])
def _weigh_kernel(
    partial, gathered, weighted, lse_output, rank,
    num_rows, rows_per_peer, part, num_heads, head_dim,
    partial_stride_t, partial_stride_h, partial_stride_d,
    NUM_RANKS: tl.constexpr, BASE_E: tl.constexpr, BY_TOKENS: tl.constexpr,
    WITH_PAYLOAD: tl.constexpr, WITH_LSE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """This rank's rows times their share, by destination; the LSE of all ranks."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    _, _, token, head = _place(row, rows_per_peer, 0, part, num_heads, BY_TOKENS)
    index = token.to(tl.int64) * num_heads + head
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    for source in range(NUM_RANKS):
        value = tl.load(gathered + source * num_rows + index, is_row, float("-inf"))
        highest = tl.maximum(highest, value)
    origin = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([ROWS], tl.float32)
    for source in range(NUM_RANKS):
        value = tl.load(gathered + source * num_rows + index, is_row, float("-inf"))
        total += _power(value - origin, BASE_E)
    if WITH_LSE:
        scale: tl.constexpr = 0.6931471805599453 if BASE_E else 1.0
        tl.store(lse_output + index, origin + tl.log2(total) * scale, mask=is_row)
    if WITH_PAYLOAD:
        own = tl.load(gathered + rank * num_rows + index, is_row, float("-inf"))
        share = _power(own - origin, BASE_E) / tl.where(total == 0.0, 1.0, total)
        column = tl.arange(0, BLOCK_D)[None, :]
        is_value = is_row[:, None] & (column < head_dim)
        source_row = token.to(tl.int64) * partial_stride_t
        source_row += head.to(tl.int64) * partial_stride_h
        data = tl.load(
            partial + source_row[:, None] + column * partial_stride_d,
            mask=is_value & (share > 0)[:, None], other=0.0,
        )  # fmt: skip
        result = share[:, None] * data.to(tl.float32)
        target = row.to(tl.int64)[:, None] * head_dim + column
        tl.store(weighted + target, result.to(weighted.dtype.element_ty), is_value)


@triton.jit
def _empty_kernel():
    """Nothing: what a launch costs."""


def pack(
    partial: Tensor,
    lse: Tensor,
    lengths: tuple[Tensor, Tensor] | None,
    buffer: Tensor,
    words_offset: int,
    step: int,
    peers: int,
    first: int,
    part: int,
    by_tokens: bool,
) -> None:
    """Write the parts of ``peers`` peers, ``step`` bytes apart, into ``buffer``.

    Args:
        partial: ``[T, H, D]``, any strides. ``[T, H, 0]`` packs LSEs alone.
        lse: ``[T, H]``, any strides.
        lengths: int32 ``seq_lens`` and ``query_start_loc``, contiguous.
        buffer: uint8, from the first peer's part on, 16-byte aligned.
        words_offset: bytes from a peer's rows to their LSEs.
        first: head (or token) at which the first peer's part begins.
        part: heads (or tokens) of each peer.
    """
    num_tokens, num_heads, head_dim = partial.shape
    rows_per_peer = part * (num_heads if by_tokens else num_tokens)
    num_rows = rows_per_peer * peers
    if not num_rows:
        return
    seq_lens, starts = lengths or (lse, lse)
    payload = buffer.view(partial.dtype)
    words = buffer[words_offset:].view(torch.float32)
    num_requests = seq_lens.numel() if lengths else 0
    rows, block = _block(num_rows, head_dim)
    with _on_device(buffer):
        _pack_kernel[(triton.cdiv(num_rows, rows),)](
            partial, lse, payload, words, seq_lens, starts,
            num_requests, num_rows, rows_per_peer, first, part,
            num_heads, head_dim, *partial.stride(), *lse.stride(),
            step // partial.element_size(), step // 4, BY_TOKENS=by_tokens,
            HAS_LENGTHS=lengths is not None, WITH_PAYLOAD=head_dim > 0, ROWS=rows,
            BLOCK_D=block, BLOCK_B=_REQUESTS,
            BLOCKS_B=triton.cdiv(num_requests + 1, _REQUESTS),
            num_warps=4 if rows * block > 512 else 1,
        )  # fmt: skip


def merge(
    buffer: Tensor,
    words_offset: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    num_ranks: int,
    is_lse_base_on_e: bool,
    output_dtype: torch.dtype,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """``shape`` rows of every source, packed as above, to output and LSE.

    Args:
        buffer: uint8, ``num_ranks`` parts of equal size.
        dtype: of the packed rows.
        shape: tokens, heads and head dim of this rank's result.
    """
    output = torch.empty(tuple(shape), dtype=output_dtype, device=buffer.device)
    lse = output.new_empty(tuple(shape[:2]), dtype=torch.float32) if with_lse else None
    num_rows, head_dim = shape[0] * shape[1], shape[2]
    if not num_rows:
        return output, lse
    step = buffer.numel() // num_ranks
    payload, words = buffer.view(dtype), buffer[words_offset:].view(torch.float32)
    rows, block = _block(num_rows, head_dim)
    with _on_device(buffer):
        _merge_kernel[(triton.cdiv(num_rows, rows),)](
            payload, words, output, output if lse is None else lse, num_rows,
            step // payload.element_size(), step // 4, head_dim, NUM_RANKS=num_ranks,
            BASE_E=is_lse_base_on_e, WITH_LSE=with_lse, ROWS=rows, BLOCK_D=block,
            num_warps=4 if rows * block > 512 else 1,
        )  # fmt: skip
    return output, lse


def weigh(
    partial: Tensor,
    gathered: Tensor,
    rank: int,
    peers: int,
    by_tokens: bool,
    is_lse_base_on_e: bool,
    with_lse: bool,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """This rank's rows times their share of the sum over ranks; and the merged LSE.

    Args:
        partial: ``[T, H, D]``, any strides. ``[T, H, 0]`` gives the LSE alone.
        gathered: fp32 ``[N, T, H]``, contiguous, with -inf for empty shards.
        peers: destinations that take equal parts of the heads (or tokens).
        into: where the rows go, contiguous; default: a new tensor.

    Returns:
        The rows ``[peers, rows of a peer, D]`` and, if asked for, the LSE ``[T, H]``.
    """
    num_tokens, num_heads, head_dim = partial.shape
    num_rows = num_tokens * num_heads
    shape = (peers, num_rows // peers, head_dim)
    weighted = partial.new_empty(shape) if into is None else into.view(shape)
    lse = gathered.new_empty((num_tokens, num_heads)) if with_lse else None
    rows, block = _block(num_rows, head_dim)
    with _on_device(gathered):
        _weigh_kernel[(triton.cdiv(num_rows, rows),)](
            partial, gathered, weighted, gathered if lse is None else lse, rank,
            num_rows, num_rows // peers, (num_tokens if by_tokens else num_heads)
            // peers, num_heads, head_dim, *partial.stride(),
            NUM_RANKS=gathered.shape[0], BASE_E=is_lse_base_on_e, BY_TOKENS=by_tokens,
            WITH_PAYLOAD=head_dim > 0, WITH_LSE=with_lse, ROWS=rows, BLOCK_D=block,
            num_warps=4 if rows * block > 512 else 1,
        )  # fmt: skip
    return weighted, lse


def launch_empty() -> None:
    """Launch a kernel that does nothing on the current device."""
    _empty_kernel[(1,)](num_warps=1)


def _block(num_rows: int, head_dim: int) -> tuple[int, int]:
    """Rows and padded head dim of a program."""
    block = max(triton.next_power_of_2(head_dim), 16)
    # One row a program until there are enough of them to fill a chip.
    most = max(_ELEMENTS // block, 1) if num_rows > 2048 else 1
    return most, block


def _on_device(x: Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
