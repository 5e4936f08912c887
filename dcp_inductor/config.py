"""Every knob of dcp_inductor; the only file that reads the environment.

Precedence, highest first: an argument (``options={"dcp_inductor.<knob>": ...}``), then
``patch`` or an assignment (``dcp_inductor.config.<knob> = ...``), then the variable
``DCP_INDUCTOR_<KNOB>`` as it was at import, then the default below. A wrong value is a
``ValueError`` wherever it comes from; one in the environment, when the knob is read, so
that ``doctor`` can still say so. An assignment holds for every thread, ``patch`` for
the thread that calls it (with torch 2.11 for every thread).
"""

import contextlib
import contextvars
import difflib
import hashlib
import logging
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils import _config_module

if typing.TYPE_CHECKING:
    from torch.utils._config_typing import *  # noqa: F403

# Rewrite graphs at all. Off: the backend is plain Inductor.
enable: bool = True

# The merge of partial attention: "auto" rewrites where the direct op can run and falls
# back where it cannot, "force" raises where it cannot, "disable" keeps the collectives.
direct_combine: str = "auto"

# The same choice for the gather of the query heads.
direct_query_gather: str = "auto"

# The same choice for the gather of latent KV rows.
direct_kv_gather: str = "auto"

# Let attention read a gathered query where the peers put it, if the graph proves that a
# merge ends every use of it. Off: it is always copied out.
query_view: bool = True

# Rows (tokens) that a workspace holds. A call with more takes the plain collectives.
max_tokens: int = 256

# Seconds that a wait for a peer may last. Above a slow first compilation on that peer.
timeout_s: float = 60.0

# Independent slot sets for micro-batches that run on threads of their own.
num_ubatches: int = 1

# Let launches on GPUs take their place on the chip while the launch before them ends
# (programmatic dependent launch), and let the next one do so behind them. Off: for
# kernels of others that are launched so and read before they wait.
launch_overlap: bool = True

# Bytes of a rank's partial output up to which the merge on GPUs goes by marked words,
# and by tiles above. Default: all that was measured over NVLink (docs/benchmarks.md).
marked_bytes: int = 32 << 20

# Bytes that a rank receives up to which a gather on GPUs goes by packets, and by slices
# above; half as many where slices leave the result in place. Default: as measured.
packet_bytes: int = 640 << 10

# Let gathers on GPUs store to all ranks at once through NVLink multicast, where every
# rank has it. Off: it has been compiled and never run.
multicast: bool = False

_config_module.install_config_module(sys.modules[__name__])

# The machinery comes last: the installation takes every constant above it for a knob.
_MODES = ("auto", "force", "disable")
# What numbers may be at most: so that no size that is worked out from them overflows,
# and a group is set up in no time.
_MOST: dict[str, int] = {
    "max_tokens": (1 << 31) - 1,
    "timeout_s": 10**9,
    "num_ubatches": 64,
    "marked_bytes": 1 << 48,
    "packet_bytes": 1 << 48,
}
_this: Any = sys.modules[__name__]
_arguments: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "dcp_inductor_arguments", default=types.MappingProxyType({})
)
_patching: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "dcp_inductor_patching", default=False
)


def names() -> tuple[str, ...]:
    """All knobs, in the order of this file."""
    return tuple(_this._config)


def env_name(name: str) -> str:
    """The environment variable of a knob."""
    return f"DCP_INDUCTOR_{name.upper()}"


def setter(name: str) -> str:
    """Words for what sets the knob in this thread, or would."""
    if name in _arguments.get():
        return f"the option dcp_inductor.{name}"
    return f"dcp_inductor.config.{name} or {env_name(name)}"


def default(name: str) -> bool | int | float | str:
    """The value of a knob that nobody set."""
    return _this._config[name].default


def near_names(name: str, known: Iterable[str] | Mapping[str, str]) -> str:
    """``did you mean a, b?`` for the known names that look like ``name``, or "".

    A mapping gives, for each spelling to compare with, the name to show.
    """
    shown = known if isinstance(known, Mapping) else {each: each for each in known}
    near = difflib.get_close_matches(name, list(shown), n=3, cutoff=0.6)
    return (
        f"did you mean {', '.join({shown[each]: 0 for each in near})}?" if near else ""
    )


def check(name: str, value: Any, called: str = "") -> Any:
    """The value, if it is one that the knob can take.

    Args:
        name: a knob.
        value: what somebody wants it to be. An int is accepted for a float.
        called: how the caller spelled the knob, for the message.

    Raises:
        ValueError: of another type or out of range; says what was expected.
    """
    kind = type(default(name))
    if kind is bool:
        wanted, fits = "True or False", isinstance(value, bool)
    elif kind is str:
        wanted, fits = f"one of {', '.join(map(repr, _MODES))}", value in _MODES
    else:
        number = int if kind is int else (int, float)
        most = _MOST[name]
        wanted = f"a positive {'integer' if kind is int else 'number'} up to {most}"
        fits = isinstance(value, number) and not isinstance(value, bool)
        fits = fits and 0 < value <= most
    if not fits:
        called = called or f"dcp_inductor.config.{name}"
        raise ValueError(f"{called}: expected {wanted}, got {value!r}")
    return kind(value)


def _parse(name: str, text: str) -> Any:
    """The text of an environment variable as a value of the knob."""
    kind = type(default(name))
    if kind is bool:
        if text not in ("0", "1"):
            raise ValueError(f"{env_name(name)}: expected 0 or 1, got {text!r}")
        return text == "1"
    value: Any = text
    if kind is not str:
        with contextlib.suppress(ValueError):
            value = kind(text)
    return check(name, value, env_name(name))


@contextlib.contextmanager
def arguments(overrides: Mapping[str, Any]) -> Iterator[None]:
    """Let ``overrides`` (checked values by knob) beat everything else in this thread.

    The backend runs a compilation and every call of its result inside this, so that
    options given to torch.compile hold for that model and for no other.
    """
    token = _arguments.set({**_arguments.get(), **overrides})
    try:
        yield
    finally:
        _arguments.reset(token)


def read(name: str) -> Any:
    """The knob as it stands in this thread: ``getattr(config, name)``, but quicker.

    An exchange reads a knob within its few microseconds, and most knobs are never set.
    """
    overrides = _arguments.get()
    if name in overrides:
        return overrides[name]
    entry = _entries[name]
    override = entry.user_override
    if isinstance(override, contextvars.ContextVar):  # newer torch
        override = override.get()
    # A wrong variable is kept as a forced value, which the attribute raises for.
    if override is not _UNSET or entry.env_value_force is not _UNSET:
        return getattr(_this, name)
    base = entry.env_value_default
    return entry.default if base is _UNSET else base


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Give a variable that torch reads another value for a while."""
    saved = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if saved is None:
            del os.environ[name]
        else:
            os.environ[name] = saved


def environment_problems() -> dict[str, str]:
    """What is wrong with each variable of the environment that starts like ours."""
    problems = {}
    known = {env_name(name): name for name in names()}
    for variable, text in sorted(os.environ.items()):
        if variable in known and text:
            try:
                _parse(known[variable], text)
            except ValueError as error:
                problems[variable] = str(error)
        elif variable.startswith(env_name("")) and variable not in known:
            # By the knob, since what all of them start with makes every name near.
            knob = variable.removeprefix(env_name("")).lower()
            hint = near_names(knob, {name: env_name(name) for name in names()})
            hint = hint or f"expected one of {', '.join(known)}"
            problems[variable] = f"{variable} is no variable of dcp_inductor: {hint}"
    return problems


def snapshot(overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All knobs as they stand in this thread, with ``overrides`` on top of them."""
    return {name: getattr(_this, name) for name in names()} | dict(overrides or {})


class _Patch(_config_module.ContextDecorator):
    """torch's patch, all values checked before the first is set."""

    def __init__(self, patch: Any) -> None:
        self._inner = patch

    def __enter__(self) -> None:
        for name, value in self._inner.changes.items():
            getattr(_this, name)  # names the near ones if there is no such knob
            check(name, value)
        self._step(self._inner.__enter__)

    def __exit__(self, *error: object) -> None:  # type: ignore[override]
        self._step(lambda: self._inner.__exit__(*error))

    def _step(self, change: Callable[[], object]) -> None:
        patching = _patching.set(True)
        # torch saves and restores what it reads, which must not be an argument.
        outside = _arguments.set({})
        try:
            change()
        finally:
            _arguments.reset(outside)
            _patching.reset(patching)


class _Knobs(type(_this)):  # type: ignore[misc]
    """torch's config module with checked values and the argument layer."""

    def __getattr__(self, name: str) -> Any:
        overrides = _arguments.get()
        if name in overrides:
            return overrides[name]
        if name not in self._config and not name.startswith("_"):
            raise AttributeError(_unknown(name))
        if name in _wrong:
            raise ValueError(_wrong[name])
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._config:
            value = check(name, value)
            if _wrong.pop(name, None):
                self._config[name].env_value_force = _UNSET
            # Newer torch keeps an override to the thread that set it. Micro-batches run
            # on threads of their own and must see it, so it becomes the base value too.
            if not _patching.get():
                self._config[name].env_value_default = value
        elif not name.startswith("_"):
            raise AttributeError(_unknown(name))
        super().__setattr__(name, value)

    def patch(self, *args: Any, **kwargs: Any) -> _Patch:
        return _Patch(super().patch(*args, **kwargs))

    # torch caches these two per thread and would miss arguments and other threads.
    def get_config_copy(self) -> dict[str, Any]:
        return snapshot()

    def get_hash(self) -> bytes:
        return hashlib.sha256(repr(sorted(snapshot().items())).encode()).digest()


def _unknown(name: str) -> str:
    hint = near_names(name, names()) or f"the knobs are {', '.join(names())}"
    return f"dcp_inductor.config.{name} does not exist: {hint}"


types.ModuleType.__setattr__(_this, "__class__", _Knobs)
_entries: dict[str, Any] = _this._config
_UNSET: Any = _config_module._UNSET_SENTINEL

# Knobs whose variable holds what they cannot take.
_wrong: dict[str, str] = {}
_problems = environment_problems()
for _name in names():
    if env_name(_name) in _problems:
        _wrong[_name] = _problems.pop(env_name(_name))
        _entries[_name].env_value_force = None
    elif _text := os.environ.get(env_name(_name)):
        _entries[_name].env_value_default = _parse(_name, _text)
for _problem in _problems.values():
    logging.getLogger(__name__).warning("%s", _problem)
