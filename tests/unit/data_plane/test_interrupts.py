"""Deferred signal handlers run, whatever other handlers raise."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardwell.data_plane import transfers
from shardwell.data_plane.transfers import uninterrupted


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Signals that reached the process's handlers. The handler of SIGINT raises, as Ctrl-C does."""
    found: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        found.append(number)
        raise KeyboardInterrupt

    former = [
        signal.signal(signal.SIGINT, interrupt),
        signal.signal(signal.SIGTERM, lambda number, frame: found.append(number)),
    ]
    yield found
    signal.signal(signal.SIGINT, former[0])
    signal.signal(signal.SIGTERM, former[1])


def test_every_deferred_handler_runs_if_one_raises(received: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert not received
    assert received == [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("deferred", [False, True], ids=["alone", "after a deferred signal"])
def test_interrupt_while_handlers_are_restored_leaves_no_signal_deferred(
    received: list[int], monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    set_handler: Callable[..., Any] = transfers._set_handler
    calls = 0

    def set_and_interrupt(number: int, handler: transfers.Handler) -> None:
        nonlocal calls
        set_handler(number, handler)
        calls += 1
        if calls == 3:  # the first handler that is restored
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(transfers, "_set_handler", set_and_interrupt)
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        if deferred:
            signal.raise_signal(signal.SIGTERM)
    expected = [signal.SIGINT, *[signal.SIGTERM] * deferred]
    assert received == expected
    signal.raise_signal(signal.SIGTERM)
    assert received == [*expected, signal.SIGTERM]
    with uninterrupted:
        pass
    assert signal.getsignal(signal.SIGTERM) != uninterrupted._defer
