"""Turn a decided candidate into a row of the report."""

from __future__ import annotations

import math

from dcp_inductor import config
from dcp_inductor.fx.candidate import Candidate
from dcp_inductor.fx.nodes import source_line, tensor_val, traced_size
from dcp_inductor.fx.report import SiteReport
from dcp_inductor.fx.rewrite import plan_merge
from dcp_inductor.fx.site import GatherSite, MergeSite, Reject

_OPS = {
    "combine": "a2a_lse_reduce",
    "query_gather": "q_gather",
    "kv_gather": "kv_gather",
}


def describe(candidate: Candidate, reject: Reject | None) -> SiteReport:
    """The candidate's row; ``reject`` None means that it was rewritten."""
    site = candidate.site
    return SiteReport(
        site=candidate.name,
        kind=candidate.kind,
        group_name=candidate.group.name,
        world_size=candidate.group.world_size,
        source=source_line(candidate.origin),
        family=_family(site),
        trials=candidate.trials,
        proof_ms=candidate.proof_ms,
        decision="rejected" if reject else "rewritten",
        code=reject.code if reject else "",
        reason=reject.reason if reject else "",
        op="" if reject else _OPS[candidate.kind],
        result="" if reject else _result(site),
        workspace_bytes=0 if reject else _workspace_bytes(site),
    )


def tell_view(row: SiteReport, reason: str, device: str) -> None:
    """Say in a query gather's row where its result lies; ``reason`` "": in place."""
    if reason:
        row.result += f", copied out: {reason}"
        return
    row.op = "q_gather_view"
    row.result += (
        ", copied out: CPUs read no workspace in place"
        if device == "cpu"
        else ", read in the workspace unless rows are few"
    )


def _family(site: MergeSite | GatherSite | None) -> str:
    if site is None:
        return "merge by log-sum-exp?"
    steps: list[str] = []
    for collective in site.region.collectives:
        step = collective.kind
        if collective.kind == "all_reduce":
            step = f"all_reduce {collective.reduce_op}"
        if step not in steps:
            steps.append(step)
    text = " + ".join(steps)
    if isinstance(site, MergeSite):
        hypothesis = site.proof.hypothesis
        text += f", {hypothesis.kind}, base {'e' if hypothesis.is_base_e else '2'}"
    return text


def _result(site: MergeSite | GatherSite | None) -> str:
    if not isinstance(site, MergeSite):
        return "all ranks' rows" if site and site.kind == "kv_gather" else "all heads"
    names = {
        "heads": "own heads",
        "tokens": "own tokens",
        "none": "all heads",
    }
    text = names[plan_merge(site).scatter]
    if any(e.what == "lse" for e in site.proof.exits):
        text += " and LSE"
    return text


def _workspace_bytes(site: MergeSite | GatherSite | None) -> int:
    """Payload of two slots of ``max_tokens`` rows; headers and alignment are not
    counted. Of dynamic heads or features, as many as the graph was traced with; 0 where
    it does not say.
    """
    if site is None:
        return 0
    source = site.cut.partial_output if isinstance(site, MergeSite) else site.source
    value = tensor_val(source)
    assert value is not None
    sizes = [traced_size(size) for size in value.shape[1:]]
    row = value.dtype.itemsize * math.prod(sizes)
    if isinstance(site, MergeSite):
        row += 4 * math.prod(sizes[:-1])
    return 2 * config.max_tokens * row if all(sizes) else 0
