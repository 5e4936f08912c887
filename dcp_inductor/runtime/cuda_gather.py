"""Direct gathers over symmetric memory, for CUDA tensors; see ``cuda_exchange``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dcp_inductor import capability, config, geometry
from dcp_inductor.capability import Refusal
from dcp_inductor.runtime import cuda_launch_ops, cuda_layout, cuda_registry
from dcp_inductor.runtime.cuda_plan import (
    CHUNK_BYTES,
    aligned_rows,
    dtype_name,
    launch_table,
    plan_settings,
    row_refusal,
    size_refusal,
)
from dcp_inductor.runtime.cuda_workspace import Workspace
from dcp_inductor.runtime.signature import Signature


@dataclass(frozen=True)
class _GatherPlan:
    table: Tensor
    shape: tuple[int, ...]
    publish: Tensor | None = None  # table of the launch ahead, where there are two
    view: Tensor | None = None  # the result, where it stays in the workspace


def agree_on_no_rows(op: str, group_name: str, x: Tensor, site: str) -> None:
    """Make the exchange of a call of ``op`` without rows: a few bytes of nothing."""
    workspace = cuda_registry.workspace_for(group_name, x.device)
    if isinstance(workspace, Refusal):
        return
    workspace.begin()
    workspace.refuse_unfinished(op)
    key = ("no rows", op, tuple(x.shape), x.dtype, site, *plan_settings())
    plan = workspace.plans.get(key)
    if plan is None:
        call = Signature(op, tuple(x.shape), dtype_name(x.dtype), "", "", site)
        plan = _plan_gather(
            workspace, call, cuda_layout.KV_GATHER, 1, CHUNK_BYTES, CHUNK_BYTES, 0,
            (workspace.memory.world_size, 1, CHUNK_BYTES),
        )  # fmt: skip
        if isinstance(plan, Refusal):
            return
        workspace.plans[key] = plan
    nothing = x.new_empty((1, 1, CHUNK_BYTES), dtype=torch.uint8)
    cuda_launch_ops.symm_gather(nothing, nothing.new_empty(plan.shape), plan.table)


def q_gather(
    group_name: str, query: Tensor, padded_heads: int, site: str
) -> Tensor | Refusal:
    """``[T, h, D]`` of every rank to ``[T, H or padded_heads, D]``."""
    return _gather_query(group_name, query, padded_heads, site, as_view=False)


def q_gather_view(
    group_name: str, query: Tensor, padded_heads: int, site: str
) -> Tensor | Refusal:
    """:func:`q_gather`, but the result may stay in the workspace, for a while.

    It does from as many rows on as go by slices. The peers store to its final place, of
    which there is one for all T and all sites of like geometry, and the result is a
    view of it: contiguous, of the query's dtype, padding heads zeroed by each call.

    It holds until the group's next ``q_gather_view``. One place is enough because a
    merge of the group comes between the two: a peer begins the later gather when its
    merge has ended, which has met this rank's merge, which this rank's stream began
    when all that read the earlier result had ended. Where no direct merge has come
    since the last view (it took the collectives, or an error came before it) the result
    is a tensor of its own, alike on all ranks, since they make the same calls.
    """
    return _gather_query(group_name, query, padded_heads, site, as_view=True)


def _gather_query(
    group_name: str, query: Tensor, padded_heads: int, site: str, as_view: bool
) -> Tensor | Refusal:
    workspace = cuda_registry.workspace_for(group_name, query.device)
    if isinstance(workspace, Refusal):
        return workspace
    workspace.begin()
    workspace.refuse_unfinished("q_gather")
    as_view = as_view and not workspace.view_unmerged
    key = (
        "q", tuple(query.shape), query.dtype, padded_heads, site, as_view,
        *plan_settings(),
    )  # fmt: skip
    plan = workspace.plans.get(key)
    if plan is None:
        plan = _query_plan(workspace, query, padded_heads, site, as_view)
        if isinstance(plan, Refusal):
            return plan
        workspace.plans[key] = plan
    if plan.view is None:
        output = query.new_empty(plan.shape)
    else:
        output = plan.view.view(plan.shape)
        workspace.view_unmerged = True
    cuda_launch_ops.symm_gather(aligned_rows(query), output, plan.table)
    return output


def _query_plan(
    workspace: Workspace, query: Tensor, padded_heads: int, site: str, as_view: bool
) -> _GatherPlan | Refusal:
    world_size = workspace.memory.world_size
    num_tokens, heads, head_dim = query.shape
    total = geometry.gathered_heads(query, world_size, padded_heads)
    row_bytes = head_dim * query.element_size()
    local_row_bytes = heads * row_bytes
    kernel = cuda_layout.gather_kernel(
        world_size, num_tokens * local_row_bytes, in_place=True
    )
    as_view = as_view and kernel == cuda_layout.SLICES
    options = [f"padded_heads={padded_heads}"] if padded_heads else []
    options += ["view"] if as_view else []
    call = Signature(
        "q_gather", tuple(query.shape), dtype_name(query.dtype), " ".join(options), "",
        site,
    )  # fmt: skip
    shape = (num_tokens, total, head_dim)
    if not as_view:
        return _plan_gather(
            workspace, call, cuda_layout.Q_GATHER, num_tokens, local_row_bytes,
            row_bytes, total, shape,
        )  # fmt: skip
    refusal = _refusal(num_tokens, local_row_bytes, row_bytes)
    if refusal:
        return refusal
    call = replace(call, route=cuda_layout.GATHER_KERNELS[kernel])
    layout = cuda_layout.view_arena(
        world_size, config.max_tokens * local_row_bytes,
        config.max_tokens * total * row_bytes,
    )  # fmt: skip
    words = cuda_layout.gather_words(cuda_layout.Q_GATHER, kernel, total, layout)
    table = launch_table(workspace, layout, call, words)
    if isinstance(table, Refusal):
        return table
    arena = workspace.arenas[layout].tensor
    result = arena.narrow(0, layout.data.offset, num_tokens * total * row_bytes)
    return _GatherPlan(table, shape, view=result.view(query.dtype))


def kv_gather(group_name: str, rows: Tensor, site: str) -> Tensor | Refusal:
    """``[t, ...]`` of every rank to ``[N * t, ...]``."""
    workspace = cuda_registry.workspace_for(group_name, rows.device)
    if isinstance(workspace, Refusal):
        return workspace
    workspace.begin()
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
    workspace.begin()
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
    return aligned_rows(rows.reshape(rows.shape[0], 1, -1))


def _kv_plan(
    workspace: Workspace, rows: Tensor, site: str, split: bool
) -> _GatherPlan | Refusal:
    key = ("kv", tuple(rows.shape), rows.dtype, site, split, *plan_settings())
    plan = workspace.plans.get(key)
    if plan is None:
        call = Signature(
            "kv_gather", tuple(rows.shape), dtype_name(rows.dtype),
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
    refusal = _refusal(num_rows, local_row_bytes, row_bytes)
    if refusal:
        return refusal
    world_size = workspace.memory.world_size
    kernel = cuda_layout.gather_kernel(world_size, num_rows * local_row_bytes)
    if split:
        kernel = cuda_layout.SLICES  # packets are sent and awaited by one launch
    capacity = config.max_tokens * local_row_bytes
    if kernel == cuda_layout.PACKETS:
        capacity = min(capacity, cuda_layout.packet_bytes(world_size))
    call = replace(call, route=cuda_layout.GATHER_KERNELS[kernel])
    layout = cuda_layout.gather_arena(kernel, world_size, capacity)
    tables = []
    for publish, wait in ((True, False), (False, True)) if split else ((True, True),):
        words = cuda_layout.gather_words(op, kernel, total_heads, layout, publish, wait)
        table = launch_table(workspace, layout, call, words)
        if isinstance(table, Refusal):
            return table
        tables.append(table)
    return _GatherPlan(tables[-1], shape, tables[0] if split else None)


def _refusal(num_rows: int, local_row_bytes: int, row_bytes: int) -> Refusal | None:
    return (
        row_refusal(row_bytes)
        or capability.rows_refusal(num_rows, config.max_tokens)
        or size_refusal(num_rows * local_row_bytes // CHUNK_BYTES, CHUNK_BYTES)
    )
