"""Every graph op passes torch's own checks; its fake has the strides of the result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dcp_inductor import ops
from tests.support import fallbacks, group_name, world

TOKEN = torch.empty(0)
OPCHECKS = (
    "test_schema", "test_autograd_registration", "test_faketensor",
    "test_aot_dispatch_dynamic",
)  # fmt: skip


def calls(name: str, size: int) -> Iterator[tuple[Any, tuple, dict[str, Any]]]:
    """(op, arguments, options) that cover the options of every graph op."""
    for dtype in (torch.float32, torch.bfloat16):
        query = torch.randn(3, 2, 8).to(dtype)
        for options in ({}, {"padded_heads": 2 * size + 3}, {"site": "s"}):
            yield ops.q_gather, (query, TOKEN, name), options
            yield ops.q_gather_view, (query, TOKEN, name), options
        yield ops.q_gather, (query.transpose(0, 1), TOKEN, name), {}
        yield ops.kv_gather, (query, TOKEN, name), {}
        yield ops.kv_gather, (query[:, 0].t(), TOKEN, name), {}
        yield ops.kv_gather, (query[:, 0, 0] > 0, TOKEN, name), {}
        yield ops.kv_gather_publish, (query, TOKEN, name), {"site": "s"}
        tokens = 2 * size
        head_major = torch.randn(2 * size, tokens, 8).to(dtype).transpose(0, 1)
        lse = torch.randn(2 * size, tokens).t()
        uneven = [2] * size
        uneven[0], uneven[-1] = 1, 3
        lengths = {
            "seq_lens": torch.tensor([1, 0]),
            "query_start_loc": torch.tensor([0, 1, tokens - 1]),
        }
        for options in (
            {},
            {"scatter": "tokens"},
            {"scatter": "none", "return_lse": True},
            {"split_sizes": uneven, "is_lse_base_on_e": False},
            {"scatter": "tokens", "split_sizes": uneven, "return_lse": True},
            {"return_lse": True, "full_lse": True, "output_dtype": torch.float32},
            lengths,
        ):
            arguments = (head_major, lse, TOKEN, name)
            yield ops.a2a_lse_reduce, arguments, options
    x = torch.randn(3, 2)
    yield ops.order_after, (x.t(), TOKEN), {}
    yield ops.order_token, (x, TOKEN), {}
    yield ops.site_guard, (TOKEN, name, "a site", "a reason"), {}


def same_metadata(real: Any, fake: Any) -> None:
    if not isinstance(real, tuple):
        real, fake = (real,), (fake,)
    assert len(real) == len(fake)
    for x, y in zip(real, fake, strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        assert x.stride() == y.stride(), (x.shape, x.stride(), y.stride())
        assert x.storage_offset() == y.storage_offset()


def fakes_are_real(rank: int, size: int) -> list[str]:
    covered = set()
    for op, arguments, options in calls(group_name(), size):
        real = op(*arguments, **options)
        with FakeTensorMode() as mode:
            faked = [
                mode.from_tensor(a) if isinstance(a, torch.Tensor) else a
                for a in arguments
            ]
            kwargs = {
                key: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a
                for key, a in options.items()
            }
            fake = op(*faked, **kwargs)
        same_metadata(real, fake)
        covered.add(op.name())
    assert not fallbacks()
    return sorted(covered)


def graph_ops() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    ours = [name for name in names if name.startswith("dcp_inductor::")]
    return sorted(name for name in ours if not name.startswith("dcp_inductor::_"))


def opchecks(rank: int, size: int) -> int:
    count = 0
    for op, arguments, options in calls(group_name(), size):
        # What aliases an argument cannot be traced, and is put behind the tracing.
        skipped = {"test_aot_dispatch_dynamic"} if op is ops.q_gather_view else set()
        torch.library.opcheck(
            op, arguments, options, test_utils=tuple({*OPCHECKS} - skipped)
        )
        count += 1
    return count


def test_fake_results_have_the_metadata_of_real_ones() -> None:
    assert world(2).run(fakes_are_real)[0] == graph_ops()


def test_opcheck_passes_for_every_graph_op() -> None:
    assert world(2).run(opchecks, limit_s=240)[0] > 30


@pytest.mark.parametrize("op", graph_ops())
def test_tags(op: str) -> None:
    tags = getattr(torch.ops.dcp_inductor, op.partition("::")[2]).default.tags
    assert torch.Tag.pt2_compliant_tag in tags
    assert torch.Tag.needs_fixed_stride_order in tags
