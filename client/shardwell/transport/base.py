"""The interface of a transport, which moves the bytes of a shard between this trainer and one shard server.

Also what it moves: the stream of a fetch with the memory for it, and the header of a push. The fields that a part has
on all shards, and those that all parts have on one shard, are not encoded anew for each push and shard. The counters
of streams and of the routes of gradients (``TransferOptions.gradient_reduction``) are here, too.

Note: [Adding a transport]
    A transport is a module of this package with one class: a ``StreamTransport`` if it sends bytes over a connection,
    a ``SharedTransport`` if it maps memory of the server. CONTRIBUTING.md lists the other places to edit.

Note: [Credentials]
    A transport opens connections by the ``Endpoint`` of its rpc client only (``rpc.py``). That class holds the
    credentials, and encrypts connections. The selector passes one rpc client to all transports of a server.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from shardwell.transport.partition_transfers import PartitionLocation, PartitionSegment
from shardwell.transport.service_client import StandingRpc
from shardwell.transport.shared_vector import SharedVector
from shardwell_wire.encoding.wire_dtypes import AS_STORED, WireDtype
from shardwell_wire.errors import InvalidRequestError, UnavailableError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2, shard_pb2

Place = Callable[[int, shard_pb2.StreamDeltas | None], memoryview]
"""Returns the memory for a stream of a version, or for the deltas that a header announces in its place."""


def into(memory: memoryview) -> Place:
    """Returns a ``Place`` for a stream whose size is known."""
    return lambda *_: memory


class Since(NamedTuple):
    """An older version of a shard, since which changes are fetched."""

    version: int
    has_values: bool
    """Whether the caller has its values, so that differences from them can be sent."""


class Incoming:
    """The stream of one fetch. For one thread at a time.

    Args:
        memory: Memory for the whole stream.
        use: Called with the whole stream once it is complete. None: the stream stays in the memory as it is.
    """

    base: shard_pb2.StreamBase | None = None
    """What this trainer has of the stream. None: it accepts no deltas."""
    since: Since | None = None
    """The version since which the server sends changes, if they are smaller. None: it sends the stream."""

    def __init__(self, memory: memoryview, use: Callable[[memoryview], None] | None = None) -> None:
        self._memory, self._use = memory, use
        self.received_bytes = 0
        """Size of what arrives in place of the stream, or the stream."""

    def place(self, version: int, deltas: shard_pb2.StreamDeltas | None) -> memoryview:
        """Returns the memory for what the server sends.

        Args:
            deltas: From the header. None: the header has none.

        Raises:
            CorruptDataError: The deltas are not of the stream that this trainer has.
        """
        self.received_bytes = len(self._memory)
        return self._memory

    def finish(self) -> None:
        """Uses the stream, which has arrived and been checked.

        Raises:
            CorruptDataError: The deltas are malformed, or do not give the stream.
        """
        if self._use is not None:
            self._use(self._memory)


@dataclass(slots=True, eq=False)
class PartHeader:
    """One part of a contribution: the fields of its header that are the same for all shards of the unit."""

    common: shard_pb2.ReduceScatterHeader
    """The fields that all parts of the attempt share, without a request id. Must not change any more."""
    part: int = 0
    """Number of the part."""
    dropped_indices: Sequence[int] = ()
    """Parameters whose earlier gradients are dropped."""
    request_id: str = ""
    """Prefix of the ids of the part's requests. Empty: they have none."""
    summed: Sequence[shard_pb2.SummedRank] = ()
    """Ranks whose gradients are in the part. Empty: the part has the gradients of one rank."""


class PushedRange:
    """Some parameters of a unit, cut to one shard. Shared by all pushes of these parameters.

    Args:
        start_bytes: Half-open range of the shard in the unit's flat vector.
        stop_bytes: End of the range.
        indices: The parameters, by rising index.
    """

    def __init__(self, unit: str, start_bytes: int, stop_bytes: int, indices: Sequence[int]) -> None:
        self.unit, self.start_bytes, self.stop_bytes, self.indices = unit, start_bytes, stop_bytes, tuple(indices)
        self.shard_key = unit, start_bytes
        """Identifies the shard on its server."""
        self._encoded = shard_pb2.ReduceScatterHeader(
            unit=unit, parameter_indices=indices, start_bytes=start_bytes, stop_bytes=stop_bytes
        ).SerializeToString()

    def header(self, part: PartHeader, wire_dtype: WireDtype = AS_STORED) -> shard_pb2.ReduceScatterHeader:
        """Returns the whole header of a push."""
        header = shard_pb2.ReduceScatterHeader()
        header.CopyFrom(part.common)
        if part.request_id:  # one per shard: a server may own several shards of the unit
            header.context.request_id = f"{part.request_id}.{self.start_bytes}"
        self.complete(header, part, wire_dtype)
        return header

    def complete(self, header: shard_pb2.ReduceScatterHeader, part: PartHeader, wire_dtype: WireDtype) -> None:
        """Sets the fields that are not in ``PartHeader.common``."""
        header.MergeFromString(self._encoded)
        if part.part:
            header.part = part.part
        if part.dropped_indices:
            header.dropped_indices.extend(part.dropped_indices)
        if part.summed:
            header.summed.extend(part.summed)
        if wire_dtype:
            header.wire_dtype = wire_dtype


NearlyDone = Callable[[], None]
"""Callback fired when a transfer is nearly done, so that the next can start. May fire more than once."""

NEARLY_DONE_BYTES = 1 << 20
"""A transfer is nearly done when at most this many bytes are left. They keep a link of 100 MB/s busy for 10 ms, which
is enough for the next request to reach most servers and for the answer to return."""


def ignore() -> None:
    """A ``NearlyDone`` callback that does nothing."""


@dataclass(slots=True)
class ByteCounter:
    """Counts the bytes that streams moved. Thread-safe."""

    received_bytes: int = 0
    sent_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, received_bytes: int = 0, sent_bytes: int = 0) -> None:
        """Adds the bytes of one transfer, in their encoded size."""
        with self._lock:
            self.received_bytes += received_bytes
            self.sent_bytes += sent_bytes


DIRECT, HIERARCHICAL, ALLREDUCE = "direct", "hierarchical", "allreduce"
ROUTES = (DIRECT, HIERARCHICAL, ALLREDUCE)
"""Where the gradients of a unit are added first: on the servers, among the trainers of a node, or of several nodes."""


@dataclass(slots=True)
class RouteTotals:
    """What one route has carried. The names are those of ``Session.stats``, after the name of the route."""

    count: int = 0
    """Pushed gradients, or pushed shares of sums."""
    pushed_bytes: int = 0
    """Bytes pushed to the servers."""
    peer_bytes: int = 0
    """Bytes of this trainer's gradients that went to other trainers, in shared memory or over the network."""
    seconds: float = 0.0
    """Seconds from the start of each push until the servers had acknowledged it, added up. Pushes overlap. Includes the
    time for which a small push waits for others, to share a message with them."""


@dataclass(slots=True)
class RouteStats:
    """The totals of all routes. Thread-safe."""

    totals: dict[str, float] = field(
        default_factory=lambda: {
            f"{route}_{name}": zero for route in ROUTES for name, zero in asdict(RouteTotals()).items()
        }
    )
    """The fields of ``RouteTotals`` for each route, such as ``direct_count`` and ``allreduce_peer_bytes``."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, route: str, *, pushed_bytes: int, seconds: float, peer_bytes: int = 0, count: int = 1) -> None:
        """Adds gradients of units, or this trainer's shares of sums."""
        totals = self.totals
        with self._lock:
            totals[f"{route}_count"] += count
            totals[f"{route}_pushed_bytes"] += pushed_bytes
            totals[f"{route}_peer_bytes"] += peer_bytes
            totals[f"{route}_seconds"] += seconds


@dataclass(slots=True, eq=False)
class ShardAddress:
    """The range of a unit's flat vector that one server owns."""

    run: RunIdentity
    layout: UnitLayout
    start_bytes: int
    """Half-open range of the flat vector."""
    stop_bytes: int
    window: SharedVector | None = None
    """The shard in the server's shared memory, if this process mapped it."""

    def copy_to(self, version: int, target: FetchTarget) -> int:
        """Copies the mapped shard, which must show ``version``; returns the version.

        Raises:
            VersionGoneError: The server replaced the version during the copy.
            UnavailableError: The shard has moved to another server.
        """
        window = self.require_window()
        target.copy_from(window)
        window.check(version)
        return version

    def require_window(self) -> SharedVector:
        """Returns the mapped shard. Raises UnavailableError if the shard has moved since the caller found it mapped."""
        if (window := self.window) is None:
            raise UnavailableError(f"unit {self.layout.unit!r}: the shard has moved to another server")
        return window


class FetchTarget(Protocol):
    """Receives the values of one fetch."""

    @property
    def wire_dtype(self) -> WireDtype:
        """The dtype in which float32 values travel."""
        ...

    def incoming(self) -> AbstractContextManager[Incoming]:
        """Returns the memory for an encoded stream. ``finish`` decodes the stream."""
        ...

    def copy_from(self, window: SharedVector) -> None:
        """Copies the values from mapped memory, rounded as if they had travelled in ``wire_dtype``."""
        ...


@dataclass(slots=True, eq=False)
class ShardRead:
    """A fetch of one version of a shard, alone or in a batch."""

    shard: ShardAddress
    version: int | None
    """The version to wait for. None: the newest."""
    target: FetchTarget
    average: bool = False
    """Whether to fetch the moving average of the values. Not from shared memory, and not in a batch."""


Arrived = Callable[[int, int], None]
"""Called when a shard has arrived, with its position in the batch and its version."""


class BatchAnswers:
    """Receives the answers to a batch of small fetches.

    Args:
        streams: The stream of each fetch, and its context, which ends when the fetch is done.
        counter: Counts the received bytes.
        arrived: See ``Arrived``.
    """

    def __init__(
        self, peer: str, streams: Sequence[tuple[Incoming, ExitStack]], counter: ByteCounter, arrived: Arrived
    ) -> None:
        self._peer, self._streams, self._counter, self._arrived = peer, streams, counter, arrived
        self._left = set(range(len(streams)))

    @property
    def are_missing(self) -> bool:
        """True until every fetch is answered."""
        return bool(self._left)

    def places(self, response: shard_pb2.GatherBatchResponse) -> list[memoryview]:
        """Returns the memory for the streams that follow a response.

        Raises:
            InvalidRequestError: The response does not belong to the batch.
        """
        numbers = [each.number for each in response.ranges]
        if not numbers or len(set(numbers)) < len(numbers) or not self._left.issuperset(numbers):
            raise InvalidRequestError(
                f"shard server at {self._peer} answered ranges {numbers[:10]} of a batch of {len(self._streams)}, of "
                f"which {len(self._left)} are missing: expected each range once"
            )
        self._left.difference_update(numbers)
        places = []
        for each in response.ranges:
            if each.status:
                continue
            stream, _ = self._streams[each.number]
            place = stream.place(each.version, each.deltas if each.HasField("deltas") else None)
            if len(place) != each.size_bytes:
                raise InvalidRequestError(
                    f"shard server at {self._peer} sends {each.size_bytes} bytes for range {each.number} of a batch, "
                    f"expected {len(place)}"
                )
            places.append(place)
        return places

    def finish(self, response: shard_pb2.GatherBatchResponse) -> None:
        """Uses the streams of a response, which have arrived and been checked."""
        for each in response.ranges:
            if not each.status:
                stream, context = self._streams[each.number]
                stream.finish()
                context.close()
                self._counter.add(received_bytes=each.size_bytes)
                self._arrived(each.number, each.version)


class GradientPart(Protocol):
    """The gradients of one part of a contribution, cut to one shard."""

    @property
    def wire_dtype(self) -> WireDtype:
        """The dtype in which float32 values travel in a stream."""
        ...

    def write_to(self, memory: memoryview) -> None:
        """Writes the gradients to memory laid out like the shard, rounded as if they had travelled."""
        ...

    def stream(self) -> AbstractContextManager[Sequence[memoryview]]:
        """Returns the encoded gradients, in the order of the stream. They are valid until the context ends."""
        ...


class PreparedPush:
    """One shard's part of a contribution, ready to be pushed over any transport.

    Args:
        cut: The parameters with a gradient, cut to the shard.
    """

    __slots__ = ("cut", "gradients", "header", "shard")

    is_shared: ClassVar[bool] = False
    """Whether the gradients are in shared memory. Otherwise the push refers to the memory of the caller."""

    def __init__(self, shard: ShardAddress, cut: PushedRange, header: PartHeader, gradients: GradientPart) -> None:
        self.shard, self.cut, self.header, self.gradients = shard, cut, header, gradients


class Transport(ABC):
    """Moves the bytes of one run between this trainer and one shard server. Thread-safe.

    Every method tries once: ``resending.py`` repeats what fails. ``timeout_s`` is the deadline of the attempt, which
    raises ``UnavailableError``, ``DeadlineError``, or the error that the server returns.
    """

    name: ClassVar[str]
    """The name in ``transports=``."""
    kind: ClassVar[common_pb2.TransportKind.ValueType]
    """The number on the wire."""
    session: StandingRpc | None = None
    """The rpc whose end is the end of the transport's session. None: the transport has no session."""

    @abstractmethod
    def fetch(self, read: ShardRead, *, wait_s: float, timeout_s: float, nearly_done: NearlyDone = ignore) -> int:
        """Fetches one version of a shard, waiting until it exists.

        Args:
            read: What to fetch.
            wait_s: How long the server waits for the version.
            nearly_done: Called when at most ``NEARLY_DONE_BYTES`` are missing.

        Returns:
            The version that was fetched.

        Raises:
            VersionGoneError: A newer version has replaced this one.
            DeadlineError: The version did not exist in time.
        """

    @abstractmethod
    def push(self, prepared: PreparedPush, *, timeout_s: float, nearly_done: NearlyDone = ignore) -> object:
        """Pushes one part of a contribution. Repeating a push is harmless: the server drops duplicates.

        Args:
            prepared: The push; another transport may have prepared it.
            nearly_done: Called when the operating system has accepted all bytes.

        Raises:
            CapacityError: The server has no memory for the part on this transport.
        """

    @abstractmethod
    def measure(self, *, timeout_s: float) -> float:
        """Returns the bandwidth of this transport in bytes per second."""

    @property
    def broke(self) -> bool:
        """Whether the session ended although ``close`` was not called. A broken transport is unusable."""
        return self.session is not None and self.session.broke

    @abstractmethod
    def close(self) -> None:
        """Closes the transport. Transfers in flight fail."""


class StreamTransport(Transport):
    """A transport that sends encoded streams over a connection. ``counter``: counts the bytes."""

    _WARM_UP_BYTES, _MEASURED_BYTES = 64 << 10, 1 << 20

    def __init__(self, counter: ByteCounter | None = None) -> None:
        self._counter = counter or ByteCounter()

    def fetch(self, read: ShardRead, *, wait_s: float, timeout_s: float, nearly_done: NearlyDone = ignore) -> int:
        shard, target = read.shard, read.target
        with target.incoming() as incoming:
            request = shard_pb2.GatherRequest(
                run=shard.run.name,
                run_id=shard.run.run_id,
                unit=shard.layout.unit,
                version=read.version,
                start_bytes=shard.start_bytes,
                stop_bytes=shard.stop_bytes,
                wire_dtype=target.wire_dtype,
                ema=read.average,
                base=incoming.base,
                wait_s=wait_s,
                since=incoming.since and incoming.since.version,
                takes_differences=bool(incoming.since and incoming.since.has_values),
            )
            fetched = self.fetch_stream(request, incoming.place, timeout_s=timeout_s, nearly_done=nearly_done)
            self._counter.add(received_bytes=incoming.received_bytes)
            incoming.finish()
        return fetched

    def push(self, prepared: PreparedPush, *, timeout_s: float, nearly_done: NearlyDone = ignore) -> None:
        gradients = prepared.gradients
        header = prepared.cut.header(prepared.header, gradients.wire_dtype)
        with gradients.stream() as pieces:
            self.push_stream(header, pieces, timeout_s=timeout_s, nearly_done=nearly_done)
            self._counter.add(sent_bytes=sum(map(len, pieces)))

    def measure(self, *, timeout_s: float) -> float:
        self.measure_stream(self._WARM_UP_BYTES, timeout_s=timeout_s)
        return self.measure_stream(self._MEASURED_BYTES, timeout_s=timeout_s)

    @abstractmethod
    def fetch_stream(
        self, request: shard_pb2.GatherRequest, place: Place, *, timeout_s: float, nearly_done: NearlyDone = ignore
    ) -> int:
        """Fetches one version of a shard, encoded in ``request.wire_dtype``; see ``fetch``."""

    @abstractmethod
    def push_stream(
        self,
        header: shard_pb2.ReduceScatterHeader,
        pieces: Sequence[memoryview],
        *,
        timeout_s: float,
        nearly_done: NearlyDone = ignore,
    ) -> shard_pb2.ReduceScatterResponse:
        """Pushes the encoded segments of one part of a contribution, without padding; see ``push``."""

    @abstractmethod
    def control(
        self, request: shard_pb2.ReduceGradientBufferRequest, timeout_s: float
    ) -> shard_pb2.ReduceGradientBufferResponse:
        """Sends a control message of a ``SharedTransport``.

        Raises:
            ConflictError: The shared-memory session that the message names is closed.
        """

    @abstractmethod
    def fetch_batch(self, request: shard_pb2.GatherBatchRequest, answers: BatchAnswers, *, timeout_s: float) -> None:
        """Sends a batch of small fetches."""

    @abstractmethod
    def push_batch(self, request: shard_pb2.ReduceBatchRequest, *, timeout_s: float) -> shard_pb2.ReduceBatchResponse:
        """Sends a batch of small pushes."""

    @abstractmethod
    def measure_stream(self, size_bytes: int, *, timeout_s: float) -> float:
        """Receives bytes without content; returns bytes per second."""


class SharedTransport(Transport):
    """A transport through memory that this trainer and the server both map.

    ``prepare_push`` copies the gradients, so their memory can be reused before ``push``.
    """

    session: StandingRpc

    @abstractmethod
    def locate(self, shard: ShardAddress, version: int | None, *, timeout_s: float) -> shard_pb2.LocateShardResponse:
        """Returns where the server stores a shard, once ``version`` exists.

        Raises:
            VersionGoneError: A newer version has replaced this one.
            DeadlineError: The version did not exist in time.
            ConflictError: The shard is not in shared memory.
        """

    @abstractmethod
    def open_file(self, name: str, /, *, size_bytes: int) -> int:
        """Returns a descriptor of a file that the server has named; see ``receive_descriptor``."""

    @abstractmethod
    def prepare_push(self, push: PreparedPush) -> PreparedPush:
        """Copies gradients to shared memory; returns a push that can be sent later, in another thread.

        Raises:
            CapacityError: The server has no memory for the part on this transport.
            OSError: The server's memory cannot be mapped.
        """

    @abstractmethod
    def prepare_push_at_once(self, push: PreparedPush) -> PreparedPush | None:
        """As ``prepare_push``, without a message to the server. None: a message is necessary.

        Also succeeds after the transport broke: ``push`` of another session copies the gradients.
        """

    @abstractmethod
    def add_to_batch(
        self, prepared: PreparedPush, request: shard_pb2.ReduceBatchRequest
    ) -> shard_pb2.BatchedPart | None:
        """Adds a push without its header to a batch. None: another session prepared the push."""

    @abstractmethod
    def finish_batched(self, prepared: PreparedPush, result: shard_pb2.BatchedPartResult) -> None:
        """Processes the server's answer to a push that ``add_to_batch`` has added."""

    @abstractmethod
    def read_partition(
        self, shard: ShardAddress, location: PartitionLocation, context: common_pb2.RequestContext, *, timeout_s: float
    ) -> PartitionSegment:
        """Returns an optimizer partition of a prepared step, in memory that the server maps too.

        Raises:
            CapacityError: The server has no memory for the partition.
            ConflictError: The optimizer's state is not in shared memory.
            StepStateError: The step is not prepared.
            StaleEpochError: The partition belongs to another trainer.
            OSError: The server's memory cannot be mapped.
        """

    @abstractmethod
    def stage_partition(
        self,
        location: PartitionLocation,
        context: common_pb2.RequestContext,
        segment: PartitionSegment,
        *,
        timeout_s: float,
    ) -> bool:
        """Stages new values and state; returns False if they must be streamed instead.

        Raises:
            ConflictError: The server has released the shared staging buffer.
            StepStateError: The gradient has since been recomputed.
            StaleEpochError: The partition belongs to another trainer.
            NonFiniteError: A value is NaN or infinity.
        """

    @abstractmethod
    def release(self, dp_rank: int | None = None) -> None:
        """Releases the memory of a rank's contributions, which the server no longer reads. None: of all ranks."""

    @abstractmethod
    def free_memory(self, kept: int, of: int) -> None:
        """Has the server free memory of contributions and partitions that are released. Nothing may be in flight.

        Args:
            kept: This trainer keeps the share ``kept / of`` of the memory for contributions to each shard.
            of: See ``kept``.
        """
