"""Selects the transport to each shard server, replaces it when it breaks, and falls back when it has no memory."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from shardwell.transport.base import (
    ByteCounter,
    FetchTarget,
    GradientPart,
    NearlyDone,
    PreparedPush,
    ShardAddress,
    SharedTransport,
    StreamTransport,
    Transport,
    ignore,
)
from shardwell.transport.grpc_transport import GrpcTransport
from shardwell.transport.partitions import (
    CachedPartition,
    PartitionLocation,
    PartitionSegment,
    SharedPartitionSegment,
)
from shardwell.transport.server_guard import ServerGuard
from shardwell.transport.shard_client import ShardClient
from shardwell.transport.shm_transport import ShmTransport
from shardwell.transport.socket_transport import SocketTransport
from shardwell_wire.credentials import Credentials
from shardwell_wire.errors import (
    CapacityError,
    ConflictError,
    ShardwellError,
    UnavailableError,
    UsageError,
    VersionGoneError,
)
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import common_pb2, shard_pb2

logger = logging.getLogger(__name__)

AnyTransport = TypeVar("AnyTransport", bound=Transport)
Result = TypeVar("Result")

OPEN_TIMEOUT_S = 60.0
"""Deadline for opening a transport. Long, because a server that receives a large upload may respond late."""

_NOTICE_S = 1.0
"""How long to wait, after the server rejected a session, for this process to notice that the session broke."""

_RETRY_S = 2.0
"""How long a transport retries by itself before the guard asks the coordinator why the server is unavailable."""

SHARED_TRANSPORTS: dict[str, Callable[[ServerConnection], SharedTransport]] = {
    ShmTransport.name: lambda server: ShmTransport(
        server.client, server.run, server.control, timeout_s=server.open_timeout_s
    ),
}
STREAM_TRANSPORTS: dict[str, Callable[[ServerConnection], StreamTransport]] = {
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
        UsageError: A name is unknown, or a transport through shared memory is not the first.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names or any(name not in TRANSPORT_NAMES for name in names):
        raise UsageError(f"transports={text!r}: expected some of {', '.join(TRANSPORT_NAMES)}, the preferred one first")
    for name in names[1:]:
        if name in SHARED_TRANSPORTS:
            raise UsageError(f"transports={text!r}: {name} must come first, because it is the fastest where it works")
    return names


class ServerConnection:
    """All transports of this trainer to one shard server, for one run. Thread-safe.

    A transport through shared memory is used if it is the first in the list and can be opened. Everything else uses
    the first stream transport that can be opened, including transfers for which the server has no shared memory.

    Every operation runs under the guard, may be repeated, and raises as ``ServerGuard.run`` does.

    Args:
        address: host:port.
        run: The run. The server must own a shard of it already.
        transports: Names of the transports to try, in this order.
        chunk_bytes: Payload per gRPC message.
        check: Called before a retry while the server is unavailable; raises if a retry is pointless.
        credentials: Credentials of the cluster. None: the result of ``find_credentials`` for the address.
        guard: Decides how to handle a failed operation. By default every failure is final.
        open_timeout_s: Deadline for opening a transport.

    Raises:
        UnavailableError: None of the transports can be opened.
    """

    run: RunIdentity
    client: ShardClient
    """Calls the server's rpcs."""
    counter: ByteCounter
    """Streamed bytes, in their encoded size."""
    open_timeout_s: float
    """Deadline for opening a transport."""

    def __init__(
        self,
        address: str,
        run: RunIdentity,
        *,
        transports: Sequence[str],
        chunk_bytes: int,
        check: Callable[[], None] = lambda: None,
        credentials: Credentials | None = None,
        guard: ServerGuard | None = None,
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ) -> None:
        self.guard = guard or ServerGuard(address)
        self.open_timeout_s = open_timeout_s
        self.address, self.run, self._names, self._check = address, run, tuple(transports), check
        self.client = ShardClient(address, chunk_bytes=chunk_bytes, check=check, credentials=credentials)
        self.counter = ByteCounter()
        self._open_lock = threading.RLock()
        self._shared: SharedTransport | None = None
        self._stream: StreamTransport | None = None
        try:
            if self._names[0] in SHARED_TRANSPORTS:
                self._shared = self._try_open(SHARED_TRANSPORTS, self._names[0])
            if self._shared is None:
                self._stream = self._open_stream()
            self.bytes_per_s = self.transport.measure(timeout_s=open_timeout_s)
            """Bandwidth, measured when the transport was opened."""
        except BaseException:
            self._close_transports()
            raise
        self.copies_gradients = self._shared is not None
        """Whether ``prepare_push`` copies gradients, so that their memory can be reused before they are pushed."""
        logger.info("shard server at %s: transport %s, %.2f GB/s", address, self.transport.name, self.bytes_per_s / 1e9)

    @property
    def transport(self) -> Transport:
        """The transport in use."""
        if self._shared is not None:
            return self._shared
        # Heartbeats read this after the stream broke. They must not open another one.
        return self._stream or self._require_stream()

    def describe(self) -> dict[str, Any]:
        """Returns the transport in use and its statistics, for reports."""
        return {
            "server": self.address,
            "transport": self.transport.name,
            "bytes_per_s": self.bytes_per_s,
            "received_bytes": self.counter.received_bytes,
            "sent_bytes": self.counter.sent_bytes,
        }

    # ---- weights ----

    def fetch(
        self,
        shard: ShardAddress,
        version: int | None,
        target: FetchTarget,
        *,
        wait_limit_s: float,
        nearly_done: NearlyDone = ignore,
    ) -> int:
        """Fetches one version of a shard, waiting until it exists; see ``Transport.fetch``."""
        retry_for_s, window = min(_RETRY_S, wait_limit_s), shard.window
        if window is None:
            return self._over_stream(
                lambda stream: stream.fetch(
                    shard, version, target, timeout_s=wait_limit_s, retry_for_s=retry_for_s, nearly_done=nearly_done
                )
            )
        if version is not None and window.shows(version):
            return shard.read(version, target)  # no message to the server
        return self._over_shared(
            lambda shared: shared.fetch(shard, version, target, timeout_s=wait_limit_s, retry_for_s=retry_for_s)
        )

    def fetch_average(self, shard: ShardAddress, version: int, target: FetchTarget, *, wait_limit_s: float) -> int:
        """Fetches the moving average of the values."""
        retry_for_s = min(_RETRY_S, wait_limit_s)
        return self._over_stream(
            lambda stream: stream.fetch(
                shard, version, target, timeout_s=wait_limit_s, retry_for_s=retry_for_s, average=True
            )
        )

    def await_version(self, shard: ShardAddress, version: int | None, *, wait_limit_s: float) -> int:
        """Waits until a shard in shared memory has a version; returns the version."""
        if (window := shard.window) is not None and version is not None and window.shows(version):
            return version
        if self._shared is None:
            raise UnavailableError(f"shard server at {self.address}: this process cannot map its memory")
        retry_for_s = min(_RETRY_S, wait_limit_s)
        return self._over_shared(
            lambda shared: shared.locate(shard, version, timeout_s=wait_limit_s, retry_for_s=retry_for_s)
        ).version

    def locate(self, shard: ShardAddress, version: int | None = None, *, wait_limit_s: float) -> str | None:
        """Returns the file in which the server stores a shard, or None if this process cannot map it.

        Args:
            shard: The shard.
            version: Waits until the server has this version or a newer one. None: does not wait.
            wait_limit_s: The longest wait.
        """
        if self._shared is None:
            return None
        try:
            found = self._shared.locate(shard, version, timeout_s=wait_limit_s, retry_for_s=wait_limit_s)
        except VersionGoneError:
            return self.locate(shard, wait_limit_s=wait_limit_s)
        except ConflictError as error:
            logger.warning("unit %r is fetched instead of read in place: %s", shard.layout.unit, error)
            return None
        return found.segment.path

    # ---- gradients ----

    def prepare_push(
        self,
        shard: ShardAddress,
        header: shard_pb2.ReduceScatterHeader,
        part: GradientPart,
    ) -> PreparedPush:
        """Prepares a push of one part of a contribution. Copies the gradients to shared memory if
        ``copies_gradients``."""
        if self.copies_gradients:
            try:
                return self._over_shared(lambda shared: shared.prepare_push(shard, header, part))
            except (CapacityError, OSError) as error:
                self._stop_sharing_gradients(error)
        return PreparedPush(shard, header, part)

    def push(self, prepared: PreparedPush, *, wait_limit_s: float, nearly_done: NearlyDone = ignore) -> None:
        """Pushes one part of a contribution, in any thread; see ``Transport.push``.

        Args:
            prepared: The push. The connection to a former owner of the shard may have prepared it.
            wait_limit_s: Deadline.
            nearly_done: See ``Transport.push``.
        """
        retry_for_s = min(_RETRY_S, wait_limit_s)
        if prepared.is_shared and self._shared is not None:
            try:
                self._over_shared(lambda shared: shared.push(prepared, timeout_s=wait_limit_s, retry_for_s=retry_for_s))
                return
            except CapacityError as error:  # the session broke, and the new session has no memory for the part
                self._stop_sharing_gradients(error)
        self._over_stream(
            lambda stream: stream.push(
                prepared, timeout_s=wait_limit_s, retry_for_s=retry_for_s, nearly_done=nearly_done
            )
        )

    def release(self, dp_rank: int | None = None) -> None:
        """Releases the memory of a rank's contributions, which the server no longer reads. None: of all ranks."""
        if self._shared is not None:
            self._shared.release(dp_rank)

    def free_memory(self) -> None:
        """Has the server free the memory that it keeps for this trainer. Nothing may be in flight."""
        if self._shared is None or not self._shared.keeps_memory:
            return
        # The server frees the memory when the session closes.
        replacement = self._try_open(SHARED_TRANSPORTS, self._shared.name)
        if replacement is not None:
            former, self._shared = self._shared, replacement
            former.close()

    def _stop_sharing_gradients(self, reason: ShardwellError | OSError) -> None:
        if self.copies_gradients:
            self.copies_gradients = False
            logger.warning(
                "shard server at %s: no shared memory for gradients, sending them over %s: %s",
                self.address,
                self._require_stream().name,
                reason,
            )

    # ---- optimizer partitions ----

    def shares_partitions(self, shard: ShardAddress) -> bool:
        """Whether optimizer partitions of a shard are updated in the server's shared memory."""
        return self._shared is not None and shard.window is not None

    def read_partition(
        self,
        shard: ShardAddress,
        location: PartitionLocation,
        context: common_pb2.RequestContext,
        *,
        timeout_s: float,
        cached: CachedPartition | None = None,
    ) -> PartitionSegment:
        """Returns a partition of a prepared step, to be updated in place; see ``ShardClient.read_partition``."""
        if self.shares_partitions(shard):
            try:
                return self._over_shared(
                    lambda shared: shared.read_partition(shard, location, context, timeout_s=timeout_s)
                )
            except (CapacityError, ConflictError, OSError) as error:
                _require_memory_problem(error)
                logger.info("partition of unit %r is streamed: %s", location.layout.unit, error)
        return self._over_rpcs(
            lambda client: client.read_partition(location, context, timeout_s=timeout_s, cached=cached)
        )

    def stage_partition(
        self,
        shard: ShardAddress,
        location: PartitionLocation,
        make_context: Callable[[], common_pb2.RequestContext],
        segment: PartitionSegment,
        *,
        timeout_s: float,
    ) -> str:
        """Stages new values and state; returns the id of the request. See ``ShardClient.stage_partition``."""
        if isinstance(segment, SharedPartitionSegment):
            context = make_context()
            try:
                if self._over_shared(
                    lambda shared: shared.stage_partition(location, context, segment, timeout_s=timeout_s)
                ):
                    return context.request_id
            except ConflictError as error:
                _require_memory_problem(error)
                logger.info("partition of unit %r is streamed: %s", location.layout.unit, error)
        context, share_state = make_context(), self.shares_partitions(shard)
        self._over_rpcs(
            lambda client: client.stage_partition(
                location, context, segment, timeout_s=timeout_s, share_state=share_state
            )
        )
        return context.request_id

    # ---- operations on a transport, repeated when it breaks ----

    def control(
        self, request: shard_pb2.ReduceGradientBufferRequest, *, timeout_s: float, retry_for_s: float
    ) -> shard_pb2.ReduceGradientBufferResponse:
        """Sends a control message of a shared transport: over a stream transport, or by an rpc if none is allowed."""

        def send(path: StreamTransport | ShardClient) -> shard_pb2.ReduceGradientBufferResponse:
            return path.control(request, timeout_s=timeout_s, retry_for_s=retry_for_s)

        return (
            self._over_stream(send) if any(name in STREAM_TRANSPORTS for name in self._names) else self._over_rpcs(send)
        )

    def _over_rpcs(self, action: Callable[[ShardClient], Result]) -> Result:
        return self.guard.run("a request", lambda: action(self.client))

    def _over_stream(self, action: Callable[[StreamTransport], Result]) -> Result:
        def attempt() -> Result:
            stream = self._require_stream()
            try:
                return action(stream)
            except UnavailableError as error:
                if not stream.broke:
                    raise
                logger.warning(
                    "shard server at %s: transport %s broke, opening another: %s", self.address, stream.name, error
                )
            return action(self._require_stream())

        return self.guard.run("a transfer", attempt)

    def _over_shared(self, action: Callable[[SharedTransport], Result]) -> Result:
        def attempt() -> Result:
            shared = self._require_shared()
            try:
                return action(shared)
            except (ConflictError, UnavailableError):  # a server rejects messages about a session that broke
                if not shared.broke_within(_NOTICE_S):
                    raise
            return action(self._require_shared())

        return self.guard.run("a transfer through shared memory", attempt)

    def _require_stream(self) -> StreamTransport:
        """Returns the stream transport. Opens one if there is none, or if the last one broke."""
        with self._open_lock:
            if self._stream is None or self._stream.broke:
                self._stream = self._open_stream()
            return self._stream

    def _require_shared(self) -> SharedTransport:
        """Returns the transport through shared memory. Opens another if the last one broke."""
        with self._open_lock:
            assert self._shared is not None
            if self._shared.broke:
                logger.warning(
                    "shard server at %s: transport %s broke, opening another", self.address, self._shared.name
                )
                self._shared = SHARED_TRANSPORTS[self._shared.name](self)
            return self._shared

    # ---- opening and closing ----

    def _open_stream(self) -> StreamTransport:
        for name in self._names:
            if name in STREAM_TRANSPORTS and (stream := self._try_open(STREAM_TRANSPORTS, name)) is not None:
                return stream
        self._check()
        raise UnavailableError(
            f"shard server at {self.address}: none of the transports {', '.join(self._names)} can be opened; "
            "the log says why: allow grpc too"
        )

    def _try_open(
        self, openers: Mapping[str, Callable[[ServerConnection], AnyTransport]], name: str
    ) -> AnyTransport | None:
        try:
            return openers[name](self)
        except (ShardwellError, OSError) as error:
            # Shared memory cannot work with a server on another host, and a server need not offer every stream
            # transport. Neither needs a warning.
            expected = not is_this_host(self.address) if name in SHARED_TRANSPORTS else type(error) is ConflictError
            level = logging.INFO if expected else logging.WARNING
            logger.log(level, "shard server at %s: no transport %s: %s", self.address, name, error)
            return None

    def close(self) -> None:
        """Closes the transports. Transfers in flight fail."""
        self.guard.close()
        self._close_transports()

    def _close_transports(self) -> None:
        for transport in (self._shared, self._stream):
            if transport is not None:
                transport.close()
        self.client.close()


def is_this_host(address: str) -> bool:
    """Returns whether host:port names this host."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1", socket.gethostname()) or host.startswith("127.")


def _require_memory_problem(error: Exception) -> None:
    """Raises errors that a stream would raise too, such as a step that is not prepared."""
    if isinstance(error, ConflictError) and type(error) is not ConflictError:
        raise error
