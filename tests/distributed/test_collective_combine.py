"""The combine over collectives, without a GPU: what travels, and Triton's interpreter.

The kernels run in Triton's interpreter where Triton is installed; the packed exchange
itself is the same with and without it, so it is tested between CPU ranks.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcp_inductor import reference
from dcp_inductor.geometry import MergeOptions
from dcp_inductor.runtime import collective_combine
from tests.support import group_name, world


def partials(
    size: int, tokens: int, heads: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' outputs and LSEs, with every spelling of an empty shard."""
    generator = torch.Generator().manual_seed(tokens * heads + dim)
    outputs = torch.randn(size, tokens, heads, dim, generator=generator).to(dtype)
    lses = 4 * torch.randn(size, tokens, heads, generator=generator)
    lses[0, 0] = -torch.inf
    lses[-1, -1] = torch.nan
    lses[0, -1, -1] = torch.inf
    lses[:, 0, 1] = -torch.inf
    outputs[~lses.isfinite()] = torch.nan
    outputs[0, 1, 0, 0] = torch.nan  # of a shard that has weight
    return outputs, lses


CASES = [
    # tokens, heads a rank, D, dtype, scatter, splits, base e, full LSE, output dtype
    (3, 4, 64, torch.bfloat16, "heads", None, True, False, None),
    (5, 3, 72, torch.float16, "heads", "uneven", False, True, None),
    (6, 2, 8, torch.float32, "tokens", None, True, True, torch.bfloat16),
    (7, 2, 24, torch.bfloat16, "tokens", "uneven", True, False, torch.float32),
    (4, 1, 16, torch.float32, "none", None, False, True, None),
]


def compare(rank: int, size: int, exact: bool) -> None:
    """Every case against the reference; ``exact``: the same operations, same bits."""
    name = group_name()
    for case in CASES:
        tokens, heads, dim, dtype, scatter, splits, base_e, full, to = case
        outputs, lses = partials(size, tokens, heads * size, dim, dtype)
        sizes = []
        if splits:
            sizes = [0] * size
            total = heads * size if scatter == "heads" else tokens
            sizes[0], sizes[-1] = 1, total - 1
        elif scatter == "tokens" and tokens % size:
            continue
        wide = torch.zeros(tokens, 2 * dim, heads * size, dtype=dtype)
        strided = wide.transpose(1, 2)[..., ::2].copy_(outputs[rank])
        lengths = torch.tensor([0, 2, 1, 0, 3]) if rank else torch.tensor([1] * 5)
        starts = torch.tensor([0, 1, 2, 2, 3, max(tokens - 1, 3)])
        options = MergeOptions(scatter, tuple(sizes), base_e, True, full, to)
        for mask in ((None, None), (lengths, starts)):
            wanted = reference.a2a_lse_reduce(
                outputs[rank], lses[rank], name, options, *mask
            )
            got = collective_combine.packed_all_to_all(
                strided, lses[rank], name, options, *mask
            )
            tolerance = 0.0 if exact else 2 * torch.finfo(wanted[0].dtype).eps
            for one, other in zip(got, wanted, strict=True):
                assert one.dtype == other.dtype
                torch.testing.assert_close(
                    one, other, rtol=tolerance, atol=tolerance, equal_nan=True
                )
        if not exact and not splits:
            corrected(name, rank, outputs, lses, scatter, base_e)


def corrected(
    name: str,
    rank: int,
    outputs: torch.Tensor,
    lses: torch.Tensor,
    scatter: str,
    base_e: bool,
) -> None:
    """The second spelling, which rounds every rank's share in the partials' dtype."""
    outputs = outputs.float()
    options = MergeOptions(scatter, (), base_e, return_lse=True, full_lse=True)
    arguments = outputs[rank], lses[rank], name, options
    wanted = reference.a2a_lse_reduce(*arguments)
    got = collective_combine.corrected_reduce(*arguments)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("size", [2, 3])
def test_packed_parts_mean_the_reference(size: int) -> None:
    world(size).run(compare, True)


def test_wider_partials_take_the_reference() -> None:
    world(2).run(wide)


def wide(rank: int, size: int) -> None:
    outputs, lses = partials(size, 3, 2 * size, 8, torch.float64)
    got = collective_combine.packed_all_to_all(outputs[rank], lses[rank], group_name())
    wanted = reference.a2a_lse_reduce(outputs[rank], lses[rank], group_name())
    assert got[0].dtype == torch.float64
    torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=0, equal_nan=True)


INTERPRETED = """
import sys
import torch
from dcp_inductor.runtime import collective_combine
from dcp_inductor.triton import combine
from tests.distributed import test_collective_combine as tests
from tests.support import World

def main(rank, size):
    from dcp_inductor.triton import combine
    collective_combine._kernels = lambda x: combine
    tests.compare(rank, size, False)

if __name__ == "__main__":
    world = World(2)
    world.run(main, limit_s=240)
    world.close()
    print("compared")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton's interpreter"
)
def test_kernels_mean_the_reference(tmp_path: Path, root: Path) -> None:
    script = tmp_path / "interpreted.py"
    script.write_text(INTERPRETED)
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=280,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout.strip().endswith("compared"), done.stdout + done.stderr
