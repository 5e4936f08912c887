"""The micro-batch that the current thread works on; each has workspaces of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dcp_inductor import config

_state = threading.local()


def current() -> int:
    """The micro-batch of this thread, 0 unless it is within :func:`ubatch`."""
    return getattr(_state, "index", 0)


@contextmanager
def ubatch(index: int) -> Iterator[None]:
    """Run the exchanges of this thread in the workspaces of micro-batch ``index``.

    Raises:
        ValueError: ``index`` is not within ``config.num_ubatches``.
    """
    if not 0 <= index < config.num_ubatches:
        raise ValueError(
            "expected a micro-batch below config.num_ubatches = "
            f"{config.num_ubatches}, got "
            f"{index}; set DCP_INDUCTOR_NUM_UBATCHES before the first exchange"
        )
    previous = current()
    _state.index = index
    try:
        yield
    finally:
        _state.index = previous
