"""Inductor's graph cache with our pass in it, between processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

# Prints, for each compilation, what the cache did and how many sites the pass rewrote.
_SCRIPT = """
import importlib.util, json, linecache, pathlib, sys
import torch
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
import dcp_inductor
from dcp_inductor import config
from tests.fx import models
from tests.fx.models import fake_group, merge, merge_inputs

HOOK = "post_grad_custom_pre_pass"


class Other(CustomGraphPass):
    def __init__(self, identity):
        self.identity = identity

    def __call__(self, graph):
        pass

    def uuid(self):
        return self.identity


def bare(graph):
    pass


def outcome(function=merge, **options):
    torch._dynamo.reset()
    counters.clear()
    torch.compile(function, backend="dcp_inductor", options=options)(*merge_inputs())
    cache = {
        name: sum(
            count
            for family in ("inductor", "aot_autograd")
            for key, count in counters[family].items()
            if key.endswith(f"cache_{name}")
        )
        for name in ("hit", "miss", "bypass")
    }
    seen = "".join(name[0] for name in cache if cache[name])
    return seen, counters["dcp_inductor"]["rewritten"]


def moved(lines, folder="here"):
    # The function as it is after lines were put into its file.
    path = pathlib.Path(sys.argv[2], folder, "edited.py")
    path.parent.mkdir(exist_ok=True)
    path.write_text("\\n" * lines + pathlib.Path(models.__file__).read_text())
    linecache.checkcache()
    spec = importlib.util.spec_from_file_location("edited", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.merge


with fake_group():
    results = {"plain": outcome()}
    if sys.argv[1] == "second":
        results["again"] = outcome()
        results["option"] = outcome(**{"dcp_inductor.max_tokens": 64})
        with config.patch(direct_combine="disable"):
            results["knob"] = outcome()
        results["other pass"] = outcome(**{HOOK: Other("a")})
        results["other pass again"] = outcome(**{HOOK: Other("a")})
        results["another pass"] = outcome(**{HOOK: Other("b")})
        results["bare function"] = outcome(**{HOOK: bare})
        results["no identity"] = outcome(**{HOOK: Other(None)})
        results["back"] = outcome()
        results["moved"] = outcome(moved(2))
        results["moved again"] = outcome(moved(2))
        results["moved on"] = outcome(moved(3))
        results["moved elsewhere"] = outcome(moved(2, "elsewhere"))
        results["explained"] = dcp_inductor.explain(merge, *merge_inputs()).rewritten
    print(json.dumps(results))
"""


def run(which: str, root: Path, cache: Path) -> dict[str, Any]:
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(root), os.environ.get("PYTHONPATH")))
        ),
    }
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, which, str(cache)],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_hits_and_a_changed_setting_misses(
    root: Path, tmp_path: Path
) -> None:
    first = run("first", root, tmp_path)
    assert first == {"plain": ["m", 1]}
    second = run("second", root, tmp_path)
    hit, miss, bypass = ["h", 0], ["m", 1], ["b", 1]
    assert second == {
        "plain": hit,
        "again": hit,
        "option": miss,
        "knob": ["m", second["knob"][1]],
        "other pass": miss,
        "other pass again": hit,
        "another pass": miss,
        "bare function": bypass,
        "no identity": bypass,
        "back": hit,
        # Errors name a site's line, and ranks compare it.
        "moved": miss,
        "moved again": hit,
        "moved on": miss,
        "moved elsewhere": hit,
        "explained": 1,  # compiles afresh, or there would be nothing to tell
    }


def test_the_identity_covers_the_sources(root: Path, tmp_path: Path) -> None:
    """A pass that was changed must not meet graphs of the old one."""
    copy = tmp_path / "dcp_inductor"
    shutil.copytree(root / "dcp_inductor", copy, ignore=shutil.ignore_patterns("*.so"))

    def identity() -> str:
        code = "import dcp_inductor; print(repr(dcp_inductor.DcpPass().uuid()))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            cwd=tmp_path, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    seen = [identity()]
    for path in ("fx/prove.py", "ops.py"):
        with (copy / path).open("a") as source:
            source.write("\n# changed\n")
        seen.append(identity())
    assert len(set(seen)) == len(seen)
