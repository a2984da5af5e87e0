"""Fetches from one server: few at once, in order, none forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from shardwell.data_plane.fetch_queue import FetchQueue, Outcome
from shardwell_wire.errors import UnavailableError

MIB = 1 << 20


def submit(queue: FetchQueue, size_bytes: int, work: Callable[[], int]) -> Future[int]:
    future: Future[int] = Future()

    def done(outcome: Outcome) -> None:
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    queue.submit(size_bytes, work, done)
    return future


class Fetches:
    """Fetches that begin when the queue says so and end when the test does."""

    def __init__(self, queue: FetchQueue) -> None:
        self.begun: list[int] = []
        self._queue = queue
        self._gates: dict[int, threading.Event] = {}
        self._changed = threading.Condition()

    def ask(self, number: int, size_bytes: int) -> Future[int]:
        self._gates[number] = threading.Event()

        def work() -> int:
            with self._changed:
                self.begun.append(number)
                self._changed.notify_all()
            assert self._gates[number].wait(20)
            return number

        return submit(self._queue, size_bytes, work)

    def finish(self, number: int) -> None:
        self._gates[number].set()

    def await_begun(self, *numbers: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: sorted(self.begun) == sorted(numbers), 20), self.begun


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_large_fetches_go_two_at_a_time_and_in_order(threads: ThreadPoolExecutor) -> None:
    fetches = Fetches(FetchQueue(threads))
    asked = [fetches.ask(number, 100 * MIB) for number in range(4)]
    fetches.await_begun(0, 1)
    fetches.finish(1)
    fetches.await_begun(0, 1, 2)
    for number in (0, 2):
        fetches.finish(number)
    fetches.await_begun(0, 1, 2, 3)
    fetches.finish(3)
    assert [future.result(20) for future in asked] == [0, 1, 2, 3]


def test_small_fetches_are_more_at_once(threads: ThreadPoolExecutor) -> None:
    fetches = Fetches(FetchQueue(threads))
    asked = [fetches.ask(number, 3 * MIB) for number in range(3)] + [fetches.ask(3, 0)]
    fetches.await_begun(0, 1)  # the third would be more than the window, and the last does not overtake it
    fetches.finish(0)
    fetches.await_begun(0, 1, 2, 3)
    for number in (1, 2, 3):
        fetches.finish(number)
    assert [future.result(20) for future in asked] == [0, 1, 2, 3]


def test_a_fetch_that_fails_makes_room_for_the_next(threads: ThreadPoolExecutor) -> None:
    queue = FetchQueue(threads)

    def fail() -> int:
        raise ValueError("no")

    failing = [submit(queue, 100 * MIB, fail) for _ in range(5)]
    assert submit(queue, 100 * MIB, lambda: 7).result(20) == 7
    assert all(isinstance(future.exception(20), ValueError) for future in failing)


def test_closing_fails_what_waits_and_nothing_else(threads: ThreadPoolExecutor) -> None:
    queue = FetchQueue(threads)
    fetches = Fetches(queue)
    asked = [fetches.ask(number, 100 * MIB) for number in range(4)]
    fetches.await_begun(0, 1)
    queue.close()
    assert all(isinstance(future.exception(20), UnavailableError) for future in asked[2:])
    fetches.finish(0)
    fetches.finish(1)
    assert [future.result(20) for future in asked[:2]] == [0, 1]
    assert sorted(fetches.begun) == [0, 1]
    with pytest.raises(UnavailableError):
        submit(queue, 1, lambda: 0)
