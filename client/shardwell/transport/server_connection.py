"""What a trainer does with one shard server: reads weights, pushes gradients, reads and stages optimizer partitions.

Also the choice of the transports to it, the opening of another when one breaks, and the messages that fetch small
shards of several units together, or push small parts of several contributions.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash

from shardwell.transport.base import (
    Arrived,
    BatchAnswers,
    ByteCounter,
    Incoming,
    NearlyDone,
    PreparedPush,
    ShardAddress,
    ShardRead,
    SharedTransport,
    StreamTransport,
    Transport,
    ignore,
)
from shardwell.transport.grpc_transport import GrpcTransport, ShardClient
from shardwell.transport.partition_transfers import (
    CachedPartition,
    PartitionLocation,
    PartitionSegment,
    SharedPartitionSegment,
)
from shardwell.transport.resending import (
    FETCH_BATCH,
    MEASUREMENT,
    PUSH_BATCH,
    SHARED_TRANSFER,
    CorruptTransfers,
    Operation,
    ReachedServer,
    Resending,
    ResendPolicy,
)
from shardwell.transport.shared_vector import SegmentLocation
from shardwell.transport.shm_transport import Control, ShmTransport
from shardwell.transport.socket_transport import SocketTransport
from shardwell_wire.encoding.chunk_streams import DEFAULT_CHUNK_BYTES
from shardwell_wire.encoding.wire_dtypes import AS_STORED
from shardwell_wire.errors import (
    CapacityError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    UnavailableError,
    UsageError,
    VersionGoneError,
    from_status_details,
)
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.security.credentials import Credentials
from shardwell_wire.v1 import common_pb2, shard_pb2

logger = logging.getLogger(__name__)

_BATCH_LIMIT_S = 10.0
"""Deadline of a batch. A part that has to wait longer on the server is transferred by itself."""

OPEN_TIMEOUT_S = 60.0
"""Deadline for opening a transport. Long, because a server that receives a large upload may respond late."""

AnyTransport = TypeVar("AnyTransport", bound=Transport)

_NOTICE_S = 1.0
"""How long to wait, after the server rejected a session, for this process to notice that the session broke."""

SHARED_TRANSPORTS: dict[str, Callable[[TransportSelector], SharedTransport]] = {
    ShmTransport.name: lambda server: ShmTransport(
        server.client,
        server.run,
        server.control,
        timeout_s=server.open_timeout_s,
        retry_for_s=server.open_retry_s,
        relay=server.relay,
    )
}
STREAM_TRANSPORTS: dict[str, Callable[[TransportSelector], StreamTransport]] = {
    SocketTransport.name: lambda server: SocketTransport(
        server.client, server.run, server.counter, timeout_s=server.open_timeout_s, retry_for_s=server.open_retry_s
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


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """How this process connects to shard servers."""

    transports: Sequence[str]
    """Names of the transports to try, in this order."""
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """Payload per gRPC message."""
    credentials: Credentials | None = None
    """Credentials of the cluster. None: the result of ``find_credentials`` for the address."""
    open_timeout_s: float = OPEN_TIMEOUT_S
    """Deadline for opening a transport."""
    relay: shard_pb2.RelaySession | None = None
    """What this trainer tells a relay. None: the server is used for its own shards."""


class ServerConnection(ReachedServer):
    """One shard server, as this trainer uses it for one run. Thread-safe.

    Transfers for which the server has no shared memory use a stream transport. Except for ``locate``, an operation is
    one attempt, which ``Resending`` repeats. Transfers of a batch that fails are repeated one by one.

    Args:
        run: The run. The server must own a shard of it already.
        options: How to connect.
        policy: How failed operations are repeated. None: as a reader does.
        server_id: Id of the server that must answer at the address. Empty: not checked.

    Raises:
        UnavailableError: None of the transports can be opened.
        NotFoundError: Another server answers at the address.
    """

    def __init__(
        self,
        address: str,
        run: RunIdentity,
        options: ConnectOptions,
        policy: ResendPolicy | None = None,
        server_id: str = "",
    ) -> None:
        super().__init__(address, policy)
        timeout_s, check = options.open_timeout_s, self.policy.check
        self.resending = Resending(self)
        """Runs operations that concern no shard, or several."""
        self.client = ShardClient(
            address, chunk_bytes=options.chunk_bytes, check=check, credentials=options.credentials
        )
        """Calls the server's rpcs."""
        try:
            if server_id:
                self._check_id(server_id, timeout_s, retry_for_s=timeout_s if options.relay is None else 0.0)
            self.transports = TransportSelector(
                self.client, run, names=options.transports, check=check, open_timeout_s=timeout_s, relay=options.relay
            )
            try:
                self.bytes_per_s = self.resending.run(
                    lambda *_: self.transports.transport.measure(timeout_s=timeout_s), MEASUREMENT
                )
                """Bandwidth, measured when the transport was opened."""
            except BaseException:
                self.transports.close()
                raise
        except BaseException:
            self.client.close()
            raise
        self.counter = self.transports.counter
        """Streamed bytes, in their encoded size."""
        self.shared_counter = ByteCounter()
        """Bytes that were copied from and to shared memory."""
        self.copies_gradients = self.transports.shared is not None
        """Whether ``prepare_push`` copies gradients, so that their memory can be reused before they are pushed."""
        logger.info("shard server at %s: transport %s, %.2f GB/s", address, self.transport.name, self.bytes_per_s / 1e9)

    def _check_id(self, server_id: str, timeout_s: float, *, retry_for_s: float) -> None:
        request = shard_pb2.DescribeServerRequest()
        found = self.client.call("DescribeServer", request, timeout_s=timeout_s, retry_for_s=retry_for_s).server_id
        if found != server_id:
            raise NotFoundError(
                f"from this host, the address {self.address} of shard server {server_id!r} leads to shard server "
                f"{found!r}: start {server_id!r} with --advertise HOST, the host by which the coordinator and the "
                "trainers reach it",
                server=server_id,
                address=self.address,
            )

    @property
    def transport(self) -> Transport:
        """The transport in use."""
        return self.transports.transport

    def lost_transport(self, error: ShardwellError, operation: Operation) -> bool:
        return self.transports.lost(error, is_shared=operation.is_shared)

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

    def fetch(self, read: ShardRead, *, wait_s: float, timeout_s: float, nearly_done: NearlyDone = ignore) -> int:
        """Fetches one version of a shard, waiting until it exists; see ``Transport.fetch``."""
        shard = read.shard
        window = shard.window if not read.average else None
        if window is None:
            transports, stream = self.transports, self.transports.stream
            if stream is None or (stream.session is not None and stream.session.broke):
                stream = transports.require_stream()
            return stream.fetch(read, wait_s=wait_s, timeout_s=timeout_s, nearly_done=nearly_done)
        self.shared_counter.add(received_bytes=shard.stop_bytes - shard.start_bytes)
        if read.version is not None and window.shows(read.version):
            return shard.copy_to(read.version, read.target)  # no message to the server
        return self.transports.require_shared().fetch(read, wait_s=wait_s, timeout_s=timeout_s)

    def fetch_batch(self, reads: Sequence[ShardRead], arrived: Arrived, *, wait_limit_s: float) -> None:
        """Fetches small shards with one request, once; see ``_fetch_together``."""
        timeout_s = min(_BATCH_LIMIT_S, wait_limit_s)
        self.resending.run(
            lambda *_: _fetch_together(self.transports, reads, arrived, timeout_s=timeout_s), FETCH_BATCH
        )

    def await_version(self, shard: ShardAddress, version: int | None, *, wait_s: float) -> int:
        """Waits until a shard in shared memory has a version; returns the version.

        Args:
            version: The version. None: any.
            wait_s: How long the server may wait for the version.
        """
        if (window := shard.window) is not None and version is not None and window.shows(version):
            return version
        if self.transports.shared is None:
            raise UnavailableError(f"shard server at {self.address}: this process cannot map its memory")
        return self.transports.require_shared().locate(shard, version, timeout_s=wait_s).version

    def locate(self, shard: ShardAddress, version: int | None = None, *, wait_limit_s: float) -> SegmentLocation | None:
        """Returns where the server stores a shard in shared memory, or None if this process cannot map it.

        Args:
            version: Waits until the server has this version or a newer one. None: does not wait.
        """
        if self.transports.shared is None:
            return None

        def locate(*_: object) -> SegmentLocation:
            shared = self.transports.require_shared()
            file = shared.locate(shard, version, timeout_s=wait_limit_s).segment.file
            return SegmentLocation(file, shard.start_bytes, shard.stop_bytes, shared.open_file)

        try:  # not at another owner of the shard: the thread that moves shards calls this, too
            return self.resending.run(locate, SHARED_TRANSFER)
        except VersionGoneError:
            return self.locate(shard, wait_limit_s=wait_limit_s)
        except ConflictError as error:
            logger.warning("unit %r is fetched instead of read in place: %s", shard.layout.unit, error)
            return None

    # ---- gradients ----

    def copy_at_once(self, push: PreparedPush) -> PreparedPush | None:
        """Copies gradients to shared memory without a message to the server. None: see ``prepare_push``."""
        shared = self.transports.shared
        return None if shared is None else shared.prepare_push_at_once(push)

    def prepare_push(self, push: PreparedPush) -> PreparedPush:
        """Prepares a push of one part of a contribution. Copies the gradients to shared memory if
        ``copies_gradients``."""
        if self.copies_gradients:
            try:
                return self.transports.require_shared().prepare_push(push)
            except UnavailableError:  # an OSError, too
                raise
            except (CapacityError, OSError) as error:
                self._stop_sharing_gradients(error)
        return push

    def push(self, prepared: PreparedPush, *, timeout_s: float, nearly_done: NearlyDone = ignore) -> None:
        """Pushes one part of a contribution, in any thread; see ``Transport.push``.

        Args:
            prepared: The push. The connection to a former owner of the shard may have prepared it.
            nearly_done: See ``Transport.push``.
        """
        if prepared.is_shared and self.transports.shared is not None:
            try:
                self.transports.require_shared().push(prepared, timeout_s=timeout_s)
                return
            except CapacityError as error:  # the session broke, and the new session has no memory for the part
                self._stop_sharing_gradients(error)
        transports, stream = self.transports, self.transports.stream
        if stream is None or (stream.session is not None and stream.session.broke):
            stream = transports.require_stream()
        stream.push(prepared, timeout_s=timeout_s, nearly_done=nearly_done)

    def push_batch(self, prepared: Sequence[PreparedPush], *, wait_limit_s: float) -> list[bool]:
        """Pushes small parts of several contributions in one message, once; see ``_push_together``."""
        timeout_s, corrupt = min(_BATCH_LIMIT_S, wait_limit_s), self.policy.corrupt
        return self.resending.run(
            lambda *_: _push_together(self.transports, prepared, corrupt, timeout_s=timeout_s), PUSH_BATCH
        )

    def free_memory(self, kept: int, of: int) -> None:
        """Has the server free memory that it keeps for this trainer; see ``SharedTransport.free_memory``."""
        if (shared := self.transports.shared) is not None:
            try:
                shared.free_memory(kept, of)
            except ShardwellError as error:  # the buffers are closed the next time, or with the session
                logger.info("shard server at %s: buffers were not closed: %s", self.address, error)

    def _stop_sharing_gradients(self, reason: ShardwellError | OSError) -> None:
        if self.copies_gradients:
            self.copies_gradients = False
            logger.warning(
                "shard server at %s: no shared memory for gradients, sending them over %s: %s",
                self.address,
                self.transports.require_stream().name,
                reason,
            )

    # ---- optimizer partitions ----

    def shares_partitions(self, shard: ShardAddress) -> bool:
        """Whether optimizer partitions of a shard are updated in the server's shared memory."""
        return self.transports.shared is not None and shard.window is not None

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
                shared = self.transports.require_shared()
                return shared.read_partition(shard, location, context, timeout_s=timeout_s)
            except UnavailableError:  # an OSError, too
                raise
            except (CapacityError, ConflictError, OSError) as error:
                self._require_memory_problem(error)
                logger.info("partition of unit %r is streamed: %s", location.layout.unit, error)
        return self.client.read_partition(location, context, timeout_s=timeout_s, cached=cached)

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
                shared = self.transports.require_shared()
                if shared.stage_partition(location, context, segment, timeout_s=timeout_s):
                    return context.request_id
            except ConflictError as error:
                self._require_memory_problem(error)
                logger.info("partition of unit %r is streamed: %s", location.layout.unit, error)
        context, share_state = make_context(), self.shares_partitions(shard)
        self.client.stage_partition(location, context, segment, timeout_s=timeout_s, share_state=share_state)
        return context.request_id

    def _require_memory_problem(self, error: Exception) -> None:
        """Raises errors that a stream would raise too, such as a step that is not prepared, and those of a session that
        broke: the next attempt has another session."""
        if isinstance(error, ConflictError) and (
            type(error) is not ConflictError or self.transports.lost(error, is_shared=True)
        ):
            raise error

    def close(self) -> None:
        """Closes the transports. Transfers in flight fail."""
        self.closed.set()
        self.transports.close()
        self.client.close()


class TransportSelector:
    """The transports of this trainer to one shard server, for one run. Thread-safe.

    A transport through shared memory is used if it is the first in the list and can be opened. Everything else uses
    the first stream transport that can be opened.

    Args:
        run: The run. The server must own a shard of it already.
        names: Names of the transports to try, in this order.
        check: Called when no transport can be opened; raises if the server is not to be used any more.
        open_timeout_s: Deadline for opening a transport.
        relay: See ``ShmTransport``.

    Raises:
        UnavailableError: None of the transports can be opened.
        ShardwellError: The transport to a relay cannot be opened.
        OSError: The same.
    """

    client: ShardClient
    run: RunIdentity
    counter: ByteCounter
    """Streamed bytes, in their encoded size."""
    open_timeout_s: float
    open_retry_s: float
    """How long the opening of a transport is repeated while the server is unavailable. 0 once the first is open: from
    then on, transports are opened within operations, which ``Resending`` repeats."""
    relay: shard_pb2.RelaySession | None

    def __init__(
        self,
        client: ShardClient,
        run: RunIdentity,
        *,
        names: Sequence[str],
        check: Callable[[], None],
        open_timeout_s: float,
        relay: shard_pb2.RelaySession | None = None,
    ) -> None:
        self.relay = relay
        self.client, self.run, self.open_timeout_s, self.open_retry_s = client, run, open_timeout_s, open_timeout_s
        self._names, self._check = tuple(names), check
        self._streams = any(name in STREAM_TRANSPORTS for name in self._names)
        """Whether a stream transport is allowed."""
        self.control: Control | None = self._control if self._streams else None
        """Sends a control message of a shared transport over a stream transport. None: none is allowed."""
        self.counter = ByteCounter()
        self._open_lock = threading.RLock()
        self.shared: SharedTransport | None = None
        """The transport through shared memory, if there is one."""
        self.stream: StreamTransport | None = None
        """The stream transport, if one was opened. It may have broken."""
        self._not_offered = set[str]()
        """Transports that the server refused because it does not offer them."""
        self._reported: Transport | None = None
        """The last transport that broke, which was reported."""
        try:
            if self._names[0] in SHARED_TRANSPORTS:
                self.shared = self._try_open(SHARED_TRANSPORTS, self._names[0])
            if self.shared is None:
                self.stream = self._open_stream()
        except BaseException:
            self.close()
            raise
        self.open_retry_s = 0.0

    @property
    def transport(self) -> Transport:
        """The transport in use."""
        if self.shared is not None:
            return self.shared
        # Heartbeats read this after the stream broke. They must not open another one.
        return self.stream or self.require_stream()

    # ---- the transports of the next attempt ----

    def require_stream(self) -> StreamTransport:
        """Returns the stream transport. Opens one if there is none, or if the last one broke."""
        stream = self.stream
        if stream is not None and not stream.broke:
            return stream
        with self._open_lock:
            if self.stream is None or self.stream.broke:
                self.stream = self._open_stream()
            return self.stream

    def require_shared(self) -> SharedTransport:
        """Returns the transport through shared memory. Opens another if the last one broke."""
        with self._open_lock:
            assert self.shared is not None
            if self.shared.session.broke:
                self._report(self.shared, "its session ended")
                self.shared = SHARED_TRANSPORTS[self.shared.name](self)
            return self.shared

    def _control(
        self, request: shard_pb2.ReduceGradientBufferRequest, timeout_s: float
    ) -> shard_pb2.ReduceGradientBufferResponse:
        return self.require_stream().control(request, timeout_s)

    def push_batch(self, request: shard_pb2.ReduceBatchRequest, *, timeout_s: float) -> shard_pb2.ReduceBatchResponse:
        """Sends a batch of small pushes: over a stream transport, or by an rpc if none is allowed."""
        path = self.require_stream() if self._streams else self.client
        return path.push_batch(request, timeout_s=timeout_s)

    def lost(self, error: ShardwellError, *, is_shared: bool) -> bool:
        """Returns whether an operation failed because its transport broke.

        Args:
            error: Its error. A server rejects messages about a session of shared memory that broke.
            is_shared: Whether the operation needs the transport through shared memory.
        """
        if "not_shared" in error.data:
            return False  # the session is open: there is no end of it to wait for
        if is_shared and self.shared is not None and self.shared.session.broke_within(_NOTICE_S):
            return True
        if not isinstance(error, UnavailableError) or self.stream is None or not self.stream.broke:
            return False
        self._report(self.stream, error)
        return True

    def _report(self, broken: Transport, reason: object) -> None:
        """Logs once that a transport broke. Opening another may take many attempts."""
        if broken is not self._reported:
            self._reported = broken
            logger.warning(
                "shard server at %s: transport %s broke, opening another: %s", self.client.address, broken.name, reason
            )

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
            if self.relay is not None:
                raise  # a relay has one transport, and who looks for a relay says why it cannot be used
            if (
                not self.open_retry_s
                and isinstance(error, UnavailableError)
                and self.client.peer == error.data.get("peer")
            ):
                raise  # the server itself is unavailable, and with it the other transports
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
        for transport in (self.shared, self.stream):
            if transport is not None:
                transport.close()


def _fetch_together(
    transports: TransportSelector, reads: Sequence[ShardRead], arrived: Arrived, *, timeout_s: float
) -> None:
    """Fetches shards with one request, waiting until their versions exist.

    Shards that have not arrived when the function returns or raises must be fetched by themselves.

    Args:
        reads: At least one shard of the server.
        arrived: See ``Arrived``. Shards that can be read at once arrive before those that wait for their versions.

    Raises:
        ShardwellError: The request or its answer was lost, or is malformed.
    """
    run = transports.run
    request = shard_pb2.GatherBatchRequest(run=run.name, run_id=run.run_id)
    with ExitStack() as stack:
        streams = list[tuple[Incoming, ExitStack]]()
        for each in reads:
            shard = each.shard
            context = stack.enter_context(ExitStack())
            stream = context.enter_context(each.target.incoming())
            streams.append((stream, context))
            request.ranges.add(
                unit=shard.layout.unit,
                version=each.version,
                start_bytes=shard.start_bytes,
                stop_bytes=shard.stop_bytes,
                wire_dtype=each.target.wire_dtype,
                base=stream.base,
            )
        answers = BatchAnswers(transports.client.address, streams, transports.counter, arrived)
        transports.require_stream().fetch_batch(request, answers, timeout_s=timeout_s)


def _push_together(
    transports: TransportSelector, prepared: Sequence[PreparedPush], corrupt: CorruptTransfers, *, timeout_s: float
) -> list[bool]:
    """Sends parts in one message.

    Args:
        prepared: The parts, in memory of the server or small enough for a message.
        corrupt: Counts the parts that arrived with a wrong checksum.

    Returns:
        For each part whether the server has accepted it. The others must be pushed one by one.

    Raises:
        ShardwellError: The message or its answer was lost.
    """
    shared, positions, accepted = transports.shared, list[int](), [False] * len(prepared)
    common = prepared[0].header.common
    request = shard_pb2.ReduceBatchRequest(run=transports.run.name, run_id=transports.run.run_id, common=common)
    for position, each in enumerate(prepared):
        if not each.is_shared:
            part, wire_dtype = _add_stream(each, request), each.gradients.wire_dtype
        elif shared is None or (buffered := shared.add_to_batch(each, request)) is None:
            continue
        else:
            part, wire_dtype = buffered, AS_STORED
        if each.header.common is common:
            each.cut.complete(part.header, each.header, wire_dtype)
        else:  # of another attempt
            part.header.CopyFrom(each.cut.header(each.header, wire_dtype))
        positions.append(position)
    if not positions:
        return accepted
    response = transports.push_batch(request, timeout_s=timeout_s)
    if len(response.results) != len(positions):
        raise InvalidRequestError(
            f"shard server at {transports.client.address} answered a batch of {len(positions)} parts with "
            f"{len(response.results)} results"
        )
    for position, part, result in zip(positions, request.parts, response.results, strict=True):
        accepted[position] = not result.status
        if result.status:
            _count_corrupt(result.status, transports.client.address, corrupt)
        if part.HasField("stream"):
            transports.counter.add(sent_bytes=len(part.stream) if accepted[position] else 0)
        elif shared is not None:
            shared.finish_batched(prepared[position], result)
    return accepted


def _count_corrupt(status: bytes, address: str, corrupt: CorruptTransfers) -> None:
    if isinstance(error := from_status_details(status, address), CorruptDataError):
        corrupt.add(address, "a part of a batch of pushes", error)


def _add_stream(prepared: PreparedPush, request: shard_pb2.ReduceBatchRequest) -> shard_pb2.BatchedPart:
    with prepared.gradients.stream() as pieces:
        stream = b"".join(pieces)
    return request.parts.add(stream=stream, checksum=xxhash.xxh3_64_intdigest(stream))


def is_this_host(address: str) -> bool:
    """Returns whether host:port names this host."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1", socket.gethostname()) or host.startswith("127.")
