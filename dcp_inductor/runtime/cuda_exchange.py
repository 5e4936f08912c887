"""Direct exchanges over symmetric memory, for CUDA tensors.

What a call needs beyond its tensors is worked out once per shape and options and kept
as a plan, so that a call in the steady state is a few look-ups and one launch. A call
is refused by its shapes and dtypes alone, hence alike on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dcp_inductor import capability, config, geometry
from dcp_inductor.capability import Refusal
from dcp_inductor.geometry import MergeOptions
from dcp_inductor.runtime import cuda_launch_ops, cuda_layout, cuda_registry
from dcp_inductor.runtime.cuda_gather import (
    agree_on_no_rows,
    kv_gather,
    kv_gather_publish,
    q_gather,
    q_gather_view,
)
from dcp_inductor.runtime.cuda_plan import (
    aligned_rows,
    dtype_name,
    launch_table,
    plan_settings,
    row_refusal,
    size_refusal,
)
from dcp_inductor.runtime.cuda_workspace import Workspace
from dcp_inductor.runtime.signature import Signature

__all__ = [
    "a2a_lse_reduce",
    "agree_on_no_rows",
    "kv_gather",
    "kv_gather_publish",
    "q_gather",
    "q_gather_view",
]

_UNIT_BYTES = 512


@dataclass(frozen=True)
class _CombinePlan:
    table: Tensor
    shape: tuple[int, int, int]
    lse_shape: tuple[int, ...]
    output_dtype: torch.dtype


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
    workspace = cuda_registry.workspace_for(group_name, partial_output.device)
    if isinstance(workspace, Refusal):
        return workspace
    workspace.begin()
    workspace.refuse_unfinished("a2a_lse_reduce")
    key = (
        tuple(partial_output.shape), partial_output.dtype, tuple(partial_lse.shape),
        partial_lse.dtype, partial_lse.device, options, seq_lens is None,
        query_start_loc is None, site, *plan_settings(),
    )  # fmt: skip
    plan = workspace.plans.get(key)
    if plan is None:
        geometry.check_a2a_lse_reduce(
            partial_output, partial_lse, options, seq_lens, query_start_loc,
            workspace.memory.world_size,
        )  # fmt: skip
        plan = _plan_combine(workspace, partial_output, partial_lse, options, site)
        if isinstance(plan, Refusal):
            return plan
        workspace.plans[key] = plan
    geometry.check_lengths(seq_lens, query_start_loc)
    output = partial_output.new_empty(plan.shape, dtype=plan.output_dtype)
    lse = partial_output.new_empty(plan.lse_shape, dtype=torch.float32)
    cuda_launch_ops.symm_a2a_lse_reduce(
        aligned_rows(partial_output), partial_lse,
        _as_lengths(seq_lens, output.device),
        _as_lengths(query_start_loc, output.device),
        output, lse if options.return_lse else None, options.full_lse, plan.table,
    )  # fmt: skip
    workspace.view_unmerged = False
    return output, lse


def _as_lengths(lengths: Tensor | None, device: torch.device) -> Tensor | None:
    if lengths is None:
        return None
    return lengths.to(device=device, dtype=torch.int32).contiguous()


def _plan_combine(
    workspace: Workspace,
    partial_output: Tensor,
    partial_lse: Tensor,
    options: MergeOptions,
    site: str,
) -> _CombinePlan | Refusal:
    num_tokens, heads, head_dim = partial_output.shape
    payload, scatter = partial_output.dtype, options.scatter
    output_dtype = options.output_dtype or payload
    row_bytes = head_dim * partial_output.element_size()
    refusal = (
        capability.combine_refusal(payload, partial_lse.dtype, output_dtype)
        or capability.rows_refusal(num_tokens, config.max_tokens)
        or row_refusal(row_bytes)
        or size_refusal(num_tokens * heads * -(-row_bytes // _UNIT_BYTES), _UNIT_BYTES)
    )
    if refusal:
        return refusal
    memory = workspace.memory
    kernel = cuda_layout.combine_kernel(num_tokens * heads * row_bytes)
    call = Signature(
        "a2a_lse_reduce", (num_tokens, heads, head_dim), dtype_name(payload),
        options.words(payload), cuda_layout.COMBINE_KERNELS[kernel], site,
    )  # fmt: skip
    if scatter == "none":
        splits = [0] * memory.world_size
    elif options.split_sizes:
        splits = list(options.split_sizes)
    else:
        total = heads if scatter == "heads" else num_tokens
        splits = [total // memory.world_size] * memory.world_size
    # For as many tokens as this kernel ever gets, so that one arena serves every T.
    tokens = config.max_tokens
    if kernel == cuda_layout.MARKED:
        tokens = min(tokens, config.marked_bytes // (heads * row_bytes))
    rows = tokens * (max(splits) if scatter == "heads" else heads)
    if scatter == "tokens" and not options.split_sizes:
        rows = -(-tokens // memory.world_size) * heads
    layout = cuda_layout.combine_arena(
        kernel, memory.world_size, rows, row_bytes,
        config.max_tokens * heads if options.return_lse and options.full_lse else 0,
    )  # fmt: skip
    words = cuda_layout.combine_words(
        kernel, scatter, options.is_lse_base_on_e, splits, layout
    )
    table = launch_table(workspace, layout, call, words)
    if isinstance(table, Refusal):
        return table
    size, rank = memory.world_size, memory.rank
    shape = options.shape(partial_lse, size, rank)
    return _CombinePlan(
        table, (*shape, head_dim), options.lse_shape(partial_lse, size, rank),
        output_dtype,
    )  # fmt: skip
