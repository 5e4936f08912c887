"""The backend beside Inductor: same modes, options and code; our pass only there."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

import dcp_inductor
from dcp_inductor import config
from dcp_inductor.fx import chain, report
from dcp_inductor.fx.dcp_pass import DcpPass
from tests.fx.models import fake_group, merge, merge_inputs, plain

HOOK = "post_grad_custom_pre_pass"


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with fake_group():
        yield


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The knobs as each run of our pass sees them."""
    seen: list[dict[str, Any]] = []
    original = DcpPass.__call__

    def watched(
        self: DcpPass, graph: torch.fx.Graph, is_inference: bool = True
    ) -> None:
        seen.append(config.snapshot())
        original(self, graph, is_inference)

    monkeypatch.setattr(DcpPass, "__call__", watched)
    return seen


class Recorder(CustomGraphPass):
    """Somebody else's pass: notes which ops it sees."""

    def __init__(self, identity: str = "recorder") -> None:
        self.identity = identity
        self.graphs: list[set[str]] = []
        self.settings: list[tuple[Any, ...]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs.append({str(node.target) for node in graph.nodes})
        self.settings.append(
            (
                inductor_config.triton.cudagraphs,
                inductor_config.max_autotune,
                inductor_config.coordinate_descent_tuning,
                inductor_config.epilogue_fusion,
            )
        )

    def uuid(self) -> str:
        return self.identity


def compile_plain(backend: str = "dcp_inductor", **how: Any) -> torch.Tensor:
    x, weight = torch.ones(4, 8), torch.ones(8, 8)
    # A function of its own each time, since compiled code is kept per function.
    return torch.compile(lambda x, w: plain(x, w), backend=backend, **how)(x, weight)


def error_of(**how: Any) -> str:
    with pytest.raises(BackendCompilerFailed) as caught:
        compile_plain(**how)
    return str(caught.value)


@pytest.mark.parametrize(
    "mode",
    ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
)
def test_a_mode_means_what_it_means_to_inductor(mode: str) -> None:
    seen = []
    for backend in ("inductor", "dcp_inductor"):
        recorder = Recorder()
        with inductor_config.patch({HOOK: recorder}):
            result = compile_plain(backend, mode=mode)
        torch.testing.assert_close(result, plain(torch.ones(4, 8), torch.ones(8, 8)))
        seen.append(recorder.settings)
    assert seen[0] == seen[1]
    assert seen[0]
    assert seen[0][0][:2] == ("overhead" in mode or mode[-1] == "e", "max" in mode)


def test_options_of_both_kinds_reach_their_readers(
    passes: list[dict[str, Any]],
) -> None:
    recorder = Recorder()
    options = {"epilogue-fusion": False, HOOK: recorder, "dcp_inductor.max-tokens": 7}
    compile_plain(options=options)
    assert recorder.settings[0][3] is False
    assert [knobs["max_tokens"] for knobs in passes] == [7]
    assert config.max_tokens == 256


def test_a_mode_and_knobs_go_together_as_options(passes: list[dict[str, Any]]) -> None:
    recorder = Recorder()
    mode = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    compile_plain(options=mode | {HOOK: recorder, "dcp_inductor.max_tokens": 7})
    assert recorder.settings[0][:2] == (False, True)
    assert [knobs["max_tokens"] for knobs in passes] == [7]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"dcp_inductor.max_token": 1}, ("did you mean dcp_inductor.max_tokens",)),
        ({"max_tokens": 1}, ("did you mean dcp_inductor.max_tokens",)),
        (
            {"max_autotun": True},
            ("did you mean max_autotune,", "dcp_inductor.config.names()"),
        ),
        ({"zzz": 1}, ("unknown option 'zzz': The options are dcp_inductor.<knob>",)),
        (
            {"dcp_inductor.direct_combine": "on"},
            (
                "option 'dcp_inductor.direct_combine': expected one of 'auto'",
                "got 'on'",
            ),
        ),
        ({"mode": "max-autotune"}, ("unknown option 'mode': give a mode's options",)),
        ({"dcp_inductor.enable": 1}, ("expected True or False, got 1",)),
        ({"max_autotune": 3}, ("max_autotune, got int should be bool",)),
    ],
)
def test_a_wrong_option_is_an_error_that_helps(
    options: dict[str, Any], parts: tuple[str, ...]
) -> None:
    message = error_of(options=options)
    assert [part for part in parts if part not in message] == []


def test_an_unknown_mode_is_an_error() -> None:
    assert "Unrecognized mode=fast" in error_of(mode="fast")


def test_code_without_a_site_is_inductors_own() -> None:
    x, weight = torch.randn(33, 65), torch.randn(65, 65)
    codes = []
    for backend in ("inductor", "dcp_inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, w: plain(x, w), backend=backend)
        result, code = run_and_get_code(compiled, x, weight)
        torch.testing.assert_close(result, plain(x, weight))
        # A running number of the compilation stands on top.
        codes.append([re.sub(r"AOT ID: \['\d+_", "AOT ID: ['_", text) for text in code])
    assert codes[0] == codes[1]
    assert len(codes[0]) == 1


def test_the_pass_costs_nothing_where_there_is_no_site() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        for step in range(40):
            x = torch.softmax(x, dim=-1) * step + x.sin().mean()
        return x

    spent = 0.0

    class Timed(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            nonlocal spent
            start = time.perf_counter()
            ours = DcpPass()
            assert ours.uuid()
            ours(graph)
            spent = time.perf_counter() - start

        def uuid(self) -> None:
            return None

    DcpPass().uuid()  # reads the sources, once per process
    start = time.perf_counter()
    torch.compile(model, options={HOOK: Timed()})(torch.randn(64, 64))
    total = time.perf_counter() - start
    assert 0 < spent < 0.01 * total


def test_another_pass_in_the_hook_runs_first_and_once(passes: list[Any]) -> None:
    recorder = Recorder()
    with inductor_config.patch({HOOK: recorder}):
        torch.compile(merge, backend="dcp_inductor")(*merge_inputs())
        assert inductor_config.post_grad_custom_pre_pass is recorder
    assert len(recorder.graphs) == len(passes) == 1
    assert "_c10d_functional.reduce_scatter_tensor.default" in recorder.graphs[0]
    assert counters["dcp_inductor"]["rewritten"] == 1


def test_a_chain_flattens_and_holds_one_of_ours() -> None:
    first, last = Recorder("a"), DcpPass({"max_tokens": 3})
    inner = chain.append(first, DcpPass())
    assert isinstance(inner, chain.PassChain)
    outer = chain.append([inner, None], last)
    assert isinstance(outer, chain.PassChain)
    assert outer.passes == (first, last)
    assert outer.uuid() != inner.uuid()
    assert chain.append(None, last) is chain.append(DcpPass(), last) is last


@pytest.mark.skipif(
    chain.InferenceAwarePass is CustomGraphPass, reason="torch 2.11 tells no pass"
)
def test_a_chain_tells_passes_whether_it_is_inference() -> None:
    seen: list[bool] = []

    class Aware(chain.InferenceAwarePass):
        def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
            seen.append(is_inference)

        def uuid(self) -> str:
            return "aware"

    weight = torch.ones(8, 8, requires_grad=True)
    options = {HOOK: Aware()}
    for inputs in ((torch.ones(4, 8), weight.detach()), (torch.ones(4, 8), weight)):
        compiled = torch.compile(
            lambda x, w: plain(x, w), backend="dcp_inductor", options=options
        )
        compiled(*inputs)
    assert seen == [True, False]


def test_other_backends_never_meet_the_pass(passes: list[Any]) -> None:
    compile_plain()
    assert len(passes) == 1
    for _ in range(2):
        compile_plain("inductor")
        torch.compile(merge, backend="inductor")(*merge_inputs())
        assert (len(passes), inductor_config.post_grad_custom_pre_pass) == (1, None)
        error_of(options={"zzz": 1})  # nor after a failed compilation


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_a_site_is_rewritten_whatever_is_symbolic(dynamic: bool | None) -> None:
    compiled = torch.compile(merge, backend="dcp_inductor", dynamic=dynamic)
    for num_tokens in (3, 5, 1):
        assert compiled(*merge_inputs(num_tokens)).shape == (4, num_tokens, 16)
    graphs = counters["stats"]["unique_graphs"]
    assert counters["dcp_inductor"]["rewritten"] == graphs


@pytest.mark.parametrize("how", ["option", "config"])
def test_disabled_means_plain_inductor(how: str, passes: list[Any]) -> None:
    if how == "option":
        compile_plain(options={"dcp_inductor.enable": False})
    else:
        with config.patch(enable=False):
            compile_plain()
    assert passes == []


def test_an_option_beats_the_config(passes: list[dict[str, Any]]) -> None:
    with config.patch(enable=False, max_tokens=9):
        compile_plain(options={"dcp_inductor.enable": True})
        compile_plain(
            options={"dcp_inductor.enable": True, "dcp_inductor.max_tokens": 11}
        )
    assert [(knobs["enable"], knobs["max_tokens"]) for knobs in passes] == [
        (True, 9),
        (True, 11),
    ]


def test_options_hold_whenever_the_compiled_model_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dcp_inductor.runtime import kernels

    limits: list[tuple[int, float]] = []
    original = kernels.a2a_lse_reduce

    def watched(*args: Any, **kwargs: Any) -> Any:
        limits.append((config.max_tokens, config.timeout_s))
        return original(*args, **kwargs)

    monkeypatch.setattr(kernels, "a2a_lse_reduce", watched)
    options = {"dcp_inductor.max_tokens": 5, "dcp_inductor.timeout_s": 3}
    bounded = torch.compile(merge, backend="dcp_inductor", options=options)
    free = torch.compile(lambda o, lse: merge(o, lse), backend="dcp_inductor")
    for _ in range(2):
        bounded(*merge_inputs())
        with config.patch(timeout_s=8):
            bounded(*merge_inputs())
            free(*merge_inputs())
    assert limits == [(5, 3.0), (5, 3.0), (256, 8.0)] * 2


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_compilation_runs_no_exchange(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exchange that autotuning ran on one rank would leave its peers behind."""
    from dcp_inductor.runtime import kernels

    calls: list[str] = []
    original = kernels.a2a_lse_reduce

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append("a2a_lse_reduce")
        return original(*args, **kwargs)

    def model(o: torch.Tensor, lse: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return merge(o, lse).reshape(-1, 64) @ w

    monkeypatch.setattr(kernels, "a2a_lse_reduce", watched)
    compiled = torch.compile(model, backend="dcp_inductor", mode=mode)
    inputs = (*merge_inputs(4), torch.randn(64, 64))
    for runs in (1, 2):
        compiled(*inputs)
        assert len(calls) == runs


def test_reset_reaches_inductors_graph_trees() -> None:
    compile_plain(mode="reduce-overhead")
    torch._dynamo.reset()  # calls the backend's reset()
    compile_plain()


def test_reports_reach_only_who_collects() -> None:
    compile_merge: Callable[..., Any] = torch.compile(merge, backend="dcp_inductor")
    with report.collect() as graphs:
        compile_merge(*merge_inputs())
    assert [(graph.found, graph.rewritten) for graph in graphs] == [(1, 1)]
    assert re.search(r"models\.py:\d+", graphs[0].sites[0].source)
    assert dcp_inductor.DcpPass is DcpPass
