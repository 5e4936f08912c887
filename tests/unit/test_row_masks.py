"""Lengths that mask rows: what they may hold, and what is said of the rest."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dcp_inductor import geometry


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ([1, 0], [0, 3, 6]),
        ([1, 0, 0], [0, 3, 3, 3]),  # a padded batch
        ([1], [2, 4]),
        ([1], [0, 600]),  # beyond the rows
        ([], [0]),
        ([(1 << 31) - 1], [0, (1 << 31) - 1]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_that_ascend_are_taken(
    lengths: list[int], starts: list[int], dtype: torch.dtype
) -> None:
    geometry.check_lengths(
        torch.tensor(lengths, dtype=dtype), torch.tensor(starts, dtype=dtype)
    )


@pytest.mark.parametrize(
    ("lengths", "starts", "message"),
    [
        ([1, 0], [6, 3, 0], r"never descends.* got 3 at \[1\] behind 6; repeat"),
        ([1, 0, 1], [0, 5, 2, 6], r"never descends.* got 2 at \[2\] behind 5"),
        ([1, 1], [-2, 2, 6], r"query_start_loc from 0 to 2147483647.* -2 at \[0\]"),
        ([1, 1], [0, 3, 1 << 33], r"query_start_loc from 0 .* 8589934592 at \[2\]"),
        ([1, -5], [0, 3, 6], r"seq_lens from 0 to 2147483647.* got -5 at \[1\]"),
        ([1 << 32, 1], [0, 3, 6], r"seq_lens from 0 .* got 4294967296 at \[0\]"),
    ],
)
def test_other_rows_are_refused(
    lengths: list[int], starts: list[int], message: str
) -> None:
    given = torch.tensor(lengths), torch.tensor(starts)
    with pytest.raises(ValueError, match=message):
        geometry.check_lengths(*given)
    # A subclass holds data as well.
    parameters = [torch.nn.Parameter(x, requires_grad=False) for x in given]
    with pytest.raises(ValueError, match=message):
        geometry.check_lengths(*parameters)
    # Tensors without data cannot be looked at.
    geometry.check_lengths(*(x.to("meta") for x in given))
    with FakeTensorMode() as mode:
        geometry.check_lengths(*map(mode.from_tensor, given))
