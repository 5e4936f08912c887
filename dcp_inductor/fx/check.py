"""Check the graph after the rewrite; a failure is our bug, never the user's."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, Node

from dcp_inductor.fx.order import DIRECT_OPS


def check_rewrite(graph: Graph, replaced: Iterable[Node]) -> None:
    """Raise AssertionError if the graph is malformed or an exchange is half replaced.

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
