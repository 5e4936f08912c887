"""Finds the compiled library, or builds it at first use, and loads it.

A wheel carries ``_C``; a source checkout may have one that is older than its sources,
which is passed over. Building happens in a source checkout only, into a cache of the
user, behind a lock that dies with its holder, and never at import. Nothing here raises:
a missing library is a reason for the reference path.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType

import torch

from dcp_inductor import launch_ops

try:
    import fcntl
except ImportError:  # not a POSIX system; there is no shared memory runtime either
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parent
# Long enough for a compiler on a busy machine; then the reference path is taken.
BUILD_LIMIT_S = 120.0

_lock = threading.Lock()
_outcome: str | None = None


def load_extension() -> str:
    """Load the library, once per process; returns why there is none, or ''."""
    global _outcome
    with _lock:
        if _outcome is None:
            _outcome = _load()
            if _outcome:
                log.warning(
                    "no compiled library, using the collectives instead: %s", _outcome
                )
        return _outcome


def has_kernel(op: str, dispatch_key: str = "CPU") -> bool:
    """Whether an implementation of ``dcp_inductor::op`` is there for a device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        f"dcp_inductor::{op}", dispatch_key
    )


def _load() -> str:
    if has_kernel("_shm_agree"):
        return _check_protocol()  # loaded by somebody else, from whatever path
    build = _build_module()
    reasons = []
    for path in sorted(PACKAGE.glob("_C*.so")):
        if build is not None and _digest_in(path) != build.source_digest():
            reasons.append(f"{path.name} is older than its sources")
            continue
        reason = _load_file(path)
        if not reason:
            return ""
        reasons.append(reason)
    if build is None:
        return (
            "; ".join(reasons)
            or f"{PACKAGE} holds no compiled library; install a wheel"
        )
    try:
        path = _built(build)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return "; ".join([*reasons, f"cannot build it: {error}"])
    return _load_file(path)


def _load_file(path: Path) -> str:
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path}: {error}"
    return _check_protocol()


def _check_protocol() -> str:
    loaded = launch_ops.shm_protocol()
    if loaded != launch_ops.PROTOCOL:
        return (
            f"expected a compiled library of protocol {launch_ops.PROTOCOL}, got "
            f"{loaded}; reinstall the package"
        )
    return ""


def _build_module() -> ModuleType | None:
    """``csrc/build_ext.py`` of a source checkout; None in an installed package."""
    path = PACKAGE.parent / "csrc" / "build_ext.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location("dcp_inductor_build_ext", path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digest_in(path: Path) -> str:
    """The digest of its sources that a library carries, read without loading it."""
    _, mark, rest = path.read_bytes().partition(b"dcp_inductor sources:")
    return rest[:16].decode(errors="replace") if mark else ""


def _cache_directory() -> Path:
    candidates = [Path(tempfile.gettempdir()) / f"dcp_inductor-{os.getuid()}"]
    try:
        candidates.insert(0, Path.home() / ".cache" / "dcp_inductor")
    except RuntimeError:
        pass  # no home directory
    for directory in candidates:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        status = directory.stat()
        # What others can write to could hold somebody else's library.
        private = status.st_uid == os.getuid() and not status.st_mode & 0o022
        if private and os.access(directory, os.W_OK):
            return directory
    raise RuntimeError(f"expected a writable cache directory, tried {candidates}")


def _built(build: ModuleType) -> Path:
    """Path of the library of the checkout's sources, which is built at need."""
    compiler = build.find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler found; install one, for example g++")
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    key = "\n".join(
        (
            torch.__version__, str(torch.compiled_with_cxx11_abi()), compiler, version,
            platform.machine(), " ".join(build.cxx_flags()), build.source_digest(),
        )
    )  # fmt: skip
    directory = _cache_directory()
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    path = directory / f"{name}.so"
    deadline = time.monotonic() + BUILD_LIMIT_S
    with open(directory / f"{name}.lock", "a") as lock:
        while not path.exists():
            if not _try_lock(lock.fileno()):
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"another process has been building {path} too long"
                    )
                time.sleep(0.05)
            elif not path.exists():
                _compile(build, compiler, path, deadline - time.monotonic())
    return path


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks; the rename below keeps two builders apart
    return True


def _compile(build: ModuleType, compiler: str, path: Path, limit_s: float) -> None:
    log.info("building %s with %s", path, compiler)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        result = subprocess.run(
            build.compile_command(compiler, unfinished),
            capture_output=True, text=True, timeout=max(limit_s, 1.0),
        )  # fmt: skip
        if result.returncode:
            last = "\n".join(result.stderr.splitlines()[-20:])
            raise RuntimeError(f"{compiler} ended with {result.returncode}:\n{last}")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
