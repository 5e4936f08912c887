"""Exchanges of one group from several streams and from threads of micro-batches."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import dcp_inductor
from dcp_inductor import config, ops
from dcp_inductor.runtime import cuda_registry
from tests.cuda import worlds
from tests.cuda.test_exchange import close, oracle
from tests.cuda.worlds import TOKEN, draw
from tests.support import fallbacks

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]
_A_MILLISECOND = 2_000_000  # clock cycles, roughly


def several_streams(rank: int, size: int) -> None:
    group = dist.new_group(list(range(size)))
    rows = [torch.full((3, 16), float(10 * i + rank), device="cuda") for i in range(12)]
    side = torch.cuda.Stream()
    # Until each has run once, CUDA loads kernels while a peer's waits.
    torch.cuda._sleep(1)
    ops.kv_gather(rows[0], TOKEN, group.group_name)
    torch.cuda.synchronize()
    dist.barrier()
    results = []
    for i, mine in enumerate(rows):
        with torch.cuda.stream(side if i % 2 else torch.cuda.default_stream()):
            if i % 2 == 0:  # the next launch, on the other stream, would overtake
                torch.cuda._sleep(_A_MILLISECOND)
            results.append(ops.kv_gather(mine, TOKEN, group.group_name)[0])
    torch.cuda.synchronize()
    dcp_inductor.check(group)
    for i, got in enumerate(results):
        wanted = torch.arange(size, device="cuda").repeat_interleave(3) + 10.0 * i
        assert torch.equal(got, wanted[:, None].expand(-1, 16)), (i, got[:, 0])
    assert not fallbacks(), fallbacks()
    dist.barrier()
    cuda_registry.close(group)


def test_launches_on_several_streams_keep_their_order() -> None:
    worlds.run(2, several_streams)


def micro_batches(rank: int, size: int) -> None:
    """Threads with other numbers of tokens; which is first differs between ranks."""
    with config.patch(num_ubatches=2):
        group = dist.new_group(list(range(size)))
        assert dcp_inductor.prepare(group)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            torch.cuda.set_device(rank % torch.cuda.device_count())
            stream = torch.cuda.Stream()
            with dcp_inductor.ubatch(index), torch.cuda.stream(stream):
                if index != rank % 2:
                    threading.Event().wait(0.2)
                tokens, heads = 5 + index, 2 * size
                for step in range(10):
                    seed = 100 * index + step
                    outputs = draw(seed, size, tokens, heads, 64)
                    lses = draw(seed + 50, size, tokens, heads)
                    got = ops.a2a_lse_reduce(
                        outputs[rank], lses[rank], TOKEN, group.group_name
                    )[0]
                    stream.synchronize()
                    close(got, oracle(outputs, lses, "heads", None, rank)[0], got.dtype)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert not fallbacks(), fallbacks()
    dist.barrier()
    dcp_inductor.close(group)
    assert cuda_registry.memory_bytes(group) == 0


def test_micro_batches_of_unequal_size_do_not_disturb_each_other() -> None:
    worlds.run(2, micro_batches)
