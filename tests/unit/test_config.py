"""Knobs: precedence, checked values, threads, and the table in the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dcp_inductor import config

# One value that each knob takes and that is not its default, as text and as a value.
OTHER = {
    "enable": ("0", False),
    "direct_combine": ("disable", "disable"),
    "direct_query_gather": ("force", "force"),
    "direct_kv_gather": ("disable", "disable"),
    "query_view": ("0", False),
    "max_tokens": ("32", 32),
    "timeout_s": ("7.5", 7.5),
    "num_ubatches": ("2", 2),
    "launch_overlap": ("0", False),
    "marked_bytes": ("4096", 4096),
    "packet_bytes": ("4096", 4096),
    "multicast": ("1", True),
}
WRONG = {
    "enable": ("yes", 1),
    "direct_combine": ("on", True),
    "direct_query_gather": ("Auto", "off"),
    "direct_kv_gather": ("1", None),
    "query_view": ("no", 0),
    "max_tokens": ("0", 2.5),
    "timeout_s": ("nan", float("inf")),
    "num_ubatches": ("two", -1),
    "launch_overlap": ("off", 0),
    "marked_bytes": ("32M", 0),
    "packet_bytes": ("-1", 1.5),
    "multicast": ("on", 1),
}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Put every knob back, for all threads."""
    before = config.snapshot()
    yield
    for name, value in before.items():
        setattr(config, name, value)


def in_process(code: str, **variables: str) -> str:
    """What a fresh process prints or, where it fails, the last line of its error."""
    environment = os.environ | {env(name): text for name, text in variables.items()}
    run = subprocess.run(
        [sys.executable, "-c", f"from dcp_inductor import config\n{code}"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return run.stdout.strip() if run.returncode == 0 else run.stderr.splitlines()[-1]


def env(name: str) -> str:
    return f"DCP_INDUCTOR_{name.upper()}"


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_every_knob_is_covered_here() -> None:
    assert set(OTHER) == set(WRONG) == set(config.names())


def test_environment_beats_default_and_assignment_beats_environment() -> None:
    texts = {name: text for name, (text, _) in OTHER.items()}
    code = (
        "print(config.snapshot())\n"
        "config.max_tokens = 8\n"
        "with config.patch(timeout_s=1): print(config.max_tokens, config.timeout_s)\n"
        "with config.patch(max_tokens=5), config.arguments({'max_tokens': 3}):\n"
        "    print(config.max_tokens)\n"
        "print(config.max_tokens, config.timeout_s)"
    )
    printed = in_process(code, **texts).splitlines()
    assert printed == [
        str({name: value for name, (_, value) in OTHER.items()}),
        "8 1.0",
        "3",
        "8 7.5",
    ]


@pytest.mark.parametrize(
    "read",
    ["config.max_tokens", "config.read('max_tokens')", "config.snapshot()",
     "config.get_hash()"],
)  # fmt: skip
def test_a_wrong_variable_is_an_error_wherever_it_is_read(read: str) -> None:
    code = f"assert config.timeout_s == 60.0\n{read}"
    message = in_process(code, max_tokens="0", timeout_s="")  # empty counts as unset
    assert message == (
        "ValueError: DCP_INDUCTOR_MAX_TOKENS: expected a positive integer up to "
        "2147483647, got 0"
    )


def test_an_assignment_and_an_argument_beat_a_wrong_variable() -> None:
    code = (
        "with config.arguments({'max_tokens': 3}): print(config.read('max_tokens'))\n"
        "config.max_tokens = 4\n"
        "print(config.max_tokens, config.read('max_tokens'), config.snapshot() != {})"
    )
    assert in_process(code, max_tokens="many").splitlines() == ["3", "4 4 True"]


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("MAX_TOKEN", "did you mean DCP_INDUCTOR_MAX_TOKENS?"),
        ("TIMEOUT", "did you mean DCP_INDUCTOR_TIMEOUT_S?"),
        ("max_tokens_", "did you mean DCP_INDUCTOR_MAX_TOKENS?"),
        ("ZZZ", "expected one of DCP_INDUCTOR_ENABLE, "),
    ],
)
def test_a_misspelt_variable_is_told_once(variable: str, hint: str) -> None:
    name = f"DCP_INDUCTOR_{variable}"
    run = subprocess.run(
        [sys.executable, "-c", "import dcp_inductor; dcp_inductor.config.snapshot()"],
        env=os.environ | {name: "4"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0
    [line] = run.stderr.splitlines()
    assert line.startswith(f"{name} is no variable of dcp_inductor: {hint}")


def test_at_most_three_near_names() -> None:
    near = config.near_names("direct", ["direct_a", "direct_b", "direct_c", "direct_d"])
    assert near.count("direct") == 3


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_variable_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{env(name)}: expected .*, got "):
        config._parse(name, WRONG[name][0])
    text, value = OTHER[name]
    assert config._parse(name, text) == value


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_value_is_refused_and_changes_nothing(name: str) -> None:
    before = config.snapshot()
    value = WRONG[name][1]
    with pytest.raises(ValueError, match=rf"config\.{name}: expected .*got "):
        setattr(config, name, value)
    with pytest.raises(ValueError, match="expected"), config.patch({name: value}):
        pass
    # The good change that comes first must not stay behind.
    good = "max_tokens" if name != "max_tokens" else "num_ubatches"
    changes = {good: 99, name: value}
    with pytest.raises(ValueError, match="expected"), config.patch(changes):
        pass
    assert config.snapshot() == before


def test_an_unknown_knob_names_its_neighbours() -> None:
    expected = "config.max_token does not exist: did you mean max_tokens?"
    with pytest.raises(AttributeError, match=re.escape(expected)):
        config.max_token = 4
    with pytest.raises(AttributeError, match=re.escape(expected)):
        _ = config.max_token
    with pytest.raises(AttributeError, match="did you mean"), config.patch(max_token=1):
        pass
    with pytest.raises(AttributeError, match="the knobs are enable, "):
        config.zzz = 4
    assert not hasattr(config, "max_token")


def test_a_number_becomes_the_type_of_its_knob() -> None:
    config.timeout_s = 3
    assert isinstance(config.timeout_s, float)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("max_tokens", 2**31 - 1),
        ("timeout_s", 10**9),
        ("num_ubatches", 64),
        ("marked_bytes", 2**48),
        ("packet_bytes", 2**48),
    ],
)
def test_numbers_have_an_upper_bound(name: str, most: int) -> None:
    assert config.check(name, most) == most
    for value in (most + 1, 10**30):
        with pytest.raises(ValueError, match=f"up to {most}, got {value}"):
            setattr(config, name, value)
    with pytest.raises(ValueError, match=f"{env(name)}: .* up to {most}, got"):
        config.check(name, 10**30, env(name))


def test_every_number_has_an_upper_bound() -> None:
    numbers = {n for n in config.names() if type(config.default(n)) in (int, float)}
    assert set(config._MOST) == numbers


def test_an_assignment_holds_in_every_thread() -> None:
    config.max_tokens = 17
    assert in_thread(lambda: config.max_tokens) == 17
    assert in_thread(lambda: config.get_hash()) == config.get_hash()


def test_arguments_hold_in_their_own_thread_and_nest() -> None:
    with config.arguments({"max_tokens": 1}):
        with config.arguments({"timeout_s": 2.0}):
            assert (config.max_tokens, config.timeout_s) == (1, 2.0)
        assert in_thread(lambda: config.max_tokens) == 256
        config.max_tokens = 5
        assert config.max_tokens == 1
    assert config.max_tokens == 5


def test_patch_restores_what_was_there_and_not_an_argument() -> None:
    with config.arguments({"max_tokens": 1}), config.patch(max_tokens=2):
        pass
    assert config.max_tokens == 256

    @config.patch(max_tokens=3)
    def decorated() -> int:
        return config.max_tokens

    assert (decorated(), config.max_tokens) == (3, 256)
    with mock.patch.object(config, "max_tokens", 4):
        assert config.max_tokens == 4
    assert config.max_tokens == 256


@pytest.mark.parametrize("name", list(OTHER))
def test_the_hash_follows_every_knob_wherever_it_is_set(name: str) -> None:
    value = OTHER[name][1]
    before = config.get_hash()
    with config.patch(name, value):
        patched = config.get_hash()
    with config.arguments({name: value}):
        assert config.get_hash() == patched
    setattr(config, name, value)
    assert before != patched == config.get_hash()


def test_the_readme_lists_every_knob_with_its_default(root: Path) -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `(.+?)` \| `(\w+)` \|", (root / "README.md").read_text(), re.M
    )
    expected = [
        (n, repr(config.default(n)), config.env_name(n)) for n in config.names()
    ]
    assert rows == expected


@pytest.mark.parametrize("name", config.names())
def test_the_quick_read_is_the_attribute(name: str) -> None:
    other = OTHER[name][1]

    def both() -> Any:
        assert config.read(name) == getattr(config, name)
        return config.read(name)

    assert both() == config.default(name)
    with config.patch(**{name: other}):
        assert both() == other
        with config.arguments({name: config.default(name)}):
            assert both() == config.default(name)
    assert both() == config.default(name)
    setattr(config, name, other)
    assert both() == other
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(both()))
    thread.start()
    thread.join()
    assert seen == [other]
    code = f"print(config.read({name!r}) == config.{name} == {other!r})"
    assert in_process(code, **{name: OTHER[name][0]}) == "True"
