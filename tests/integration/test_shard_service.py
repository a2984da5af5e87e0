"""Requests that a shard server rejects over gRPC. A rejected request leaves no trace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, cast

import grpc
import pytest

from shardwell_server.shard.requests import client_streams
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.encoding.wire_dtypes import AS_STORED, WireDtype
from shardwell_wire.errors import (
    AccessError,
    CapacityError,
    ChunkError,
    CorruptDataError,
    DuplicateError,
    InvalidRequestError,
    NonFiniteError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    UnitMismatchError,
)
from shardwell_wire.model.topology import MAX_WORLD_SIZE
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import (
    BIG,
    MIXED,
    PLAIN,
    SERVICE,
    HalfStream,
    OneUnit,
    ShardServer,
    assert_all,
    error_of,
    layout_of,
    unit,
)

NAN = float("nan")


# Malformed bytes.


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"", b"\x0a\x05abc", b"\x7a\x02\x7a"])
def test_malformed_bytes_are_rejected_by_every_rpc(server: ShardServer, data: bytes) -> None:
    one = unit(server)
    before = server.taken_bytes()
    for method in SERVICE.methods:
        if method.client_streaming:
            error = HalfStream(server.client.byte_request_stub(method.name)).send(data).finish().error()
            assert isinstance(error, InvalidRequestError), method.name
        elif data:
            channel = grpc.insecure_channel(server.client.address)
            call: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
            outcome = call(f"/{SERVICE.full_name}/{method.name}")
            with pytest.raises(grpc.RpcError) as caught:
                list(outcome(data)) if method.server_streaming else outcome(data)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, method.name
            channel.close()
    assert (one.gather()[0], server.taken_bytes()) == (0, before)


def broken_streams(messages: list[bytes], longer: list[bytes]) -> dict[str, tuple[list[bytes], type[ShardwellError]]]:
    return {
        "nothing": ([], InvalidRequestError),
        "no header": (messages[1:], InvalidRequestError),
        "gap": ([messages[0], *messages[2:]], ChunkError),
        "overlap": ([messages[0], messages[1], *messages[1:]], ChunkError),
        "short": (messages[:-1], ChunkError),
        "excess": ([*messages, messages[-1]], ChunkError),
        "second header": ([messages[0], *messages], ChunkError),
        "wrong checksum": ([*messages[:-1], flip_last_byte(messages[-1])], CorruptDataError),
        "garbage in the middle": ([*messages[:2], b"\xff\xff"], InvalidRequestError),
        "oversized chunk": (longer, ChunkError),
    }


def flip_last_byte(message: bytes) -> bytes:
    return message[:-1] + bytes([message[-1] ^ 1])


BROKEN = list(broken_streams([b"."] * 3, []))


@pytest.mark.parametrize("how", BROKEN)
def test_broken_push_leaves_no_trace(server: ShardServer, how: str) -> None:
    one = unit(server, BIG if how == "oversized chunk" else PLAIN)
    before = server.taken_bytes()
    longer = one.push_messages(one.zeros(), chunk_bytes=chunk_streams.MAX_CHUNK_BYTES + 1) if one.size > 5 << 20 else []
    messages, expected = broken_streams(one.push_messages(one.filled(1.0)), longer)[how]
    assert type(one.open_push().send(*messages).finish().error()) is expected
    server.until(lambda: one.shard.gradient.contributions.by_rank == {}, "no contribution is kept")
    assert (server.taken_bytes(), server.unreserved_bytes()) == (before, 0)
    assert one.push(one.filled(1.0)).duplicate is False


@pytest.mark.parametrize("how", BROKEN)
def test_broken_initial_values_leave_no_trace(server: ShardServer, how: str) -> None:
    one = OneUnit(server, BIG if how == "oversized chunk" else PLAIN)
    one.reserve()
    too_large = chunk_streams.MAX_CHUNK_BYTES + 1
    longer = one.initialize_messages(one.zeros(), chunk_bytes=too_large) if one.size > 5 << 20 else []
    messages, expected = broken_streams(one.initialize_messages(one.filled(1.0)), longer)[how]
    assert type(one.open_initialize().send(*messages).finish().error()) is expected
    assert server.taken_bytes() == 0
    assert isinstance(error_of(one.publish), StepStateError)
    one.initialize(one.filled(2.0))
    one.publish()
    assert_all(one.gather(0)[1], 2.0)


@pytest.mark.parametrize("how", ["gap", "overlap", "short", "excess", "garbage in the middle"])
def test_broken_duplicate_is_rejected(server: ShardServer, how: str) -> None:
    one = unit(server)
    one.push(one.filled(1.0))
    messages, _ = broken_streams(one.push_messages(one.filled(1.0)), [])[how]
    assert isinstance(one.open_push().send(*messages).finish().error(), InvalidRequestError)
    assert server.evaluate(lambda: server.store.run("r").duplicate_count) == 0


# Wrong names, ranges and numbers.


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"start_bytes": 4096}, NotFoundError),
        ({"stop_bytes": 4096}, NotFoundError),
        ({"stop_bytes": PLAIN.size_bytes + 64}, NotFoundError),
        ({"dp_rank": 1}, InvalidRequestError),
        ({"parameter_indices": [1, 0]}, InvalidRequestError),
        ({"parameter_indices": [0, 0]}, InvalidRequestError),
        ({"parameter_indices": [0, 2]}, InvalidRequestError),
    ],
)
def test_push_that_does_not_fit_the_shard_is_rejected(
    server: ShardServer, changes: dict[str, Any], error: type[ShardwellError]
) -> None:
    one = unit(server)
    messages = one.push_messages(one.filled(1.0), epoch=9, **changes)
    assert type(one.open_push().send(*messages).finish().error()) is error
    assert one.push(one.filled(1.0), epoch=1).duplicate is False, "the rejected push left its epoch behind"


def test_unknown_names_are_not_found(server: ShardServer) -> None:
    one = unit(server)
    context = common_pb2.RequestContext(run="nobody", run_id="id", epoch=1)
    stranger = OneUnit(server, layout_of("other", a=((4,), "float32")))
    elsewhere = OneUnit(server, PLAIN, run="nobody")
    asked: list[Callable[[], object]] = [
        stranger.gather,
        stranger.publish,
        lambda: stranger.push(stranger.zeros()),
        lambda: stranger.initialize(stranger.zeros()),
        elsewhere.gather,
        elsewhere.publish,
        lambda: elsewhere.push(elsewhere.zeros()),
        lambda: elsewhere.initialize(elsewhere.zeros()),
        lambda: elsewhere.fence(0, (0, 1, 1)),
        lambda: elsewhere.prepare(0),
        lambda: elsewhere.update(0),
        lambda: server.call("ListShards", shard_pb2.ListShardsRequest(run="nobody")),
        lambda: server.call("DescribeShard", shard_pb2.DescribeShardRequest(run="r", unit="other")),
        lambda: server.call("DescribeStep", shard_pb2.DescribeStepRequest(run="nobody")),
        lambda: server.call("Peek", shard_pb2.PeekRequest(run="r", parameter="u.z")),
    ]
    for ask in asked:
        assert isinstance(error_of(ask), NotFoundError)
    assert "it has u" in str(error_of(stranger.gather))
    assert server.call("DropRun", shard_pb2.DropRunRequest(context=context)).freed_bytes == 0
    assert one.gather()[0] == 0


@pytest.mark.parametrize(
    ("start", "stop", "wire_dtype", "error"),
    [
        (1, 0, AS_STORED, InvalidRequestError),
        (8, 4, AS_STORED, InvalidRequestError),
        (0, PLAIN.size_bytes + 1, AS_STORED, NotFoundError),
        (64, PLAIN.size_bytes + 64, AS_STORED, NotFoundError),
        (64, 128, common_pb2.WIRE_DTYPE_BFLOAT16, NotFoundError),
    ],
)
def test_gather_outside_the_shard_is_rejected(
    server: ShardServer, start: int, stop: int, wire_dtype: WireDtype, error: type[ShardwellError]
) -> None:
    """A rollback may have cut the unit anew. A trainer with the former cuts must not take this for its own mistake."""
    one = unit(server)
    stub = server.client.byte_response_stub("Gather")
    request = one.gather_request(start_bytes=start, stop_bytes=stop, wire_dtype=wire_dtype)
    assert type(error_of(lambda: list(stub(request, timeout=60)))) is error
    too_large = one.gather_request(chunk_bytes=chunk_streams.MAX_CHUNK_BYTES + 1)
    assert isinstance(error_of(lambda: list(stub(too_large, timeout=60))), InvalidRequestError)
    assert server.evaluate(lambda: one.shard.values.current is not None and one.shard.values.current.readers) == 0


def test_reservation_is_validated_and_idempotent(server: ShardServer) -> None:
    one = OneUnit(server, PLAIN, dp=2)
    free = one.reserve().free_bytes
    assert one.reserve().free_bytes == free
    one.initialize(one.zeros())
    one.publish()
    assert one.reserve().version == 0
    for changes in ({"dp": 1}, {"unit_index": 5}, {"stop_bytes": 4096}, {"unit": MIXED.to_proto(), "stop_bytes": 0}):
        assert isinstance(error_of(partial(one.reserve, **changes)), UnitMismatchError)
    other = OneUnit(server, layout_of("v", a=((4,), "float32")), dp=2)
    assert isinstance(error_of(other.reserve), UnitMismatchError), "the index belongs to another unit"
    for changes in ({"start_bytes": 5}, {"stop_bytes": 5}, {"start_bytes": 4096, "stop_bytes": 0}, {"dp": 0}):
        invalid = OneUnit(server, layout_of("w", a=((4096,), "float32")), index=7)
        assert isinstance(error_of(partial(invalid.reserve, **changes)), InvalidRequestError)
    assert server.evaluate(lambda: server.store.memory.free_bytes) == free


def test_reservation_beyond_the_budget_is_rejected_and_stores_nothing() -> None:
    size = PLAIN.size_bytes
    with ShardServer(budget_bytes=size * 12) as server:
        first = OneUnit(server, PLAIN, dp=2)
        assert first.reserve().free_bytes == 12 * size - 7 * size
        second = OneUnit(server, layout_of("v", a=((60_000,), "float32")), dp=2, index=1)
        error = error_of(second.reserve)
        assert isinstance(error, CapacityError)
        assert "add shard servers, raise --memory-budget, or use fewer data ranks" in str(error)
        assert [shard.unit for shard in server.call("ListShards", shard_pb2.ListShardsRequest(run="r")).shards] == ["u"]
        assert first.drop().freed_bytes == 7 * size
        assert first.drop().freed_bytes == 0
        OneUnit(server, second.layout, dp=2, index=1, run_id="the-next").reserve()


def test_reservation_for_the_largest_world_is_fast_and_a_larger_one_is_rejected(server: ShardServer) -> None:
    empty = OneUnit(server, layout_of("empty", w=((0,), "float32")), run="wide", dp=MAX_WORLD_SIZE)
    # With a cost per pair of ranks, this took hours and blocked the event loop.
    empty.reserve()
    server.evaluate(lambda: empty.shard.partitions.bounds(MAX_WORLD_SIZE - 1))
    for dp in (0, MAX_WORLD_SIZE + 1, (1 << 32) - 1):
        context = common_pb2.RequestContext(run="other", run_id="other", epoch=1)
        error = error_of(partial(empty.reserve, dp=dp, context=context))
        assert isinstance(error, InvalidRequestError)
        assert f"dp is {dp}: expected 1 to {MAX_WORLD_SIZE}" in str(error)
    assert "other" not in server.evaluate(lambda: list(server.store.runs))


def test_reused_request_id_with_other_content_is_rejected(server: ShardServer) -> None:
    one = unit(server)
    assert one.push(one.filled(1.0), request_id="id").duplicate is False
    assert one.push(one.filled(1.0), request_id="id").duplicate is True
    assert isinstance(error_of(lambda: one.push(one.filled(1.0), request_id="id", part=1)), DuplicateError)
    one.prepare(0)
    request = one.update_request(0)
    request.context.request_id = "update"
    other = one.update_request(0, lr=0.5)
    other.context.request_id = "update"
    server.call("Update", request)
    assert isinstance(error_of(lambda: server.call("Update", other)), DuplicateError)
    assert server.call("Update", request).version == 1


# Fencing.


def test_older_coordinator_term_is_rejected_by_every_rpc(server: ShardServer) -> None:
    one = unit(server)
    one.push(one.filled(1.0))
    server.coordinator_term = 5
    one.fence(0, term=5)
    for ask in speaking_for(4, one):
        assert isinstance(error_of(ask), StaleEpochError)
    server.call("PrepareStep", one.prepare_request(0, term=5))
    assert one.gather()[0] == 0


def test_unconfirmed_coordinator_term_is_rejected_by_every_rpc(
    server: ShardServer,
) -> None:
    one = unit(server)
    one.push(one.filled(1.0))
    for ask in speaking_for(2**64 - 1, one):
        error = error_of(ask)
        assert isinstance(error, AccessError)
        assert "coordinator term 18446744073709551615, but this server's coordinator has term 1" in str(error)
    one.prepare(0)
    assert one.update(0).version == 1


def speaking_for(term: int, one: OneUnit) -> list[Callable[[], object]]:
    """Returns calls of every rpc of the coordinator, with a term."""
    context = one.context(epoch=term)
    return [
        lambda: one.reserve(context=context),
        lambda: one.publish(term=term),
        lambda: one.fence(0, (0, 9, 9), term=term),
        lambda: one.prepare(0, term=term),
        lambda: one.server.call("ConfirmPartitions", shard_pb2.ConfirmPartitionsRequest(context=context)),
        lambda: one.server.call("PrepareUpdate", shard_pb2.PrepareUpdateRequest(context=context)),
        lambda: one.update(0, term=term),
        lambda: one.server.call("DropRun", shard_pb2.DropRunRequest(context=context)),
    ]


def test_fenced_epochs_and_attempts_are_rejected(server: ShardServer) -> None:
    one = unit(server, dp=2)
    one.push(one.filled(1.0))
    one.push(one.filled(1.0), rank=1)
    one.fence(0, (0, 7, 0))
    assert isinstance(error_of(lambda: one.push(one.filled(1.0), epoch=6)), StaleEpochError)
    assert one.push(one.filled(1.0), epoch=7).duplicate is False, "the lost trainer's contribution is replaced"
    assert one.push(one.filled(1.0), epoch=7).duplicate is True
    one.fence(0, (0, 7, 2))
    assert server.evaluate(lambda: list(one.shard.gradient.contributions.by_rank)) == [1]
    assert isinstance(error_of(lambda: one.push(one.filled(1.0), epoch=8, attempt=1)), StaleEpochError)
    one.push(one.filled(1.0), epoch=8, attempt=2)
    one.fence(0, (0, 8, 2))
    assert isinstance(error_of(lambda: one.push(one.filled(1.0), epoch=7, attempt=2)), StaleEpochError)
    one.prepare(0, (0, 2, 1), (1, 0, 1))


def test_higher_epoch_in_a_push_does_not_fence_the_leaseholder(server: ShardServer) -> None:
    one = unit(server)
    one.push(one.filled(1.0), epoch=2**62)
    assert one.push(one.filled(1.0), epoch=1).duplicate is False, (
        "the push replaces the contribution of the other epoch"
    )
    assert one.push(one.filled(1.0), epoch=1).duplicate is True
    one.prepare(0)
    one.update(0)
    assert one.push(one.filled(1.0), step=1, epoch=1).duplicate is False


def test_fence_of_the_next_step_keeps_the_committed_step(server: ShardServer) -> None:
    one = unit(server)
    one.push(one.filled(1.0))
    one.prepare(0)
    one.fence(1, (0, 3, 1))
    assert one.update(0).version == 1
    one.fence(0, (0, 2, 9))
    assert isinstance(error_of(lambda: one.push(one.filled(1.0), step=1, epoch=3)), StaleEpochError)
    assert one.push(one.filled(1.0), step=1, epoch=3, attempt=1).duplicate is False


def test_newer_attempt_replaces_the_older_when_complete(server: ShardServer) -> None:
    one = unit(server)
    one.push(one.filled(1.0))
    before = server.taken_bytes()
    half = one.open_push().send(*one.push_messages(one.filled(5.0), attempt=1)[:-1])
    server.until(lambda: len(one.shard.streams) == 1, "the stream has started")
    half.cancel()
    server.until(lambda: len(one.shard.streams) == 0, "the stream has ended")
    assert server.evaluate(lambda: one.shard.gradient.contributions.attempt(0)) == 0
    one.push(one.filled(5.0), attempt=1)
    assert (server.taken_bytes(), server.unreserved_bytes()) == (before, 0)
    assert isinstance(error_of(lambda: one.push(one.filled(1.0))), StaleEpochError)
    one.prepare(0, (0, 1, 1))
    one.update(0)
    assert_all(one.gather(1)[1], -5.0)


# Initial values.


def test_non_finite_initial_value_is_rejected_by_parameter_name(server: ShardServer) -> None:
    one = OneUnit(server, PLAIN)
    one.reserve()
    bad = one.zeros()
    bad[1][17] = NAN
    error = error_of(lambda: one.initialize(bad))
    assert isinstance(error, NonFiniteError)
    assert error.data["parameter"] == "u.b"
    assert server.taken_bytes() == 0
    assert isinstance(error_of(one.publish), StepStateError)


def test_initial_values_of_a_higher_epoch_replace_others_until_publication(server: ShardServer) -> None:
    one = OneUnit(server, PLAIN)
    one.reserve()
    one.initialize(one.filled(1.0), epoch=3)
    one.initialize(one.filled(2.0), epoch=4)
    assert isinstance(error_of(lambda: one.initialize(one.filled(3.0), epoch=3)), StaleEpochError)
    assert isinstance(error_of(lambda: one.publish(epoch=3)), StepStateError)
    one.publish(epoch=4)
    answer = one.initialize(one.filled(9.0), epoch=5)
    assert (answer.HasField("version"), answer.version) == (True, 0)
    assert_all(one.gather(0)[1], 2.0)
    assert (server.taken_bytes(), server.unreserved_bytes()) == (one.size, 0)


def test_initial_values_of_a_lower_epoch_that_arrive_later_replace_nothing(server: ShardServer) -> None:
    """The stream of the former trainer begins before the values of the next one are complete, and ends after them."""
    one = OneUnit(server, PLAIN)
    one.reserve()

    def receive(epoch: int, into: Callable[[], Awaitable[object]]) -> Coroutine[Any, Any, None]:
        class Stream:
            async def into(self, targets: Sequence[memoryview], what: str) -> int:
                for target in targets:
                    target[:] = bytes([epoch]) * target.nbytes
                await into()
                return 0

        header = shard_pb2.InitializeUnitHeader(
            context=one.context(epoch=epoch), unit=PLAIN.unit, start_bytes=one.start, stop_bytes=one.stop
        )
        return client_streams.receive(server.store, one.shard, header, cast("Any", Stream()), 10.0)

    async def race() -> None:
        late, is_complete = [], asyncio.Event()

        async def begin_late() -> None:
            late.append(asyncio.ensure_future(receive(3, is_complete.wait)))
            for _ in range(10):
                await asyncio.sleep(0)

        await receive(4, begin_late)
        is_complete.set()
        with pytest.raises(StaleEpochError, match="epoch 3 is over"):
            await late[0]

    server.evaluate_async(race)
    one.publish(epoch=4)
    assert set(one.flat(one.gather(0)[1]).tolist()) <= {0, 4}


def test_only_the_newest_unfinished_upload_uses_memory(server: ShardServer) -> None:
    one = OneUnit(server, PLAIN)
    one.reserve()
    messages = one.initialize_messages(one.filled(1.0))
    open_streams = [one.open_initialize().send(*messages[:-1]) for _ in range(20)]
    server.until(lambda: sum(stream.future.done() for stream in open_streams) == 19, "all uploads but one have ended")
    assert server.taken_bytes() == one.size
    for stream in open_streams:
        stream.send(messages[-1]).finish()
    ended = [stream.error() for stream in open_streams if stream.future.exception() is not None]
    assert len(ended) == 19
    assert all(isinstance(error, StaleEpochError) and "a newer stream replaced" in str(error) for error in ended)
    server.until(lambda: server.store.memory.used_bytes == one.size, "the upload's memory is released")
    one.publish()


def test_upload_that_ends_after_publication_is_ignored(server: ShardServer) -> None:
    one = OneUnit(server, PLAIN)
    one.reserve()
    one.initialize(one.filled(1.0))
    messages = one.initialize_messages(one.filled(2.0))
    half = one.open_initialize().send(*messages[:-1])
    server.until(lambda: len(one.shard.streams) == 1, "the upload has started")
    one.publish()
    assert half.send(messages[-1]).finish().result().version == 0
    assert_all(one.gather(0)[1], 1.0)
    assert (server.taken_bytes(), server.unreserved_bytes()) == (one.size, 0)
