"""Facts about nodes and the memory of proofs."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from dcp_inductor.fx import nodes, report
from dcp_inductor.fx.site import site_name
from dcp_inductor.fx.structure import Memo, site_key

aten = torch.ops.aten


def graph_with(target, *shapes, dtype: torch.dtype = torch.float32) -> fx.Node:
    graph = fx.Graph()
    sources = []
    for i, shape in enumerate(shapes):
        source = graph.placeholder(f"x{i}")
        source.meta["val"] = torch.empty(shape, dtype=dtype)
        sources.append(source)
    return graph.call_function(target, tuple(sources))


def test_memo_makes_once_and_forgets_the_oldest() -> None:
    memo, made = Memo(capacity=2), []

    def make(key: str):
        return memo.get(key, lambda: made.append(key) or key.upper())

    assert make("a") == ("A", False)
    assert make("a") == ("A", True)
    make("b"), make("c")
    assert make("c") == ("C", True)
    assert make("a") == ("A", False)
    assert made == ["a", "b", "c", "a"]


def test_site_key_ignores_what_differs_between_ranks_and_sizes() -> None:
    def key(size: int, index: int, kind: str = "combine", extra=()) -> str:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(size, 4)
        made = [graph.call_function(aten.select.int, (x, 0, index))]
        made.append(graph.call_function(aten.exp.default, (made[0],)))
        made += [graph.call_function(target, (x,)) for target in extra]
        return site_key(kind, made, 2, ("8", torch.float32))

    same = key(3, 0)
    assert key(7, 1) == same  # other T, other own rank
    assert key(3, 0, extra=[aten.exp.default]) != same
    assert key(3, 0, kind="gather") != same
    assert key(3, 0, extra=[aten.t.default]) == same  # T = 1 differs in views alone


@pytest.mark.parametrize(
    ("target", "pure"),
    [
        (aten.exp.default, True),
        (operator.getitem, True),
        (aten.add_.Tensor, False),
        (aten.rand_like.default, False),
        (aten.bernoulli.p, False),
        (aten.as_strided.default, False),
        (torch.ops.dcp_inductor.order_token.default, False),
    ],
)
def test_what_a_region_may_hold(target, pure: bool) -> None:
    assert nodes.is_pure(graph_with(target, (2, 3))) is pure


@pytest.mark.parametrize(
    ("source", "result", "widens"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, True),
        (torch.float32, torch.float64, True),
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
        (torch.float8_e4m3fn, torch.float32, False),
        (torch.int32, torch.float32, False),
    ],
)
def test_cast_that_keeps_the_value(source, result, widens: bool) -> None:
    node = graph_with(torch.ops.prims.convert_element_type.default, (2,), dtype=source)
    node.meta["val"] = torch.empty(2, dtype=result)
    assert nodes.is_widening_cast(node) is widens


def test_source_line_is_the_users() -> None:
    node = graph_with(aten.exp.default, (2,))
    assert nodes.source_line(node) == ""
    torch_file = torch.__file__.replace("__init__", "nn/functional")
    node.meta["stack_trace"] = (
        '  File "/home/me/model.py", line 7, in forward\n    y = merge(x)\n'
        f'  File "{torch_file}", line 9, in exp\n    return x.exp()\n'
    )
    assert nodes.source_line(node) == "/home/me/model.py:7 y = merge(x)"


def test_a_site_is_named_by_its_file_whatever_its_path() -> None:
    node = fx.Graph().placeholder("x")
    assert site_name(node, "key") == "key"
    node.meta["stack_trace"] = (
        '  File "/a path/my model.py", line 7, in f\n    x = f(y)'
    )
    assert nodes.source_line(node) == "/a path/my model.py:7 x = f(y)"
    assert site_name(node, "key") == "my model.py:7#key"


def test_arguments_by_name_whether_given_by_place_keyword_or_default() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    by_place = graph.call_function(aten.slice.Tensor, (x, 1, 2, 4))
    by_keyword = graph.call_function(aten.slice.Tensor, (x,), {"dim": 1})
    assert nodes.argument(by_place, "end") == 4
    assert nodes.argument(by_keyword, "dim") == 1
    assert nodes.argument(by_keyword, "step") == 1


def test_reports_go_to_all_who_collect_and_to_nobody_later() -> None:
    with report.collect() as outer:
        report.publish(report.GraphReport(num_nodes=1))
        with report.collect() as inner:
            report.publish(report.GraphReport(num_nodes=2))
        report.publish(report.GraphReport(num_nodes=3))
    report.publish(report.GraphReport(num_nodes=4))
    assert [r.num_nodes for r in outer] == [1, 2, 3]
    assert [r.num_nodes for r in inner] == [2]
