"""A group's key-value store whose answers are waited for no longer than ``timeout_s``.

torch's client of a TCPStore waits for an answer without limit, so a process that holds
the store and is stopped, not ended, would stop all others.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from dcp_inductor import config

_IDLE_S = 5.0  # after which the thread that asks ends

_Request = tuple["concurrent.futures.Future[Any]", Callable[..., Any], tuple[Any, ...]]


class BoundedStore:
    """``set``, ``get`` and ``check`` of a store.

    Each raises ``DistNetworkError`` where there is no answer within
    ``config.timeout_s``, or the store has ended.

    Args:
        store: of a process group.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._asker = _Asker()

    def is_of(self, store: dist.Store) -> bool:
        """Whether this asks ``store``."""
        return self._store is store

    def within(self, prefix: str) -> BoundedStore:
        """The same store, all keys of which begin with ``prefix``."""
        inner = BoundedStore(dist.PrefixStore(prefix, self._store))
        inner._asker = self._asker
        return inner

    def set(self, key: str, value: str) -> None:
        """Store ``value`` under ``key``."""
        self._asker.ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._asker.ask(self._store.get, key)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._asker.ask(self._store.check, keys)


class _Asker:
    """Asks a store, one question after the other, on a thread that ends when idle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._late: concurrent.futures.Future[Any] | None = None

    def ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """The answer.

        Raises:
            DistNetworkError: there was none within ``config.timeout_s``.
        """
        limit_s = config.read("timeout_s")
        asked: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._late is not None and not self._late.done():
                # It would wait behind that one.
                raise dist.DistNetworkError("still no answer to an earlier question")
            # A forked child has no thread, and the queue may be in any state.
            if self._thread is None or not self._thread.is_alive():
                self._requests = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=self._serve, args=(self._requests,), daemon=True,
                    name="dcp_inductor store",
                )  # fmt: skip
                self._thread.start()
            self._requests.put((asked, question, arguments))
        try:
            return asked.result(limit_s)
        except concurrent.futures.TimeoutError:
            if asked.done():
                raise  # the store's own
            if not asked.cancel():
                self._late = asked
            raise dist.DistNetworkError(f"no answer within {limit_s:g} s") from None

    def _serve(self, requests: queue.SimpleQueue[_Request]) -> None:
        while True:
            try:
                asked, question, arguments = requests.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if requests.empty():
                        if self._requests is requests:
                            self._thread = None
                        return
                continue
            if not asked.set_running_or_notify_cancel():
                continue
            try:
                asked.set_result(question(*arguments))
            except BaseException as error:
                asked.set_exception(error)
            del asked, question, arguments
