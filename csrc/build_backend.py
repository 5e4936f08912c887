"""setuptools as a build backend that compiles against the torch already installed.

The compiled library uses torch's stable ABI, so the headers of any supported torch will
do. An isolated build sees only its own environment; downloading a second torch into
that takes minutes and gigabytes. So the environment that is installed into is searched
too, after the build's own, and torch becomes a build requirement only where neither has
it."""

from __future__ import annotations

import importlib.util
import site
import sys
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

sys.path += [
    path
    for path in [*site.getsitepackages(), site.getusersitepackages()]
    if path not in sys.path
]


def _and_torch(requirements: list[str]) -> list[str]:
    found = importlib.util.find_spec("torch") is not None
    return requirements if found else [*requirements, "torch>=2.11"]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return _and_torch(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return _and_torch(build_meta.get_requires_for_build_editable(config_settings))
