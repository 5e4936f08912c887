"""What Inductor makes of a query that stays in the workspace, and what explain says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor.codegen import wrapper
from torch._inductor.utils import run_and_get_code

import dcp_inductor
from dcp_inductor import config
from tests.fx.models import fake_group, merge
from tests.fx.test_query_view import QUERY, ROWS, _ops, attention


def compiled(model: Callable[..., Tensor], *inputs: Tensor) -> str:
    torch._dynamo.reset()
    with torch.no_grad():
        _, [code] = run_and_get_code(
            torch.compile(model, backend="dcp_inductor"), *inputs
        )
    start = code.index("def call(self, args)")
    return code[start : code.index("return (", start)]


def worked_on(query: Tensor, rows: Tensor) -> Tensor:
    """Pointwise work of the query's shape, which could be done in its place."""
    whole = funcol.all_gather_tensor(query, 1, dist.group.WORLD)
    return merge(*attention(torch.sin(whole), rows))


def handed_on(query: Tensor, rows: Tensor) -> Tensor:
    """A later tensor of the query's size, which could have its memory."""
    whole = funcol.all_gather_tensor(query, 1, dist.group.WORLD)
    merged = merge(*attention(whole, rows))
    later = torch.cat([merged, merged], 0).transpose(0, 1).contiguous()
    return _ops.look(torch.cos(later))


@pytest.mark.parametrize("query_view", [True, False])
def test_inductor_does_no_work_in_its_place(query_view: bool) -> None:
    with fake_group(), config.patch(query_view=query_view):
        code = compiled(worked_on, QUERY, ROWS.tensor)
    assert ("q_gather_view.default" in code) is query_view
    assert "buf2 = buf1[0]" in code
    # A copy is worked on where it is: else this would show nothing.
    assert ("= buf2; del buf2  # reuse" in code) is not query_view


@pytest.mark.parametrize("query_view", [True, False])
def test_inductor_hands_its_memory_to_no_other_tensor(
    query_view: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pooled: list[str] = []
    push = wrapper.MemoryPlanningState.push

    def watched(self: object, key: object, item: wrapper.FreeIfNotReusedLine) -> None:
        pooled.append(item.node.get_name())
        push(self, key, item)

    monkeypatch.setattr(wrapper.MemoryPlanningState, "push", watched)
    with fake_group(), config.patch(query_view=query_view):
        code = compiled(handed_on, QUERY, ROWS.tensor)
    assert "buf2 = buf1[0]" in code
    assert "attention.default(buf2, " in code
    assert ("buf2" in pooled) is not query_view
    assert ("buf1" in pooled) is False  # the pair of results is no memory
    # The view is there until the merge has been launched.
    assert (code.index("del buf1") > code.index("a2a_lse")) is query_view


def test_explain_says_where_the_query_lies() -> None:
    with fake_group():
        found = dcp_inductor.explain(worked_on, QUERY, ROWS.tensor)
        with config.patch(query_view=False):
            off = dcp_inductor.explain(worked_on, QUERY, ROWS.tensor)
    row = next(row for row in found.rows if row.kind == "query_gather")
    assert row.op == "q_gather_view"
    assert "all heads, copied out: CPUs read no workspace in place\n" in str(found)
    assert "all heads, copied out: query_view is off\n" in str(off)
