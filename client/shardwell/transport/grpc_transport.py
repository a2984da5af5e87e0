"""The transport over gRPC streams."""

from __future__ import annotations

from collections.abc import Sequence

from shardwell.transport.base import BatchAnswers, ByteCounter, NearlyDone, StreamTransport, ignore
from shardwell.transport.incoming import Place
from shardwell.transport.shard_client import ShardClient
from shardwell_wire.v1 import common_pb2, shard_pb2


class GrpcTransport(StreamTransport):
    """Moves bytes in gRPC streams, one per transfer. It works wherever the rpcs work.

    Args:
        client: Calls the server. The caller closes it.
        counter: See ``StreamTransport``.
    """

    name = "grpc"
    kind = common_pb2.TRANSPORT_KIND_GRPC
    broke = False
    """Each transfer is an rpc of its own, so there is no session that could break."""

    def __init__(self, client: ShardClient, counter: ByteCounter | None = None) -> None:
        super().__init__(counter)
        self._client = client

    def fetch_stream(
        self,
        request: shard_pb2.GatherRequest,
        place: Place,
        *,
        timeout_s: float,
        retry_for_s: float,
        nearly_done: NearlyDone = ignore,
    ) -> int:
        """See ``StreamTransport``."""
        return self._client.fetch_stream(
            request, place, timeout_s=timeout_s, retry_for_s=retry_for_s, nearly_done=nearly_done
        )

    def push_stream(
        self,
        header: shard_pb2.ReduceScatterHeader,
        pieces: Sequence[memoryview],
        *,
        timeout_s: float,
        retry_for_s: float,
        nearly_done: NearlyDone = ignore,
    ) -> shard_pb2.ReduceScatterResponse:
        """See ``StreamTransport``."""
        return self._client.push_stream(
            header, pieces, timeout_s=timeout_s, retry_for_s=retry_for_s, nearly_done=nearly_done
        )

    def control(
        self, request: shard_pb2.ReduceGradientBufferRequest, *, timeout_s: float, retry_for_s: float
    ) -> shard_pb2.ReduceGradientBufferResponse:
        """See ``StreamTransport``."""
        return self._client.control(request, timeout_s=timeout_s, retry_for_s=retry_for_s)

    def fetch_batch(self, request: shard_pb2.GatherBatchRequest, answers: BatchAnswers, *, timeout_s: float) -> None:
        """See ``StreamTransport``."""
        self._client.fetch_batch(request, answers, timeout_s=timeout_s)

    def push_batch(self, request: shard_pb2.ReduceBatchRequest, *, timeout_s: float) -> shard_pb2.ReduceBatchResponse:
        """See ``StreamTransport``."""
        return self._client.push_batch(request, timeout_s=timeout_s)

    def measure_stream(self, size_bytes: int, *, timeout_s: float) -> float:
        """See ``StreamTransport``."""
        return self._client.measure_stream(size_bytes, timeout_s=timeout_s)

    def close(self) -> None:
        """Does nothing: the client belongs to the caller."""
