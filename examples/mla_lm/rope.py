"""Rotary embedding of DeepSeek-V2/V3: plain, linear or YaRN, interleaved or not.

Source: YaRN (arXiv 2309.00071) with DeepSeek's mscale, as transformers computes it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from examples.mla_lm.config import RopeConfig


class RotaryEmbedding(nn.Module):
    """cos and sin of positions, and the rotation by them."""

    frequencies: Tensor

    def __init__(self, config: RopeConfig, dim: int) -> None:
        super().__init__()
        self.interleaved = config.interleaved
        self.amplitude = _amplitude(config)
        self.register_buffer("frequencies", _frequencies(config, dim))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [T, dim / 2], of positions [T]."""
        angles = positions[:, None].float() * self.frequencies
        return angles.cos() * self.amplitude, angles.sin() * self.amplitude

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, ..., dim] by its token's angles.

        The result has the first elements of all pairs, then the second ones. Queries
        and keys are both permuted so, and their dot product does not see it.
        """
        first, second = (
            (x[..., 0::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
        )
        shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[1],)
        cos, sin = cos.view(shape), sin.view(shape)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(rotated, dim=-1).to(x.dtype)


def softmax_scale(config: RopeConfig, qk_head_dim: int) -> float:
    """Factor on the scores: 1 / sqrt(head dim), times YaRN's mscale squared."""
    scale = qk_head_dim**-0.5
    if config.scaling != "default" and config.mscale_all_dim:
        scale *= _mscale(config.factor, config.mscale_all_dim) ** 2
    return scale


def _frequencies(config: RopeConfig, dim: int) -> Tensor:
    plain = config.theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if config.scaling == "default":
        return plain
    if config.scaling == "linear":
        return plain / config.factor
    # YaRN: keep the fast dims, stretch the slow ones, and blend in between.
    low = _dim_with_rotations(config, dim, config.beta_fast)
    high = _dim_with_rotations(config, dim, config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(dim // 2).float() - low) / width).clamp(0, 1)
    return plain * (1 - stretched) + plain / config.factor * stretched


def _dim_with_rotations(config: RopeConfig, dim: int, rotations: float) -> float:
    """The (fractional) pair that turns this often within the original context."""
    period = config.original_max_position_embeddings / (rotations * 2 * math.pi)
    return dim * math.log(period) / (2 * math.log(config.theta))


def _amplitude(config: RopeConfig) -> float:
    if config.scaling != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        numerator = _mscale(config.factor, config.mscale)
        return numerator / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
