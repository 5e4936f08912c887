"""POSIX shared memory: segments that one rank creates and its peers map.

A segment's pages are reserved when it is created, so that a small ``/dev/shm`` fails
here and not by a signal in the middle of an exchange. The creator unlinks it as soon as
all peers have mapped it; what a killed creator leaves behind in that moment is swept by
the next one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from dcp_inductor.runtime import process

DIRECTORY = Path("/dev/shm")
_PREFIX = "dcp_inductor"

_libc = ctypes.CDLL(None, use_errno=True)
_FAILED = ctypes.c_void_p(-1).value
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    ctypes.c_long,
)  # fmt: skip
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class _Mapping:
    """Pages of a descriptor, mapped for as long as the object lives.

    Not ``mmap.mmap``, which keeps a descriptor of its own open for each mapping (before
    Python 3.13 always): a process that makes groups again and again ran out of them.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = _mmap(None, size, access, mmap.MAP_SHARED, descriptor, 0)
        if address is None or address == _FAILED:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self.address, self.size = address, size

    def __del__(self, munmap: Callable[[int, int], int] = _munmap) -> None:
        if hasattr(self, "address"):
            munmap(self.address, self.size)


class Segment:
    """A mapped segment: its name, size, address in this process, and bytes.

    Mapped for as long as the object or its view lives: a launch on another thread may
    be using it.
    """

    def __init__(self, name: str, descriptor: int, size: int) -> None:
        self.name = name
        self.size = size
        self._mapping = _Mapping(descriptor, size)
        self.address = self._mapping.address
        pages = (ctypes.c_char * size).from_address(self.address)
        pages.mapping = self._mapping  # type: ignore[attr-defined]
        self.view = memoryview(pages).cast("B")

    def unlink(self) -> None:
        """Remove the name; the memory lives until the last rank has closed it."""
        (DIRECTORY / self.name).unlink(missing_ok=True)


def create(size: int) -> Segment:
    """A new zeroed segment of ``size`` bytes, all of them reserved.

    Raises:
        OSError: no shared memory on this system, or not enough of it left.
    """
    owner = process.current()
    name = "-".join(
        map(str, (_PREFIX, owner.uid, owner.namespace, owner.pid, owner.start_time))
    )
    name = f"{name}-{secrets.token_hex(8)}"
    path = DIRECTORY / name
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return Segment(name, descriptor, size)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def attach(name: str, size: int) -> Segment:
    """Map a peer's segment.

    Raises:
        OSError: it cannot be opened, belongs to another user, or has another size.
    """
    if Path(name).name != name or not name.startswith(_PREFIX):
        raise OSError(f"expected the name of a segment, got {name!r}")
    descriptor = os.open(DIRECTORY / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_size != size:
            raise OSError(
                f"expected segment {name} of user {os.getuid()} with {size} bytes, got "
                "user "
                f"{status.st_uid} and {status.st_size} bytes"
            )
        return Segment(name, descriptor, size)
    finally:
        os.close(descriptor)


def sweep() -> int:
    """Remove this user's segments whose creators have ended; returns how many."""
    here = process.current()
    removed = 0
    for path in DIRECTORY.glob(f"{_PREFIX}-{here.uid}-{here.namespace}-*"):
        fields = path.name.split("-")
        if len(fields) != 6 or not (fields[3].isdigit() and fields[4].isdigit()):
            continue
        if process.start_time_of(int(fields[3])) != int(fields[4]):
            path.unlink(missing_ok=True)
            removed += 1
    return removed
