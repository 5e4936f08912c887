"""Arguments of the graph ops and of the functions around them, with real processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dcp_inductor import check, config, ops, recover, reference
from dcp_inductor.capability import Refusal
from dcp_inductor.geometry import MergeOptions
from dcp_inductor.runtime import collective_combine, shm_exchange, ubatch
from tests.support import combine, epoch, group_name, world

TOKEN = torch.empty(0)


def bad_arguments(rank: int, size: int) -> None:
    name = group_name()
    x, lse = torch.zeros(2, 2 * size, 4), torch.zeros(2, 2 * size)

    def masked(lengths: list, starts: list) -> object:
        return ops.a2a_lse_reduce(
            x, lse, TOKEN, name,
            seq_lens=torch.tensor(lengths), query_start_loc=torch.tensor(starts),
        )  # fmt: skip

    def in_ubatch(index: int) -> object:
        with ubatch.ubatch(index):
            return ops.kv_gather(x, TOKEN, name)

    masked([1], [0, 2])
    for call, message in (
        (lambda: ops.q_gather(x[0], TOKEN, name), r"expected query \[T, h, D\], got 2"),
        (lambda: ops.q_gather(x, TOKEN, name, padded_heads=1), "expected padded_heads"),
        (lambda: ops.kv_gather(x[0, 0, 0], TOKEN, name), "got 0 dims"),
        (
            lambda: ops.a2a_lse_reduce(x, lse, TOKEN, name, scatter="head"),
            "expected scatter in",
        ),
        (
            lambda: ops.a2a_lse_reduce(x, lse, TOKEN, name, split_sizes=[1]),
            "one per rank",
        ),
        (
            lambda: ops.a2a_lse_reduce(x, lse, TOKEN, name, seq_lens=torch.ones(1)),
            "both of seq_lens and query_start_loc",
        ),
        (
            lambda: ops.a2a_lse_reduce(x, lse, TOKEN, name, output_dtype=torch.int32),
            "floating-point output_dtype, got torch.int32",
        ),
        (lambda: masked([1, 2], [0, 2]), r"\[B \+ 1\] .*got 2 entries and 2"),
        (lambda: masked([[1]], [0, 2]), "seq_lens with 1 dim, got 2"),
        (lambda: masked([0.5], [0, 2]), "seq_lens of integers, got torch.float32"),
        (lambda: ops.kv_gather(x, torch.empty(1), name), "token: expected no elements"),
        (lambda: ops.kv_gather(x, None, name), r"torch.empty\(0\), got None"),
        (
            lambda: ops.a2a_lse_reduce(x[:, :, :2], lse.to("meta"), TOKEN, name),
            "or all of them on meta, got partial_output on cpu, partial_lse on meta, "
            "token on cpu",
        ),
        (lambda: recover("0"), "expected a process group that this process is in"),
        (lambda: check("0"), "expected a process group that this process is in"),
        (lambda: ubatch.ubatch(1.5).__enter__(), "an integer from 0, got 1.5"),
        (lambda: ubatch.ubatch(True).__enter__(), "an integer from 0, got True"),
        (lambda: ops.q_gather(None, TOKEN, name), "tensor as query, got None"),
        (lambda: ops.kv_gather(None, TOKEN, name), "tensor as rows, got None"),
        (lambda: ops.kv_gather_publish(None, TOKEN, name), "as rows, got None"),
        (lambda: ops.a2a_lse_reduce(x, None, TOKEN, name), "partial_lse, got None"),
        (lambda: ops.a2a_lse_reduce(None, lse, TOKEN, name), "_output, got None"),
        (lambda: ops.order_after(None, TOKEN), "order_after: .* as x, got None"),
        (lambda: ops.order_after(x, None), "order_after: .* as token, got None"),
        (lambda: ops.order_token(None, TOKEN), "order_token: .* as x, got None"),
        (lambda: ops.order_token(x, None), "order_token: .* as token, got None"),
        (lambda: ops.q_gather(x, TOKEN, "nobody"), "name of a live process group"),
        (lambda: in_ubatch(3), r"micro-batch below 1, .*got 3.*recover\(group\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="equal T in partial_output"):
        ops.a2a_lse_reduce(x, lse[:1], TOKEN, name)
    combine(name, rank, size)


def test_bad_arguments_say_what_was_expected() -> None:
    world(2).run(bad_arguments)


def on_meta(rank: int, size: int) -> None:
    """One tensor on meta would run the fake, and return memory that nobody wrote."""
    name = group_name()
    x, lse = torch.zeros(2, 2 * size, 4), torch.zeros(2, 2 * size)
    mask = {"seq_lens": torch.ones(1).int(), "query_start_loc": torch.tensor([0, 2])}
    calls = (
        (ops.q_gather, (x, TOKEN, name), {}),
        (ops.q_gather_view, (x, TOKEN, name), {}),
        (ops.kv_gather, (x, TOKEN, name), {}),
        (ops.kv_gather_publish, (x, TOKEN, name), {}),
        (ops.a2a_lse_reduce, (x, lse, TOKEN, name), mask),
        (ops.order_after, (x, TOKEN), {}),
        (ops.order_token, (x, TOKEN), {}),
    )
    for op, arguments, options in calls:
        given = {**dict(enumerate(arguments)), **options}
        tensors = [key for key, value in given.items() if isinstance(value, Tensor)]
        for moved in (*((key,) for key in tensors), tensors):
            there = {
                key: value.to("meta") if key in moved else value
                for key, value in given.items()
            }
            positional = [there.pop(i) for i in range(len(arguments))]
            if moved is tensors:
                result = op(*positional, **there)
                first = result[0] if isinstance(result, tuple) else result
                assert first.is_meta
                continue
            with pytest.raises(ValueError, match="all of them on meta, got ") as caught:
                op(*positional, **there)
            said = str(caught.value).partition("got ")[2]
            assert said.count(" on meta") == 1 + said.count("all on meta")
            assert said.count(" on cpu") == len(tensors) - 1
    combine(name, rank, size)


def test_a_tensor_on_meta_beside_others_is_refused() -> None:
    world(2).run(on_meta)


def masks(rank: int, size: int) -> None:
    """Only rank 0 masks, so that its empty rows show; both paths agree on them."""
    name = group_name()
    output, lse = torch.full((6, 2, 2), 1.0 + rank), torch.zeros(6, 2)

    def merged(mode: str, given: dict[str, torch.Tensor]) -> torch.Tensor:
        with config.patch(direct_combine=mode):
            return ops.a2a_lse_reduce(
                output, lse, TOKEN, name, scatter="none", **given
            )[0]

    for lengths, starts, empty in (
        ([1, 0], [0, 3, 6], [3, 4, 5]),
        ([1, 0, 0], [0, 3, 3, 3], [3, 4, 5]),
        ([0, 1], [0, 3, 600], [0, 1, 2]),
        ([1, 1], [2, 4, 5], [0, 1, 5]),
        ([], [0], list(range(6))),
    ):
        given = {
            "seq_lens": torch.tensor(lengths, dtype=torch.int64),
            "query_start_loc": torch.tensor(starts),
        }
        results = [merged(m, {} if rank else given) for m in ("auto", "disable")]
        wanted = torch.full((6, 2, 2), 1.5)
        wanted[empty] = 2.0
        for result in results:
            torch.testing.assert_close(result, wanted)
    wrong = {
        "seq_lens": torch.tensor([1, 1]),
        "query_start_loc": torch.tensor([4, 2, 6]),
    }
    for mode in ("auto", "disable"):
        before = epoch(name)
        with pytest.raises(ValueError, match="never descends"):
            merged(mode, wrong)
        assert epoch(name) == before
    combine(name, rank, size)


def test_rows_are_masked_alike_on_both_paths_or_refused() -> None:
    world(2).run(masks)


def full_lse_alone(rank: int, size: int) -> None:
    name = group_name()
    partials = torch.zeros(2, 2 * size, 4), torch.zeros(2, 2 * size)
    alone, together = (
        MergeOptions(full_lse=True),
        MergeOptions(return_lse=True, full_lse=True),
    )
    message = "expected return_lse=True beside.* got return_lse=False; set it, or leave"
    switched_off = config.patch(direct_combine="disable")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in partials]
        fake_token = mode.from_tensor(TOKEN)

    def op(options: MergeOptions, rows: int = 2) -> object:
        given = [x[:rows] for x in partials]
        return ops.a2a_lse_reduce(*given, TOKEN, name, **options._asdict())

    def direct(options: MergeOptions) -> object:
        result = shm_exchange.a2a_lse_reduce(*partials, name, options, None, None, "")
        assert not isinstance(result, Refusal)
        return result

    def traced(options: MergeOptions) -> object:
        return ops.a2a_lse_reduce(*fakes, fake_token, name, **options._asdict())

    for front_door in (
        op,
        switched_off(op),
        lambda options: op(options, rows=0),
        direct,
        traced,
        lambda options: reference.a2a_lse_reduce(*partials, name, options),
        lambda options: collective_combine.packed_all_to_all(*partials, name, options),
    ):
        with pytest.raises(ValueError, match=message):
            front_door(alone)
        assert front_door(together)[1].shape[-1] == 2 * size
    with pytest.raises(ValueError, match=message):
        collective_combine.corrected_reduce(*partials, name, alone)
    combine(name, rank, size)


def test_a_full_lse_that_is_not_returned_is_refused() -> None:
    world(2).run(full_lse_alone)


def collectives_of_any_layout(rank: int, size: int) -> None:
    """One element counts as contiguous whatever its strides; 8-bit floats merge too."""
    name = group_name()
    wide = torch.arange(8.0).view(2, 4) + rank
    one = wide[:1, :1, None].as_strided((1, 1, 1), (7, 3, 5))
    with config.patch(direct_combine="disable", direct_kv_gather="disable"):
        for dtype in (torch.float32, torch.float64, torch.float8_e4m3fn):
            output = one.to(dtype).as_strided((1, 1, 1), (7, 3, 5))
            lse = wide[:1, ::4].as_strided((1, 1), (4, 4))
            got = ops.a2a_lse_reduce(
                output, lse, TOKEN, name, scatter="none", output_dtype=torch.float32
            )[0]
            weight = torch.softmax(torch.arange(float(size)), 0)
            wanted = (weight * torch.arange(float(size))).sum()
            torch.testing.assert_close(got.item(), wanted.item(), atol=1e-6, rtol=1e-5)
        rows = ops.kv_gather(one, TOKEN, name)[0]
        assert rows.flatten().tolist() == [float(r) for r in range(size)]


def test_the_collectives_take_any_layout_and_float() -> None:
    world(2).run(collectives_of_any_layout)
