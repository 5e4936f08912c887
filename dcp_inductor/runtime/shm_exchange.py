"""Direct exchanges over shared memory, for CPU tensors.

What a call needs beyond its tensors is worked out once per shape and options and kept
as a plan, so that a call in the steady state is a few look-ups and one launch; a shape
that once had room keeps it, whatever ``config.max_tokens`` says later. Every
call of a group, served or not, agrees on its signature with the peers: a refusal is as
collective as an exchange.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dcp_inductor import capability, config, geometry, launch_ops
from dcp_inductor.capability import Refusal
from dcp_inductor.geometry import MergeOptions
from dcp_inductor.runtime import layout, registry
from dcp_inductor.runtime.signature import Signature
from dcp_inductor.runtime.workspace import Workspace, as_tensor


@dataclass(frozen=True)
class _GatherPlan:
    table: Tensor
    signature: Tensor
    shape: tuple[int, ...]
    rank_stride: int
    token_stride: int
    first_padded_head: int


@dataclass(frozen=True)
class _CombinePlan:
    table: Tensor
    signature: Tensor
    shape: tuple[int, int, int]
    lse_shape: tuple[int, ...]
    output_dtype: torch.dtype
    part: list[int]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refused(workspace: Workspace, call: Signature, refusal: Refusal) -> Refusal:
    workspace.agree(replace(call, route=f"collectives ({refusal.code})"))
    return refusal


def _rows_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _as_lengths(lengths: Tensor | None) -> Tensor | None:
    if lengths is None:
        return None
    dtype = torch.int32 if lengths.dtype == torch.int32 else torch.int64
    return lengths.to(device="cpu", dtype=dtype).contiguous()


def agree_on_no_rows(op: str, group_name: str, x: Tensor, site: str) -> None:
    """Make the exchange, of signatures only, of a call of ``op`` without rows."""
    workspace = registry.workspace_for(group_name, site)
    if not isinstance(workspace, Refusal):
        workspace.agree(Signature(op, tuple(x.shape), _name(x.dtype), "", "", site))


def q_gather(
    group_name: str, query: Tensor, padded_heads: int, site: str
) -> Tensor | Refusal:
    """``[T, h, D]`` of every rank to ``[T, H or padded_heads, D]``."""
    workspace = registry.workspace_for(group_name, site, query.shape[0])
    if isinstance(workspace, Refusal):
        return workspace
    key = ("q", query.shape, query.dtype, padded_heads, site)
    plan = workspace.plans.get(key)
    if plan is None:
        max_tokens = config.max_tokens
        num_tokens, heads, head_dim = query.shape
        total = geometry.gathered_heads(query, workspace.world_size, padded_heads)
        call = Signature(
            "q_gather", tuple(query.shape), _name(query.dtype),
            f"padded_heads={padded_heads}" if padded_heads else "", "", site,
        )  # fmt: skip
        refusal = capability.rows_refusal(num_tokens, max_tokens)
        if refusal:
            return _refused(workspace, call, refusal)
        needed = layout.gather_slot_bytes(
            max_tokens, heads, head_dim * query.element_size()
        )
        table = workspace.table_for(needed, call)
        if isinstance(table, Refusal):
            return _refused(workspace, call, table)
        plan = _GatherPlan(
            table, as_tensor(call.pack()), (num_tokens, total, head_dim),
            rank_stride=heads * head_dim, token_stride=total * head_dim,
            first_padded_head=heads * workspace.world_size,
        )  # fmt: skip
        workspace.plans[key] = plan
    output = query.new_empty(plan.shape)
    if plan.first_padded_head < plan.shape[1]:
        output[:, plan.first_padded_head :].view(torch.uint8).zero_()
    _gather(workspace, plan, _rows_dense(query), output, "q_gather", site)
    return output


# Between processes on a host the result is copied out of the peers' memory in any case.
q_gather_view = q_gather


def kv_gather(group_name: str, rows: Tensor, site: str) -> Tensor | Refusal:
    """``[t, ...]`` of every rank to ``[N * t, ...]``."""
    workspace = registry.workspace_for(group_name, site, rows.shape[0])
    if isinstance(workspace, Refusal):
        return workspace
    key = ("kv", rows.shape, rows.dtype, site)
    plan = workspace.plans.get(key)
    if plan is None:
        max_tokens = config.max_tokens
        num_rows = rows.shape[0]
        width = math.prod(rows.shape[1:])
        call = Signature(
            "kv_gather", tuple(rows.shape), _name(rows.dtype), "", "", site
        )
        refusal = capability.rows_refusal(num_rows, max_tokens)
        if refusal:
            return _refused(workspace, call, refusal)
        needed = layout.gather_slot_bytes(max_tokens, 1, width * rows.element_size())
        table = workspace.table_for(needed, call)
        if isinstance(table, Refusal):
            return _refused(workspace, call, table)
        plan = _GatherPlan(
            table, as_tensor(call.pack()),
            (num_rows * workspace.world_size, *rows.shape[1:]),
            rank_stride=num_rows * width, token_stride=width, first_padded_head=0,
        )  # fmt: skip
        workspace.plans[key] = plan
    output = rows.new_empty(plan.shape)
    flat = rows.reshape(rows.shape[0], 1, -1)
    _gather(workspace, plan, _rows_dense(flat), output, "kv_gather", site)
    return output


def _gather(
    workspace: Workspace,
    plan: _GatherPlan,
    source: Tensor,
    output: Tensor,
    op: str,
    site: str,
) -> None:
    arguments = (
        source, output, plan.table, plan.signature, plan.rank_stride, plan.token_stride,
    )  # fmt: skip
    workspace.run(launch_ops.shm_gather, arguments, op, site, source.shape[0])


def a2a_lse_reduce(
    partial_output: Tensor,
    partial_lse: Tensor,
    group_name: str,
    options: MergeOptions,
    seq_lens: Tensor | None,
    query_start_loc: Tensor | None,
    site: str,
) -> tuple[Tensor, Tensor] | Refusal:
    """Merged output and LSE of ``[T, H, D]`` and ``[T, H]`` of every rank."""
    workspace = registry.workspace_for(group_name, site, partial_output.shape[0])
    if isinstance(workspace, Refusal):
        return workspace
    key = (
        partial_output.shape, partial_output.dtype, partial_lse.shape,
        partial_lse.dtype, options, seq_lens is None, query_start_loc is None, site,
    )  # fmt: skip
    plan = workspace.plans.get(key)
    if plan is None:
        geometry.check_a2a_lse_reduce(
            partial_output, partial_lse, options, seq_lens, query_start_loc,
            workspace.world_size,
        )  # fmt: skip
        plan = _plan_combine(workspace, partial_output, partial_lse, options, site)
        if isinstance(plan, Refusal):
            return plan
        workspace.plans[key] = plan
    geometry.check_lengths(seq_lens, query_start_loc)
    output = partial_output.new_empty(plan.shape, dtype=plan.output_dtype)
    lse = partial_output.new_empty(plan.lse_shape, dtype=torch.float32)
    source = _rows_dense(partial_output)
    lengths = _as_lengths(seq_lens)
    starts = _as_lengths(query_start_loc)
    arguments = (
        source, partial_lse, lengths, starts, output,
        lse if options.return_lse else None, plan.table, plan.signature, plan.part,
        options.scatter == "none", options.is_lse_base_on_e, options.full_lse,
    )  # fmt: skip
    workspace.run(
        launch_ops.shm_a2a_lse_reduce, arguments, "a2a_lse_reduce", site,
        source.shape[0],
    )  # fmt: skip
    return output, lse


def _plan_combine(
    workspace: Workspace,
    partial_output: Tensor,
    partial_lse: Tensor,
    options: MergeOptions,
    site: str,
) -> _CombinePlan | Refusal:
    max_tokens = config.max_tokens
    num_tokens, heads, head_dim = partial_output.shape
    payload = partial_output.dtype
    output_dtype = options.output_dtype or payload
    call = Signature(
        "a2a_lse_reduce", (num_tokens, heads, head_dim), _name(payload),
        options.words(payload), "", site,
    )  # fmt: skip
    refusal = capability.combine_refusal(
        payload, partial_lse.dtype, output_dtype
    ) or capability.rows_refusal(num_tokens, max_tokens)
    if refusal:
        return _refused(workspace, call, refusal)
    row_bytes = head_dim * partial_output.element_size()
    table = workspace.table_for(
        layout.combine_slot_bytes(max_tokens, heads, row_bytes), call
    )
    if isinstance(table, Refusal):
        return _refused(workspace, call, table)
    size, rank = workspace.world_size, workspace.rank
    my_tokens, my_heads = options.shape(partial_lse, size, rank)
    splits = options.split_sizes
    part = [0, num_tokens, 0, heads]
    first = sum(splits[:rank]) if splits else None
    if options.scatter == "heads":
        start = rank * my_heads if first is None else first
        part[2:] = [start, start + my_heads]
    elif options.scatter == "tokens":
        start = rank * my_tokens if first is None else first
        part[:2] = [start, start + my_tokens]
    return _CombinePlan(
        table, as_tensor(call.pack()), (my_tokens, my_heads, head_dim),
        options.lse_shape(partial_lse, size, rank), output_dtype, part,
    )  # fmt: skip
