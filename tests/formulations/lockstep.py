"""Runs one graph per rank in a single thread, all ranks in lockstep, collectives
simulated.

Each rank is a generator that stops at every exchange. An exchange completes when all
ranks of its group have stopped at one; ranks that meet in different ones, or never
meet, are an error at once, so that a wrong rewrite cannot hang. The graph ops of
dcp_inductor are computed here from their written contract alone, independently of the
package.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .tracing import Traced

functional = torch.ops._c10d_functional


# Options in which ranks may differ: data of the rank, or a name for messages.
_OWN_OPTIONS = ("splits", "site", "seq_lens", "query_start_loc")


class LockstepError(AssertionError):
    """Ranks met in different exchanges, or some never met."""


@dataclass
class _Exchange:
    """What a rank offers its group: one tensor list per call, and what must agree."""

    name: str
    group: str
    tensors: list[Tensor]
    options: dict[str, Any]
    many: bool = False

    def signature(self) -> tuple:
        shapes = tuple((tuple(t.shape[1:]), t.dtype) for t in self.tensors)
        agreed = {k: v for k, v in self.options.items() if k not in _OWN_OPTIONS}
        return self.name, shapes, tuple(sorted((k, str(v)) for k, v in agreed.items()))


_REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, n: x.sum(0),
    "avg": lambda x, n: x.sum(0) / n,
    "max": lambda x, n: x.amax(0),
    "min": lambda x, n: x.amin(0),
    "product": lambda x, n: x.prod(0),
}


def _reduce(tensors: list[Tensor], op: str) -> Tensor:
    return _REDUCTIONS[op](torch.stack(tensors), len(tensors))


def _all_to_all(exchanges: list[_Exchange]) -> list[Tensor]:
    pieces = [
        e.tensors[0].split([int(s) for s in e.options["splits"][1]], 0)
        for e in exchanges
    ]
    received = [torch.cat([p[r] for p in pieces], 0) for r in range(len(exchanges))]
    for e, x in zip(exchanges, received, strict=True):
        if sum(int(s) for s in e.options["splits"][0]) != x.shape[0]:
            raise LockstepError(
                f"all_to_all_single receives {x.shape[0]} rows, wants {e}"
            )
    return received


def _empty_rows(exchange: _Exchange) -> Tensor | None:
    seq_lens, start = exchange.options["seq_lens"], exchange.options["query_start_loc"]
    if seq_lens is None:
        return None
    tokens = torch.arange(exchange.tensors[0].shape[0])
    request = torch.searchsorted(start[1:].long(), tokens, right=True)
    padding = request >= len(seq_lens)
    return padding | (seq_lens[request.clamp(max=len(seq_lens) - 1)] == 0)


def _a2a_lse_reduce(exchanges: list[_Exchange]) -> list[tuple[Tensor, Tensor]]:
    options = exchanges[0].options
    n = len(exchanges)
    outputs = torch.stack([e.tensors[0].float() for e in exchanges])  # [N, T, H, D]
    lses = torch.stack([e.tensors[1].float() for e in exchanges])  # [N, T, H]
    for r, e in enumerate(exchanges):
        rows = _empty_rows(e)
        if rows is not None:
            lses[r, rows] = -math.inf
    scale = 1.0 if options["is_lse_base_on_e"] else math.log(2.0)
    lses = torch.where(lses.isnan() | (lses == math.inf), -math.inf, lses) * scale
    top = lses.amax(0)
    top = torch.where(top.isinf(), 0.0, top)
    weights = (lses - top).exp()
    total = weights.sum(0)
    weights = torch.where(total > 0, weights / total, 0.0)
    parts = torch.where(weights[..., None] > 0, weights[..., None] * outputs, 0.0)
    merged = parts[0]
    for part in parts[1:]:
        merged = merged + part
    lse = (total.log() + top) / scale
    dim = {"heads": 1, "tokens": 0, "none": None}[options["scatter"]]
    results = []
    for r, e in enumerate(exchanges):
        out, own_lse = merged, lse
        if dim is not None:
            sizes = [int(s) for s in options["split_sizes"]] or [
                merged.shape[dim] // n
            ] * n
            out, own_lse = merged.split(sizes, dim)[r], lse.split(sizes, dim)[r]
        out = out.to(options["output_dtype"] or e.tensors[0].dtype).contiguous()
        if options["full_lse"]:
            own_lse = lse
        if not options["return_lse"]:
            own_lse = lse.new_empty(0)
        results.append((out, own_lse.contiguous()))
    return results


def _complete(exchanges: list[_Exchange]) -> list[Any]:
    """Results of one exchange, by rank within its group."""
    name, options = exchanges[0].name, exchanges[0].options
    columns = list(zip(*(e.tensors for e in exchanges), strict=True))
    match name:
        case "all_gather_into_tensor":
            results = [[torch.cat(c, 0)] * len(exchanges) for c in columns]
        case "all_reduce":
            results = [
                [_reduce(list(c), options["op"])] * len(exchanges) for c in columns
            ]
        case "reduce_scatter_tensor":
            results = [
                _reduce(list(c), options["op"]).chunk(len(exchanges), 0)
                for c in columns
            ]
        case "broadcast":
            results = [[c[options["src"]]] * len(exchanges) for c in columns]
        case "all_to_all_single":
            results = [_all_to_all(exchanges)]
        case "q_gather" | "q_gather_view":
            whole = torch.cat(columns[0], 1)
            pad = max(options["padded_heads"] - whole.shape[1], 0)
            whole = torch.cat(
                [whole, whole.new_zeros(whole.shape[0], pad, *whole.shape[2:])], 1
            )
            results = [[whole] * len(exchanges)]
        case "kv_gather":
            results = [[torch.cat(columns[0], 0)] * len(exchanges)]
        case "a2a_lse_reduce":
            return _a2a_lse_reduce(exchanges)
        case _:
            raise LockstepError(f"no lockstep rule for {name}")
    by_rank = [list(c) for c in zip(*results, strict=True)]
    return by_rank if exchanges[0].many else [c[0] for c in by_rank]


def _named(node: fx.Node, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by schema name, defaults filled in."""
    bound = dict(kwargs)
    for i, argument in enumerate(node.target._schema.arguments):
        if i < len(args):
            bound[argument.name] = args[i]
        else:
            bound.setdefault(argument.name, argument.default_value)
    return bound


_FUNCTIONAL_OPTIONS = {
    "all_gather_into_tensor": (),
    "reduce_scatter_tensor": (("op", "reduce_op"),),
    "all_reduce": (("op", "reduce_op"),),
    "broadcast": (("src", "src"),),
    "all_to_all_single": (),
}


def _exchange_of(node: fx.Node, args: tuple, kwargs: dict) -> _Exchange | None:
    """The exchange that a node makes, or None for a node that a rank computes alone."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = node.target._schema.name
    if name.startswith("_c10d_functional::"):
        stem = name.removeprefix("_c10d_functional::")
        many = stem.endswith("_coalesced")
        stem = stem.removesuffix("_coalesced")
        if stem not in _FUNCTIONAL_OPTIONS:
            return None
        bound = _named(node, args, kwargs)
        tensors = list(bound["inputs"] if many else [bound["input"]])
        options = {key: bound[source] for key, source in _FUNCTIONAL_OPTIONS[stem]}
        if stem == "all_to_all_single":
            options["splits"] = (
                bound["output_split_sizes"],
                bound["input_split_sizes"],
            )
        return _Exchange(stem, _group_name(bound["group_name"]), tensors, options, many)
    if name.startswith("dcp_inductor::"):
        stem = name.removeprefix("dcp_inductor::")
        bound = _named(node, args, kwargs)
        bound.pop("token", None)
        if stem in ("q_gather", "q_gather_view"):
            return _Exchange(stem, bound.pop("group_name"), [bound.pop("query")], bound)
        if stem == "kv_gather":
            return _Exchange(stem, bound.pop("group_name"), [bound.pop("rows")], bound)
        if stem == "a2a_lse_reduce":
            tensors = [bound.pop("partial_output"), bound.pop("partial_lse")]
            return _Exchange(stem, bound.pop("group_name"), tensors, bound)
    return None


def _group_name(group: Any) -> str:
    return group if isinstance(group, str) else group.group_name


def _alone(node: fx.Node, args: tuple, kwargs: dict, accepted: frozenset[str]) -> Any:
    """Value of a node that needs no other rank."""
    target = node.target
    if target is functional.wait_tensor.default:
        return args[0]
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        if name == "dcp_inductor::order_after":
            return args[0]
        if name == "dcp_inductor::order_token":
            return torch.empty_like(args[1])
        if name == "dcp_inductor::site_guard":
            if args[2] in accepted:
                raise LockstepError(f"ranks disagree about site {args[2]}: {args[3]}")
            return torch.empty_like(args[0])
    return target(*args, **kwargs)


def _symbols(tensors: dict[fx.Node, Tensor]) -> dict[str, int]:
    """Value of each symbol, read off the sizes and strides of the inputs."""
    values: dict[str, int] = {}
    for node, tensor in tensors.items():
        fake = node.meta["val"]
        symbolic = (*fake.shape, *fake.stride(), fake.storage_offset())
        actual = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        for symbol, value in zip(symbolic, actual, strict=True):
            if isinstance(symbol, torch.SymInt):
                values.setdefault(str(symbol), value)
    return values


def _rank_steps(
    traced: Traced,
    module: fx.GraphModule,
    inputs: list[Tensor],
    accepted: frozenset[str],
) -> Generator[_Exchange, Any, list[Tensor]]:
    graph = module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    bound = {
        node: inputs[index]
        for node, index in zip(placeholders, traced.bindings, strict=True)
        if index is not None
    }
    symbols = _symbols(bound)
    views: dict[str, list[Tensor]] = {}
    values: dict[fx.Node, Any] = dict(bound)
    for node in placeholders:
        if node not in values:
            values[node] = symbols[str(node.meta["val"])]
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            values[node] = operator.attrgetter(node.target)(module)
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return list(args[0])
        exchange = _exchange_of(node, args, kwargs)
        if exchange is None:
            values[node] = _alone(node, args, kwargs, accepted)
        else:
            result = yield exchange
            if exchange.name in ("q_gather", "kv_gather"):
                result = (result, result.new_empty(0))
            elif exchange.name == "q_gather_view":
                result = (result.clone(), result.new_empty(0))
                views.setdefault(exchange.group, []).append(result[0])
            elif exchange.name == "a2a_lse_reduce":
                result = (*result, result[0].new_empty(0))
                # The peers may write there from now on.
                for view in views.pop(exchange.group, []):
                    view.fill_(torch.nan if view.is_floating_point() else -1)
            values[node] = result
    raise LockstepError("the graph has no output node")


def run_graphs(
    traced: list[Traced],
    modules: list[fx.GraphModule],
    inputs: list[list[Tensor]],
    accepted: Sequence[Collection[str]] = (),
) -> list[list[Tensor]]:
    """Outputs of ``modules[r]`` for every rank r, run together.

    ``accepted[r]`` are the sites that rank r rewrote; a guard for a site of a peer
    raises.

    Raises:
        LockstepError: the ranks' exchanges do not fit together.
    """
    sites = frozenset(site for own in accepted for site in own)
    runs = [
        _rank_steps(t, m, x, sites)
        for t, m, x in zip(traced, modules, inputs, strict=True)
    ]
    outputs: list[list[Tensor] | None] = [None] * len(runs)
    waiting: dict[int, _Exchange] = {}
    random_states = [
        torch.Generator().manual_seed(r).get_state() for r in range(len(runs))
    ]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for rank in range(len(runs)):
            _advance(runs, rank, None, waiting, outputs, random_states)
        while waiting:
            if not _complete_one(traced, runs, waiting, outputs, random_states):
                stuck = {r: (e.name, e.group) for r, e in waiting.items()}
                raise LockstepError(f"no exchange can complete; ranks wait in {stuck}")
    return outputs


def _advance(runs, rank, value, waiting, outputs, random_states) -> None:
    """Run a rank to its next exchange, with a random number generator of its own."""
    torch.set_rng_state(random_states[rank])
    try:
        waiting[rank] = runs[rank].send(value)
    except StopIteration as stop:
        outputs[rank] = stop.value
    random_states[rank] = torch.get_rng_state()


def _complete_one(traced, runs, waiting, outputs, random_states) -> bool:
    for rank, exchange in list(waiting.items()):
        members = traced[rank].groups[exchange.group]
        if not all(
            m in waiting and traced[m].groups.get(waiting[m].group) == members
            for m in members
        ):
            continue
        exchanges = [waiting.pop(m) for m in members]
        signatures = [e.signature() for e in exchanges]
        if any(s != signatures[0] for s in signatures):
            raise LockstepError(
                f"ranks {members} met in different exchanges: {signatures}"
            )
        for member, result in zip(members, _complete(exchanges), strict=True):
            _advance(runs, member, result, waiting, outputs, random_states)
        return True
    return False
