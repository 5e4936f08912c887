"""The private launch ops of the CPU runtime, implemented in ``csrc/cpu``.

Called by ``runtime`` only and never inserted in a graph: besides the outputs that the
schemas mark, they write shared memory through the addresses in ``table``. ``table`` and
``signature`` are laid out by ``runtime/layout.py``. A launch returns a status: done,
pending (a peer has not arrived yet: call again with ``resume``), or mismatch.
"""

from __future__ import annotations

import torch

from dcp_inductor import ops  # noqa: F401  (declares the library that this file adds to)

PROTOCOL = 2
DONE, PENDING, MISMATCH = 0, 1, 2

_LIBRARY = torch.library.Library("dcp_inductor", "FRAGMENT")

# Every rank publishes a signature and waits for all; with compare, they must be equal.
_LIBRARY.define(
    "_shm_agree(Tensor table, Tensor signature, bool compare, bool resume) -> int"
)
shm_agree = torch.ops.dcp_inductor._shm_agree.default

# input [T, h, D] of rank r to output at r * rank_stride + t * token_stride (elements).
_LIBRARY.define(
    "_shm_gather(Tensor input, Tensor(a!) output, Tensor table, Tensor signature, "
    "int rank_stride, int token_stride, bool resume) -> int"
)
shm_gather = torch.ops.dcp_inductor._shm_gather.default

# part: first and end token, first and end head of the merged result that lands on this
# rank.
_LIBRARY.define(
    "_shm_a2a_lse_reduce(Tensor partial_output, Tensor partial_lse, Tensor? seq_lens, "
    "Tensor? query_start_loc, Tensor(a!) output, Tensor(b!)? lse, Tensor table, "
    "Tensor signature, int[] part, bool every_rank_takes_all, bool is_lse_base_on_e, "
    "bool full_lse, bool resume) -> int"
)
shm_a2a_lse_reduce = torch.ops.dcp_inductor._shm_a2a_lse_reduce.default

# The protocol that the loaded library speaks; must equal PROTOCOL.
_LIBRARY.define("_shm_protocol() -> int")
shm_protocol = torch.ops.dcp_inductor._shm_protocol.default
