"""The one owner of resending: every operation on a shard server that is repeated is repeated here.

Transports try once. ``Resending.run`` decides after each failure, by this table, whether to repeat the operation:

| failure | repeated | at most | asked before |
|---|---|---|---|
| the transport broke | at once, on a new one of the same kind | once in a row | nobody |
| UnavailableError, TooManyRequestsError | after pauses of 0.05 to 1 s | ``Operation.quiet_s`` | nobody |
| the same, for longer | after pauses of 0.05 to 1 s | ``ResendPolicy.wait_limit_s`` | coordinator |
| CorruptDataError | at once, and counted | three in a row, which name both hosts | nobody |
| any error, and the shard has moved | at its new owner, when all moves are applied | each move | coordinator |
| DeadlineError of a wait for a version | at once; one wait takes ``ASK_S`` | the caller's deadline | membership |
| NotFound, VersionGone, StaleEpoch, Conflict | never; the coordinator may have a better error | - | coordinator |
| any other error | never | - | nobody |

Every operation may be repeated: servers drop duplicates. Kinds of operations differ in their ``Operation``, and runs in
their ``ResendPolicy``: a reader asks nobody, and an unavailable server fails its operation after ``quiet_s``.

Note: [Asking the coordinator]
    A trainer sees only that a connection broke, that a server does not know the run, or that a version is gone. The
    coordinator has the reason: the run was deleted, the server lost its shards, or the trainer lost its lease. The
    coordinator is therefore asked before an operation fails, and the error that it returns is raised.

Note: [Corrupt transfers]
    A stream whose bytes do not match their checksum was damaged between the memory of the two processes. Nothing was
    read or stored, and every transfer may be repeated. It is repeated and counted, at both ends of the connection: the
    receiver finds the wrong checksum, and a server returns it as an error to the trainer that sent the stream. After
    ``MAX_CORRUPT`` damaged attempts in a row the cause does not disappear by itself.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardwell_wire.connection.channel import MAX_CORRUPT, backoff
from shardwell_wire.errors import (
    ConflictError,
    CorruptDataError,
    DeadlineError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    TooManyRequestsError,
    UnauthenticatedError,
    UnavailableError,
    VersionGoneError,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ASK_S = 1.0
"""How long a server waits for a version before the trainer checks that it is still a member of the run."""

_QUIET_S = 2.0
_ASK_PAUSE_S = 0.05
_SETTLE_S = 5.0
"""How long a restarted server may reject trainers, until the server has registered with the coordinator."""
_EXPLAINABLE = (NotFoundError, VersionGoneError, StaleEpochError, ConflictError)
"""Errors of a server for which the coordinator may have the reason."""


@dataclass(frozen=True, slots=True)
class Operation:
    """How one kind of operation is repeated."""

    what: str
    """Its name in errors."""
    quiet_s: float = _QUIET_S
    """How long an unavailable server is tried before the coordinator is asked."""
    asks: bool = True
    """Whether the coordinator is asked after that, and the operation repeated. Otherwise it fails."""
    max_corrupt: int = MAX_CORRUPT
    """Attempts in a row with a wrong checksum before the operation fails."""
    is_shared: bool = False
    """Whether it needs the transport through shared memory."""
    holds_copy: bool = False
    """Whether its caller holds a copy of the shard on this host, for which the thread that moves shards waits."""


TRANSFER = Operation("a transfer")
SHARED_TRANSFER = Operation("a transfer through shared memory", is_shared=True)
REQUEST = Operation("a request")
UPLOAD = Operation("an upload of initial values", asks=False)
"""The unit may get another owner, so nobody waits for this one."""
MEASUREMENT = Operation("a measurement", quiet_s=0.0, asks=False)
FETCH_BATCH = Operation("a batch of fetches", quiet_s=0.0, asks=False, max_corrupt=1)
PUSH_BATCH = Operation("a batch of pushes", quiet_s=0.0, asks=False)
"""Parts of a batch that failed are transferred one by one; see ``batches.py``."""


class CorruptTransfers:
    """Counts the transfers whose bytes arrived with a wrong checksum. Thread-safe. See Note: [Corrupt transfers]."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, address: str, what: str, error: CorruptDataError) -> None:
        """Counts a transfer from or to the server at an address."""
        with self._lock:
            self._counts[address] += 1
        logger.warning("%s between this host and the shard server at %s was damaged: %s", what, address, error)

    def by_server(self) -> dict[str, int]:
        """Returns the counts by the servers' addresses."""
        with self._lock:
            return dict(self._counts)


class ResendPolicy:
    """How long a run's servers are awaited, and who is asked meanwhile. This base class asks nobody, as a reader.

    Args:
        wait_limit_s: How long a server may be unavailable.
    """

    asks = False
    """Whether there is a coordinator to ask."""

    def __init__(self, wait_limit_s: float = 0.0) -> None:
        self.wait_limit_s = wait_limit_s
        self.corrupt = CorruptTransfers()

    def check(self) -> None:
        """Called before an operation is repeated; raises if that is pointless."""

    def ask(self) -> None:
        """Asks the coordinator; raises if this trainer cannot continue."""

    def settle(self, *, mapped: bool = True) -> None:
        """Waits until all moves of shards that the coordinator has reported are applied.

        Args:
            mapped: Whether to wait until the shards are mapped again, too, and not only connected to their owners.

        Raises:
            UnavailableError: They could not be applied in time.
        """

    def require_valid(self) -> None:
        """Raises StaleEpochError if this trainer is no member of the run now."""


class ReachedServer:
    """What resending must know of a server. Thread-safe.

    Args:
        policy: How failed operations on the server are repeated. None: as a reader does.
    """

    def __init__(self, address: str, policy: ResendPolicy | None = None) -> None:
        self.address, self.policy = address, policy or ResendPolicy()
        self.closed = threading.Event()
        """Set when the connection is closed. Ends all repetitions."""
        self.in_flight: dict[object, float] = {}
        """Start of each operation that has not ended, by ``time.monotonic``."""

    @property
    def waiting_since(self) -> float | None:
        """Start of the oldest operation in flight, by ``time.monotonic``. None if there is none."""
        return min(list(self.in_flight.values()), default=None)

    def lost_transport(self, error: ShardwellError, operation: Operation) -> bool:
        """Returns whether an operation failed because its transport broke. The next attempt opens another."""
        return False


Server = TypeVar("Server", bound=ReachedServer)


class Resending(Generic[Server]):
    """Runs operations on a server, and repeats them by the table above. Thread-safe."""

    def __init__(self, server: Server) -> None:
        self.server, self.policy = server, server.policy

    def run(
        self,
        action: Callable[[Server, float], Result],
        operation: Operation = TRANSFER,
        *,
        until_s: float | None = None,
        member: bool = True,
    ) -> Result:
        """Runs an operation.

        Args:
            action: One attempt at a server. Its last argument is how long the server may wait for a version.
            operation: How it is repeated.
            until_s: How long the operation waits for a version, by ``time.monotonic``. None: for ``ASK_S``.
            member: Whether this trainer must be a member of the run to repeat the operation at another owner, or to
                wait longer than ``ASK_S``.

        Raises:
            CorruptDataError: Several attempts in a row had a wrong checksum.
            RunDeletedError: The run was deleted.
            ConflictError: The server has lost its shards of the run.
            StaleEpochError: This trainer has lost its lease, or the run was rolled back.
            UnavailableError: The server was unavailable for too long, or the session was closed.
            ShardwellError: The operation's error at the present owner of the shard.
        """
        server, started, token = self.server, time.monotonic(), object()
        failures: _Failures | None = None
        server.in_flight[token] = started
        try:
            while True:
                wait_s = ASK_S if until_s is None else min(ASK_S, max(0.0, until_s - time.monotonic()))
                try:
                    return action(server, wait_s)
                except ShardwellError as error:
                    failures = failures or _Failures(operation, self.policy, started)
                    try:
                        failures.pause(error, server)
                    except ShardwellError as final:
                        # An error that is raised here is the final one, with the reason that the coordinator knows.
                        if not self._has_moved(server, final, operation, member):
                            waits_on = until_s is not None and wait_s >= ASK_S and time.monotonic() < until_s
                            if not waits_on or not isinstance(final, DeadlineError):
                                raise
                            if member:  # the version never comes if the run went back to an older one
                                self.policy.require_valid()
                if server is not self.server:
                    del server.in_flight[token]
                    server = self.server
                    server.in_flight[token] = started
                    failures = None
        finally:
            server.in_flight.pop(token, None)

    def _has_moved(self, server: Server, error: ShardwellError, operation: Operation, member: bool) -> bool:
        """Returns whether the operation is to be repeated at another server. Raises if that is pointless."""
        return False


class _Failures:
    """The failed attempts of one operation at one server.

    Args:
        operation: How it is repeated.
        policy: How long, and whom to ask.
        started: Its start, by ``time.monotonic``.
    """

    def __init__(self, operation: Operation, policy: ResendPolicy, started: float) -> None:
        self._operation, self._policy, self._started = operation, policy, started
        self._quiet_until = started + operation.quiet_s
        self._corrupt_count = 0
        self._was_at_once = False
        """Whether the last failure was repeated without a pause, because a transport broke."""
        self._pauses: Iterator[float] | None = None

    def pause(self, error: ShardwellError, server: ReachedServer) -> None:
        """Returns when the operation may be repeated at the server. Otherwise raises its error, or a better one."""
        if isinstance(error, CorruptDataError):
            self._policy.corrupt.add(server.address, self._operation.what, error)
            self._corrupt_count += 1
            if self._corrupt_count >= self._operation.max_corrupt:
                raise self._damaged(error, server) from error
            return
        broke = isinstance(error, UnavailableError | ConflictError) and not self._was_at_once
        # A broken connection is replaced at once, but only once: if the next attempt fails too, the pauses below apply.
        if broke and not server.closed.is_set() and server.lost_transport(error, self._operation):
            self._was_at_once = True
            return
        self._was_at_once = False
        if isinstance(error, UnavailableError | TooManyRequestsError):
            self._corrupt_count = 0
            self._await(error, server)
        elif not self._policy.asks or not self._operation.asks:
            raise error
        elif isinstance(error, UnauthenticatedError) and "expired_s" in error.data:
            self._policy.ask()
            raise StaleEpochError(str(error), **error.data) from error
        else:
            if isinstance(error, _EXPLAINABLE):
                self._explain(error, server)
            raise error

    def _await(self, error: ShardwellError, server: ReachedServer) -> None:
        """Pauses while a server is unavailable."""
        if server.closed.is_set():
            raise error
        self._policy.check()
        self._pauses = self._pauses or backoff()
        pause_s, now = next(self._pauses), time.monotonic()
        if now + pause_s > self._quiet_until:
            if not self._policy.asks or not self._operation.asks:
                raise error
            self._policy.ask()
            self._quiet_until = time.monotonic() + self._operation.quiet_s
            if now - self._started + pause_s > self._policy.wait_limit_s:
                raise self._unavailable(error, server, now - self._started) from error
        if server.closed.wait(pause_s):
            raise error

    def _explain(self, error: ShardwellError, server: ReachedServer) -> None:
        """Raises the coordinator's error if the coordinator knows why an operation failed with ``error``."""
        deadline = time.monotonic() + (_SETTLE_S if isinstance(error, NotFoundError) else 0.0)
        while True:
            self._policy.ask()
            if time.monotonic() >= deadline or server.closed.wait(_ASK_PAUSE_S):
                return

    def _damaged(self, error: CorruptDataError, server: ReachedServer) -> CorruptDataError:
        return CorruptDataError(
            f"{self._operation.what} between this host, {socket.gethostname()!r}, and the shard server at "
            f"{server.address} was damaged {self._corrupt_count} times in a row: {error}. Check the memory and the "
            "network interfaces of both hosts, and what is between them; session.stats()['corrupt_transfer_count'] and "
            "the events of the run count such transfers",
            **{**error.data, "address": server.address},
        )

    def _unavailable(self, error: ShardwellError, server: ReachedServer, tried_s: float) -> ShardwellError:
        if not isinstance(error, UnavailableError):
            return error
        return UnavailableError(
            f"{self._operation.what}: the shard server at {server.address} could not be reached for {tried_s:.1f} s: "
            f"{error}. The coordinator has not reported another server for its shards. If the server's process has "
            "ended, start it again under its id on its host. Otherwise check the network to it (shardwell servers "
            "shows its state). Then start this trainer again",
            **{**error.data, "address": server.address},
        )
