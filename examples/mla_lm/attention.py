"""Multi-head latent attention, weights absorbed, over a cache split by position.

Shapes: T tokens (one per sequence in decode), N ranks of the DCP group, h heads of a
rank, H = N * h heads, R = kv_lora_rank, W = R + qk_rope_head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.mla_lm.cache import DecodeInputs
from examples.mla_lm.checkpoint import Weights
from examples.mla_lm.config import ModelConfig
from examples.mla_lm.norm import RMSNorm
from examples.mla_lm.parallel import all_gather, reduce_scatter
from examples.mla_lm.rope import RotaryEmbedding, softmax_scale


def attend_shard(
    query: Tensor,  # [T, H, W]
    cache: Tensor,  # [num_blocks, block_size, W]
    block_table: Tensor,  # [T, blocks]
    seq_lens: Tensor,  # [T]
    kv_lora_rank: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention over this rank's rows: output [T, H, R], natural-log LSE [T, H].

    The LSE is in fp32. A sequence without rows here gets output 0 and LSE -inf.
    """
    rows = cache[block_table].flatten(1, 2)  # [T, K, W]
    scores = (query @ rows.transpose(1, 2)).float() * scale  # [T, H, K]
    is_row = torch.arange(rows.shape[1], device=rows.device) < seq_lens[:, None]
    scores = scores.masked_fill(~is_row[:, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    # exp(-inf - -inf) would be NaN, and NaN * 0 stays NaN in the sum over ranks.
    finite = lse.masked_fill(lse == float("-inf"), 0.0)
    weights = torch.exp(scores - finite[..., None])
    return weights.to(rows.dtype) @ rows[..., :kv_lora_rank], lse


def combine(
    output: Tensor, lse: Tensor, group: torch.distributed.ProcessGroup | None
) -> Tensor:
    """Merge all ranks' partial outputs [T, H, R] into this rank's heads [T, h, R].

    Every shard counts by its share of the sum of exponentials: exp(lse - global LSE).
    """
    if group is None:
        return output
    lses = all_gather(lse, 0, group).view(group.size(), *lse.shape)  # [N, T, H]
    weight = torch.exp(lse - torch.logsumexp(lses, dim=0))
    return reduce_scatter(output * weight[..., None].to(output.dtype), 1, group)


class MLAttention(nn.Module):
    """One attention layer with this rank's heads."""

    def __init__(self, weights: Weights, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.dcp_group = weights.layout.dcp_group
        self.scale = softmax_scale(
            config.rope, config.qk_nope_head_dim + config.qk_rope_head_dim
        )
        heads = weights.layout.share(config.num_heads, "num_attention_heads")
        self.heads = heads.stop - heads.start

        def rows_of(head_dim: int) -> slice:
            return slice(heads.start * head_dim, heads.stop * head_dim)

        query_rows = rows_of(config.qk_nope_head_dim + config.qk_rope_head_dim)
        if config.q_lora_rank is None:
            self.q_proj = weights.linear("q_proj", rows=query_rows)
        else:
            self.q_proj = nn.Sequential(
                weights.linear("q_a_proj"),
                RMSNorm(weights / "q_a_layernorm"),
                weights.linear("q_b_proj", rows=query_rows),
            )
        self.kv_a_proj = weights.linear("kv_a_proj_with_mqa")
        self.kv_a_norm = RMSNorm(weights / "kv_a_layernorm")
        # kv_b_proj expands latents to keys and values; decode applies its two halves to
        # the query and to the output instead, so that the cache holds nothing but
        # latents.
        key_dim, value_dim = config.qk_nope_head_dim, config.v_head_dim
        kv_b = weights.tensor("kv_b_proj.weight", rows=rows_of(key_dim + value_dim))
        kv_b = kv_b.view(self.heads, key_dim + value_dim, config.kv_lora_rank)
        self.register_buffer("w_uk", kv_b[:, :key_dim].contiguous())  # [h, key, R]
        w_uv = kv_b[:, key_dim:].transpose(1, 2).contiguous()  # [h, R, value]
        self.register_buffer("w_uv", w_uv)
        self.o_proj = weights.linear("o_proj", columns=rows_of(value_dim))

    def _project(
        self, x: Tensor, rope: RotaryEmbedding, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q_nope [T, h, key], q_pe [T, h, rope], latent rows [T, W]."""
        config = self.config
        query = self.q_proj(x).unflatten(-1, (self.heads, -1))
        q_nope, q_pe = query.split(
            [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1
        )
        latent, k_pe = self.kv_a_proj(x).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        latent = torch.cat(
            [self.kv_a_norm(latent), rope.rotate(k_pe, cos, sin)], dim=-1
        )
        return q_nope, rope.rotate(q_pe, cos, sin), latent

    def prefill(
        self,
        x: Tensor,
        slots: Tensor,
        cache: Tensor,
        rope: RotaryEmbedding,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Causal attention of a whole prompt [T, hidden]; partial sum [T, hidden].

        Every rank attends to the full prompt with its own heads, but only the rows
        whose slots are ours end up in a block that is read later.
        """
        q_nope, q_pe, latent = self._project(x, rope, cos, sin)
        cache.flatten(0, 1).index_put_((slots,), latent)
        c_kv, k_pe = latent.split(
            [self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1
        )
        key = torch.cat(
            [c_kv @ self.w_uk.transpose(1, 2), k_pe.expand(self.heads, -1, -1)], dim=-1
        )
        query = torch.cat([q_nope, q_pe], dim=-1).transpose(0, 1)
        output = F.scaled_dot_product_attention(
            query, key, c_kv @ self.w_uv, is_causal=True, scale=self.scale
        )
        return self.o_proj(output.transpose(0, 1).flatten(1))

    def forward(
        self,
        x: Tensor,
        inputs: DecodeInputs,
        cache: Tensor,
        rope: RotaryEmbedding,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """One decode step for a batch [T, hidden]; partial sum [T, hidden]."""
        q_nope, q_pe, latent = self._project(x, rope, cos, sin)
        cache.flatten(0, 1).index_put_((inputs.slots,), latent)
        ql_nope = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)
        query = torch.cat([ql_nope, q_pe], dim=-1)  # [T, h, W]
        query = all_gather(query, 1, self.dcp_group)  # [T, H, W]
        output, lse = attend_shard(
            query,
            cache,
            inputs.block_table,
            inputs.seq_lens,
            self.config.kv_lora_rank,
            self.scale,
        )
        output = combine(output, lse, self.dcp_group)  # [T, h, R]
        output = torch.bmm(output.transpose(0, 1), self.w_uv).transpose(0, 1)
        return self.o_proj(output.flatten(1))
