"""``torch.compile(model, backend="dcp_inductor")``: Inductor with our pass chained in.

What Inductor does stays Inductor's: the class that serves ``backend="inductor"`` parses
modes and options and compiles, under a config patch that ends with the call. What is
added is one pass in ``post_grad_custom_pre_pass``, after whatever sits there already.

torch._inductor is imported when something is compiled, not before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dcp_inductor import config, votes

if TYPE_CHECKING:
    from torch.fx import GraphModule

_HOOK = "post_grad_custom_pre_pass"
_PREFIX = "dcp_inductor."


def dcp_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph with Inductor and the DCP rewrite.

    Args:
        gm: graph from Dynamo; owned by this call.
        example_inputs: its inputs, real or fake.
        mode: "default", "reduce-overhead", "max-autotune" or
            "max-autotune-no-cudagraphs"; means what it means to Inductor. torch.compile
            takes no options beside it, where ``torch._inductor.list_mode_options(mode)
            | {...}`` says the same.
        options: Inductor's options, and the knobs of ``dcp_inductor.config`` as
            ``"dcp_inductor.<knob>"``. A knob given here beats config and environment,
            both while compiling and whenever the result runs.
        name: of the compiled region; newer torch passes it.

    Raises:
        ValueError: an unknown option, with the names that look like it, or a value that
            the knob cannot take.
        RuntimeError: an unknown mode, or an Inductor option of the wrong type.
    """
    overrides, inductor_options = _split(options or {})
    inductor = _inductor(mode, inductor_options)
    if name is not None:
        inductor.name = name
    if not config.snapshot(overrides)["enable"]:
        return inductor(gm, example_inputs)

    from torch._inductor import config as inductor_config

    from dcp_inductor.fx import chain, report
    from dcp_inductor.fx.dcp_pass import DcpPass, places_of

    present = inductor.config.get(_HOOK, getattr(inductor_config, _HOOK))
    inductor.config[_HOOK] = chain.append(
        present,
        DcpPass(overrides, places_of(gm)),
        cached=not report.collecting(),
    )
    with config.arguments(overrides):
        votes.reconsider()
        compiled = inductor(gm, example_inputs)
    return _with_arguments(compiled, overrides)


def _reset() -> None:
    """What torch._dynamo.reset() asks of a backend; the same that Inductor does."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


dcp_inductor.compiler_name = "dcp_inductor"  # type: ignore[attr-defined]
dcp_inductor.reset = _reset  # type: ignore[attr-defined]


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our options, checked and by knob, and the rest."""
    ours: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in options.items():
        name = key.replace("-", "_")  # as torch does
        if not name.startswith(_PREFIX):
            rest[key] = value
        elif (knob := name.removeprefix(_PREFIX)) in config.names():
            ours[knob] = config.check(knob, value, f"option {key!r}")
        else:
            raise ValueError(_unknown_option(key))
    return ours, rest


def _inductor(mode: str | None, options: dict[str, Any]) -> Any:
    """The callable that ``torch.compile(backend="inductor")`` would use."""
    try:
        return torch._TorchCompileInductorWrapper(mode, options, None)
    except RuntimeError:
        # torch's answer to an unknown option is a list of all 600.
        known = _inductor_names()
        for key in options:
            if key.replace("-", "_") not in known:
                raise ValueError(_unknown_option(key)) from None
        raise


def _inductor_names() -> list[str]:
    from torch._inductor import list_options

    return list_options()


def _unknown_option(key: str) -> str:
    spellings = {name: name for name in _inductor_names()}
    for knob in config.names():
        spellings[knob] = _PREFIX + knob
    # All knobs look alike with the prefix, so names are compared without.
    near = config.near_names(key.removeprefix(_PREFIX).replace("-", "_"), spellings)
    if key == "mode":
        near = "give a mode's options, torch._inductor.list_mode_options(mode)."
    return (
        f"unknown option {key!r}: {near + ' ' if near else ''}The options are "
        f"{_PREFIX}<knob> for each of dcp_inductor.config.names(), and those of "
        "torch._inductor.list_options()"
    )


def _with_arguments(
    compiled: Callable[..., Any], overrides: Mapping[str, Any]
) -> Callable[..., Any]:
    """The compiled graph, run with the options that it was compiled with."""
    if not overrides or not callable(compiled):
        return compiled

    def run(*args: Any) -> Any:
        with config.arguments(overrides):
            return compiled(*args)

    # Dynamo would follow _torchdynamo_orig_callable past this function to ``compiled``.
    for key, value in vars(compiled).items():
        if not key.startswith("_torchdynamo") and key != "__wrapped__":
            setattr(run, key, value)
    return run
