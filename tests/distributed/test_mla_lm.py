"""The example model on one to four real processes, against transformers' generate.

One call per number of ranks computes everything; each test then looks at one part of
what came back.
"""

from __future__ import annotations

import functools

import pytest
import torch

from examples.mla_lm import bytes as byte_tokens
from examples.mla_lm import demo
from examples.mla_lm.generate import compile_step, generate
from examples.mla_lm.model import load_model
from examples.mla_lm.parallel import create_layout
from tests.distributed.mla_lm_reference import (
    BLOCK_SIZE,
    CHECKPOINTS,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    WATCHDOG_S,
    Run,
    Runs,
    check_equal,
    reference,
)
from tests.support import world

INTERLEAVES = (1, 16)
EOS_INTERLEAVE = 16  # once is enough for what does not depend on it
WORLDS = [(1, 1), (2, 2), (4, 4), (4, 2)]  # ranks, ranks per DCP group

# A test may be the one that computes everything, on a machine that does other work too.
pytestmark = pytest.mark.timeout(600)


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


@functools.cache
def eager_runs(world_size: int) -> list[Runs]:
    """The runs of every rank, each made once."""
    references = [reference(name) for name in CHECKPOINTS]
    checkpoints = [(r.directory, r.prompts, r.eos) for r in references]
    dcp_sizes = tuple(dcp for size, dcp in WORLDS if size == world_size)
    if world_size == 1:
        return [run_eager(0, 1, checkpoints, dcp_sizes)]
    return world(world_size).run(run_eager, checkpoints, dcp_sizes, limit_s=WATCHDOG_S)


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize(("world_size", "dcp_size"), WORLDS)
def test_every_rank_generates_what_transformers_does(
    world_size, dcp_size, interleave, name
):
    expected = reference(name)
    runs = eager_runs(world_size)
    assert len(runs) == world_size
    for rank in runs:
        key = (dcp_size, expected.directory, interleave, None)
        check_equal(rank[key], expected)


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize(("world_size", "dcp_size"), WORLDS)
def test_a_sequence_ends_with_its_end_token_and_the_others_go_on(
    world_size, dcp_size, name
):
    expected = reference(name)
    lengths = {len(tokens) for tokens in expected.tokens_with_eos}
    assert min(lengths) <= 5 < max(lengths)
    for rank in eager_runs(world_size):
        key = (dcp_size, expected.directory, EOS_INTERLEAVE, expected.eos)
        assert rank[key].tokens == expected.tokens_with_eos


@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize(("world_size", "dcp_size"), WORLDS)
def test_the_ranks_of_a_group_hold_every_row_once(world_size, dcp_size, interleave):
    expected = reference("v2_full_q")
    # The last token generated is never fed back, so it has no row.
    total = sum(PROMPT_LENGTHS) + len(PROMPT_LENGTHS) * (NEW_TOKENS - 1)
    runs = [
        rank[dcp_size, expected.directory, interleave, None]
        for rank in eager_runs(world_size)
    ]
    for first in range(0, world_size, dcp_size):
        group = runs[first : first + dcp_size]
        assert sum(run.cache_rows for run in group) == total
    assert len({run.cache_bytes for run in runs}) == 1
    unsplit = eager_runs(1)[0][1, expected.directory, interleave, None].cache_bytes
    # The price of the split: a started round and block per sequence, a spare block.
    slack = len(PROMPT_LENGTHS) * (interleave + BLOCK_SIZE) + BLOCK_SIZE
    row_bytes = 4 * (16 + 8) * CHECKPOINTS["v2_full_q"]["num_hidden_layers"]
    assert runs[0].cache_bytes <= unsplit / dcp_size + slack * row_bytes


def test_the_step_is_the_model_when_nothing_compiles():
    model = load_model(reference("v2_full_q").directory)
    assert compile_step(model, "eager") is model


def test_the_shipped_checkpoint_writes_its_text_as_transformers_does():
    import transformers

    weights = demo.CHECKPOINT / "model.safetensors"
    assert weights.stat().st_size <= 4 << 20
    prompt = byte_tokens.encode("A page table")
    done = generate(load_model(demo.CHECKPOINT), [prompt], 400)
    continued = byte_tokens.decode(done.tokens[0])
    corpus = (demo.CHECKPOINT.parent / "corpus.txt").read_text()
    assert "A page table" + continued in corpus.split("\n\n")
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(
        demo.CHECKPOINT, dtype=torch.float32
    )
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=400,
        do_sample=False,
        pad_token_id=byte_tokens.EOS,
    )
    assert done.tokens[0] == expected[0, len(prompt) :].tolist()
