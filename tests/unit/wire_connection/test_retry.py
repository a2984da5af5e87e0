"""Retries stop at the deadline, at other errors, and when the check raises."""

from __future__ import annotations

import asyncio
import random
from itertools import islice

import pytest

from shardwell_wire.connection.channel import backoff, retry, retry_async
from shardwell_wire.errors import ConflictError, UnavailableError


class Flaky:
    """Fails a number of times, then succeeds."""

    def __init__(self, failures: int, error: type[Exception] = UnavailableError) -> None:
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error(f"failure {self.calls}")
        return "done"

    async def run(self) -> str:
        return self()


def call(action: Flaky, *, is_async: bool, pauses: list[float], **options: object) -> str:
    if is_async:
        return asyncio.run(retry_async(action.run, **options))  # type: ignore[arg-type]
    return retry(action, sleep=pauses.append, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_async", [False, True])
def test_action_is_repeated_until_it_succeeds(is_async: bool) -> None:
    action, seen, pauses = Flaky(2), [], []
    assert call(action, is_async=is_async, pauses=pauses, check=seen.append) == "done"
    assert action.calls == 3 and list(map(str, seen)) == ["failure 1", "failure 2"]
    assert is_async or [0.025 <= pauses[0] <= 0.05, 0.05 <= pauses[1] <= 0.1] == [True, True]


@pytest.mark.parametrize("is_async", [False, True])
def test_without_time_for_another_attempt_the_error_is_raised(is_async: bool) -> None:
    action = Flaky(9)
    with pytest.raises(UnavailableError, match="failure 1"):
        call(action, is_async=is_async, pauses=[], limit_s=0.0)
    assert action.calls == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_other_errors_are_not_retried(is_async: bool) -> None:
    with pytest.raises(ConflictError, match="failure 1"):
        call(Flaky(1, ConflictError), is_async=is_async, pauses=[])
    assert call(Flaky(1, ConflictError), is_async=is_async, pauses=[], errors=ConflictError) == "done"


@pytest.mark.parametrize("is_async", [False, True])
def test_check_stops_the_retries(is_async: bool) -> None:
    def check(error: Exception) -> None:
        raise ConflictError("the run was deleted") from error

    action = Flaky(9)
    with pytest.raises(ConflictError, match="deleted"):
        call(action, is_async=is_async, pauses=[], check=check)
    assert action.calls == 1


def test_backoff_doubles_up_to_the_bound() -> None:
    before = random.getstate()
    for pause_s, bound_s in zip(islice(backoff(0.1, 0.35), 4), (0.1, 0.2, 0.35, 0.35), strict=True):
        assert bound_s / 2 <= pause_s <= bound_s
    assert random.getstate() == before, "the generator belongs to the script"
