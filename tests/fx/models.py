"""Two small models for the tests of the backend, and a group for one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_group(rank: int = 1, world_size: int = 2) -> Iterator[None]:
    """A world whose collectives return at once, with whatever was in memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def plain(x: Tensor, weight: Tensor) -> Tensor:
    """A model without any exchange."""
    return torch.softmax(x @ weight, dim=-1) * 2 + x.mean()


def merge(partial_output: Tensor, partial_lse: Tensor) -> Tensor:
    """One merge of partial attention: [T, H, D], [T, H] -> own heads [h, T, D]."""
    group = dist.group.WORLD
    lses = funcol.all_gather_tensor(partial_lse, 0, group)
    lses = lses.view(group.size(), *partial_lse.shape)
    weight = torch.exp(partial_lse - torch.logsumexp(lses, 0))
    weighted = (partial_output * weight[..., None]).transpose(0, 1).contiguous()
    return funcol.reduce_scatter_tensor(weighted, "sum", 0, group) + 1


def merge_inputs(num_tokens: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs of ``merge`` for 8 heads of 16."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_tokens, 8, 16, generator=generator),
        torch.randn(num_tokens, 8, generator=generator),
    )
