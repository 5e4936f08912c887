"""The import directions of docs/design.md, held by reading the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dcp_inductor"
LINE_CAP = 400

# Where a module stands; the longest prefix that fits decides.
LAYERS = {
    "dcp_inductor": "package",
    "dcp_inductor.config": "config",
    "dcp_inductor.backend": "backend",
    "dcp_inductor.explanation": "front",
    "dcp_inductor.cli": "front",
    "dcp_inductor.__main__": "front",
    "dcp_inductor.doctor": "front",
    "dcp_inductor.bench": "front",
    "dcp_inductor.fx": "fx",
    "dcp_inductor.runtime": "runtime",
    "dcp_inductor.triton": "runtime",
}
ROOT_MODULES = (
    "ops", "reference", "capability", "extension", "groups", "errors", "votes",
    "launch_ops", "geometry", "bounded_store",
)  # fmt: skip
LAYERS |= {f"dcp_inductor.{name}": "base" for name in ROOT_MODULES}

# What each layer may import of the others; "lazily" means inside a function.
ALLOWED = {
    "config": set(),
    "base": {"config", "base"},
    "fx": {"config", "base", "fx"},
    "runtime": {"config", "base", "runtime"},
    "backend": {"config", "base"},
    "front": {"config", "base", "backend", "front", "package", "fx"},
    "package": {"config", "base"},
}
ALLOWED_LAZILY = {
    "base": {"runtime"},  # in the bodies of ops
    "backend": {"fx"},
    "front": {"runtime"},
    "package": {"fx", "runtime", "front"},
}
# Names with one home: prefix -> layers or modules that may import it.
QUARANTINE = {
    "torch._inductor": {"fx", "backend"},
    "torch.distributed._symmetric_memory": {
        "dcp_inductor.runtime.symm_mem",
        "dcp_inductor.capability",
    },
    "torch.testing._internal": set(),
    "triton": {"dcp_inductor.triton"},
    "vllm": {"dcp_inductor.vllm_plugin"},
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def layer(module: str) -> str:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        known = LAYERS.get(".".join(parts[:length]))
        if known and (length > 1 or len(parts) == 1):
            return known
    raise AssertionError(f"{module} stands in no layer; add it to LAYERS")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Names that a module imports, and whether only inside a function."""
    return visit(ast.parse(path.read_text(), str(path)), False)


def visit(node: ast.AST, lazily: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, lazily) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, "relative import"
            assert child.module
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                ours = child.module.startswith("dcp_inductor")
                yield (full if full in MODULES or not ours else child.module), lazily
        elif not is_type_checking(child):
            function = isinstance(
                child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
            )
            yield from visit(child, lazily or function)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def violations(module: str, path: Path) -> list[str]:
    own = layer(module)
    found = []
    for name, lazily in imports(path):
        if name == "dcp_inductor" or name.startswith("dcp_inductor."):
            other = layer(name)
            allowed = ALLOWED[own] | (
                ALLOWED_LAZILY.get(own, set()) if lazily else set()
            )
            if other not in allowed:
                how = "lazily" if lazily else "at import"
                found.append(f"{module} ({own}) imports {name} ({other}) {how}")
        for prefix, homes in QUARANTINE.items():
            inside = name == prefix or name.startswith(prefix + ".")
            at_home = own in homes or any(module.startswith(home) for home in homes)
            if inside and not at_home:
                found.append(f"{module} imports {name}, which lives in {sorted(homes)}")
            if inside and own == "backend" and not lazily:
                found.append(f"{module} imports {name} at import")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_layers(module: str) -> None:
    assert violations(module, MODULES[module]) == []


@pytest.mark.parametrize("module", MODULES)
def test_only_config_reads_the_environment(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    reads = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "environb")
    ]
    assert module == "dcp_inductor.config" or reads == []


def test_config_imports_no_other_part_of_torch() -> None:
    torch_names = {
        name for name, _ in imports(MODULES["dcp_inductor.config"]) if "torch" in name
    }
    assert torch_names == {"torch.utils._config_module"}


def sources() -> list[str]:
    patterns = (
        "dcp_inductor/**/*.py",
        "csrc/**/*",
        "tests/**/*.py",
        "examples/**/*.py",
    )
    suffixes = (".py", ".h", ".cuh", ".cpp", ".cu")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return [str(f.relative_to(ROOT)) for f in sorted(files) if f.suffix in suffixes]


@pytest.mark.parametrize("source", sources())
def test_files_stay_small(source: str) -> None:
    lines = len((ROOT / source).read_text().splitlines())
    assert lines <= LINE_CAP, f"{source} has {lines} lines, more than {LINE_CAP}"


@pytest.mark.parametrize(
    ("module", "code", "complaint"),
    [
        ("dcp_inductor.fx.x", "from dcp_inductor.runtime import shm", "imports"),
        ("dcp_inductor.runtime.x", "def f():\n import dcp_inductor.fx.find", "lazily"),
        ("dcp_inductor.ops", "from dcp_inductor.runtime import kernels", "at import"),
        ("dcp_inductor.runtime.x", "import torch._inductor.config", "lives in"),
        ("dcp_inductor.backend", "import torch._inductor", "at import"),
        ("dcp_inductor.config", "from dcp_inductor import errors", "imports"),
    ],
)
def test_a_breach_is_noticed(
    module: str, code: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    [found] = violations(module, path)
    assert complaint in found
