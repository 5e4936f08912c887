"""The exchange protocol of csrc/cpu, played by ranks of one process step by step.

Every check of the protocol is shown to catch what it is there for: the tests that break
it on purpose read or write the shared bytes between two steps.
"""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from torch import Tensor

from dcp_inductor import extension, launch_ops, reference
from dcp_inductor.runtime import layout
from dcp_inductor.runtime.signature import Signature, describe
from dcp_inductor.runtime.workspace import as_tensor
from tests.support import VirtualRanks

T, H, D = 3, 4, 16
DONE, PENDING, MISMATCH = launch_ops.DONE, launch_ops.PENDING, launch_ops.MISMATCH


@pytest.fixture(autouse=True)
def library() -> None:
    assert extension.load_extension() == ""


def signature(op: str = "a2a_lse_reduce", site: str = "") -> Tensor:
    return as_tensor(Signature(op, (T, H, D), "float32", "", "", site).pack())


class Merging:
    """A combine over the heads of virtual ranks."""

    def __init__(self, size: int = 2, seed: int = 0) -> None:
        self.ranks = VirtualRanks(size, layout.combine_slot_bytes(T, H, 4 * D))
        self.signatures = [signature()] * size
        self.outputs = [torch.empty(T, H // size, D) for _ in range(size)]
        self.draw(seed)

    def draw(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = self.ranks.size
        self.partials = torch.randn(size, T, H, D, generator=generator)
        self.lses = torch.randn(size, T, H, generator=generator)

    def launch(self, rank: int, resume: bool) -> int:
        share = H // self.ranks.size
        return launch_ops.shm_a2a_lse_reduce(
            self.partials[rank], self.lses[rank], None, None, self.outputs[rank], None,
            self.ranks.tables[rank], self.signatures[rank],
            [0, T, rank * share, (rank + 1) * share], False, True, False, resume,
        )  # fmt: skip

    def is_right(self) -> bool:
        exact = reference.merge(self.partials, self.lses)[0]
        return torch.allclose(torch.cat(self.outputs, 1), exact, atol=1e-6)


def test_all_ranks_finish_with_the_merge() -> None:
    merging = Merging(4)
    for seed in range(7):
        merging.draw(seed)
        assert merging.ranks.launch(merging.launch) == [DONE] * 4
        assert merging.is_right()


def test_epochs_wrap() -> None:
    merging = Merging()
    merging.ranks.set_epoch(layout.EPOCHS - 3)
    for seed in range(6):
        merging.draw(seed)
        assert merging.ranks.launch(merging.launch) == [DONE] * 2
        assert merging.is_right()
    assert layout.read_u32(merging.ranks.controls[0], layout.EPOCH) == 3


def test_a_rank_can_be_one_call_ahead_and_no_more() -> None:
    merging = Merging()
    assert merging.launch(0, False) == PENDING
    assert merging.launch(1, False) == DONE
    assert merging.launch(0, True) == DONE
    assert merging.is_right()
    # Rank 1 begins its next call before rank 0 does, and is held there.
    assert merging.launch(1, False) == PENDING
    assert merging.launch(1, True) == PENDING
    assert merging.launch(0, False) == DONE
    assert merging.launch(1, True) == DONE


# --- the protocol broken on purpose ------------------------------------------------


def test_a_skipped_publish_is_never_taken_for_an_arrival() -> None:
    merging = Merging()
    merging.ranks.launch(merging.launch)
    # Rank 1 bumps its epoch and writes its payload, and its publish is undone.
    assert merging.launch(1, False) == PENDING
    slot = layout.slot_offset(2)
    layout.write_u32(merging.ranks.controls[1], slot, 0)
    assert merging.launch(0, False) == PENDING
    assert merging.launch(0, True) == PENDING
    layout.write_u32(merging.ranks.controls[1], slot, 2)
    assert merging.launch(0, True) == DONE


@pytest.mark.parametrize("behind", [2, 4, layout.EPOCHS // 2, layout.EPOCHS - 2])
def test_a_stale_epoch_is_never_taken_for_an_arrival(behind: int) -> None:
    merging = Merging()
    for _ in range(5):
        merging.ranks.launch(merging.launch)
    # Rank 1 publishes into the right slot, under the number of another call.
    layout.write_u32(merging.ranks.controls[1], layout.EPOCH, 5 - behind)
    merging.launch(1, False)
    assert merging.launch(0, False) == PENDING
    assert merging.launch(0, True) == PENDING


def test_a_publish_into_the_other_slot_is_never_taken_for_an_arrival() -> None:
    merging = Merging()
    merging.ranks.launch(merging.launch)
    assert merging.launch(1, False) == PENDING
    control = merging.ranks.controls[1]
    layout.write_u32(control, layout.slot_offset(3), 2)
    layout.write_u32(control, layout.slot_offset(2), 1)
    assert merging.launch(0, False) == PENDING


def test_swapped_payload_slots_are_seen_by_the_oracle() -> None:
    merging = Merging()
    merging.ranks.launch(merging.launch)
    merging.draw(1)
    assert merging.launch(0, False) == PENDING
    assert merging.launch(1, False) == DONE
    arena, size = merging.ranks.arenas[1], merging.ranks.slot_bytes
    even, odd = bytes(arena[:size]), bytes(arena[size:])
    assert even != odd
    arena[:size], arena[size:] = odd, even
    assert merging.launch(0, True) == DONE
    assert not merging.is_right()


def test_one_slot_would_not_do() -> None:
    merging = Merging()
    assert merging.launch(0, False) == PENDING
    assert merging.launch(1, False) == DONE
    first = merging.partials[1].clone()
    merging.draw(1)
    assert merging.launch(1, False) == PENDING  # one ahead: the other slot
    size = merging.ranks.slot_bytes
    kept = bytes(merging.ranks.arenas[1][size : size + 4 * D])
    assert kept == bytes(first[0, 0].numpy().tobytes())  # rank 0 can still read call 1
    arena = merging.ranks.arenas[1]
    arena[size:] = arena[:size]  # the same call with one slot
    merging.draw(0)
    assert merging.launch(0, True) == DONE
    assert not merging.is_right()


def test_another_signature_stops_every_rank() -> None:
    merging = Merging(4)
    merging.signatures[2] = signature("q_gather")
    assert merging.ranks.launch(merging.launch) == [MISMATCH] * 4
    faults = [layout.read_u32(c, layout.FAULT_PEER) for c in merging.ranks.controls]
    assert faults[0] == faults[1] == faults[3] == 2
    merging.signatures[2] = signature()
    assert merging.ranks.launch(merging.launch) == [DONE] * 4
    assert merging.is_right()


def test_signatures_say_what_they_are() -> None:
    long = Signature("q_gather", (1, 2, 3), "float8_e5m2", "x=1", "by hand", "s" * 400)
    other = Signature("q_gather", (1, 2, 3), "float8_e5m2", "x=1", "by hand", "s" * 401)
    assert len(long.pack()) == layout.SIGNATURE_BYTES
    assert long.pack() != other.pack()
    assert describe(long.pack()).startswith("q_gather[1, 2, 3] float8_e5m2, x=1, by")


# --- offsets beyond 32 bits ----------------------------------------------------------


def sparse(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros whose pages exist only where they are touched."""
    width = torch.empty(0, dtype=dtype).element_size()
    flags = (
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    )
    return torch.frombuffer(mmap.mmap(-1, num_elements * width, flags), dtype=dtype)


BEYOND = 2**31 + 64


def test_gather_reaches_beyond_32_bits() -> None:
    heads, width = 2, 576
    source = sparse(BEYOND + heads * width, torch.bfloat16)
    query = source.as_strided((2, heads, width), (BEYOND, width, 1))
    query.copy_(torch.randn(2, heads, width))
    output = sparse(2 * BEYOND + 2 * heads * width, torch.bfloat16)
    slot_bytes = 2**32 + 4096
    control = mmap.mmap(-1, layout.CONTROL_BYTES)
    arena = sparse(2 * slot_bytes, torch.uint8)
    address = ctypes.addressof(ctypes.c_char.from_buffer(control))
    words = layout.table_words(0, 0, 0, slot_bytes, [address], [arena.data_ptr()])
    # The second call uses slot 0, the first slot 1, beyond 4 GiB.
    for _ in range(2):
        output.as_strided((2, heads, width), (BEYOND, width, 1)).zero_()
        status = launch_ops.shm_gather(
            query, output, torch.tensor(words), signature(), 0, BEYOND, False
        )
        assert status == DONE
        got = output.as_strided((2, heads, width), (BEYOND, width, 1))
        assert torch.equal(got, query)
    sent = 2 * heads * width
    for slot in (0, slot_bytes):
        row = arena[slot : slot + 2 * sent].view(torch.bfloat16)
        assert torch.equal(row, query.reshape(-1))


def test_combine_reaches_beyond_32_bits() -> None:
    heads, width = 2, 64
    source = sparse(BEYOND + heads * width, torch.bfloat16)
    partial = source.as_strided((2, heads, width), (BEYOND, width, 1))
    partial.copy_(torch.randn(2, heads, width))
    lse = sparse(BEYOND + heads, torch.float32).as_strided((2, heads), (BEYOND, 1))
    ranks = VirtualRanks(1, layout.combine_slot_bytes(2, heads, 2 * width))
    output = torch.empty(2, heads, width, dtype=torch.bfloat16)
    status = launch_ops.shm_a2a_lse_reduce(
        partial, lse, None, None, output, None, ranks.tables[0], signature(),
        [0, 2, 0, heads], True, True, False, False,
    )  # fmt: skip
    assert status == DONE
    assert torch.equal(output, partial)


# --- what would corrupt memory is refused ---------------------------------------------


def test_launches_refuse_what_does_not_fit() -> None:
    merging = Merging()
    merging.outputs[0] = torch.empty(T, 1, D)
    with pytest.raises(RuntimeError, match="contiguous tensor of this rank's part"):
        merging.launch(0, False)
    merging = Merging()
    merging.partials = merging.partials.transpose(-1, -2).contiguous().transpose(-1, -2)
    with pytest.raises(RuntimeError, match="dense rows"):
        merging.launch(0, False)
    merging = Merging()
    merging.signatures[0] = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="expected 256 bytes"):
        merging.launch(0, False)
