"""Root-mean-square norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.mla_lm.checkpoint import Weights


class RMSNorm(nn.Module):
    """Statistics in fp32. DeepSeek's inner norms use 1e-6, not ``rms_norm_eps``."""

    def __init__(self, weights: Weights, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(weights.tensor("weight"), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)
