"""Background threads: calls begin in order, none is lost, and the process does not wait for them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from shardwell.data_plane.transfer_queue import DaemonThreads
from tests.support.cluster import wait_until
from tests.support.processes import ROOT

INTERRUPTED = """
import atexit, threading
from shardwell.data_plane.transfer_queue import DaemonThreads

begun = threading.Event()

def wait_for_ever():
    begun.set()
    threading.Event().wait()

atexit.register(print, "closed at exit")
DaemonThreads(1, "waiting").submit(wait_for_ever)
begun.wait()
raise KeyboardInterrupt
"""


@pytest.fixture
def threads() -> Iterator[DaemonThreads]:
    with DaemonThreads(3, "test") as made:
        yield made


def test_results_and_errors_come_back(threads: DaemonThreads) -> None:
    assert threads.submit(divmod, 7, 2).result(20) == (3, 1)
    assert threads.submit(sorted, [1, 2], reverse=True).result(20) == [2, 1]
    assert isinstance(threads.submit(divmod, 7, 0).exception(20), ZeroDivisionError)


def test_calls_begin_in_order() -> None:
    begun = list[int]()
    with DaemonThreads(1, "test") as threads:
        for number in range(50):
            threads.submit(begun.append, number)
    assert begun == list(range(50))


def test_no_more_calls_are_under_way_than_there_are_threads(threads: DaemonThreads) -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def call() -> None:
        begun.release()
        assert gate.wait(20)

    calls = [threads.submit(call) for _ in range(20)]
    assert all(begun.acquire(timeout=20) for _ in range(3))
    assert not begun.acquire(timeout=0.05)
    gate.set()
    for each in calls:
        each.result(20)


def test_a_thread_that_has_nothing_to_do_is_used_again(threads: DaemonThreads) -> None:
    for _ in range(20):
        threads.submit(int).result(20)
        wait_until(lambda: threads._idle_count == 1, "the thread has taken the result back")
    assert len(threads._threads) == 1


def test_where_the_system_gives_no_more_threads_those_there_are_do_it_all(
    threads: DaemonThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    first = threads.submit(gate.wait, 20)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    second = threads.submit(int)
    gate.set()
    assert first.result(20) and second.result(20) == 0
    nobody = DaemonThreads(3, "nobody")
    with pytest.raises(RuntimeError, match="can't start"):
        nobody.submit(int)


def test_after_shutdown_what_waits_is_done_or_cancelled_and_the_threads_end() -> None:
    for cancel in (False, True):
        threads, gate, begun = DaemonThreads(1, "test"), threading.Event(), threading.Event()
        under_way = threads.submit(lambda: begun.set() or gate.wait(20))  # noqa: B023
        assert begun.wait(20)
        waiting = threads.submit(int)
        threads.shutdown(wait=False, cancel_futures=cancel)
        with pytest.raises(RuntimeError, match="shut down"):
            threads.submit(int)
        threads.join(0.01)
        assert threads._threads[0].is_alive(), "a call is under way"
        gate.set()
        threads.join(20)
        assert not threads._threads[0].is_alive() and under_way.result(0)
        if cancel:
            with pytest.raises(CancelledError):
                waiting.result(0)
        else:
            assert waiting.result(0) == 0


def test_a_process_that_ends_does_not_wait_for_them() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout == "closed at exit\n" and "KeyboardInterrupt" in ended.stderr
