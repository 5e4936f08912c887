"""Finding, building and loading the compiled library, and what follows a failure."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dcp_inductor import extension, launch_ops

ROOT = Path(__file__).resolve().parents[2]

# Stands in for a compiler: notes the call, takes its time, and delivers a finished
# library.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "stand-in 1.0"; exit 0; fi
echo built >> "{log}"
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then out=$2; fi; shift; done
printf unfinished > "$out"
sleep {seconds}
cp "{library}" "$out"
"""

LOAD = """
import logging, pathlib, sys
logging.basicConfig(format="%(levelname)s %(message)s")
from dcp_inductor import extension
extension.PACKAGE = pathlib.Path(sys.argv[1])
print(repr(extension.load_extension()), extension.has_kernel("_shm_agree"))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library built from these sources."""
    build = extension._build_module()
    assert build is not None
    for path in extension.PACKAGE.glob("_C*.so"):
        if extension._digest_in(path) == build.source_digest():
            return path
    return extension._built(build)


class Checkout:
    """A source checkout without a library, a home without a cache, and a compiler."""

    def __init__(self, directory: Path, library: Path) -> None:
        self.package = directory / "dcp_inductor"
        self.package.mkdir()
        (directory / "csrc").symlink_to(ROOT / "csrc")
        self.home = directory / "home"
        self.home.mkdir()
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.log = directory / "log"
        self.library = library
        self.compiler(0)

    def compiler(self, seconds: float, text: str = COMPILER) -> None:
        path = self.bin / "c++"
        path.write_text(
            text.format(log=self.log, seconds=seconds, library=self.library)
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    @property
    def builds(self) -> int:
        return len(self.log.read_text().split()) if self.log.exists() else 0

    @property
    def cache(self) -> Path:
        return self.home / ".cache" / "dcp_inductor"

    def start(self) -> subprocess.Popen[str]:
        """A process that loads the extension."""
        environment = {
            **os.environ,
            "HOME": str(self.home),
            "PATH": f"{self.bin}:/bin:/usr/bin",
            "PYTHONPATH": str(ROOT),
        }
        return subprocess.Popen(
            [sys.executable, "-c", LOAD, str(self.package)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def checkout(tmp_path: Path, library: Path) -> Checkout:
    return Checkout(tmp_path, library)


@pytest.fixture
def here(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """The checkout in this process, where loading is noted only."""
    monkeypatch.setattr(extension, "PACKAGE", checkout.package)
    monkeypatch.setattr(extension, "_outcome", None)
    monkeypatch.setattr(extension, "has_kernel", lambda *_: False)
    monkeypatch.setattr(extension, "_load_file", lambda path: f"loaded {path.name}")
    monkeypatch.setenv("HOME", str(checkout.home))
    monkeypatch.setenv("PATH", f"{checkout.bin}:/bin:/usr/bin")
    return checkout


# --- processes ---------------------------------------------------------------------


def test_cold_processes_build_once_and_all_load(checkout: Checkout) -> None:
    checkout.compiler(0.5)
    processes = [checkout.start() for _ in range(4)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert out.strip() == "'' True", (out, err)
        assert err == ""
    assert checkout.builds == 1
    assert len(list(checkout.cache.glob("*.so"))) == 1
    assert not list(checkout.cache.glob("*.tmp"))


def test_a_builder_that_was_killed_stops_nobody(checkout: Checkout) -> None:
    checkout.compiler(60)
    first = checkout.start()
    deadline = time.monotonic() + 60
    while not list(checkout.cache.glob("*.tmp")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=30)
    assert list(checkout.cache.glob("*.lock"))
    checkout.compiler(0)
    out, err = checkout.start().communicate(timeout=120)
    assert out.strip() == "'' True", (out, err)
    assert checkout.builds == 2


def test_the_library_can_be_loaded_twice_from_two_paths(
    checkout: Checkout, library: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.so"
    shutil.copy(library, copy)
    code = (
        "import sys, torch; from dcp_inductor import launch_ops, extension\n"
        "for path in sys.argv[1:]: torch.ops.load_library(path)\n"
        "import importlib; importlib.reload(extension)\n"
        "print(repr(extension.load_extension()), launch_ops.shm_protocol())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(library), str(copy)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout.strip() == f"'' {launch_ops.PROTOCOL}", result.stderr
    assert result.returncode == 0


# --- one process -----------------------------------------------------------------


def test_without_a_compiler_there_is_one_warning(
    here: Checkout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(here.home))
    with caplog.at_level(logging.WARNING, "dcp_inductor"):
        reasons = {extension.load_extension() for _ in range(3)}
    (reason,) = reasons
    assert "no C++ compiler found; install one" in reason
    assert len(caplog.records) == 1
    assert reason in caplog.text


def test_a_compiler_that_fails_is_quoted(here: Checkout) -> None:
    here.compiler(
        0, '#!/bin/sh\n[ "$1" = --version ] || {{ echo boom >&2; exit 3; }}\n'
    )
    reason = extension.load_extension()
    assert "ended with 3" in reason
    assert "boom" in reason
    assert not list(here.cache.glob("*.so"))
    assert not list(here.cache.glob("*.tmp"))


def test_a_lock_that_is_held_is_waited_for_with_a_limit(
    here: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert extension.load_extension().startswith("loaded")
    (built,) = here.cache.glob("*.so")
    built.unlink()
    monkeypatch.setattr(extension, "_outcome", None)
    monkeypatch.setattr(extension, "BUILD_LIMIT_S", 0.3)
    with open(built.with_suffix(".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "has been building" in extension.load_extension()
    # Nobody holds it any more: the file alone stops nobody.
    monkeypatch.setattr(extension, "_outcome", None)
    assert extension.load_extension() == f"loaded {built.name}"
    assert here.builds == 2


def test_a_home_that_cannot_be_written_is_passed_over(
    here: Checkout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/proc")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert extension.load_extension().startswith("loaded")
    (directory,) = (tmp_path / "temporary").iterdir()
    assert list(directory.glob("*.so"))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_the_cache_is_keyed_by_what_goes_into_a_build(
    here: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = extension._build_module()
    names = {extension._built(build).name}
    assert {extension._built(build).name} == names
    assert here.builds == 1
    other = here.bin.parent / "other"
    other.mkdir()
    shutil.copy(here.bin / "c++", other / "c++")
    changes = (
        (torch, "__version__", "9.9.9"),
        (torch, "compiled_with_cxx11_abi", lambda: "other"),
        (build, "source_digest", lambda: "0123456789abcdef"),
        (build, "cxx_flags", lambda: ["-O0"]),
        (build, "find_compiler", lambda: str(other / "c++")),
    )
    for target, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            names.add(extension._built(build).name)
    assert len(names) == 1 + len(changes)


def test_a_fresh_library_in_the_package_is_taken_and_a_stale_one_is_not(
    here: Checkout, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = here.package / "_C.abi3.so"
    shutil.copy(library, packaged)
    loaded: list[Path] = []
    monkeypatch.setattr(extension, "_load_file", lambda p: loaded.append(p) or "")
    assert extension._load() == ""
    assert loaded == [packaged]
    assert here.builds == 0
    digest = extension._build_module().source_digest().encode()
    assert extension._digest_in(packaged).encode() == digest
    content = packaged.read_bytes()
    assert content.count(digest) == 1
    packaged.write_bytes(content.replace(digest, b"f" * 16))
    assert extension._load() == ""
    assert loaded[1].parent == here.cache
    assert here.builds == 1


def test_an_installed_package_never_builds(here: Checkout, library: Path) -> None:
    (here.package.parent / "csrc").unlink()
    assert "holds no compiled library; install a wheel" in extension._load()
    shutil.copy(library, here.package / "_C.abi3.so")
    assert extension._load() == "loaded _C.abi3.so"
    assert here.builds == 0


def test_a_library_of_another_protocol_is_not_used(
    monkeypatch: pytest.MonkeyPatch, library: Path
) -> None:
    assert extension.load_extension() == ""
    monkeypatch.setattr(launch_ops, "PROTOCOL", 999)
    assert "of protocol 999, got" in extension._load()


# --- the sources of the CUDA library -------------------------------------------------


def test_an_installed_package_finds_its_cuda_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a wheel, with a stranger's folder csrc beside it."""
    from dcp_inductor.runtime import cuda_library

    units, digest = cuda_library.sources(), cuda_library.source_digest()
    assert units
    package = tmp_path / "dcp_inductor"
    package.mkdir()
    stranger = tmp_path / "csrc" / "cuda"
    stranger.mkdir(parents=True)
    (stranger / "stranger.cu").touch()
    monkeypatch.setattr(extension, "PACKAGE", package)
    assert cuda_library.sources() == []
    shutil.copytree(ROOT / "csrc" / "cuda", package / "cuda_sources")
    found = cuda_library.sources()
    assert [path.name for path in found] == [path.name for path in units]
    assert {path.parent for path in found} == {package / "cuda_sources"}
    assert cuda_library.source_digest() == digest
