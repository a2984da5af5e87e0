"""The client of the shard service, which all transports use for their rpcs, and the transport over gRPC streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from shardwell.transport.base import (
    NEARLY_DONE_BYTES,
    BatchAnswers,
    ByteCounter,
    NearlyDone,
    Place,
    StreamTransport,
    ignore,
)
from shardwell.transport.partition_transfers import (
    CachedPartition,
    IncomingPartition,
    PartitionLocation,
    PartitionSegment,
    describe_state,
    memory_of,
    read_request,
    stage_header,
)
from shardwell.transport.service_client import ServiceClient
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.errors import ChunkError, ShardwellError
from shardwell_wire.security.credentials import Credentials
from shardwell_wire.v1 import common_pb2, shard_pb2


class ShardClient(ServiceClient):
    """Calls the shard service at ``host:port``.

    Args:
        chunk_bytes: Payload per message, in both directions.
        check: See ``ServiceClient``.
        credentials: See ``ServiceClient``.
    """

    def __init__(
        self,
        address: str,
        *,
        chunk_bytes: int = chunk_streams.DEFAULT_CHUNK_BYTES,
        check: Callable[[], None] = lambda: None,
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(address, shard_pb2.DESCRIPTOR.services_by_name["ShardService"], check, credentials)
        self.chunk_bytes = chunk_bytes
        self._initialize = self.byte_request_stub("InitializeUnit")

    def initialize(
        self,
        header: shard_pb2.InitializeUnitHeader,
        pieces: Iterable[chunk_streams.Buffer],
        size_bytes: int,
        *,
        timeout_s: float,
    ) -> shard_pb2.InitializeUnitResponse:
        """Uploads the initial values of a shard.

        Args:
            header: The shard, and the parameters whose values the server draws.
            pieces: The other values, computed while they are sent.
            size_bytes: Size of all pieces.

        Raises:
            Exception: The exception that computing a piece raised.
        """
        first = shard_pb2.InitializeUnitRequest(header=header)
        failures: list[Exception] = []

        def send() -> shard_pb2.InitializeUnitResponse:
            stream = chunk_streams.encode_stream(
                first, _recording(pieces, failures), chunk_bytes=self.chunk_bytes, total_bytes=size_bytes
            )
            response: shard_pb2.InitializeUnitResponse = self._initialize(stream, timeout=timeout_s)
            return response

        try:
            return self.once(send)
        except ShardwellError as error:
            if failures:  # gRPC hides the exception of a request iterator
                raise failures[0] from error
            raise

    def push_batch(self, request: shard_pb2.ReduceBatchRequest, *, timeout_s: float) -> shard_pb2.ReduceBatchResponse:
        """Sends a batch of small pushes; see ``StreamTransport``."""
        answer: shard_pb2.ReduceBatchResponse = self.call("ReduceBatch", request, timeout_s=timeout_s)
        return answer

    def read_partition(
        self,
        location: PartitionLocation,
        context: common_pb2.RequestContext,
        *,
        timeout_s: float,
        cached: CachedPartition | None = None,
    ) -> PartitionSegment:
        """Fetches an optimizer partition of a prepared step.

        Args:
            context: Names the step and the lease.
            cached: Values and state of this trainer. They are not fetched if the server confirms that they are current.

        Raises:
            StepStateError: The step is not prepared.
            StaleEpochError: The partition belongs to another trainer.
        """
        request = read_request(location, context, cached)

        def fetch() -> PartitionSegment:
            incoming = None
            for data in self.byte_response_stub("ReadPartition")(request, timeout=timeout_s):
                message, chunk = chunk_streams.decode_message(data, shard_pb2.ReadPartitionResponse)
                incoming = incoming or IncomingPartition(location, message.header, cached)
                incoming.receiver.feed(chunk)
            assert incoming is not None
            return incoming.finish()

        return self.once(fetch)

    def stage_partition(
        self,
        location: PartitionLocation,
        context: common_pb2.RequestContext,
        segment: PartitionSegment,
        *,
        timeout_s: float,
        share_state: bool = False,
    ) -> None:
        """Sends the new values of the parameters that have a gradient, and the whole new state.

        Args:
            context: Names the step, the lease and the request.
            share_state: Whether the server puts the state in shared memory, for the next step.

        Raises:
            StepStateError: The gradient has since been recomputed.
            StaleEpochError: The partition belongs to another trainer.
            NonFiniteError: A value is NaN or infinity.
            CapacityError: The server has no memory for the partition.
        """
        state = describe_state(location, segment)
        header = stage_header(location, context, segment, state)
        header.share_state = share_state
        tensors = [segment.values[index] for index in sorted(segment.gradients)] + [tensor for _, tensor in state]
        first = shard_pb2.StagePartitionRequest(header=header)

        def send() -> None:
            stream = chunk_streams.encode_stream(first, [memory_of(tensor) for tensor in tensors])
            self.byte_request_stub("StagePartition")(stream, timeout=timeout_s)

        self.once(send)


class GrpcTransport(StreamTransport):
    """Moves bytes in gRPC streams, one per transfer. It works wherever the rpcs work.

    Args:
        client: Calls the server. The caller closes it.
        counter: See ``StreamTransport``.
    """

    name = "grpc"
    kind = common_pb2.TRANSPORT_KIND_GRPC

    def __init__(self, client: ShardClient, counter: ByteCounter | None = None) -> None:
        super().__init__(counter)
        self._client = client
        self._gather = client.byte_response_stub("Gather")
        self._gather_batch = client.byte_response_stub("GatherBatch")
        self._measure = client.byte_response_stub("MeasureTransport")
        self._reduce_scatter = client.byte_request_stub("ReduceScatter")

    def fetch_stream(
        self, request: shard_pb2.GatherRequest, place: Place, *, timeout_s: float, nearly_done: NearlyDone = ignore
    ) -> int:
        """See ``StreamTransport``. Sets ``request.chunk_bytes``."""
        request.chunk_bytes = self._client.chunk_bytes

        def fetch() -> int:
            what = f"Gather of unit {request.unit!r} from {self._client.address}"
            receiver, version = chunk_streams.StreamReceiver([], what), 0
            for number, data in enumerate(self._gather(request, timeout=timeout_s)):
                message, chunk = chunk_streams.decode_message(data, shard_pb2.GatherResponse)
                if number == 0:
                    header = message.header
                    version, deltas = header.version, header.deltas if header.HasField("deltas") else None
                    receiver = chunk_streams.StreamReceiver([place(version, deltas)], what)
                receiver.feed(chunk)
                if receiver.total_bytes - receiver.received_bytes <= NEARLY_DONE_BYTES:
                    nearly_done()
            receiver.require_complete()
            return version

        return self._client.once(fetch)

    def push_stream(
        self,
        header: shard_pb2.ReduceScatterHeader,
        pieces: Sequence[memoryview],
        *,
        timeout_s: float,
        nearly_done: NearlyDone = ignore,
    ) -> shard_pb2.ReduceScatterResponse:
        first = shard_pb2.ReduceScatterRequest(header=header)

        def send() -> shard_pb2.ReduceScatterResponse:
            stream = _then(
                chunk_streams.encode_stream(first, pieces, chunk_bytes=self._client.chunk_bytes), nearly_done
            )
            response: shard_pb2.ReduceScatterResponse = self._reduce_scatter(stream, timeout=timeout_s)
            return response

        return self._client.once(send)

    def control(
        self, request: shard_pb2.ReduceGradientBufferRequest, timeout_s: float
    ) -> shard_pb2.ReduceGradientBufferResponse:
        answer: shard_pb2.ReduceGradientBufferResponse = self._client.call(
            "ReduceGradientBuffer", request, timeout_s=timeout_s
        )
        return answer

    def fetch_batch(self, request: shard_pb2.GatherBatchRequest, answers: BatchAnswers, *, timeout_s: float) -> None:
        def receive() -> None:
            what = f"GatherBatch from {self._client.address}"
            for data in self._gather_batch(request, timeout=timeout_s):
                response, chunk = chunk_streams.decode_message(data, shard_pb2.GatherBatchResponse)
                receiver = chunk_streams.StreamReceiver(answers.places(response), what)
                receiver.feed(chunk)
                receiver.require_complete()
                answers.finish(response)
            if answers.are_missing:
                raise ChunkError(f"{what}: the stream ended before every range was answered")

        self._client.once(receive)

    def push_batch(self, request: shard_pb2.ReduceBatchRequest, *, timeout_s: float) -> shard_pb2.ReduceBatchResponse:
        return self._client.push_batch(request, timeout_s=timeout_s)

    def measure_stream(self, size_bytes: int, *, timeout_s: float) -> float:
        request = shard_pb2.MeasureTransportRequest(size_bytes=size_bytes, chunk_bytes=self._client.chunk_bytes)
        started = time.perf_counter()

        def receive() -> int:
            return sum(len(data) for data in self._measure(request, timeout=timeout_s))

        return self._client.once(receive) / (time.perf_counter() - started)

    def close(self) -> None:
        """Does nothing: the client belongs to the caller."""


def _then(stream: Iterable[bytes], callback: Callable[[], None]) -> Iterator[bytes]:
    yield from stream
    callback()


def _recording(pieces: Iterable[chunk_streams.Buffer], failures: list[Exception]) -> Iterator[chunk_streams.Buffer]:
    """Yields ``pieces``, and appends the exception that iterating over them raises."""
    try:
        yield from pieces
    except Exception as error:
        failures.append(error)
        raise
