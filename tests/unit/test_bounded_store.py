"""A store's answers, and the lack of them."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch.distributed as dist

from dcp_inductor import bounded_store, config
from dcp_inductor.bounded_store import BoundedStore


class Stuck:
    """A store that answers no question before it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.asked: list[str] = []

    def check(self, keys: list[str]) -> bool:
        self.asked += keys
        self.go_on.wait(30)
        return True


def test_it_holds_what_the_store_holds() -> None:
    store = dist.HashStore()
    bounded = BoundedStore(store)
    assert not bounded.check(["a"])
    bounded.set("a", "1")
    assert bounded.check(["a"])
    assert bounded.get("a") == store.get("a") == b"1"
    inner = bounded.within("in")
    assert not inner.check(["a"])
    inner.set("a", "2")
    assert dist.PrefixStore("in", store).get("a") == b"2"
    assert bounded.get("a") == b"1"


def test_the_stores_own_errors_come_through() -> None:
    class Broken:
        def check(self, keys: list[str]) -> bool:
            raise AttributeError(f"no {keys}")

    bounded = BoundedStore(Broken())
    for key in ("a", "b"):  # which the thread outlives
        with pytest.raises(AttributeError, match=key):
            bounded.check([key])


def test_no_answer_is_an_error_and_no_question_waits_behind_it() -> None:
    store = Stuck()
    bounded = BoundedStore(store)
    with config.patch(timeout_s=0.2):
        with pytest.raises(dist.DistNetworkError, match=r"no answer within 0\.2 s"):
            bounded.check(["a"])
        start = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match="an earlier question"):
            bounded.check(["b"])
        assert time.monotonic() - start < 0.1
    store.go_on.set()
    deadline = time.monotonic() + 10
    while True:
        try:
            assert bounded.check(["c"])
            break
        except dist.DistNetworkError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert store.asked == ["a", "c"]


def test_the_thread_ends_when_idle_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded_store, "_IDLE_S", 0.05)
    before = threading.active_count()
    bounded = BoundedStore(dist.HashStore())
    bounded.set("a", "1")
    assert threading.active_count() == before + 1
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert bounded.get("a") == b"1"


def test_a_forked_child_asks_on_a_thread_of_its_own() -> None:
    bounded = BoundedStore(dist.HashStore())
    bounded.set("a", "1")
    child = os.fork()
    if child == 0:
        os._exit(0 if bounded.get("a") == b"1" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
