"""Byte-level tokens: 0 to 255 are the bytes of UTF-8 text, then begin and end."""

from __future__ import annotations

from collections.abc import Sequence

BOS = 256
EOS = 257
VOCAB_SIZE = 258


def encode(text: str) -> list[int]:
    """Begin token and the bytes of ``text``."""
    return [BOS, *text.encode()]


def decode(tokens: Sequence[int]) -> str:
    """Text of the bytes among ``tokens``; a broken character becomes a replacement."""
    return bytes(token for token in tokens if token < BOS).decode(errors="replace")
