"""Sends the small parts of several contributions to one server in one message."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from shardwell.transport.base import ByteCounter, PreparedPush
from shardwell.transport.selector import TransportSelector
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.v1 import shard_pb2


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
    request = shard_pb2.ReduceBatchRequest(run=transports.run.name, run_id=transports.run.run_id)
    for position, each in enumerate(prepared):
        if not each.is_shared:
            _add_stream(each, request)
        elif shared is None or not shared.add_to_batch(each, request):
            continue
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
        if part.HasField("stream"):
            counter.add(sent_bytes=len(part.stream) if accepted[position] else 0)
        elif shared is not None:
            shared.finish_batched(prepared[position], result)
    return accepted


def _add_stream(prepared: PreparedPush, request: shard_pb2.ReduceBatchRequest) -> None:
    prepared.header.wire_dtype = prepared.part.wire_dtype
    with prepared.part.stream() as pieces:
        stream = b"".join(pieces)
    request.parts.add(header=prepared.header, stream=stream, checksum=xxhash.xxh3_64_intdigest(stream))
