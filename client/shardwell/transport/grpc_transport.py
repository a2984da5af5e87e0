"""How bytes travel between a trainer's tensors and one shard server, over gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from shardwell.transport.base import NEARLY_BYTES, Nearly, unheard
from shardwell.transport.rpc import ServiceClient
from shardwell_wire import codec
from shardwell_wire.credentials import Credentials
from shardwell_wire.errors import ShardwellError
from shardwell_wire.v1 import shard_pb2


class ShardClient(ServiceClient):
    """Calls ``shardwell_wire.v1.ShardService`` at ``host:port``: the transport that is always there.

    Args:
        address: host:port.
        chunk_bytes: Payload per message, both ways.
        check: As of ``ServiceClient``.
        credentials: As of ``ServiceClient``.
    """

    kind = "grpc"
    broke = False
    """Every rpc is one of its own."""

    def __init__(
        self,
        address: str,
        *,
        chunk_bytes: int = codec.DEFAULT_CHUNK_BYTES,
        check: Callable[[], None] = lambda: None,
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(address, shard_pb2.DESCRIPTOR.services_by_name["ShardService"], check, credentials)
        self._chunk_bytes = chunk_bytes
        self._gather = self.byte_response_stub("Gather")
        self._measure = self.byte_response_stub("MeasureTransport")
        self._initialize = self.byte_request_stub("InitializeUnit")
        self._reduce_scatter = self.byte_request_stub("ReduceScatter")

    def gather(
        self,
        request: shard_pb2.GatherRequest,
        target: memoryview,
        *,
        timeout_s: float,
        retry_for_s: float,
        nearly: Nearly = unheard,
    ) -> int:
        """Fetches one version of a shard, waiting until it exists; see ``Transport``. Fills in ``chunk_bytes``."""
        request.chunk_bytes = self._chunk_bytes

        def fetch() -> int:
            receiver = codec.StreamReceiver([target], f"Gather of unit {request.unit!r} from {self.address}")
            header: shard_pb2.GatherHeader | None = None
            for data in self._gather(request, timeout=timeout_s):
                message, chunk = codec.decode_message(data, shard_pb2.GatherResponse)
                header = header or message.header
                receiver.feed(chunk)
                if receiver.total_bytes - receiver.received_bytes <= NEARLY_BYTES:
                    nearly()
            receiver.require_complete()
            assert header is not None
            return header.version

        return self.attempt(fetch, retry_for_s=retry_for_s)

    def initialize(
        self,
        header: shard_pb2.InitializeUnitHeader,
        pieces: Callable[[], Iterable[codec.Buffer]],
        size_bytes: int,
        *,
        timeout_s: float,
        retry_for_s: float,
    ) -> shard_pb2.InitializeUnitResponse:
        """Uploads the initial values of a shard.

        Args:
            header: Which shard, and what is drawn there.
            pieces: Called for each try: the rest of the values, made as they are sent.
            size_bytes: Of them all.
            timeout_s: Deadline of one try.
            retry_for_s: How long to try again while the server is unavailable.

        Raises:
            Exception: What making a piece raised.
        """
        first = shard_pb2.InitializeUnitRequest(header=header)
        failures: list[Exception] = []

        def send() -> shard_pb2.InitializeUnitResponse:
            stream = codec.encode_stream(
                first, _noting(pieces(), failures), chunk_bytes=self._chunk_bytes, total_bytes=size_bytes
            )
            response: shard_pb2.InitializeUnitResponse = self._initialize(stream, timeout=timeout_s)
            return response

        try:
            return self.attempt(send, retry_for_s=retry_for_s)
        except ShardwellError as error:
            if failures:  # of which gRPC says only that there was one
                raise failures[0] from error
            raise

    def reduce_scatter(
        self,
        header: shard_pb2.ReduceScatterHeader,
        pieces: Sequence[memoryview],
        *,
        timeout_s: float,
        retry_for_s: float,
        nearly: Nearly = unheard,
    ) -> shard_pb2.ReduceScatterResponse:
        """Pushes one part of a contribution; see ``Transport``."""
        first = shard_pb2.ReduceScatterRequest(header=header)

        def send() -> shard_pb2.ReduceScatterResponse:
            stream = _telling(codec.encode_stream(first, pieces, chunk_bytes=self._chunk_bytes), nearly)
            response: shard_pb2.ReduceScatterResponse = self._reduce_scatter(stream, timeout=timeout_s)
            return response

        return self.attempt(send, retry_for_s=retry_for_s)

    def reduce_gradient_buffer(
        self, request: shard_pb2.ReduceGradientBufferRequest, *, timeout_s: float, retry_for_s: float
    ) -> shard_pb2.ReduceGradientBufferResponse:
        """Hands a gradient buffer over; see ``Transport``."""
        answer: shard_pb2.ReduceGradientBufferResponse = self.call(
            "ReduceGradientBuffer", request, timeout_s=timeout_s, retry_for_s=retry_for_s
        )
        return answer

    def measure(self, size_bytes: int, *, timeout_s: float) -> float:
        """Receives bytes without meaning; returns bytes per second."""
        request = shard_pb2.MeasureTransportRequest(size_bytes=size_bytes, chunk_bytes=self._chunk_bytes)
        started = time.perf_counter()

        def fetch() -> int:
            return sum(len(data) for data in self._measure(request, timeout=timeout_s))

        return self.attempt(fetch, retry_for_s=0.0) / (time.perf_counter() - started)


def _telling(stream: Iterable[bytes], taken: Callable[[], None]) -> Iterator[bytes]:
    yield from stream
    taken()


def _noting(pieces: Iterable[codec.Buffer], failures: list[Exception]) -> Iterator[codec.Buffer]:
    try:
        yield from pieces
    except Exception as error:
        failures.append(error)
        raise
