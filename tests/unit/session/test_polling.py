"""Limits of repeated rpcs: ``wait_limit_s`` holds for the sum of all attempts."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from shardwell.membership import admission
from shardwell.options import WaitOptions
from shardwell.transport.rpc import ServiceClient
from shardwell_wire.errors import DeadlineError, UnavailableError

WAITS = WaitOptions(wait_limit_s=25.0, warn_after_s=5.0, rpc_timeout_s=30.0)


class Clock:
    """Stands for the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(admission, "time", found)
    return found


def unavailable(clock: Clock, took_s: float, *, retry_for_s: float, until_s: float) -> Any:
    """Fails as a client does whose attempts take ``took_s`` each, but end at ``until_s``."""
    give_up = clock.now + retry_for_s
    while True:
        clock.now += min(took_s, max(0.5, until_s - clock.now))
        if clock.now >= give_up:
            raise UnavailableError("no server")


@pytest.mark.parametrize("took_s", [0.0, 3.0, 20.0, 60.0])
def test_retries_end_at_the_limit(took_s: float, clock: Clock) -> None:
    with pytest.raises(UnavailableError):
        admission.retry_and_warn(partial(unavailable, clock, took_s or 0.01), WAITS)
    assert 1025.0 <= clock.now <= 1026.0


@pytest.mark.parametrize("outage_at_s", [0.0, 12.0, 24.9])
def test_polls_end_at_the_limit_also_if_the_coordinator_goes_away(outage_at_s: float, clock: Clock) -> None:
    def call(request: Any, timeout_s: float, until_s: float) -> Any:
        if clock.now >= 1000 + outage_at_s:
            return admission.retry_and_warn(partial(unavailable, clock, 10.0), WAITS, until_s)
        clock.now += request.wait_s
        return SimpleNamespace(waiting_for=["trainer 'b'"])

    with pytest.raises((DeadlineError, UnavailableError)):
        admission.poll(call, SimpleNamespace(wait_s=0.0), lambda _: False, what="a test", waits=WAITS)
    assert 1025.0 <= clock.now <= 1026.0


def test_last_attempt_of_a_call_ends_at_the_limit() -> None:
    client, deadlines = ServiceClient.__new__(ServiceClient), []
    client._call = lambda rpc_name, request, timeout_s: deadlines.append(timeout_s)  # type: ignore[method-assign]
    client.attempt = lambda action, *, retry_for_s: action()  # type: ignore[method-assign]
    for left_s in (60.0, 3.0, -1.0):
        client.call("Join", None, timeout_s=30.0, retry_for_s=60.0, until_s=time.monotonic() + left_s)
    assert deadlines == pytest.approx([30.0, 3.0, 0.5], abs=0.1)
