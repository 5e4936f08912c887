"""What ``import dcp_inductor`` may cost: seen from fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_WATCH = """
import json, os, sys
import torch
before = set(sys.modules)
events = []

def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        if set(mode or "") & set("wax+") or flags & writing:
            events.append(f"writes {path}")
    elif event in ("os.mkdir", "os.rename", "subprocess.Popen", "os.system", "os.exec",
                   "os.posix_spawn", "socket.connect", "ctypes.dlopen"):
        events.append(f"{event} {arguments[0]}")

sys.dont_write_bytecode = True
sys.addaudithook(watch)
import dcp_inductor
print(json.dumps({
    "events": events,
    "modules": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
    "libraries": sorted(torch.ops.loaded_libraries),
    "public": dir(dcp_inductor),
}))
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def seen() -> dict[str, list[str]]:
    return json.loads(run(_WATCH).splitlines()[-1])


def test_import_loads_no_compiler(seen: dict[str, list[str]]) -> None:
    heavy = ("torch._inductor", "triton", "vllm", "torch._dynamo.", "sympy")
    assert [name for name in seen["modules"] if name.startswith(heavy)] == []
    lazily = ("dcp_inductor.fx", "dcp_inductor.runtime", "dcp_inductor.backend")
    assert [name for name in seen["modules"] if name.startswith(lazily)] == []


def test_import_does_nothing_to_the_machine(seen: dict[str, list[str]]) -> None:
    assert seen["events"] == []
    assert seen["libraries"] == []
    assert not seen["cuda"]


def test_public_names_are_listed_and_exist(seen: dict[str, list[str]]) -> None:
    import dcp_inductor

    assert seen["public"] == sorted(dcp_inductor.__all__)
    for name in dcp_inductor.__all__:
        assert getattr(dcp_inductor, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'prepare_all'"):
        _ = dcp_inductor.prepare_all


def test_the_entry_point_leads_to_the_backend_without_an_import() -> None:
    printed = run(
        "import sys, torch\n"
        "from torch._dynamo.backends.registry import list_backends, lookup_backend\n"
        "print('dcp_inductor' in list_backends(), 'dcp_inductor' in sys.modules)\n"
        "print(lookup_backend('dcp_inductor').__module__)\n"
        "print([m for m in sys.modules if m.startswith('dcp_inductor.fx')])\n"
    )
    assert printed.split() == ["True", "False", "dcp_inductor.backend", "[]"]


def test_importing_twice_from_two_paths_forking_and_spawning(tmp_path: Path) -> None:
    """Each way works or raises an error; none aborts the process."""
    package = Path(__file__).resolve().parents[2] / "dcp_inductor"
    (tmp_path / "dcp_inductor").symlink_to(package)
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib, multiprocessing, os, sys\n"
        "import dcp_inductor\n"
        "from dcp_inductor import extension\n"
        "def child(expected):\n"
        "    import dcp_inductor as again\n"
        "    from dcp_inductor import extension\n"
        "    assert extension.load_extension() == expected\n"
        "    assert again.ops.q_gather is not None\n"
        "if __name__ == '__main__':\n"
        "    here = extension.load_extension()\n"
        "    for method in ('fork', 'spawn'):\n"
        "        process = multiprocessing.get_context(method).Process(\n"
        "            target=child, args=(here,))\n"
        "        process.start(); process.join(60)\n"
        "        print(method, process.exitcode)\n"
        "    import torch\n"
        "    for path in sorted(torch.ops.loaded_libraries):\n"
        "        torch.ops.load_library(path)\n"
        "    for name in [m for m in sys.modules if m.startswith('dcp_inductor')]:\n"
        "        del sys.modules[name]\n"
        f"    sys.path.insert(0, {str(tmp_path)!r})\n"
        "    try:\n"
        "        importlib.import_module('dcp_inductor')\n"
        "    except RuntimeError as error:\n"
        "        print('error', 'dcp_inductor' in str(error))\n"
        "    else:\n"
        "        print('imported')\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    # The second copy finds the ops declared and says so.
    assert done.stdout.split() == ["fork", "0", "spawn", "0", "error", "True"]
