"""Arguments that the graph ops accept, and shapes of their results.

For fakes and calls alike. Sizes may be symbols; what is known to be wrong is refused.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

SCATTER_MODES = ("heads", "tokens", "none")
# Row masks are int32 in the kernels.
_MOST = (1 << 31) - 1


class MergeOptions(NamedTuple):
    """What a2a_lse_reduce does with its tensors, as ``ops.py`` explains; equal on all
    ranks. Sizes may be symbols.
    """

    scatter: str = "heads"
    split_sizes: tuple[int, ...] = ()
    is_lse_base_on_e: bool = True
    return_lse: bool = False
    full_lse: bool = False
    output_dtype: torch.dtype | None = None

    def words(self, payload: torch.dtype) -> str:
        """For a signature: what peers must have chosen alike.

        Args:
            payload: dtype of the partial outputs.
        """
        said = [
            f"scatter={self.scatter}",
            f"base={'e' if self.is_lse_base_on_e else 2}",
        ]
        if self.split_sizes:
            said.append(f"split_sizes={list(self.split_sizes)}")
        if self.return_lse:
            said.append("full_lse" if self.full_lse else "lse")
        if self.output_dtype not in (None, payload):
            said.append(f"output={str(self.output_dtype).removeprefix('torch.')}")
        return " ".join(said)

    def shape(self, partial_lse: Tensor, world_size: int, rank: int) -> tuple[int, int]:
        """Leading dims ``(tokens, heads)`` of a rank's part of the merged result."""
        tokens, heads = partial_lse.shape
        splits = self.split_sizes
        if self.scatter == "heads":
            heads = splits[rank] if splits else heads // world_size
        elif self.scatter == "tokens":
            tokens = splits[rank] if splits else tokens // world_size
        return tokens, heads

    def lse_shape(
        self, partial_lse: Tensor, world_size: int, rank: int
    ) -> tuple[int, ...]:
        """Shape of the merged LSE that a rank gets; ``(0,)`` if it asked for none."""
        if not self.return_lse:
            return (0,)
        if self.full_lse:
            return tuple(partial_lse.shape)
        return self.shape(partial_lse, world_size, rank)

    def results(
        self, partial_output: Tensor, partial_lse: Tensor, world_size: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        """Tensors for a rank's merged output and LSE, on the device of the partials."""
        shape = (*self.shape(partial_lse, world_size, rank), partial_output.shape[2])
        output = partial_output.new_empty(
            shape, dtype=self.output_dtype or partial_output.dtype
        )
        lse_shape = self.lse_shape(partial_lse, world_size, rank)
        return output, partial_lse.new_empty(lse_shape, dtype=torch.float32)


DEFAULT_MERGE = MergeOptions()


def check_devices(op: str, **tensors: Tensor | None) -> None:
    """Refuse meta tensors beside others: a call of ``op`` with one runs the op's fake,
    and what that returns for tensors with data holds none.

    Raises:
        ValueError: names the tensors' devices.
    """
    devices = {name: x.device for name, x in tensors.items() if x is not None}
    kinds = {device.type for device in devices.values()}
    if "meta" in kinds and len(kinds) > 1:
        got = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(
            f"{op}: expected tensors with data, or all of them on meta, got {got}; "
            "put all of them where data is, or all on meta"
        )


def gathered_heads(query: Tensor, world_size: int, padded_heads: int) -> int:
    """Heads of q_gather's result.

    Raises:
        ValueError: ``padded_heads`` cannot hold the heads of all ranks.
    """
    heads = query.shape[1] * world_size
    if padded_heads and padded_heads < heads:
        raise ValueError(
            f"q_gather: expected padded_heads of 0 or at least {heads}, got "
            f"{padded_heads}"
        )
    return padded_heads or heads


def check_a2a_lse_reduce(
    partial_output: Tensor,
    partial_lse: Tensor,
    options: MergeOptions,
    seq_lens: Tensor | None,
    query_start_loc: Tensor | None,
    world_size: int,
) -> None:
    """Check arguments of a2a_lse_reduce that no rank could serve.

    Raises:
        ValueError: a wrong number of dims, dtype, scatter mode or split, options that
            contradict each other, or sizes that are known to differ; with what was
            expected and what was given.
    """
    if partial_output.dim() != 3:
        _refuse("partial_output [T, H, D]", f"{partial_output.dim()} dims")
    if not partial_output.dtype.is_floating_point:
        _refuse("a floating-point partial_output", f"{partial_output.dtype}")
    if partial_lse.dim() != 2:
        _refuse("partial_lse [T, H]", f"{partial_lse.dim()} dims")
    if not partial_lse.dtype.is_floating_point:
        _refuse("a floating-point partial_lse", f"{partial_lse.dtype}")
    if partial_output.device != partial_lse.device:
        _refuse(
            f"partial_lse on {partial_output.device}, where partial_output is",
            f"{partial_lse.device}",
        )
    for dim, name in enumerate("TH"):
        of_output, of_lse = partial_output.shape[dim], partial_lse.shape[dim]
        if _differ(of_output, of_lse):
            _refuse(
                f"equal {name} in partial_output and partial_lse",
                f"{of_output} and {of_lse}",
            )
    if options.full_lse and not options.return_lse:
        _refuse(
            "return_lse=True beside full_lse=True, which says how much of the merged "
            "LSE to return",
            "return_lse=False; set it, or leave full_lse out",
        )
    scatter, split_sizes = options.scatter, options.split_sizes
    if scatter not in SCATTER_MODES:
        _refuse(f"scatter in {SCATTER_MODES}", repr(scatter))
    if split_sizes and (scatter == "none" or len(split_sizes) != world_size):
        _refuse(
            f"no split_sizes, or one per rank ({world_size}) with scatter 'heads' or "
            "'tokens'",
            f"{len(split_sizes)} with {scatter!r}",
        )
    if any(isinstance(size, int) and size < 0 for size in split_sizes):
        _refuse("split_sizes of 0 or more", f"{list(split_sizes)}")
    if (seq_lens is None) != (query_start_loc is None):
        _refuse("both of seq_lens and query_start_loc or neither", "one of them")
    check_lengths(seq_lens, query_start_loc)
    if options.output_dtype is not None and not options.output_dtype.is_floating_point:
        _refuse("a floating-point output_dtype", f"{options.output_dtype}")
    if scatter == "none":
        return
    total = partial_output.shape[1 if scatter == "heads" else 0]
    if split_sizes:
        if _differ(sum(split_sizes), total):
            _refuse(f"split_sizes that add up to {total}", f"{sum(split_sizes)}")
    elif _differ(total % world_size, 0):
        _refuse(
            f"{scatter} that split evenly over {world_size} ranks, or split_sizes",
            f"{total} {scatter}",
        )


def check_lengths(seq_lens: Tensor | None, query_start_loc: Tensor | None) -> None:
    """Check the two tensors of a row mask against each other; their batch may change
    from call to call.

    On CPUs their values too. On GPUs that would wait for the device, so a wrong mask
    gives wrong rows there.

    Raises:
        ValueError: they are not ``[B]`` and ``[B + 1]``, or do not hold integers, or
            hold lengths below 0 or rows that do not ascend.
    """
    if seq_lens is None or query_start_loc is None:
        return
    for name, lengths in (("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        if lengths.dim() != 1:
            _refuse(f"{name} with 1 dim", f"{lengths.dim()} dims")
        if lengths.dtype.is_floating_point or lengths.dtype.is_complex:
            _refuse(f"{name} of integers", f"{lengths.dtype}")
    batch, starts = seq_lens.shape[0], query_start_loc.shape[0]
    if _differ(starts, batch + 1):
        _refuse(
            "query_start_loc [B + 1] and seq_lens [B]",
            f"{starts} entries and {batch}",
        )
    if _has_data(seq_lens):
        held = seq_lens.tolist()
        i = _beyond(held)
        if i is not None:
            _refuse(
                f"seq_lens from 0 to {_MOST}, the tokens of each sequence on this rank",
                f"{held[i]} at [{i}]",
            )
    if _has_data(query_start_loc):
        rows = query_start_loc.tolist()
        ascends = rows == sorted(rows)
        if ascends and rows[0] >= 0 and rows[-1] <= _MOST:
            return
        advice = "the first row of each sequence and, last, of the padding"
        i = _beyond(rows)
        if i is not None:
            _refuse(
                f"query_start_loc from 0 to {_MOST}, {advice}", f"{rows[i]} at [{i}]"
            )
        if not ascends:
            i = next(i for i in range(1, len(rows)) if rows[i] < rows[i - 1])
            _refuse(
                f"query_start_loc that never descends, {advice}",
                f"{rows[i]} at [{i}] behind {rows[i - 1]}; repeat the last row for "
                "sequences that only pad the batch",
            )


def _has_data(x: Tensor) -> bool:
    """Whether the values can be looked at without waiting for a device."""
    if type(x) is Tensor or not x.is_cpu:
        return x.is_cpu
    from torch._subclasses.fake_tensor import is_fake

    return not is_fake(x)


def _beyond(values: list[int]) -> int | None:
    """The first place of a value that no row mask can hold."""
    if not values or (min(values) >= 0 and max(values) <= _MOST):
        return None
    return next(i for i, value in enumerate(values) if not 0 <= value <= _MOST)


def _refuse(expected: str, got: str) -> NoReturn:
    raise ValueError(f"a2a_lse_reduce: expected {expected}, got {got}")


def _differ(size: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two sizes are known to differ; symbols are left to the run, unguarded."""
    if isinstance(size, int) and isinstance(other, int):
        return size != other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size != other)
