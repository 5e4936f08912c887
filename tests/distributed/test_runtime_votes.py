"""If one rank cannot exchange directly, none does, and one line says which and why."""

from __future__ import annotations

import dataclasses
import errno
import re
from unittest import mock

import pytest
import torch

from dcp_inductor import config, extension, ops
from dcp_inductor.runtime import bootstrap, process, registry, shm
from tests.support import Log, combine, epoch, fallbacks, fresh_group, gather, world

TOKEN = torch.empty(0)


def one_cannot(rank: int, size: int, how: str, code: str, pattern: str) -> None:
    group = fresh_group(size)
    name = group.group_name
    before = fallbacks().get(f"fallback.{code}", 0)
    here = process.current()
    full = OSError(errno.ENOSPC, "No space left on device")
    created = mock.Mock(side_effect=AssertionError("memory before the hosts are known"))
    patches = {
        "build": mock.patch.object(
            extension, "load_extension", return_value="no C++ compiler found"
        ),
        "hosts": mock.patch.object(
            process,
            "current",
            return_value=dataclasses.replace(here, hostname="elsewhere"),
        ),
        "allocation": mock.patch.object(shm, "create", side_effect=full),
        "mapping": mock.patch.object(shm, "attach", side_effect=full),
    }
    with Log() as told:
        if how == "hosts":
            mock.patch.object(shm, "create", created).start()
        if rank == size - 1:
            patches[how].start()
        try:
            for step in range(20):
                combine(name, rank, size, seed=step)
        finally:
            mock.patch.stopall()
    assert fallbacks()[f"fallback.{code}"] - before == 20
    with config.patch(direct_combine="force"):
        with pytest.raises(RuntimeError, match=pattern):
            combine(name, rank, size)
    assert len(told.messages) == (1 if rank == 0 else 0), told.messages
    assert all(re.search(pattern, message) for message in told.messages)
    assert not created.called
    # The refusal is of this group; once its cause is gone, all may vote again.
    registry.recover(group)
    combine(name, rank, size)
    assert epoch(name) > 0


@pytest.mark.parametrize(
    ("how", "code", "pattern"),
    [
        ("build", "build", r"rank 1: no C\+\+ compiler found"),
        ("hosts", "hosts", r"rank 1 has hostname elsewhere, rank 0 has \S+; shared"),
        ("allocation", "allocation", r"rank 1: cannot create .* No space left"),
        ("mapping", "allocation", r"rank 1: cannot map the segment of rank 0: .*space"),
    ],
)
def test_if_one_rank_cannot_none_does(how: str, code: str, pattern: str) -> None:
    world(2).run(one_cannot, how, code, pattern)


def arena_cannot(rank: int, size: int, what: str) -> None:
    name = fresh_group(size).group_name
    gather(name, rank, size)  # a small arena, which stays in use
    before = fallbacks().get("fallback.allocation", 0)
    full = OSError(errno.ENOSPC, "No space left on device")
    with Log() as told:
        patch = mock.patch.object(shm, what, side_effect=full)
        if rank == 0:
            patch.start()
        big = torch.full((2, 1, 4096), 1.0 + rank)
        try:
            for _ in range(3):
                got = ops.q_gather(big, TOKEN, name)[0]
                assert torch.equal(got[:, 1], torch.full((2, 4096), 2.0))
        finally:
            mock.patch.stopall()
    gather(name, rank, size)
    assert fallbacks()["fallback.allocation"] - before == 3
    assert len(told.messages) == (1 if rank == 0 else 0), told.messages
    assert all("rank 0: cannot" in message for message in told.messages)


@pytest.mark.parametrize("what", ["create", "attach"])
def test_an_arena_that_one_rank_cannot_have_is_refused_by_all(what: str) -> None:
    world(2).run(arena_cannot, what)


def test_facts_decide_alike_for_all() -> None:
    fact = {
        **process.current().as_dict(),
        "protocol": 1,
        "num_ubatches": 1,
        "max_tokens": 256,
        "refusal": None,
    }
    assert bootstrap.decide([fact, dict(fact)]) is None
    for key, value in (
        ("boot_id", "another"),
        ("uid", -1),
        ("protocol", 2),
        ("num_ubatches", 5),
        ("max_tokens", 8),
    ):
        refusal = bootstrap.decide([fact, {**fact, key: value}])
        assert refusal is not None
        assert refusal.detail.startswith(f"rank 1 has {key} {value}")
