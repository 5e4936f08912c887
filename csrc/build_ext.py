"""Sources and flags of the compiled library, for wheels and first-use builds.

setuptools takes ``BuildExt`` from here (pyproject.toml); ``dcp_inductor/extension.py``
loads this file by its path in a source checkout and compiles with the same flags. The
CPU part only: a wheel carries the sources of the CUDA library, which
``runtime/cuda_library.py`` compiles where there is a GPU.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

CSRC = Path(__file__).resolve().parent

# The oldest torch whose stable ABI is used; the binary runs on that one and on all
# later ones.
TORCH_TARGET_VERSION = "0x020b000000000000ULL"

# No -march: the hot loops pick their instruction set when the library is first used.
CXX_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
)


def cpu_sources() -> list[Path]:
    """Translation units of the CPU part."""
    return sorted((CSRC / "cpu").glob("*.cpp"))


def cuda_files() -> list[Path]:
    """All that the CUDA library is compiled from."""
    return sorted(path for path in (CSRC / "cuda").iterdir() if path.is_file())


def source_digest() -> str:
    """Sixteen hex digits of the contents of all that is compiled, and this file."""
    digest = hashlib.sha256()
    files = [Path(__file__), *CSRC.glob("cpu/*.cpp"), *CSRC.glob("cpu/*.h")]
    for path in sorted(files, key=lambda path: path.name):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def cxx_flags() -> list[str]:
    """Compiler flags without include directories."""
    return [*CXX_FLAGS, f'-DDCP_INDUCTOR_SOURCES="{source_digest()}"']


def torch_paths() -> tuple[Path, Path]:
    """Include and library directory of the installed torch."""
    import torch

    root = Path(torch.__file__).resolve().parent
    return root / "include", root / "lib"


def find_compiler() -> str | None:
    """Path of a C++ compiler, or None."""
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path:
            return path
    return None


def compile_command(compiler: str, output: Path) -> list[str]:
    """The one command that builds the CPU part into ``output``."""
    include, lib = torch_paths()
    return [
        compiler, *cxx_flags(), "-shared", f"-I{include}", *map(str, cpu_sources()),
        "-o", str(output), f"-L{lib}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip


def _build_ext() -> Any:
    from setuptools.command.build_ext import build_ext

    class BuildExt(build_ext):  # type: ignore[misc]
        """Fills in what pyproject.toml leaves to the installed torch."""

        def build_extension(self, ext: Any) -> None:
            include, lib = torch_paths()
            ext.sources = [str(path.relative_to(CSRC.parent)) for path in cpu_sources()]
            ext.depends = [str(path) for path in CSRC.glob("cpu/*.h")]
            ext.include_dirs.append(str(include))
            ext.library_dirs.append(str(lib))
            ext.libraries += ["torch_cpu", "c10"]
            ext.extra_compile_args += cxx_flags()
            ext.language = "c++"
            super().build_extension(ext)

        def run(self) -> None:
            super().run()
            if self.inplace:  # a source checkout, where they are found in csrc
                return
            for source, copy in self._copies():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)

        def get_outputs(self) -> list[str]:
            copies = [] if self.inplace else [str(copy) for _, copy in self._copies()]
            return [*super().get_outputs(), *copies]

        def _copies(self) -> list[tuple[Path, Path]]:
            directory = Path(self.build_lib) / "dcp_inductor" / "cuda_sources"
            return [(path, directory / path.name) for path in cuda_files()]

    return BuildExt


def __getattr__(name: str) -> Any:
    # setuptools is imported only when it asks for its hook: a build at first use has no
    # need of it.
    if name == "BuildExt":
        return _build_ext()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
