"""The shared memory of a group and micro-batch, and its bounded exchanges.

All exchanges of a group go through one sequence of epochs, whatever their op and
geometry: so two ranks that come with different exchanges meet and notice, and two slots
suffice for every arena (csrc/cpu/sync.h has the argument). Arenas hold payload. They
are created when first needed, by all ranks in the same call, are never grown or moved,
and serve every geometry that fits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from dcp_inductor import config, launch_ops, votes
from dcp_inductor.capability import Refusal
from dcp_inductor.errors import (
    DCPError,
    DCPMismatchError,
    DCPTimeoutError,
    FaultRecord,
    with_way_on,
)
from dcp_inductor.runtime import layout, shm
from dcp_inductor.runtime.process import Process
from dcp_inductor.runtime.signature import Signature, contrast

log = logging.getLogger(__name__)

# A launch returns this often while it waits, so that signals and dead peers are
# noticed.
PATIENCE_S = 0.1
# Votes are read after this much waiting, and then as often.
VOTES_AFTER_S = 1.0
_SPIN_S = 50e-6
_DONE = launch_ops.DONE
_ANSWER = b"answer "


class Workspace:
    """One rank's side of the exchanges of a group and micro-batch.

    Args:
        controls: control block of every rank, as mapped here.
        addresses: where they are mapped.
        processes: the ranks' processes.
    """

    def __init__(
        self,
        group_name: str,
        rank: int,
        controls: list[memoryview],
        addresses: list[int],
        processes: list[Process],
        owners: list[shm.Segment],
    ) -> None:
        self.group_name = group_name
        self.rank = rank
        self.world_size = len(controls)
        self.plans: dict[Any, Any] = {}
        self._controls = controls
        self._addresses = addresses
        self._processes = processes
        self._owners = owners
        self._pid = os.getpid()
        # The call that is within an exchange: its thread, in a tuple of its own.
        self._within: dict[str, tuple[int]] = {}
        self._why_dead = ""
        self._tables: dict[int, Tensor] = {}
        self._arenas: list[shm.Segment] = []
        self._refused_bytes: dict[int, Refusal] = {}
        self._header_table = self._table(0, [0] * self.world_size)

    def check(self) -> None:
        """Raise what the next exchange would raise at once.

        Raises:
            DCPError: the workspace is out of use, or belongs to a parent process.
        """
        self.refuse_fork()
        if self._why_dead:
            self._refuse()

    def refuse_fork(self) -> None:
        """Raise DCPError in a process that inherited the workspace by a fork."""
        if self._pid != os.getpid():
            raise DCPError(
                f"the workspace of group '{self.group_name}' belongs to process "
                f"{self._pid}, and this is its fork {os.getpid()}; create the process "
                "group after forking"
            )

    @property
    def epoch(self) -> int:
        """Number of the last exchange that this rank began."""
        return layout.read_u32(self._controls[self.rank], layout.EPOCH)

    def run(
        self,
        launch: Callable[..., int],
        arguments: Sequence[Any],
        op: str,
        site: str,
        rows: int = 0,
    ) -> None:
        """Make one exchange: ``launch(*arguments, resume)`` until it is done.

        ``rows`` of the exchange are what a peer may have refused it for. However a call
        ends that has published, KeyboardInterrupt included, either all ranks know how
        or the workspace is dead: a call made again would meet the peers' next one.

        Raises:
            DCPError: the workspace is out of use, or in use by another thread.
            DCPTimeoutError: a peer did not arrive in time, has ended, or has given up.
            DCPMismatchError: a peer arrived with another exchange.
            DCPDisagreementError: a peer has refused ``site``.
        """
        if self._why_dead or self._pid != os.getpid():
            self._refuse()
        # Released last and not by ``finally``: a second signal may come on the way out
        # of the first, and the next call tells by what is left here.
        mine = (threading.get_ident(),)
        begun = None
        try:
            holder = self._within.setdefault("call", mine)
            if holder is not mine:
                self._refuse_second(holder, op)
            begun = self.epoch
            status = launch(*arguments, False)
            if status != _DONE:
                self._settle(lambda: launch(*arguments, True), status, op, site, rows)
        except BaseException as error:
            if self._within.get("call") is mine:
                published = begun is not None and self.epoch != begun
                # All ranks see a mismatch, see _settle.
                if published and not isinstance(error, DCPMismatchError):
                    self.mark_dead(broken_off(op, error))
                del self._within["call"]
            raise
        del self._within["call"]

    def table_for(self, needed: int, call: Signature) -> Tensor | Refusal:
        """Launch table of an arena with ``needed`` bytes a slot, made at need.

        Creation takes exchanges of its own: all ranks get here in the same call, since
        their workspaces have the same history.
        """
        votes.runs(self.group_name, call.site)
        for slot_bytes, table in sorted(self._tables.items()):
            if slot_bytes >= needed:
                return table
        slot_bytes = layout.arena_slot_bytes(needed)
        for refused, refusal in self._refused_bytes.items():
            if slot_bytes >= refused:
                return refusal
        begun = self.epoch
        try:
            self.agree(replace(call, route=f"set-up of {slot_bytes} bytes"))
            created = self._create_arena(slot_bytes, call.op, call.site)
            if isinstance(created, Refusal):
                self._refused_bytes[slot_bytes] = created
            else:
                self._tables[slot_bytes] = created
        except DCPMismatchError:
            raise
        except BaseException as error:
            if self.epoch != begun:  # peers may have the arena
                self.mark_dead(broken_off(call.op, error))
            raise
        return created

    def agree(self, call: Signature) -> None:
        """Exchange without payload: all ranks have the same signature, or all raise."""
        arguments = (self._header_table, as_tensor(call.pack()), True)
        rows = call.shape[0] if call.shape else 0
        self.run(launch_ops.shm_agree, arguments, call.op, call.site, rows)

    def mark_dead(self, reason: str) -> None:
        """No exchange can be made any more; peers that wait for this rank are told."""
        self._why_dead = self._why_dead or reason
        layout.write_u32(self._controls[self.rank], layout.DEAD, 1)

    def refuse_ended_peers(self, op: str) -> None:
        """Raise where ``op`` waits for a rank whose process has ended.

        Raises:
            DCPTimeoutError: names the rank.
        """
        for peer in range(self.world_size):
            if peer != self.rank and (why := self._ended(peer)):
                raise self._lost(why, op, "", peer, 0.0)

    def _table(self, slot_bytes: int, arenas: list[int]) -> Tensor:
        # With more ranks than processors a rank that spins keeps its peers waiting.
        crowded = self.world_size > len(os.sched_getaffinity(0))
        spin_ns = 0 if crowded else int(_SPIN_S * 1e9)
        words = layout.table_words(
            self.rank, spin_ns, int(PATIENCE_S * 1e9), slot_bytes, self._addresses,
            arenas,
        )  # fmt: skip
        return torch.tensor(words, dtype=torch.int64)

    def _create_arena(self, slot_bytes: int, op: str, site: str) -> Tensor | Refusal:
        size = layout.arena_bytes(slot_bytes)
        mine, segments = None, []
        try:
            try:
                mine = shm.create(size)
                answer, failure = mine.name, ""
            except OSError as error:
                answer, failure = (
                    "",
                    f"cannot create {size} bytes of shared memory: {error}",
                )
            names, refusal = self._answers(answer, failure, op, site)
            if refusal or mine is None:
                return refusal or Refusal("allocation", "no arena")
            failure = ""
            for peer, name in enumerate(names):
                try:
                    segments.append(
                        mine if peer == self.rank else shm.attach(name, size)
                    )
                except OSError as error:
                    failure = f"cannot map the arena of rank {peer}: {error}"
                    break
            _, refusal = self._answers("", failure, op, site)
            if refusal:
                return refusal
        finally:
            if mine is not None:
                mine.unlink()
        self._arenas += segments
        return self._table(slot_bytes, [segment.address for segment in segments])

    def _answers(
        self, answer: str, failure: str, op: str, site: str
    ) -> tuple[list[str], Refusal | None]:
        """Every rank's answer in the set-up of an arena, and the first failure."""
        text = f"no {failure}" if failure else f"yes {answer}"
        packed = (_ANSWER + text.encode())[: layout.SIGNATURE_BYTES]
        words = as_tensor(packed.ljust(layout.SIGNATURE_BYTES, b"\0"))
        self.run(launch_ops.shm_agree, (self._header_table, words, False), op, site)
        answers, refusal = [], None
        for rank in range(self.world_size):
            said = self._published(rank)
            if not said.startswith(_ANSWER):
                raise self._mismatch(rank)
            word, _, detail = said[len(_ANSWER) :].rstrip(b"\0").decode().partition(" ")
            answers.append(detail)
            if word == "no" and refusal is None:
                refusal = Refusal("allocation", f"rank {rank}: {detail}")
        return answers, refusal

    def _published(self, rank: int) -> bytes:
        """The signature that a rank published with this rank's current epoch."""
        start = layout.slot_offset(self.epoch) + layout.SIGNATURE
        return bytes(self._controls[rank][start : start + layout.SIGNATURE_BYTES])

    def _settle(
        self, resume: Callable[[], int], status: int, op: str, site: str, rows: int
    ) -> None:
        start = time.monotonic()
        votes_at = start + VOTES_AFTER_S
        while status == launch_ops.PENDING:
            now = time.monotonic()
            self._look_for_lost_peers(op, site, rows, now - start)
            if now >= votes_at:
                self._compare_votes(site, rows)
                votes_at = now + VOTES_AFTER_S
            if now - start >= config.timeout_s:
                peer = layout.read_u32(self._controls[self.rank], layout.FAULT_PEER)
                raise DCPTimeoutError(self._record(op, site, peer), config.timeout_s)
            status = resume()
        if status == launch_ops.MISMATCH:
            peer = layout.read_u32(self._controls[self.rank], layout.FAULT_PEER)
            mismatch = self._mismatch(peer)
            if not all(map(self._has_arrived, range(self.world_size))):
                # Without a peer that may still read the slot of the call before.
                self.mark_dead(str(mismatch))
            raise mismatch

    def _compare_votes(self, site: str, rows: int) -> None:
        try:
            votes.check_waiting(self.group_name, site, rows)
        except DCPError:
            raise
        except RuntimeError as error:
            # The store went with a peer; the wait goes on to its own end.
            log.debug("votes on site %s not read: %s", site, error)

    def _look_for_lost_peers(
        self, op: str, site: str, rows: int, waited_s: float
    ) -> None:
        for peer in range(self.world_size):
            if peer == self.rank or self._has_arrived(peer):
                continue
            if layout.read_u32(self._controls[peer], layout.DEAD):
                self._compare_votes(site, rows)
                why = f"rank {peer} has given up on the group"
            elif not (why := self._ended(peer)):
                continue
            if self._has_arrived(peer):  # it published, and then ended
                continue
            raise self._lost(why, op, site, peer, waited_s)

    def _ended(self, peer: int) -> str:
        """Words for a peer whose process has certainly ended, "" otherwise."""
        process = self._processes[peer]
        if not process.is_dead():
            return ""
        return f"the process of rank {peer} (pid {process.pid}) has ended"

    def _lost(
        self, why: str, op: str, site: str, peer: int, waited_s: float
    ) -> DCPTimeoutError:
        error = DCPTimeoutError(self._record(op, site, peer), round(waited_s, 1))
        error.args = (f"{why}: {error.args[0]}",)
        return error

    def _has_arrived(self, peer: int) -> bool:
        offset = layout.slot_offset(self.epoch)
        return layout.read_u32(self._controls[peer], offset) == self.epoch

    def _record(self, op: str, site: str, peer: int) -> FaultRecord:
        even, odd = (
            layout.read_u32(self._controls[peer], layout.slot_offset(parity))
            for parity in (0, 1)
        )
        return FaultRecord(
            op=op, site=site, group_name=self.group_name, rank=self.rank, peer=peer,
            epoch_wanted=self.epoch,
            epoch_seen=even if layout.is_later(even, odd) else odd,
        )  # fmt: skip

    def _mismatch(self, peer: int) -> DCPMismatchError:
        own, other = (self._published(rank) for rank in (self.rank, peer))
        return DCPMismatchError(
            f"exchange {self.epoch} of group '{self.group_name}': "
            f"{contrast(self.rank, own, peer, other)}"
        )

    def _refuse_second(self, holder: tuple[int], op: str) -> NoReturn:
        if holder != (threading.get_ident(),):
            raise DCPError(
                f"{op}: another thread is within an exchange of group "
                f"'{self.group_name}' and the same micro-batch; give every thread its "
                "own with dcp_inductor.ubatch(index)"
            )
        # Within a signal handler, or after two signals in a row.
        self.mark_dead(
            f"{op}: an exchange of this thread has not ended, which a signal "
            "interrupted"
        )
        self._refuse()

    def _refuse(self) -> NoReturn:
        self.refuse_fork()
        raise DCPError(
            f"the workspace of group '{self.group_name}' is out of use since: "
            f"{with_way_on(self._why_dead)}"
        )


def broken_off(op: str, error: BaseException) -> str:
    """Why a workspace is out of use whose last call of ``op`` ended with ``error``."""
    if isinstance(error, DCPError):
        return str(error)
    detail = f": {error}" if str(error) else ""
    return f"{op} was broken off by {type(error).__name__}{detail}"


def as_tensor(packed: bytes) -> Tensor:
    """Bytes as a launch op takes them."""
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)
