"""Keeps compiled graphs of earlier runs and of other tests out of every test.

A graph from Inductor's cache has been through the pass at some other time: a test that
met one would see no rewrite, and would pass with a pass that is broken since. Tests of
the cache turn it on in processes of their own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

_CACHE = tempfile.mkdtemp(prefix="dcp-test-inductor-")
# Before torch is imported, here and in every process that a test starts.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
for _name in [name for name in os.environ if name.startswith("DCP_INDUCTOR_")]:
    del os.environ[_name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need GPUs are skipped where there are too few, and nowhere else."""
    wanted = {"cuda": 1, "multi_gpu": 2}
    for item in items:
        marks = [n for name, n in wanted.items() if item.get_closest_marker(name)]
        needed = max(marks, default=0)
        if needed and _gpus() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s)"))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture
def root() -> Path:
    """The root of the source tree."""
    return Path(__file__).resolve().parent.parent
