"""Ranks whose knobs differ: they all end, in time, and are told which knob it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._dynamo.utils import counters

from dcp_inductor import config, ops, votes
from dcp_inductor.errors import DCPMismatchError, DCPTimeoutError
from dcp_inductor.runtime import registry
from tests.support import Log, combine, epoch, fallbacks, fresh_group, world

TOKEN = torch.empty(0)
LIMIT_S = 6.0
# Far below gloo's own limit of half an hour, and above what a test here takes.
ENDED_S = 40.0


def eager(op: str, name: str, rows: int) -> None:
    if op == "q_gather":
        ops.q_gather(torch.zeros(rows, 1, 8), TOKEN, name)
    elif op == "kv_gather":
        ops.kv_gather(torch.zeros(rows, 8), TOKEN, name)
    else:
        ops.a2a_lse_reduce(torch.zeros(rows, 4, 8), torch.zeros(rows, 4), TOKEN, name)


def compiled(op: str, group: dist.ProcessGroup, rows: int) -> None:
    """The same exchange as a compiled graph of a static number of rows."""
    torch._dynamo.reset()

    def q_gather(x: Tensor, _: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 1, group) + 1

    def kv_gather(x: Tensor, _: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 0, group) + 1

    def a2a_lse_reduce(x: Tensor, lse: Tensor) -> Tensor:
        # No exchange of the LSEs is left where the merge is refused.
        top = funcol.all_reduce(lse, "max", group)
        weight = torch.exp(lse - top)
        total = funcol.all_reduce(weight, "sum", group)
        return funcol.all_reduce(x * (weight / total)[..., None], "sum", group)

    model = {f.__name__: f for f in (q_gather, kv_gather, a2a_lse_reduce)}[op]
    inputs = torch.ones(rows, 4, 8), torch.ones(rows, 4)
    torch.compile(model, backend="dcp_inductor", dynamic=False)(*inputs)


def ends(
    rank: int,
    size: int,
    how: str,
    op: str,
    rows: int,
    late: int,
    knobs: list[dict[str, Any]],
) -> tuple[str, str]:
    """Type and text of the error that a rank ends with; all are back afterwards."""
    group = fresh_group(size)
    name = group.group_name
    if rank == late:
        time.sleep(1.5)
    told = "", ""
    with config.patch(timeout_s=LIMIT_S, **knobs[rank]):
        try:
            if how == "compiled":
                compiled(op, group, rows)
            else:
                eager(op, name, rows)
        except Exception as error:
            told = type(error).__name__, str(error)
    registry.recover(group)
    combine(name, rank, size)
    return told


LIMITS = [{"max_tokens": 4}, {"max_tokens": 64}]
OPS = ["q_gather", "kv_gather", "a2a_lse_reduce"]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("op", OPS)
def test_a_graph_is_refused_by_the_rank_with_the_lower_limit(
    op: str, late: int
) -> None:
    """One rank keeps the graph's collective, the other waits in a direct exchange."""
    told = world(2).run(ends, "compiled", op, 8, late, LIMITS, limit_s=ENDED_S)
    for kind, text in told:
        assert kind == "DCPDisagreementError", text
        for part in ("rank 0", "rank 1", "max_tokens=4", "DCP_INDUCTOR_MAX_TOKENS"):
            assert part in text, text
        assert "test_runtime_settings.py:" in text


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("op", OPS)
def test_the_set_up_of_a_group_compares_the_limits(op: str, rows: int) -> None:
    told = world(2).run(ends, "eager", op, rows, -1, LIMITS, limit_s=ENDED_S)
    assert told == [("", "")] * 2


def falls_back(rank: int, size: int) -> list[str]:
    name = fresh_group(size).group_name
    with Log() as log, config.patch(**LIMITS[rank]):
        eager("q_gather", name, 8)
    assert fallbacks() == {"fallback.config": 1}
    with config.patch(direct_query_gather="force", **LIMITS[rank]):
        with pytest.raises(RuntimeError, match="rank 1 has max_tokens 64"):
            eager("q_gather", name, 8)
    return log.messages


def test_limits_that_differ_are_told_once() -> None:
    [[message], quiet] = world(2).run(falls_back)
    assert "rank 1 has max_tokens 64, rank 0 has 4; set DCP_INDUCTOR_MAX" in message
    assert quiet == []


def changes(rank: int, size: int) -> str:
    name = fresh_group(size).group_name
    eager("q_gather", name, 2)
    with config.patch(**LIMITS[rank]), pytest.raises(DCPMismatchError) as caught:
        eager("q_gather", name, 8)
    return str(caught.value)


def test_a_limit_that_one_rank_changes_later_is_named() -> None:
    for rank, text in enumerate(world(2).run(changes)):
        limit = LIMITS[rank]["max_tokens"]
        assert f"max_tokens ({limit} on rank {rank})" in text


def switched_off(rank: int, size: int, op: str) -> tuple[str, str, float]:
    switch = {
        "q_gather": "direct_query_gather",
        "kv_gather": "direct_kv_gather",
        "a2a_lse_reduce": "direct_combine",
    }[op]
    name = fresh_group(size).group_name
    start = time.monotonic()
    knobs = {switch: "disable"} if rank == 0 else {}
    with config.patch(timeout_s=2.0, **knobs), pytest.raises(DCPTimeoutError) as caught:
        eager(op, name, 2)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("op", OPS)
def test_a_collective_that_stands_in_is_no_longer_waited_for(op: str) -> None:
    (_, text, waited), other = world(2).run(switched_off, op, limit_s=ENDED_S)
    assert 2 <= waited < 20
    assert "rank 0" in text
    assert "2 s in a collective that stands in for a direct exchange" in text
    assert "set-up" in other[1]


def unheard(rank: int, size: int) -> str:
    """Rank 1 runs nothing of ours, and so never votes."""
    group = fresh_group(size)
    text = ""
    if rank == 0:
        with config.patch(timeout_s=1.0), pytest.raises(DCPTimeoutError) as caught:
            votes.guard(group.group_name, "here", "3 rows exceed max_tokens=2")
        text = str(caught.value)
        assert (caught.value.record.site, caught.value.record.peer) == ("here", 1)
    registry.recover(group)
    combine(group.group_name, rank, size)
    return text


def test_a_rank_that_never_says_what_it_keeps_is_named() -> None:
    text = world(2).run(unheard)[0]
    for part in ("site here", "rank 0", "ranks [1]", "within 1 s", "max_tokens"):
        assert part in text


def sizes_in_turn(rank: int, size: int) -> list[str]:
    """Graphs of few and of too many rows, which the ranks compile at other times."""
    group = fresh_group(size)
    told = []
    for step, rows in enumerate((8, 2, 8, 3)):
        if rank == step % 2:
            time.sleep(2.5)  # longer than an exchange waits before it reads the votes
        with config.patch(max_tokens=4):
            for op in OPS:
                try:
                    compiled(op, group, rows)
                except Exception as error:
                    told.append(f"{op} of {rows} rows: {error}")
    return told


def test_a_refusal_for_many_rows_is_not_one_of_few() -> None:
    assert world(2).run(sizes_in_turn, limit_s=120) == [[], []]


def raises_the_limit(rank: int, size: int) -> list[str]:
    """All ranks raise the limit and compile again; then one comes late."""
    group = fresh_group(size)

    def model(x: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 0, group) + 1

    told = []
    for limit in (4, 64):
        torch._dynamo.reset()
        options = {"dcp_inductor.max_tokens": limit}
        run = torch.compile(
            model, backend="dcp_inductor", dynamic=False, options=options
        )
        counters.clear()
        for late in (False, True):
            if late and rank == 1:
                time.sleep(2.5)
            assert torch.equal(run(torch.ones(5, 8)), torch.full((10, 8), 2.0))
        told += sorted(k for k in counters["dcp_inductor"] if k != "found")
    return told


def test_a_refusal_is_taken_back_when_the_limit_is_raised() -> None:
    for told in world(2).run(raises_the_limit, limit_s=ENDED_S):
        assert told == ["rejected.over_capacity", "rewritten"]


def compiles_both_ways(rank: int, size: int, other: dict[str, Any]) -> None:
    """One function compiled directly and otherwise; then one rank comes late."""
    group = fresh_group(size)

    def model(x: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 0, group) + 1

    def run(options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
        return torch.compile(
            lambda x: model(x), backend="dcp_inductor", dynamic=False, options=options
        )

    torch._dynamo.reset()
    x, expected = torch.ones(5, 8), torch.full((10, 8), 2.0)
    direct, otherwise = run({}), run(other)
    for call in (direct, otherwise):
        assert torch.equal(call(x), expected)
    for call in (direct, otherwise, direct):
        if rank == 1:
            time.sleep(2.0)
        assert torch.equal(call(x), expected)


@pytest.mark.parametrize(
    "other", [{"direct_kv_gather": "disable"}, {"max_tokens": 2}, {"enable": False}]
)
def test_a_function_may_be_compiled_in_several_ways(other: dict[str, Any]) -> None:
    options = {f"dcp_inductor.{knob}": value for knob, value in other.items()}
    world(2).run(compiles_both_ways, options, limit_s=ENDED_S)


def recovers(rank: int, size: int) -> list[tuple[dict[str, int], list[str]]]:
    """A model whose option differs between the ranks, before and after a recovery."""
    group = fresh_group(size)

    def model(x: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 0, group) + 1

    torch._dynamo.reset()
    options = {"dcp_inductor.max_tokens": LIMITS[rank]["max_tokens"]}
    run = torch.compile(model, backend="dcp_inductor", options=options)
    seen = []
    for _ in range(2):
        counters["dcp_inductor"].clear()
        with Log() as log:
            for _ in range(2):
                assert torch.equal(run(torch.ones(2, 8)), torch.full((4, 8), 2.0))
        seen.append((fallbacks(), log.messages))
        registry.recover(group)  # outside of the model, and of its option
    return seen


def test_limits_that_differ_are_told_again_after_a_recovery() -> None:
    told, quiet = world(2).run(recovers, limit_s=ENDED_S)
    for counts, messages in told:
        assert counts == {"fallback.config": 2}
        assert len(messages) == 1
        assert "rank 1 has max_tokens 64, rank 0 has 4" in messages[0]
    assert quiet == [({"fallback.config": 2}, [])] * 2


def recovers_alike(rank: int, size: int) -> None:
    group = fresh_group(size)
    with config.patch(**LIMITS[rank]):
        eager("q_gather", group.group_name, 2)
    assert fallbacks() == {"fallback.config": 1}
    registry.recover(group)
    combine(group.group_name, rank, size)  # the limits do not differ any more
    assert fallbacks() == {"fallback.config": 1}
    assert epoch(group.group_name) > 0


def test_limits_set_alike_are_found_so_after_a_recovery() -> None:
    world(2).run(recovers_alike)
