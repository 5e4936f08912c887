"""A paged cache of MLA latents, split over the ranks of a DCP group by position.

With N ranks and interleave I, position p belongs to rank (p // I) % N and is that
rank's local row (p // (I * N)) * I + p % I. A rank maps its local rows to blocks of its
own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from examples.mla_lm.config import ModelConfig
from examples.mla_lm.parallel import Layout


class DecodeInputs(NamedTuple):
    """What one decode step reads: a batch of B sequences, one token each.

    Nothing here depends on the rank but the values, so all ranks compile the same
    graph.
    """

    tokens: Tensor  # [B] int64
    positions: Tensor  # [B] int64, over the whole sequence
    slots: Tensor  # [B] int64, row to write; in the spare block if not ours
    seq_lens: Tensor  # [B] int64, rows of this rank, the new one included
    block_table: Tensor  # [B, blocks per sequence] int64


def local_row(position: Tensor, world_size: int, interleave: int) -> Tensor:
    """Row that a position has on the rank that owns it."""
    return position // (interleave * world_size) * interleave + position % interleave


def local_length(length: Tensor, rank: int, world_size: int, interleave: int) -> Tensor:
    """How many of the first ``length`` positions belong to ``rank``."""
    rounds = length // (interleave * world_size)
    rest = length % (interleave * world_size) - rank * interleave
    return rounds * interleave + rest.clamp(0, interleave)


class PagedLatentCache:
    """Blocks of one batch of sequences, with a block table and lengths.

    ``layers[i]`` is [num_blocks, block_size, latent_width]. Block 0 is spare: it takes
    the rows of positions that other ranks own, and nobody reads it.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        *,
        batch_size: int,
        max_length: int,
        block_size: int = 16,
        interleave: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rank, self.world_size = layout.dcp_rank, layout.dcp_size
        self.block_size = block_size
        self.interleave = interleave
        self.max_length = max_length
        # Rank 0 never owns less than another rank; its share gives all ranks equal
        # shapes.
        longest = local_length(torch.tensor(max_length), 0, self.world_size, interleave)
        blocks = -(-int(longest) // block_size)
        self.block_table = torch.zeros(batch_size, blocks, dtype=torch.int64)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)
        shape = (batch_size * blocks + 1, block_size, config.latent_width)
        self.layers = [
            torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)
        ]
        self._free = list(range(shape[0] - 1, 0, -1))

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank has allocated for latents."""
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    @property
    def num_rows(self) -> int:
        """Latent rows that this rank holds in each layer."""
        return int(self.seq_lens().sum())

    def seq_lens(self) -> Tensor:
        """Rows [B] of each sequence on this rank."""
        return self._local(self.lengths)

    def _local(self, lengths: Tensor) -> Tensor:
        return local_length(lengths, self.rank, self.world_size, self.interleave)

    def _reserve(self, sequence: int, rows: int) -> None:
        """Give a sequence the blocks for its first ``rows`` local rows."""
        table = self.block_table[sequence]
        for block in range(-(-rows // self.block_size)):
            if table[block] == 0:
                table[block] = self._free.pop()

    def extend(self, sequence: int, count: int) -> Tensor:
        """Append ``count`` positions to a sequence; their slots [count] on this rank.

        Raises:
            ValueError: the sequence would outgrow ``max_length``.
        """
        start = int(self.lengths[sequence])
        if start + count > self.max_length:
            raise ValueError(
                f"expected at most {self.max_length} positions in sequence "
                f"{sequence}, got {start + count}; raise max_length"
            )
        self.lengths[sequence] += count
        self._reserve(sequence, int(self._local(self.lengths[sequence])))
        positions = torch.arange(start, start + count)
        rows = local_row(positions, self.world_size, self.interleave)
        owner = positions // self.interleave % self.world_size
        # A row of another rank may lie beyond our blocks: clamp, the value is not used.
        blocks = (rows // self.block_size).clamp(max=self.block_table.shape[1] - 1)
        slots = self.block_table[sequence, blocks] * self.block_size
        slots = slots + rows % self.block_size
        return torch.where(owner == self.rank, slots, rows % self.block_size)

    def next_inputs(self, tokens: Tensor) -> DecodeInputs:
        """Append one position to every sequence; the inputs of the step to fill it."""
        positions = self.lengths.clone()
        slots = [self.extend(sequence, 1) for sequence in range(len(tokens))]
        return DecodeInputs(
            tokens,
            positions,
            torch.cat(slots),
            self._local(self.lengths),
            self.block_table,
        )
