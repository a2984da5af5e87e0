"""Calls to a silent server end soon. Calls to a slow server that still answers do not."""

from __future__ import annotations

import asyncio

import pytest

from shardwell_server.shard.requests.peers import SilenceLimits, unless_silent
from shardwell_wire.errors import DeadlineError, NotFoundError, UnavailableError

LIMITS = SilenceLimits(0.01, 0.01)


class Server:
    """Answers questions as long as it is not silent.

    Args:
        answers: Number of questions that it answers.
        error: What it answers, if not success.
    """

    def __init__(self, answers: int, error: Exception | None = None) -> None:
        self._answers, self._error = answers, error
        self.done, self.asked, self.cancelled = asyncio.Event(), 0, False

    async def ask(self, limit_s: float) -> None:
        self.asked += 1
        if self.asked > self._answers:
            raise DeadlineError("no answer")
        if self._error is not None:
            raise self._error

    async def work(self) -> str:
        try:
            await self.done.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return "result"


async def test_work_on_a_silent_server_is_cancelled() -> None:
    server = Server(answers=3)
    with pytest.raises(UnavailableError, match=r"silent for 0\.01 s"):
        await unless_silent(server.work(), server.ask, LIMITS)
    assert server.asked == 4 and server.cancelled


@pytest.mark.parametrize("error", [None, NotFoundError("unknown run"), UnavailableError("refused")])
async def test_work_on_a_slow_server_takes_any_time(error: Exception | None) -> None:
    server = Server(10**6, error)
    work = asyncio.ensure_future(unless_silent(server.work(), server.ask, LIMITS))
    while server.asked < 5:
        await asyncio.sleep(0)
    server.done.set()
    assert await work == "result"


async def test_error_of_the_work_is_raised_and_cancellation_is_passed_on() -> None:
    async def fail() -> None:
        raise NotFoundError("no shard")

    server = Server(10**6)
    with pytest.raises(NotFoundError):
        await unless_silent(fail(), server.ask, LIMITS)
    task = asyncio.ensure_future(unless_silent(server.work(), server.ask, LIMITS))
    while not server.asked:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.cancelled


@pytest.mark.parametrize("lease_s", [0.1, 1.0, 2.0, 4.0, 10.0, 60.0, 3600.0])
def test_limits_are_less_than_a_lease_and_a_second(lease_s: float) -> None:
    limits = SilenceLimits.of_lease(lease_s)
    assert 0 < limits.ask_after_s + limits.answer_s <= lease_s + 1.0
