"""All recipes: importing this module fills the registry."""

from __future__ import annotations

from . import (
    family_a,
    family_a_guarded,
    family_b,
    family_c,
    family_d,
    family_f,
    family_h,
    family_i,
    gathers,
    gathers_kv,
    near_misses,
    near_misses_behind,
    near_misses_exchange,
    near_misses_forms,
    near_misses_values,
    surroundings,
    uneven,
)
from .cases import REGISTRY

# Torch 2.13 cannot trace these with an unbacked token count: it cannot chunk or divide
# a size it does not know, nor decide whether a tensor of zeros with it is contiguous.
for _case_id in (
    "A/chunks/softmax row/rs view",
    "A/chunks/sigmoid of the rest/rs",
    "D/chunks/max pair div/split",
    "D/chunks/maximum fold/narrow",
    "FC-02 clamp 1e-30",
    "FC-18 greater",
    "FC-45 unflatten",
    "FC-45 chunks",
    "FC-45 lse",
    "FC-45 reduce-scatter",
    "FC-57 tokens",
    "G3",
    "G3 split",
    "G10",
    "G18 buffer",
    "K2",
    "NM-32",
    "NM-35",
    "NM-39",
):
    REGISTRY.amend(_case_id, unbacked=False)

__all__ = [
    "REGISTRY",
    "family_a",
    "family_a_guarded",
    "family_b",
    "family_c",
    "family_d",
    "family_f",
    "family_h",
    "family_i",
    "gathers",
    "gathers_kv",
    "near_misses",
    "near_misses_behind",
    "near_misses_exchange",
    "near_misses_forms",
    "near_misses_values",
    "surroundings",
    "uneven",
]
