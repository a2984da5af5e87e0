"""The guard that admits one thread at a time to a sharded model."""

from __future__ import annotations

import threading

import pytest

from shardwell.module.passes import ThreadGuard
from shardwell_wire.errors import UsageError


def test_thread_waits_for_one_that_has_not_noted_itself_yet() -> None:
    """Between acquiring the lock and noting the holder, the former holder is noted."""
    guard = ThreadGuard(lambda: None)
    assert guard.enter()
    guard.lock.release()
    acquired, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        guard.lock.acquire()
        acquired.set()
        assert go_on.wait(10)
        guard.lock.release()

    other = threading.Thread(target=hold)
    other.start()
    assert acquired.wait(10)
    timer = threading.Timer(0.1, go_on.set)
    timer.start()
    assert guard.enter(), "no error that names this thread twice"
    guard.lock.release()
    for thread in (other, timer):
        thread.join(10)


def test_error_names_the_thread_that_noted_itself() -> None:
    guard = ThreadGuard(lambda: None)
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with guard:
            entered.set()
            assert go_on.wait(10)

    other = threading.Thread(target=hold, name="other")
    other.start()
    assert entered.wait(10)
    with pytest.raises(UsageError, match="while thread 'other' is using it"):
        guard.enter()
    go_on.set()
    other.join(10)


def test_lock_of_a_thread_that_ended_in_a_use_is_replaced() -> None:
    guard = ThreadGuard(lambda: None)
    other = threading.Thread(target=guard.enter)
    other.start()
    other.join(10)
    assert guard.enter()
    guard.lock.release()
