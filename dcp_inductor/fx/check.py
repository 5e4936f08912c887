"""Check the graph after the rewrite. A failure here is a bug of ours, never the user's."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, Node

from dcp_inductor.fx.collectives import as_collective, is_wait
from dcp_inductor.fx.order import DIRECT_OPS


def check_rewrite(graph: Graph, replaced: Iterable[Node]) -> None:
    """Raise AssertionError if the graph is malformed or an exchange was left half replaced.

    Args:
        graph: the graph after rewrite and ordering.
        replaced: collectives that the rewritten sites stand for.
    """
    graph.lint()
    alive = set(graph.nodes)
    left = [node.name for node in replaced if node in alive]
    assert not left, f"collectives {left} were rewritten and are still in the graph"
    for node in graph.nodes:
        if node.op == "call_function" and node.target in DIRECT_OPS:
            assert "val" in node.meta, f"{node.name} has no fake result"
        if is_wait(node):
            source = node.args[0]
            made = isinstance(source, Node) and (
                as_collective(source) is not None
                or source.op == "placeholder"
                or any(as_collective(s) is not None for s in source.all_input_nodes)
            )
            assert made or not isinstance(source, Node) or source.op != "call_function" or (
                not source.meta.get("dcp_inductor_new")
            ), f"{node.name} waits for {source}, which is no collective"
