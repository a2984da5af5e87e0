"""Pushes to a shard server over gRPC: parts, duplicates, streams and their memory."""

from __future__ import annotations

import struct
from functools import partial

import grpc
import pytest
import torch

from shardwell_server.shard.memory.budget import shard_need_bytes
from shardwell_server.shard.requests import client_streams
from shardwell_wire.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    NonFiniteError,
    StaleEpochError,
    StepStateError,
    VersionGoneError,
)
from shardwell_wire.v1 import common_pb2, shard_pb2
from shardwell_wire.v1.common_pb2 import WIRE_DTYPE_LOW_RANK_1, WIRE_DTYPE_TOP_K_1_PERCENT
from tests.support.shard_server import (
    PLAIN,
    OneUnit,
    ShardServer,
    assert_all,
    error_of,
    layout_of,
    train,
    unit,
)


def test_duplicate_pushes_are_acknowledged_and_differing_ones_counted(server: ShardServer) -> None:
    one = unit(server)
    assert one.push(one.filled(1.0)).duplicate is False
    assert one.push(one.filled(1.0)).duplicate is True
    assert one.push(one.filled(2.0)).duplicate is True
    one.prepare(0)
    assert one.push(one.filled(1.0)).duplicate is True
    step = server.call("DescribeStep", shard_pb2.DescribeStepRequest(run="r"))
    assert (step.duplicate_count, step.differing_duplicate_count, step.prepared) == (3, 1, True)
    one.update(0)
    assert_all(one.gather(1)[1], -1.0)


def test_parts_are_added_in_order_in_one_buffer(server: ShardServer) -> None:
    one = unit(server)
    before = server.taken_bytes()
    assert isinstance(error_of(lambda: one.push(one.filled(1.0), part=1)), StepStateError)
    one.push([one.filled(1.0)[0], None])
    assert isinstance(error_of(lambda: one.push(one.filled(1.0), part=2)), StepStateError)
    one.push([None, one.filled(2.0)[1]], part=1)
    one.push(one.filled(4.0), part=2)
    one.push([None, None], part=3)
    assert (server.taken_bytes() - before, server.unreserved_bytes()) == (one.size, 0)
    one.prepare(0, (0, 0, 4))
    one.update(0)
    a, b = one.gather(1)[1]
    assert (set(a.tolist()), set(b.tolist())) == ({-5.0}, {-6.0})
    assert server.taken_bytes() == before


def test_malformed_top_k_push_is_rejected_and_leaves_no_trace(server: ShardServer) -> None:
    one = unit(server, layout_of(a=((150,), "float32")))
    taken = server.taken_bytes()

    def push(*indices: int) -> None:
        data = struct.pack("<4H", *indices, 0x3F80, 0x4000)  # the values 1 and 2
        one.push([torch.tensor(list(data), dtype=torch.uint8)], wire_dtype=WIRE_DTYPE_TOP_K_1_PERCENT)

    for indices in ([7, 7], [9, 7], [7, 150]):
        error = error_of(partial(push, *indices))
        assert isinstance(error, InvalidRequestError)
        assert f"rank 0, attempt 0, part 0: a block of 150 values keeps the indices {indices}" in str(error)
    too_long = error_of(lambda: one.push(one.filled(1.0), wire_dtype=WIRE_DTYPE_TOP_K_1_PERCENT))
    assert isinstance(too_long, InvalidRequestError)
    assert server.taken_bytes() == taken
    push(7, 149)
    one.prepare(0)
    one.update(0)
    expected = torch.zeros(150)
    expected[7], expected[149] = -1.0, -2.0
    assert torch.equal(one.gather(1)[1][0], expected)


def test_factors_of_a_matrix_are_multiplied_by_the_server(server: ShardServer) -> None:
    one = unit(server, layout_of(matrix=((50, 30), "float32"), bias=((50,), "float32")))
    taken = server.taken_bytes()

    def push(right: torch.Tensor, left: torch.Tensor, bias: torch.Tensor, part: int) -> None:
        factors = torch.cat([right, left]).to(torch.bfloat16)
        one.push([factors, bias], part=part, wire_dtype=WIRE_DTYPE_LOW_RANK_1)

    right, left, bias = torch.arange(30.0), torch.arange(50.0), torch.full((50,), 0.1)
    too_short = error_of(lambda: push(right[:-1], left, bias, 0))
    assert isinstance(too_short, InvalidRequestError)
    assert server.taken_bytes() == taken
    push(right, left, bias, 0)
    push(right, torch.ones(50), bias, 1)  # another part, whose factors have another product
    one.prepare(0, (0, 0, 2))
    one.update(0)
    matrix, own_bias = one.gather(1)[1]
    assert torch.equal(matrix.view(50, 30), -torch.outer(left + 1, right))
    assert torch.equal(own_bias, -2 * bias)


def test_non_finite_factor_is_rejected_by_parameter_name(server: ShardServer) -> None:
    one = unit(server, layout_of(matrix=((50, 30), "float32")))
    factors = torch.ones(80, dtype=torch.bfloat16)
    factors[3] = float("nan")
    one.push([factors], wire_dtype=WIRE_DTYPE_LOW_RANK_1)
    error = error_of(lambda: one.prepare(0))
    assert isinstance(error, NonFiniteError)
    assert error.data["parameter"] == "u.matrix"


@pytest.mark.parametrize("wire_dtype", [WIRE_DTYPE_TOP_K_1_PERCENT, WIRE_DTYPE_LOW_RANK_1])
def test_weights_cannot_be_gathered_in_a_dtype_of_gradients(
    server: ShardServer, wire_dtype: common_pb2.WireDtype.ValueType
) -> None:
    one = unit(server)
    stub, request = server.client.byte_response_stub("Gather"), one.gather_request(wire_dtype=wire_dtype)
    error = error_of(lambda: list(stub(request, timeout=20.0)))
    assert isinstance(error, InvalidRequestError)
    assert "is for gradients" in str(error)


def test_push_for_next_step_waits_for_an_update_that_is_prepared(server: ShardServer) -> None:
    one = unit(server)
    one.push(one.filled(1.0))
    one.prepare(0, (0, 0, 1))
    early = one.open_push().send(*one.push_messages(one.filled(2.0), step=1)).finish()
    with pytest.raises(grpc.FutureTimeoutError):
        early.future.result(timeout=0.3)
    one.update(0)
    assert not early.result().duplicate
    one.prepare(1, (0, 0, 1))
    one.update(1)


def test_pushes_for_other_steps_and_after_prepare_are_rejected(server: ShardServer) -> None:
    one = OneUnit(server, PLAIN)
    one.reserve()
    assert isinstance(error_of(lambda: one.push(one.filled(1.0))), StepStateError)
    one.initialize(one.zeros())
    one.publish()
    assert isinstance(error_of(lambda: one.push(one.filled(1.0), step=1)), StepStateError)
    half = one.open_push().send(*(messages := one.push_messages(one.filled(1.0)))[:-1])
    server.until(lambda: len(one.shard.streams) == 1, "the push has started")
    one.prepare(0, (0, 0, 0))
    assert isinstance(error_of(lambda: one.push(one.filled(1.0))), StepStateError)
    assert isinstance(half.send(messages[-1]).finish().error(), StepStateError), "a push that ends after prepare"
    one.update(0)
    assert isinstance(error_of(lambda: one.push(one.filled(1.0))), VersionGoneError)
    assert_all(one.gather(1)[1], 0.0)
    assert server.taken_bytes() == one.size


def test_newer_stream_of_a_rank_replaces_the_older(server: ShardServer) -> None:
    one = unit(server, dp=2)
    before = server.taken_bytes()
    messages = one.push_messages(one.filled(1.0))
    older = one.open_push().send(*messages[:-1])
    server.until(lambda: len(one.shard.streams) == 1, "the older stream has started")
    newer = one.open_push().send(*messages[:-1])
    assert isinstance(older.error(), StaleEpochError)
    stale = one.open_push().send(*one.push_messages(one.filled(1.0), epoch=0)[:-1])
    server.until(lambda: len(one.shard.streams) == 2, "a stream of another lease does not end it")
    stale.cancel()
    server.until(lambda: len(one.shard.streams) == 1, "the rejected stream has ended")
    one.push(one.filled(5.0), rank=1)
    assert newer.send(messages[-1]).finish().result().duplicate is False
    pool = server.store.memory.pool
    server.until(lambda: pool.taken_bytes == before + 3 * one.size, "two contributions and their mean are stored")


def test_fence_ends_stale_streams(server: ShardServer) -> None:
    one = unit(server)
    half = one.open_push().send(*one.push_messages(one.filled(1.0))[:-1])
    server.until(lambda: len(one.shard.streams) == 1, "the push has started")
    one.fence(0, (0, 2, 0))
    assert isinstance(half.error(), StaleEpochError)
    assert server.taken_bytes() == one.size


@pytest.mark.parametrize("part", [0, 1])
def test_disconnected_push_releases_its_memory(server: ShardServer, part: int) -> None:
    one = unit(server)
    for number in range(part):
        one.push(one.filled(1.0), part=number)
    before = server.taken_bytes()
    half = one.open_push().send(*one.push_messages(one.filled(1.0), part=part)[:-1])
    server.until(lambda: server.store.memory.pool.taken_bytes > before, "the stream is being received")
    assert server.unreserved_bytes() == part * one.size
    half.cancel()
    server.until(lambda: server.store.memory.pool.taken_bytes == before, "the memory is released")
    assert server.unreserved_bytes() == 0
    assert one.push(one.filled(1.0), part=part).duplicate is False


def test_idle_stream_is_cancelled(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    one = unit(server)
    monkeypatch.setattr(client_streams, "IDLE_LIMIT_S", 0.05)
    half = one.open_push().send(*one.push_messages(one.filled(1.0))[:-1])
    error = half.error()
    assert isinstance(error, DeadlineError)
    assert "bytes of the stream moved in 0.05 s, expected at least 1048576" in str(error)
    assert (server.taken_bytes(), one.push(one.filled(1.0)).duplicate) == (one.size, False)


def test_streams_wait_for_memory_in_order_and_time_out() -> None:
    layouts = [layout_of(name, a=((60_000,), "float32")) for name in "abc"]
    size = layouts[0].size_bytes
    # A unit reserves four times its size: values, two moments, a contribution. One buffer is left for all streams.
    with ShardServer(budget_bytes=size * 13) as server:
        ones = [OneUnit(server, layout, index=index) for index, layout in enumerate(layouts)]
        for one in ones:
            one.begin()
            one.push(one.filled(1.0))
        messages = [one.push_messages(one.filled(1.0), part=1) for one in ones]
        first = ones[0].open_push().send(*messages[0][:-1])
        server.until(lambda: server.store.memory.unreserved.used_bytes == size, "the first stream has the memory")
        error = error_of(lambda: ones[1].open_push(timeout_s=0.5).send(*messages[1]).finish().result())
        assert isinstance(error, CapacityError | DeadlineError)
        second = ones[1].open_push().send(*messages[1]).finish()
        server.until(lambda: len(ones[1].shard.streams) == 1, "the second stream waits")
        vanishing = ones[2].open_push().send(*messages[2])
        server.until(lambda: len(ones[2].shard.streams) == 1, "the third stream waits")
        vanishing.cancel()
        assert server.taken_bytes() == 7 * size
        first.send(messages[0][-1]).finish()
        assert [stream.result().duplicate for stream in (first, second)] == [False, False]
        server.until(lambda: server.store.memory.unreserved.used_bytes == 0, "all memory is released")
        assert server.taken_bytes() == 6 * size
        assert (
            server.evaluate(lambda: server.store.memory.used_bytes + server.store.memory.pool.idle_bytes) <= size * 13
        )


def test_encoded_part_needs_no_extra_memory() -> None:
    size = PLAIN.size_bytes
    with ShardServer(budget_bytes=shard_need_bytes(size, 1) + size) as server:
        one = unit(server)
        for part in range(2):
            halves = [gradient.bfloat16() for gradient in one.filled(1.0)]
            messages = one.push_messages(halves, part=part, wire_dtype=common_pb2.WIRE_DTYPE_BFLOAT16)
            assert not one.open_push(timeout_s=60.0).send(*messages).finish().result().duplicate
        one.prepare(0, (0, 0, 2))
        one.update(0)
        assert_all(one.gather(1)[1], -2.0)
        assert server.unreserved_bytes() == 0


def test_slow_push_under_an_unleased_epoch_does_not_block_the_leaseholder(server: ShardServer) -> None:
    one = unit(server)
    slow = one.open_push().send(*one.push_messages(one.filled(9.0), epoch=1 << 40)[:-1])
    server.until(lambda: len(one.shard.streams) == 1, "the push is being received")
    for step in range(2):
        train(one, step)
    assert_all(one.gather()[1], -2.0)
    assert not slow.future.done()
    one.fence(2, (0, (1 << 40) + 1, 0))
    assert isinstance(slow.error(), StaleEpochError)
