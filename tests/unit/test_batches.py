"""Tests of small transfers that are sent together: when a batch is sent, its order, and parts that are rejected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest

from shardwell.data_plane.batches import Batches
from shardwell.data_plane.transfer_queue import DaemonThreads
from shardwell_wire.errors import ShardwellError, StaleEpochError, UnavailableError

AGE = "shardwell.data_plane.batches._MAX_AGE_S"


class Server:
    """Records messages, whose parts are numbers. The result of a part is its double.

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

    def send(self, parts: Sequence[int], done: Callable[[int, int], None]) -> None:
        self.begun.release()
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        self.messages.append(list(parts))
        for number, part in enumerate(parts):
            if part == self.late:
                assert self.unblocked.wait(10)
            if part not in self.rejected:
                done(number, 2 * part)

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


@pytest.fixture
def batches(server: Server, threads: DaemonThreads, monkeypatch: pytest.MonkeyPatch) -> Batches[int, int]:
    monkeypatch.setattr(AGE, 1e9)
    return Batches(threads, server.send, server.run_alone, max_in_flight=1, holds=True)


def submit(batches: Batches[int, int], *parts: int, size: int = 1) -> list[Future[int]]:
    return [batches.submit(part, size) for part in parts]


def assert_done(futures: Sequence[Future[int]], *parts: int) -> None:
    assert [future.result(5) for future in futures] == [2 * part for part in parts]


def test_transfers_are_held_back_until_a_flush(server: Server, batches: Batches[int, int]) -> None:
    futures = submit(batches, *range(5))
    assert not any(future.done() for future in futures) and not server.messages
    batches.flush()
    assert_done(futures, *range(5))
    assert server.messages == [[0, 1, 2, 3, 4]] and not server.alone


def test_messages_keep_the_order(server: Server, batches: Batches[int, int]) -> None:
    server.gate.clear()
    first = submit(batches, 1, 2)
    batches.flush()
    assert server.begun.acquire(timeout=5)
    rest = submit(batches, 3, 4)
    batches.flush()
    server.gate.set()
    assert_done([*first, *rest], 1, 2, 3, 4)
    assert server.messages == [[1, 2], [3, 4]]


def test_a_full_batch_is_sent_at_once(server: Server, batches: Batches[int, int]) -> None:
    first = submit(batches, 1, size=100 << 10)
    assert_done([*first, *submit(batches, 2, size=200 << 10)], 1, 2)
    assert server.messages == [[1, 2]]


def test_an_old_batch_is_sent_with_the_next_transfer(
    server: Server, batches: Batches[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = submit(batches, 1)
    monkeypatch.setattr(AGE, -1.0)
    assert_done([*first, *submit(batches, 2)], 1, 2)
    assert server.messages == [[1, 2]]


def test_a_message_has_a_limited_number_of_parts(server: Server, batches: Batches[int, int]) -> None:
    server.gate.clear()
    futures = submit(batches, *range(100))
    batches.flush()
    server.gate.set()
    assert_done(futures, *range(100))
    sent = [part for message in server.messages for part in message]
    assert sent == sorted(sent) and max(map(len, server.messages)) == 32
    assert sorted(sent + server.alone) == list(range(100))


def test_the_values_of_a_message_have_limited_bytes(server: Server, batches: Batches[int, int]) -> None:
    server.gate.clear()
    futures = submit(batches, *range(2), size=200 << 10)
    assert server.begun.acquire(timeout=10)
    futures += submit(batches, *range(2, 8), size=200 << 10)
    server.gate.set()
    assert_done(futures, *range(8))
    assert server.messages == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_single_transfer_needs_no_batch(server: Server, batches: Batches[int, int]) -> None:
    futures = submit(batches, 7)
    batches.flush()
    assert_done(futures, 7)
    assert server.alone == [7] and not server.messages


def test_a_late_part_does_not_delay_the_others(server: Server, batches: Batches[int, int]) -> None:
    server.late = 3
    futures = submit(batches, 1, 2, 3)
    batches.flush()
    assert_done(futures[:2], 1, 2)
    assert not futures[2].done()
    server.unblocked.set()
    assert_done(futures[2:], 3)
    assert server.alone == []


def test_a_rejected_part_is_transferred_by_itself(server: Server, batches: Batches[int, int]) -> None:
    server.rejected, server.error_alone = {1}, StaleEpochError("over")
    good, bad, last = submit(batches, 0, 1, 2)
    batches.flush()
    assert isinstance(bad.exception(5), StaleEpochError)
    assert_done([good, last], 0, 2)
    assert server.alone == [1]


@pytest.mark.parametrize("error", [UnavailableError("gone"), OSError("broken"), RuntimeError("a defect")])
def test_parts_of_a_failed_batch_are_transferred_one_by_one(
    server: Server, batches: Batches[int, int], error: Exception
) -> None:
    server.error = error
    futures = submit(batches, 0, 1, 2)
    batches.flush()
    assert_done(futures, 0, 1, 2)
    assert server.alone == [0, 1, 2]


def test_a_part_that_waits_by_itself_does_not_delay_the_others(server: Server, batches: Batches[int, int]) -> None:
    server.rejected, server.blocked = {0, 2}, {0}
    waiting, *others = submit(batches, 0, 1, 2)
    batches.flush()
    assert_done(others, 1, 2)
    assert not waiting.done()
    server.unblocked.set()
    assert_done([waiting], 0)


def test_rejected_parts_with_one_key_are_transferred_in_order(server: Server, batches: Batches[int, int]) -> None:
    server.rejected, server.blocked = {0, 1, 2}, {0}
    first, second, other = (batches.submit(part, 1, key) for part, key in ((0, "a"), (1, "a"), (2, "b")))
    batches.flush()
    assert_done([other], 2)
    assert not second.done() and 1 not in server.alone
    server.unblocked.set()
    assert_done([first, second], 0, 1)
    assert server.alone.index(0) < server.alone.index(1)


def test_the_next_message_follows_the_rejected_parts_of_the_one_before(
    server: Server, batches: Batches[int, int]
) -> None:
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
    batches = Batches(threads, server.send, server.run_alone, max_in_flight=1, holds=True)
    server.rejected = {0, 1, 2}
    futures = submit(batches, 0, 1, 2)
    batches.flush()
    assert_done(futures, 0, 1, 2)
    threads.shutdown()


def test_close_fails_the_rest_of_a_failed_batch(server: Server, batches: Batches[int, int]) -> None:
    server.gate.clear()
    server.error = UnavailableError("closed")
    futures = submit(batches, 0, 1, 2)
    batches.flush()
    assert server.begun.acquire(timeout=5)
    batches.close()
    server.gate.set()
    assert all(isinstance(future.exception(5), UnavailableError) for future in futures)
    assert not server.alone


def test_close_fails_the_transfers_that_wait(batches: Batches[int, int]) -> None:
    futures = submit(batches, 0, 1)
    batches.close()
    assert all(isinstance(future.exception(5), UnavailableError) for future in futures)
    with pytest.raises(ShardwellError, match="closed before this transfer started"):
        submit(batches, 2)


def test_transfers_that_are_not_held_back_form_the_next_batch(server: Server, threads: DaemonThreads) -> None:
    batches = Batches(threads, server.send, server.run_alone, max_in_flight=1, holds=False)
    server.gate.clear()
    assert_done(submit(batches, 0), 0)
    assert server.alone == [0]
    # While one message is in flight, the others wait and share the next message.
    first = [*submit(batches, 1), *submit(batches, 2)]
    rest = submit(batches, *range(3, 9))
    server.gate.set()
    assert_done([*first, *rest], *range(1, 9))
    assert len(server.messages) + len(server.alone) - 1 < 8
    batches.close()


def test_two_messages_may_be_in_flight(server: Server, threads: DaemonThreads) -> None:
    batches = Batches(threads, server.send, server.run_alone, max_in_flight=2, holds=True)
    server.gate.clear()
    futures = []
    for number in (0, 2):
        futures += submit(batches, number, number + 1)
        batches.flush()
        assert server.begun.acquire(timeout=5)
    server.gate.set()
    assert_done(futures, 0, 1, 2, 3)
    batches.close()
