"""Setting a group up ahead of its first exchange."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

import dcp_inductor
from dcp_inductor import config, ops
from dcp_inductor.errors import DCPTimeoutError
from dcp_inductor.runtime import layout, rendezvous
from tests.support import combine, fallbacks, fresh_group, gather, world


class Sessions:
    """How often this rank met the others to set something up, while in use."""

    def __enter__(self) -> Sessions:
        self.count = 0
        self._init = rendezvous.Session.__init__

        def counting(session, *args, **kwargs):
            self.count += 1
            self._init(session, *args, **kwargs)

        rendezvous.Session.__init__ = counting
        return self

    def __exit__(self, *error: object) -> None:
        rendezvous.Session.__init__ = self._init


def ahead(rank: int, size: int) -> None:
    group = fresh_group(size)
    with Sessions() as sessions:
        assert dcp_inductor.prepare(group, "cpu") is True
        assert sessions.count == 1
        assert dcp_inductor.prepare(group) is True  # nothing is left to do
        gather(group.group_name, rank, size)
        combine(group.group_name, rank, size)
        assert sessions.count == 1
    assert not fallbacks()
    dcp_inductor.prepare()
    with pytest.raises(ValueError, match="expected device 'cpu' or a CUDA device"):
        dcp_inductor.prepare(group, "meta")


def test_the_first_exchange_finds_a_prepared_group_set_up() -> None:
    world(2).run(ahead)


def alone(rank: int, size: int) -> None:
    group = fresh_group(size)
    with config.patch(timeout_s=0.5):
        if rank == 0:
            with pytest.raises(DCPTimeoutError) as raised:
                dcp_inductor.prepare(group, "cpu")
            assert raised.value.record.peer == 1
    dist.barrier()
    dcp_inductor.prepare(group, "cpu")
    combine(group.group_name, rank, size)


def test_a_rank_that_does_not_prepare_is_named() -> None:
    world(2).run(alone)


def in_vain(rank: int, size: int) -> list[str]:
    group = fresh_group(size)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("dcp_inductor.runtime.preparation")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    limit = layout.MAX_RANKS
    layout.MAX_RANKS = 1
    try:
        assert dcp_inductor.prepare(group, "cpu") is False
        rows = torch.full((2, 3), float(rank))
        got = ops.kv_gather(rows, torch.empty(0), group.group_name)[0]
    finally:
        layout.MAX_RANKS = limit
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    assert got.sum() == 6
    assert fallbacks() == {"fallback.ranks": 1}
    return [record.getMessage() for record in records]


def test_a_group_that_cannot_exchange_directly_is_told_so() -> None:
    for messages in world(2).run(in_vain):
        [message] = messages
        assert "will use the collectives: 2 ranks are more than 1" in message
