"""Fetches small shards of several units from one server in one message."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import xxhash

from shardwell.transport.base import ByteCounter, FetchTarget, ShardAddress
from shardwell.transport.incoming import Incoming
from shardwell.transport.selector import TransportSelector
from shardwell_wire.errors import CorruptDataError, InvalidRequestError
from shardwell_wire.v1 import shard_pb2


@dataclass(frozen=True, slots=True)
class SmallFetch:
    """A fetch of one version of a shard, small enough for a message."""

    shard: ShardAddress
    version: int
    target: FetchTarget


def fetch_together(
    transports: TransportSelector, fetches: Sequence[SmallFetch], counter: ByteCounter, *, timeout_s: float
) -> list[int | None]:
    """Fetches shards in one message, once, waiting until their versions exist.

    Args:
        transports: The transports to the server.
        fetches: At least one shard of the server.
        counter: Counts the received bytes.
        timeout_s: Deadline.

    Returns:
        The version of each shard. None: the shard must be fetched by itself.

    Raises:
        ShardwellError: The message or its answer was lost.
        CorruptDataError: The checksum of a shard does not match.
    """
    run = transports.run
    with ExitStack() as stack:
        streams = [stack.enter_context(each.target.incoming()) for each in fetches]
        requests = [
            each.shard.gather_request(each.version, each.target.wire_dtype, base=stream.base)
            for each, stream in zip(fetches, streams, strict=True)
        ]
        request = shard_pb2.GatherBatchRequest(run=run.name, run_id=run.run_id, ranges=requests)
        response = transports.fetch_batch(request, timeout_s=timeout_s)
        if len(response.ranges) != len(fetches):
            raise InvalidRequestError(
                f"shard server at {transports.client.address} answered a batch of {len(fetches)} ranges with "
                f"{len(response.ranges)}"
            )
        return [_receive(*each, counter) for each in zip(fetches, streams, response.ranges, strict=True)]


def _receive(fetch: SmallFetch, incoming: Incoming, found: shard_pb2.GatheredRange, counter: ByteCounter) -> int | None:
    if found.status:
        return None
    stream, unit = found.stream, fetch.shard.layout.unit
    if (checksum := xxhash.xxh3_64_intdigest(stream)) != found.checksum:
        raise CorruptDataError(
            f"GatherBatch, unit {unit!r}: the bytes have checksum {checksum:#018x}, expected {found.checksum:#018x}",
            unit=unit,
        )
    buffer = incoming.place(found.version, found.deltas if found.HasField("deltas") else None)
    if len(buffer) != len(stream):
        raise InvalidRequestError(
            f"GatherBatch, unit {unit!r}: the server sent {len(stream)} bytes, expected {len(buffer)}", unit=unit
        )
    buffer[:] = stream
    counter.add(received_bytes=len(stream))
    incoming.finish()
    return found.version
