"""What a refusal says of what it looked at, and under which name."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from dcp_inductor.fx.report import SiteReport
from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.fx.sketch import Model, partials, passed


def refused(fn: Model, world_size: int = 2, rank: int = 1) -> SiteReport:
    after = passed(fn, partials(world_size)[rank], rank=rank, world_size=world_size)
    [row] = [site for site in after.sites if site.kind == "combine"]
    assert row.decision == "rejected"
    return row


def weight(ctx: Context, lse: Tensor) -> Tensor:
    return torch.exp(lse - torch.logsumexp(sp.stack_view(ctx, lse), 0))[..., None]


def clamped(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    # Twice, so that the bounded LSE is no cut of its own.
    every = sp.stack_view(ctx, lse.clamp(min=-20))
    own = torch.exp(lse.clamp(min=-20) - torch.logsumexp(every, 0))
    return sp.rs(ctx, output * own[..., None])


def doubled(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    return sp.rs(ctx, output * weight(ctx, lse) * 2)


def of_two_bases(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    every = torch.exp2(sp.stack_view(ctx, lse)).sum(0)
    return sp.rs(ctx, output * (torch.exp2(lse) / every * 1.01)[..., None])


def test_the_data_on_which_a_hypothesis_ends_are_named() -> None:
    reason = refused(clamped).reason
    assert "nearest: the merge by an LSE of base e, which holds on ordinary" in reason
    assert "data and not on LSEs far from zero in float64" in reason


def test_the_distance_to_the_nearest_merge_is_told() -> None:
    row = refused(doubled)
    assert row.code == "not_equivalent"
    assert "no merge; nearest: the merge by an LSE of base " in row.reason
    # Off by as much as the merge is large.
    [distance] = re.findall(r"off by at least (\S+)$", row.reason)
    assert 0.3 < float(distance) < 4
    reason = refused(of_two_bases).reason
    assert "nearest: the merge by an LSE of base 2" in reason
    [distance] = re.findall(r"off by at least (\S+)$", reason)
    assert float(distance) < 0.05


def padded(ctx: Context, output: Tensor, lse: Tensor) -> Tensor:
    """Twice the merge; how many zeros are made, and where, is the rank's own."""
    slots = [torch.zeros_like(lse)] * ctx.rank + [lse]
    slots += [torch.ones_like(lse) * 0] * (ctx.world_size - ctx.rank - 1)
    total = torch.logsumexp(sp.ar(ctx, torch.stack(slots)), 0)
    return sp.rs(ctx, output * torch.exp(lse - total)[..., None] * 2)


@pytest.mark.parametrize("fn", [padded, doubled, clamped])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_refused_site_has_one_name_on_all_ranks(world_size: int, fn: Model) -> None:
    names = {refused(fn, world_size, rank).site for rank in range(world_size)}
    assert len(names) == 1
