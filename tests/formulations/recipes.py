"""All recipes: importing this module fills the registry."""

from __future__ import annotations

from . import (
    family_a,
    family_a_guarded,
    family_b,
    family_c,
    family_d,
    family_f,
    gathers,
    gathers_kv,
    near_misses,
    near_misses_exchange,
    near_misses_values,
    surroundings,
    uneven,
)
from .cases import REGISTRY

__all__ = [
    "REGISTRY",
    "family_a",
    "family_a_guarded",
    "family_b",
    "family_c",
    "family_d",
    "family_f",
    "gathers",
    "gathers_kv",
    "near_misses",
    "near_misses_exchange",
    "near_misses_values",
    "surroundings",
    "uneven",
]
