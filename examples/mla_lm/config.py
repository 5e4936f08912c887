"""The part of a DeepSeek-V2/V3 ``config.json`` that decides what the model computes.

What this model cannot compute exactly is refused here, never approximated. Sources: the
configuration classes of transformers 5 and the published DeepSeek checkpoints.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: ``scaling`` is "default", "linear" or "yarn"."""

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    interleaved: bool = True  # pairs (0, 1), (2, 3), ... instead of (i, i + dim / 2)


@dataclass(frozen=True)
class MoeConfig:
    """``gating`` is "greedy", "group_limited_greedy" or "noaux_tc"."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    num_shared_experts: int
    gating: str
    routed_scaling_factor: float
    norm_topk_prob: bool
    n_group: int
    topk_group: int


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions as DeepSeek spells them; ``q_lora_rank`` None: full-rank query."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    first_k_dense_replace: int
    rope: RopeConfig
    moe: MoeConfig
    eos_token_ids: tuple[int, ...]

    @property
    def latent_width(self) -> int:
        """Values that one token keeps in the cache of one layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe_layer(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace


def read_config(directory: str | Path) -> ModelConfig:
    """Read ``config.json``, and the end tokens of ``generation_config.json`` if there.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: the model needs something that this example does not compute.
    """
    directory = Path(directory)
    raw = json.loads((directory / "config.json").read_text())
    generation = directory / "generation_config.json"
    if generation.exists():
        eos = json.loads(generation.read_text()).get("eos_token_id")
        raw["eos_token_id"] = raw.get("eos_token_id") if eos is None else eos
    return parse_config(raw)


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """The same from the parsed JSON; absent keys take the defaults of transformers."""
    model_type = raw.get("model_type")
    _require("model_type", model_type, ("deepseek_v2", "deepseek_v3"))
    _require("hidden_act", raw.get("hidden_act", "silu"), ("silu",))
    _require("moe_layer_freq", raw.get("moe_layer_freq", 1), (1,))
    _require("quantization_config", raw.get("quantization_config"), (None,))
    is_v3 = model_type == "deepseek_v3"
    eos = raw.get("eos_token_id", 1 if is_v3 else 2)
    return ModelConfig(
        model_type=model_type,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        q_lora_rank=raw.get("q_lora_rank", 1536),
        kv_lora_rank=raw.get("kv_lora_rank", 512),
        qk_nope_head_dim=raw.get("qk_nope_head_dim", 128),
        qk_rope_head_dim=raw.get("qk_rope_head_dim", 64),
        v_head_dim=raw.get("v_head_dim", 128),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        first_k_dense_replace=raw.get("first_k_dense_replace", 3 if is_v3 else 0),
        rope=_parse_rope(raw, is_v3),
        moe=_parse_moe(raw, is_v3),
        eos_token_ids=() if eos is None else tuple(eos) if _is_list(eos) else (eos,),
    )


def _parse_rope(raw: dict[str, Any], is_v3: bool) -> RopeConfig:
    # Newer configurations put everything into rope_parameters; older ones use
    # rope_theta beside rope_scaling. rope_scaling wins where both are given.
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", raw.get("rope_theta", 10000.0))
    interleaved = bool(raw.get("rope_interleave", True)) if is_v3 else True
    scaling = parameters.get("rope_type", parameters.get("type", "default"))
    _require("rope type", scaling, ("default", "linear", "yarn"))
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    _require("partial_rotary_factor", 1.0 if partial is None else partial, (1.0,))
    if scaling == "default":
        return RopeConfig(theta=theta, interleaved=interleaved)
    max_positions = raw.get("max_position_embeddings", 4096 if is_v3 else 2048)
    original = parameters.get("original_max_position_embeddings", max_positions)
    original = raw.get("original_max_position_embeddings", original)
    factor = parameters.get("factor")
    return RopeConfig(
        theta=theta,
        scaling=scaling,
        factor=max_positions / original if factor is None else factor,
        original_max_position_embeddings=original,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        mscale=parameters.get("mscale") or 0.0,
        mscale_all_dim=parameters.get("mscale_all_dim") or 0.0,
        attention_factor=parameters.get("attention_factor"),
        truncate=parameters.get("truncate", True),
        interleaved=interleaved,
    )


def _parse_moe(raw: dict[str, Any], is_v3: bool) -> MoeConfig:
    if is_v3:
        gating = raw.get("topk_method") or "noaux_tc"
        _require("topk_method of deepseek_v3", gating, ("noaux_tc",))
        _require("scoring_func", raw.get("scoring_func", "sigmoid"), ("sigmoid",))
    else:
        gating = raw.get("topk_method") or "greedy"
        known = ("greedy", "group_limited_greedy")
        _require("topk_method of deepseek_v2", gating, known)
        _require("scoring_func", raw.get("scoring_func", "softmax"), ("softmax",))
        # DeepSeek's own code normalises here, transformers does not: no right answer.
        norm = bool(raw.get("norm_topk_prob", False))
        _require("norm_topk_prob of deepseek_v2", norm, (False,))
    return MoeConfig(
        num_experts=raw.get("n_routed_experts") or (256 if is_v3 else 64),
        num_experts_per_token=raw.get("num_experts_per_tok") or 8,
        intermediate_size=raw.get("moe_intermediate_size", 2048 if is_v3 else 1407),
        num_shared_experts=raw.get("n_shared_experts", 1 if is_v3 else 2) or 0,
        gating=gating,
        routed_scaling_factor=raw.get("routed_scaling_factor", 2.5 if is_v3 else 1.0),
        norm_topk_prob=bool(raw.get("norm_topk_prob", is_v3)),
        n_group=raw.get("n_group") or (8 if is_v3 else 1),
        topk_group=raw.get("topk_group") or (4 if is_v3 else 1),
    )


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _require(name: str, got: object, expected: tuple[object, ...]) -> None:
    if got not in expected:
        listed = " or ".join(repr(value) for value in expected)
        raise ValueError(
            f"config.json: expected {name} to be {listed}, got {got!r}, which this "
            "example does not compute; convert the checkpoint or choose another one"
        )
