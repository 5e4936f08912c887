"""The documents against what they describe."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch

import dcp_inductor


def graph_ops() -> list[str]:
    names = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("dcp_inductor::")
    }
    return sorted(name for name in names if not name.startswith("_"))


@pytest.mark.parametrize("name", graph_ops())
def test_every_op_is_described_with_its_schema(name: str, root: Path) -> None:
    text = (root / "docs/ops.md").read_text()
    schema = str(getattr(torch.ops.dcp_inductor, name).default._schema)
    assert f"## {name}\n\n```\n{schema}\n```\n" in text, schema
    assert f"| `{name}` |" in text


def test_no_op_is_described_that_does_not_exist(root: Path) -> None:
    described = re.findall(r"^## (\w+)$", (root / "docs/ops.md").read_text(), re.M)
    assert sorted(described) == graph_ops()


def documents() -> list[str]:
    root = Path(__file__).resolve().parents[2]
    return [
        str(p.relative_to(root)) for p in [*root.glob("*.md"), *root.glob("docs/*.md")]
    ]


@pytest.mark.parametrize("name", documents())
def test_links_lead_somewhere(name: str, root: Path) -> None:
    document = root / name
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    missing = [
        t for t in targets if "://" not in t and not (document.parent / t).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("name", documents())
def test_files_and_names_in_documents_exist(name: str, root: Path) -> None:
    text = (root / name).read_text()
    paths = re.findall(
        r"`((?:dcp_inductor|csrc|tests|docs|examples|fx|runtime)/[\w/.]+)`", text
    )
    homes = (root, root / "dcp_inductor")
    missing = [p for p in paths if not any((home / p).exists() for home in homes)]
    assert missing == []
    names = re.findall(r"`dcp_inductor\.(\w+)", text)
    unknown = [n for n in names if n != "max_tokens" and not hasattr(dcp_inductor, n)]
    assert unknown == []


def test_tools_are_pinned_alike_everywhere(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())
    pinned = dict(
        line.split("==")
        for line in project["project"]["optional-dependencies"]["dev"]
        if "==" in line and ";" not in line  # a marker of a system pins nothing
    )
    hooks = re.findall(
        r'"([\w-]+)==([\w.]+)"', (root / ".pre-commit-config.yaml").read_text()
    )
    assert {name for name, _ in hooks} == {"ruff", "clang-format"}
    assert [(name, pinned[name]) for name, _ in hooks] == hooks


def test_the_version_stands_in_the_changelog(root: Path) -> None:
    assert dcp_inductor.__version__ in (root / "CHANGELOG.md").read_text()
