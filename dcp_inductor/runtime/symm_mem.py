"""Symmetric CUDA memory: buffers that every rank of a group can address.

The one place that touches ``torch.distributed._symmetric_memory``. Nothing here uses
torch's signal pads, which all users of a group share. Multicast is looked at where the
caller asks, and needed by nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from dcp_inductor import config
from dcp_inductor.runtime import rendezvous

log = logging.getLogger(__name__)


class SymmetricBuffer:
    """A buffer of this rank and the addresses of its peers' ones.

    Args:
        tensor: uint8 ``[nbytes]``, from :func:`allocate`.
        group: its ranks all construct one, in the same order.
        hidden_peers: :func:`hides_peers` of the ranks' facts.
    """

    def __init__(
        self, tensor: Tensor, group: dist.ProcessGroup, hidden_peers: bool = False
    ) -> None:
        self.tensor = tensor
        # torch tells GPUs apart by their index in each process, and refuses two of one
        # index as one GPU. This variable is its way to be told otherwise.
        allow = (
            config.environment("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
            if hidden_peers
            else contextlib.nullcontext()
        )
        with allow:
            self._handle = _symmetric_memory.rendezvous(tensor, group)
        self.addresses = [int(address) for address in self._handle.buffer_ptrs]
        # Reaches all ranks' buffers with one store; 0 unless use_multicast() is called.
        self.multicast = 0

    def has_multicast(self) -> bool:
        """Whether this rank has an address that reaches all ranks' buffers."""
        return bool(self._handle.multicast_ptr)

    def use_multicast(self) -> None:
        """Let ``multicast`` be that address; for all ranks of the group alike."""
        self.multicast = int(self._handle.multicast_ptr)

    def of_peer(self, rank: int, start: int, nbytes: int) -> Tensor:
        """Bytes of a rank's buffer as a tensor on this device."""
        return self._handle.get_buffer(rank, (nbytes,), torch.uint8, start)

    def close(self) -> None:
        """Give the memory back. All ranks, none of which may use it any more."""
        del self._handle, self.tensor
        self.addresses = []


def share_multicast(
    session: rendezvous.Session, buffers: list[SymmetricBuffer]
) -> None:
    """Let buffers be written by multicast if that reaches them on all ranks.

    A round of the session, which all ranks make whatever they have.
    """
    own = all(buffer.has_multicast() for buffer in buffers)
    said = session.exchange({"multicast": own})
    without = [rank for rank, facts in enumerate(said) if not facts["multicast"]]
    if without:
        log.info("no multicast stores: rank %d has no multicast address", without[0])
        return
    for buffer in buffers:
        buffer.use_multicast()


def allocate(nbytes: int, device: torch.device) -> Tensor:
    """Memory that can become a :class:`SymmetricBuffer`; contents are undefined.

    Raises:
        RuntimeError: the device has none left, or cannot share any.
    """
    with torch.inference_mode(False):  # what is written there later may be outside it
        return _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)


def facts(device: torch.device) -> dict[str, str]:
    """What all ranks of a group must have alike, or be told apart by."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "device_uuid": str(properties.uuid),
        "device_index": str(device.index),
        "capability": f"{properties.major}.{properties.minor}",
        "symmetric_memory": str(_symmetric_memory.get_backend(device)),
    }


def hides_peers(said: Sequence[dict[str, str]]) -> bool:
    """Whether ranks call different GPUs by one index, as where each sees only its own.

    Args:
        said: the :func:`facts` of all ranks.
    """
    uuids = {facts["device_uuid"] for facts in said}
    indices = {facts["device_index"] for facts in said}
    return len(uuids) == len(said) > len(indices)
