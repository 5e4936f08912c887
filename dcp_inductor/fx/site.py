"""What the pass knows about one site: where and what it is, and why it is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from dcp_inductor.fx.layout import Layout
from dcp_inductor.fx.nodes import location
from dcp_inductor.fx.proof import Proof
from dcp_inductor.fx.region import Cut, Region


@dataclass(frozen=True)
class Reject:
    """A refusal: a code that is counted and a sentence for the user.

    ``rows`` is set where only that number of rows is refused.
    """

    code: str
    reason: str
    rows: str = ""


@dataclass(frozen=True)
class Group:
    """The process group of a site, as this process sees it."""

    name: str
    world_size: int
    rank: int


@dataclass
class MergeSite:
    """A proven merge of partial attention results."""

    group: Group
    cut: Cut
    region: Region
    proof: Proof
    key: str
    origin: Node  # whose place in the user's code names the site
    kind: str = field(default="combine", init=False)

    def rename(self, moved: Mapping[Node, Node]) -> None:
        """Follow inputs that an earlier rewrite of the same graph replaced."""
        self.cut = Cut(
            moved.get(self.cut.partial_output, self.cut.partial_output),
            tuple(moved.get(node, node) for node in self.cut.statistics),
        )

    @property
    def name(self) -> str:
        return site_name(self.origin, self.key)


@dataclass(frozen=True)
class GatherExit:
    """A node that holds all ranks' data: ``layout`` of the stack [N, *source.shape]."""

    node: Node
    layout: Layout


@dataclass
class GatherSite:
    """A proven gather of one tensor over the ranks of a group."""

    group: Group
    source: Node  # this rank's tensor
    region: Region
    exits: tuple[GatherExit, ...]
    key: str
    origin: Node

    @property
    def kind(self) -> str:
        """Rows stack on the first dim of a KV gather; a query gather joins heads behind
        it.
        """
        return "kv_gather" if self.exits[0].layout.order[:1] == (0,) else "query_gather"

    def rename(self, moved: Mapping[Node, Node]) -> None:
        """Follow an input that an earlier rewrite of the same graph replaced."""
        self.source = moved.get(self.source, self.source)

    @property
    def name(self) -> str:
        return site_name(self.origin, self.key)


def site_name(origin: Node, key: str) -> str:
    """A name for messages, equal on all ranks: ``file.py:line#key``, or the key."""
    place = location(origin)
    return f"{os.path.basename(place)}#{key}" if place else key
