"""Direct exchanges over symmetric memory, for CUDA tensors.

What a call needs beyond its tensors is worked out once per shape and options and kept
as a plan, so that a call in the steady state is a few look-ups and one launch. A call
is refused by its shapes and dtypes alone, hence alike on all ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcp_inductor import capability, config, geometry
from dcp_inductor.capability import Refusal
from dcp_inductor.runtime import cuda_launch_ops, cuda_layout, cuda_registry
from dcp_inductor.runtime.cuda_workspace import Workspace
from dcp_inductor.runtime.signature import Signature

_CHUNK_BYTES = 16
_UNIT_BYTES = 512
_MAX_PIECES = 1 << 31  # the kernels divide numbers below


@dataclass(frozen=True)
class _GatherPlan:
    table: Tensor
    shape: tuple[int, ...]
    publish: Tensor | None = None  # table of the launch ahead, where there are two


@dataclass(frozen=True)
class _CombinePlan:
    table: Tensor
    shape: tuple[int, int, int]
    lse_shape: tuple[int, ...]
    output_dtype: torch.dtype


def agree_on_no_rows(op: str, group_name: str, x: Tensor, site: str) -> None:
    """Make the exchange of a call of ``op`` without rows: a few bytes of nothing."""
    workspace = cuda_registry.workspace_for(group_name, x.device)
    if isinstance(workspace, Refusal):
        return
    workspace.check()
    workspace.refuse_unfinished(op)
    key = ("no rows", op, tuple(x.shape), x.dtype, site, config.timeout_s)
    plan = workspace.plans.get(key)
    if plan is None:
        call = Signature(op, tuple(x.shape), _name(x.dtype), "", "", site)
        plan = _plan_gather(
            workspace, call, cuda_layout.KV_GATHER, 1, _CHUNK_BYTES, _CHUNK_BYTES, 0,
            (workspace.memory.world_size, 1, _CHUNK_BYTES),
        )  # fmt: skip
        if isinstance(plan, Refusal):
            return
        workspace.plans[key] = plan
    nothing = x.new_empty((1, 1, _CHUNK_BYTES), dtype=torch.uint8)
    cuda_launch_ops.symm_gather(nothing, nothing.new_empty(plan.shape), plan.table)


def q_gather(
    group_name: str, query: Tensor, padded_heads: int, site: str
) -> Tensor | Refusal:
    """``[T, h, D]`` of every rank to ``[T, H or padded_heads, D]``."""
    workspace = cuda_registry.workspace_for(group_name, query.device)
    if isinstance(workspace, Refusal):
        return workspace
    workspace.check()
    workspace.refuse_unfinished("q_gather")
    key = (
        "q", tuple(query.shape), query.dtype, padded_heads, site, config.max_tokens,
        config.timeout_s,
    )  # fmt: skip
    plan = workspace.plans.get(key)
    if plan is None:
        num_tokens, heads, head_dim = query.shape
        total = geometry.gathered_heads(
            query, workspace.memory.world_size, padded_heads
        )
        options = f"padded_heads={padded_heads}" if padded_heads else ""
        call = Signature(
            "q_gather", tuple(query.shape), _name(query.dtype), options, "", site
        )
        plan = _plan_gather(
            workspace, call, cuda_layout.Q_GATHER, num_tokens,
            heads * head_dim * query.element_size(), head_dim * query.element_size(),
            total, (num_tokens, total, head_dim),
        )  # fmt: skip
        if isinstance(plan, Refusal):
            return plan
        workspace.plans[key] = plan
    output = query.new_empty(plan.shape)
    cuda_launch_ops.symm_gather(_aligned_rows(query), output, plan.table)
    return output


def kv_gather(group_name: str, rows: Tensor, site: str) -> Tensor | Refusal:
    """``[t, ...]`` of every rank to ``[N * t, ...]``."""
    workspace = cuda_registry.workspace_for(group_name, rows.device)
    if isinstance(workspace, Refusal):
        return workspace
    workspace.check()
    plan = workspace.finish(_published(rows, site))
    if plan is None:
        plan = _kv_plan(workspace, rows, site, split=False)
        if isinstance(plan, Refusal):
            return plan
    output = rows.new_empty(plan.shape)
    cuda_launch_ops.symm_gather(_as_kv_rows(rows), output, plan.table)
    return output


def kv_gather_publish(group_name: str, rows: Tensor, site: str) -> Refusal | None:
    """Send ``rows`` ahead of the :func:`kv_gather` that will wait for the peers' rows.

    That call, with equal rows, must be the group's next exchange.
    """
    workspace = cuda_registry.workspace_for(group_name, rows.device)
    if isinstance(workspace, Refusal):
        return workspace
    workspace.check()
    workspace.refuse_unfinished("kv_gather_publish")
    plan = _kv_plan(workspace, rows, site, split=True)
    if isinstance(plan, Refusal):
        return plan
    assert plan.publish is not None
    flat = _as_kv_rows(rows)
    cuda_launch_ops.symm_gather(flat, flat.new_empty(0), plan.publish)
    workspace.unfinished = _published(rows, site), plan
    return None


def _published(rows: Tensor, site: str) -> tuple[object, ...]:
    return tuple(rows.shape), rows.dtype, site


def _as_kv_rows(rows: Tensor) -> Tensor:
    return _aligned_rows(rows.reshape(rows.shape[0], 1, -1))


def _kv_plan(
    workspace: Workspace, rows: Tensor, site: str, split: bool
) -> _GatherPlan | Refusal:
    key = (
        "kv", tuple(rows.shape), rows.dtype, site, split, config.max_tokens,
        config.timeout_s,
    )  # fmt: skip
    plan = workspace.plans.get(key)
    if plan is None:
        call = Signature(
            "kv_gather", tuple(rows.shape), _name(rows.dtype),
            "published ahead" if split else "", "", site,
        )  # fmt: skip
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        plan = _plan_gather(
            workspace, call, cuda_layout.KV_GATHER, rows.shape[0], row_bytes, row_bytes,
            0, (rows.shape[0] * workspace.memory.world_size, *rows.shape[1:]), split,
        )  # fmt: skip
        if isinstance(plan, Refusal):
            return plan
        workspace.plans[key] = plan
    return plan


def a2a_lse_reduce(
    group_name: str,
    partial_output: Tensor,
    partial_lse: Tensor,
    *,
    scatter: str,
    split_sizes: Sequence[int],
    is_lse_base_on_e: bool,
    return_lse: bool,
    full_lse: bool,
    output_dtype: torch.dtype | None,
    seq_lens: Tensor | None,
    query_start_loc: Tensor | None,
    site: str,
) -> tuple[Tensor, Tensor] | Refusal:
    """Merged output and LSE of ``[T, H, D]`` and ``[T, H]`` of every rank."""
    workspace = cuda_registry.workspace_for(group_name, partial_output.device)
    if isinstance(workspace, Refusal):
        return workspace
    workspace.check()
    workspace.refuse_unfinished("a2a_lse_reduce")
    key = (
        tuple(partial_output.shape), partial_output.dtype, tuple(partial_lse.shape),
        partial_lse.dtype, scatter, tuple(split_sizes), is_lse_base_on_e, return_lse,
        full_lse, output_dtype, seq_lens is None, query_start_loc is None, site,
        config.max_tokens, config.timeout_s,
    )  # fmt: skip
    plan = workspace.plans.get(key)
    if plan is None:
        geometry.check_a2a_lse_reduce(
            partial_output, partial_lse, scatter, split_sizes, seq_lens,
            query_start_loc, workspace.memory.world_size,
        )  # fmt: skip
        plan = _plan_combine(
            workspace, partial_output, partial_lse, scatter, tuple(split_sizes),
            is_lse_base_on_e, return_lse, full_lse,
            output_dtype or partial_output.dtype, site,
        )  # fmt: skip
        if isinstance(plan, Refusal):
            return plan
        workspace.plans[key] = plan
    geometry.check_lengths(seq_lens, query_start_loc)
    output = partial_output.new_empty(plan.shape, dtype=plan.output_dtype)
    lse = partial_output.new_empty(plan.lse_shape, dtype=torch.float32)
    cuda_launch_ops.symm_a2a_lse_reduce(
        _aligned_rows(partial_output), partial_lse,
        _as_lengths(seq_lens, output.device),
        _as_lengths(query_start_loc, output.device),
        output, lse if return_lse else None, full_lse, plan.table,
    )  # fmt: skip
    return output, lse


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aligned_rows(x: Tensor) -> Tensor:
    """``x`` if its rows are dense and start at multiples of 16 bytes, or a copy."""
    size = x.element_size()
    if (
        x.stride(-1) == 1
        and x.data_ptr() % _CHUNK_BYTES == 0
        and all(stride * size % _CHUNK_BYTES == 0 for stride in x.stride()[:-1])
    ):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _as_lengths(lengths: Tensor | None, device: torch.device) -> Tensor | None:
    if lengths is None:
        return None
    return lengths.to(device=device, dtype=torch.int32).contiguous()


def _row_refusal(row_bytes: int) -> Refusal | None:
    if row_bytes and row_bytes % _CHUNK_BYTES == 0:
        return None
    return Refusal(
        "row_bytes",
        f"expected rows of a multiple of {_CHUNK_BYTES} bytes, got {row_bytes}",
    )


def _size_refusal(pieces: int, nbytes: int) -> Refusal | None:
    """Why the kernels cannot count a rank's ``pieces`` of ``nbytes``, or None."""
    if pieces < _MAX_PIECES:
        return None
    return Refusal(
        "size",
        f"expected fewer than {_MAX_PIECES} pieces of {nbytes} bytes from a rank, got "
        f"{pieces}",
    )


def _table(
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
    packed = call.pack()
    checksum = zlib.crc32(packed)
    memory.post_signature(checksum, packed)
    channel = cuda_layout.channel_words(
        memory.rank, int(config.timeout_s * 1e9), checksum, memory.site_id(call.site),
        memory.num_ubatches, workspace.fault_address, workspace.control.addresses,
        arena.addresses, arena.multicast,
    )  # fmt: skip
    return torch.tensor(channel + words, dtype=torch.int64)


def _plan_gather(
    workspace: Workspace,
    call: Signature,
    op: int,
    num_rows: int,
    local_row_bytes: int,
    row_bytes: int,
    total_heads: int,
    shape: tuple[int, ...],
    split: bool = False,
) -> _GatherPlan | Refusal:
    refusal = (
        _row_refusal(row_bytes)
        or capability.rows_refusal(num_rows, config.max_tokens)
        or _size_refusal(num_rows * local_row_bytes // _CHUNK_BYTES, _CHUNK_BYTES)
    )
    if refusal:
        return refusal
    world_size = workspace.memory.world_size
    kernel = cuda_layout.gather_kernel(world_size, num_rows * local_row_bytes)
    if split:
        kernel = cuda_layout.SLICES  # packets are sent and awaited by one launch
    capacity = config.max_tokens * local_row_bytes
    if kernel == cuda_layout.PACKETS:
        capacity = min(capacity, cuda_layout.packet_bytes(world_size))
    layout = cuda_layout.gather_arena(kernel, world_size, capacity)
    tables = []
    for publish, wait in ((True, False), (False, True)) if split else ((True, True),):
        words = cuda_layout.gather_words(op, kernel, total_heads, layout, publish, wait)
        table = _table(workspace, layout, call, words)
        if isinstance(table, Refusal):
            return table
        tables.append(table)
    return _GatherPlan(tables[-1], shape, tables[0] if split else None)


def _plan_combine(
    workspace: Workspace,
    partial_output: Tensor,
    partial_lse: Tensor,
    scatter: str,
    split_sizes: tuple[int, ...],
    is_lse_base_on_e: bool,
    return_lse: bool,
    full_lse: bool,
    output_dtype: torch.dtype,
    site: str,
) -> _CombinePlan | Refusal:
    num_tokens, heads, head_dim = partial_output.shape
    options = [f"scatter={scatter}", f"base={'e' if is_lse_base_on_e else '2'}"]
    options += [f"split_sizes={list(split_sizes)}"] if split_sizes else []
    if return_lse:
        options += ["full_lse" if full_lse else "lse"]
    if output_dtype != partial_output.dtype:
        options += [f"output={_name(output_dtype)}"]
    call = Signature(
        "a2a_lse_reduce", (num_tokens, heads, head_dim), _name(partial_output.dtype),
        " ".join(options), "", site,
    )  # fmt: skip
    row_bytes = head_dim * partial_output.element_size()
    refusal = (
        capability.combine_refusal(
            partial_output.dtype, partial_lse.dtype, output_dtype
        )
        or capability.rows_refusal(num_tokens, config.max_tokens)
        or _row_refusal(row_bytes)
        or _size_refusal(num_tokens * heads * -(-row_bytes // _UNIT_BYTES), _UNIT_BYTES)
    )
    if refusal:
        return refusal
    memory = workspace.memory
    kernel = cuda_layout.combine_kernel(num_tokens * heads * row_bytes)
    if scatter == "none":
        splits = [0] * memory.world_size
    elif split_sizes:
        splits = list(split_sizes)
    else:
        total = heads if scatter == "heads" else num_tokens
        splits = [total // memory.world_size] * memory.world_size
    # For as many tokens as this kernel ever gets, so that one arena serves every T.
    tokens = config.max_tokens
    if kernel == cuda_layout.MARKED:
        tokens = min(tokens, cuda_layout.MARKED_BYTES // (heads * row_bytes))
    rows = tokens * (max(splits) if scatter == "heads" else heads)
    if scatter == "tokens" and not split_sizes:
        rows = -(-tokens // memory.world_size) * heads
    layout = cuda_layout.combine_arena(
        kernel, memory.world_size, rows, row_bytes,
        config.max_tokens * heads if return_lse and full_lse else 0,
    )  # fmt: skip
    words = cuda_layout.combine_words(kernel, scatter, is_lse_base_on_e, splits, layout)
    table = _table(workspace, layout, call, words)
    if isinstance(table, Refusal):
        return table
    shape = geometry.scattered_shape(
        partial_lse, scatter, split_sizes, memory.world_size, memory.rank
    )
    lse_shape: tuple[int, ...] = (0,)
    if return_lse:
        lse_shape = (num_tokens, heads) if full_lse else shape
    return _CombinePlan(table, (*shape, head_dim), lse_shape, output_dtype)
