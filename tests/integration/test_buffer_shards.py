"""Units of buffers on a shard server over gRPC."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shardwell_server.shard.memory.budget import shard_need_bytes
from shardwell_wire.errors import (
    CapacityError,
    IncompleteStepError,
    InvalidRequestError,
    StaleEpochError,
    StepStateError,
    VersionGoneError,
)
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.v1 import initialization_pb2, shard_pb2
from tests.support.shard_server import OneUnit, ShardServer, error_of, layout_of
from tests.support.shm_transport import ConnectedUnit

NAN = float("nan")

LAYOUT = UnitLayout(
    "buffers:0",
    (
        Parameter("mean", (3,), "float32"),
        Parameter("count", (), "int64"),
        Parameter("flags", (2,), "bool"),
        Parameter("empty", (0,), "float32"),
        Parameter("wave", (2,), "complex64"),
    ),
    kind="buffers",
)
FIRST = [
    torch.tensor([1.0, NAN, -0.0]),
    torch.tensor([0]),
    torch.tensor([True, False]),
    torch.ones(2).to(torch.complex64),
]
"""By segment. The empty buffer has none."""
MEAN, COUNT = torch.tensor([2.0, NAN, float("inf")]), torch.tensor([7])


@pytest.fixture
def buffers(server: ShardServer) -> OneUnit:
    """A unit of buffers in a run with two data ranks."""
    return OneUnit(server, LAYOUT, dp=2).begin(FIRST)


def values(one: OneUnit, version: int) -> list[bytes]:
    got, found = one.gather(version)
    assert got == version
    return [value.view(torch.uint8).numpy().tobytes() for value in found]


def raw(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]


def rank_0(attempt: int = 0, parts: int = 1) -> list[tuple[int, int, int]]:
    return [(0, attempt, parts), (1, 0, 0)]


def test_update_stores_pushed_buffers_and_keeps_the_others(buffers: OneUnit) -> None:
    assert values(buffers, 0) == raw(FIRST)
    buffers.push([MEAN, COUNT, None, None])
    answer = buffers.prepare(0, *rank_0())
    assert [(unit.unit_index, list(unit.buffer_indices)) for unit in answer.buffers] == [(0, [0, 1])]
    assert not any(norm.square_partials for norm in answer.units), "buffers have no norm"
    assert values(buffers, 0) == raw(FIRST), "nothing changes before the commit"
    buffers.update(0)
    expected = raw([MEAN, COUNT, *FIRST[2:]])
    assert values(buffers, 1) == expected
    answer = buffers.prepare(1, *rank_0(parts=0))
    assert not answer.buffers
    buffers.update(1)
    assert values(buffers, 2) == expected


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("in_batch", [False, True])
def test_a_trainer_may_write_its_shared_memory_again_before_the_update(server: ShardServer, in_batch: bool) -> None:
    one = OneUnit(server, LAYOUT, dp=2).begin(FIRST)
    taken = server.taken_bytes()
    with ConnectedUnit(one) as connected:
        push = connected.prepare([MEAN, COUNT, *FIRST[2:]])
        if in_batch:
            request = shard_pb2.ReduceBatchRequest(run=one.identity.name, run_id=one.identity.run_id)
            part = connected.transport.add_to_batch(push, request)
            assert part is not None
            part.header.CopyFrom(connected.header())
            (result,) = server.call("ReduceBatch", request).results
            assert not result.status
            connected.transport.finish_batched(push, result)
        else:
            connected.transport.push(push, timeout_s=20.0)
        one.prepare(0, *rank_0())
        connected.prepare(FIRST, step=1)  # in the same memory: the trainer has seen the commit
        assert len(connected.gradient_buffers()) == 1
        one.update(0)
        assert values(one, 1) == raw([MEAN, COUNT, *FIRST[2:]])
    assert server.taken_bytes() == taken


def test_skipped_step_stores_buffers(buffers: OneUnit) -> None:
    buffers.push([MEAN, None, None, None])
    buffers.prepare(0, *rank_0(), skip=True)
    buffers.update(0)
    assert values(buffers, 1) == raw([MEAN, *FIRST[1:]])


def test_new_attempt_replaces_buffers_of_the_former(buffers: OneUnit) -> None:
    buffers.push([MEAN, COUNT, None, None])
    buffers.prepare(0, *rank_0())
    buffers.fence(0, (0, 1, 1))
    assert isinstance(error_of(lambda: buffers.prepare(0, *rank_0(1))), IncompleteStepError)
    assert isinstance(error_of(lambda: buffers.push([MEAN, None, None, None])), StaleEpochError)
    buffers.push([None, COUNT, None, None], attempt=1)
    answer = buffers.prepare(0, *rank_0(1))
    assert [list(unit.buffer_indices) for unit in answer.buffers] == [[1]]
    buffers.update(0)
    assert values(buffers, 1) == raw([FIRST[0], COUNT, *FIRST[2:]])


def test_push_with_stale_lease_or_other_rank_is_rejected(buffers: OneUnit) -> None:
    buffers.fence(0, (0, 5, 0))
    assert isinstance(error_of(lambda: buffers.push([MEAN, None, None, None], epoch=4)), StaleEpochError)
    error = error_of(lambda: buffers.push([MEAN, None, None, None], rank=1))
    assert isinstance(error, InvalidRequestError) and "come from data rank 0 only" in str(error)
    buffers.push([MEAN, None, None, None], epoch=5)
    assert isinstance(error_of(lambda: buffers.prepare(0, *rank_0(parts=0))), IncompleteStepError)


def test_push_of_buffers_after_prepare_is_rejected(buffers: OneUnit) -> None:
    buffers.prepare(0, *rank_0(parts=0))
    assert isinstance(error_of(lambda: buffers.push([MEAN, None, None, None])), StepStateError)
    buffers.update(0)
    assert isinstance(error_of(lambda: buffers.push([MEAN, None, None, None])), VersionGoneError)


def test_buffers_are_updated_before_parameters(server: ShardServer, buffers: OneUnit) -> None:
    weights = OneUnit(server, layout_of(w=((8,), "float32")), dp=2, index=1).begin()
    for rank in range(2):
        weights.push(weights.filled(1.0), rank=rank)
    buffers.push([MEAN, COUNT, None, None])
    request = weights.prepare_request(0)
    request.ranks[0].units.add(unit_index=0, part_count=1)
    server.call("PrepareStep", request)
    server.call("Update", weights.update_request(0))
    assert values(buffers, 1)[:2] == raw([MEAN, COUNT])
    assert buffers.shard.version == weights.shard.version == 1


def test_buffers_reserve_and_release_memory(server: ShardServer, buffers: OneUnit) -> None:
    need = shard_need_bytes(LAYOUT.size_bytes, 2, holds_buffers=True)
    assert need == 3 * LAYOUT.size_bytes
    taken = server.taken_bytes()
    for step in range(3):
        buffers.push([MEAN, COUNT, None, None], step=step)
        buffers.prepare(step, *rank_0())
        buffers.update(step)
        assert server.taken_bytes() == taken, "stored values release the memory of the push"
    assert buffers.drop().freed_bytes == need + LAYOUT.size_bytes, "with one buffer of unreserved memory"
    assert server.taken_bytes() == 0


def test_buffers_beyond_the_budget_are_rejected_at_reservation() -> None:
    with ShardServer(budget_bytes=3000) as server:
        big = UnitLayout("buffers:0", (Parameter("queue", (500,), "float32"),), kind="buffers")
        expected = r"8192 bytes on this server \(2048 of buffers, and twice as many .* of 3000"
        with pytest.raises(CapacityError, match=expected):
            OneUnit(server, big).reserve()
        assert not server.evaluate(lambda: server.store.runs)


def test_drawing_initial_buffers_is_rejected(server: ShardServer) -> None:
    one = OneUnit(server, LAYOUT)
    one.reserve()
    draw = initialization_pb2.ParameterDraw(
        parameter_index=0, distribution=initialization_pb2.Distribution(constant=1.0)
    )
    with pytest.raises(InvalidRequestError, match="values cannot be drawn"):
        one.initialize(FIRST[1:], draws=[draw])


def test_peek_returns_buffers(server: ShardServer, buffers: OneUnit) -> None:
    count = server.call("Peek", shard_pb2.PeekRequest(run="r", parameter="count"))
    assert list(count.values) == [0.0]
    flags = server.call("Peek", shard_pb2.PeekRequest(run="r", parameter="flags"))
    assert list(flags.values) == [1.0, 0.0]
    mean = server.call("Peek", shard_pb2.PeekRequest(run="r", parameter="mean"))
    assert mean.non_finite_count == 1
    with pytest.raises(InvalidRequestError, match="'wave' is complex"):
        server.call("Peek", shard_pb2.PeekRequest(run="r", parameter="wave"))
