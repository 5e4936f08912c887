"""Makes symmetric buffers with all ranks of a group, and tries them out.

Whether they serve is voted over a session: if one rank cannot, none does, and the
reason names that rank.
"""

from __future__ import annotations

import contextvars
import secrets
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from dcp_inductor.capability import Refusal
from dcp_inductor.runtime import rendezvous, symm_mem

_TAG_BYTES = 16


def create(
    session: rendezvous.Session,
    group: dist.ProcessGroup,
    device: torch.device,
    count: int,
    nbytes: int,
    hidden_peers: bool,
    multicast: bool,
) -> list[symm_mem.SymmetricBuffer] | Refusal:
    """``count`` tried buffers, or why some rank has none; a collective.

    Args:
        session: of all ranks, which call this with equal arguments.
        group: whose ranks share the buffers.
        device: this rank's.
        count: of buffers.
        nbytes: of each.
        hidden_peers: :func:`symm_mem.hides_peers` of the ranks' facts.
        multicast: use it where all ranks have it.
    """

    def make() -> list[symm_mem.SymmetricBuffer] | Refusal:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread begins on the first one
        problem, tensors, buffers = "", [], []
        try:
            for _ in range(count):
                tensors.append(symm_mem.allocate(nbytes, device))
        except RuntimeError as error:
            problem = f"cannot allocate {nbytes} bytes of symmetric memory: {error}"
        refusal = _first_problem(session, problem)
        if refusal:
            return refusal
        try:
            for tensor in tensors:
                buffers.append(symm_mem.SymmetricBuffer(tensor, group, hidden_peers))
        except RuntimeError as error:
            problem = f"cannot share memory with the peers: {error}"
        refusal = _first_problem(session, problem)
        if refusal:
            return refusal
        for buffer in buffers:
            refusal = _try_out(session, group.rank(), group.size(), buffer)
            if refusal:
                return refusal
        if multicast:
            symm_mem.share_multicast(session, buffers)
        return buffers

    # Torch keeps the addresses in device memory of its allocator. During the warm-up of
    # a CUDA graph of Inductor's, what this thread allocates is the graph's, which may
    # keep nothing beyond its outputs. A thread of its own allocates outside of it.
    own = contextvars.copy_context()
    with ThreadPoolExecutor(1, "dcp_inductor_buffers") as thread:
        return thread.submit(own.run, make).result()


def _try_out(
    session: rendezvous.Session,
    rank: int,
    world_size: int,
    buffer: symm_mem.SymmetricBuffer,
) -> Refusal | None:
    """Write a tag through every peer's address and read all of them back."""
    device = buffer.tensor.device
    tag = secrets.token_bytes(_TAG_BYTES)
    mine = torch.frombuffer(bytearray(tag), dtype=torch.uint8).to(device)
    problem = ""
    for peer in range(world_size):
        place = buffer.of_peer(peer, rank * _TAG_BYTES, _TAG_BYTES)
        # The kernels have the address only, so it has to be what is tried out here.
        if place.data_ptr() != buffer.addresses[peer] + rank * _TAG_BYTES:
            problem = f"the address of rank {peer}'s memory is not where its tensor is"
        place.copy_(mine)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    tags = [bytes.fromhex(s["tag"]) for s in session.exchange({"tag": tag.hex()})]
    for peer in range(world_size):
        nbytes = world_size * _TAG_BYTES
        seen = bytes(buffer.of_peer(peer, 0, nbytes).cpu().tolist())
        if seen != b"".join(tags):
            problem = f"memory of rank {peer} does not hold what the ranks wrote"
    return _first_problem(session, problem)


def _first_problem(session: rendezvous.Session, problem: str) -> Refusal | None:
    for rank, said in enumerate(session.exchange({"problem": problem})):
        if said["problem"]:
            return Refusal("allocation", f"rank {rank}: {said['problem']}")
    return None
