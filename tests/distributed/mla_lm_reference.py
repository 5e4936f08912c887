"""Tiny random checkpoints, and what transformers generates from them.

Large weights, so that attention is peaked and a wrong mask, position or expert shows.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

NEW_TOKENS = 10
LOGIT_TOLERANCE = 1e-4
BLOCK_SIZE = 4
WATCHDOG_S = 280
# With interleave 16 the first prompt leaves three of four ranks without a row.
PROMPT_LENGTHS = (3, 20, 41)

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
}
SIZES = {
    "vocab_size": 70,  # does not divide by four
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "initializer_range": 0.25,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "v2_full_q": {
        "version": 2,
        "num_hidden_layers": 2,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "rope_theta": 5000.0,
    },
    "v2_yarn_groups_bias_tied": {
        "version": 2,
        "num_hidden_layers": 3,
        "q_lora_rank": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.7,
        "rope_scaling": YARN,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "v3_yarn_sharded": {
        "version": 3,
        "num_hidden_layers": 3,
        "q_lora_rank": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "rope_scaling": YARN,
        "rope_theta": 5000.0,
    },
    "v3_not_interleaved": {
        "version": 3,
        "num_hidden_layers": 2,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "rope_interleave": False,
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": False,
    },
}


class Reference(NamedTuple):
    """What transformers generates from one checkpoint, one prompt at a time."""

    directory: str
    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: list[Tensor]  # per prompt, [generated, vocab_size]
    eos: int  # a token that ends some prompts early and others not
    tokens_with_eos: list[list[int]]


class Run(NamedTuple):
    """What one rank generated."""

    tokens: list[list[int]]
    logits: Tensor  # [generated, B, vocab_size]
    cache_bytes: int
    cache_rows: int


Runs = dict[tuple[Any, ...], Run]  # by DCP size, directory, interleave and EOS


@functools.cache
def reference(name: str) -> Reference:
    """The reference of one of CHECKPOINTS, made once for all test modules."""
    return _build(name, Path(_root().name) / name)


@functools.cache
def _root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="mla-lm-test-")


def _build(name: str, directory: Path) -> Reference:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = dict(CHECKPOINTS[name])
    version = options.pop("version")
    config_class = getattr(transformers, f"DeepseekV{version}Config")
    model_class = getattr(transformers, f"DeepseekV{version}ForCausalLM")
    torch.manual_seed(3)
    model = model_class(config_class(**SIZES, **options)).eval()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for key, tensor in tensors:
        if "bias" in key:  # zero from the start otherwise, and so never seen
            tensor.data.normal_(0, 0.1)
    size = "20KB" if name.endswith("sharded") else "1GB"
    model.save_pretrained(directory, max_shard_size=size)
    model = model_class.from_pretrained(directory).eval()
    prompts = [
        torch.randint(0, SIZES["vocab_size"], (length,)).tolist()
        for length in PROMPT_LENGTHS
    ]

    def run(prompt: list[int], eos: int | None) -> tuple[list[int], Tensor]:
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = result.sequences[0, len(prompt) :].tolist()
        return tokens, torch.cat(result.logits)

    plain = [run(prompt, None) for prompt in prompts]
    # Where two logits nearly tie, equal tokens would be luck: such a seed is no test.
    best = torch.cat([logits for _, logits in plain]).topk(2, dim=-1).values
    assert (best[:, 0] - best[:, 1]).min() > 2 * LOGIT_TOLERANCE
    eos = plain[0][0][4]
    with_eos = [run(prompt, eos)[0] for prompt in prompts]
    tokens, logits = ([result[i] for result in plain] for i in range(2))
    return Reference(str(directory), prompts, tokens, logits, eos, with_eos)


def check_equal(run: Run, expected: Reference, batch: int | None = None) -> None:
    """Tokens equal and logits within the tolerance, for the first ``batch`` prompts."""
    batch = len(expected.prompts) if batch is None else batch
    assert run.tokens == expected.tokens[:batch]
    assert run.logits.shape[1] == batch
    for prompt, logits in enumerate(expected.logits[:batch]):
        torch.testing.assert_close(
            run.logits[:, prompt], logits, atol=LOGIT_TOLERANCE, rtol=0
        )
