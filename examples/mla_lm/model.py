"""The language model: embedding, decoder layers, vocabulary projection."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.mla_lm.attention import MLAttention
from examples.mla_lm.cache import DecodeInputs
from examples.mla_lm.checkpoint import Weights
from examples.mla_lm.config import ModelConfig, read_config
from examples.mla_lm.mlp import build_mlp
from examples.mla_lm.norm import RMSNorm
from examples.mla_lm.parallel import Layout, all_gather, all_reduce
from examples.mla_lm.rope import RotaryEmbedding


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual around it."""

    def __init__(self, weights: Weights, config: ModelConfig, layer: int) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.tp_group = weights.layout.tp_group
        self.attention_norm = RMSNorm(weights / "input_layernorm", eps)
        self.attention = MLAttention(weights / "self_attn", config)
        self.mlp_norm = RMSNorm(weights / "post_attention_layernorm", eps)
        self.mlp = build_mlp(weights / "mlp", config, layer)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual around the attention's partial sum, then the feed-forward part."""
        x = x + all_reduce(attended, self.tp_group)
        return x + all_reduce(self.mlp(self.mlp_norm(x)), self.tp_group)


class VocabParallelEmbedding(nn.Module):
    """Token embedding and vocabulary projection with this rank's vocabulary rows.

    The last rank may hold fewer rows; they are padded with zeros, and the logits cut.
    """

    first: Tensor

    def __init__(self, weights: Weights, vocab_size: int) -> None:
        super().__init__()
        layout = weights.layout
        self.tp_group = layout.tp_group
        self.vocab_size = vocab_size
        rows = -(-vocab_size // layout.tp_size)
        first = min(layout.tp_rank * rows, vocab_size)
        own = slice(first, min(first + rows, vocab_size))
        weight = weights.tensor("weight", rows=own)
        weight = F.pad(weight, (0, 0, 0, rows - weight.shape[0]))
        self.weight = nn.Parameter(weight, requires_grad=False)
        # A tensor and not an int, so that the graphs of all ranks are the same.
        self.register_buffer("first", torch.tensor(layout.tp_rank * rows))

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, hidden]."""
        if self.tp_group is None:
            return F.embedding(tokens, self.weight)
        row = tokens - self.first
        is_ours = (row >= 0) & (row < self.weight.shape[0])
        part = F.embedding(row.clamp(0, self.weight.shape[0] - 1), self.weight)
        return all_reduce(part * is_ours[:, None], self.tp_group)

    def logits(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, vocab_size] in fp32."""
        part = F.linear(x, self.weight).float()
        return all_gather(part, 1, self.tp_group)[:, : self.vocab_size]


class MlaLM(nn.Module):
    """DeepSeek-V2/V3; ``forward`` is one decode step, the part worth compiling."""

    def __init__(self, weights: Weights, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layout = weights.layout
        inner = weights / "model"
        self.embedding = VocabParallelEmbedding(
            inner / "embed_tokens", config.vocab_size
        )
        self.lm_head = self.embedding
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallelEmbedding(
                weights / "lm_head", config.vocab_size
            )
        self.rope = RotaryEmbedding(config.rope, config.qk_rope_head_dim)
        self.layers = nn.ModuleList(
            DecoderLayer(inner / "layers" / layer, config, layer)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(inner / "norm", config.rms_norm_eps)

    def forward(self, inputs: DecodeInputs, caches: list[Tensor]) -> Tensor:
        """Next-token logits [B, vocab_size]; writes one row per layer and sequence.

        ``caches[i]`` is layer i's [num_blocks, block_size, latent_width].
        """
        x = self.embedding.embed(inputs.tokens)
        cos, sin = self.rope(inputs.positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer.attention_norm(x)
            attended = layer.attention(hidden, inputs, cache, self.rope, cos, sin)
            x = layer.finish(x, attended)
        return self.lm_head.logits(self.norm(x))

    def prefill(self, tokens: Tensor, slots: Tensor, caches: list[Tensor]) -> Tensor:
        """Logits [vocab_size] after one whole prompt [T] at positions 0 .. T-1."""
        x = self.embedding.embed(tokens)
        cos, sin = self.rope(torch.arange(len(tokens)))
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer.attention_norm(x)
            attended = layer.attention.prefill(
                hidden, slots, cache, self.rope, cos, sin
            )
            x = layer.finish(x, attended)
        return self.lm_head.logits(self.norm(x[-1:]))[0]


def load_model(
    directory: str | Path,
    layout: Layout | None = None,
    dtype: torch.dtype = torch.float32,
) -> MlaLM:
    """This rank's part of a Hugging Face checkpoint directory.

    Raises:
        FileNotFoundError, KeyError: a file or a tensor is missing.
        ValueError: the model or the split is not one that this example computes.
    """
    config = read_config(directory)
    return MlaLM(Weights(directory, layout or Layout(), dtype), config).eval()
