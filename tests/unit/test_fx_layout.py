"""Which part of a whole a tensor is: found by numbers, predicted for other numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcp_inductor.fx.layout import Layout, find_layout


def whole(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def equal(value: Tensor, wanted: Tensor) -> bool:
    return bool(torch.allclose(value, wanted, rtol=1e-9, atol=1e-9))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_even_share(dim: int, rank: int) -> None:
    x = whole(6, 4, 8)
    value = x.chunk(2, dim)[rank]
    layout = find_layout(value, x, 2, rank, equal)
    assert layout is not None
    # A share is told by the rank, not by where it starts, so that all ranks agree.
    assert (layout.dim, layout.start, layout.length) == (dim, None, None)


def test_part_that_is_no_even_share() -> None:
    x = whole(6, 5, 8)
    layout = find_layout(x[:, 1:4], x, 2, 0, equal)
    assert layout is not None
    assert (layout.dim, layout.start, layout.length) == (1, 1, 3)


def test_share_of_another_rank_is_a_fixed_part() -> None:
    x = whole(6, 4, 8)
    layout = find_layout(x.chunk(2, 1)[0], x, 2, 1, equal)
    assert layout is not None
    assert (layout.dim, layout.start, layout.length) == (1, 0, 2)


def test_the_whole_in_any_order_and_shape() -> None:
    x = whole(3, 4, 5)
    for order in itertools.permutations(range(3)):
        value = x.permute(order).reshape(3 * 4, 5) if order == (0, 1, 2) else None
        value = x.permute(order) if value is None else value
        layout = find_layout(value, x, 2, 0, equal)
        assert layout is not None
        assert (layout.dim, layout.order) == (None, order)


def test_what_is_no_part() -> None:
    x = whole(6, 4, 8)
    assert find_layout(x * 1.001, x, 2, 0, equal) is None
    assert find_layout(x.flip(0), x, 2, 0, equal) is None
    assert find_layout(x[::2], x, 2, 0, equal) is None
    assert find_layout(x[:0], x, 2, 0, equal) is None
    assert find_layout(torch.cat([x, x]), x, 2, 0, equal) is None


def test_one_wrong_element_shows() -> None:
    x = whole(6, 4, 8)
    value = x.clone()
    value[3, 2, 1], value[4, 1, 7] = x[4, 1, 7], x[3, 2, 1]  # the sum stays the same
    assert find_layout(value, x, 2, 0, equal) is None


@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
    order=st.permutations(range(3)),
    dim=st.sampled_from([None, 0, 1, 2]),
    rank=st.integers(0, 1),
)
def test_layout_predicts_other_contents(sizes, order, dim, rank) -> None:
    """Found on one draw, it holds on another: what a second trial relies on."""
    shape = [n * 2 for n in sizes]

    def part(x: Tensor) -> Tensor:
        share = x if dim is None else x.chunk(2, dim)[rank]
        return share.permute(order).contiguous()

    first, second = whole(*shape, seed=1), whole(*shape, seed=2)
    value = part(first)
    layout = find_layout(value, first, 2, rank, equal)
    assert layout is not None
    predicted = layout.apply(second, value.shape, 2, rank)
    assert predicted is not None
    assert equal(part(second), predicted)


def test_layout_that_cannot_fill_a_shape() -> None:
    assert Layout(1, 0, 3, (0, 1)).apply(whole(4, 5), torch.Size([4, 4]), 2, 0) is None
