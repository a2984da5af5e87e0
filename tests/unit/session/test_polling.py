"""Limits of repeated rpcs: ``wait_limit_s`` holds for the sum of all attempts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from shardwell.membership import membership as module
from shardwell.membership.membership import Membership
from shardwell.options import JoinConfig, WaitOptions
from shardwell.transport.service_client import ServiceClient
from shardwell_wire.errors import DeadlineError, UnavailableError
from tests.unit.session.test_replica_epoch import FakeCoordinator

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
    monkeypatch.setattr(module, "time", found)
    return found


class Coordinator(FakeCoordinator):
    """Has the test answer ``FinishWork``, with the limits of the call."""

    answer: Callable[..., Any]

    def call(self, rpc_name: str, request: Any, **limits: Any) -> Any:
        return self.answer(request, **limits) if rpc_name == "FinishWork" else super().call(rpc_name, request)


@contextmanager
def joined(answer: Callable[..., Any]) -> Iterator[Membership]:
    coordinator = Coordinator()
    coordinator.answer = answer
    config = JoinConfig(run="r", address=coordinator.address, waits=WAITS)
    membership = Membership(config, coordinator)  # type: ignore[arg-type]
    try:
        yield membership
    finally:
        membership.leave()


def unavailable(clock: Clock, took_s: float, *, retry_for_s: float, until_s: float) -> Any:
    """Fails as a client does whose attempts take ``took_s`` each, but end at ``until_s``."""
    give_up = clock.now + retry_for_s
    while True:
        clock.now += min(took_s, max(0.5, until_s - clock.now))
        if clock.now >= give_up:
            raise UnavailableError("no server")


@pytest.mark.parametrize("took_s", [0.0, 3.0, 20.0, 60.0])
def test_retries_end_at_the_limit(took_s: float, clock: Clock) -> None:
    def answer(_: Any, timeout_s: float, **limits: float) -> Any:
        return unavailable(clock, took_s or 0.01, **limits)

    with joined(answer) as membership:
        with pytest.raises(UnavailableError):
            membership.call("FinishWork", None)
        assert 1025.0 <= clock.now <= 1026.0


@pytest.mark.parametrize("outage_at_s", [0.0, 12.0, 24.9])
def test_polls_end_at_the_limit_also_if_the_coordinator_goes_away(outage_at_s: float, clock: Clock) -> None:
    def answer(request: Any, timeout_s: float, **limits: float) -> Any:
        if clock.now >= 1000 + outage_at_s:
            return unavailable(clock, 10.0, **limits)
        clock.now += request.wait_s
        return SimpleNamespace(waiting_for=["trainer 'b'"])

    with joined(answer) as membership:
        with pytest.raises((DeadlineError, UnavailableError)):
            membership.poll("FinishWork", SimpleNamespace(wait_s=0.0), lambda _: False, what="a test")
        assert 1025.0 <= clock.now <= 1026.0


def test_last_attempt_of_a_call_ends_at_the_limit() -> None:
    client, deadlines = ServiceClient.__new__(ServiceClient), []
    client._call = lambda rpc_name, request, timeout_s: deadlines.append(timeout_s)  # type: ignore[method-assign]
    client.attempt = lambda action, *, retry_for_s: action()  # type: ignore[method-assign]
    for left_s in (60.0, 3.0, -1.0):
        client.call("Join", None, timeout_s=30.0, retry_for_s=60.0, until_s=time.monotonic() + left_s)
    assert deadlines == pytest.approx([30.0, 3.0, 0.5], abs=0.1)
