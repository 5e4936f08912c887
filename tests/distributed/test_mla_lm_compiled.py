"""The decode step compiled by dcp_inductor, against transformers' generate."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch

from examples.mla_lm.generate import compile_step, generate
from examples.mla_lm.model import load_model
from examples.mla_lm.parallel import create_layout
from tests.distributed.mla_lm_reference import (
    BLOCK_SIZE,
    CHECKPOINTS,
    NEW_TOKENS,
    WATCHDOG_S,
    Run,
    check_equal,
    reference,
)
from tests.support import world

pytestmark = pytest.mark.timeout(600)


class Case(NamedTuple):
    """One compilation; ``batches`` are the batch sizes that it then serves in turn."""

    world_size: int
    dcp_size: int
    name: str
    interleave: int
    dynamic: bool
    batches: tuple[int, ...]


CASES = [
    Case(2, 2, "v3_yarn_sharded", 16, False, (3,)),
    Case(2, 2, "v2_full_q", 1, True, (3, 2)),
    Case(4, 4, "v2_full_q", 16, False, (3,)),
    Case(4, 2, "v2_full_q", 1, False, (1,)),
]


class CompiledRun(NamedTuple):
    """What one rank generated for every batch, and what the pass counted."""

    runs: list[Run]
    counters: dict[str, int]
    graphs: int


def run_compiled(
    rank: int, world_size: int, case: Case, directory: str, prompts: list[list[int]]
) -> CompiledRun:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = load_model(directory, create_layout(case.dcp_size))
    # A graph from a cache on disk would come without a count of what was rewritten.
    step = compile_step(
        model,
        "dcp_inductor",
        dynamic=case.dynamic,
        options={"fx_graph_cache": False},
    )
    runs = []
    with torch._functorch.config.patch(enable_autograd_cache=False):
        for batch in case.batches:
            done = generate(
                model,
                prompts[:batch],
                NEW_TOKENS,
                step=step,
                interleave=case.interleave,
                block_size=BLOCK_SIZE,
                eos_token_ids=(),
            )
            runs.append(
                Run(
                    done.tokens,
                    torch.stack(done.logits),
                    done.cache.num_bytes,
                    done.cache.num_rows,
                )
            )
    counters = torch._dynamo.utils.counters
    graphs = counters["stats"]["unique_graphs"]
    return CompiledRun(runs, dict(counters["dcp_inductor"]), graphs)


@functools.cache
def run_case(case: Case) -> list[CompiledRun]:
    """Every rank's run of a case, made once."""
    expected = reference(case.name)
    return world(case.world_size).run(
        run_compiled, case, expected.directory, expected.prompts, limit_s=WATCHDOG_S
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_steps_generate_what_transformers_does(case):
    expected, ranks = reference(case.name), run_case(case)
    assert len(ranks) == case.world_size
    for rank in ranks:
        for batch, run in zip(case.batches, rank.runs, strict=True):
            check_equal(run, expected, batch)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layers_gather_and_merge_become_direct_exchanges(case):
    layers = CHECKPOINTS[case.name]["num_hidden_layers"]
    for rank in run_case(case):
        assert rank.graphs == 1
        assert rank.counters["rewritten"] == 2 * layers
        fallbacks = [key for key in rank.counters if key.startswith("fallback.")]
        assert fallbacks == []
