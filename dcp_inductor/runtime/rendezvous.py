"""A bounded all-gather over a group's store, for the few words that set a workspace up.

The store may hold keys of an earlier attempt, of a group that was destroyed, or of
ranks that had tried more often than others. So a session starts with a handshake: every
rank posts a fresh nonce, rank 0 offers the list of nonces it sees, a rank acknowledges
only an offer with its own latest nonce, and the session is open when all have
acknowledged the same offer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from dcp_inductor.bounded_store import BoundedStore
from dcp_inductor.errors import DCPError

_PREFIX = "dcp_inductor/session"
_LONGEST_NAP_S = 0.02
_LOOK_EVERY_S = 1.0


class PeersMissingError(Exception):
    """Ranks that did not come to the rendezvous in time."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"no sign of ranks {ranks}")
        self.ranks = ranks


@contextlib.contextmanager
def reachable() -> Iterator[None]:
    """Raise DCPError where the store cannot be reached in the body."""
    try:
        yield
    except dist.DistError as error:
        raise DCPError(
            "the store of the process group cannot be reached; the process that holds "
            f"it, usually rank 0, may have ended or be stopped: {error}. Start all "
            "ranks anew, or "
            "call torch.distributed.destroy_process_group() and "
            "init_process_group(...) at another address on those that still run, and "
            "compile the model for the new group"
        ) from error


class Session:
    """A rendezvous of all ranks of a group, in rounds."""

    def __init__(
        self,
        store: dist.Store | BoundedStore,
        rank: int,
        world_size: int,
        timeout_s: float,
        while_waiting: Callable[[], object] = lambda: None,
    ) -> None:
        """Open a session with all ranks.

        ``while_waiting`` is called every second of a wait, and may end it by raising.

        Raises:
            PeersMissingError: some rank did not come within ``timeout_s``; the rounds
                that follow may take as long together.
            DCPError: the store cannot be reached.
        """
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._deadline = time.monotonic() + timeout_s
        self._while_waiting = while_waiting
        self._rounds = 0
        with reachable():
            self._name = self._handshake()
        # All are here: the rounds have a time of their own, or one that came early
        # would have none left for what those that came late still do.
        self._deadline = time.monotonic() + timeout_s

    @property
    def name(self) -> str:
        """The same on all ranks, and of no other session in the store."""
        return self._name

    def exchange(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's ``payload``, by rank; a round that all ranks must make.

        Raises:
            PeersMissingError: some rank did not post its payload before the session's
                deadline.
            DCPError: the store cannot be reached.
        """
        prefix = f"{_PREFIX}/{self._name}/{self._rounds}"
        self._rounds += 1
        keys = [f"{prefix}/{peer}" for peer in range(self._world_size)]
        with reachable():
            self._store.set(f"{prefix}/{self._rank}", json.dumps(payload))
            self._wait_for(keys)
            return [json.loads(self._store.get(key)) for key in keys]

    def _handshake(self) -> str:
        nonce = secrets.token_hex(8)
        hellos = [f"{_PREFIX}/hello/{peer}" for peer in range(self._world_size)]
        self._store.set(hellos[self._rank], nonce)
        offer: list[str] = []
        acknowledged = ""
        acks: list[str] = []
        nap = _Nap(self._deadline, self._while_waiting)
        while True:
            # Ahead of any new offer: a peer that saw all acks sooner may be in the next
            # session by now, which this rank must not take for the one it is in.
            if acknowledged and self._store.check(acks):
                return acknowledged
            if self._rank == 0:
                seen = [self._peek(key) for key in hellos]
                if all(seen) and seen != offer:
                    offer = seen
                    self._store.set(f"{_PREFIX}/offer", json.dumps(offer))
            else:
                offer = json.loads(self._peek(f"{_PREFIX}/offer") or "[]")
            if len(offer) == self._world_size and offer[self._rank] == nonce:
                name = hashlib.sha256("-".join(offer).encode()).hexdigest()[:32]
                acks = [
                    f"{_PREFIX}/{name}/ack/{peer}" for peer in range(self._world_size)
                ]
                if acknowledged != name:
                    self._store.set(acks[self._rank], "1")
                    acknowledged = name
                    continue
                missing = acks
            else:
                missing = hellos
            if not nap.take():
                raise PeersMissingError(self._absent(missing))

    def _wait_for(self, keys: list[str]) -> None:
        nap = _Nap(self._deadline, self._while_waiting)
        while not self._store.check(keys):
            if not nap.take():
                raise PeersMissingError(self._absent(keys))

    def _peek(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _absent(self, keys: list[str]) -> list[int]:
        absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        # Keys of an earlier attempt may stand in for a rank that is not there.
        return absent or [
            rank for rank in range(self._world_size) if rank != self._rank
        ]


class _Nap:
    """Sleeps that grow from one call to the next, until a deadline."""

    def __init__(self, deadline: float, look: Callable[[], object]) -> None:
        self._deadline = deadline
        self._seconds = 0.0005
        self._look = look
        self._look_at = time.monotonic() + _LOOK_EVERY_S

    def take(self) -> bool:
        """Sleep; False when the deadline has passed."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            self._look()
        left = self._deadline - now
        if left <= 0:
            return False
        time.sleep(min(self._seconds, left))
        self._seconds = min(self._seconds * 1.5, _LONGEST_NAP_S)
        return True
