"""The private launch ops of the CUDA runtime, implemented in ``csrc/cuda/launch.cu``.

Called by ``runtime`` only and never inserted in a graph: besides the outputs that the
schemas mark, they write symmetric memory through the addresses in ``table``, which
``runtime/cuda_layout.py`` lays out. A launch queues one kernel and returns.
"""

from __future__ import annotations

import torch

from dcp_inductor import ops  # noqa: F401  (declares the library that this file adds to)

PROTOCOL = 6

_LIBRARY = torch.library.Library("dcp_inductor", "FRAGMENT")

# partial_output [T, H, D] and partial_lse [T, H] of every rank to this rank's part.
_LIBRARY.define(
    "_symm_a2a_lse_reduce(Tensor partial_output, Tensor partial_lse, Tensor? seq_lens, "
    "Tensor? query_start_loc, Tensor(a!) output, Tensor(b!)? lse, bool full_lse, "
    "Tensor table) -> ()"
)
symm_a2a_lse_reduce = torch.ops.dcp_inductor._symm_a2a_lse_reduce.default

# input [T, h, D] of every rank to [T, padded_heads, D], or [t, 1, D] to [N * t, D]. A
# table that only publishes leaves output alone; one that only waits ends that exchange.
# With a table of a view, output must be this rank's arena, from its data on.
_LIBRARY.define("_symm_gather(Tensor input, Tensor(a!) output, Tensor table) -> ()")
symm_gather = torch.ops.dcp_inductor._symm_gather.default

# The protocol that the loaded library speaks; must equal PROTOCOL.
_LIBRARY.define("_symm_protocol() -> int")
symm_protocol = torch.ops.dcp_inductor._symm_protocol.default
