"""How many of the collected spellings the pass recognises, and what of the others.

    python -m tests.formulations.survey               2 ranks, 3 tokens, static, fp32
    python -m tests.formulations.survey --full        every form
    python -m tests.formulations.survey --only FC-13  ids that start so, in detail
    python -m tests.formulations.survey --show FC-13  a case's graph, before and after
    python -m tests.formulations.survey --trace-only  what torch itself can trace

Traced graphs are kept in tests/formulations/.traces and made anew when their recipe
changes.
"""

from __future__ import annotations

import argparse
import collections
import logging
import statistics
import sys
import time
import warnings

import torch

from .cases import EQUAL_OR_REFUSED, Case
from .harness import FORMS, trace_ranks
from .judging import Verdict, apply_pass, judge
from .recipes import REGISTRY
from .tracing import DYNAMIC

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.formulations.survey")
    parser.add_argument(
        "--full", action="store_true", help="every N, T, form and dtype"
    )
    parser.add_argument("--world-size", type=int, nargs="+", default=[2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[3])
    parser.add_argument("--form", choices=FORMS, nargs="+", default=["static"])
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["fp32"])
    parser.add_argument("--only", nargs="+", default=[], metavar="PREFIX")
    parser.add_argument("--family", nargs="+", default=[], metavar="A..F, G, K, NM")
    parser.add_argument("--show", nargs="+", default=[], metavar="ID")
    parser.add_argument("--trace-only", action="store_true")
    parser.add_argument("--no-cache", action="store_true")
    parser.add_argument(
        "--verbose", action="store_true", help="the pass's own debug log"
    )
    options = parser.parse_args(arguments)
    if options.full:
        options.world_size, options.tokens = [2, 4], [3, 1]
        options.form, options.dtype = list(FORMS), list(DTYPES)
    return options


def selected(options: argparse.Namespace) -> list[Case]:
    return [
        case
        for case in REGISTRY
        if case.traceable
        and (not options.only or any(case.id.startswith(p) for p in options.only))
        and (not options.family or case.family in options.family)
    ]


def settings(options: argparse.Namespace, case: Case):
    """Every (world size, tokens, form, dtype) that was asked for and that the case
    allows.
    """
    for world_size in options.world_size:
        for tokens in options.tokens:
            for form in options.form:
                # One token is static for torch, so this would be the static form again.
                if form == DYNAMIC and case.num_tokens(tokens, world_size) == 1:
                    continue
                if form == "unbacked" and not case.unbacked:
                    continue
                for name in options.dtype:
                    if world_size in case.world_sizes and DTYPES[name] in case.dtypes:
                        yield world_size, tokens, form, name


def title(case: Case, setting: tuple[int, int, str, str]) -> str:
    world_size, tokens, form, name = setting
    return f"{case.id:44} N={world_size} T={tokens} {form:8} {name}"


def show(options: argparse.Namespace) -> None:
    for case_id in options.show:
        case = REGISTRY[case_id]
        for world_size, tokens, form, name in settings(options, case):
            traced = trace_ranks(
                case, world_size, tokens=tokens, form=form, dtype=DTYPES[name]
            )
            setting = (world_size, tokens, form, name)
            print(f"=== {title(case, setting)}\n{traced[0].original.graph}")
            verdict = Verdict(case)
            modules = apply_pass(case, traced, 5, verdict)
            for rank, module in enumerate(modules):
                print(f"--- rank {rank} after the pass, {verdict}\n{module.graph}")


class Tally:
    """Verdicts by setting, and the printed summary."""

    def __init__(self) -> None:
        self.recipes: dict[tuple, list[Verdict]] = collections.defaultdict(list)
        self.near_misses: dict[tuple, list[Verdict]] = collections.defaultdict(list)

    def add(self, setting: tuple, verdict: Verdict) -> None:
        near = verdict.case.expect == EQUAL_OR_REFUSED
        (self.near_misses if near else self.recipes)[setting].append(verdict)

    def all(self) -> list[Verdict]:
        return [
            v
            for group in (self.recipes, self.near_misses)
            for vs in group.values()
            for v in vs
        ]

    def print(self) -> None:
        columns = f"{'N':>2} {'T':>2} {'form':9} {'dtype':5}"
        print(f"\n{columns}  rewritten / recipes   near misses equal")
        for setting in {**self.recipes, **self.near_misses}:
            world_size, tokens, form, name = setting
            recipes, near = self.recipes[setting], self.near_misses[setting]
            done, equal = sum(v.ok for v in recipes), sum(v.ok for v in near)
            print(
                f"{world_size:>2} {tokens:>2} {form:9} {name:5}"
                f"  {done:>9} / {len(recipes):<9} {equal:>9} / {len(near)}"
            )
        times = [v.pass_ms for v in self.all() if v.pass_ms]
        if times:
            median = statistics.median(times)
            print(f"pass: median {median:.1f} ms, max {max(times):.1f} ms")
        codes = collections.Counter(
            c for vs in self.recipes.values() for v in vs for c in v.refusals
        )
        print("refusal codes on recipes:", dict(codes.most_common()) or "none")
        wrong = [v for v in self.all() if v.wrong is not None]
        errors = sum(bool(v.error) for v in self.all())
        print(f"wrong numbers: {len(wrong)}; errors: {errors}")


def trace_only(options: argparse.Namespace) -> int:
    failures = 0
    for case in selected(options):
        for setting in settings(options, case):
            world_size, tokens, form, name = setting
            dtype = DTYPES[name]
            try:
                trace_ranks(case, world_size, tokens=tokens, form=form, dtype=dtype)
            except Exception as error:
                failures += 1
                print(f"{title(case, setting)}: {error!r:.200}")
    print(f"{failures} spellings do not trace")
    return int(failures > 0)


def survey(options: argparse.Namespace) -> int:
    tally, start = Tally(), time.perf_counter()
    for case in selected(options):
        for setting in settings(options, case):
            world_size, tokens, form, name = setting
            verdict = judge(
                case,
                world_size,
                tokens=tokens,
                form=form,
                dtype=DTYPES[name],
                cache=not options.no_cache,
            )
            tally.add(setting, verdict)
            if not verdict.ok or options.only:
                print(f"{title(case, setting)}: {verdict}", flush=True)
    tally.print()
    print(f"{time.perf_counter() - start:.0f} s")
    return int(any(not v.ok for v in tally.all()))


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    warnings.simplefilter("ignore")
    if options.verbose:
        logging.basicConfig(level=logging.DEBUG)
        logging.getLogger("dcp_inductor").setLevel(logging.DEBUG)
    if options.show:
        show(options)
        return 0
    return trace_only(options) if options.trace_only else survey(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
