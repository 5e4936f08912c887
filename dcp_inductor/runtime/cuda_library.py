"""Builds the CUDA library at its first use, and loads it.

Its sources come with the package, and are compiled by nvcc into the cache of
``extension``, one object per source side by side, behind a lock that dies with its
holder. A package that carries a compiled ``_C_cuda`` instead needs no nvcc. Nothing
here raises: a missing library is a reason for the reference path.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from dcp_inductor import extension
from dcp_inductor.runtime import cuda_launch_ops

log = logging.getLogger(__name__)

# nvcc takes most of a minute for the largest source, on a machine with other work more.
BUILD_LIMIT_S = 600.0
_FLAGS = (
    "-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden",
    "-DTORCH_TARGET_VERSION=0x020b000000000000ULL",
)  # fmt: skip

_lock = threading.Lock()
_outcome: str | None = None


def load(capability: str) -> str:
    """Load the library, once per process; returns why there is none, or ''.

    Args:
        capability: compute capability of the device, as in "9.0".
    """
    global _outcome
    with _lock:
        if _outcome is None:
            _outcome = _load(capability)
            if _outcome:
                log.warning(
                    "no compiled CUDA library, using the collectives instead: %s",
                    _outcome,
                )
        return _outcome


def source_directory() -> Path:
    """Where the sources lie: in a checkout, else in the installed package."""
    checkout = extension.PACKAGE.parent / "csrc"
    if (checkout / "build_ext.py").is_file():
        return checkout / "cuda"
    return extension.PACKAGE / "cuda_sources"


def sources() -> list[Path]:
    """The translation units; none in a package that was stripped of them."""
    return sorted(source_directory().glob("*.cu"))


def source_digest() -> str:
    """Sixteen hex digits of the contents of all that is compiled."""
    digest = hashlib.sha256()
    for path in sorted(source_directory().glob("*.*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_nvcc() -> str | None:
    """Path of nvcc, or None."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def _load(capability: str) -> str:
    if extension.has_kernel("_symm_gather", "CUDA"):
        return _check_protocol()  # loaded by somebody else, from whatever path
    major, minor = (int(part) for part in capability.split("."))
    if major < 8:
        return f"expected compute capability 8.0 or higher, got {capability}"
    found = sorted(extension.PACKAGE.glob("_C_cuda*.so"))
    if not found and not sources():
        return (
            f"{extension.PACKAGE} holds neither a compiled CUDA library nor its "
            "sources; reinstall the package"
        )
    try:
        path = found[0] if found and not sources() else _built(f"{major}{minor}")
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"cannot build or load it: {error}"
    return _check_protocol()


def _check_protocol() -> str:
    loaded = cuda_launch_ops.symm_protocol()
    if loaded == cuda_launch_ops.PROTOCOL:
        return ""
    return (
        f"expected a compiled CUDA library of protocol {cuda_launch_ops.PROTOCOL}, got "
        f"{loaded}; reinstall the package"
    )


def _built(arch: str) -> Path:
    """Path of the library of the checkout's sources, which is built at need."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("no nvcc found; install the CUDA toolkit")
    version = subprocess.run(
        [nvcc, "--version"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    key = "\n".join(
        (torch.__version__, version, arch, " ".join(_FLAGS), source_digest())
    )
    directory = extension._cache_directory()
    name = f"cuda-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    path = directory / f"{name}.so"
    deadline = time.monotonic() + BUILD_LIMIT_S
    with open(directory / f"{name}.lock", "a") as lock:
        while not path.exists():
            if not extension._try_lock(lock.fileno()):
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"another process has been building {path} too long"
                    )
                time.sleep(0.1)
            elif not path.exists():
                _compile(nvcc, arch, path, deadline)
    return path


def _compile(nvcc: str, arch: str, path: Path, deadline: float) -> None:
    log.info("building %s with %s", path, nvcc)
    root = Path(torch.__file__).resolve().parent
    flags = [
        *_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}",
        f'-DDCP_INDUCTOR_SOURCES="{source_digest()}"', f"-I{root / 'include'}",
    ]  # fmt: skip

    def run(command: list[str]) -> None:
        left = max(deadline - time.monotonic(), 1.0)
        result = subprocess.run(command, capture_output=True, text=True, timeout=left)
        if result.returncode:
            last = "\n".join((result.stderr or result.stdout).splitlines()[-20:])
            raise RuntimeError(f"nvcc ended with {result.returncode}:\n{last}")

    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        units = sources()
        objects = [f"{scratch}/{unit.stem}.o" for unit in units]
        with ThreadPoolExecutor(min(len(units), os.cpu_count() or 1)) as pool:
            commands = [
                [nvcc, *flags, "-c", str(unit), "-o", target]
                for unit, target in zip(units, objects, strict=True)
            ]
            list(pool.map(run, commands))
        # The static runtime is nvcc's default and shares the context with torch's.
        unfinished = f"{scratch}/library.so"
        run(
            [nvcc, "-shared", *objects, "-o", unfinished, f"-L{root / 'lib'}",
             "-ltorch_cpu", "-ltorch_cuda", "-lc10"]
        )  # fmt: skip
        os.replace(unfinished, path)
