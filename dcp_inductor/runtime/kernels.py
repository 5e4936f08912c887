"""Bodies of the graph ops: make the direct exchange, or take the reference.

Which of the two is decided from what is equal on all ranks: the group's vote at set-up,
the configuration, and the call's shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from dcp_inductor import config, geometry, groups, reference
from dcp_inductor.capability import Refusal
from dcp_inductor.geometry import MergeOptions
from dcp_inductor.runtime import (
    collective_combine,
    cuda_exchange,
    cuda_registry,
    fallback,
    registry,
    shm_exchange,
    turns,
    ubatch,
)
from dcp_inductor.runtime.workspace import broken_off

_T = TypeVar("_T")

# Per device type, the module with the direct exchanges: functions named like the ops,
# which take the group's name first and return the op's result, or a Refusal that is the
# same on all ranks.
_DIRECT: dict[str, ModuleType] = {"cpu": shm_exchange, "cuda": cuda_exchange}


def q_gather(query: Tensor, group_name: str, padded_heads: int, site: str) -> Tensor:
    """``[T, h, D]`` of every rank to ``[T, H or padded_heads, D]``.

    Raises:
        ValueError: ``query`` or ``padded_heads`` does not fit the op.
    """
    return _gather_query("q_gather", query, group_name, padded_heads, site)


def q_gather_view(
    query: Tensor, group_name: str, padded_heads: int, site: str
) -> Tensor:
    """:func:`q_gather`; the result may hold only until the group's next call of this,
    before which a merge of the group must come.

    Raises:
        ValueError: ``query`` or ``padded_heads`` does not fit the op.
    """
    return _gather_query("q_gather_view", query, group_name, padded_heads, site)


def _gather_query(
    op: str, query: Tensor, group_name: str, padded_heads: int, site: str
) -> Tensor:
    if query.requires_grad:
        _refuse_autograd("q_gather")
    if query.dim() != 3:
        raise ValueError(f"q_gather: expected query [T, h, D], got {query.dim()} dims")
    if query.numel() == 0:
        _agree_on_no_rows("q_gather", "direct_query_gather", query, group_name, site)
        heads = geometry.gathered_heads(query, groups.size(group_name), padded_heads)
        padding = query.new_empty((query.shape[0], heads, query.shape[2]))
        return padding.zero_() if padding.numel() else padding
    mode = config.read("direct_query_gather")
    if mode != "disable":
        direct = _direct(query)
        result = (
            direct
            if isinstance(direct, Refusal)
            else getattr(direct, op)(group_name, query, padded_heads, site)
        )
        if not isinstance(result, Refusal):
            return result
        fallback.take("q_gather", "direct_query_gather", mode, group_name, result)
    return _collectives(
        lambda: reference.q_gather(query, group_name, padded_heads),
        "q_gather", query, group_name, site, mode,
    )  # fmt: skip


def kv_gather(rows: Tensor, group_name: str, site: str) -> Tensor:
    """``[t, ...]`` of every rank to ``[N * t, ...]``.

    Raises:
        ValueError: ``rows`` has no dims.
    """
    if rows.requires_grad:
        _refuse_autograd("kv_gather")
    if rows.dim() == 0:
        raise ValueError("kv_gather: expected rows [t, ...], got 0 dims")
    if rows.numel() == 0:
        _agree_on_no_rows("kv_gather", "direct_kv_gather", rows, group_name, site)
        return rows.new_empty(
            (groups.size(group_name) * rows.shape[0], *rows.shape[1:])
        )
    mode = config.read("direct_kv_gather")
    if mode != "disable":
        direct = _direct(rows)
        result = (
            direct
            if isinstance(direct, Refusal)
            else direct.kv_gather(group_name, rows, site)
        )
        if not isinstance(result, Refusal):
            return result
        fallback.take("kv_gather", "direct_kv_gather", mode, group_name, result)
    return _collectives(
        lambda: reference.kv_gather(rows, group_name),
        "kv_gather", rows, group_name, site, mode,
    )  # fmt: skip


def kv_gather_publish(rows: Tensor, group_name: str, site: str) -> None:
    """Send ``rows`` ahead of the :func:`kv_gather` of them that comes next.

    Nothing happens where that cannot be done; the gather then does all of it, and
    accounts for the reason.

    Raises:
        ValueError: ``rows`` has no dims.
    """
    if rows.requires_grad:
        _refuse_autograd("kv_gather_publish")
    if rows.dim() == 0:
        raise ValueError("kv_gather_publish: expected rows [t, ...], got 0 dims")
    if rows.numel() == 0 or config.read("direct_kv_gather") == "disable":
        return
    publish = getattr(_direct(rows), "kv_gather_publish", None)
    if publish is not None:
        publish(group_name, rows, site)


def a2a_lse_reduce(
    partial_output: Tensor,
    partial_lse: Tensor,
    group_name: str,
    options: MergeOptions,
    seq_lens: Tensor | None,
    query_start_loc: Tensor | None,
    site: str,
) -> tuple[Tensor, Tensor]:
    """Merged output and LSE of ``[T, H, D]`` and ``[T, H]`` of every rank.

    Raises:
        ValueError: arguments that no rank could serve.
    """
    if partial_output.requires_grad or partial_lse.requires_grad:
        _refuse_autograd("a2a_lse_reduce")
    if partial_lse.numel() == 0:
        _agree_on_no_rows(
            "a2a_lse_reduce", "direct_combine", partial_output, group_name, site
        )
        return _no_rows(partial_output, partial_lse, group_name, options)
    mode = config.read("direct_combine")
    arguments = partial_output, partial_lse, group_name, options
    if mode != "disable":
        direct = _direct(partial_output)
        result = (
            direct
            if isinstance(direct, Refusal)
            else direct.a2a_lse_reduce(*arguments, seq_lens, query_start_loc, site)
        )
        if not isinstance(result, Refusal):
            return result
        fallback.take("a2a_lse_reduce", "direct_combine", mode, group_name, result)
    merge = (
        collective_combine.packed_all_to_all
        if partial_output.is_cuda
        else reference.a2a_lse_reduce
    )
    return _collectives(
        lambda: merge(*arguments, seq_lens, query_start_loc),
        "a2a_lse_reduce", partial_output, group_name, site, mode,
    )  # fmt: skip


def _collectives(
    make: Callable[[], _T], op: str, x: Tensor, group_name: str, site: str, mode: str
) -> _T:
    """Make the collectives of a call of ``op``, in the turn of its micro-batch."""
    try:
        if _take_turns(group_name):
            with turns.take(groups.resolve(group_name), op, site):
                return make()
        return make()
    except BaseException as error:
        # The ranks have agreed on the call over shared memory: peers go on from it.
        if mode != "disable" and x.device.type == "cpu":
            registry.break_off(group_name, broken_off(op, error))
        raise


def _take_turns(group_name: str) -> bool:
    """Whether threads may come with collectives of the group; alike on all ranks."""
    if ubatch.is_inside() or config.read("num_ubatches") > 1:
        return True
    held = registry.num_ubatches(group_name), cuda_registry.num_ubatches(group_name)
    return max(held) > 1


def _agree_on_no_rows(
    op: str, knob: str, x: Tensor, group_name: str, site: str
) -> None:
    """Meet the peers of a call without rows, which has nothing to exchange.

    A rank that skipped it would meet a peer that has rows in the call after it, and
    take that peer's rows for those of its own call.
    """
    direct = _direct(x)
    if not isinstance(direct, Refusal) and config.read(knob) != "disable":
        direct.agree_on_no_rows(op, group_name, x, site)


def _direct(x: Tensor) -> ModuleType | Refusal:
    kind = x.device.type
    module = _DIRECT.get(kind)
    return module or Refusal("device", f"no direct exchange for tensors on '{kind}'")


def _refuse_autograd(op: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{op}: expected inputs without gradient, got one that requires grad; the "
            "op has no "
            "backward. Run it under torch.no_grad() or torch.inference_mode()"
        )


def _no_rows(
    partial_output: Tensor, partial_lse: Tensor, group_name: str, options: MergeOptions
) -> tuple[Tensor, Tensor]:
    """The result of a call without rows."""
    group = groups.resolve(group_name)
    size, rank = group.size(), group.rank()
    geometry.check_a2a_lse_reduce(
        partial_output, partial_lse, options, None, None, size
    )
    return options.results(partial_output, partial_lse, size, rank)
