"""A decode step of DeepSeek-V3-shaped attention, before and after the rewrite.

    PYTHONPATH=. python benchmarks/decode_step.py --ranks N [--json FILE]

TP = DCP = N, a process a GPU over NCCL, bf16, 128 heads, latent rows of 576; 8
sequences of equal length, without rotary embedding, which costs both sides the same.
Both sides are compiled by Inductor and captured in a CUDA graph; results are compared
first, then the two are timed in turns, as in ``python -m dcp_inductor bench``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from dcp_inductor import config, ops
from dcp_inductor.backend import dcp_inductor
from dcp_inductor.bench import replays
from examples.mla_lm.attention import combine
from examples.mla_lm.parallel import all_gather, all_reduce

HIDDEN, Q_RANK, KV_RANK, ROPE, NOPE, VALUE, HEADS = 7168, 1536, 512, 64, 128, 128, 128
BATCH = 8
CONTEXTS = (8 << 10, 64 << 10, 512 << 10)


class Layer(nn.Module):
    """This rank's heads, over its shard of the cache."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.heads = HEADS // group.size()

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) / shape[-2] ** 0.5, False)

        self.q_a, self.q_b = weight(HIDDEN, Q_RANK), weight(Q_RANK, self.heads * 192)
        self.kv_a = weight(HIDDEN, KV_RANK + ROPE)
        self.w_uk = weight(self.heads, NOPE, KV_RANK)
        self.w_uv = weight(self.heads, KV_RANK, VALUE)
        self.o = weight(self.heads * VALUE, HIDDEN)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        """``x`` [T, hidden], ``cache`` [T, K, 576] of this rank to [T, hidden]."""
        q_nope, q_pe = (
            (x @ self.q_a @ self.q_b).unflatten(-1, (self.heads, -1)).split(NOPE, -1)
        )
        cache[:, -1].copy_(x @ self.kv_a)
        latent = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)
        query = all_gather(torch.cat([latent, q_pe], -1), 1, self.group)
        scores = (query @ cache.transpose(1, 2)).float() * (NOPE + ROPE) ** -0.5
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse[..., None]).to(x.dtype)
        output = combine(weights @ cache[..., :KV_RANK], lse, self.group)
        output = torch.bmm(output.transpose(0, 1), self.w_uv).transpose(0, 1)
        return all_reduce(output.flatten(1) @ self.o, self.group)


def work(rank: int, size: int, directory: str) -> None:
    """Time all contexts on one rank."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{directory}/store", size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
    hosts = dist.new_group(backend="gloo")
    group = dist.group.WORLD
    assert group is not None
    marker, token = torch.zeros((1, 4), device="cuda"), torch.empty(0)
    torch.manual_seed(rank)
    with torch.device("cuda"):
        layer = Layer(group).bfloat16()
    rows = []
    with torch.no_grad(), config.patch(direct_combine="force"):
        for context in CONTEXTS:
            torch._dynamo.reset()
            torch.manual_seed(1)
            x = torch.randn(BATCH, HIDDEN, device="cuda").bfloat16()
            torch.manual_seed(2 + rank)
            local = context // BATCH // size
            cache = torch.randn(BATCH, local, KV_RANK + ROPE, device="cuda").bfloat16()
            graphs: dict[str, tuple[replays.Captured, replays.Captured]] = {}
            for name, backend in (("before", "inductor"), ("after", dcp_inductor)):
                step = torch.compile(layer, backend=backend, dynamic=False)

                def call(step: Any = step, x: Tensor = x, c: Tensor = cache) -> Tensor:
                    return step(x, c)

                for _ in range(2):
                    call()
                torch.cuda.synchronize()
                dist.barrier(hosts)
                graphs[name] = replays.both(call)
                graphs[name][1].graph.replay()
                torch.cuda.synchronize()
            before, after = (pair[1].result.float() for pair in graphs.values())
            difference = float((before - after).norm() / before.norm())
            if not difference < 1e-2:
                raise AssertionError(f"the rewrite changes the result by {difference}")
            times = replays.medians(
                graphs,
                lambda: ops.kv_gather(marker, token, group.group_name),
                lambda: dist.barrier(hosts),
            )  # fmt: skip
            rows.append(
                {
                    "N": size, "context": context, "batch": BATCH,
                    "before_us": times["before"], "after_us": times["after"],
                    "relative_difference": difference,
                }
            )  # fmt: skip
            del graphs
    Path(directory, f"{rank}.json").write_text(json.dumps(rows))
    dist.barrier(hosts)
    dist.destroy_process_group()


def main() -> None:
    """Run the ranks and print a line for each context."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(work, args=(options.ranks, directory), nprocs=options.ranks)
        every = [
            json.loads(Path(directory, f"{rank}.json").read_text())
            for rank in range(options.ranks)
        ]
    rows = []
    for same in zip(*every, strict=True):
        row = dict(same[0])
        for key in ("before_us", "after_us"):
            row[key] = round(max(one[key] for one in same), 1)
        rows.append(row)
        print(
            f"context {row['context']:>7}: {row['before_us']:.1f} us before, "
            f"{row['after_us']:.1f} us after, {row['before_us'] / row['after_us']:.2f}x"
        )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
