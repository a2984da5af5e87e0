"""Decides how to handle a failed operation on a shard server: retry it, raise its error, or raise a better one.

Note: [Asking the coordinator]
    A trainer sees only that a connection broke, that a server does not know the run, or that a version is gone. The
    coordinator has the reason: the run was deleted, the server lost its shards, or the trainer lost its lease. The
    guard therefore asks the coordinator before an operation fails, and raises the error that the coordinator returns.

Note: [Corrupt transfers]
    A stream whose bytes do not match their checksum was damaged between the memory of the two processes. Nothing was
    read or stored, and every transfer may be repeated. The guard repeats it and counts it, at both ends of the
    connection: the receiver finds the wrong checksum, and a server returns it as an error to the trainer that sent the
    stream. After ``MAX_CORRUPT`` damaged attempts in a row the cause does not disappear by itself.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

from shardwell_wire.errors import (
    ConflictError,
    CorruptDataError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
    VersionGoneError,
    from_status_details,
)
from shardwell_wire.retry import MAX_CORRUPT, backoff

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_ASK_PAUSE_S = 0.05
_EXPLAINABLE = (NotFoundError, VersionGoneError, StaleEpochError, ConflictError)
"""Errors of a server for which the coordinator may have the reason."""
_SETTLE_S = 5.0
"""How long a restarted server may reject trainers, until the server has registered with the coordinator."""


class CorruptTransfers:
    """Counts the transfers whose bytes arrived with a wrong checksum. Thread-safe. See Note: [Corrupt transfers]."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, address: str) -> None:
        """Counts a transfer from or to the server at an address."""
        with self._lock:
            self._counts[address] += 1

    def by_server(self) -> dict[str, int]:
        """Returns the counts by the servers' addresses."""
        with self._lock:
            return dict(self._counts)


class ServerGuard:
    """Runs operations on one shard server, and repeats them while the server is unavailable. Thread-safe.

    Also repeats transfers whose bytes arrived with a wrong checksum. See Note: [Corrupt transfers].

    Args:
        address: host:port.
        ask: Asks the coordinator; raises if this trainer cannot continue. None: an unavailable server is not awaited.
        wait_limit_s: How long the server may be unavailable.
        corrupt: Counts transfers with a wrong checksum. None: they are only logged.
    """

    def __init__(
        self,
        address: str,
        ask: Callable[[], None] | None = None,
        wait_limit_s: float = 0.0,
        corrupt: CorruptTransfers | None = None,
    ) -> None:
        self.address, self._ask, self._wait_limit_s = address, ask, wait_limit_s
        self._corrupt = corrupt or CorruptTransfers()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._started: dict[object, float] = {}

    @property
    def waiting_since(self) -> float | None:
        """Start of the oldest operation in flight, by ``time.monotonic``. None if there is none."""
        with self._lock:
            return min(self._started.values(), default=None)

    def run(
        self, what: str, action: Callable[[], Result], *, repeat: bool = True, max_corrupt: int = MAX_CORRUPT
    ) -> Result:
        """Runs an operation.

        Args:
            what: Name of the operation in errors.
            action: The operation. It may be repeated.
            repeat: Whether to repeat it while the server is unavailable.
            max_corrupt: Attempts in a row with a wrong checksum before the operation fails.

        Raises:
            CorruptDataError: That many attempts in a row had a wrong checksum.
            RunDeletedError: The run was deleted.
            ConflictError: The server has lost its shards of the run.
            StaleEpochError: This trainer has lost its lease.
            UnavailableError: The server was unavailable for ``wait_limit_s``, or the session was closed.
        """
        token, started = object(), time.monotonic()
        with self._lock:
            self._started[token] = started
        try:
            return self._run(what, action, started, repeat, max_corrupt)
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

    def note_rejected(self, what: str, status: bytes) -> None:
        """Counts a part of a transfer if its bytes arrived with a wrong checksum.

        Args:
            what: Name of the part in the log.
            status: The ``google.rpc.Status`` with which the server rejected the part. Empty: the part was accepted.
        """
        if status and isinstance(error := from_status_details(status, self.address), CorruptDataError):
            self._note_corrupt(what, error)

    def _note_corrupt(self, what: str, error: CorruptDataError) -> None:
        self._corrupt.add(self.address)
        logger.warning("%s between this host and the shard server at %s was damaged: %s", what, self.address, error)

    def close(self) -> None:
        """Stops all retries."""
        self._closed.set()

    def _run(self, what: str, action: Callable[[], Result], started: float, repeat: bool, max_corrupt: int) -> Result:
        # `retry` cannot express this loop: errors of the coordinator are final, also those that `retry` would repeat.
        pauses: Iterator[float] | None = None
        corrupt_count = 0
        while True:
            try:
                return action()
            except CorruptDataError as error:
                self._note_corrupt(what, error)
                corrupt_count += 1
                if corrupt_count >= max_corrupt:
                    raise self._damaged(what, error, corrupt_count) from error
            except UnavailableError as error:
                if self._ask is None or not repeat:
                    raise
                self._ask()
                corrupt_count = 0
                pauses = pauses or backoff()
                pause_s, tried_s = next(pauses), time.monotonic() - started
                if tried_s + pause_s > self._wait_limit_s or self._closed.wait(pause_s):
                    raise self._unavailable(what, error, tried_s) from error
            except UnauthenticatedError as error:
                if self._ask is None or not repeat or "expired_s" not in error.data:
                    raise
                self._ask()
                raise StaleEpochError(str(error), **error.data) from error
            except _EXPLAINABLE as error:
                if repeat:
                    self.explain(error)
                raise

    def _damaged(self, what: str, error: CorruptDataError, count: int) -> CorruptDataError:
        return CorruptDataError(
            f"{what} between this host, {socket.gethostname()!r}, and the shard server at {self.address} was damaged "
            f"{count} times in a row: {error}. Check the memory and the network interfaces of both hosts, and what is "
            "between them; session.stats()['corrupt_transfer_count'] and the events of the run count such transfers",
            **{**error.data, "address": self.address},
        )

    def _unavailable(self, what: str, error: UnavailableError, tried_s: float) -> UnavailableError:
        return UnavailableError(
            f"{what}: the shard server at {self.address} could not be reached for {tried_s:.1f} s: {error}. The "
            "coordinator has not reported another server for its shards. If the server's process has ended, start it "
            "again under its id on its host. Otherwise check the network to it (shardwell servers shows its state). "
            "Then start this trainer again",
            **{**error.data, "address": self.address},
        )
