"""Judge a proven site: may it be rewritten, and is it worth it?

Only facts that are equal on all ranks decide here; a decision that depended on the rank
would leave the ranks with different exchanges.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from dcp_inductor import config
from dcp_inductor.fx.nodes import (
    is_view_like,
    reads_no_strides,
    size_name,
    tensor_val,
)
from dcp_inductor.fx.rewrite import gather_rows, merge_rows
from dcp_inductor.fx.site import GatherSite, MergeSite, Reject

_aten = torch.ops.aten
_POSITIVE = {
    _aten.exp.default,
    _aten.exp2.default,
    _aten.sigmoid.default,
    _aten._softmax.default,
}
_KEEP_SIGN = {
    _aten.sum.dim_IntList,
    _aten.amax.default,
    torch.ops.prims.convert_element_type.default,
    _aten._to_copy.default,
}
_PAYLOADS = (torch.float32, torch.bfloat16, torch.float16)
SWITCHES = {
    "combine": "direct_combine",
    "query_gather": "direct_query_gather",
    "kv_gather": "direct_kv_gather",
}


def forced(kind: str) -> bool:
    """Whether the user insists on the direct op for sites of this kind."""
    return bool(getattr(config, SWITCHES[kind]) == "force")


def judge(graph: Graph, site: MergeSite | GatherSite) -> Reject | None:
    """None if the site may be rewritten, else why not."""
    switch = SWITCHES[site.kind]
    exits = site.proof.exits if isinstance(site, MergeSite) else site.exits
    if any(not reads_no_strides(user) for found in exits for user in found.node.users):
        return Reject("strides", "a user reads the result by its strides")
    if getattr(config, switch) == "disable":
        return Reject("disabled", f"{switch} is set to 'disable'")
    if site.group.world_size < 2:
        return Reject("single_rank", "the group has one rank, so nothing is exchanged")
    if isinstance(site, MergeSite):
        return _judge_merge(graph, site)
    return _judge_gather(graph, site)


def _judge_merge(graph: Graph, site: MergeSite) -> Reject | None:
    payload = _val(site.cut.partial_output)
    if payload.dtype not in _PAYLOADS:
        return Reject(
            "dtype",
            f"the op merges in fp32, which would lose precision of {payload.dtype}",
        )
    for found in site.proof.exits:
        if _val(found.node).dtype == torch.float64:
            return Reject(
                "dtype", "the merged result is float64, the op accumulates in fp32"
            )
    if _reaches(site.cut.leaves, {e.node for e in site.proof.exits}):
        return Reject(
            "cycle", "an input of the merge depends on a result of the same merge"
        )
    if site.proof.hypothesis.kind == "sum" and not _is_positive(site.cut.statistics[0]):
        return Reject(
            "sign",
            "the weights may be negative, and an LSE stands for positive ones only",
        )
    return _too_many_rows(merge_rows(site))


def _judge_gather(graph: Graph, site: GatherSite) -> Reject | None:
    source = _val(site.source)
    result = _val(site.exits[0].node)
    joined = size_name(source.shape[-1] * site.group.world_size) if source.dim() else ""
    if (
        source.dim() == 2
        and result.dim() == 2
        and size_name(result.shape[-1]) == joined
    ):
        return Reject("feature_gather", "the gather joins features, not heads or rows")
    if _reaches((site.source,), {e.node for e in site.exits}):
        return Reject(
            "cycle", "the gathered tensor depends on the result of the gather"
        )
    return _too_many_rows(gather_rows(site)) if source.dim() > 1 else None


def _too_many_rows(size: int | torch.SymInt) -> Reject | None:
    name = size_name(size)
    if name.isdigit() and int(name) > config.max_tokens:
        return Reject(
            "over_capacity",
            f"{name} rows exceed max_tokens={config.max_tokens}; "
            f"raise {config.setter('max_tokens')}, or mark the dim dynamic, whose size "
            "is judged at every call",
            rows=name,
        )
    return None


def _is_positive(node: Node) -> bool:
    """Whether the node is made of exponentials, which are never negative."""
    while is_view_like(node) or (
        node.op == "call_function" and node.target in _KEEP_SIGN
    ):
        source = node.args[0]
        if not isinstance(source, Node):
            return False
        node = source
    return node.op == "call_function" and node.target in _POSITIVE


def _reaches(leaves: tuple[Node, ...], results: set[Node]) -> bool:
    """Whether any leaf depends on any of the results."""
    stack, seen = list(leaves), set(leaves)
    while stack:
        node = stack.pop()
        if node in results:
            return True
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return False


def _val(node: Node) -> torch.Tensor:
    value = tensor_val(node)
    assert value is not None
    return value
