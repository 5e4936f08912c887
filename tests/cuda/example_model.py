"""The example model on GPUs: eager against compiled, also where the group is gloo.

gloo cannot gather CUDA tensors for functional collectives (torch 2.11 crashes in it),
and NCCL wants a GPU for each rank. So the gathers that stay in the graph, and those of
the eager run, go through the host here; the DCP group's collectives in a compiled graph
are left to the pass, which replaces them.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from examples.mla_lm import parallel
from examples.mla_lm.demo import CHECKPOINT
from examples.mla_lm.generate import compile_step, prefill
from examples.mla_lm.model import load_model

_LIBRARY = torch.library.Library("dcp_inductor_tests", "DEF")
_LIBRARY.define("host_gather(Tensor x, int size, str group_name) -> Tensor")


def _host_gather(x: Tensor, size: int, group_name: str) -> Tensor:
    group = torch.distributed.distributed_c10d._resolve_process_group(group_name)
    mine = x.contiguous().cpu()
    every = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(every, mine, group=group)
    return torch.stack(every).to(x.device)


_LIBRARY.impl("host_gather", _host_gather, "CUDA")
torch.library.register_fake(
    "dcp_inductor_tests::host_gather",
    lambda x, size, group_name: x.new_empty((size, *x.shape)),
)


def through_the_host(dcp_group: dist.ProcessGroup) -> None:
    """Patch the example's collectives as said above."""
    gather, scatter = parallel._all_gather, parallel._reduce_scatter
    of_dcp = dcp_group.group_name

    def every(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return torch.ops.dcp_inductor_tests.host_gather(
            x, group.size(), group.group_name
        )

    def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        if torch.compiler.is_compiling() and group.group_name == of_dcp:
            return gather(x, dim, group)
        return torch.cat(every(x, group).unbind(0), dim)

    def reduce_scatter(
        x: Tensor, op: str, dim: int, group: dist.ProcessGroup
    ) -> Tensor:
        if torch.compiler.is_compiling() and group.group_name == of_dcp:
            return scatter(x, op, dim, group)
        return every(x, group).sum(0).chunk(group.size(), dim)[group.rank()]

    parallel._all_gather, parallel._reduce_scatter = all_gather, reduce_scatter


@torch.no_grad()
def errors(layout: parallel.Layout, backend: object, steps: int) -> tuple[float, float]:
    """Largest error of the logits in bf16, eager and compiled, against eager fp32.

    In units of the largest logit's last place in bf16. All get the tokens that the fp32
    model chose, since greedy choices between logits that are close may part.
    """
    exact, eager = (
        load_model(CHECKPOINT, layout, dtype).to("cuda")
        for dtype in (torch.float32, torch.bfloat16)
    )
    compiled = compile_step(eager, backend)
    prompts = [[1, 2, 3], list(range(10, 30))]
    worst, largest = [0.0, 0.0], 0.0
    torch.set_default_device("cuda")
    try:
        models = (exact, eager, eager)
        caches, first = zip(
            *(prefill(model, prompts, steps) for model in models), strict=True
        )
        logits = first[0]
        for _ in range(steps):
            chosen = logits.argmax(-1)
            inputs = [cache.next_inputs(chosen) for cache in caches]
            logits = exact(inputs[0], caches[0].layers)
            largest = max(largest, float(logits.abs().max()))
            got = [eager(inputs[1], caches[1].layers)]
            # Dynamo of torch 2.11 cannot look through the mode of a default device.
            torch.set_default_device(None)
            got.append(compiled(inputs[2], caches[2].layers))
            torch.set_default_device("cuda")
            for i, each in enumerate(got):
                worst[i] = max(worst[i], float((each.float() - logits).abs().max()))
    finally:
        torch.set_default_device(None)
    unit = 2.0 ** math.floor(math.log2(largest)) * torch.finfo(torch.bfloat16).eps
    return worst[0] / unit, worst[1] / unit
