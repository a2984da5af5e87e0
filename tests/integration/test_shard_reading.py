"""Reads from a shard server over gRPC: versions, deleted runs, odd units, inspection."""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial
from typing import Any

import grpc
import pytest
import torch

from shardwell.transport.base import into
from shardwell.transport.grpc_transport import GrpcTransport, ShardClient
from shardwell_server.shard.arithmetic.shard_optimizer import ShardOptimizer
from shardwell_server.shard.memory import buffer_reuse
from shardwell_server.shard.memory import buffer_reuse as sending_module
from shardwell_server.shard.requests import inspection
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    StepStateError,
    VersionGoneError,
)
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import shard_pb2
from tests.support.shard_server import (
    BIG,
    MIXED,
    PLAIN,
    OneUnit,
    ShardServer,
    assert_all,
    error_of,
    in_background,
    layout_of,
    train,
    unit,
)

# Reading.


@pytest.mark.parametrize("length", [20_000, 2_000_000])
def test_overlong_name_is_rejected_with_a_short_error(server: ShardServer, length: int) -> None:
    one = unit(server)
    request = shard_pb2.DescribeStepRequest(run="r" * length)
    error = error_of(lambda: server.call("DescribeStep", request))
    assert isinstance(error, InvalidRequestError)
    assert f"({length} characters): expected 1 to 200 printable characters" in str(error)
    assert len(str(error)) < 400
    assert one.gather()[0] == 0


def test_timeout_names_the_version_waited_for(server: ShardServer) -> None:
    one = OneUnit(server, PLAIN)
    one.reserve()
    error = error_of(lambda: one.gather(timeout_s=0.3))
    assert isinstance(error, DeadlineError)
    assert "any version of unit 'u' of run 'r'; none exists yet" in str(error)
    one.initialize(one.zeros())
    one.publish()
    error = error_of(lambda: one.gather(3, timeout_s=0.3))
    assert isinstance(error, DeadlineError)
    assert "version 3 of unit 'u' of run 'r'; the newest is 0" in str(error)
    gone = one.open_gather(1)
    server.until(lambda: len(one.shard.values._waiting) == 1, "a reader waits")
    gone.cancel()
    server.until(lambda: len(one.shard.values._waiting) == 0, "no reader waits")
    train(one, 0)
    assert isinstance(error_of(lambda: one.gather(0)), VersionGoneError)


def test_slow_reader_gets_one_version_during_updates(server: ShardServer) -> None:
    one = unit(server, BIG)
    reading = iter(one.open_gather())
    first = next(reading)
    train(one, 0)
    assert server.taken_bytes() == 2 * one.size
    assert server.unreserved_bytes() == one.size
    receiver, flat = StreamOf(one), torch.empty(one.size, dtype=torch.uint8)
    assert receiver.take([first, *reading], flat) == 0
    assert_all(one.split(flat), 0.0)
    server.until(lambda: server.store.memory.pool.taken_bytes == one.size, "the old version is released")
    assert (server.unreserved_bytes(), one.gather()[0]) == (0, 1)


class StreamOf:
    def __init__(self, one: OneUnit) -> None:
        self.size = one.size

    def take(self, messages: list[bytes], flat: torch.Tensor) -> int:
        """Receives a whole Gather; returns the version its header names."""
        receiver = chunk_streams.StreamReceiver([chunk_streams.memory_at(flat.data_ptr(), self.size, flat)], "a gather")
        version = -1
        for data in messages:
            message, chunk = chunk_streams.decode_message(data, shard_pb2.GatherResponse)
            version = message.header.version if message.HasField("header") else version
            receiver.feed(chunk)
        receiver.require_complete()
        return version


def test_stalled_reader_uses_one_snapshot_at_most(server: ShardServer) -> None:
    one = unit(server, BIG)
    readers = []
    for step in range(3):
        reader = iter(one.open_gather())
        next(reader)
        readers.append(reader)
        train(one, step)
        assert server.taken_bytes() <= 2 * one.size
    for reader in readers[:2]:
        assert isinstance(error_of(partial(list, reader)), VersionGoneError)
    list(readers[2])
    server.until(lambda: server.store.memory.pool.taken_bytes == one.size, "the old versions are released")


def test_updates_and_pushes_evict_snapshots() -> None:
    # The unit reserves four times its size. One buffer is left for a snapshot or a push.
    with ShardServer(budget_bytes=BIG.size_bytes * 5) as server:
        one = unit(server, BIG)
        one.push(one.filled(1.0))
        reader = iter(one.open_gather())
        next(reader)
        half = one.open_push().send(*one.push_messages(one.filled(1.0), part=1)[:-1])
        server.until(lambda: server.store.memory.unreserved.used_bytes == one.size, "the push has the memory")
        one.prepare(0)
        one.update(0)
        assert isinstance(error_of(lambda: list(reader)), VersionGoneError)
        half.cancel()
        server.until(lambda: server.store.memory.unreserved.used_bytes == 0, "the memory is released")
        reader = iter(one.open_gather())
        next(reader)
        train(one, 1)
        assert server.unreserved_bytes() == one.size
        one.push(one.filled(1.0), step=2)
        one.push(one.filled(1.0), step=2, part=1)
        assert isinstance(error_of(lambda: list(reader)), VersionGoneError)
        assert (server.unreserved_bytes(), server.taken_bytes()) == (0, 2 * one.size)


def test_readers_are_revoked_if_a_snapshot_cannot_be_allocated(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> torch.Tensor:
        raise CapacityError("no memory")

    one = unit(server, BIG)
    reader = iter(one.open_gather())
    next(reader)
    one.push(one.filled(1.0))
    one.prepare(0)
    monkeypatch.setattr(buffer_reuse, "_allocate", fail)
    one.update(0)
    assert isinstance(error_of(lambda: list(reader)), VersionGoneError)
    assert_all(one.gather(1)[1], -1.0)
    assert server.unreserved_bytes() == 0


def test_gather_never_mixes_versions(server: ShardServer) -> None:
    one = unit(server, layout_of(a=((1 << 18,), "float32")))
    stop = threading.Event()

    def read() -> int:
        count = 0
        while not stop.is_set():
            version, values = one.gather()
            assert_all(values, -float(version))
            count += 1
        return count

    readers = [in_background(read) for _ in range(2)]
    for step in range(25):
        train(one, step)
    stop.set()
    assert all(next(reader) > 0 for reader in readers)
    server.until(lambda: server.store.memory.pool.taken_bytes == one.size, "every snapshot is released")
    assert server.unreserved_bytes() == 0


def test_disconnected_reader_releases_its_version(server: ShardServer) -> None:
    one = unit(server, BIG)
    reading = one.open_gather()
    next(iter(reading))
    reading.cancel()
    server.until(
        lambda: one.shard.values.current is not None and one.shard.values.current.readers == 0,
        "the version is released",
    )
    train(one, 0)
    assert server.taken_bytes() == one.size


# The end of a run.


def test_deleting_a_run_ends_its_streams_and_waits(server: ShardServer) -> None:
    one = unit(server, BIG)
    two = OneUnit(server, layout_of("v", a=((60_000,), "float32")), index=1)
    two.reserve()
    waiting = in_background(lambda: one.gather(1))
    server.until(lambda: len(one.shard.values._waiting) == 1, "a reader waits")
    reading = iter(one.open_gather())
    next(reading)
    pushing = one.open_push().send(*one.push_messages(one.filled(1.0))[:-1])
    uploading = two.open_initialize().send(*two.initialize_messages(two.filled(1.0))[:-1])
    server.until(lambda: len(one.shard.streams) == len(two.shard.streams) == 1, "both streams have started")
    one.drop()
    for outcome in (lambda: next(waiting), lambda: list(reading), pushing.result, uploading.result):
        error = error_of(outcome)
        assert isinstance(error, NotFoundError)
        assert "run 'r' was deleted" in str(error)
    server.until(lambda: server.store.memory.used_bytes == 0, "all memory is released")
    assert server.unreserved_bytes() == 0
    assert (server.evaluate(lambda: server.store.memory.reserved_bytes), list(server.store.runs)) == (0, [])
    unit(server, PLAIN, run_id="the-next")


def test_work_queued_behind_a_deletion_reports_the_deletion(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = unit(server)
    one.push(one.filled(1.0))
    one.prepare(0)
    started, resume, step = threading.Event(), threading.Event(), ShardOptimizer.step

    def slowly(self: ShardOptimizer, *arguments: Any) -> None:
        started.set()
        assert resume.wait(20)
        step(self, *arguments)

    monkeypatch.setattr(ShardOptimizer, "step", slowly)
    updating = in_background(lambda: one.update(0))
    assert started.wait(20)
    # The deletion and the next step wait for the run's lock, in this order.
    dropping = in_background(one.drop)
    server.until(lambda: len(server.store.run("r")._lock._waiters or ()) == 1, "the deletion waits")
    preparing = in_background(lambda: one.prepare(1, (0, 0, 0)))
    server.until(lambda: len(server.store.run("r")._lock._waiters or ()) == 2, "the next step waits")
    resume.set()
    assert (next(updating).version, next(dropping).freed_bytes > 0) == (1, True)
    assert isinstance(error_of(lambda: next(preparing)), NotFoundError)
    assert server.evaluate(lambda: server.store.memory.used_bytes) == 0


# Shapes and dtypes.


@pytest.mark.parametrize("algorithm", ["sgd", "adamw"])
@pytest.mark.parametrize("dp", [1, 3])
def test_parameters_of_mixed_dtypes_and_odd_sizes_train(server: ShardServer, algorithm: str, dp: int) -> None:
    one = unit(server, MIXED, dp=dp)
    for step in range(3):
        train(one, step, algorithm=algorithm)
    version, values = one.gather(3)
    assert version == 3
    for value in values:
        expected = -3.0 if algorithm == "sgd" else -0.3
        assert torch.allclose(value.double(), torch.full_like(value, expected).double(), atol=0.02)
    assert server.taken_bytes() == one.size


@pytest.mark.parametrize("layout", [layout_of("none"), layout_of("empty", a=((0, 3), "float32"))])
def test_empty_unit_passes_every_phase(server: ShardServer, layout: UnitLayout) -> None:
    one = unit(server, layout, dp=2)
    train(one, 0)
    train(one, 1, algorithm="sgd")
    assert one.gather(2) == (2, [])


@pytest.mark.parametrize("part", [(0, 0), (4096, 4096), (8192, 16384)])
def test_empty_and_inner_shards_pass_every_phase(server: ShardServer, part: tuple[int, int]) -> None:
    one = unit(server, PLAIN, part=part, dp=2)
    train(one, 0, algorithm="adamw")
    train(one, 1, algorithm="adamw")
    version, values = one.gather(2)
    assert (version, sum(len(value) for value in values)) == (2, (part[1] - part[0]) // 4)
    assert all(len(set(value.tolist())) == 1 for value in values)


def test_parameter_without_gradient_keeps_its_value_and_state(server: ShardServer) -> None:
    one = unit(server, dp=2)
    one.push([one.filled(1.0)[0], None])
    one.push([None, None], rank=1)
    one.prepare(0)
    one.update(0)
    after_a, after_b = one.gather(1)[1]
    assert (set(after_a.tolist()), set(after_b.tolist())) == ({-0.5}, {0.0})
    shard = server.call("DescribeShard", shard_pb2.DescribeShardRequest(run="r", unit="u"))
    assert [piece.optimizer_step for piece in shard.parameters] == [1, 0]


# Inspection.


def test_descriptions_report_runs_shards_and_step(server: ShardServer) -> None:
    one = unit(server, MIXED, dp=2)
    one.push(one.filled(1.0), rank=1)
    described = server.call("DescribeServer", shard_pb2.DescribeServerRequest())
    assert (described.server_id, described.budget_bytes) == ("here", 1 << 30)
    assert (described.used_bytes, described.reserved_bytes) == (2 * one.size, 7 * one.size)
    [run] = described.runs
    assert (run.run, run.shard_count, run.parameter_bytes, run.version) == ("r", 1, one.size, 0)
    [summary] = server.call("ListShards", shard_pb2.ListShardsRequest(run="r")).shards
    assert (summary.unit, summary.version, summary.stop_bytes, summary.unit_bytes) == ("u", 0, one.size, one.size)
    assert (summary.contribution_bytes, len(summary.dtypes)) == (one.size, 4)
    shard = server.call("DescribeShard", shard_pb2.DescribeShardRequest(run="r", unit="u"))
    assert [(piece.name, piece.stop_element) for piece in shard.parameters] == [
        ("u.a", 1031),
        ("u.b", 21),
        ("u.c", 1),
        ("u.e", 997),
    ]
    step = server.call("DescribeStep", shard_pb2.DescribeStepRequest(run="r"))
    [contributions] = step.shards
    assert (step.step, step.prepared) == (0, False)
    assert (contributions.present_dp_ranks, contributions.missing_dp_ranks) == ([1], [0])
    one.push(one.filled(1.0))
    one.prepare(0)
    one.update(0, algorithm="adamw")
    [summary] = server.call("ListShards", shard_pb2.ListShardsRequest(run="r")).shards
    assert (summary.version, summary.contribution_bytes) == (1, 0)
    assert summary.optimizer_bytes == server.evaluate(lambda: server.store.memory.used_bytes) - one.size > 0


def test_peek_returns_values_gradients_and_state(server: ShardServer) -> None:
    one = OneUnit(server, PLAIN)
    one.reserve()

    def peek(**fields: Any) -> Any:
        return server.call("Peek", shard_pb2.PeekRequest(run="r", parameter="u.b", **fields))

    assert isinstance(error_of(peek), StepStateError)
    values = one.zeros()
    values[1][:4] = torch.tensor([1.0, -2.0, 3.0, -4.0])
    one.initialize(values)
    one.publish()
    seen = peek(start=1, count=2)
    assert (list(seen.values), seen.version, seen.start_element, seen.stop_element) == ([-2.0, 3.0], 0, 0, 20_000)
    assert (seen.min, seen.max, seen.norm, seen.non_finite_count) == (-4.0, 3.0, 30.0**0.5, 0)
    assert len(peek().values) == 8
    assert len(peek(start=19_998).values) == 2
    gradient, state = shard_pb2.PEEK_SOURCE_GRADIENT, shard_pb2.PEEK_SOURCE_OPTIMIZER_STATE
    for wrong in ({"start": 20_000}, {"count": 1025}, {"source": 9}):
        assert isinstance(error_of(partial(peek, **wrong)), InvalidRequestError)
    assert isinstance(error_of(lambda: peek(source=gradient)), StepStateError)
    one.push(one.filled(2.0))
    one.prepare(0)
    assert list(peek(source=gradient, count=1).values) == [2.0]
    assert isinstance(error_of(lambda: peek(source=state, state_name="exp_avg")), NotFoundError)
    one.update(0, algorithm="adamw")
    assert peek(source=state, state_name="exp_avg", count=1).values[0] == pytest.approx(0.2)
    assert "it has exp_avg, exp_avg_sq" in str(error_of(lambda: peek(source=state, state_name="momentum")))
    assert isinstance(error_of(lambda: peek(source=gradient)), StepStateError)
    assert (peek().version, server.taken_bytes()) == (1, one.size)


# Stalled readers.


def test_unread_messages_stay_within_limits_and_other_readers_are_served(server: ShardServer) -> None:
    one, sending = unit(server, BIG), server.store.memory.sending
    stalled = [one.open_gather() for _ in range(200)]
    server.until(lambda: len(sending._waiting) > 100, "the streams wait for memory")
    assert server.evaluate(lambda: sending.used_bytes) == sending.peer_limit_bytes, "one connection gets a quarter"
    with closing(ShardClient(server.client.address)) as other:
        flat = torch.empty(one.size, dtype=torch.uint8)
        target = chunk_streams.memory_at(flat.data_ptr(), one.size, flat)
        assert GrpcTransport(other).fetch_stream(one.gather_request(), into(target), timeout_s=20) == 0
    for call in stalled:
        call.cancel()
    server.until(lambda: sending.used_bytes == 0 and not sending._waiting, "all memory is released")


def test_connection_of_a_stalled_reader_is_closed(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending_module, "STALL_LIMIT_S", 0.2)
    monkeypatch.setattr(sending_module, "_SWEEP_S", 0.05)
    one = unit(server, BIG)
    with closing(ShardClient(server.client.address)) as client:
        stub = client.byte_response_stub("Gather")
        stalled = [stub(one.gather_request(), timeout=60.0) for _ in range(3)]
        assert {call.code() for call in stalled} == {grpc.StatusCode.UNAVAILABLE}
    server.until(lambda: server.store.memory.sending.used_bytes == 0, "all memory is released")
    assert_all(one.gather(0)[1], 0.0)


def test_peek_of_a_large_tensor_reads_chunks_while_the_run_continues(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_PEEKED_ELEMENTS", 1000)
    one = unit(server, layout_of(a=((2500,), "float32")))
    values = torch.randn(2500)
    values[17], values[2400] = 7.0, -9.0
    one.push([-values])
    one.prepare(0)
    one.update(0)
    sizes: list[int] = []
    add, went_on = inspection._Statistics.add, threading.Event()

    def noted(self: Any, part: torch.Tensor) -> None:
        sizes.append(part.numel())
        add(self, part)
        if len(sizes) == 2:
            assert went_on.wait(20)

    monkeypatch.setattr(inspection._Statistics, "add", noted)
    asked = shard_pb2.PeekRequest(run="r", parameter="u.a", start=16, count=2)
    peeking = in_background(lambda: server.call("Peek", asked))
    server.until(lambda: len(sizes) == 2, "the second chunk")
    before = one.gather(1)[1][0]
    # The push runs before the next chunk. If the values have changed, Peek restarts.
    train_thread = in_background(lambda: train(one, 1))
    server.until(lambda: bool(server.store.runs[one.identity.run_id]._lock._waiters), "the push waits")
    went_on.set()
    next(train_thread)
    peek = next(peeking)
    assert max(sizes) == 1000
    now = before if peek.version == 1 else one.gather(2)[1][0]
    assert list(peek.values) == now[16:18].double().tolist()
    assert (peek.min, peek.max, peek.non_finite_count) == (now.min().item(), now.max().item(), 0)
    assert peek.norm == pytest.approx(now.double().norm().item(), rel=1e-12)
