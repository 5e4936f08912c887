"""Bodies of the graph ops: check arguments, pick the direct exchange or the reference, run it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dcp_inductor import reference


def _refuse_autograd(op: str, *inputs: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise RuntimeError(
            f"{op}: expected inputs without gradient, got one that requires grad; the op has no "
            "backward. Run it under torch.no_grad() or torch.inference_mode()"
        )


def q_gather(query: Tensor, group_name: str, padded_heads: int, site: str) -> Tensor:
    """``[T, h, D]`` of every rank to ``[T, H or padded_heads, D]``."""
    _refuse_autograd("q_gather", query)
    return reference.q_gather(query, group_name, padded_heads)


def kv_gather(rows: Tensor, group_name: str, site: str) -> Tensor:
    """``[t, ...]`` of every rank to ``[N * t, ...]``."""
    _refuse_autograd("kv_gather", rows)
    return reference.kv_gather(rows, group_name)


def a2a_lse_reduce(
    partial_output: Tensor,
    partial_lse: Tensor,
    group_name: str,
    *,
    scatter: str = "heads",
    split_sizes: Sequence[int] = (),
    is_lse_base_on_e: bool = True,
    return_lse: bool = False,
    full_lse: bool = False,
    output_dtype: torch.dtype | None = None,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    site: str = "",
) -> tuple[Tensor, Tensor]:
    """Merged output and LSE of the partial results of every rank."""
    _refuse_autograd("a2a_lse_reduce", partial_output, partial_lse)
    return reference.a2a_lse_reduce(
        partial_output, partial_lse, group_name, scatter=scatter, split_sizes=split_sizes,
        is_lse_base_on_e=is_lse_base_on_e, return_lse=return_lse, full_lse=full_lse,
        output_dtype=output_dtype, seq_lens=seq_lens, query_start_loc=query_start_loc,
    )  # fmt: skip
