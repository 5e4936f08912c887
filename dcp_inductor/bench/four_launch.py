"""The four-launch combine of ``benchmarks/cuda``, for the ranks of real processes."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dcp_inductor import config, extension

_BUILD_LIMIT_S = 300.0
_SIGNATURE = 0x4000


def build(directory: Path, arch: str) -> str:
    """Compile the library into ``directory``; its path, or '' where that cannot be.

    Args:
        arch: as nvcc calls it, "sm_90".
    """
    from dcp_inductor.runtime import cuda_library

    root = extension.PACKAGE.parent
    source = root / "benchmarks" / "cuda" / "four_launch.cu"
    nvcc = cuda_library.find_nvcc()
    if nvcc is None or not source.exists():
        return ""
    library = directory / "four_launch.so"
    kernels = root / "csrc" / "cuda"
    subprocess.run(
        [
            nvcc, f"-arch={arch}", "-std=c++20", "-O3", "-shared",
            "-Xcompiler", "-fPIC", f"-I{kernels}", str(source),
            str(kernels / "a2a_lse_reduce.cu"), str(kernels / "residency.cu"),
            "-o", str(library),
        ],
        check=True, timeout=_BUILD_LIMIT_S,
    )  # fmt: skip
    return str(library)


class FourLaunch:
    """Its workspace, of its own, and its launches; a collective to construct.

    Args:
        rows: most rows that go to any one rank.
        row_bytes: of a row, bf16.
    """

    def __init__(
        self, library: str, group: dist.ProcessGroup, rows: int, row_bytes: int
    ) -> None:
        from dcp_inductor.runtime import cuda_layout, symm_mem

        device = torch.device("cuda", torch.cuda.current_device())
        size = group.size()
        layout = cuda_layout.combine_arena(cuda_layout.TILED, size, rows, row_bytes, 0)
        control_bytes = cuda_layout.HEADER_BYTES + cuda_layout.TAIL_BYTES
        # Kept: their memory is what the table points to.
        self._buffers = []
        for nbytes in (control_bytes, layout.size):
            tensor = symm_mem.allocate(nbytes, device).zero_()
            self._buffers.append(symm_mem.SymmetricBuffer(tensor, group))
        control, arena = self._buffers
        control.tensor[cuda_layout.EPOCH].view(torch.int32).fill_(
            cuda_layout.FIRST_EPOCH
        )
        self._fault = torch.zeros(16, dtype=torch.int32, pin_memory=True)
        self._words = cuda_layout.channel_words(
            group.rank(), int(config.timeout_s * 1e9), _SIGNATURE, 0, 1,
            self._fault.data_ptr(), control.addresses, arena.addresses,
        )  # fmt: skip
        self._layout, self._size = layout, size
        self._launch = ctypes.CDLL(library).four_launch_combine
        pointer, number = ctypes.c_void_p, ctypes.c_uint32
        self._launch.argtypes = [pointer] * 4 + [number] * 3 + [pointer]
        torch.cuda.synchronize()

    def __call__(self, partial: Tensor, lse: Tensor) -> Tensor:
        """``[T, H, D]`` bf16 and ``[T, H]`` fp32, contiguous, to ``[T, H / N, D]``.

        Raises:
            RuntimeError: CUDA refused the launch.
        """
        from dcp_inductor.runtime import cuda_layout

        tokens, heads, head_dim = partial.shape
        part = heads // self._size
        words = cuda_layout.combine_words(
            cuda_layout.TILED, "heads", True, [part] * self._size, self._layout
        )
        table = torch.tensor(self._words + words, dtype=torch.int64)
        output = partial.new_empty((tokens, part, head_dim))
        error = self._launch(
            table.data_ptr(), partial.data_ptr(), lse.data_ptr(), output.data_ptr(),
            tokens, heads, head_dim, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        if error:
            raise RuntimeError(f"four-launch combine: CUDA error {error}")
        return output

    def faulty(self) -> bool:
        """Whether a wait of it ran out."""
        return bool(self._fault[0])
