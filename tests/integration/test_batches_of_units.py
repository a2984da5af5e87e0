"""Tests of the rpcs ReduceBatch and GatherBatch: what a server rejects, and what it then has done."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import torch
import xxhash

from shardwell.transport.grpc_transport import GrpcTransport
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.transports.batch_requests import MAX_GATHERED_BYTES, MAX_PARTS, MAX_RANGES
from shardwell_wire.errors import (
    ConflictError,
    CorruptDataError,
    DeadlineError,
    InvalidRequestError,
    ShardwellError,
    StepStateError,
    from_status_details,
)
from shardwell_wire.v1 import shard_pb2
from tests.support.shard_server import OneUnit, ShardServer, assert_all, error_of, layout_of


def unit(server: ShardServer, index: int = 0, **options: Any) -> OneUnit:
    return OneUnit(server, layout_of(f"u{index}", a=((100,), "float32")), index=index, **options).begin()


def part_of(one: OneUnit, value: float, **changes: Any) -> shard_pb2.BatchedPart:
    header = shard_pb2.ReduceScatterHeader(
        context=one.context(), unit=one.layout.unit, parameter_indices=[0], start_bytes=one.start, stop_bytes=one.stop
    )
    stream = torch.full((100,), value).numpy().tobytes()
    checksum = xxhash.xxh3_64_intdigest(stream)
    return shard_pb2.BatchedPart(**{"header": header, "stream": stream, "checksum": checksum, **changes})


def send(server: ShardServer, *parts: shard_pb2.BatchedPart, **changes: Any) -> list[ShardwellError | None]:
    """Sends a batch; returns the error of each part."""
    fields = {"run": "r", "run_id": "id-of-r", "parts": parts}
    response = server.call("ReduceBatch", shard_pb2.ReduceBatchRequest(**{**fields, **changes}))
    return [from_status_details(each.status, "server") if each.status else None for each in response.results]


def contributors(server: ShardServer, one: OneUnit) -> list[int]:
    return server.evaluate(lambda: list(one.shard.gradient.contributions.by_rank))


def test_parts_of_a_batch_become_contributions(server: ShardServer) -> None:
    ones = [unit(server, index) for index in range(3)]
    assert send(server, *(part_of(one, 2.0) for one in ones)) == [None] * 3
    assert [contributors(server, one) for one in ones] == [[0]] * 3


def test_a_batch_may_hold_several_parts_of_one_contribution(server: ShardServer) -> None:
    one = unit(server)
    first, second = part_of(one, 1.0), part_of(one, 2.0)
    second.header.part = 1
    assert send(server, first, second) == [None, None]
    one.prepare(0, (0, 0, 2))
    one.update(0)
    assert_all(one.gather(1)[1], -3.0)


def test_parts_without_a_context_have_the_common_one(server: ShardServer) -> None:
    ones = [unit(server, index, dp=2) for index in range(3)]
    parts = [part_of(one, 2.0) for one in ones]
    for part in parts[:2]:
        part.header.ClearField("context")
    common = shard_pb2.ReduceScatterHeader(context=ones[0].context(), dp_rank=1)
    assert send(server, *parts, common=common) == [None] * 3
    assert [contributors(server, one) for one in ones] == [[1], [1], [0]]


@pytest.mark.parametrize("common", [None, shard_pb2.ReduceScatterHeader(context={"run": "other"})])
def test_parts_without_a_context_of_the_run_are_rejected(server: ShardServer, common: Any) -> None:
    one = unit(server)
    part = part_of(one, 1.0)
    part.header.ClearField("context")
    assert isinstance(error_of(lambda: send(server, part, common=common)), InvalidRequestError)
    assert contributors(server, one) == []


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"checksum": 1}, CorruptDataError, "expected 0x0000000000000001"),
        ({"stream": b"short"}, InvalidRequestError, "the stream has 5 bytes, expected 400"),
        ({"stream": None}, InvalidRequestError, "neither a stream nor a gradient buffer"),
        ({"stream": None, "gradient_buffer_id": 1}, ConflictError, "shm"),
    ],
)
def test_a_bad_part_leaves_no_trace_and_the_others_count(
    server: ShardServer, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    good, bad = unit(server, 0), unit(server, 1)
    errors = send(server, part_of(bad, 1.0, **changes), part_of(good, 1.0))
    assert isinstance(errors[0], error) and words in str(errors[0])
    assert errors[1] is None
    assert contributors(server, bad) == [] and contributors(server, good) == [0]


def test_parts_that_do_not_count_release_their_memory(server: ShardServer) -> None:
    one, other = unit(server, 0, dp=2), unit(server, 1, dp=2)
    before = server.taken_bytes()
    repeated, early = part_of(one, 1.0), part_of(other, 1.0)
    early.header.context.step = 1
    errors = send(server, repeated, repeated, early)
    assert errors[:2] == [None, None] and isinstance(errors[2], StepStateError)
    assert server.taken_bytes() == before + one.size


def take_all(memory: Memory) -> int:
    """Acquires all memory outside reservations; returns its size."""
    return sum(size for size in (1 << bit for bit in reversed(range(40))) if memory.unreserved.try_acquire(size))


def test_a_part_waits_for_memory(server: ShardServer) -> None:
    one, other = unit(server, 0), unit(server, 1)
    send(server, part_of(one, 1.0))
    # The next attempt needs a second buffer of the shard, and the memory outside reservations is in use.
    taken = server.evaluate(lambda: take_all(server.store.memory))
    again = part_of(one, 2.0)
    again.header.attempt = 1
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(send, server, part_of(other, 1.0), again)
        server.until(lambda: bool(other.shard.gradient.contributions.by_rank), "the part before it counts")
        assert not sent.done()
        server.evaluate(lambda: server.store.memory.unreserved.release(taken))
        assert sent.result(20.0) == [None, None]
    assert server.evaluate(lambda: one.shard.gradient.contributions.attempt(0)) == 1


def test_a_batch_for_another_run_is_rejected_as_a_whole(server: ShardServer) -> None:
    one = unit(server)
    foreign = part_of(one, 1.0)
    foreign.header.context.run = "other"
    error = error_of(lambda: send(server, part_of(one, 1.0), foreign))
    assert isinstance(error, InvalidRequestError)
    assert "part 1 of the batch names run 'other'" in str(error)
    assert contributors(server, one) == []


@pytest.mark.parametrize("count", [0, MAX_PARTS + 1])
def test_a_batch_of_a_wrong_size_is_rejected(server: ShardServer, count: int) -> None:
    one = unit(server)
    error = error_of(lambda: send(server, *[part_of(one, 1.0)] * count))
    assert isinstance(error, InvalidRequestError)
    assert f"the batch has {count} parts, expected 1 to {MAX_PARTS}" in str(error)
    assert contributors(server, one) == []


@dataclass
class Answers:
    """Receives the answers to a batch of gathers. A ``BatchAnswers``."""

    count: int
    ranges: dict[int, shard_pb2.GatheredRange] = field(default_factory=dict)
    streams: dict[int, bytearray] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    """Number of ranges in each response."""

    @property
    def are_missing(self) -> bool:
        return len(self.ranges) < self.count

    def places(self, response: shard_pb2.GatherBatchResponse) -> list[memoryview]:
        self.sizes.append(len(response.ranges))
        self.ranges.update({each.number: each for each in response.ranges})
        read = [each for each in response.ranges if not each.status]
        self.streams.update({each.number: bytearray(each.size_bytes) for each in read})
        return [memoryview(self.streams[each.number]) for each in read]

    def finish(self, response: shard_pb2.GatherBatchResponse) -> None:
        pass


def gather(server: ShardServer, *ranges: shard_pb2.GatherRequest, timeout_s: float = 20.0) -> Answers:
    request = shard_pb2.GatherBatchRequest(run="r", run_id="id-of-r", ranges=ranges)
    answers = Answers(len(ranges))
    GrpcTransport(server.client).fetch_batch(request, answers, timeout_s=timeout_s)
    return answers


def test_a_batch_of_gathers_has_the_bytes_of_each_range(server: ShardServer) -> None:
    ones = [OneUnit(server, layout_of(f"u{i}", a=((100,), "float32")), index=i) for i in range(2)]
    for value, one in enumerate(ones):
        one.begin(one.filled(float(value)))
    found = gather(server, *(one.gather_request(0) for one in ones))
    values = [torch.full((100,), float(value)).numpy().tobytes() for value in (0, 1)]
    assert [bytes(found.streams[number][:400]) for number in (0, 1)] == values
    assert [len(found.streams[number]) for number in (0, 1)] == [one.size for one in ones], "with padding, as a Gather"
    assert [found.ranges[number].status for number in (0, 1)] == [b"", b""]
    assert found.sizes == [2], "ranges that are readable at once share a response"


def test_a_range_without_its_version_does_not_affect_the_others(server: ShardServer) -> None:
    one = unit(server)
    found = gather(server, one.gather_request(5), one.gather_request(0), timeout_s=2.0)
    assert isinstance(from_status_details(found.ranges[0].status, "server"), DeadlineError)
    assert not found.ranges[1].status and len(found.streams[1]) == one.size
    assert found.sizes == [1, 1]


def test_late_ranges_are_answered_as_soon_as_their_versions_exist(server: ShardServer) -> None:
    ones = [OneUnit(server, layout_of(f"u{i}", a=((100,), "float32")), index=i) for i in range(2)]
    for one in ones:
        one.reserve()
    first, second = ones
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(gather, server, *(one.gather_request(0) for one in ones))
        server.until(lambda: len(second.shard.values._waiting) == 1, "both ranges wait")
        second.initialize(second.filled(1.0))
        second.publish()
        server.until(lambda: not second.shard.values._waiting, "the second range is answered")
        first.initialize(first.filled(2.0))
        first.publish()
        found = sent.result(20.0)
    assert found.sizes == [1, 1] and list(found.ranges) == [1, 0]


def test_ranges_that_are_too_large_together_are_rejected(server: ShardServer) -> None:
    size = MAX_GATHERED_BYTES // 4
    large = OneUnit(server, layout_of("large", a=((size,), "float32")), index=0).begin()
    found = gather(server, large.gather_request(0), large.gather_request(0))
    assert len(found.streams[0]) == MAX_GATHERED_BYTES and not found.ranges[0].status
    error = from_status_details(found.ranges[1].status, "server")
    assert isinstance(error, InvalidRequestError) and "do not fit the batch" in str(error)


def test_a_batch_of_gathers_for_another_run_or_of_a_wrong_size_is_rejected(server: ShardServer) -> None:
    one = unit(server)
    foreign = one.gather_request(0)
    foreign.run = "other"
    error = error_of(lambda: gather(server, one.gather_request(0), foreign))
    assert isinstance(error, InvalidRequestError) and "range 1 of the batch names run 'other'" in str(error)
    for count in (0, MAX_RANGES + 1):
        error = error_of(lambda count=count: gather(server, *[one.gather_request(0)] * count))
        assert isinstance(error, InvalidRequestError) and f"the batch has {count} ranges" in str(error)


def test_unread_batches_of_gathers_stay_within_the_limits_of_streams(server: ShardServer) -> None:
    sending = server.store.memory.sending
    one = OneUnit(server, layout_of("large", a=((MAX_GATHERED_BYTES // 4,), "float32")), index=0).begin()
    request = shard_pb2.GatherBatchRequest(run="r", run_id="id-of-r", ranges=[one.gather_request(0)])
    small_window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(server.client.address, options=small_window) as channel:
        gather_batch = channel.unary_stream("/shardwell_wire.v1.ShardService/GatherBatch")
        unread = [gather_batch(request.SerializeToString(), timeout=60.0) for _ in range(400)]
        server.until(lambda: len(sending._waiting) > 100, "the responses wait for memory")
        assert server.evaluate(lambda: sending.used_bytes) <= sending.peer_limit_bytes
        for call in unread:
            call.cancel()
    server.until(lambda: sending.used_bytes == 0 and not sending._waiting, "all memory is released")
