"""Feed-forward layers: dense, and mixture of experts as a plain loop.

Every layer here is split over TP by its intermediate dim and returns a partial sum; the
decoder layer completes it with one all-reduce.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.mla_lm.checkpoint import Weights
from examples.mla_lm.config import ModelConfig, MoeConfig


class DenseMLP(nn.Module):
    """SwiGLU with this rank's share of the intermediate dim."""

    def __init__(self, weights: Weights, intermediate_size: int) -> None:
        super().__init__()
        share = weights.layout.share(intermediate_size, "the intermediate size")
        self.gate_proj = weights.linear("gate_proj", rows=share)
        self.up_proj = weights.linear("up_proj", rows=share)
        self.down_proj = weights.linear("down_proj", columns=share)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> partial sum [T, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Weight of every expert for every token, in fp32; zero for experts not chosen."""

    def __init__(self, weights: Weights, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("weight", weights.tensor("weight", dtype=torch.float32))
        if config.gating == "noaux_tc":
            bias = weights.tensor("e_score_correction_bias", dtype=torch.float32)
            self.register_buffer("correction_bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, experts]."""
        config = self.config
        logits = F.linear(x.float(), self.weight)
        if config.gating == "noaux_tc":
            # The bias balances the load: it takes part in the choice, not in the
            # weight.
            scores = logits.sigmoid()
            choice = scores + self.correction_bias
            groups = choice.view(-1, config.n_group, choice.shape[1] // config.n_group)
            group_scores = groups.topk(2, dim=-1).values.sum(-1)
            choice = self._mask_groups(choice, group_scores, float("-inf"))
        else:
            scores = choice = logits.softmax(-1)
            if config.gating == "group_limited_greedy":
                groups = choice.view(
                    -1, config.n_group, choice.shape[1] // config.n_group
                )
                choice = self._mask_groups(choice, groups.amax(-1), 0.0)
        experts = choice.topk(config.num_experts_per_token, dim=-1).indices
        top = scores.gather(1, experts)
        if config.gating == "noaux_tc" and config.norm_topk_prob:
            top = top / (top.sum(-1, keepdim=True) + 1e-20)
        top = top * config.routed_scaling_factor
        return torch.zeros_like(scores).scatter(1, experts, top)

    def _mask_groups(self, choice: Tensor, group_scores: Tensor, fill: float) -> Tensor:
        """``fill`` outside the ``topk_group`` best groups of each token."""
        best = group_scores.topk(self.config.topk_group, dim=-1).indices
        kept = torch.zeros_like(group_scores).scatter(1, best, 1.0)
        kept = kept.repeat_interleave(choice.shape[1] // self.config.n_group, dim=1)
        return choice.masked_fill(kept == 0, fill)


class MoE(nn.Module):
    """Every expert on every token, weighted by the router: simple, slow at scale."""

    def __init__(self, weights: Weights, config: MoeConfig) -> None:
        super().__init__()
        self.gate = Router(weights / "gate", config)
        self.experts = nn.ModuleList(
            DenseMLP(weights / "experts" / expert, config.intermediate_size)
            for expert in range(config.num_experts)
        )
        self.shared_experts = None
        if config.num_shared_experts:
            size = config.intermediate_size * config.num_shared_experts
            self.shared_experts = DenseMLP(weights / "shared_experts", size)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> partial sum [T, hidden]."""
        weight = self.gate(x).to(x.dtype)
        out = torch.zeros_like(x)
        if self.shared_experts is not None:
            out = self.shared_experts(x)
        for expert, mlp in enumerate(self.experts):
            out = out + weight[:, expert, None] * mlp(x)
        return out


def build_mlp(weights: Weights, config: ModelConfig, layer: int) -> nn.Module:
    """The feed-forward part of one decoder layer."""
    if config.is_moe_layer(layer):
        return MoE(weights, config.moe)
    return DenseMLP(weights, config.intermediate_size)
