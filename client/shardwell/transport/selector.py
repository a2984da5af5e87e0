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

Selects the transports to one shard server, and opens another when one breaks.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from shardwell.transport.base import BatchAnswers, ByteCounter, SharedTransport, StreamTransport, Transport
from shardwell.transport.grpc_transport import GrpcTransport, ShardClient
from shardwell.transport.shm_transport import ShmTransport
from shardwell.transport.socket_transport import SocketTransport
from shardwell_wire.connection.channel import MAX_CORRUPT, backoff
from shardwell_wire.errors import (
    ConflictError,
    CorruptDataError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
    UsageError,
    VersionGoneError,
    from_status_details,
)
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import shard_pb2

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


AnyTransport = TypeVar("AnyTransport", bound=Transport)

_NOTICE_S = 1.0
"""How long to wait, after the server rejected a session, for this process to notice that the session broke."""

SHARED_TRANSPORTS: dict[str, Callable[[TransportSelector], SharedTransport]] = {
    ShmTransport.name: lambda server: ShmTransport(
        server.client, server.run, server.control, timeout_s=server.open_timeout_s
    ),
}
STREAM_TRANSPORTS: dict[str, Callable[[TransportSelector], StreamTransport]] = {
    SocketTransport.name: lambda server: SocketTransport(
        server.client, server.run, server.counter, timeout_s=server.open_timeout_s
    ),
    GrpcTransport.name: lambda server: GrpcTransport(server.client, server.counter),
}

TRANSPORT_NAMES = (*SHARED_TRANSPORTS, *STREAM_TRANSPORTS)
"""Names of all transports, the fastest first."""


def parse_transports(text: str) -> tuple[str, ...]:
    """Returns the transports that a list such as ``shm,grpc`` names, in its order.

    Raises:
        UsageError: The list is no text, a name is unknown, or a transport through shared memory is not the first.
    """
    if not isinstance(text, str):
        raise UsageError(f"transports={text!r}: expected one text with commas, such as {','.join(TRANSPORT_NAMES)!r}")
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names or any(name not in TRANSPORT_NAMES for name in names):
        raise UsageError(f"transports={text!r}: expected some of {', '.join(TRANSPORT_NAMES)}, the preferred one first")
    for name in names[1:]:
        if name in SHARED_TRANSPORTS:
            raise UsageError(f"transports={text!r}: {name} must come first, because it is the fastest where it works")
    return names


class TransportSelector:
    """The transports of this trainer to one shard server, for one run. Thread-safe.

    A transport through shared memory is used if it is the first in the list and can be opened. Everything else uses
    the first stream transport that can be opened.

    Args:
        client: Calls the server's rpcs.
        run: The run. The server must own a shard of it already.
        names: Names of the transports to try, in this order.
        guard: Runs every operation, which may be repeated; raises as ``ServerGuard.run`` does.
        check: Called when no transport can be opened; raises if the server is not to be used any more.
        open_timeout_s: Deadline for opening a transport.

    Raises:
        UnavailableError: None of the transports can be opened.
    """

    client: ShardClient
    run: RunIdentity
    counter: ByteCounter
    """Streamed bytes, in their encoded size."""
    open_timeout_s: float
    bytes_per_s: float
    """Bandwidth, measured when the transport was opened."""

    def __init__(
        self,
        client: ShardClient,
        run: RunIdentity,
        *,
        names: Sequence[str],
        guard: ServerGuard,
        check: Callable[[], None],
        open_timeout_s: float,
    ) -> None:
        self.client, self.run, self.guard, self.open_timeout_s = client, run, guard, open_timeout_s
        self._names, self._check = tuple(names), check
        self.counter = ByteCounter()
        self._open_lock = threading.RLock()
        self._shared: SharedTransport | None = None
        self._stream: StreamTransport | None = None
        self._not_offered = set[str]()
        """Transports that the server refused because it does not offer them."""
        try:
            if self._names[0] in SHARED_TRANSPORTS:
                self._shared = self._try_open(SHARED_TRANSPORTS, self._names[0])
            if self._shared is None:
                self._stream = self._open_stream()
            self.bytes_per_s = guard.run(
                "a measurement", lambda: self.transport.measure(timeout_s=open_timeout_s), repeat=False
            )
        except BaseException:
            self.close()
            raise

    @property
    def transport(self) -> Transport:
        """The transport in use."""
        if self._shared is not None:
            return self._shared
        # Heartbeats read this after the stream broke. They must not open another one.
        return self._stream or self.require_stream()

    @property
    def stream_name(self) -> str | None:
        """Name of the stream transport, if one was opened."""
        return None if self._stream is None else self._stream.name

    @property
    def shared(self) -> SharedTransport | None:
        """The transport through shared memory, if there is one."""
        return self._shared

    # ---- operations on a transport, repeated when it breaks ----

    def over_rpcs(self, action: Callable[[ShardClient], Result]) -> Result:
        return self.guard.run("a request", lambda: action(self.client))

    def over_stream(self, action: Callable[[StreamTransport], Result]) -> Result:
        def attempt() -> Result:
            stream = self.require_stream()
            try:
                return action(stream)
            except UnavailableError as error:
                if not stream.broke:
                    raise
                logger.warning(
                    "shard server at %s: transport %s broke, opening another: %s",
                    self.client.address,
                    stream.name,
                    error,
                )
            return action(self.require_stream())

        return self.guard.run("a transfer", attempt)

    def over_shared(self, action: Callable[[SharedTransport], Result]) -> Result:
        def attempt() -> Result:
            shared = self.require_shared()
            try:
                return action(shared)
            except (ConflictError, UnavailableError):  # a server rejects messages about a session that broke
                if not shared.broke_within(_NOTICE_S):
                    raise
            return action(self.require_shared())

        return self.guard.run("a transfer through shared memory", attempt)

    def require_stream(self) -> StreamTransport:
        """Returns the stream transport. Opens one if there is none, or if the last one broke."""
        with self._open_lock:
            if self._stream is None or self._stream.broke:
                self._stream = self._open_stream()
            return self._stream

    def require_shared(self) -> SharedTransport:
        """Returns the transport through shared memory. Opens another if the last one broke."""
        with self._open_lock:
            assert self._shared is not None
            if self._shared.broke:
                logger.warning(
                    "shard server at %s: transport %s broke, opening another", self.client.address, self._shared.name
                )
                self._shared = SHARED_TRANSPORTS[self._shared.name](self)
            return self._shared

    def control(
        self, request: shard_pb2.ReduceGradientBufferRequest, *, timeout_s: float, retry_for_s: float
    ) -> shard_pb2.ReduceGradientBufferResponse:
        """Sends a control message of a shared transport: over a stream transport, or by an rpc if none is allowed."""

        def send(path: StreamTransport | ShardClient) -> shard_pb2.ReduceGradientBufferResponse:
            return path.control(request, timeout_s=timeout_s, retry_for_s=retry_for_s)

        return (
            self.over_stream(send) if any(name in STREAM_TRANSPORTS for name in self._names) else self.over_rpcs(send)
        )

    def fetch_batch(self, request: shard_pb2.GatherBatchRequest, answers: BatchAnswers, *, timeout_s: float) -> None:
        """Sends a batch of small fetches once."""
        self.guard.run(
            "a batch of fetches",
            lambda: self.require_stream().fetch_batch(request, answers, timeout_s=timeout_s),
            repeat=False,
            max_corrupt=1,
        )

    def push_batch(self, request: shard_pb2.ReduceBatchRequest, *, timeout_s: float) -> shard_pb2.ReduceBatchResponse:
        """Sends a batch of small pushes once, on the way of ``control``."""
        streams = any(name in STREAM_TRANSPORTS for name in self._names)

        def send() -> shard_pb2.ReduceBatchResponse:
            return (self.require_stream() if streams else self.client).push_batch(request, timeout_s=timeout_s)

        return self.guard.run("a batch of pushes", send, repeat=False)

    # ---- opening and closing ----

    def _open_stream(self) -> StreamTransport:
        for name in self._names:
            if name in STREAM_TRANSPORTS and (stream := self._try_open(STREAM_TRANSPORTS, name)) is not None:
                return stream
        self._check()
        # A server that does not offer a transport will not offer it later.
        kind = ConflictError if self._not_offered.issuperset(self._names) else UnavailableError
        raise kind(
            f"shard server at {self.client.address}: none of the transports {', '.join(self._names)} can be opened; "
            f"the log says why. Allow grpc too: transports={','.join(self._names)},grpc"
        )

    def _try_open(
        self, openers: Mapping[str, Callable[[TransportSelector], AnyTransport]], name: str
    ) -> AnyTransport | None:
        try:
            return openers[name](self)
        except (ShardwellError, OSError) as error:
            # Shared memory cannot work with a server on another host, and a server need not offer every stream
            # transport. Neither needs a warning.
            expected = (
                not is_this_host(self.client.address) if name in SHARED_TRANSPORTS else type(error) is ConflictError
            )
            if type(error) is ConflictError:
                self._not_offered.add(name)
            level = logging.INFO if expected else logging.WARNING
            logger.log(level, "shard server at %s: no transport %s: %s", self.client.address, name, error)
            return None

    def close(self) -> None:
        """Closes the transports. Transfers in flight fail."""
        for transport in (self._shared, self._stream):
            if transport is not None:
                transport.close()


def is_this_host(address: str) -> bool:
    """Returns whether host:port names this host."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1", socket.gethostname()) or host.startswith("127.")
