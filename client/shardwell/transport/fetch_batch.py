"""Fetches small shards of several units from one server together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from shardwell.transport.base import ByteCounter, FetchTarget, ShardAddress
from shardwell.transport.incoming import Incoming
from shardwell.transport.selector import TransportSelector
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.v1 import shard_pb2

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
