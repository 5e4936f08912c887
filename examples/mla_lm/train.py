"""Trains the checkpoint of the demo on corpus.txt: ``python -m examples.mla_lm.train``.

Recipe: a DeepSeek-V3-format model of about one million weights over bytes, one document
per paragraph, half of them entered at a random sentence; AdamW, warm-up and cosine
decay, no weight on balancing the experts. Seed and sizes are below. It learns the text
by heart, which is all that the demo needs. Needs transformers, and takes about six
minutes on one core; the weights are stored in bfloat16 (2 MB).
"""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from examples.mla_lm.bytes import BOS, EOS, VOCAB_SIZE, encode

HERE = Path(__file__).parent
SEED = 20
STEPS = 900
WARMUP = 50
DOCUMENTS_PER_STEP = 4
LEARNING_RATE = 3e-3
IGNORED = -100  # label of padding, as the loss of transformers expects it


def build_config() -> DeepseekV3Config:
    """Sizes that divide by four ranks, with every part that the format has."""
    return DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=320,
        moe_intermediate_size=96,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.0,
        max_position_embeddings=1024,
        bos_token_id=BOS,
        eos_token_id=EOS,
        num_nextn_predict_layers=0,
    )


def read_documents() -> list[str]:
    """The paragraphs of the corpus."""
    text = (HERE / "corpus.txt").read_text()
    return [part.strip() for part in text.split("\n\n") if part.strip()]


def sample_batch(
    documents: list[str], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [documents, longest], padded on the right."""
    rows = []
    for document in rng.sample(documents, DOCUMENTS_PER_STEP):
        starts = [0] + [match.end() for match in re.finditer(r"[.:] ", document)]
        start = rng.choice(starts) if rng.random() < 0.5 else 0
        rows.append([*encode(document[start:]), EOS])
    longest = max(map(len, rows))
    tokens = torch.full((len(rows), longest), EOS)
    labels = torch.full((len(rows), longest), IGNORED)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = labels[index, : len(row)] = torch.tensor(row)
    return tokens, labels


def learning_rate(step: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    progress = (step - WARMUP) / (STEPS - WARMUP)
    return LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * progress))


def train() -> DeepseekV3ForCausalLM:
    """The trained model, rounded to bfloat16."""
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    documents = read_documents()
    model = DeepseekV3ForCausalLM(build_config())
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    start = time.monotonic()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        tokens, labels = sample_batch(documents, rng)
        mask = torch.ones_like(tokens)  # padding is on the right: nothing attends to it
        loss = model(tokens, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == STEPS - 1:
            seconds = time.monotonic() - start
            print(
                f"step {step}: loss {loss.item():.4f} after {seconds:.0f} s", flush=True
            )
    return model.eval().to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "checkpoint")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    train().save_pretrained(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
