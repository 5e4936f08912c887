"""The symmetric memory of a group and micro-batch on a GPU, and what went wrong in it.

All exchanges of a micro-batch go through one sequence of epochs, kept and advanced on
the device, so that graph replays count too. Arenas hold payload; they are created when
first needed, by all ranks in the same call, and are never grown, moved or freed, since
captured graphs hold their addresses.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcp_inductor import config, groups, votes
from dcp_inductor.capability import Refusal
from dcp_inductor.errors import (
    DCPError,
    DCPMismatchError,
    DCPTimeoutError,
    FaultRecord,
    with_way_on,
)
from dcp_inductor.runtime import cuda_buffers, cuda_layout, rendezvous, symm_mem
from dcp_inductor.runtime.signature import Signature, contrast, describe

log = logging.getLogger(__name__)

_OPS = {1: "a2a_lse_reduce", 2: "q_gather", 3: "kv_gather"}
_TIMEOUT, _MISMATCH = 1, 2
_SIGNATURE_KEY = "dcp_inductor/signature"


@dataclass
class Workspace:
    """One rank's side of the exchanges of a group and micro-batch."""

    memory: GroupMemory
    control: symm_mem.SymmetricBuffer
    # Written by the device when something goes wrong, read here without a copy.
    fault: Tensor
    plans: dict[Any, Any] = field(default_factory=dict)
    arenas: dict[cuda_layout.ArenaLayout, symm_mem.SymmetricBuffer] = field(
        default_factory=dict
    )
    why_dead: str = ""
    # A gather whose rows are sent and whose peers' rows are not awaited yet: what it
    # is of, and its plan. It holds the epoch, so no other exchange may come between.
    unfinished: tuple[Any, Any] | None = None
    # The last result that stayed in an arena may be in use: no merge has begun since.
    view_unmerged: bool = False
    stream: Any = None  # of the last launch that no capture recorded

    def __post_init__(self) -> None:
        self.fault_address = self.fault.data_ptr()
        self._fault_state = ctypes.c_uint32.from_address(self.fault_address)

    def check(self) -> None:
        """Raise what a launch of this workspace has reported so far; does not wait.

        Raises:
            DCPTimeoutError: a peer did not arrive in time.
            DCPMismatchError: a peer arrived with another exchange.
            DCPDisagreementError: a peer has refused the site.
        """
        if self._fault_state.value:
            self._raise_fault()

    def begin(self) -> None:
        """:meth:`check`, and put the coming launch behind this workspace's last one.

        Two at a time would use one slot, so a launch on another stream than the last
        waits for that stream. Of a graph's replays nobody here knows.
        """
        self.check()
        if self.memory.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.memory.device)
        if stream == self.stream or torch.cuda.is_current_stream_capturing():
            return
        if self.stream is not None:
            stream.wait_stream(self.stream)
        self.stream = stream

    def finish(self, published: Any) -> Any:
        """The plan of the unfinished gather, which this call ends; None: there is none.

        Raises:
            DCPError: the unfinished gather is of something else than ``published``.
        """
        if self.unfinished is None:
            return None
        if self.unfinished[0] != published:
            self.refuse_unfinished(f"kv_gather of {published}")
        plan, self.unfinished = self.unfinished[1], None
        return plan

    def refuse_unfinished(self, what: str) -> None:
        """Raise if a gather is unfinished, as ``what`` may not come between."""
        if self.unfinished is not None:
            raise DCPError(
                f"{what} over group '{self.memory.group_name}': expected the kv_gather "
                f"that ends kv_gather_publish of {self.unfinished[0]} (shape, dtype, "
                "site) first. Make it the group's next exchange, or call "
                "dcp_inductor.recover(group) on all ranks to drop it"
            )

    def _raise_fault(self) -> None:
        memory = self.memory
        if self.why_dead:
            raise DCPError(
                f"the workspace of group '{memory.group_name}' is out of use since: "
                f"{with_way_on(self.why_dead)}"
            )
        _, kind, op, site_id, rank, peer, wanted, seen, row, own, other = (
            self.fault.tolist()[:11]
        )
        site = memory.sites[site_id] if site_id < len(memory.sites) else ""
        record = FaultRecord(
            op=_OPS.get(op, str(op)), site=site, group_name=memory.group_name,
            rank=rank, peer=peer, epoch_wanted=wanted, epoch_seen=seen,
        )  # fmt: skip
        error: DCPError
        if kind == _MISMATCH:
            mine, its = (memory.signature(checksum) for checksum in (own, other))
            error = DCPMismatchError(
                f"exchange {wanted} of group '{memory.group_name}': "
                f"{contrast(rank, mine, peer, its)}"
            )
        else:
            error = DCPTimeoutError(record, config.timeout_s)
            what = f"its row {row}" if record.op == _OPS[1] and row >= 0 else "a part"
            told = f"of the result {what} did not come; rows that lack a peer are NaN"
            error.add_note(told)
        self.why_dead = str(error)
        self._ask_votes(site)
        raise error

    def _ask_votes(self, site: str) -> None:
        """Raise what says more than a wait that has ended: what peers have decided."""
        name = self.memory.group_name
        try:
            if site:
                votes.post(name, site, votes.ACCEPTED)
                votes.check(name, site, votes.ACCEPTED)
            votes.check_departures(name, site)
        except DCPError:
            raise
        except (RuntimeError, ValueError) as error:
            # The store went with a peer, or the group is destroyed.
            log.debug("votes on site %s not read: %s", site, error)


class GroupMemory:
    """The workspaces of a group on one device.

    Args:
        group: every rank constructs one, in the same order of set-ups.
        device: of this rank; peers may call theirs the same.
        num_ubatches: workspaces to make, equal on all ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, num_ubatches: int
    ) -> None:
        self.group_name = group.group_name
        self.rank = group.rank()
        self.world_size = group.size()
        self.device = device
        self.num_ubatches = num_ubatches
        self.hidden_peers = False  # set at the set-up, once all ranks' facts are known
        self.multicast = config.multicast
        self.workspaces: list[Workspace] = []
        self.sites = [""]
        self._store = groups.store(group)
        self._refused: dict[cuda_layout.ArenaLayout, Refusal] = {}
        self._layouts_of_site: dict[str, set[cuda_layout.ArenaLayout]] = {}
        # Threads of micro-batches: the first to need an arena creates it for all.
        self._creating = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory that this rank holds for the group."""
        return sum(
            buffer.tensor.numel()
            for workspace in self.workspaces
            for buffer in (workspace.control, *workspace.arenas.values())
        )

    def site_bytes(self, site: str) -> int:
        """Bytes of the arenas that exchanges of ``site`` have used so far."""
        layouts = self._layouts_of_site.get(site, set())
        return self.num_ubatches * sum(layout.size for layout in layouts)

    def session(self) -> rendezvous.Session:
        """A rendezvous of all ranks.

        Raises:
            PeersMissingError: a rank did not come within ``config.timeout_s``.
        """
        store = self._store.within("dcp_inductor_cuda")
        return rendezvous.Session(store, self.rank, self.world_size, config.timeout_s)

    def create_controls(self, session: rendezvous.Session) -> Refusal | None:
        """Make the workspaces, without arenas; a collective."""
        controls = self._create(session, cuda_layout.CONTROL_BYTES)
        if isinstance(controls, Refusal):
            return controls
        for control in controls:
            fault = torch.zeros(
                cuda_layout.FAULT_WORDS, dtype=torch.int32, pin_memory=True
            )
            self.workspaces.append(Workspace(self, control, fault))
        self._arm(session)
        return None

    def arena(
        self, workspace: Workspace, layout: cuda_layout.ArenaLayout, call: Signature
    ) -> symm_mem.SymmetricBuffer | Refusal:
        """The arena of this layout; its first user, on all ranks, creates it.

        Raises:
            DCPError: it would have to be created within the capture of a CUDA graph.
            DCPMismatchError: a peer came for an arena of another exchange.
            DCPTimeoutError: a peer did not come.
        """
        arena = workspace.arenas.get(layout) or self._refused.get(layout)
        if arena is None:
            refuse_capture(self.group_name, call)
            with self._creating:
                arena = workspace.arenas.get(layout) or self._refused.get(layout)
                arena = arena or self._create_arena(layout, call, workspace)
        if not isinstance(arena, Refusal):
            self._layouts_of_site.setdefault(call.site, set()).add(layout)
        return arena

    def _create_arena(
        self, layout: cuda_layout.ArenaLayout, call: Signature, workspace: Workspace
    ) -> symm_mem.SymmetricBuffer | Refusal:
        try:
            session = self.session()
            for each in self._layouts_to_create(session, layout, call):
                if each in workspace.arenas or each in self._refused:
                    continue
                buffers = self._create(session, each.size)
                if isinstance(buffers, Refusal):
                    self._refused[each] = buffers
                    continue
                for made in buffers:
                    _fill(made, each)
                torch.cuda.synchronize(self.device)
                session.exchange({})  # from here on peers may store to it
                for owner, made in zip(self.workspaces, buffers, strict=True):
                    owner.arenas[each] = made
                self._log_memory(call, each)
        except rendezvous.PeersMissingError as error:
            raise self.missing(error, call.op, call.site) from error
        return workspace.arenas.get(layout) or self._refused[layout]

    def _layouts_to_create(
        self,
        session: rendezvous.Session,
        layout: cuda_layout.ArenaLayout,
        call: Signature,
    ) -> list[cuda_layout.ArenaLayout]:
        """What this meeting makes, in the same order on all ranks.

        Threads of micro-batches come in any order, so their ranks may be here for
        different layouts: all are made.
        """
        check = zlib.crc32(repr(layout).encode())
        made = f"set-up of {layout.size} bytes (layout {check:08x})"
        route = f"{call.route}, {made}" if call.route else made
        own = replace(call, route=route).pack()
        said = session.exchange({"call": own.hex(), "layout": layout.as_words()})
        if self.num_ubatches > 1:
            wanted = sorted({json.dumps(each["layout"]) for each in said})
            return [cuda_layout.ArenaLayout.of_words(json.loads(w)) for w in wanted]
        for peer, each in enumerate(said):
            other = bytes.fromhex(each["call"])
            if other != own:
                raise DCPMismatchError(
                    f"first use of group '{self.group_name}' for an exchange: "
                    f"{contrast(self.rank, own, peer, other)}"
                )
        return [layout]

    def _log_memory(self, call: Signature, layout: cuda_layout.ArenaLayout) -> None:
        # Once at info, growth at debug.
        first = len(self.workspaces[0].arenas) == 1 and self.rank == 0
        log.log(
            logging.INFO if first else logging.DEBUG,
            "group '%s': %d bytes of symmetric memory on each of %d GPUs, %d of them "
            "new for %s",
            self.group_name, self.nbytes, self.world_size,
            self.num_ubatches * layout.size, describe(call.pack()),
        )  # fmt: skip

    def recover(self) -> None:
        """Arm everything anew, in place; a collective. No launch may be under way."""
        torch.cuda.synchronize(self.device)
        try:
            session = self.session()
            session.exchange({})  # all ranks' launches have ended
            for workspace in self.workspaces:
                for layout, buffer in workspace.arenas.items():
                    _fill(buffer, layout)
            self._arm(session)
        except rendezvous.PeersMissingError as error:
            raise self.missing(error, "recover", "") from error

    def site_id(self, site: str) -> int:
        """Number by which the device names ``site``."""
        if site not in self.sites:
            self.sites.append(site)
        return self.sites.index(site)

    def post_signature(self, checksum: int, packed: bytes) -> None:
        """Leave the words behind a checksum where peers can look them up."""
        self._store.set(f"{_SIGNATURE_KEY}/{checksum:08x}", packed.hex())

    def signature(self, checksum: int) -> bytes:
        """The signature behind a checksum, as the device reports it."""
        key = f"{_SIGNATURE_KEY}/{checksum % (1 << 32):08x}"
        try:
            if self._store.check([key]):
                return bytes.fromhex(self._store.get(key).decode())
        except dist.DistError as error:
            log.debug("signature %s not read: %s", key, error)
        return f"an exchange of checksum {checksum % (1 << 32):08x}".encode()

    def missing(
        self, error: rendezvous.PeersMissingError, op: str, site: str
    ) -> DCPTimeoutError:
        """The error for ranks that did not come to a set-up."""
        record = FaultRecord(
            op=f"set-up of {op}", site=site, group_name=self.group_name,
            rank=self.rank, peer=error.ranks[0], epoch_wanted=0, epoch_seen=0,
        )  # fmt: skip
        return DCPTimeoutError(record, config.timeout_s)

    def _arm(self, session: rendezvous.Session) -> None:
        """Reset epochs and faults on all ranks."""
        for workspace in self.workspaces:
            header = workspace.control.tensor
            header.zero_()
            header[cuda_layout.EPOCH].view(torch.int32).fill_(cuda_layout.FIRST_EPOCH)
            workspace.fault.zero_()
            workspace.why_dead = ""
            workspace.unfinished = None
            workspace.view_unmerged = False
        torch.cuda.synchronize(self.device)
        session.exchange({})

    def _create(
        self, session: rendezvous.Session, nbytes: int
    ) -> list[symm_mem.SymmetricBuffer] | Refusal:
        """One tried buffer per micro-batch, or why some rank has none."""
        return cuda_buffers.create(
            session, groups.resolve(self.group_name), self.device, self.num_ubatches,
            nbytes, self.hidden_peers, self.multicast,
        )  # fmt: skip


def refuse_capture(group_name: str, call: Signature | None = None) -> None:
    """Raise where ranks would have to meet inside the capture of a CUDA graph.

    ``call`` needs memory that its group does not have yet; None: the group has none.
    """
    # A CUDA that nobody has used captures nothing, and may not be there to ask.
    if not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
        return
    if call is None:
        raise DCPError(
            f"group '{group_name}' is not set up for exchanges between GPUs. That "
            "takes all ranks and cannot be captured in a CUDA graph: call "
            "dcp_inductor.prepare(group) on all ranks before the capture, and run what "
            "is captured once"
        )
    raise DCPError(
        f"{describe(call.pack())}: group '{group_name}' has no memory yet for an "
        "exchange of this kind and size. To make it takes all ranks and cannot be "
        "captured in a CUDA graph: run what is captured once on all ranks, with as "
        "many rows, before the capture (dcp_inductor.prepare sets up the group, but "
        "does not know the sizes)"
    )


def _fill(buffer: symm_mem.SymmetricBuffer, layout: cuda_layout.ArenaLayout) -> None:
    for section in layout.sections:
        stretch = buffer.tensor[section.offset : section.offset + section.size]
        stretch.fill_(section.fill)
