"""Two processes decode with a split KV cache: ``python -m examples.mla_lm.demo``.

Compiles the decode step with plain Inductor and with dcp_inductor, generates with both,
and compares with the unsplit model in one process. The last line says how it ended, and
the exit code is 0 only if every word and every site came out as it must.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dcp_inductor.explanation import Explanation
from dcp_inductor.fx import report as pass_report
from examples.mla_lm import bytes as byte_tokens
from examples.mla_lm.cache import DecodeInputs
from examples.mla_lm.generate import DecodeStep, compile_step, generate, prefill
from examples.mla_lm.launch import RankError, run_ranks
from examples.mla_lm.model import MlaLM, load_model
from examples.mla_lm.parallel import create_layout

CHECKPOINT = Path(__file__).parent / "checkpoint"
WORLD_SIZE = 2
MAX_NEW_TOKENS = 320
MAX_LOGIT_DIFFERENCE = 1e-3
TIMEOUT_S = 540.0  # a minute is usual; a busy machine compiles slowly
# Timed in turns, so that a busy moment of the machine hits both alike.
TIMED_ROUNDS = 10
STEPS_PER_ROUND = 20
PROMPTS = (
    "Each rank",
    "No wait is allowed",
    "Decode context parallelism splits the cache by position. The first token",
)


@dataclass
class RankResult:
    """What one rank saw; tokens and logits per backend."""

    tokens: dict[str, list[list[int]]]
    logits: dict[str, Tensor]  # [steps, B, vocab_size]
    step_ms: dict[str, float]
    graphs: list[pass_report.GraphReport]
    fallbacks: dict[str, int]
    cache_bytes: int


class DemoError(Exception):
    """Something did not come out as it must."""


def run_rank(
    say: Callable[[str], None], checkpoint: str, prompts: list[list[int]]
) -> RankResult:
    """One rank: compile both ways, generate with both, time both."""
    model = load_model(checkpoint, create_layout())
    result = RankResult({}, {}, {}, [], {}, 0)
    steps: dict[str, DecodeStep] = {}
    with torch.no_grad(), pass_report.collect() as graphs:
        for how in ("inductor", "dcp_inductor"):
            say(f"compiling the decode step with backend={how!r}")
            # Graphs from a cache would come without a report of what the pass did.
            steps[how] = compile_step(
                model, how, dynamic=False, options={"fx_graph_cache": False}
            )
            with torch._functorch.config.patch(enable_autograd_cache=False):
                done = generate(model, prompts, MAX_NEW_TOKENS, step=steps[how])
            result.tokens[how] = done.tokens
            result.logits[how] = torch.stack(done.logits)
        say("timing both, in turns")
        result.step_ms = time_steps(model, steps, prompts)
    result.graphs = graphs
    result.cache_bytes = done.cache.num_bytes
    counters = torch._dynamo.utils.counters["dcp_inductor"]
    result.fallbacks = {k: n for k, n in counters.items() if k.startswith("fallback.")}
    return result


def time_steps(
    model: MlaLM, steps: dict[str, DecodeStep], prompts: list[list[int]]
) -> dict[str, float]:
    """Median milliseconds of the step after the prompts, taken over and over."""
    cache, logits = prefill(model, prompts, MAX_NEW_TOKENS)
    inputs = cache.next_inputs(logits.argmax(-1))
    seconds: dict[str, list[float]] = {how: [] for how in steps}
    for _ in range(TIMED_ROUNDS):
        for how, step in steps.items():
            dist.barrier()
            seconds[how] += time_round(step, inputs, cache.layers)
    return {how: statistics.median(times) * 1e3 for how, times in seconds.items()}


def time_round(
    step: DecodeStep, inputs: DecodeInputs, caches: list[Tensor]
) -> list[float]:
    step(inputs, caches)  # the first one after a switch is not like the others
    seconds = []
    for _ in range(STEPS_PER_ROUND):
        start = time.perf_counter()
        step(inputs, caches)
        seconds.append(time.perf_counter() - start)
    return seconds


class Progress:
    """One line that says what goes on and for how long; on a terminal it moves."""

    def __init__(self) -> None:
        self.text, self.start, self.shown = "starting two processes", 0.0, 0.0
        self.begin(self.text)

    def begin(self, text: str) -> None:
        self.finish()
        self.text, self.start = text, time.monotonic()
        self.shown = self.start
        print(f"demo: {text} ...", end="" if sys.stdout.isatty() else "\n", flush=True)

    def __call__(self, text: str) -> None:
        """New text begins a new line; an empty one says that time has passed."""
        if text:
            self.begin(text)
            return
        seconds = time.monotonic() - self.start
        if sys.stdout.isatty():
            print(f"\rdemo: {self.text} ... {seconds:.0f} s", end="", flush=True)
        elif time.monotonic() - self.shown >= 10:
            self.shown = time.monotonic()
            print(f"demo: {self.text} ... {seconds:.0f} s", flush=True)

    def finish(self) -> None:
        if self.start and sys.stdout.isatty():
            print()


def check(condition: bool, why: str) -> None:
    if not condition:
        raise DemoError(why)


def show_sites(ranks: list[RankResult]) -> Explanation:
    """Print what rank 0's pass did, and check that every rank's did the same."""
    sites = Explanation(ranks[0].graphs, None, True)
    print(f"\nSites of the decode step:\n{sites}\n")
    check(sites.found > 0, "the pass found no site in the decode step")
    check(sites.rewritten > 0, f"the pass rewrote none of {sites.found} sites")
    seen = [(row.site, row.decision, row.op) for row in sites.rows]
    for rank, result in enumerate(ranks):
        rows = Explanation(result.graphs, None, True).rows
        check(
            [(row.site, row.decision, row.op) for row in rows] == seen,
            f"rank {rank} decided differently about the sites than rank 0",
        )
        if result.fallbacks:
            print(f"rank {rank} used the fallback collectives: {result.fallbacks}")
    return sites


def compare(ranks: list[RankResult], tokens: list[list[int]], logits: Tensor) -> float:
    """Largest logit difference to the unsplit model, whose tokens all must equal."""
    largest = 0.0
    for rank, result in enumerate(ranks):
        for how, got in result.tokens.items():
            check(
                got == tokens,
                f"rank {rank} with backend={how!r} chose other tokens than the unsplit "
                f"model: {[byte_tokens.decode(t) for t in got]}",
            )
        for row, expected in enumerate(tokens):
            # After its end a sequence only keeps the batch company.
            steps = slice(len(expected))
            ours = result.logits["dcp_inductor"][steps, row]
            difference = (ours - logits[steps, row]).abs().max().item()
            check(difference == difference, f"rank {rank} has NaN in its logits")
            largest = max(largest, difference)
    check(
        largest <= MAX_LOGIT_DIFFERENCE,
        f"logits differ from the unsplit model by {largest:.2g}, more than "
        f"{MAX_LOGIT_DIFFERENCE:g}",
    )
    return largest


def run(checkpoint: Path = CHECKPOINT) -> str:
    """Run everything; the success line.

    Raises:
        DemoError, RankError: what went wrong.
    """
    print(
        f"demo: an MLA language model on {WORLD_SIZE} processes, each with half of the "
        "heads and half of the KV cache"
    )
    prompts = [byte_tokens.encode(text) for text in PROMPTS]
    progress = Progress()
    ranks = run_ranks(
        run_rank,
        WORLD_SIZE,
        str(checkpoint),
        prompts,
        timeout_s=TIMEOUT_S,
        on_progress=progress,
    )
    progress.begin("generating with the unsplit model in one process, for comparison")
    torch.set_num_threads(1)
    unsplit = generate(load_model(checkpoint), prompts, MAX_NEW_TOKENS)
    progress.finish()
    sites = show_sites(ranks)
    for text, tokens in zip(PROMPTS, ranks[0].tokens["dcp_inductor"], strict=True):
        print(f"{text}|{byte_tokens.decode(tokens)}\n")
    difference = compare(ranks, unsplit.tokens, torch.stack(unsplit.logits))
    whole = unsplit.cache.num_bytes
    for rank, result in enumerate(ranks):
        share = result.cache_bytes / whole
        print(
            f"KV cache of rank {rank}: {result.cache_bytes} bytes, {share:.0%} of the "
            f"{whole} bytes of the unsplit cache"
        )
    before, after = (
        max(result.step_ms[how] for result in ranks)
        for how in ("inductor", "dcp_inductor")
    )
    print(
        f"decode step: {before:.2f} ms with gloo collectives, {after:.2f} ms with "
        f"direct exchange ({before / after:.1f}x)"
    )
    return (
        f"demo: ok sites={sites.rewritten}/{sites.found} tokens=identical "
        f"max_abs_diff={difference:.1e} step_ms={before:.2f}->{after:.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.mla_lm.demo",
        description=(
            f"Decode with a small MLA language model over {WORLD_SIZE} processes that "
            "split its KV cache, once compiled with Inductor and once with "
            "dcp_inductor, and compare words and numbers with the unsplit model. Shows "
            "which exchanges were found and rewritten, and the time of a step. Takes "
            "some minutes and no options; the last line starts with 'demo: ok' or "
            "'demo: FAILED', and the exit code is 0 or 1."
        ),
    )
    parser.parse_args(arguments)
    try:
        print(run())
    except (DemoError, RankError) as error:
        reason = error
    except Exception as error:  # whatever it is, the last line must say so
        reason = RankError(f"{type(error).__name__}: {error}")
    else:
        return 0
    print(f"demo: FAILED {reason}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
