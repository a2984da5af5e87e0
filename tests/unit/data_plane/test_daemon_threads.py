"""Tests of background threads: calls start in order, none is lost, and the process exits without waiting."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from shardwell.data_plane.transfers import DaemonThreads
from tests.support.cluster import wait_until
from tests.support.processes import ROOT

INTERRUPTED = """
import atexit, threading
from shardwell.data_plane.transfers import DaemonThreads

started = threading.Event()

def wait_for_ever():
    started.set()
    threading.Event().wait()

atexit.register(print, "closed at exit")
DaemonThreads(1, "waiting").submit(wait_for_ever)
started.wait()
raise KeyboardInterrupt
"""


@pytest.fixture
def threads() -> Iterator[DaemonThreads]:
    with DaemonThreads(3, "test") as made:
        yield made


def test_futures_have_results_and_errors(threads: DaemonThreads) -> None:
    assert threads.submit(divmod, 7, 2).result(20) == (3, 1)
    assert threads.submit(sorted, [1, 2], reverse=True).result(20) == [2, 1]
    assert isinstance(threads.submit(divmod, 7, 0).exception(20), ZeroDivisionError)


def test_calls_start_in_order() -> None:
    started = list[int]()
    with DaemonThreads(1, "test") as threads:
        for number in range(50):
            threads.submit(started.append, number)
    assert started == list(range(50))


def test_calls_in_flight_do_not_exceed_the_threads(threads: DaemonThreads) -> None:
    gate, started = threading.Event(), threading.Semaphore(0)

    def call() -> None:
        started.release()
        assert gate.wait(20)

    calls = [threads.submit(call) for _ in range(20)]
    assert all(started.acquire(timeout=20) for _ in range(3))
    assert not started.acquire(timeout=0.05)
    gate.set()
    for each in calls:
        each.result(20)


def test_idle_thread_is_reused(threads: DaemonThreads) -> None:
    for _ in range(20):
        threads.submit(int).result(20)
        wait_until(lambda: threads._idle_count == 1, "the thread is idle again")
    assert len(threads._threads) == 1


def test_existing_threads_run_all_calls_at_the_thread_limit(
    threads: DaemonThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    first = threads.submit(gate.wait, 20)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    # No further thread can start, so the existing thread must run this call too.
    second = threads.submit(int)
    gate.set()
    assert first.result(20) and second.result(20) == 0
    threadless = DaemonThreads(3, "threadless")
    with pytest.raises(RuntimeError, match="can't start"):
        threadless.submit(int)


def test_shutdown_runs_or_cancels_waiting_calls_and_ends_threads() -> None:
    for cancel in (False, True):
        threads, gate, started = DaemonThreads(1, "test"), threading.Event(), threading.Event()
        running = threads.submit(lambda: started.set() or gate.wait(20))  # noqa: B023
        assert started.wait(20)
        waiting = threads.submit(int)
        threads.shutdown(wait=False, cancel_futures=cancel)
        with pytest.raises(RuntimeError, match="shut down"):
            threads.submit(int)
        threads.join(0.01)
        assert threads._threads[0].is_alive(), "a call is running"
        gate.set()
        threads.join(20)
        assert not threads._threads[0].is_alive() and running.result(0)
        if cancel:
            with pytest.raises(CancelledError):
                waiting.result(0)
        else:
            assert waiting.result(0) == 0


def test_process_exits_without_waiting_for_the_threads() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout == "closed at exit\n" and "KeyboardInterrupt" in ended.stderr
