"""Symmetric CUDA memory: buffers that every rank of a group can address.

The one place that touches ``torch.distributed._symmetric_memory``. Nothing here uses
torch's signal pads, which all users of a group share, nor multicast.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory


class SymmetricBuffer:
    """A buffer of this rank and the addresses of its peers' ones.

    Args:
        tensor: uint8 ``[nbytes]``, from :func:`allocate`.
        group: its ranks all construct one, in the same order.
    """

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        self.tensor = tensor
        self._handle = _symmetric_memory.rendezvous(tensor, group)
        self.addresses = [int(address) for address in self._handle.buffer_ptrs]

    def of_peer(self, rank: int, start: int, nbytes: int) -> Tensor:
        """Bytes of a rank's buffer as a tensor on this device."""
        return self._handle.get_buffer(rank, (nbytes,), torch.uint8, start)

    def close(self) -> None:
        """Give the memory back. All ranks, none of which may use it any more."""
        del self._handle, self.tensor
        self.addresses = []


def allocate(nbytes: int, device: torch.device) -> Tensor:
    """Memory that can become a :class:`SymmetricBuffer`; contents are undefined.

    Raises:
        RuntimeError: the device has none left, or cannot share any.
    """
    return _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)


def facts(device: torch.device) -> dict[str, str]:
    """What all ranks of a group must have alike, or be told apart by."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "device_uuid": str(properties.uuid),
        "capability": f"{properties.major}.{properties.minor}",
        "symmetric_memory": str(_symmetric_memory.get_backend(device)),
    }
