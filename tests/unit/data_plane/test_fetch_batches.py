"""Tests of small fetches that are requested together: when a batch is sent, its order, and rejected fetches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from shardwell.data_plane.batches import FetchBatches
from shardwell.data_plane.fetch import _MAX_BATCHES, _THREADS
from shardwell.data_plane.transfers import DaemonThreads
from shardwell_wire.errors import ShardwellError, StaleEpochError, UnavailableError


class Fetch:
    """A fetch of a part, which is a number. Its version is the double."""

    def __init__(self, server: Server, part: int, size_bytes: int) -> None:
        self._server, self.part, self.size_bytes = server, part, size_bytes
        self.future: Future[int] = Future()

    def __call__(self) -> int:
        return self._server.run_alone(self.part)

    def end(self, version: int, error: BaseException | None = None) -> None:
        if error is None:
            self.future.set_result(version)
        else:
            self.future.set_exception(error)


class Server:
    """Records messages.

    Rejects the parts in ``rejected``, or raises ``error``. The gate holds messages back. The result of the part
    ``late`` waits for ``unblocked``.
    """

    def __init__(self) -> None:
        self.messages: list[list[int]] = []
        self.alone: list[int] = []
        self.rejected: set[int] = set()
        self.late: int | None = None
        self.error: Exception | None = None
        self.error_alone: Exception | None = None
        self.blocked: set[int] = set()
        self.begun_alone, self.unblocked = threading.Semaphore(0), threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)

    def send(self, fetches: Sequence[Fetch], arrived: Callable[[int, int], None]) -> None:
        self.begun.release()
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        self.messages.append([fetch.part for fetch in fetches])
        for number, fetch in enumerate(fetches):
            if fetch.part == self.late:
                assert self.unblocked.wait(10)
            if fetch.part not in self.rejected:
                arrived(number, 2 * fetch.part)

    def run_alone(self, part: int) -> int:
        self.alone.append(part)
        self.begun_alone.release()
        if part in self.blocked:
            assert self.unblocked.wait(10)
        if self.error_alone is not None:
            raise self.error_alone
        return 2 * part


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def threads() -> Iterator[DaemonThreads]:
    made = DaemonThreads(4, "test")
    yield made
    made.shutdown()


class Batches(FetchBatches):
    """The batches of a server."""

    def __init__(self, threads: DaemonThreads, server: Server, max_in_flight: int = 1) -> None:
        send: Any = server.send
        super().__init__(threads, send, max_in_flight=max_in_flight)
        self.server = server


@pytest.fixture
def batches(server: Server, threads: DaemonThreads) -> Batches:
    return Batches(threads, server)


def submit(batches: Batches, *parts: int, size: int = 1) -> list[Future[int]]:
    fetches: list[Any] = [Fetch(batches.server, part, size) for part in parts]
    for fetch in fetches:
        batches.add(fetch)
    return [fetch.future for fetch in fetches]


def assert_done(futures: Sequence[Future[int]], *parts: int) -> None:
    assert [future.result(5) for future in futures] == [2 * part for part in parts]


def test_transfers_are_held_back_until_a_flush(server: Server, batches: Batches) -> None:
    futures = submit(batches, *range(5))
    assert not any(future.done() for future in futures) and not server.messages
    batches.flush()
    assert_done(futures, *range(5))
    assert server.messages == [[0, 1, 2, 3, 4]] and not server.alone


def test_messages_keep_the_order(server: Server, batches: Batches) -> None:
    server.gate.clear()
    first = submit(batches, 1, 2)
    batches.flush()
    assert server.begun.acquire(timeout=5)
    rest = submit(batches, 3, 4)
    batches.flush()
    server.gate.set()
    assert_done([*first, *rest], 1, 2, 3, 4)
    assert server.messages == [[1, 2], [3, 4]]


def test_a_message_has_a_limited_number_of_parts(server: Server, batches: Batches) -> None:
    server.gate.clear()
    futures = submit(batches, *range(100))
    batches.flush()
    server.gate.set()
    assert_done(futures, *range(100))
    sent = [part for message in server.messages for part in message]
    assert sent == sorted(sent) and max(map(len, server.messages)) == 32
    assert sorted(sent + server.alone) == list(range(100))


def test_the_values_of_a_message_have_limited_bytes(server: Server, batches: Batches) -> None:
    server.gate.clear()
    futures = submit(batches, *range(8), size=100 << 10)
    batches.flush()
    server.gate.set()
    assert_done(futures, *range(8))
    assert server.messages == [[0, 1], [2, 3, 4], [5, 6, 7]]  # evenly


def test_a_small_rest_needs_no_message_of_its_own(server: Server, batches: Batches) -> None:
    futures = submit(batches, *range(17), size=16 << 10)
    batches.flush()
    assert_done(futures, *range(17))
    assert server.messages == [list(range(17))]


def test_several_messages_are_in_flight(server: Server, threads: DaemonThreads) -> None:
    batches = Batches(threads, server, max_in_flight=2)
    server.gate.clear()
    futures = submit(batches, *range(6), size=100 << 10)
    batches.flush()
    assert server.begun.acquire(timeout=5) and server.begun.acquire(timeout=5)
    assert not server.begun.acquire(blocking=False)
    server.gate.set()
    assert_done(futures, *range(6))


def test_a_single_transfer_needs_no_batch(server: Server, batches: Batches) -> None:
    futures = submit(batches, 7)
    batches.flush()
    assert_done(futures, 7)
    assert server.alone == [7] and not server.messages


def test_a_late_part_does_not_delay_the_others(server: Server, batches: Batches) -> None:
    server.late = 3
    futures = submit(batches, 1, 2, 3)
    batches.flush()
    assert_done(futures[:2], 1, 2)
    assert not futures[2].done()
    server.unblocked.set()
    assert_done(futures[2:], 3)
    assert server.alone == []


def test_a_rejected_part_is_transferred_by_itself(server: Server, batches: Batches) -> None:
    server.rejected, server.error_alone = {1}, StaleEpochError("over")
    good, bad, last = submit(batches, 0, 1, 2)
    batches.flush()
    assert isinstance(bad.exception(5), StaleEpochError)
    assert_done([good, last], 0, 2)
    assert server.alone == [1]


@pytest.mark.parametrize("error", [UnavailableError("gone"), OSError("broken"), RuntimeError("a defect")])
def test_parts_of_a_failed_batch_are_transferred_one_by_one(server: Server, batches: Batches, error: Exception) -> None:
    server.error = error
    futures = submit(batches, 0, 1, 2)
    batches.flush()
    assert_done(futures, 0, 1, 2)
    assert server.alone == [0, 1, 2]


def test_a_part_that_waits_by_itself_does_not_delay_the_others(server: Server, batches: Batches) -> None:
    server.rejected, server.blocked = {0, 2}, {0}
    waiting, *others = submit(batches, 0, 1, 2)
    batches.flush()
    assert_done(others, 1, 2)
    assert not waiting.done()
    server.unblocked.set()
    assert_done([waiting], 0)


def test_the_next_message_follows_the_rejected_parts_of_the_one_before(server: Server, batches: Batches) -> None:
    server.rejected, server.blocked = {0, 1}, {0, 1}
    first = submit(batches, 0, 1)
    batches.flush()
    assert server.begun_alone.acquire(timeout=5) and server.begun_alone.acquire(timeout=5)
    rest = submit(batches, 2, 3)
    batches.flush()
    assert server.messages == [[0, 1]]
    server.unblocked.set()
    assert_done([*first, *rest], 0, 1, 2, 3)
    assert server.messages == [[0, 1], [2, 3]]


def test_rejected_parts_need_no_free_thread(server: Server) -> None:
    threads = DaemonThreads(1, "test")
    batches = Batches(threads, server)
    server.rejected = {0, 1, 2}
    futures = submit(batches, 0, 1, 2)
    batches.flush()
    assert_done(futures, 0, 1, 2)
    threads.shutdown()


def test_close_fails_the_rest_of_a_failed_batch(server: Server, batches: Batches) -> None:
    server.gate.clear()
    server.error = UnavailableError("closed")
    futures = submit(batches, 0, 1, 2)
    batches.flush()
    assert server.begun.acquire(timeout=5)
    batches.close()
    server.gate.set()
    assert all(isinstance(future.exception(5), UnavailableError) for future in futures)
    assert not server.alone


def test_close_fails_the_transfers_that_wait(batches: Batches) -> None:
    futures = submit(batches, 0, 1)
    batches.close()
    assert all(isinstance(future.exception(5), UnavailableError) for future in futures)
    with pytest.raises(ShardwellError, match="closed before this transfer started"):
        submit(batches, 2)


def test_rejected_fetches_of_a_server_leave_threads_to_other_servers(server: Server) -> None:
    threads = DaemonThreads(_THREADS, "test")
    batches = Batches(threads, server, max_in_flight=_MAX_BATCHES)
    server.rejected = server.blocked = set(range(64))
    futures = submit(batches, *range(64))
    batches.flush()
    try:
        for _ in range(8):
            assert server.begun_alone.acquire(timeout=5)
        assert not server.begun_alone.acquire(timeout=0.2), "more fetches run at the same time"
        assert threads.submit(lambda: 1).result(5) == 1
    finally:
        server.unblocked.set()
        assert_done(futures, *range(64))
        threads.shutdown()
