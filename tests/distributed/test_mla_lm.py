"""The example model on one to four real processes, against transformers' generate.

Tiny random checkpoints with large weights, so that attention is peaked and a wrong
mask, position or expert shows. One spawn per number of ranks computes everything
(starting up dominates); each test then looks at one part of what came back.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from examples.mla_lm.generate import compile_step, generate
from examples.mla_lm.launch import RankError, run_ranks
from examples.mla_lm.model import load_model
from examples.mla_lm.parallel import create_layout
from tests.support import world

NEW_TOKENS = 10
LOGIT_TOLERANCE = 1e-4
BLOCK_SIZE = 4
WATCHDOG_S = 280
INTERLEAVES = (1, 16)
EOS_INTERLEAVE = 16  # once is enough for what does not depend on it
WORLDS = [(1, 1), (2, 2), (4, 4), (4, 2)]  # ranks, ranks per DCP group
# With interleave 16 the first leaves three of four ranks without a row.
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


# A test may be the one that computes everything, on a machine that does other work too.
pytestmark = pytest.mark.timeout(600)


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


def build_reference(name: str, directory: Path) -> Reference:
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


def run_eager(
    rank: int,
    world_size: int,
    checkpoints: list[tuple[str, list[list[int]], int]],
    dcp_sizes: tuple[int, ...],
) -> Runs:
    """On every rank: each checkpoint, DCP size and interleave, with and without EOS."""
    runs = {}
    for dcp_size in dcp_sizes:
        layout = create_layout(dcp_size)
        for directory, prompts, eos in checkpoints:
            model = load_model(directory, layout)
            for interleave in INTERLEAVES:
                for end in (None, eos) if interleave == EOS_INTERLEAVE else (None,):
                    done = generate(
                        model,
                        prompts,
                        NEW_TOKENS,
                        interleave=interleave,
                        block_size=BLOCK_SIZE,
                        eos_token_ids=() if end is None else (end,),
                    )
                    runs[dcp_size, directory, interleave, end] = Run(
                        done.tokens,
                        torch.stack(done.logits),
                        done.cache.num_bytes,
                        done.cache.num_rows,
                    )
    return runs


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    root = tmp_path_factory.mktemp("mla_lm")
    return {name: build_reference(name, root / name) for name in CHECKPOINTS}


@pytest.fixture(scope="module")
def eager_runs(references: dict[str, Reference]) -> Callable[[int], list[Runs]]:
    """From the number of ranks to the runs of every rank, each made once."""
    checkpoints = [(r.directory, r.prompts, r.eos) for r in references.values()]

    @functools.cache
    def runs(world_size: int) -> list[Runs]:
        dcp_sizes = tuple(dcp for size, dcp in WORLDS if size == world_size)
        if world_size == 1:
            return [run_eager(0, 1, checkpoints, dcp_sizes)]
        return world(world_size).run(
            run_eager, checkpoints, dcp_sizes, limit_s=WATCHDOG_S
        )

    return runs


def check_equal(run: Run, reference: Reference) -> None:
    assert run.tokens == reference.tokens
    for prompt, expected in enumerate(reference.logits):
        torch.testing.assert_close(
            run.logits[:, prompt], expected, atol=LOGIT_TOLERANCE, rtol=0
        )


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize(("world_size", "dcp_size"), WORLDS)
def test_every_rank_generates_what_transformers_does(
    references, eager_runs, world_size, dcp_size, interleave, name
):
    reference = references[name]
    runs = eager_runs(world_size)
    assert len(runs) == world_size
    for rank in runs:
        key = (dcp_size, reference.directory, interleave, None)
        check_equal(rank[key], reference)


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize(("world_size", "dcp_size"), WORLDS)
def test_a_sequence_ends_with_its_end_token_and_the_others_go_on(
    references, eager_runs, world_size, dcp_size, name
):
    reference = references[name]
    lengths = {len(tokens) for tokens in reference.tokens_with_eos}
    assert min(lengths) <= 5 < max(lengths)
    for rank in eager_runs(world_size):
        key = (dcp_size, reference.directory, EOS_INTERLEAVE, reference.eos)
        assert rank[key].tokens == reference.tokens_with_eos


@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize(("world_size", "dcp_size"), WORLDS)
def test_the_ranks_of_a_group_hold_every_row_once(
    references, eager_runs, world_size, dcp_size, interleave
):
    reference = references["v2_full_q"]
    # The last token generated is never fed back, so it has no row.
    total = sum(PROMPT_LENGTHS) + len(PROMPT_LENGTHS) * (NEW_TOKENS - 1)
    runs = [
        rank[dcp_size, reference.directory, interleave, None]
        for rank in eager_runs(world_size)
    ]
    for first in range(0, world_size, dcp_size):
        group = runs[first : first + dcp_size]
        assert sum(run.cache_rows for run in group) == total
    assert len({run.cache_bytes for run in runs}) == 1
    unsplit = eager_runs(1)[0][1, reference.directory, interleave, None].cache_bytes
    # The price of the split: a started round and block per sequence, a spare block.
    slack = len(PROMPT_LENGTHS) * (interleave + BLOCK_SIZE) + BLOCK_SIZE
    row_bytes = 4 * (16 + 8) * CHECKPOINTS["v2_full_q"]["num_hidden_layers"]
    assert runs[0].cache_bytes <= unsplit / dcp_size + slack * row_bytes


def fail_on_rank_1(report: Callable[[str], None], how: str) -> None:
    rank = torch.distributed.get_rank()
    if rank == 1 and how == "raise":
        raise ValueError("the reason")
    if rank == 1 and how == "die":
        os._exit(7)
    torch.distributed.barrier()
    if how == "hang":
        time.sleep(600)


@pytest.mark.parametrize(
    ("how", "timeout_s", "message"),
    [
        ("raise", 60, "rank 1: .*ValueError: the reason"),
        ("die", 60, "rank 1: ended with exit code 7"),
        ("hang", 10, "not done after 10 s"),
    ],
)
def test_a_rank_that_fails_ends_the_run_with_its_reason(how, timeout_s, message):
    before = set(multiprocessing.active_children())
    start = time.monotonic()
    with pytest.raises(RankError, match=f"(?s){message}"):
        run_ranks(fail_on_rank_1, 2, how, timeout_s=timeout_s)
    assert time.monotonic() - start < 60
    assert set(multiprocessing.active_children()) <= before


def test_the_step_is_the_model_when_nothing_compiles(references):
    model = load_model(references["v2_full_q"].directory)
    assert compile_step(model, "eager") is model
