"""Tests of failed operations on a shard server: retried, explained by the coordinator, or raised."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from shardwell.transport.selector import CorruptTransfers, ServerGuard
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


class Coordinator:
    """A fake coordinator: ``ask`` raises ``knows`` after ``silent_for`` calls without an error."""

    def __init__(self, knows: ShardwellError | None = None, silent_for: int = 0) -> None:
        self.knows, self.silent_for, self.asked = knows, silent_for, 0

    def ask(self) -> None:
        self.asked += 1
        if self.knows is not None and self.asked > self.silent_for:
            raise self.knows


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
    guard = ServerGuard("s:1", Coordinator(knows).ask, wait_limit_s=60)
    with pytest.raises(type(knows)) as caught:
        guard.run("a transfer", failing(met, FOREVER))
    assert caught.value is knows


def test_unavailable_server_is_retried() -> None:
    coordinator = Coordinator()
    guard = ServerGuard("s:1", coordinator.ask, wait_limit_s=60)
    assert guard.run("a transfer", failing(UnavailableError("refused"), 3)) == "done"
    assert coordinator.asked == 3
    assert guard.waiting_since is None


def test_error_after_the_limit_names_the_server() -> None:
    guard = ServerGuard("s:1", Coordinator().ask, wait_limit_s=0.2)
    message = r"a transfer: the shard server at s:1 could not be reached for 0\.\d s: refused\. The coordinator"
    with pytest.raises(UnavailableError, match=message) as caught:
        guard.run("a transfer", failing(UnavailableError("refused", peer="p"), FOREVER))
    assert caught.value.data == {"peer": "p", "address": "s:1"}


def test_coordinator_is_asked_until_a_restarted_server_has_registered() -> None:
    lost = ConflictError("server 's1' was restarted and has lost its shards")
    guard = ServerGuard("s:1", Coordinator(lost, silent_for=3).ask, wait_limit_s=60)
    with pytest.raises(ConflictError) as caught:
        guard.run("a transfer", failing(NotFoundError("no run 'r' on this server"), FOREVER))
    assert caught.value is lost


def test_unexplained_error_is_unchanged() -> None:
    gone = VersionGoneError("version 3 is gone")
    coordinator = Coordinator()
    with pytest.raises(VersionGoneError) as caught:
        ServerGuard("s:1", coordinator.ask, wait_limit_s=60).run("a transfer", failing(gone, FOREVER))
    assert caught.value is gone
    assert coordinator.asked == 1


DAMAGED = CorruptDataError("gradient of unit 'u': the bytes have checksum 0x1, expected 0x2")


@pytest.mark.parametrize("ask", [None, Coordinator().ask], ids=["reader", "trainer"])
@pytest.mark.parametrize("repeat", [False, True])
def test_damaged_transfer_is_repeated_twice(ask: Callable[[], None] | None, repeat: bool) -> None:
    corrupt = CorruptTransfers()
    guard = ServerGuard("s:1", ask, 60.0, corrupt)
    assert guard.run("a transfer", failing(DAMAGED, 2), repeat=repeat) == "done"
    assert corrupt.by_server() == {"s:1": 2}
    with pytest.raises(CorruptDataError, match=r"and the shard server at s:1 was damaged 3 times in a row: gradient"):
        guard.run("a transfer", failing(DAMAGED, FOREVER), repeat=repeat)
    assert corrupt.by_server() == {"s:1": 5}


def test_damaged_attempts_are_counted_in_a_row() -> None:
    errors = [DAMAGED, DAMAGED, UnavailableError("refused"), DAMAGED, DAMAGED]

    def action() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    assert ServerGuard("s:1", Coordinator().ask, wait_limit_s=60).run("a transfer", action) == "done"


def test_close_stops_retries() -> None:
    guard, refused = ServerGuard("s:1", Coordinator().ask, wait_limit_s=600), threading.Event()

    def action() -> None:
        refused.set()
        raise UnavailableError("refused")

    def close() -> None:
        # Closes the guard while an attempt fails or waits for its retry.
        refused.wait(20)
        assert guard.waiting_since is not None
        guard.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(UnavailableError):
        guard.run("a transfer", action)
    closing.join()
