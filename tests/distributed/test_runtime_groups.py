"""Groups, capacity and knobs of the CPU runtime, with real processes."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dcp_inductor import close, config, ops, prepare, recover, reference
from dcp_inductor.errors import DCPError, DCPMismatchError, DCPTimeoutError
from dcp_inductor.runtime import registry, shm, ubatch
from tests.support import (
    Log,
    combine,
    epoch,
    fallbacks,
    fresh_group,
    gather,
    group_name,
    world,
)

TOKEN = torch.empty(0)


def several_groups(rank: int, size: int) -> None:
    everyone = dist.group.WORLD.group_name
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([3, 0])]
    mine = [g for g in pairs if dist.get_rank(g) >= 0]
    for seed in range(4):
        for group in mine:
            own = group.rank()
            combine(group.group_name, own, 2, seed=seed)
            gather(group.group_name, own, 2)
        combine(everyone, rank, size, seed=seed)
    for group in mine:
        assert epoch(group.group_name) >= 8
    assert not fallbacks()


def test_sub_groups_and_the_world_take_turns() -> None:
    world(4).run(several_groups)


def groups_again(rank: int, size: int) -> None:
    seen = set()
    for _ in range(3):
        group = fresh_group(size)
        for seed in range(3):
            combine(group.group_name, rank, size, seed=seed)
        assert epoch(group.group_name) < 20
        seen.add(group.group_name)
        dist.destroy_process_group(group)
    del group


def test_groups_that_are_destroyed_and_made_again_start_anew() -> None:
    world(2).run(groups_again)


def world_again(rank: int, size: int, path: str) -> None:
    # A store that outlives the world: keys of the first time are still in it.
    store = dist.FileStore(path, size)
    old = dist.group.WORLD.group_name
    combine(old, rank, size)
    dist.destroy_process_group()
    for _ in range(2):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        combine(dist.group.WORLD.group_name, rank, size)
        assert epoch(dist.group.WORLD.group_name) < 20
        dist.barrier()
        dist.destroy_process_group()
        path += "-next"
        store = dist.FileStore(path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def test_a_world_that_is_set_up_again_works(tmp_path: Path) -> None:
    world(2).run(world_again, str(tmp_path / "store"))


def stale_keys(rank: int, size: int) -> None:
    group = fresh_group(size)
    name = group.group_name
    combine(name, rank, size)
    registry.close(group)  # the store keeps every key of the first set-up
    dist.barrier()
    combine(name, rank, size)
    registry.close(group)
    if rank == 0:
        time.sleep(0.2)  # the others meet yesterday's offer first
    combine(name, rank, size)
    assert not fallbacks()


def test_a_store_full_of_old_keys_does_not_mislead_the_set_up() -> None:
    world(2).run(stale_keys)


def closed(rank: int, size: int) -> tuple[int, int]:
    group = fresh_group(size)
    before = shm_mappings()
    combine(group.group_name, rank, size)
    held = shm_mappings() - before
    close(group)
    gc.collect()
    left = held & shm_mappings()
    combine(group.group_name, rank, size)  # sets it up anew
    close(group)
    assert not fallbacks()
    return len(held), len(left)


def shm_mappings() -> set[str]:
    with open("/proc/self/maps") as maps:
        return {line for line in maps if "/dev/shm/" in line and "dcp" in line}


def test_a_closed_group_holds_no_memory() -> None:
    for held, left in world(2).run(closed):
        assert held > 0
        assert left == 0


def closed_without_a_peer(rank: int, size: int) -> None:
    group = fresh_group(size)
    combine(group.group_name, rank, size)
    if rank == 0:
        with config.patch(timeout_s=1.0), pytest.raises(DCPTimeoutError) as caught:
            close(group)
        assert caught.value.record.peer == 1
    dist.barrier()


def test_no_rank_closes_alone() -> None:
    world(2).run(closed_without_a_peer)


# --- micro-batches ---------------------------------------------------------------


def micro_batches(rank: int, size: int) -> None:
    group = fresh_group(size)
    name = group.group_name
    errors = []

    def work(index: int) -> None:
        try:
            with ubatch.ubatch(index):
                for step in range(30):
                    time.sleep(0.001 * ((step + rank + index) % 3))
                    combine(name, rank, size, seed=step + 100 * index)
        except BaseException as error:
            errors.append(error)

    with config.patch(num_ubatches=2):
        combine(name, rank, size)
        threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    with ubatch.ubatch(2), pytest.raises(ValueError, match="below 2, which group"):
        combine(name, rank, size)
    assert not fallbacks()


def test_micro_batches_on_threads_do_not_disturb_each_other() -> None:
    world(2).run(micro_batches)


# --- capacity ----------------------------------------------------------------------


def beyond_capacity(rank: int, size: int) -> None:
    name = fresh_group(size).group_name
    before = fallbacks().get("fallback.rows", 0)
    with config.patch(max_tokens=16), Log() as told:
        for tokens in (1, 15, 16, 17, 64, 16):
            combine(name, rank, size, tokens=tokens)
            gather(name, rank, size, tokens=tokens)
        for step in range(10):
            time.sleep(0.002 * ((step + rank) % 2))
            combine(name, rank, size, tokens=16, seed=step)
            gather(name, rank, size, tokens=16)
        assert fallbacks()["fallback.rows"] - before == 4
        with pytest.raises(RuntimeError, match="17 rows are more than the 16"):
            with config.patch(direct_combine="force"):
                combine(name, rank, size, tokens=17)
        combine(name, rank, size, tokens=16)
    assert len(told.messages) == (2 if rank == 0 else 0), told.messages


def test_rows_beyond_capacity_take_the_collectives_on_all_ranks() -> None:
    world(2).run(beyond_capacity)


def no_rows(rank: int, size: int) -> None:
    name = group_name()
    combine(name, rank, size)
    empty = torch.empty(0, 4, 8)
    output, lse, _ = ops.a2a_lse_reduce(
        empty, torch.empty(0, 4), TOKEN, name, return_lse=True
    )
    assert output.shape == (0, 4 // size, 8)
    assert lse.shape == (0, 4 // size)
    assert ops.q_gather(empty, TOKEN, name)[0].shape == (0, 4 * size, 8)
    assert ops.kv_gather(empty, TOKEN, name)[0].shape == (0, 4, 8)
    combine(name, rank, size)


def test_calls_without_rows_give_results_without_rows() -> None:
    world(2).run(no_rows)


def no_rows_here(rank: int, size: int, which: str) -> str:
    """A step without rows on rank 0 only, and then one that all ranks share."""
    group = fresh_group(size)
    name = group.group_name
    call = {"combine": combine, "gather": gather}[which]
    call(name, rank, size)
    try:
        if rank == 0:
            empty = torch.empty(0, 2 * size, 16)
            if which == "combine":
                ops.a2a_lse_reduce(empty, empty[..., 0], TOKEN, name)
            else:
                ops.q_gather(torch.empty(0, 1, 4), TOKEN, name)
        call(name, rank, size)
        return "a number"
    except DCPMismatchError as error:
        recover(group)
        call(name, rank, size)
        return str(error)


@pytest.mark.parametrize("which", ["combine", "gather"])
def test_a_rank_without_rows_does_not_fall_behind(which: str) -> None:
    for text in world(2).run(no_rows_here, which):
        counts = re.findall(r"(?:gather|reduce)\[(\d+), \d+, \d+\] float32", text)
        assert sorted(counts) == ["0", "3"], text


# --- knobs and modes -------------------------------------------------------------


def knobs(rank: int, size: int) -> None:
    name = fresh_group(size).group_name
    combine(name, rank, size)
    gather(name, rank, size)
    before = epoch(name)
    with config.patch(
        direct_combine="disable",
        direct_query_gather="disable",
        direct_kv_gather="disable",
    ):
        combine(name, rank, size)
        gather(name, rank, size)
        rows = torch.ones(2, 3)
        assert ops.kv_gather(rows, TOKEN, name)[0].shape == (2 * size, 3)
    assert epoch(name) == before
    with config.patch(direct_combine="force", direct_query_gather="force"):
        combine(name, rank, size)
        gather(name, rank, size)
        doubles = torch.zeros(1, size, 4, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="expected partial_output of float32"):
            ops.a2a_lse_reduce(doubles, doubles[..., 0], TOKEN, name)
    assert epoch(name) == before + 3  # a refusal is agreed on like an exchange


def test_force_and_disable() -> None:
    world(2).run(knobs)


def other_dtypes(rank: int, size: int) -> None:
    name = fresh_group(size).group_name
    before = fallbacks().get("fallback.dtype", 0)
    generator = torch.Generator().manual_seed(3)
    outputs = torch.randn(size, 2, size, 8, generator=generator, dtype=torch.float64)
    lses = torch.randn(size, 2, size, generator=generator, dtype=torch.float64)
    got = ops.a2a_lse_reduce(outputs[rank], lses[rank], TOKEN, name)[0]
    exact = reference.merge(outputs, lses)[0].chunk(size, 1)[rank]
    torch.testing.assert_close(got, exact, atol=1e-12, rtol=1e-12)
    assert fallbacks()["fallback.dtype"] == before + 1


def test_partials_in_fp64_stay_in_fp64() -> None:
    world(2).run(other_dtypes)


def modes(rank: int, size: int) -> None:
    name = group_name()
    plain = combine(name, rank, size)
    with torch.inference_mode():
        assert torch.equal(combine(name, rank, size), plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(combine(name, rank, size), plain)
        with config.patch(direct_combine="disable"):
            assert combine(name, rank, size).dtype == plain.dtype
    x = torch.ones(1, 2 * size, 4, requires_grad=True)
    lse = torch.zeros(1, 2 * size)
    for call in (
        lambda: ops.q_gather(x, TOKEN, name),
        lambda: ops.kv_gather(x, TOKEN, name),
        lambda: ops.a2a_lse_reduce(x, lse, TOKEN, name),
        lambda: ops.a2a_lse_reduce(x.detach(), x[..., 0], TOKEN, name),
    ):
        with pytest.raises(RuntimeError, match="no backward"):
            call()
    with torch.no_grad():
        assert ops.q_gather(x, TOKEN, name)[0].requires_grad is False
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(combine(name, rank, size), plain)
    finally:
        torch.use_deterministic_algorithms(deterministic)


def test_modes_change_nothing_and_gradients_are_refused() -> None:
    world(2).run(modes)


def nothing_left(rank: int, size: int) -> list[str]:
    combine(fresh_group(size).group_name, rank, size)
    return [path.name for path in shm.DIRECTORY.glob("dcp_inductor-*")]


def test_segments_are_unlinked_once_they_are_mapped() -> None:
    pids = {str(process_.pid) for process_ in world(2).processes}
    for names in world(2).run(nothing_left):
        assert not [name for name in names if name.split("-")[3] in pids]


def forked(rank: int, size: int) -> None:
    name = group_name()
    combine(name, rank, size)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = "no error"
            for call in (lambda: combine(name, rank, size), prepare, recover):
                with pytest.raises(DCPError, match="create the process group after"):
                    call()
            text = "refused"
        except BaseException as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    said = os.read(read, 4096).decode()
    os.close(read)
    os.waitpid(child, 0)
    assert said == "refused", said
    combine(name, rank, size)


def test_a_fork_cannot_use_its_parents_workspace() -> None:
    world(2).run(forked)


def descriptors(rank: int, size: int) -> list[str]:
    name = fresh_group(size).group_name
    combine(name, rank, size)
    links = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
    return [os.readlink(link) for link in links if os.path.lexists(link)]


def test_memory_that_is_mapped_holds_no_descriptor() -> None:
    """Workspaces live as long as their group, which compiled code may keep for good."""
    for links in world(2).run(descriptors):
        assert [link for link in links if str(shm.DIRECTORY) in link] == []


def test_memory_is_unmapped_with_the_last_view_of_it() -> None:
    segment = shm.create(8192)
    segment.unlink()
    name, view = segment.name, segment.view[4096:]
    del segment
    view[0] = 7
    assert name in Path("/proc/self/maps").read_text()
    assert view[0] == 7
    del view
    assert name not in Path("/proc/self/maps").read_text()
