"""Continues prompts on several ranks: ``python -m examples.mla_lm "Each rank"``.

The checkpoint may be any DeepSeek-V2/V3 one in safetensors format. A ``tokenizer.json``
is read with the tokenizers package; without that file tokens are bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from examples.mla_lm import bytes as byte_tokens
from examples.mla_lm.generate import compile_step, generate
from examples.mla_lm.launch import RankError, run_ranks
from examples.mla_lm.model import load_model
from examples.mla_lm.parallel import create_layout

BACKENDS = ("eager", "inductor", "dcp_inductor")


def run_rank(
    report: Callable[[str], None], args: argparse.Namespace, prompts: list[list[int]]
) -> tuple[list[list[int]], int]:
    """Tokens, and the bytes of this rank's cache."""
    dtype = getattr(torch, args.dtype)
    model = load_model(args.checkpoint, create_layout(args.dcp), dtype)
    done = generate(
        model,
        prompts,
        args.max_new_tokens,
        step=compile_step(model, args.backend),
        interleave=args.interleave,
        block_size=args.block_size,
    )
    return done.tokens, done.cache.num_bytes


def read_tokenizer(
    directory: Path,
) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """How the checkpoint turns text into tokens and back."""
    if not (directory / "tokenizer.json").exists():
        return byte_tokens.encode, byte_tokens.decode
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids, tokenizer.decode


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.mla_lm", description=__doc__.splitlines()[0]
    )
    parser.add_argument("prompts", nargs="+")
    checkpoint = Path(__file__).parent / "checkpoint"
    parser.add_argument("--checkpoint", type=Path, default=checkpoint)
    parser.add_argument("--ranks", type=int, default=2, help="tensor parallel ranks")
    parser.add_argument("--dcp", type=int, help="ranks per cache (default: all)")
    parser.add_argument("--interleave", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--timeout-s", type=float, default=600)
    how = parser.add_mutually_exclusive_group()
    for backend in BACKENDS:
        how.add_argument(
            f"--{backend}",
            dest="backend",
            action="store_const",
            const=backend,
            help=f"run the decode step with {backend}",
        )
    parser.set_defaults(backend="dcp_inductor")
    return parser.parse_args(argv)


def main() -> int:
    args = parse_args()
    encode, decode = read_tokenizer(args.checkpoint)
    prompts = [encode(text) for text in args.prompts]
    try:
        ranks = run_ranks(run_rank, args.ranks, args, prompts, timeout_s=args.timeout_s)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    tokens, cache_bytes = ranks[0]
    for text, continued in zip(args.prompts, tokens, strict=True):
        print(f"{text}|{decode(continued)}\n")
    print(f"KV cache: {cache_bytes} bytes on each of {args.ranks} ranks")
    return 0
