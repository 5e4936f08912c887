"""Ranks that compile at different times: nothing in a compilation waits for a peer."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.fx_passes import pad_mm

from tests.fx.models import fake_group, merge, merge_inputs
from tests.support import world


class _Seen(BaseException):
    """Ends a compilation after our pass has run."""


def reference(size: int, rank: int, num_tokens: int) -> Tensor:
    """What ``merge`` must return: all shards merged in one process."""
    shards = [merge_inputs(num_tokens, seed) for seed in range(size)]
    outputs = torch.stack([output for output, _ in shards]).double()
    lses = torch.stack([lse for _, lse in shards]).double()
    weights = torch.softmax(lses, 0)[..., None]
    merged = (outputs * weights).sum(0).transpose(0, 1).chunk(size)[rank]
    return merged.float() + 1


def compile_alone(rank: int, size: int) -> int:
    """Rank 1 compiles and never runs; rank 0 does nothing at all."""
    if rank == 0:
        return 0

    def stop(graph: torch.fx.Graph) -> None:
        raise _Seen

    counters.clear()
    options = {"post_grad_custom_post_pass": stop}
    try:
        torch.compile(merge, backend="dcp_inductor", options=options)(*merge_inputs())
    except _Seen:
        return counters["dcp_inductor"]["rewritten"]
    return -1


def run_with_histories(rank: int, size: int) -> tuple[list[int], list[float]]:
    """Rank 0 has one dynamic graph, rank 1 compiles for every number of tokens."""
    torch._dynamo.reset()
    dynamic = None if rank == 0 else False
    compiled = torch.compile(merge, backend="dcp_inductor", dynamic=dynamic)
    compilations, errors = [], []
    for num_tokens in (3, 5, 6):
        counters.clear()
        inputs = merge_inputs(num_tokens, seed=rank)
        if rank == 0:
            for tensor in inputs:
                torch._dynamo.mark_dynamic(tensor, 0)
        result = compiled(*inputs)
        difference = result - reference(size, rank, num_tokens)
        compilations.append(counters["stats"]["unique_graphs"])
        errors.append(difference.abs().max().item())
    return compilations, errors


def test_a_rank_compiles_while_its_peers_are_elsewhere() -> None:
    assert world(2).run(compile_alone, limit_s=120) == [0, 1]


def test_one_rank_recompiles_while_the_other_runs() -> None:
    dynamic, static = world(2).run(run_with_histories, limit_s=180)
    assert (dynamic[0], static[0]) == ([1, 0, 0], [1, 1, 1])
    assert max(dynamic[1] + static[1]) < 1e-5


def project_with_padding(rank: int, size: int) -> tuple[int, float]:
    """Rank 1 pads the operands of a product, as if it had measured a gain on a GPU."""
    torch._dynamo.reset()
    pads = 0
    weight = torch.eye(merge_inputs()[0].shape[-1]) * 3

    def count(graph: torch.fx.Graph) -> None:
        nonlocal pads
        pads = sum("constant_pad_nd" in str(node.target) for node in graph.nodes)

    def model(output: Tensor, lse: Tensor) -> Tensor:
        merged = merge(output, lse)
        return torch.bmm(merged, weight.expand(len(merged), -1, -1))

    settings = {"force_shape_pad": rank == 1, "post_grad_custom_post_pass": count}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pad_mm, "check_device", lambda *_: rank == 1)
        patch.setattr(pad_mm, "has_triton", lambda: True)
        compiled = torch.compile(
            model, backend="dcp_inductor", dynamic=False, options=settings
        )
        result = compiled(*merge_inputs(3, seed=rank))
    return pads, (result - reference(size, rank, 3) * 3).abs().max().item()


def test_one_rank_pads_what_follows_a_merge() -> None:
    (without, error), (padded, other_error) = world(2).run(
        project_with_padding, limit_s=180
    )
    assert not without
    assert padded
    assert max(error, other_error) < 1e-4


def graph_of(rank: int) -> list[tuple[str, str, str]]:
    """The graph that Inductor gets on a rank: name, op and arguments of each node."""
    torch._dynamo.reset()
    seen: list[tuple[str, str, str]] = []

    def note(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            arguments = f"{node.args} {node.kwargs}"
            seen.append((node.name, str(node.target), arguments))

    options = {"post_grad_custom_post_pass": note}
    with fake_group(rank, world_size=4):
        compiled = torch.compile(merge, backend="dcp_inductor", options=options)
        compiled(*merge_inputs())
    return seen


def test_all_ranks_get_one_graph_without_pointers() -> None:
    first, second, last = graph_of(0), graph_of(1), graph_of(3)
    assert first == second == last
    assert any("a2a_lse_reduce" in op for _, op, _ in first)
    text = re.sub(r"'[^']*'", "", " ".join(arguments for *_, arguments in first))
    numbers = re.findall(r"\b\d+\b", text)
    assert numbers
    assert max(map(int, numbers)) < 1 << 20
