"""Turns of a group's micro-batches with the collectives that stand in for exchanges.

Direct exchanges of micro-batches go through workspaces of their own. The collectives
that stand in for them share one process group, which pairs calls by their order; and in
which order the threads of a rank get there differs from rank to rank. So rank 0
decides: a thread of it that is next takes turn k, writes ``k: micro-batch`` to the
group's store, and makes its collectives; on the other ranks turn k goes to the thread
of this micro-batch. A rank's next turn begins when this one is over: when the results
are there on CPUs, and when the work is on a stream on GPUs.

It cannot block, as long as a thread gets to its next call without help from another
micro-batch: let turn k be the first that does not end. Rank 0 has given it to micro-
batch i, so its thread i stands in the collectives of its n-th such call. On every other
rank thread i has made, or is on its way to, the same n-th call, since its calls are the
same on all ranks. On this way there are earlier turns, which have ended, and direct
exchanges of micro-batch i, which rank 0 has behind it. So the threads i of all ranks
meet, and turn k ends. A thread that does wait for another micro-batch's (for a lock of
the user's that it holds, say) would get other micro-batches' data without turns; with
them its wait ends after ``config.timeout_s``.

It costs a write to the store by rank 0 and, on the others, reads of it until the turn
has come (some 0.1 ms each over TCP), once per call that takes the collectives, and one
rendezvous of all ranks ahead of the first. Where a group has one micro-batch and the
caller is not within ``ubatch()`` nobody takes turns.

The rendezvous gives the turns a name that no earlier ones in the store had. A recovery
forgets them, on all ranks, and the next call starts anew.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dcp_inductor import config, votes
from dcp_inductor.bounded_store import BoundedStore
from dcp_inductor.capability import Refusal
from dcp_inductor.errors import DCPTimeoutError, FaultRecord, with_way_on
from dcp_inductor.runtime import bootstrap, rendezvous, ubatch

# Keys are used again after so many turns. No rank can be as far behind: on CPUs a turn
# ends when all ranks are in it, and a GPU's queue is shorter.
_KEYS = 4096
_SHORTEST_NAP_S = 50e-6
_LONGEST_NAP_S = 2e-3
_LOOK_EVERY_S = 1.0

_lock = threading.Lock()
_turns: WeakKeyDictionary[dist.ProcessGroup, Turns] = WeakKeyDictionary()
# Held while the ranks meet ahead of the first turn.
_openings: WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = WeakKeyDictionary()


class Turns:
    """One rank's view of the turns.

    Args:
        store: shared by the ranks, and by nobody else.
        rank: this one; 0 decides.
        group_name: for errors.
    """

    def __init__(self, store: BoundedStore, rank: int, group_name: str) -> None:
        self._store = store
        self._rank = rank
        self._group_name = group_name
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()  # calls, in the order they came
        self._holder: object = None
        self._number = 0  # of the turn that is on, or comes next
        self._owner: int | None = None  # its micro-batch, as far as it has been read

    @contextmanager
    def take(
        self,
        index: int,
        op: str,
        site: str,
        timeout_s: float,
        look: Callable[[], object] = lambda: None,
    ) -> Iterator[None]:
        """Hold a turn of micro-batch ``index``, however the body ends.

        ``look`` is called every second of a wait, and may end it by raising.

        Raises:
            DCPTimeoutError: the turn did not come in time.
            DCPError: the store cannot be reached.
        """
        call = object()
        try:
            with self._condition, rendezvous.reachable():
                self._waiting.append(call)
                if not self._wait(call, index, timeout_s, look):
                    raise self._late(index, op, site, timeout_s)
                self._begin(call, index)
            yield
        finally:
            self._end(call)

    def _wait(
        self, call: object, index: int, timeout_s: float, look: Callable[[], object]
    ) -> bool:
        now = time.monotonic()
        deadline, look_at = now + timeout_s, now + _LOOK_EVERY_S
        nap_s = _SHORTEST_NAP_S
        while not self._is_next(call, index):
            now = time.monotonic()
            if now >= look_at:
                look()
                look_at = now + _LOOK_EVERY_S
            if now >= deadline:
                return False
            # What happens on this rank is told; the store has to be asked.
            told = self._rank == 0 or self._holder is not None
            limit_s = _LOOK_EVERY_S if told else nap_s
            self._condition.wait(min(limit_s, deadline - now))
            if not told:
                nap_s = min(nap_s * 1.5, _LONGEST_NAP_S)
        return True

    def _is_next(self, call: object, index: int) -> bool:
        if self._holder is not None:
            return False
        if self._rank == 0:  # in the order they came, or one might never get there
            return self._waiting[0] is call
        if self._owner is None and self._store.check([self._key()]):
            number, _, owner = self._store.get(self._key()).decode().partition(":")
            if int(number) == self._number:
                self._owner = int(owner)
        return self._owner == index

    def _begin(self, call: object, index: int) -> None:
        self._waiting.remove(call)
        key, said = self._key(), f"{self._number}:{index}"
        # With nothing between these two that a signal could interrupt: a turn that was
        # announced must be counted.
        self._holder = call
        if self._rank == 0:
            self._store.set(key, said)
            self._owner = index

    def _end(self, call: object) -> None:
        with self._condition:
            if call in self._waiting:
                self._waiting.remove(call)
            if self._holder is call:
                self._holder = self._owner = None
                self._number += 1
            self._condition.notify_all()

    def _key(self) -> str:
        return str(self._number % _KEYS)

    def _late(
        self, index: int, op: str, site: str, timeout_s: float
    ) -> DCPTimeoutError:
        record = FaultRecord(
            op=op, site=site, group_name=self._group_name, rank=self._rank,
            peer=0 if self._rank else -1, epoch_wanted=0, epoch_seen=0,
        )  # fmt: skip
        at = f" at site {site}" if site else ""
        if self._owner is not None:
            seen = f"is micro-batch {self._owner}'s and has not ended on this rank"
        elif self._rank:
            seen = "has not been given to any by rank 0"
        else:
            seen = "has others ahead of it"
        late = DCPTimeoutError(record, timeout_s)
        late.args = (
            with_way_on(
                f"{op}{at}: rank {self._rank} of group '{self._group_name}' waited "
                f"{timeout_s:g} s for micro-batch {index} to have a turn with the "
                "collectives that stand in for a direct exchange; turn "
                f"{self._number} {seen}. Every rank must make the same calls in each "
                "micro-batch, and none may wait for another micro-batch within one; "
                "or raise DCP_INDUCTOR_TIMEOUT_S if a peer was only slow"
            ),
        )
        return late


@contextmanager
def take(group: dist.ProcessGroup, op: str, site: str) -> Iterator[None]:
    """Hold a turn of this thread's micro-batch with the collectives of ``group``.

    Every rank must call this, in the same order within a micro-batch.

    Raises:
        DCPTimeoutError: the turn did not come within ``config.timeout_s``.
        DCPDisagreementError: a peer has left.
        DCPError: the store cannot be reached.
    """
    timeout_s = config.read("timeout_s")
    name = group.group_name

    def look() -> None:
        votes.check_departures(name, site)

    turns = _turns.get(group) or _open(group, op, site, timeout_s, look)
    if turns is None:
        yield
        return
    with turns.take(ubatch.current(), op, site, timeout_s, look):
        yield


def reset(group: dist.ProcessGroup) -> None:
    """Forget the turns of a group; all its ranks do, and none of them has one."""
    _turns.pop(group, None)


def _open(
    group: dist.ProcessGroup,
    op: str,
    site: str,
    timeout_s: float,
    look: Callable[[], object],
) -> Turns | None:
    """Meet the other ranks ahead of the first turn; None where they cannot meet."""
    store = bootstrap.meeting_place(group)
    if isinstance(store, Refusal):
        return None
    store = store.within("dcp_inductor_turns")
    with _lock:
        opening = _openings.setdefault(group, threading.Lock())
    with opening:
        turns = _turns.get(group)
        if turns is None:
            with bootstrap.in_time(group, timeout_s, op, site):
                session = rendezvous.Session(
                    store, group.rank(), group.size(), timeout_s, while_waiting=look
                )
            own = store.within(session.name)
            turns = Turns(own, group.rank(), group.group_name)
            _turns[group] = turns
    return turns
