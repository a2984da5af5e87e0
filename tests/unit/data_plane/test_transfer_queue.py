"""Tests of the transfers of one server: a few at a time, in order, none lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from shardwell.data_plane.transfers import DaemonThreads, TransferQueue
from shardwell.transport.base import NEARLY_DONE_BYTES, NearlyDone
from shardwell_wire.errors import UnavailableError

MIB = 1 << 20


def submit(queue: TransferQueue, size_bytes: int, work: Callable[[NearlyDone], int | None]) -> Future[int]:
    """Queues a transfer; returns the future of its result."""
    future = Future[int]()

    def ended(result: int, error: BaseException | None) -> None:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    queue.submit(size_bytes, work, ended)
    return future


class Transfers:
    """Transfers that the queue starts. A test reports each as nearly done, and finishes it."""

    def __init__(self, queue: TransferQueue) -> None:
        self.started: list[int] = []
        self._queue = queue
        self._gates: dict[int, threading.Event] = {}
        self._nearly: dict[int, NearlyDone] = {}
        self._changed = threading.Condition()

    def ask(self, number: int, size_bytes: int) -> Future[int]:
        self._gates[number] = threading.Event()

        def work(nearly: NearlyDone) -> int:
            with self._changed:
                self._nearly[number] = nearly
                self.started.append(number)
                self._changed.notify_all()
            assert self._gates[number].wait(20)
            return number

        return submit(self._queue, size_bytes, work)

    def make_nearly_done(self, number: int) -> None:
        self._nearly[number]()

    def finish(self, *numbers: int) -> None:
        for number in numbers:
            self._gates[number].set()

    def await_started(self, *numbers: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: sorted(self.started) == sorted(numbers), 20), self.started


@pytest.fixture
def threads() -> Iterator[DaemonThreads]:
    with DaemonThreads(8, "test") as pool:
        yield pool


def test_transfer_starts_when_one_of_two_is_nearly_done(threads: DaemonThreads) -> None:
    transfers = Transfers(TransferQueue(threads))
    asked = [transfers.ask(number, 100 * MIB) for number in range(5)]
    transfers.await_started(0, 1)
    transfers.make_nearly_done(0)
    transfers.await_started(0, 1, 2)
    transfers.make_nearly_done(0)  # a repeated report starts no transfer
    transfers.finish(0)  # the report has already started a transfer
    assert asked[0].result(20) == 0
    assert sorted(transfers.started) == [0, 1, 2]
    transfers.finish(1)  # finished without a report
    transfers.await_started(0, 1, 2, 3)
    transfers.make_nearly_done(2)
    transfers.await_started(0, 1, 2, 3, 4)
    transfers.finish(2, 3, 4)
    assert [future.result(20) for future in asked] == [0, 1, 2, 3, 4]


def test_more_small_transfers_are_active_at_once(threads: DaemonThreads) -> None:
    transfers = Transfers(TransferQueue(threads))
    size_bytes = NEARLY_DONE_BYTES // 2
    asked = [transfers.ask(number, size_bytes // 2) for number in range(4)]
    asked += [transfers.ask(4, 1), transfers.ask(5, 0)]
    transfers.await_started(0, 1, 2, 3)  # the next exceeds the limit, and the last does not overtake it
    transfers.make_nearly_done(1)
    transfers.await_started(0, 1, 2, 3, 4, 5)
    transfers.finish(0, 1, 2, 3, 4, 5)
    assert [future.result(20) for future in asked] == [0, 1, 2, 3, 4, 5]


def test_next_transfer_starts_after_a_failed_one(threads: DaemonThreads) -> None:
    queue = TransferQueue(threads)

    def fail(_: NearlyDone) -> int:
        raise ValueError("no")

    failing = [submit(queue, 100 * MIB, fail) for _ in range(5)]
    assert submit(queue, 100 * MIB, lambda _: 7).result(20) == 7
    assert all(isinstance(future.exception(20), ValueError) for future in failing)


def test_close_fails_only_waiting_transfers(threads: DaemonThreads) -> None:
    queue = TransferQueue(threads)
    transfers = Transfers(queue)
    asked = [transfers.ask(number, 100 * MIB) for number in range(4)]
    transfers.await_started(0, 1)
    queue.close()
    assert all(isinstance(future.exception(20), UnavailableError) for future in asked[2:])
    transfers.make_nearly_done(1)
    transfers.finish(0, 1)
    assert [future.result(20) for future in asked[:2]] == [0, 1]
    assert sorted(transfers.started) == [0, 1]
    with pytest.raises(UnavailableError):
        submit(queue, 1, lambda _: 0)


def test_concurrent_submit_does_not_overtake_a_starting_transfer() -> None:
    started = list[int]()

    class Threads(DaemonThreads):
        """Blocks in the submission of the first transfer, while another thread submits the second."""

        other: threading.Thread | None = None

        def start(self, function: Callable[[], None]) -> None:
            if self.other is None:
                self.other = threading.Thread(target=submit, args=(queue, 0, lambda _: started.append(1)))
                self.other.start()
                # The other submission must wait, so this join is expected to time out.
                self.other.join(0.2)
            super().start(function)

    with Threads(1, "test") as threads:
        queue = TransferQueue(threads)
        submit(queue, 0, lambda _: started.append(0))
        assert threads.other is not None
        threads.other.join(20)
    assert started == [0, 1]
