"""Transfers with one server: few at once, in order, none forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from shardwell.data_plane.transfer_queue import TransferQueue
from shardwell.transport.base import NEARLY_DONE_BYTES, NearlyDone
from shardwell_wire.errors import UnavailableError

MIB = 1 << 20


class Transfers:
    """Transfers that begin when the queue says so, and come near and end when the test does."""

    def __init__(self, queue: TransferQueue[int]) -> None:
        self.begun: list[int] = []
        self._queue = queue
        self._gates: dict[int, threading.Event] = {}
        self._nearly: dict[int, NearlyDone] = {}
        self._changed = threading.Condition()

    def ask(self, number: int, size_bytes: int) -> Future[int]:
        self._gates[number] = threading.Event()

        def work(nearly: NearlyDone) -> int:
            with self._changed:
                self._nearly[number] = nearly
                self.begun.append(number)
                self._changed.notify_all()
            assert self._gates[number].wait(20)
            return number

        return self._queue.submit(size_bytes, work)

    def come_near(self, number: int) -> None:
        self._nearly[number]()

    def finish(self, *numbers: int) -> None:
        for number in numbers:
            self._gates[number].set()

    def await_begun(self, *numbers: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: sorted(self.begun) == sorted(numbers), 20), self.begun


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_a_transfer_begins_when_one_of_two_is_nearly_done(threads: ThreadPoolExecutor) -> None:
    transfers = Transfers(TransferQueue(threads))
    asked = [transfers.ask(number, 100 * MIB) for number in range(5)]
    transfers.await_begun(0, 1)
    transfers.come_near(0)
    transfers.await_begun(0, 1, 2)
    transfers.come_near(0)  # no news
    transfers.finish(0)  # neither is this
    assert asked[0].result(20) == 0
    assert sorted(transfers.begun) == [0, 1, 2]
    transfers.finish(1)  # without having come near
    transfers.await_begun(0, 1, 2, 3)
    transfers.come_near(2)
    transfers.await_begun(0, 1, 2, 3, 4)
    transfers.finish(2, 3, 4)
    assert [future.result(20) for future in asked] == [0, 1, 2, 3, 4]


def test_small_transfers_are_more_at_once(threads: ThreadPoolExecutor) -> None:
    transfers = Transfers(TransferQueue(threads))
    size_bytes = NEARLY_DONE_BYTES // 2
    asked = [transfers.ask(number, size_bytes // 2) for number in range(4)]
    asked += [transfers.ask(4, 1), transfers.ask(5, 0)]
    transfers.await_begun(0, 1, 2, 3)  # the next would be too much, and the last does not overtake it
    transfers.come_near(1)
    transfers.await_begun(0, 1, 2, 3, 4, 5)
    transfers.finish(0, 1, 2, 3, 4, 5)
    assert [future.result(20) for future in asked] == [0, 1, 2, 3, 4, 5]


def test_a_transfer_that_fails_makes_room_for_the_next(threads: ThreadPoolExecutor) -> None:
    queue = TransferQueue[int](threads)

    def fail(_: NearlyDone) -> int:
        raise ValueError("no")

    failing = [queue.submit(100 * MIB, fail) for _ in range(5)]
    assert queue.submit(100 * MIB, lambda _: 7).result(20) == 7
    assert all(isinstance(future.exception(20), ValueError) for future in failing)


def test_closing_fails_what_waits_and_nothing_else(threads: ThreadPoolExecutor) -> None:
    queue = TransferQueue[int](threads)
    transfers = Transfers(queue)
    asked = [transfers.ask(number, 100 * MIB) for number in range(4)]
    transfers.await_begun(0, 1)
    queue.close()
    assert all(isinstance(future.exception(20), UnavailableError) for future in asked[2:])
    transfers.come_near(1)
    transfers.finish(0, 1)
    assert [future.result(20) for future in asked[:2]] == [0, 1]
    assert sorted(transfers.begun) == [0, 1]
    with pytest.raises(UnavailableError):
        queue.submit(1, lambda _: 0)


def test_a_transfer_asked_for_meanwhile_does_not_overtake_one_that_is_about_to_begin() -> None:
    begun = list[int]()

    class Threads(ThreadPoolExecutor):
        """Slow to take the first transfer, while another thread asks for the second."""

        other: threading.Thread | None = None

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if self.other is None:
                self.other = threading.Thread(target=queue.submit, args=(0, lambda _: begun.append(1)))
                self.other.start()
                self.other.join(0.2)
            return super().submit(fn, *args, **kwargs)

    with Threads(1) as threads:
        queue = TransferQueue[None](threads)
        queue.submit(0, lambda _: begun.append(0))
        assert threads.other is not None
        threads.other.join(20)
    assert begun == [0, 1]
