"""Fetches small shards of several units from one server together.

Sends the small parts of several contributions to one server in one message.

What a trainer does with one shard server: reads weights, pushes gradients, reads and stages optimizer partitions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import xxhash

from shardwell.transport.base import (
    ByteCounter,
    FetchTarget,
    Incoming,
    NearlyDone,
    PreparedPush,
    ShardAddress,
    Transport,
    ignore,
)
from shardwell.transport.grpc_transport import ShardClient
from shardwell.transport.partitions import (
    CachedPartition,
    PartitionLocation,
    PartitionSegment,
    SharedPartitionSegment,
)
from shardwell.transport.selector import ServerGuard, TransportSelector
from shardwell.transport.shared_vector import SegmentLocation
from shardwell_wire.encoding.wire_dtypes import AS_STORED
from shardwell_wire.errors import (
    CapacityError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    UnavailableError,
    VersionGoneError,
)
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.security.credentials import Credentials
from shardwell_wire.v1 import common_pb2, shard_pb2

Arrived = Callable[[int, int], None]
"""Called when a shard has arrived, with its position in the batch and its version."""


@dataclass(frozen=True, slots=True)
class SmallFetch:
    """A fetch of one version of a shard, small enough for a message."""

    shard: ShardAddress
    version: int
    target: FetchTarget


class _Answers:
    """Receives the answers to a batch. A ``BatchAnswers``.

    Args:
        peer: Address of the server, for errors.
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
        return bool(self._left)

    def places(self, response: shard_pb2.GatherBatchResponse) -> list[memoryview]:
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
        for each in response.ranges:
            if not each.status:
                stream, context = self._streams[each.number]
                stream.finish()
                context.close()
                self._counter.add(received_bytes=each.size_bytes)
                self._arrived(each.number, each.version)


def fetch_together(
    transports: TransportSelector,
    fetches: Sequence[SmallFetch],
    counter: ByteCounter,
    arrived: Arrived,
    *,
    timeout_s: float,
) -> None:
    """Fetches shards with one request, once, waiting until their versions exist.

    Shards that have not arrived when the function returns or raises must be fetched by themselves.

    Args:
        transports: The transports to the server.
        fetches: At least one shard of the server.
        counter: Counts the received bytes.
        arrived: See ``Arrived``. Shards that can be read at once arrive before those that wait for their versions.
        timeout_s: Deadline.

    Raises:
        ShardwellError: The request or its answer was lost, or is malformed.
    """
    run = transports.run
    request = shard_pb2.GatherBatchRequest(run=run.name, run_id=run.run_id)
    with ExitStack() as stack:
        streams = list[tuple[Incoming, ExitStack]]()
        for each in fetches:
            context = stack.enter_context(ExitStack())
            stream = context.enter_context(each.target.incoming())
            streams.append((stream, context))
            request.ranges.append(
                each.shard.gather_request(each.version, each.target.wire_dtype, base=stream.base, names_run=False)
            )
        answers = _Answers(transports.client.address, streams, counter, arrived)
        transports.fetch_batch(request, answers, timeout_s=timeout_s)


def push_together(
    transports: TransportSelector, prepared: Sequence[PreparedPush], counter: ByteCounter, *, timeout_s: float
) -> list[bool]:
    """Sends parts in one message, once.

    Args:
        transports: The transports to the server.
        prepared: The parts, in memory of the server or small enough for a message.
        counter: Counts the streamed bytes.
        timeout_s: Deadline.

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
        transports.guard.note_rejected("a part of a batch of pushes", result.status)
        if part.HasField("stream"):
            counter.add(sent_bytes=len(part.stream) if accepted[position] else 0)
        elif shared is not None:
            shared.finish_batched(prepared[position], result)
    return accepted


def _add_stream(prepared: PreparedPush, request: shard_pb2.ReduceBatchRequest) -> shard_pb2.BatchedPart:
    with prepared.gradients.stream() as pieces:
        stream = b"".join(pieces)
    return request.parts.add(stream=stream, checksum=xxhash.xxh3_64_intdigest(stream))


logger = logging.getLogger(__name__)

_RETRY_S = 2.0
"""How long a transport retries by itself before the guard asks the coordinator why the server is unavailable."""

_BATCH_LIMIT_S = 10.0
"""Deadline of a batch. A part that has to wait longer on the server is transferred by itself."""

OPEN_TIMEOUT_S = 60.0
"""Deadline for opening a transport. Long, because a server that receives a large upload may respond late."""


class ServerConnection:
    """One shard server, as this trainer uses it for one run. Thread-safe.

    Transfers for which the server has no shared memory use a stream transport.

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
        server_id: Id of the server that must answer at the address. Empty: not checked.

    Raises:
        UnavailableError: None of the transports can be opened.
        NotFoundError: Another server answers at the address.
    """

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
        server_id: str = "",
    ) -> None:
        self.address = address
        self.client = ShardClient(address, chunk_bytes=chunk_bytes, check=check, credentials=credentials)
        """Calls the server's rpcs."""
        try:
            if server_id:
                self._check_id(server_id, open_timeout_s)
            self.transports = TransportSelector(
                self.client,
                run,
                names=transports,
                guard=guard or ServerGuard(address),
                check=check,
                open_timeout_s=open_timeout_s,
            )
        except BaseException:
            self.client.close()
            raise
        self.shared_counter = ByteCounter()
        """Bytes that were copied from and to shared memory."""
        self.copies_gradients = self.transports.shared is not None
        """Whether ``prepare_push`` copies gradients, so that their memory can be reused before they are pushed."""
        logger.info("shard server at %s: transport %s, %.2f GB/s", address, self.transport.name, self.bytes_per_s / 1e9)

    def _check_id(self, server_id: str, timeout_s: float) -> None:
        request = shard_pb2.DescribeServerRequest()
        found = self.client.call("DescribeServer", request, timeout_s=timeout_s, retry_for_s=timeout_s).server_id
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

    @property
    def counter(self) -> ByteCounter:
        """Streamed bytes, in their encoded size."""
        return self.transports.counter

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth, measured when the transport was opened."""
        return self.transports.bytes_per_s

    def moved_bytes(self) -> dict[str, tuple[int, int]]:
        """Returns the bytes received and sent so far over each transport that has moved any, by its name."""
        shared, counters = self.transports.shared, dict[str, ByteCounter]()
        if (stream_name := self.transports.stream_name) is not None:
            counters[stream_name] = self.counter
        if shared is not None:
            counters[shared.name] = self.shared_counter
        return {
            name: (at.received_bytes, at.sent_bytes)
            for name, at in counters.items()
            if at.received_bytes or at.sent_bytes
        }

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
        wait_s: float,
        wait_limit_s: float,
        nearly_done: NearlyDone = ignore,
    ) -> int:
        """Fetches one version of a shard, waiting until it exists; see ``Transport.fetch``.

        Args:
            shard: The shard.
            version: The version. None: the newest.
            target: Receives the values.
            wait_s: How long the server waits for the version.
            wait_limit_s: Deadline of the transfer, and how long to retry while the server is unavailable.
            nearly_done: Called when the transfer is nearly done.
        """
        retry_for_s, window = min(_RETRY_S, wait_limit_s), shard.window
        if window is None:
            return self.transports.over_stream(
                lambda stream: stream.fetch(
                    shard,
                    version,
                    target,
                    wait_s=wait_s,
                    timeout_s=wait_limit_s,
                    retry_for_s=retry_for_s,
                    nearly_done=nearly_done,
                )
            )
        self.shared_counter.add(received_bytes=shard.stop_bytes - shard.start_bytes)
        if version is not None and window.shows(version):
            return shard.read(version, target)  # no message to the server
        return self.transports.over_shared(
            lambda shared: shared.fetch(
                shard, version, target, wait_s=wait_s, timeout_s=wait_limit_s, retry_for_s=retry_for_s
            )
        )

    def fetch_batch(self, fetches: Sequence[SmallFetch], arrived: Arrived, *, wait_limit_s: float) -> None:
        """Fetches small shards with one request, once; see ``fetch_together``."""
        timeout_s = min(_BATCH_LIMIT_S, wait_limit_s)
        fetch_together(self.transports, fetches, self.counter, arrived, timeout_s=timeout_s)

    def fetch_average(
        self, shard: ShardAddress, version: int, target: FetchTarget, *, wait_s: float, wait_limit_s: float
    ) -> int:
        """Fetches the moving average of the values; see ``fetch``."""
        retry_for_s = min(_RETRY_S, wait_limit_s)
        return self.transports.over_stream(
            lambda stream: stream.fetch(
                shard,
                version,
                target,
                wait_s=wait_s,
                timeout_s=wait_limit_s,
                retry_for_s=retry_for_s,
                average=True,
            )
        )

    def await_version(self, shard: ShardAddress, version: int | None, *, wait_s: float, wait_limit_s: float) -> int:
        """Waits until a shard in shared memory has a version; returns the version.

        Args:
            shard: The shard.
            version: The version. None: any.
            wait_s: How long the server may wait for the version.
            wait_limit_s: How long to repeat the request while the server is unavailable.
        """
        if (window := shard.window) is not None and version is not None and window.shows(version):
            return version
        if self.transports.shared is None:
            raise UnavailableError(f"shard server at {self.address}: this process cannot map its memory")
        retry_for_s = min(_RETRY_S, wait_limit_s)
        return self.transports.over_shared(
            lambda shared: shared.locate(shard, version, timeout_s=wait_s, retry_for_s=retry_for_s)
        ).version

    def locate(self, shard: ShardAddress, version: int | None = None, *, wait_limit_s: float) -> SegmentLocation | None:
        """Returns where the server stores a shard in shared memory, or None if this process cannot map it.

        Args:
            shard: The shard.
            version: Waits until the server has this version or a newer one. None: does not wait.
            wait_limit_s: The longest wait.
        """
        if self.transports.shared is None:
            return None
        retry_for_s = min(_RETRY_S, wait_limit_s)  # the shard may have moved to another server meanwhile
        try:
            found, open_file = self.transports.over_shared(
                lambda shared: (
                    shared.locate(shard, version, timeout_s=wait_limit_s, retry_for_s=retry_for_s),
                    shared.open_file,
                )
            )
        except VersionGoneError:
            return self.locate(shard, wait_limit_s=wait_limit_s)
        except ConflictError as error:
            logger.warning("unit %r is fetched instead of read in place: %s", shard.layout.unit, error)
            return None
        return SegmentLocation(found.segment.file, shard.start_bytes, shard.stop_bytes, open_file)

    # ---- gradients ----

    def prepare_push(self, push: PreparedPush) -> PreparedPush:
        """Prepares a push of one part of a contribution. Copies the gradients to shared memory if
        ``copies_gradients``."""
        if self.copies_gradients:
            if (shared := self.transports.shared) is not None:
                prepared = shared.prepare_push_at_once(push)
                if prepared is not None:
                    return prepared
            try:
                return self.transports.over_shared(lambda shared: shared.prepare_push(push))
            except (CapacityError, OSError) as error:
                self._stop_sharing_gradients(error)
        return push

    def push(self, prepared: PreparedPush, *, wait_limit_s: float, nearly_done: NearlyDone = ignore) -> None:
        """Pushes one part of a contribution, in any thread; see ``Transport.push``.

        Args:
            prepared: The push. The connection to a former owner of the shard may have prepared it.
            wait_limit_s: Deadline.
            nearly_done: See ``Transport.push``.
        """
        retry_for_s = min(_RETRY_S, wait_limit_s)
        if prepared.is_shared and self.transports.shared is not None:
            try:
                self.transports.over_shared(
                    lambda shared: shared.push(prepared, timeout_s=wait_limit_s, retry_for_s=retry_for_s)
                )
                return
            except CapacityError as error:  # the session broke, and the new session has no memory for the part
                self._stop_sharing_gradients(error)
        self.transports.over_stream(
            lambda stream: stream.push(
                prepared, timeout_s=wait_limit_s, retry_for_s=retry_for_s, nearly_done=nearly_done
            )
        )

    def push_batch(self, prepared: Sequence[PreparedPush], *, wait_limit_s: float) -> list[bool]:
        """Pushes small parts of several contributions in one message, once; see ``push_together``."""
        timeout_s = min(_BATCH_LIMIT_S, wait_limit_s)
        return push_together(self.transports, prepared, self.counter, timeout_s=timeout_s)

    def release(self, dp_rank: int | None = None) -> None:
        """Releases the memory of a rank's contributions, which the server no longer reads. None: of all ranks."""
        if (shared := self.transports.shared) is not None:
            shared.release(dp_rank)

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
                return self.transports.over_shared(
                    lambda shared: shared.read_partition(shard, location, context, timeout_s=timeout_s)
                )
            except (CapacityError, ConflictError, OSError) as error:
                _require_memory_problem(error)
                logger.info("partition of unit %r is streamed: %s", location.layout.unit, error)
        return self.transports.over_rpcs(
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
                if self.transports.over_shared(
                    lambda shared: shared.stage_partition(location, context, segment, timeout_s=timeout_s)
                ):
                    return context.request_id
            except ConflictError as error:
                _require_memory_problem(error)
                logger.info("partition of unit %r is streamed: %s", location.layout.unit, error)
        context, share_state = make_context(), self.shares_partitions(shard)
        self.transports.over_rpcs(
            lambda client: client.stage_partition(
                location, context, segment, timeout_s=timeout_s, share_state=share_state
            )
        )
        return context.request_id

    def close(self) -> None:
        """Closes the transports. Transfers in flight fail."""
        self.transports.guard.close()
        self.transports.close()
        self.client.close()


def _require_memory_problem(error: Exception) -> None:
    """Raises errors that a stream would raise too, such as a step that is not prepared."""
    if isinstance(error, ConflictError) and type(error) is not ConflictError:
        raise error
