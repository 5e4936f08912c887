"""All recipes: importing this module fills the registry."""

from __future__ import annotations

from . import family_a, family_b, family_c, family_d, family_f
from .cases import REGISTRY

__all__ = ["REGISTRY", "family_a", "family_b", "family_c", "family_d", "family_f"]
