"""The micro-batch that the current thread works on; each has workspaces of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _State(threading.local):
    index = 0
    inside = False


_state = _State()


def current() -> int:
    """The micro-batch of this thread, 0 unless it is within :func:`ubatch`."""
    return _state.index


def is_inside() -> bool:
    """Whether this thread is within :func:`ubatch`."""
    return _state.inside


@contextmanager
def ubatch(index: int) -> Iterator[None]:
    """Run the exchanges of this thread in the workspaces of micro-batch ``index``.

    A group has as many as ``config.num_ubatches`` said at its first exchange; one
    beyond them raises ValueError.
    """
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ValueError(f"expected a micro-batch, an integer from 0, got {index!r}")
    previous = _state.index, _state.inside
    _state.index, _state.inside = index, True
    try:
        yield
    finally:
        _state.index, _state.inside = previous


def within(held: int, group_name: str, way_on: str) -> int:
    """The micro-batch of this thread, which must be one of the ``held`` of the group.

    Raises:
        ValueError: it is not; the message ends with ``way_on``.
    """
    if _state.index < held:
        return _state.index
    raise ValueError(
        f"expected a micro-batch below {held}, which group '{group_name}' was set up "
        f"with, got {_state.index}. Set num_ubatches (DCP_INDUCTOR_NUM_UBATCHES) ahead "
        f"of the group's first exchange, or {way_on}"
    )
