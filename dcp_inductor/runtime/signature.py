"""What a rank says about an exchange, so that a peer with another one is found out.

A signature is 256 bytes, published with the epoch and compared byte for byte by every
peer. It holds what must be equal on all ranks, in a form that can be printed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from dcp_inductor.runtime import layout

_SEPARATOR = "|"


@dataclass(frozen=True)
class Signature:
    """One exchange as its ranks must agree on it."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    options: str
    route: str
    site: str

    def pack(self) -> bytes:
        """The bytes to publish; what does not fit is cut and marked by a checksum."""
        shape = "x".join(map(str, self.shape))
        text = _SEPARATOR.join(
            (self.op, shape, self.dtype, self.options, self.route, self.site)
        )
        data = text.encode()
        if len(data) > layout.SIGNATURE_BYTES:
            mark = f"~{zlib.crc32(data):08x}".encode()
            data = data[: layout.SIGNATURE_BYTES - len(mark)] + mark
        return data.ljust(layout.SIGNATURE_BYTES, b"\0")


def describe(packed: bytes) -> str:
    """A published signature in words."""
    op, shape, dtype, options, route, site = _fields(packed)
    words = [f"{op}[{shape.replace('x', ', ')}] {dtype}"]
    words += [word for word in (options, f"by {route}" if route else "") if word]
    words += [f"at site {site}"] if site else []
    return ", ".join(words)


def differ_in_route(packed: bytes, other: bytes) -> bool:
    """Whether two published signatures are of equal calls that go different ways."""
    own, its = _fields(packed), _fields(other)
    return own[4] != its[4] and own[:4] == its[:4] and own[5] == its[5]


def _fields(packed: bytes) -> list[str]:
    fields = packed.rstrip(b"\0").decode(errors="replace").split(_SEPARATOR)
    return [*fields, *[""] * 6][:6]
