"""Rendezvous over a store, with a thread for each rank."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dcp_inductor.runtime.rendezvous import Session

TIMEOUT_S = 10.0


@pytest.mark.parametrize("size", [2, 3])
def test_sessions_in_a_row_are_not_mixed_up(size: int) -> None:
    """A rank that saw all come may be in its next session before a peer saw so."""
    store = dist.HashStore()

    def meet(rank: int) -> list[str]:
        pause = random.Random(rank)
        names = []
        for _ in range(40):
            session = Session(store, rank, size, TIMEOUT_S)
            names.append(session._name)
            time.sleep(pause.choice([0, 0, 0.002]))
        return names

    with ThreadPoolExecutor(size) as ranks:
        first, *others = ranks.map(meet, range(size))
    assert all(names == first for names in others)
    assert len(set(first)) == len(first)
