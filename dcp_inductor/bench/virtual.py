"""N virtual ranks on one GPU: builds and runs ``benchmarks/cuda/bench.cu``.

One process, one stream a rank, everything in one CUDA graph; the time of a call is
(t_20 - t_1) / 19, medians over replays. Shows launches, instructions and memory
traffic, and not the latency or bandwidth of a link.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from dcp_inductor import extension

RANKS = (2, 4, 8)
_BUILD_LIMIT_S, _RUN_LIMIT_S = 900.0, 300.0


def run(ranks: int, json_file: Path | None) -> int:
    """Print the times of ``ranks`` virtual ranks; returns the exit code."""
    from dcp_inductor.runtime import cuda_library

    native = extension.PACKAGE.parent / "tests" / "cuda" / "native"
    nvcc = cuda_library.find_nvcc()
    if nvcc is None or not native.is_dir():
        print("expected nvcc and a source checkout; install the CUDA toolkit")
        return 1
    with tempfile.TemporaryDirectory(prefix="dcp-bench-") as directory:
        program = f"{directory}/bench"
        make = ["make", "-s", f"-j{os.cpu_count()}", "-C", str(native)]
        make += [f"NVCC={nvcc}", f"BUILD={directory}", program]
        subprocess.run(make, check=True, timeout=_BUILD_LIMIT_S)
        result = Path(directory) / "bench.json"
        command = [program, str(result), "full", str(ranks)]
        subprocess.run(command, check=True, timeout=_RUN_LIMIT_S)
        if json_file:
            json_file.write_bytes(result.read_bytes())
    return 0
