"""Latency of the exchanges between GPUs: one process each, NCCL, captured graphs.

Every variant's result is compared with the reference before its time counts. The
variants take turns; a time is the slowest rank's (t_24 - t_4) / 20, of medians. Floors
stand beside: an empty launch, and the bytes that a rank receives over what a copy from
a peer reaches while all ranks copy.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from dcp_inductor import config, ops, reference
from dcp_inductor.bench import four_launch, replays, variants
from dcp_inductor.bench.cpu import DTYPES

_KV_ROWS = (1024, 4096)  # chunks of a long context, besides the token counts
_COPY_BYTES = 512 << 20
_LIMIT_S = 420.0

Row = dict[str, Any]


def refusal(options: argparse.Namespace) -> str:
    """Why this machine cannot run it, or ''."""
    count = torch.cuda.device_count()
    if count < options.ranks or options.ranks < 2:
        return (
            f"expected 2 or more --ranks and a GPU for each, got {options.ranks} and "
            f"{count} GPUs; --virtual-ranks shares one GPU"
        )
    return ""


def run(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Rows of all ops, token counts and variants; and what they depend on.

    Raises:
        RuntimeError: the ranks did not finish within seven minutes.
    """
    with tempfile.TemporaryDirectory(prefix="dcp-bench-") as name:
        directory = Path(name)
        major, minor = torch.cuda.get_device_capability()
        library = four_launch.build(directory, f"sm_{major}{minor}")
        context = mp.spawn(
            _work, args=(options, name, library), nprocs=options.ranks, join=False
        )
        deadline = time.monotonic() + _LIMIT_S
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise RuntimeError(f"the ranks did not finish within {_LIMIT_S:g} s")
        every = [
            json.loads((directory / f"{rank}.json").read_text())
            for rank in range(options.ranks)
        ]
    rows = []
    for same_row in zip(*(said["rows"] for said in every), strict=True):
        times = [row["us"] for row in same_row]
        slowest = None if None in times else round(max(times), 3)
        rows.append({**same_row[0], "us": slowest})
    return rows, {**_machine(), **every[0]["floors"]}


def table(rows: list[Row], machine: dict[str, Any]) -> str:
    """The rows for people: a line for each op and T, a column for each variant."""
    lines = [", ".join(f"{name}: {value}" for name, value in machine.items())]
    for op in dict.fromkeys(row["op"] for row in rows):
        mine = [row for row in rows if row["op"] == op]
        names = list(dict.fromkeys(row["variant"] for row in mine))
        first = mine[0]
        lines += ["", f"{op}, N = {first['N']}, H = {first['H']}, D = {first['D']}: us"]
        lines.append(f"{'T':>6}{'floor':>10}" + "".join(f"{n[:18]:>20}" for n in names))
        for tokens in dict.fromkeys(row["T"] for row in mine):
            here = {row["variant"]: row for row in mine if row["T"] == tokens}
            floor = next(iter(here.values()))["floor_us"]
            cells = [here[n]["us"] if n in here else None for n in names]
            shown = ("-" if us is None else f"{us:.2f}" for us in cells)
            lines.append(
                f"{tokens:>6}{floor:>10.2f}" + "".join(f"{cell:>20}" for cell in shown)
            )
    failed = {(row["op"], row["variant"], row["error"]) for row in rows if row["error"]}
    lines += [": ".join(words) for words in sorted(failed)]
    return "\n".join(lines)


def _machine() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30)
        driver = told.stdout.split("\n")[0].strip()
    except OSError:
        driver = "unknown"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "nccl": nccl,
        "triton": importlib.metadata.version("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": _commit(),
        "method": "one process a GPU, NCCL group, captured graphs, variants in turns; "
        "(t_24 - t_4) / 20 of medians over 40 replays, slowest rank; inputs warm in L2",
    }


def _commit() -> str:
    """Of the checkout that this is part of, as git calls it."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=30,
            cwd=Path(__file__).parent,
        )  # fmt: skip
    except OSError:
        return "unknown"
    return told.stdout.strip() or "unknown"


def _work(rank: int, options: argparse.Namespace, name: str, library: str) -> None:
    torch.cuda.set_device(rank)
    directory = Path(name)
    store = dist.FileStore(str(directory / "store"), options.ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=options.ranks)
    hosts = dist.new_group(backend="gloo")
    with config.patch(
        max_tokens=max(options.tokens), direct_combine="force",
        direct_query_gather="force", direct_kv_gather="force",
    ):  # fmt: skip
        bench = _Bench(options, library, hosts)
        said = {"floors": bench.floors, "rows": list(bench.rows())}
    (directory / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier(hosts)
    dist.destroy_process_group()


class _Bench:
    """One rank's side of the benchmark."""

    def __init__(
        self, options: argparse.Namespace, library: str, hosts: dist.ProcessGroup
    ) -> None:
        assert dist.group.WORLD is not None
        self._options, self._hosts = options, hosts
        self._group = dist.group.WORLD
        self._size, self._rank = options.ranks, self._group.rank()
        self._marker = torch.zeros((1, 4), device="cuda")
        self._align()  # sets the group up, and builds the library
        baseline = None
        if library:
            rows = max(options.tokens) * options.heads // self._size
            baseline = four_launch.FourLaunch(
                library, self._group, rows, options.head_dim * 2
            )
        self._baseline = baseline
        self._exchanges = variants.Exchanges(self._group, baseline)
        self.floors = self._measure_floors()

    def rows(self) -> Iterator[Row]:
        """All ops and sizes."""
        options = self._options
        generator = torch.Generator("cuda").manual_seed(self._rank)
        dtype = DTYPES[options.dtype]
        size, heads = self._size, options.heads

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=generator)

        for tokens in options.tokens:
            output = draw(tokens, heads, options.head_dim).to(dtype)
            lse = draw(tokens, heads)
            row_bytes = options.head_dim * output.element_size() + 4
            received = tokens * heads // size * (size - 1) * row_bytes
            wanted = reference.a2a_lse_reduce(output, lse, self._group.group_name)[0]
            yield from self._compare(
                "a2a_lse_reduce", self._exchanges.combine(output, lse), wanted,
                {"T": tokens, "H": heads, "D": options.head_dim}, received,
            )  # fmt: skip
            query = draw(tokens, heads // size, options.query_dim).to(dtype)
            received = query.numel() * query.element_size() * (size - 1)
            wanted = reference.q_gather(query, self._group.group_name)
            yield from self._compare(
                "q_gather", self._exchanges.q_gather(query), wanted,
                {"T": tokens, "H": heads, "D": options.query_dim}, received,
            )  # fmt: skip
        for tokens in (*options.tokens, *_KV_ROWS):
            rows = draw(tokens, options.query_dim).to(dtype)
            received = rows.numel() * rows.element_size() * (size - 1)
            wanted = reference.kv_gather(rows, self._group.group_name)
            with config.patch(max_tokens=max(tokens, *options.tokens)):
                yield from self._compare(
                    "kv_gather", self._exchanges.kv_gather(rows), wanted,
                    {"T": tokens, "H": 1, "D": options.query_dim}, received,
                )  # fmt: skip

    def _compare(
        self,
        op: str,
        calls: variants.Variants,
        wanted: Tensor,
        shape: Row,
        received: int,
    ) -> list[Row]:
        graphs: dict[str, tuple[replays.Captured, replays.Captured]] = {}
        errors = dict.fromkeys(calls, "")
        for name, call in calls.items():
            problem = ""
            try:
                call()
                torch.cuda.synchronize()
                graphs[name] = replays.both(call)
                for captured in graphs[name]:
                    captured.graph.replay()
                    torch.cuda.synchronize()
                    if not _same(op, captured.result, wanted, self._size):
                        problem = "its result differs from the reference"
            except (RuntimeError, NotImplementedError) as error:
                problem = str(error).split("\n")[0][:200]
            # A variant is timed on all ranks or on none.
            said: list[str] = [""] * self._size
            dist.all_gather_object(said, problem, group=self._hosts)
            errors[name] = next(filter(None, said), "")
            if errors[name]:
                graphs.pop(name, None)
        times = replays.medians(graphs, self._align, self._meet)
        torch.cuda.synchronize()
        if self._baseline is not None and self._baseline.faulty():
            raise RuntimeError("a wait of the four-launch combine ran out")
        self._exchanges.close()
        floor = self.floors["empty_launch_us"] + received / (
            self.floors["peer_copy_gbps"] * 1e3
        )
        return [
            {
                "op": op, "variant": name, "N": self._size, **shape,
                "dtype": self._options.dtype, "us": times.get(name),
                "received_bytes": received, "floor_us": round(floor, 3),
                "error": errors[name],
            }
            for name in calls
        ]  # fmt: skip

    def _align(self) -> None:
        """No rank's stream goes on before the others' have come as far."""
        name = self._group.group_name
        ops.kv_gather(self._marker, torch.empty(0), name, site="bench")

    def _meet(self) -> None:
        dist.barrier(self._hosts)

    def _measure_floors(self) -> dict[str, float]:
        from dcp_inductor.runtime import symm_mem
        from dcp_inductor.triton import combine

        tensor = symm_mem.allocate(_COPY_BYTES, self._marker.device)
        mine = torch.randint(0, 255, tensor.shape, dtype=torch.uint8, device="cuda")
        tensor.copy_(mine)
        buffer = symm_mem.SymmetricBuffer(tensor, self._group)
        peer = buffer.of_peer((self._rank + 1) % self._size, 0, _COPY_BYTES)
        calls: dict[str, Callable[[], Any]] = {
            "empty": combine.launch_empty,
            "peer": lambda: mine.copy_(peer),
        }
        times: dict[str, float] = {}
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            graphs = {name: replays.both(call)}
            times |= replays.medians(graphs, self._align, self._meet)
        self._meet()
        buffer.close()
        return {
            "empty_launch_us": round(times["empty"], 3),
            "peer_copy_gbps": round(1e-3 * _COPY_BYTES / times["peer"], 1),
        }


def _same(op: str, got: Tensor, wanted: Tensor, size: int) -> bool:
    if op != "a2a_lse_reduce":
        return torch.equal(got, wanted)
    # The reduce-scatters round every rank's share before they add them.
    bound = 2 * size * torch.finfo(wanted.dtype).eps
    return torch.allclose(got, wanted, atol=bound, rtol=bound)
