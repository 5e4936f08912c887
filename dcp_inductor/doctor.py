"""Facts about a machine and installation that decide what dcp_inductor can do there."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

import dcp_inductor
from dcp_inductor import config, extension

_ENTRY_POINTS = "torch_dynamo_backends"
_SHM = Path("/dev/shm")
# Less than this holds no workspace of a usual model; Docker gives 64 MiB by default.
_SHM_WANTED = 32 << 20


@dataclass(frozen=True)
class Fact:
    """One line of the report. ``remedy`` is set where something is broken."""

    name: str
    value: str
    remedy: str = ""


def facts() -> list[Fact]:
    """All facts, in the order in which to read them."""
    return [
        Fact("dcp_inductor", f"{dcp_inductor.__version__} in {Path(__file__).parent}"),
        Fact("python", platform.python_version()),
        _torch(),
        _entry_point(),
        _knobs(),
        _native_library(),
        _compiler(),
        Fact("cpus", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"),
        _shared_memory(),
        _cuda(),
    ]


def _torch() -> Fact:
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    remedy = "" if release >= (2, 11) else "install torch 2.11 or newer"
    if " " in torch.__file__:
        remedy = (
            f"{torch.__file__} holds a space, where Inductor cannot link; call python "
            "by a path without one"
        )
    return Fact("torch", torch.__version__, remedy)


def _entry_point() -> Fact:
    found = importlib.metadata.entry_points(group=_ENTRY_POINTS, name="dcp_inductor")
    for entry_point in found:
        return Fact("backend", f"'dcp_inductor' is {entry_point.value}")
    return Fact(
        "backend",
        "'dcp_inductor' is not registered with torch.compile",
        "install the package (pip install .); a checkout on the path is not enough",
    )


def _knobs() -> Fact:
    problems = config.environment_problems()
    if problems:
        return Fact(
            "config",
            "; ".join(problems.values()),
            f"correct or unset {', '.join(problems)}",
        )
    changed = [
        f"{name}={value!r}"
        for name, value in config.snapshot().items()
        if value != config.default(name)
    ]
    return Fact("config", ", ".join(changed) or "all knobs at their defaults")


def _native_library() -> Fact:
    before = set(torch.ops.loaded_libraries)
    reason = extension.load_extension()
    if reason:
        return Fact(
            "cpu library",
            f"not loaded: {reason}",
            "reinstall the package (pip install --force-reinstall --no-deps .); "
            "without the library every exchange takes the plain collectives",
        )
    new = set(torch.ops.loaded_libraries) - before
    return Fact("cpu library", ", ".join(sorted(new)) or "loaded by another part")


def _compiler() -> Fact:
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Fact("c++ compiler", path)
    remedy = "install one (Debian: apt-get install g++); Inductor needs it for CPU code"
    return Fact("c++ compiler", "none", "" if torch.cuda.is_available() else remedy)


def _shared_memory() -> Fact:
    remedy = f"give {_SHM} at least 64 MiB (containers: --shm-size)"
    if not os.access(_SHM, os.W_OK):
        return Fact("shared memory", f"cannot write to {_SHM}", remedy)
    usage = shutil.disk_usage(_SHM)
    value = f"{_SHM}, {usage.free >> 20} of {usage.total >> 20} MiB free"
    return Fact("shared memory", value, remedy if usage.free < _SHM_WANTED else "")


def _cuda() -> Fact:
    if torch.version.cuda is None:
        return Fact("cuda", "this torch is built without CUDA")
    if not torch.cuda.is_available():
        return Fact(
            "cuda", f"torch is built for CUDA {torch.version.cuda}; no usable GPU"
        )
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Fact("cuda", f"CUDA {torch.version.cuda}, {gpus}")


def report(found: list[Fact]) -> str:
    """The facts as lines of text, each broken one with its remedy."""
    width = max(len(fact.name) for fact in found)
    lines = []
    for fact in found:
        mark = "!!" if fact.remedy else "ok"
        lines.append(f"{mark}  {fact.name.ljust(width)}  {fact.value}")
        if fact.remedy:
            lines.append(f"    {' ' * width}  remedy: {fact.remedy}")
    return "\n".join(lines)
