"""``python -m dcp_inductor bench``: times the direct exchanges and their alternatives.

Each way of measuring is a module with ``run``, ``table`` and ``machine``: ``cpu`` over
shared memory, ``gpus`` with a process a GPU, ``virtual`` with N ranks on one GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from dcp_inductor.bench import cpu

_TOKENS = {"cpu": (1, 2, 4, 8, 16, 32, 64), "cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256)}
_HEADS = {"cpu": 32, "cuda": 128}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from command line arguments; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dcp_inductor bench",
        description="Time the direct exchanges against the collectives they replace.",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s"
    )
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument(
        "--ranks", type=_count, metavar="N", default=2,
        help="processes; with cuda, a GPU each (default: %(default)s)",
    )  # fmt: skip
    ranks.add_argument(
        "--virtual-ranks", type=_count, metavar="N",
        help="streams of one process that share one GPU (needs nvcc and a checkout)",
    )  # fmt: skip
    tokens, heads = (
        "; ".join(f"{device}: {words}" for device, words in each.items())
        for each in (
            {device: " ".join(map(str, many)) for device, many in _TOKENS.items()},
            _HEADS,
        )
    )
    parser.add_argument(
        "--tokens", type=_count, nargs="+", metavar="T", help=f"default: {tokens}"
    )
    parser.add_argument(
        "--heads", type=_count, metavar="H", help=f"of all ranks (default: {heads})"
    )
    parser.add_argument(
        "--head-dim", type=_count, default=512, metavar="D",
        help="of what is merged (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--query-dim", type=_count, default=576, metavar="D",
        help="of what is gathered (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype",
        choices=tuple(cpu.DTYPES),
        default="bf16",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write the rows here too (default: nowhere)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    options.tokens = options.tokens or _TOKENS[options.device]
    options.heads = options.heads or _HEADS[options.device]
    if options.json and (problem := _unwritable(options.json)):
        parser.error(f"--json: {problem}")
    if options.virtual_ranks is not None:
        return _virtual(parser, options)
    if options.ranks == 1 and options.device == "cpu":
        parser.error("expected at least 2 --ranks: one rank has nothing to exchange")
    if options.heads % options.ranks:
        parser.error(
            f"expected a multiple of --ranks {options.ranks} as --heads, got "
            f"{options.heads}"
        )
    if options.device == "cpu":
        rows, machine = cpu.run(options), cpu.machine()
        print(cpu.table(rows, machine))
    else:
        from dcp_inductor.bench import gpus

        problem = gpus.refusal(options)
        if problem:
            parser.error(problem)
        rows, machine = gpus.run(options)
        print(gpus.table(rows, machine))
    if options.json:
        report = {"rows": rows, "machine": machine}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _count(text: str) -> int:
    """A number of something on the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _unwritable(path: Path) -> str:
    """Why the file cannot be written; asked before minutes go into its contents."""
    before = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    if not before:
        path.unlink()
    return ""


def _virtual(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from dcp_inductor.bench import virtual

    if options.device != "cuda" or options.virtual_ranks not in virtual.RANKS:
        parser.error(
            f"expected --device cuda and one of {virtual.RANKS} as --virtual-ranks, "
            f"got {options.device} and {options.virtual_ranks}"
        )
    return virtual.run(options.virtual_ranks, options.json)
