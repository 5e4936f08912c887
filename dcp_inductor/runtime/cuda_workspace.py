"""The symmetric memory of a group and micro-batch on a GPU, and what went wrong in it.

All exchanges of a micro-batch go through one sequence of epochs, kept and advanced on
the device, so that graph replays count too. Arenas hold payload; they are created when
first needed, by all ranks in the same call, and are never grown, moved or freed, since
captured graphs hold their addresses.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
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
from dcp_inductor.runtime import cuda_layout, rendezvous, symm_mem
from dcp_inductor.runtime.signature import Signature, contrast, describe

log = logging.getLogger(__name__)

_OPS = {1: "a2a_lse_reduce", 2: "q_gather", 3: "kv_gather"}
_TIMEOUT, _MISMATCH = 1, 2
_TAG_BYTES = 16
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
            said = (memory.signature(checksum) for checksum in (own, other))
            error = DCPMismatchError(
                f"exchange {wanted} of group '{memory.group_name}': "
                f"{contrast(rank, next(said), peer, next(said))}"
            )
        else:
            error = DCPTimeoutError(record, config.timeout_s)
            error.add_note(f"row {row} of the result and those behind it are NaN")
        self.why_dead = str(error)
        if site:
            # A peer that refused the site says more than that it did not come.
            votes.post(memory.group_name, site, votes.ACCEPTED)
            votes.check(memory.group_name, site, votes.ACCEPTED)
        votes.check_departures(memory.group_name, site)
        raise error


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
        store = dist.PrefixStore("dcp_inductor_cuda", self._store)
        return rendezvous.Session(store, self.rank, self.world_size, config.timeout_s)

    def create_controls(self, session: rendezvous.Session) -> Refusal | None:
        """Make the workspaces, without arenas; a collective."""
        nbytes = cuda_layout.HEADER_BYTES + cuda_layout.TAIL_BYTES
        controls = self._create(session, nbytes)
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
            check = zlib.crc32(repr(layout).encode())
            route = f"set-up of {layout.size} bytes (layout {check:08x})"
            own = replace(call, route=route).pack()
            for peer, said in enumerate(session.exchange({"call": own.hex()})):
                other = bytes.fromhex(said["call"])
                if other != own:
                    raise DCPMismatchError(
                        f"first use of group '{self.group_name}' for an exchange: "
                        f"{contrast(self.rank, own, peer, other)}"
                    )
            buffers = self._create(session, layout.size)
            if isinstance(buffers, Refusal):
                self._refused[layout] = buffers
                return buffers
            for owner, made in zip(self.workspaces, buffers, strict=True):
                owner.arenas[layout] = made
                _fill(made, layout)
            torch.cuda.synchronize(self.device)
            session.exchange({})
        except rendezvous.PeersMissingError as error:
            raise self.missing(error, call.op, call.site) from error
        self._log_memory(call, layout)
        return workspace.arenas[layout]

    def _log_memory(self, call: Signature, layout: cuda_layout.ArenaLayout) -> None:
        """Say what the group holds: once at info on one rank, growth at debug."""
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
        if self._store.check([key]):
            return bytes.fromhex(self._store.get(key).decode())
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
        """One tested buffer per micro-batch, or why some rank has none."""
        problem, tensors, buffers = "", [], []
        try:
            for _ in range(self.num_ubatches):
                tensors.append(symm_mem.allocate(nbytes, self.device))
        except RuntimeError as error:
            problem = f"cannot allocate {nbytes} bytes of symmetric memory: {error}"
        refusal = _first_problem(session, problem)
        if refusal:
            return refusal
        try:
            group = groups.resolve(self.group_name)
            for tensor in tensors:
                buffers.append(
                    symm_mem.SymmetricBuffer(tensor, group, self.hidden_peers)
                )
        except RuntimeError as error:
            problem = f"cannot share memory with the peers: {error}"
        refusal = _first_problem(session, problem)
        if refusal:
            return refusal
        for buffer in buffers:
            refusal = self._test(session, buffer)
            if refusal:
                return refusal
        if self.multicast:
            symm_mem.share_multicast(session, buffers)
        return buffers

    def _test(
        self, session: rendezvous.Session, buffer: symm_mem.SymmetricBuffer
    ) -> Refusal | None:
        """Write a tag through every peer's address and read all of them back."""
        tag = secrets.token_bytes(_TAG_BYTES)
        mine = torch.frombuffer(bytearray(tag), dtype=torch.uint8).to(self.device)
        for peer in range(self.world_size):
            buffer.of_peer(peer, self.rank * _TAG_BYTES, _TAG_BYTES).copy_(mine)
        torch.cuda.synchronize(self.device)
        tags = [bytes.fromhex(s["tag"]) for s in session.exchange({"tag": tag.hex()})]
        problem = ""
        for peer in range(self.world_size):
            nbytes = self.world_size * _TAG_BYTES
            seen = bytes(buffer.of_peer(peer, 0, nbytes).cpu().tolist())
            if seen != b"".join(tags):
                problem = f"memory of rank {peer} does not hold what the ranks wrote"
        return _first_problem(session, problem)


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


def _first_problem(session: rendezvous.Session, problem: str) -> Refusal | None:
    for rank, said in enumerate(session.exchange({"problem": problem})):
        if said["problem"]:
            return Refusal("allocation", f"rank {rank}: {said['problem']}")
    return None


def _fill(buffer: symm_mem.SymmetricBuffer, layout: cuda_layout.ArenaLayout) -> None:
    for section in layout.sections:
        stretch = buffer.tensor[section.offset : section.offset + section.size]
        stretch.fill_(section.fill)
