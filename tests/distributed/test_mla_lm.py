"""The example model on one to four real processes, against transformers' generate.

One call per number of ranks computes everything; each test then looks at one part of
what came back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from examples.mla_lm.generate import compile_step, generate
from examples.mla_lm.model import load_model
from examples.mla_lm.parallel import create_layout
from tests.distributed.mla_lm_reference import (
    BLOCK_SIZE,
    CHECKPOINTS,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    WATCHDOG_S,
    Reference,
    Run,
    Runs,
    build_reference,
    check_equal,
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


def test_the_step_is_the_model_when_nothing_compiles(references):
    model = load_model(references["v2_full_q"].directory)
    assert compile_step(model, "eager") is model
