"""Sends the small parts of several contributions to one server in one message."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from shardwell.transport.base import ByteCounter, PreparedPush
from shardwell.transport.selector import TransportSelector
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.v1 import shard_pb2
from shardwell_wire.wire_dtypes import AS_STORED


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
