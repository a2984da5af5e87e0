"""Tests of failed operations on a shard server: retried, explained by the coordinator, or raised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwell.transport.resending import MEASUREMENT, TRANSFER, Operation, ReachedServer, Resending, ResendPolicy
from shardwell_wire.errors import (
    ConflictError,
    CorruptDataError,
    NotFoundError,
    RunDeletedError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
    VersionGoneError,
)


class Coordinator(ResendPolicy):
    """A fake coordinator: ``ask`` raises ``knows`` after ``silent_for`` calls without an error."""

    asks = True

    def __init__(self, knows: ShardwellError | None = None, silent_for: int = 0, *, wait_limit_s: float = 60.0) -> None:
        super().__init__(wait_limit_s)
        self.knows, self.silent_for, self.asked = knows, silent_for, 0

    def ask(self) -> None:
        self.asked += 1
        if self.knows is not None and self.asked > self.silent_for:
            raise self.knows


AT_ONCE = replace(TRANSFER, quiet_s=0.0)
"""A transfer for which the coordinator is asked after each failure."""


def run(policy: ResendPolicy, action: Callable[[], object], operation: Operation = AT_ONCE) -> object:
    return Resending(ReachedServer("s:1", policy)).run(lambda *_: action(), operation)


def failing(error: ShardwellError, times: int) -> Callable[[], str]:
    left = times

    def action() -> str:
        nonlocal left
        left -= 1
        if left >= 0:
            raise error
        return "done"

    return action


FOREVER = 1 << 30


@pytest.mark.parametrize(
    "met",
    [
        UnavailableError("socket is closed"),
        NotFoundError("no run 'r' on this server"),
        VersionGoneError("version 3 is gone"),
        StaleEpochError("epoch 4 is over"),
        ConflictError("the transport is closed"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    "knows",
    [
        RunDeletedError("run 'r' was deleted"),
        ConflictError("server 's1' has ended, and its shards of unit 'u' are lost: delete the run"),
        StaleEpochError("another trainer has its work"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_replaced_by_the_coordinators_error(met: ShardwellError, knows: ShardwellError) -> None:
    with pytest.raises(type(knows)) as caught:
        run(Coordinator(knows), failing(met, FOREVER))
    assert caught.value is knows


def test_unavailable_server_is_retried() -> None:
    coordinator = Coordinator()
    server = ReachedServer("s:1", coordinator)
    action = failing(UnavailableError("refused"), 3)
    assert Resending(server).run(lambda *_: action(), AT_ONCE) == "done"
    assert coordinator.asked == 3
    assert server.waiting_since is None


def test_error_after_the_limit_names_the_server() -> None:
    message = r"a transfer: the shard server at s:1 could not be reached for 0\.\d s: refused\. The coordinator"
    with pytest.raises(UnavailableError, match=message) as caught:
        run(Coordinator(wait_limit_s=0.2), failing(UnavailableError("refused", peer="p"), FOREVER))
    assert caught.value.data == {"peer": "p", "address": "s:1"}


def test_coordinator_is_asked_until_a_restarted_server_has_registered() -> None:
    lost = ConflictError("server 's1' was restarted and has lost its shards")
    with pytest.raises(ConflictError) as caught:
        run(Coordinator(lost, silent_for=3), failing(NotFoundError("no run 'r' on this server"), FOREVER))
    assert caught.value is lost


def test_unexplained_error_is_unchanged() -> None:
    gone = VersionGoneError("version 3 is gone")
    coordinator = Coordinator()
    with pytest.raises(VersionGoneError) as caught:
        run(coordinator, failing(gone, FOREVER))
    assert caught.value is gone
    assert coordinator.asked == 1


DAMAGED = CorruptDataError("gradient of unit 'u': the bytes have checksum 0x1, expected 0x2")


@pytest.mark.parametrize("kind", [ResendPolicy, Coordinator], ids=["reader", "trainer"])
@pytest.mark.parametrize("operation", [MEASUREMENT, TRANSFER], ids=lambda operation: operation.what)
def test_damaged_transfer_is_repeated_twice(kind: type[ResendPolicy], operation: Operation) -> None:
    policy = kind()
    assert run(policy, failing(DAMAGED, 2), operation) == "done"
    assert policy.corrupt.by_server() == {"s:1": 2}
    with pytest.raises(CorruptDataError, match=r"and the shard server at s:1 was damaged 3 times in a row: gradient"):
        run(policy, failing(DAMAGED, FOREVER), operation)
    assert policy.corrupt.by_server() == {"s:1": 5}


def test_damaged_attempts_are_counted_in_a_row() -> None:
    errors = [DAMAGED, DAMAGED, UnavailableError("refused"), DAMAGED, DAMAGED]

    def action() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    assert run(Coordinator(), action) == "done"


def test_short_outage_is_outlasted_without_asking_the_coordinator() -> None:
    coordinator = Coordinator()
    assert run(coordinator, failing(UnavailableError("refused"), 3), TRANSFER) == "done"
    assert coordinator.asked == 0


def test_reader_does_not_wait_for_a_server() -> None:
    with pytest.raises(UnavailableError, match=r"^refused$"):
        run(ResendPolicy(), failing(UnavailableError("refused"), FOREVER))


def test_close_stops_retries() -> None:
    server, refused = ReachedServer("s:1", Coordinator(wait_limit_s=600)), threading.Event()

    def action() -> None:
        refused.set()
        raise UnavailableError("refused")

    def close() -> None:
        # Closes the connection while an attempt fails or waits for its retry.
        refused.wait(20)
        assert server.waiting_since is not None
        server.closed.set()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(UnavailableError):
        Resending(server).run(lambda *_: action())
    closing.join()
