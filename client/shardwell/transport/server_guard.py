"""Decides how to handle a failed operation on a shard server: retry it, raise its error, or raise a better one.

Note: [Asking the coordinator]
    A trainer sees only that a connection broke, that a server does not know the run, or that a version is gone. The
    coordinator has the reason: the run was deleted, the server lost its shards, or the trainer lost its lease. The
    guard therefore asks the coordinator before an operation fails, and raises the error that the coordinator returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from shardwell_wire.errors import (
    ConflictError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
    VersionGoneError,
)
from shardwell_wire.retry import backoff

Result = TypeVar("Result")

_ASK_PAUSE_S = 0.05
_EXPLAINABLE = (NotFoundError, VersionGoneError, StaleEpochError, ConflictError)
"""Errors of a server for which the coordinator may have the reason."""
_SETTLE_S = 5.0
"""How long a restarted server may reject trainers, until the server has registered with the coordinator."""


class ServerGuard:
    """Runs operations on one shard server, and repeats them while the server is unavailable. Thread-safe.

    Args:
        address: host:port.
        ask: Asks the coordinator; raises if this trainer cannot continue. None: every error is final.
        wait_limit_s: How long the server may be unavailable.
    """

    def __init__(self, address: str, ask: Callable[[], None] | None = None, wait_limit_s: float = 0.0) -> None:
        self.address, self._ask, self._wait_limit_s = address, ask, wait_limit_s
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._started: dict[object, float] = {}

    @property
    def waiting_since(self) -> float | None:
        """Start of the oldest operation in flight, by ``time.monotonic``. None if there is none."""
        with self._lock:
            return min(self._started.values(), default=None)

    def run(self, what: str, action: Callable[[], Result], *, repeat: bool = True) -> Result:
        """Runs an operation.

        Args:
            what: Name of the operation in errors.
            action: The operation. It may be repeated.
            repeat: Whether to repeat it while the server is unavailable.

        Raises:
            RunDeletedError: The run was deleted.
            ConflictError: The server has lost its shards of the run.
            StaleEpochError: This trainer has lost its lease.
            UnavailableError: The server was unavailable for ``wait_limit_s``, or the session was closed.
        """
        token, started = object(), time.monotonic()
        with self._lock:
            self._started[token] = started
        try:
            return self._run(what, action, started) if repeat else action()
        finally:
            with self._lock:
                del self._started[token]

    def explain(self, error: ShardwellError) -> None:
        """Raises the coordinator's error if the coordinator knows why an operation failed with ``error``."""
        if self._ask is None:
            return
        deadline = time.monotonic() + (_SETTLE_S if isinstance(error, NotFoundError) else 0.0)
        while True:
            self._ask()
            if time.monotonic() >= deadline or self._closed.wait(_ASK_PAUSE_S):
                return

    def close(self) -> None:
        """Stops all retries."""
        self._closed.set()

    def _run(self, what: str, action: Callable[[], Result], started: float) -> Result:
        # `retry` cannot express this loop: errors of the coordinator are final, also those that `retry` would repeat.
        pauses: Iterator[float] | None = None
        while True:
            try:
                return action()
            except UnavailableError as error:
                if self._ask is None:
                    raise
                self._ask()
                pauses = pauses or backoff()
                pause_s, tried_s = next(pauses), time.monotonic() - started
                if tried_s + pause_s > self._wait_limit_s or self._closed.wait(pause_s):
                    raise self._unavailable(what, error, tried_s) from error
            except UnauthenticatedError as error:
                if self._ask is None or "expired_s" not in error.data:
                    raise
                self._ask()
                raise StaleEpochError(str(error), **error.data) from error
            except _EXPLAINABLE as error:
                self.explain(error)
                raise

    def _unavailable(self, what: str, error: UnavailableError, tried_s: float) -> UnavailableError:
        return UnavailableError(
            f"{what}: the shard server at {self.address} could not be reached for {tried_s:.1f} s: {error}. The "
            "coordinator has not reported its end: check the server's process and the network to it (shardwell servers "
            "shows its state), then start this trainer again",
            **{**error.data, "address": self.address},
        )
