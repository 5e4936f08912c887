"""Which rank holds what, and the four collectives of the model.

Tensor parallel (TP) ranks split heads, intermediate dims and the vocabulary. Decode
context parallel (DCP) groups are runs of consecutive TP ranks; within one, the KV cache
is split by position. TP 4 with DCP 2:

    rank        0          1          2          3
    heads       0 .. h-1   h .. 2h-1  2h .. 3h-1 3h .. 4h-1
    DCP group   [----- 0, 1 ------]   [----- 2, 3 ------]
    KV rows     half A     half B     half A     half B

So every DCP group keeps the whole cache once, gathers the queries of its own ranks (2h
heads) and merges their partial outputs; the output projection sums over all of TP.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

# torch 2.13 renamed both; the old names warn there, and older versions know only them.
_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_reduce_scatter = (
    getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
)


@dataclass(frozen=True)
class Layout:
    """This rank's place. A group is None where it would have one member."""

    tp_rank: int = 0
    tp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    tp_group: dist.ProcessGroup | None = None
    dcp_group: dist.ProcessGroup | None = None

    def share(self, total: int, what: str) -> slice:
        """This TP rank's equal share of ``total`` rows.

        Raises:
            ValueError: ``total`` does not divide by the number of TP ranks.
        """
        if total % self.tp_size:
            raise ValueError(
                f"expected {what} to divide by the {self.tp_size} tensor parallel "
                f"ranks, got {total}; use fewer ranks"
            )
        size = total // self.tp_size
        return slice(self.tp_rank * size, (self.tp_rank + 1) * size)


def create_layout(dcp_size: int | None = None) -> Layout:
    """Layout over the default process group: all its ranks are TP ranks.

    ``dcp_size`` defaults to all of them. Collective: every rank must call it.

    Raises:
        ValueError: ``dcp_size`` does not divide the number of ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if dcp_size not in (None, 1):
            raise ValueError(f"expected dcp_size 1 for one rank, got {dcp_size}")
        return Layout()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dcp_size = world_size if dcp_size is None else dcp_size
    if dcp_size < 1 or world_size % dcp_size:
        raise ValueError(
            f"expected dcp_size to divide the {world_size} ranks, got {dcp_size}"
        )
    dcp_group = None
    if dcp_size == world_size:
        dcp_group = dist.group.WORLD
    elif dcp_size > 1:
        for first in range(0, world_size, dcp_size):
            members = list(range(first, first + dcp_size))
            group = dist.new_group(members)
            dcp_group = group if rank in members else dcp_group
    return Layout(
        tp_rank=rank,
        tp_size=world_size,
        dcp_rank=rank % dcp_size,
        dcp_size=dcp_size,
        tp_group=dist.group.WORLD,
        dcp_group=dcp_group,
    )


def all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over the ranks of the group."""
    return x if group is None else funcol.all_reduce(x, "sum", group)


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenation over the ranks of the group, in rank order."""
    if group is None:
        return x
    # Along dim 0 and moved here: torch 2.11 cannot trace its own gather along others.
    stacked = _all_gather(x, 0, group).view(group.size(), *x.shape)
    return stacked.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's slice of the sum over the ranks of the group."""
    return x if group is None else _reduce_scatter(x, "sum", dim, group)
