"""The meaning of each graph op, in collectives and plain tensor arithmetic.

Oracle of the tests and fallback of the runtime. Payloads travel as bytes, so every
backend carries every dtype; sums run in rank order in fp32 (fp64 for fp64 partials), so
a result has the same bits on every run and on every rank. Arguments are those of the
ops in ``ops.py``, without token and site. Every function is a collective: all ranks of
the group must call it.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dcp_inductor import config, geometry, groups
from dcp_inductor.errors import DCPTimeoutError, FaultRecord
from dcp_inductor.geometry import DEFAULT_MERGE, MergeOptions

# torch 2.13 renamed it, and warns about the old name.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def merge(
    outputs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    is_lse_base_on_e: bool = True,
) -> tuple[Tensor, Tensor]:
    """Merge the partial attention results of N shards; no communication.

    Args:
        outputs: N partial outputs ``[..., D]``, or one tensor ``[N, ..., D]``.
        lses: N log-sum-exps ``[...]``, or one tensor ``[N, ...]``; NaN and +inf mean
            empty.
        is_lse_base_on_e: whether the LSEs are natural logarithms, or to base 2.

    Returns:
        Output ``[..., D]`` and LSE ``[...]`` in fp32 (fp64 where the partials are). A
        shard of weight 0 contributes nothing, whatever its payload; where every shard
        is empty the output is 0 and the LSE -inf; a NaN payload of a shard that has
        weight stays NaN.
    """
    compute_dtype = _compute_dtype(outputs[0].dtype)
    cleaned = [_empty_as_minus_inf(lse.to(compute_dtype)) for lse in lses]
    exp, log = (torch.exp, torch.log) if is_lse_base_on_e else (torch.exp2, torch.log2)
    highest = cleaned[0]
    for lse in cleaned[1:]:
        highest = torch.maximum(highest, lse)
    # -inf - -inf is NaN: rows that are empty everywhere are measured from 0 instead.
    origin = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = [exp(lse - origin) for lse in cleaned]
    total = torch.zeros_like(origin)
    for weight in weights:
        total = total + weight
    divisor = total.masked_fill(total == 0, 1.0)
    merged = torch.zeros(
        outputs[0].shape, dtype=compute_dtype, device=outputs[0].device
    )
    for weight, output in zip(weights, outputs, strict=True):
        share = (weight / divisor).unsqueeze(-1)
        # where, not a product with 0: the payload of an empty shard may be NaN.
        merged = torch.where(
            share > 0, merged + share * output.to(compute_dtype), merged
        )
    return merged, origin + log(total)


def empty_rows(num_tokens: int, seq_lens: Tensor, query_start_loc: Tensor) -> Tensor:
    """Bool ``[T]``: rows of sequences without local KV, and padding rows.

    ``seq_lens`` ``[B]`` are the local KV lengths; sequence b owns the rows from
    ``query_start_loc[b]`` up to ``query_start_loc[b + 1]``; rows from the last entry on
    are padding.
    """
    rows = torch.arange(num_tokens, device=query_start_loc.device, dtype=torch.int64)
    starts = query_start_loc.to(torch.int64)
    if seq_lens.numel() == 0:
        return torch.ones(num_tokens, dtype=torch.bool, device=rows.device)
    sequence = torch.searchsorted(starts, rows, right=True) - 1
    owner = sequence.clamp(0, seq_lens.numel() - 1)
    return (
        (rows >= starts[-1]) | (sequence < 0) | (seq_lens.to(rows.device)[owner] <= 0)
    )


def q_gather(query: Tensor, group_name: str, padded_heads: int = 0) -> Tensor:
    """``[T, h, D]`` of every rank to ``[T, H or padded_heads, D]``, rank-major."""
    group = groups.resolve(group_name)
    heads = geometry.gathered_heads(query, group.size(), padded_heads)
    gathered = _all_gather(query, group)  # [N, T, h, D]
    num_ranks, num_tokens, heads_per_rank, head_dim = gathered.shape
    result = query.new_empty((num_tokens, heads, head_dim))
    filled = num_ranks * heads_per_rank
    by_rank = result[:, :filled].view(num_tokens, num_ranks, heads_per_rank, head_dim)
    by_rank.copy_(gathered.transpose(0, 1))
    result[:, filled:].view(torch.uint8).zero_()
    return result


def kv_gather(rows: Tensor, group_name: str) -> Tensor:
    """``[t, ...]`` of every rank to ``[N * t, ...]`` in rank order."""
    return _all_gather(rows, groups.resolve(group_name)).flatten(0, 1)


def a2a_lse_reduce(
    partial_output: Tensor,
    partial_lse: Tensor,
    group_name: str,
    options: MergeOptions = DEFAULT_MERGE,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge ``[T, H, D]`` and ``[T, H]`` of every rank; returns output and LSE.

    Shapes and options as in ``ops.py``. Raises ValueError for arguments that no rank
    could serve.
    """
    group = groups.resolve(group_name)
    geometry.check_a2a_lse_reduce(
        partial_output, partial_lse, options, seq_lens, query_start_loc, group.size()
    )
    compute_dtype = _compute_dtype(partial_output.dtype)
    lse = partial_lse.to(compute_dtype)
    if seq_lens is not None and query_start_loc is not None:
        empty = empty_rows(lse.shape[0], seq_lens, query_start_loc).to(lse.device)
        lse = lse.masked_fill(empty.unsqueeze(1), -torch.inf)
    if options.scatter == "none":
        outputs = list(_all_gather(partial_output, group))
        lses = list(_all_gather(lse, group))
    else:
        dim = 1 if options.scatter == "heads" else 0
        even = [lse.shape[dim] // group.size()] * group.size()
        sizes = list(options.split_sizes) or even
        outputs = _scatter(partial_output, dim, sizes, group)
        lses = _scatter(lse, dim, sizes, group)
    output, merged_lse = merge(outputs, lses, options.is_lse_base_on_e)
    output = output.to(options.output_dtype or partial_output.dtype)
    if not options.return_lse:
        return output, output.new_empty((0,), dtype=torch.float32)
    if options.full_lse and options.scatter != "none":
        every_lse = _all_gather(lse, group)  # [N, T, H]
        no_payload = every_lse.new_empty((*every_lse.shape, 0))
        merged_lse = merge(no_payload, every_lse, options.is_lse_base_on_e)[1]
    return output, merged_lse.to(torch.float32)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    # Not promote_types: 8-bit floats do not promote.
    return torch.float64 if dtype == torch.float64 else torch.float32


def _empty_as_minus_inf(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse.isnan() | (lse == torch.inf), -torch.inf)


def _as_bytes(x: Tensor) -> Tensor:
    # Not view(-1): a single element counts as contiguous whatever its strides.
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[...]`` of every rank to ``[N, ...]``."""
    result = x.new_empty((group.size(), *x.shape))
    if x.numel():
        work = _gather_single(
            _as_bytes(result), _as_bytes(x), group=group, async_op=not x.is_cuda
        )
        _wait(work, group)
    return result


def _scatter(
    x: Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup
) -> list[Tensor]:
    """Send piece s of ``x`` along ``dim`` to rank s; returns what came from each."""
    pieces = x.split(list(sizes), dim)
    mine = pieces[group.rank()]
    piece_bytes = [piece.numel() * x.element_size() for piece in pieces]
    received = x.new_empty((group.size(), *mine.shape))
    work = dist.all_to_all_single(
        _as_bytes(received),
        torch.cat([_as_bytes(piece) for piece in pieces]),
        output_split_sizes=[piece_bytes[group.rank()]] * group.size(),
        input_split_sizes=piece_bytes,
        group=group,
        async_op=not x.is_cuda,
    )
    _wait(work, group)
    return list(received.unbind(0))


def _wait(work: dist.Work | None, group: dist.ProcessGroup) -> None:
    """Wait no longer than for a direct exchange, where it is the host that waits.

    On GPUs it is the stream, so their collectives leave no ``work``: a handle to wait
    on costs some 3 us.

    Raises:
        DCPTimeoutError: a rank did not come to the collective.
    """
    if work is None:
        return
    timeout_s = config.read("timeout_s")
    start = time.monotonic()
    try:
        work.wait(datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if time.monotonic() - start < timeout_s:
            raise  # of another kind: a peer has ended, say
        record = FaultRecord(
            op="collective", site="", group_name=group.group_name, rank=group.rank(),
            peer=-1, epoch_wanted=0, epoch_seen=0,
        )  # fmt: skip
        late = DCPTimeoutError(record, timeout_s)
        late.args = (
            f"rank {group.rank()} of group '{group.group_name}' waited {timeout_s:g} s "
            "in a collective that stands in for a direct exchange; which rank is "
            f"missing is not known ({error}). Every rank must make the same sequence "
            "of exchanges with the same dcp_inductor knobs; a rank that died, raised, "
            "or exchanges directly shows up here. Make the group anew, of the others "
            "where a rank has ended (torch.distributed.new_group(ranks, "
            "use_local_synchronization=True)), or raise DCP_INDUCTOR_TIMEOUT_S if the "
            "peer was only slow",
        )
        raise late from error
