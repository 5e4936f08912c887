"""The combine over collectives, for tensors on GPUs that cannot exchange directly.

``packed_all_to_all`` means what ``reference.a2a_lse_reduce`` means, and sends output
and LSE in one all-to-all (one all-gather where every rank takes all). What travels is
the same with and without Triton, so a rank may lack it. ``corrected_reduce`` is the
other usual spelling; its sum is the collective's, in the dtype of the partials.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from dcp_inductor import capability, geometry, groups, reference
from dcp_inductor.geometry import DEFAULT_MERGE, MergeOptions

log = logging.getLogger(__name__)

_ALIGNMENT = 128  # of parts: whatever the dtype, kernels may move 16 bytes at once
# torch 2.13 renamed it, and warns about the old name.
_reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@dataclass(frozen=True)
class _Part:
    """What one rank takes of ``[T, H]``: a run of heads or of tokens, packed."""

    first: int
    size: int
    shape: tuple[int, int, int]
    element_size: int

    @property
    def words_offset(self) -> int:
        """Bytes of the rows, in front of their LSEs."""
        return _align(self.shape[0] * self.shape[1] * self.shape[2] * self.element_size)

    @property
    def nbytes(self) -> int:
        """Bytes of the part, LSEs included; not 0 for a rank that takes nothing."""
        return self.words_offset + _align(max(self.shape[0] * self.shape[1], 1) * 4)

    def rows(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows in a packed part."""
        values = packed[: self.words_offset].view(dtype)
        count = self.shape[0] * self.shape[1] * self.shape[2]
        return values[:count].view(self.shape)

    def lses(self, packed: Tensor) -> Tensor:
        """The LSEs in a packed part."""
        words = packed[self.words_offset : self.nbytes].view(torch.float32)
        return words[: self.shape[0] * self.shape[1]].view(self.shape[:2])


def packed_all_to_all(
    partial_output: Tensor,
    partial_lse: Tensor,
    group_name: str,
    options: MergeOptions = DEFAULT_MERGE,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge ``[T, H, D]`` and ``[T, H]`` of every rank; returns output and LSE.

    Shapes and options as in ``ops.py``. A collective: all ranks must call it.

    Raises:
        ValueError: arguments that no rank could serve.
    """
    group = groups.resolve(group_name)
    size, rank = group.size(), group.rank()
    geometry.check_a2a_lse_reduce(
        partial_output, partial_lse, options, seq_lens, query_start_loc, size
    )
    # Wider partials are merged in fp64, which is not worth a kernel.
    if partial_output.dtype not in capability.PAYLOAD_DTYPES:
        return reference.a2a_lse_reduce(
            partial_output, partial_lse, group_name, options, seq_lens, query_start_loc
        )
    scatter, is_base_e = options.scatter, options.is_lse_base_on_e
    lengths = _lengths(seq_lens, query_start_loc, partial_output.device)
    parts = _parts(partial_output, scatter, options.split_sizes, size)
    sent = _pack(partial_output, partial_lse, lengths, scatter == "tokens", parts)
    mine = parts[rank if len(parts) > 1 else 0]
    received = sent.new_empty(size * mine.nbytes)
    if scatter == "none":
        reference._gather_single(received, sent, group=group)
    else:
        dist.all_to_all_single(
            received, sent, [mine.nbytes] * size, [part.nbytes for part in parts],
            group=group,
        )  # fmt: skip
    own_lse = options.return_lse and (scatter == "none" or not options.full_lse)
    output, lse = _merge(
        received, mine, partial_output.dtype, size, is_base_e,
        options.output_dtype or partial_output.dtype, own_lse,
    )  # fmt: skip
    if options.return_lse and not own_lse:
        lse = _full_lse(partial_output, partial_lse, lengths, group, is_base_e)
    if lse is None:
        lse = output.new_empty((0,), dtype=torch.float32)
    return output, lse


def corrected_reduce(
    partial_output: Tensor,
    partial_lse: Tensor,
    group_name: str,
    options: MergeOptions = DEFAULT_MERGE,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same by all-gather of the LSEs, weights, and reduce-scatter or all-reduce.

    Returns:
        This rank's even part of the output, in the dtype of the partials, and the LSE
        of all rows ``[T, H]``, or ``[0]``.

    Raises:
        ValueError: arguments that no rank could serve, or no Triton.
    """
    group = groups.resolve(group_name)
    size = group.size()
    geometry.check_a2a_lse_reduce(
        partial_output, partial_lse, options, seq_lens, query_start_loc, size
    )
    if options.split_sizes or options.output_dtype not in (None, partial_output.dtype):
        raise ValueError(
            "corrected_reduce: expected even parts in the dtype of the partials, got "
            f"{options}"
        )
    scatter = options.scatter
    kernels = _kernels(partial_output)
    if kernels is None:
        raise ValueError("corrected_reduce: expected CUDA tensors and Triton")
    lengths = _lengths(seq_lens, query_start_loc, partial_output.device)
    gathered = _gather_lses(partial_output, partial_lse, lengths, group)
    weighted, lse = kernels.weigh(
        partial_output, gathered, group.rank(), 1 if scatter == "none" else size,
        scatter == "tokens", options.is_lse_base_on_e, options.return_lse,
    )  # fmt: skip
    shape = options.shape(partial_lse, size, group.rank())
    if scatter == "none":
        output = weighted
        dist.all_reduce(output, group=group)
    else:
        output = weighted.new_empty(weighted.shape[1:])
        _reduce_scatter(output, weighted.flatten(0, 1), group=group)
    if lse is None:
        lse = output.new_empty((0,), dtype=torch.float32)
    return output.view(*shape, partial_output.shape[2]), lse


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@functools.cache
def _load_kernels() -> ModuleType | None:
    try:
        from dcp_inductor.triton import combine
    except ImportError as error:
        log.warning("the combine over collectives does without Triton: %s", error)
        return None
    return combine


def _kernels(x: Tensor) -> ModuleType | None:
    """The Triton kernels, where they can take ``x``."""
    return _load_kernels() if x.is_cuda else None


def _lengths(
    seq_lens: Tensor | None, query_start_loc: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    if seq_lens is None or query_start_loc is None:
        return None
    return (
        seq_lens.to(device, torch.int32).contiguous(),
        query_start_loc.to(device, torch.int32).contiguous(),
    )


def _parts(
    partial: Tensor, scatter: str, split_sizes: Sequence[int], size: int
) -> list[_Part]:
    """The ranks' parts; a single one where every rank takes all."""
    tokens, heads, head_dim = partial.shape
    if scatter == "none":
        sizes = [heads]
    else:
        total = heads if scatter == "heads" else tokens
        sizes = list(split_sizes) or [total // size] * size
    parts, first = [], 0
    for part in sizes:
        rows = (part, heads) if scatter == "tokens" else (tokens, part)
        shape = (*rows, head_dim)
        parts.append(_Part(first, part, shape, partial.element_size()))
        first += part
    return parts


def _pack(
    partial: Tensor,
    lse: Tensor,
    lengths: tuple[Tensor, Tensor] | None,
    by_tokens: bool,
    parts: list[_Part],
) -> Tensor:
    """The parts of all ranks in a row, as bytes."""
    sent = torch.empty(
        sum(part.nbytes for part in parts), dtype=torch.uint8, device=partial.device
    )
    kernels = _kernels(partial)
    if lse.dtype not in capability.LSE_DTYPES:
        lse = lse.float()
    if kernels is not None and len({part.size for part in parts}) == 1:
        first = parts[0]
        kernels.pack(
            partial, lse, lengths, sent, first.words_offset, first.nbytes, len(parts),
            0, first.size, by_tokens,
        )  # fmt: skip
        return sent
    if kernels is None:
        lse = _masked(lse, lengths)
    dim = 0 if by_tokens else 1
    pieces = sent.split([part.nbytes for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        if kernels is not None:
            kernels.pack(
                partial, lse, lengths, piece, part.words_offset, part.nbytes, 1,
                part.first, part.size, by_tokens,
            )  # fmt: skip
            continue
        rows = partial.narrow(dim, part.first, part.size)
        part.rows(piece, partial.dtype).copy_(rows)
        part.lses(piece).copy_(lse.narrow(dim, part.first, part.size))
    return sent


def _masked(lse: Tensor, lengths: tuple[Tensor, Tensor] | None) -> Tensor:
    """``lse`` in fp32 with -inf in the rows of empty shards."""
    lse = lse.float()
    if lengths is not None:
        empty = reference.empty_rows(lse.shape[0], *lengths)
        lse = lse.masked_fill(empty.unsqueeze(1), -torch.inf)
    return lse


def _merge(
    received: Tensor,
    part: _Part,
    dtype: torch.dtype,
    size: int,
    is_lse_base_on_e: bool,
    output_dtype: torch.dtype,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    kernels = _kernels(received)
    if kernels is not None:
        known = output_dtype in capability.PAYLOAD_DTYPES
        output, lse = kernels.merge(
            received, part.words_offset, dtype, part.shape, size, is_lse_base_on_e,
            output_dtype if known else torch.float32, with_lse,
        )  # fmt: skip
        return output.to(output_dtype), lse
    pieces = received.view(size, part.nbytes).unbind(0)
    output, lse = reference.merge(
        [part.rows(piece, dtype) for piece in pieces],
        [part.lses(piece) for piece in pieces],
        is_lse_base_on_e,
    )
    return output.to(output_dtype), lse if with_lse else None


def _gather_lses(
    partial: Tensor,
    lse: Tensor,
    lengths: tuple[Tensor, Tensor] | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """fp32 ``[N, T, H]`` with -inf for empty shards."""
    tokens, heads = lse.shape
    packed = _pack(
        partial[..., :0], lse, lengths, False,
        [_Part(0, heads, (tokens, heads, 0), partial.element_size())],
    )  # fmt: skip
    own = packed.view(torch.float32)[: tokens * heads]
    gathered = own.new_empty((group.size(), tokens, heads))
    reference._gather_single(gathered.view(-1), own, group=group)
    return gathered


def _full_lse(
    partial: Tensor,
    lse: Tensor,
    lengths: tuple[Tensor, Tensor] | None,
    group: dist.ProcessGroup,
    is_lse_base_on_e: bool,
) -> Tensor:
    """The merged LSE of all rows ``[T, H]``, on every rank."""
    gathered = _gather_lses(partial, lse, lengths, group)
    kernels = _kernels(gathered)
    if kernels is not None:
        no_rows = partial[..., :0]
        return kernels.weigh(no_rows, gathered, 0, 1, False, is_lse_base_on_e, True)[1]
    nothing = gathered.new_empty((*gathered.shape, 0))
    return reference.merge(nothing, gathered, is_lse_base_on_e)[1]
