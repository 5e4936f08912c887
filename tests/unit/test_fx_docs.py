"""docs/recognition.md against the source of the pass."""

from __future__ import annotations

import re
from pathlib import Path

# Refutations of gathers, which are not reported; the page names them in its text.
_UNREPORTED = {"not_a_gather", "unused"}


def codes_in_source(root: Path) -> set[str]:
    text = "\n".join(p.read_text() for p in (root / "dcp_inductor/fx").glob("*.py"))
    found = re.findall(r'(?:Reject|Refuted)\(\s*"(\w+)"', text)
    # Outcomes of one trial travel as a pair.
    return set(found) | set(re.findall(r'return \(?\s*"(\w+)",\s*"\w+ ', text))


def test_every_code_is_in_the_table_and_no_other(root: Path) -> None:
    text = (root / "docs/recognition.md").read_text()
    table = text[text.index("| code |") : text.index("A region that is refuted")]
    described = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    codes = codes_in_source(root)
    assert {"precision", "empty_shards", "foreign_rank", "sign"} <= codes
    assert described == codes - _UNREPORTED
    assert all(f"`{code}`" in text for code in _UNREPORTED)
