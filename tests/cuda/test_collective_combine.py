"""The combine over collectives on GPUs: compiled kernels against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dcp_inductor import config, ops, reference
from dcp_inductor.geometry import MergeOptions
from dcp_inductor.runtime import collective_combine
from tests.cuda import worlds
from tests.cuda.test_exchange import close, oracle, with_empty_shards
from tests.cuda.worlds import TOKEN, draw
from tests.support import fallbacks

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]

# tokens, heads a rank, D, dtype, LSE dtype, scatter, uneven, base e, output dtype
CASES = [
    (1, 4, 512, torch.bfloat16, torch.float32, "heads", False, True, None),
    (5, 16, 512, torch.bfloat16, torch.bfloat16, "heads", False, False, None),
    (3, 2, 72, torch.float16, torch.float16, "heads", True, True, None),
    (8, 3, 64, torch.float32, torch.float64, "tokens", False, True, None),
    (9, 2, 40, torch.bfloat16, torch.float32, "tokens", True, True, torch.float32),
    (4, 2, 128, torch.bfloat16, torch.float32, "none", False, True, torch.float32),
    (300, 16, 512, torch.bfloat16, torch.float32, "heads", False, True, None),
]


def nccl_group(size: int) -> dist.ProcessGroup:
    """A group of all ranks, each of which has a GPU of its own."""
    return dist.new_group(list(range(size)), backend="nccl")


def cases(rank: int, size: int, nccl: bool) -> None:
    name = nccl_group(size).group_name if nccl else worlds.name()
    for i, case in enumerate(CASES):
        tokens, heads, dim, dtype, lse_dtype, scatter, uneven, base_e, to = case
        total = heads * size
        outputs = draw(i, size, tokens, total, dim, dtype=dtype)
        lses = with_empty_shards(4 * draw(50 + i, size, tokens, total)).to(lse_dtype)
        outputs[~lses.isfinite()] = torch.nan
        sizes = [(total if scatter == "heads" else tokens) // size] * size
        if uneven:
            sizes[0] = 0
            sizes[-1] = (total if scatter == "heads" else tokens) - sum(sizes[:-1])
        # Heads outside, as attention kernels leave them.
        strided = outputs[rank].transpose(0, 1).contiguous().transpose(0, 1)
        options = MergeOptions(
            scatter, tuple(sizes) if uneven else (), base_e, True, False, to
        )
        arguments = strided, lses[rank], name
        got, lse = collective_combine.packed_all_to_all(*arguments, options)
        exact, exact_lse = oracle(
            outputs, lses, scatter, sizes if uneven else None, rank, base_e
        )
        close(got, exact, to or dtype)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
        whole = oracle(outputs, lses, "none", None, rank, base_e)[1]
        options = options._replace(full_lse=True, output_dtype=None)
        full = collective_combine.packed_all_to_all(*arguments, options)[1]
        torch.testing.assert_close(full.double(), whole, rtol=1e-5, atol=1e-4)
        # gloo adds neither bf16 on GPUs nor scatters; NCCL does.
        if nccl and not uneven:
            got, full = collective_combine.corrected_reduce(*arguments, options)
            bound = 2 * size * torch.finfo(dtype).eps
            torch.testing.assert_close(got.double(), exact, rtol=bound, atol=bound)
            torch.testing.assert_close(full.double(), whole, rtol=1e-5, atol=1e-4)


def masks(rank: int, size: int, nccl: bool) -> None:
    """Row masks, more sequences than one block holds."""
    name = nccl_group(size).group_name if nccl else worlds.name()
    tokens, heads, sequences = 310, size, 300
    outputs, lses = draw(1, size, tokens, heads, 64), draw(2, size, tokens, heads)
    lengths = (torch.arange(sequences, device="cuda") % (rank + 2)).int()
    starts = torch.arange(sequences + 1, device="cuda", dtype=torch.int64)
    starts[150:] += 1  # one sequence of two rows, and padding behind
    arguments = (
        outputs[rank], lses[rank], name, MergeOptions(return_lse=True), lengths, starts,
    )  # fmt: skip
    got = collective_combine.packed_all_to_all(*arguments)
    wanted = reference.a2a_lse_reduce(*arguments)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert not got[0][-9:].any()


def too_many_rows(rank: int, size: int) -> dict[str, int]:
    """A call that the workspace cannot take runs on the packed exchange."""
    outputs = draw(3, size, 4, size, 64, dtype=torch.bfloat16)
    lses = draw(4, size, 4, size)
    with config.patch(max_tokens=2):
        got = ops.a2a_lse_reduce(outputs[rank], lses[rank], TOKEN, worlds.name())[0]
    close(got, oracle(outputs, lses, "heads", None, rank)[0], torch.bfloat16)
    return fallbacks()


@pytest.mark.parametrize("size", [2, 4])
def test_packed_exchange_equals_the_oracle(size: int) -> None:
    worlds.run(size, cases, False, limit_s=300)


def test_row_masks_are_read_in_the_kernel() -> None:
    worlds.run(2, masks, False)


def test_calls_beyond_the_workspace_are_packed() -> None:
    for counts in worlds.run(2, too_many_rows):
        assert counts == {"fallback.rows": 1}


@pytest.mark.multi_gpu
def test_nccl_carries_the_packed_exchange() -> None:
    size = torch.cuda.device_count()
    worlds.run(size, cases, True, limit_s=300)
    worlds.run(size, masks, True)
