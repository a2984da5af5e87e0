"""Tests of small pushes that are sent together: when a batch is sent, its order, and parts that are rejected."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from shardwell.data_plane.batches import PushBatches
from shardwell.data_plane.transfers import DaemonThreads
from shardwell_wire.errors import ShardwellError, StaleEpochError, UnavailableError

AGE = "shardwell.data_plane.batches._MAX_AGE_S"


class Push:
    """A push with a number."""

    def __init__(self, server: Server, number: int, size_bytes: int, key: int | None) -> None:
        self.server, self.number, self.size_bytes = server, number, size_bytes
        self.key = (number if key is None else key, 0)
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def __call__(self) -> None:
        self.server.push_alone(self.number)

    def failure(self) -> BaseException | None:
        """Waits for the end of the push; returns its error."""
        assert self.ended.wait(5)
        return self.error


class Server:
    """Records messages, whose parts are numbers.

    Rejects the parts in ``rejected``, or raises ``error``. The gate holds messages back.
    """

    def __init__(self) -> None:
        self.messages: list[list[int]] = []
        self.alone: list[int] = []
        self.rejected: set[int] = set()
        self.error: Exception | None = None
        self.error_alone: Exception | None = None
        self.blocked: set[int] = set()
        self.begun_alone, self.unblocked = threading.Semaphore(0), threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)

    def batches(self, threads: DaemonThreads) -> PushBatches:
        send: Any = self.send
        end: Any = self.end
        return PushBatches(threads, send, end)

    def send(self, pushes: Sequence[Push]) -> list[bool]:
        self.begun.release()
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        self.messages.append([push.number for push in pushes])
        return [push.number not in self.rejected for push in pushes]

    def push_alone(self, number: int) -> None:
        self.alone.append(number)
        self.begun_alone.release()
        if number in self.blocked:
            assert self.unblocked.wait(10)
        if self.error_alone is not None:
            raise self.error_alone

    def end(self, pushes: Sequence[Push]) -> None:
        for push in pushes:
            assert not push.ended.is_set(), "a push ends once"
            push.ended.set()

    def add(self, batches: PushBatches, *numbers: int, size: int = 1, key: int | None = None) -> list[Push]:
        pushes = [Push(self, number, size, key) for number in numbers]
        added: list[Any] = pushes
        for push in added:
            batches.add(push)
        return pushes


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def threads() -> Iterator[DaemonThreads]:
    made = DaemonThreads(4, "test")
    yield made
    made.shutdown()


@pytest.fixture
def batches(server: Server, threads: DaemonThreads, monkeypatch: pytest.MonkeyPatch) -> PushBatches:
    monkeypatch.setattr(AGE, 1e9)
    return server.batches(threads)


def assert_pushed(pushes: Sequence[Push]) -> None:
    assert [push.failure() for push in pushes] == [None] * len(pushes)


def test_pushes_are_held_back_until_a_flush(server: Server, batches: PushBatches) -> None:
    pushes = server.add(batches, *range(5))
    assert not any(push.ended.is_set() for push in pushes) and not server.messages
    batches.flush()
    assert_pushed(pushes)
    assert server.messages == [[0, 1, 2, 3, 4]] and not server.alone


def test_messages_keep_the_order(server: Server, batches: PushBatches) -> None:
    server.gate.clear()
    first = server.add(batches, 1, 2)
    batches.flush()
    assert server.begun.acquire(timeout=5)
    rest = server.add(batches, 3, 4)
    batches.flush()
    server.gate.set()
    assert_pushed([*first, *rest])
    assert server.messages == [[1, 2], [3, 4]]


def test_a_full_batch_is_sent_at_once(server: Server, batches: PushBatches) -> None:
    first = server.add(batches, 1, size=100 << 10)
    assert_pushed([*first, *server.add(batches, 2, size=200 << 10)])
    assert server.messages == [[1, 2]]


def test_an_old_batch_is_sent_with_the_next_push(
    server: Server, batches: PushBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = server.add(batches, 1)
    monkeypatch.setattr(AGE, -1.0)
    assert_pushed([*first, *server.add(batches, 2)])
    assert server.messages == [[1, 2]]


def test_a_message_has_a_limited_number_of_parts(server: Server, batches: PushBatches) -> None:
    server.gate.clear()
    pushes = server.add(batches, *range(100))
    batches.flush()
    server.gate.set()
    assert_pushed(pushes)
    sent = [part for message in server.messages for part in message]
    assert sent == sorted(sent) and max(map(len, server.messages)) == 32
    assert sorted(sent + server.alone) == list(range(100))


def test_the_values_of_a_message_have_limited_bytes(server: Server, batches: PushBatches) -> None:
    server.gate.clear()
    pushes = server.add(batches, *range(2), size=200 << 10)
    assert server.begun.acquire(timeout=10)
    pushes += server.add(batches, *range(2, 8), size=200 << 10)
    server.gate.set()
    assert_pushed(pushes)
    assert server.messages == [[0, 1], [2, 3, 4], [5, 6, 7]]  # evenly


def test_a_single_push_needs_no_batch(server: Server, batches: PushBatches) -> None:
    pushes = server.add(batches, 7)
    batches.flush()
    assert_pushed(pushes)
    assert server.alone == [7] and not server.messages


def test_a_rejected_part_is_pushed_by_itself(server: Server, batches: PushBatches) -> None:
    server.rejected, server.error_alone = {1}, StaleEpochError("over")
    good, bad, last = server.add(batches, 0, 1, 2)
    batches.flush()
    assert isinstance(bad.failure(), StaleEpochError)
    assert_pushed([good, last])
    assert server.alone == [1]


@pytest.mark.parametrize("error", [UnavailableError("gone"), OSError("broken"), RuntimeError("a defect")])
def test_parts_of_a_failed_batch_are_pushed_one_by_one(server: Server, batches: PushBatches, error: Exception) -> None:
    server.error = error
    pushes = server.add(batches, 0, 1, 2)
    batches.flush()
    assert_pushed(pushes)
    assert server.alone == [0, 1, 2]


def test_a_part_that_waits_by_itself_does_not_delay_the_others(server: Server, batches: PushBatches) -> None:
    server.rejected, server.blocked = {0, 2}, {0}
    waiting, *others = server.add(batches, 0, 1, 2)
    batches.flush()
    assert_pushed(others)
    assert not waiting.ended.is_set()
    server.unblocked.set()
    assert_pushed([waiting])


def test_rejected_parts_with_one_key_are_pushed_in_order(server: Server, batches: PushBatches) -> None:
    server.rejected, server.blocked = {0, 1, 2}, {0}
    first, second, other = (*server.add(batches, 0, 1, key=7), *server.add(batches, 2, key=8))
    batches.flush()
    assert_pushed([other])
    assert not second.ended.is_set() and 1 not in server.alone
    server.unblocked.set()
    assert_pushed([first, second])
    assert server.alone.index(0) < server.alone.index(1)


def test_the_next_message_follows_the_rejected_parts_of_the_one_before(server: Server, batches: PushBatches) -> None:
    server.rejected, server.blocked = {0, 1}, {0, 1}
    first = server.add(batches, 0, 1)
    batches.flush()
    assert server.begun_alone.acquire(timeout=5) and server.begun_alone.acquire(timeout=5)
    rest = server.add(batches, 2, 3)
    batches.flush()
    assert server.messages == [[0, 1]]
    server.unblocked.set()
    assert_pushed([*first, *rest])
    assert server.messages == [[0, 1], [2, 3]]


def test_rejected_parts_need_no_free_thread(server: Server) -> None:
    threads = DaemonThreads(1, "test")
    batches = server.batches(threads)
    server.rejected = {0, 1, 2}
    pushes = server.add(batches, 0, 1, 2)
    batches.flush()
    assert_pushed(pushes)
    threads.shutdown()


def test_close_fails_the_rest_of_a_failed_batch(server: Server, batches: PushBatches) -> None:
    server.gate.clear()
    server.error = UnavailableError("closed")
    pushes = server.add(batches, 0, 1, 2)
    batches.flush()
    assert server.begun.acquire(timeout=5)
    batches.close()
    server.gate.set()
    assert all(isinstance(push.failure(), UnavailableError) for push in pushes)
    assert not server.alone


def test_close_fails_the_pushes_that_wait(server: Server, batches: PushBatches) -> None:
    pushes = server.add(batches, 0, 1)
    batches.close()
    assert all(isinstance(push.failure(), UnavailableError) for push in pushes)
    with pytest.raises(ShardwellError, match="closed before this transfer started"):
        server.add(batches, 2)


def test_a_push_wakes_no_thread_until_its_batch_is_full(server: Server, batches: PushBatches) -> None:
    started = threading.active_count()
    pushes = server.add(batches, *range(31))
    assert threading.active_count() == started
    pushes += server.add(batches, 31)
    assert_pushed(pushes)
    assert server.messages == [list(range(32))]
