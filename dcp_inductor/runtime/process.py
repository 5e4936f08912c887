"""Which process is which: identity of a rank's process, and whether it still runs."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """Identity of a process; ``namespace`` is the one that ``pid`` counts in."""

    hostname: str
    boot_id: str
    namespace: str
    uid: int
    pid: int
    start_time: int

    def as_dict(self) -> dict[str, str | int]:
        """For the wire."""
        return asdict(self)

    def is_dead(self) -> bool:
        """Whether the process has certainly ended; False where that cannot be known."""
        here = current()
        if (self.boot_id, self.namespace) != (here.boot_id, here.namespace):
            return False
        return start_time_of(self.pid) != self.start_time


def start_time_of(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None: gone, or a zombie."""
    try:
        # The name, in parentheses, may hold anything; fields are counted behind it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def current() -> Process:
    """This process; read anew on every call, since it may have been forked."""
    pid = os.getpid()
    return Process(
        hostname=socket.gethostname(),
        boot_id=_read("/proc/sys/kernel/random/boot_id"),
        namespace=_namespace(),
        uid=os.getuid(),
        pid=pid,
        start_time=start_time_of(pid) or 0,
    )
