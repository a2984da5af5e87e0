"""What a failed operation on a shard server means: decided here, for everything that a trainer does there.

Note: Who is asked
    A trainer sees only that a connection broke, that a server does not know the run, or that a version is gone. Why,
    the coordinator knows: the run was deleted, the server has lost its shards, or the trainer its lease. It is
    therefore asked before an operation fails, and its answer is what the user sees.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from shardwell_wire.errors import (
    ConflictError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
    VersionGoneError,
)

Result = TypeVar("Result")

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 1.0
_DOUBTFUL = (NotFoundError, VersionGoneError, StaleEpochError, ConflictError)
"""What a server says of something that the coordinator knows more about."""
_SETTLE_S = 5.0
"""A server that was started again may refuse a trainer before it has registered."""


class ServerGuard:
    """Runs operations on one shard server.

    They are repeated while the server cannot be reached. Thread-safe.

    Args:
        address: host:port.
        ask: Asks the coordinator, and raises what keeps this trainer from going on. None: every error is final.
        wait_limit_s: How long the server may be out of reach.
    """

    def __init__(self, address: str, ask: Callable[[], None] | None = None, wait_limit_s: float = 0.0) -> None:
        self.address, self._ask, self._wait_limit_s = address, ask, wait_limit_s
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._started: dict[object, float] = {}

    @property
    def waiting_since(self) -> float | None:
        """When the oldest operation that is under way began, by ``time.monotonic``. None: none is."""
        with self._lock:
            return min(self._started.values(), default=None)

    def run(self, what: str, action: Callable[[], Result], *, repeat: bool = True) -> Result:
        """Runs ``action``, which may be repeated.

        Args:
            what: What it does, for errors.
            action: The operation.
            repeat: Whether to repeat it while the server cannot be reached.

        Raises:
            RunDeletedError: The run was deleted.
            ConflictError: The server has lost its shards of the run.
            StaleEpochError: This trainer has lost its lease.
            UnavailableError: The server could not be reached for ``wait_limit_s``, or the session was closed.
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
        """Raises what the coordinator says if that is why an operation has failed with ``error``."""
        if self._ask is None:
            return
        give_up = time.monotonic() + (_SETTLE_S if isinstance(error, NotFoundError) else 0.0)
        while True:
            self._ask()
            if time.monotonic() >= give_up or self._closed.wait(_FIRST_DELAY_S):
                return

    def close(self) -> None:
        """Nothing is repeated any more."""
        self._closed.set()

    def _run(self, what: str, action: Callable[[], Result], started: float) -> Result:
        delay = _FIRST_DELAY_S
        while True:
            try:
                return action()
            except UnavailableError as error:
                if self._ask is None:
                    raise
                self._ask()
                tried_s = time.monotonic() - started
                if tried_s + delay > self._wait_limit_s or self._closed.is_set():
                    raise self._out_of_reach(what, error, tried_s) from error
            except _DOUBTFUL as error:
                self.explain(error)
                raise
            self._closed.wait(delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)

    def _out_of_reach(self, what: str, error: UnavailableError, tried_s: float) -> UnavailableError:
        return UnavailableError(
            f"{what}: the shard server at {self.address} could not be reached for {tried_s:.1f} s: {error}. As far as "
            "the coordinator knows it has not ended: check its process and the network to it (shardwell servers shows "
            "its state), then start this trainer again",
            **{**error.data, "address": self.address},
        )
