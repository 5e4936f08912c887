"""What a rank says about an exchange, so that a peer with another one is found out.

A signature is 256 bytes, published with the epoch and compared byte for byte by every
peer. It holds what must be equal on all ranks, in a form that can be printed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from dcp_inductor import config
from dcp_inductor.runtime import layout

_SEPARATOR = "|"
_FIELDS = ("op", "shape", "dtype", "options", "route", "site")


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
    words = [f"{op}[{shape.replace('x', ', ')}] {dtype}" if dtype else op]
    words += [word for word in (options, f"by {route}" if route else "") if word]
    words += [f"at site {site}"] if site else []
    return ", ".join(words)


def contrast(rank: int, own: bytes, peer: int, other: bytes) -> str:
    """Two ranks' published signatures in words, in what they differ, and what to do."""
    pairs = zip(_FIELDS, _fields(own), _fields(other), strict=True)
    differing = [name for name, mine, its in pairs if mine != its]
    said = (
        f"rank {rank} came with {describe(own)}; rank {peer} came with "
        f"{describe(other)}. They differ in {' and '.join(differing) or 'nothing'}. "
        "Every rank must make the same sequence of exchanges with equal shapes, dtypes "
        "and options"
    )
    if differing == ["options"]:
        scatters = [_scatter(packed) for packed in (own, other)]
        if scatters[0] != scatters[1]:
            said += (
                ". They differ in scatter: of a static size, a slice of the merge that "
                "is one rank's share is taken for that share there, and for a slice of "
                "the whole elsewhere. Mark the dim dynamic (torch._dynamo.mark_dynamic)"
                " or set direct_combine to 'disable'"
            )
    if not {*differing} <= {"route", "site"}:
        return said
    if "route" in differing:
        said += (
            "; equal calls that go different ways point to different settings: set "
            f"max_tokens ({config.max_tokens} on rank {rank}) and the other knobs "
            "alike on all ranks"
        )
    hashes = {_fields(packed)[-1].partition("#")[2] for packed in (own, other)}
    if "site" in differing and len(hashes) == 1 and hashes != {""}:
        said += (
            "; a site names the exchange in a compiled graph: file:line, and a hash of "
            "what the graph computes there. Equal hashes at different lines come from "
            "a graph of one rank that Inductor cached before the file was edited: "
            "clear the cache (TORCHINDUCTOR_CACHE_DIR) on all ranks"
        )
    elif "site" in differing:
        said += (
            "; a site names the exchange in a compiled graph: file:line, and a hash of "
            "what the graph computes there (none: outside of such a graph). Equal "
            "calls at different sites come from ranks that compiled the model "
            "differently, took different branches, or compute with other numbers (a "
            "scale of their own, say): compile alike on all ranks, with the same "
            "arguments of torch.compile, marks of dynamic dims "
            "(torch._dynamo.mark_dynamic) and versions"
        )
    return said


def _scatter(packed: bytes) -> str:
    options = _fields(packed)[_FIELDS.index("options")].split()
    return next((word for word in options if word.startswith("scatter=")), "")


def _fields(packed: bytes) -> list[str]:
    fields = packed.rstrip(b"\0").decode(errors="replace").split(_SEPARATOR)
    return [*fields, *[""] * len(_FIELDS)][: len(_FIELDS)]
