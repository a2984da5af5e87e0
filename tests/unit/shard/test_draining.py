"""A shard server that is asked to stop: when it waits for the moves of its shards, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from shardwell_server.shard.process import registration
from shardwell_wire.errors import NotFoundError, ShardwellError, UnavailableError
from shardwell_wire.v1 import coordinator_pb2

Answer = int | tuple[int, str] | ShardwellError
"""Shards that are left, with what prevents the moves; or an error."""

GONE = UnavailableError("the coordinator refused the connection")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_POLL_S", 0.001)
    monkeypatch.setattr(registration, "_STUCK_S", 0.05)
    monkeypatch.setattr(registration, "_SILENCE_S", 0.05)


class Coordinator:
    """Gives prepared answers, and repeats the last one."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers: Iterator[Answer] = iter(answers)
        self._last: Answer = 0
        self.asked = 0

    async def ask(self) -> coordinator_pb2.DrainServerResponse:
        self.asked += 1
        self._last = next(self._answers, self._last)
        if isinstance(self._last, ShardwellError):
            raise self._last
        count, reason = self._last if isinstance(self._last, tuple) else (self._last, "")
        return coordinator_pb2.DrainServerResponse(shard_count=count, waiting_for=[reason] if reason else [])


def drain(coordinator: Coordinator, limit_s: float = 60.0, *, would_lose: bool = False) -> bool:
    """Drains a server whose shards end with its process, or wait for its next one. Returns whether none are left."""
    return asyncio.run(asyncio.wait_for(registration.drain(coordinator.ask, limit_s, lambda: would_lose), 30.0))


@pytest.mark.parametrize(
    "answers, drained, asked",
    [
        ([0], True, 1),
        ([5, 3, 3, 0], True, 4),
        ([(5, "no memory"), (4, "no memory"), 2, 0], True, 4),
        ([5, GONE, GONE, 0], True, 4),
        ([GONE], False, 1),
        ([NotFoundError("unknown server")], False, 1),
        ([5, NotFoundError("unknown server")], False, 2),
    ],
)
def test_server_waits_until_its_shards_have_moved(answers: list[Answer], drained: bool, asked: int) -> None:
    coordinator = Coordinator(answers)
    assert drain(coordinator) is drained
    assert coordinator.asked == asked


@pytest.mark.parametrize("answers", [[(5, "start more servers")], [5, GONE]])
def test_server_gives_up_when_nothing_moves(answers: list[Answer]) -> None:
    coordinator = Coordinator(answers)
    assert not drain(coordinator, 3600.0)
    assert coordinator.asked > 2


@pytest.mark.parametrize("before", [[], [5]])
def test_server_whose_shards_end_with_it_waits_for_a_coordinator_that_is_started_again(
    before: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator may be away for longer than ``_SILENCE_S``, and may have received no question at all."""
    monkeypatch.setattr(registration, "_SILENCE_S", 0.0)
    coordinator = Coordinator([*before, *[GONE] * 100, 3, 0])
    assert drain(coordinator, would_lose=True)
    assert coordinator.asked == len(before) + 102


@pytest.mark.parametrize("before", [[], [5]])
def test_server_whose_shards_end_with_it_waits_for_the_coordinator_until_the_limit(before: list[Answer]) -> None:
    coordinator = Coordinator([*before, GONE])
    assert not drain(coordinator, 0.3, would_lose=True)
    assert coordinator.asked > len(before) + 2


def test_server_gives_up_after_the_limit() -> None:
    assert not drain(Coordinator([5]), 0.05)


def test_limit_ends_a_question_without_answer() -> None:
    async def never() -> coordinator_pb2.DrainServerResponse:
        await asyncio.Event().wait()
        raise AssertionError

    assert not asyncio.run(asyncio.wait_for(registration.drain(never, 0.05, lambda: False), 30.0))
