"""Refusals that no graph from torch leads to, held on sites made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from dcp_inductor import config
from dcp_inductor.fx import legality
from dcp_inductor.fx.layout import Layout
from dcp_inductor.fx.proof import Exit, Proof
from dcp_inductor.fx.region import Cut, Region
from dcp_inductor.fx.site import GatherExit, GatherSite, Group, MergeSite
from dcp_inductor.fx.trial import Hypothesis

aten = torch.ops.aten
HEADS = Layout(1, None, None, (0, 1, 2))


def merge_site(world_size: int = 2, leaf_behind_exit: bool = False) -> MergeSite:
    graph = fx.Graph()
    output, lse = graph.placeholder("output"), graph.placeholder("lse")
    output.meta["val"], lse.meta["val"] = torch.empty(3, 4, 8), torch.empty(3, 4)
    merged = graph.call_function(aten.exp.default, (output,))
    merged.meta["val"] = torch.empty(3, 2, 8)
    late = graph.call_function(aten.sin.default, (merged,))
    late.meta["val"] = torch.empty(3, 4, 8)
    graph.output((merged, late))
    leaf = late if leaf_behind_exit else output
    hypothesis = Hypothesis("lse", True, True, False, 2, ((0, 1),))
    proof = Proof(hypothesis, (Exit(merged, "output", HEADS, 1.0),), 7)
    region: Any = SimpleNamespace(nodes=(merged,), exits=lambda: [merged])
    group = Group("g", world_size, 0)
    return MergeSite(group, Cut(leaf, (lse,)), region, proof, "key", merged)


def code(site: MergeSite | GatherSite) -> str | None:
    reject = legality.judge(site.origin.graph, site)
    return reject and reject.code


def test_site_that_may_be_rewritten() -> None:
    assert code(merge_site()) is None


def test_input_that_depends_on_the_result() -> None:
    assert code(merge_site(leaf_behind_exit=True)) == "cycle"


def test_group_of_one() -> None:
    assert code(merge_site(world_size=1)) == "single_rank"


def test_reader_of_strides() -> None:
    site = merge_site()
    graph = site.origin.graph
    with graph.inserting_after(site.origin):
        strided = (site.origin, [3, 2], [2, 1], 0)
        graph.call_function(aten.as_strided.default, strided)
    assert code(site) == "strides"


@pytest.mark.parametrize("depends", [False, True])
def test_gather_of_what_it_made(depends: bool) -> None:
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    rows.meta["val"] = torch.empty(3, 8)
    whole = graph.call_function(aten.exp.default, (rows,))
    whole.meta["val"] = torch.empty(6, 8)
    part = graph.call_function(aten.sin.default, (whole,))
    part.meta["val"] = torch.empty(3, 8)
    region = Region((rows,), (whole,), (), frozenset(), frozenset())
    source = part if depends else rows
    exits = (GatherExit(whole, Layout(None, None, None, (0, 1, 2))),)
    site = GatherSite(Group("g", 2, 0), source, region, exits, "key", whole)
    assert code(site) == ("cycle" if depends else None)


@pytest.mark.parametrize("kind", ["combine", "query_gather", "kv_gather"])
def test_every_kind_has_a_switch(kind: str) -> None:
    knob = legality.SWITCHES[kind]
    assert not legality.forced(kind)
    with config.patch({knob: "force"}):
        assert legality.forced(kind)
        assert sum(legality.forced(each) for each in legality.SWITCHES) == 1
