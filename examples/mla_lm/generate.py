"""Greedy generation for a batch of prompts of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from examples.mla_lm.cache import DecodeInputs, PagedLatentCache
from examples.mla_lm.model import MlaLM

DecodeStep = Callable[[DecodeInputs, list[Tensor]], Tensor]


@dataclass
class Generation:
    """What a batch produced; ``logits[i]`` [B, vocab_size] chose the i-th tokens."""

    tokens: list[list[int]]  # per prompt, up to and with its end token
    logits: list[Tensor]
    cache: PagedLatentCache


def compile_step(model: MlaLM, how: str, **options: Any) -> DecodeStep:
    """The decode step: ``how`` is "eager" or the name of a torch.compile backend.

    ``options`` are further arguments of torch.compile.
    """
    if how == "eager":
        return model
    return torch.compile(model, backend=how, fullgraph=True, **options)


def prefill(
    model: MlaLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    interleave: int = 1,
    block_size: int = 16,
) -> tuple[PagedLatentCache, Tensor]:
    """A cache that holds the prompts, and the logits [B, vocab_size] after them."""
    cache = PagedLatentCache(
        model.config,
        model.layout,
        batch_size=len(prompts),
        max_length=max(map(len, prompts)) + max_new_tokens,
        block_size=block_size,
        interleave=interleave,
        dtype=model.embedding.weight.dtype,
    )
    logits = []
    for sequence, prompt in enumerate(prompts):
        slots = cache.extend(sequence, len(prompt))
        logits.append(model.prefill(torch.tensor(prompt), slots, cache.layers))
    return cache, torch.stack(logits)


@torch.no_grad()
def generate(
    model: MlaLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    step: DecodeStep | None = None,
    interleave: int = 1,
    block_size: int = 16,
    eos_token_ids: Sequence[int] | None = None,
) -> Generation:
    """Continue every prompt greedily; a collective call, with equal arguments.

    ``step`` is what :func:`compile_step` returned (default: the model as it is). The
    batch keeps its shape: a sequence that has ended decodes on until all have, and what
    it adds is dropped.

    Raises:
        ValueError: no prompt, an empty prompt, or no token to generate.
    """
    if not prompts or not all(prompts) or max_new_tokens < 1:
        raise ValueError(
            "expected one or more tokens in every prompt and one or more new ones, got "
            f"prompts of {[len(p) for p in prompts]} and {max_new_tokens} new"
        )
    ends = set(model.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
    step = model if step is None else step
    cache, logits = prefill(
        model, prompts, max_new_tokens, interleave=interleave, block_size=block_size
    )
    done = Generation([[] for _ in prompts], [logits], cache)
    while True:
        chosen = done.logits[-1].argmax(-1)
        for tokens, token in zip(done.tokens, chosen.tolist(), strict=True):
            if not (tokens and tokens[-1] in ends):
                tokens.append(token)
        ended = all(tokens[-1] in ends for tokens in done.tokens)
        if ended or len(done.logits) == max_new_tokens:
            return done
        done.logits.append(step(cache.next_inputs(chosen), cache.layers))
