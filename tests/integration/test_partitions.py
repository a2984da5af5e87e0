"""Tests of optimizer partitions over gRPC: read between prepare and update, staged, and applied with the commit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwell.transport.partition_transfers import PartitionLocation, PartitionSegment
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.errors import (
    CapacityError,
    ChunkError,
    IncompleteStepError,
    InvalidRequestError,
    NonFiniteError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
)
from shardwell_wire.model.layout import BLOCK_BYTES
from shardwell_wire.model.topology import TRAINER_PREFIX, part_in
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import MIXED, PLAIN, OneUnit, ShardServer, assert_all, error_of, unit


def place(one: OneUnit, rank: int) -> PartitionLocation:
    return PartitionLocation(one.layout, rank, *part_in(one.layout.size_bytes, one.dp, rank, one.start, one.stop))


def read(one: OneUnit, rank: int = 0, *, step: int = 0, epoch: int = 1) -> PartitionSegment:
    return one.server.client.read_partition(place(one, rank), one.context(step, epoch), timeout_s=20)


def stage(one: OneUnit, part: PartitionSegment, rank: int = 0, *, step: int = 0, epoch: int = 1) -> None:
    one.server.client.stage_partition(place(one, rank), one.context(step, epoch), part, timeout_s=20)


def prepared(server: ShardServer, layout: Any = PLAIN, *, gradient: float = 3.0, **options: Any) -> OneUnit:
    """Returns a unit whose first step is prepared."""
    one = unit(server, layout, **options)
    for rank in range(one.dp):
        one.push(one.filled(gradient), rank=rank)
    one.prepare(0)
    return one


def confirm(one: OneUnit, step: int = 0) -> None:
    one.server.call("ConfirmPartitions", shard_pb2.ConfirmPartitionsRequest(context=one.context(step)))


def update(one: OneUnit, step: int = 0) -> Any:
    optimizer = common_pb2.OptimizerStep(algorithm=f"{TRAINER_PREFIX}SGD")
    request = shard_pb2.UpdateRequest(context=one.context(step), optimizer=optimizer, clip_coefficient=1.0)
    return one.server.call("Update", request)


def descend(part: PartitionSegment) -> PartitionSegment:
    for index, gradient in part.gradients.items():
        part.values[index] = part.values[index] - gradient
    return part


def test_staged_values_are_applied_by_the_update(server: ShardServer) -> None:
    one = prepared(server, dp=2)
    for rank in range(2):
        part = read(one, rank)
        assert set(part.gradients) == set(part.values)
        assert not part.state
        assert_all(list(part.values.values()), 0.0)
        assert_all(list(part.gradients.values()), 3.0)
        descend(part)
        part.state = {
            index: {"step": torch.tensor(1.0), "average": 2 * value, "count": rank, "warm": True}
            for index, value in part.values.items()
        }
        stage(one, part, rank)
        assert_all(one.gather(0)[1], 0.0)
    confirm(one)
    update(one)
    assert_all(one.gather(1)[1], -3.0)
    assert server.unreserved_bytes() == 0

    for rank in range(2):
        one.push(one.filled(1.0), step=1, rank=rank)
    one.prepare(1)
    for rank in range(2):
        part = read(one, rank, step=1)
        assert {(float(at["step"]), at["count"], at["warm"]) for at in part.state.values()} == {(1.0, rank, True)}
        assert_all([at["average"] for at in part.state.values()], -6.0)


def test_partition_has_mixed_dtypes_and_parameters_without_gradient(server: ShardServer) -> None:
    one = unit(server, MIXED)
    gradients: list[torch.Tensor | None] = list(one.filled(2.0))
    gradients[1] = None
    one.push(gradients)
    one.prepare(0)
    part = read(one)
    assert 1 in part.values
    assert 1 not in part.gradients
    assert [str(value.dtype) for value in part.values.values()] == [
        f"torch.{MIXED.parameters[index].dtype}" for index in part.values
    ]
    part.state = {1: {"half": torch.ones(3, dtype=torch.float16)}, 0: {"empty": torch.empty(0, 4)}}
    stage(one, descend(part))
    update(one)
    values = one.gather(1)[1]
    assert [set(value.tolist()) for value in values] == [{-2.0}, {0.0}, {-2.0}, {-2.0}]
    one.push(one.filled(1.0), step=1)
    one.prepare(1)
    again = read(one, step=1).state
    assert torch.equal(again[1]["half"], torch.ones(3, dtype=torch.float16))
    assert again[0]["empty"].shape == (0, 4)


def test_update_with_a_missing_partition_is_rejected(server: ShardServer) -> None:
    one = prepared(server, dp=3)
    for rank in (0, 2):
        stage(one, descend(read(one, rank)), rank)
    for action in (confirm, update):
        error = error_of(lambda action=action: action(one))
        assert isinstance(error, IncompleteStepError)
        assert "the optimizer partition of data rank 1 is not staged" in str(error)
    assert_all(one.gather(0)[1], 0.0)
    stage(one, descend(read(one, 1)), 1)
    confirm(one)
    update(one)
    update(one)
    assert_all(one.gather(1)[1], -3.0)


def test_partition_can_be_read_and_staged_only_between_prepare_and_update(server: ShardServer) -> None:
    one = unit(server)
    assert isinstance(error_of(lambda: read(one)), StepStateError)
    one.push(one.filled(1.0))
    assert isinstance(error_of(lambda: read(one)), StepStateError)
    one.prepare(0)
    part = descend(read(one))
    stage(one, part)
    update(one)
    assert isinstance(error_of(lambda: stage(one, part)), StepStateError)
    assert isinstance(error_of(lambda: confirm(one)), StepStateError)
    assert_all(one.gather(1)[1], -1.0)


def test_restarted_work_item_invalidates_staged_values(server: ShardServer) -> None:
    """Values computed from the former gradient are rejected even after the step is prepared again."""
    one = prepared(server, gradient=5.0)
    part = descend(read(one))
    stage(one, part)
    one.fence(0, (0, 1, 1))
    assert server.unreserved_bytes() == 0
    one.push(one.filled(1.0), attempt=1)
    assert isinstance(error_of(lambda: stage(one, part)), StepStateError)
    one.prepare(0, (0, 1, 1))
    error = error_of(lambda: stage(one, part))
    assert isinstance(error, StepStateError)
    assert "read the partition again" in str(error)
    assert isinstance(error_of(lambda: confirm(one)), IncompleteStepError)
    stage(one, descend(read(one)))
    update(one)
    assert_all(one.gather(1)[1], -1.0)


def test_later_lease_replaces_values_and_older_lease_is_rejected(server: ShardServer) -> None:
    one = prepared(server)
    old, new = read(one), read(one)
    for index in new.values:
        old.values[index], new.values[index] = old.values[index] + 7.0, new.values[index] + 9.0
    stage(one, old, epoch=2)
    stage(one, new, epoch=3)
    assert isinstance(error_of(lambda: stage(one, old, epoch=2)), StaleEpochError)
    one.fence(0, (0, 3, 0))
    for action in (lambda: stage(one, old, epoch=2), lambda: read(one, epoch=2)):
        assert isinstance(error_of(action), StaleEpochError)
    assert server.unreserved_bytes() == one.size
    update(one)
    assert_all(one.gather(1)[1], 9.0)


def messages(one: OneUnit, data: bytes, **changes: Any) -> list[bytes]:
    at = place(one, 0)
    fields: dict[str, Any] = {
        "context": one.context(),
        "unit": one.layout.unit,
        "start_bytes": at.start_bytes,
        "stop_bytes": at.stop_bytes,
        "generation": read(one).generation,
        "parameter_indices": [segment.parameter_index for segment in at.segments],
    }
    first = shard_pb2.StagePartitionRequest(header=shard_pb2.StagePartitionHeader(**{**fields, **changes}))
    return list(chunk_streams.encode_stream(first, [data], chunk_bytes=64 << 10))


SIZE = 4 * 60_000
"""Size of the values of PLAIN, without padding."""


@pytest.mark.parametrize(
    ("size", "changes", "kind", "text"),
    [
        (SIZE + 4, {}, ChunkError, f"expected {SIZE}"),
        (SIZE - 4, {}, ChunkError, "expected a checksum on the last chunk"),
        (SIZE, {"stop_bytes": BLOCK_BYTES}, InvalidRequestError, "the partition of data rank 0 is"),
        (SIZE, {"start_bytes": BLOCK_BYTES}, InvalidRequestError, "the partition of data rank 0 is"),
        (SIZE, {"dp_rank": 1}, InvalidRequestError, "has 1 data ranks"),
        (
            SIZE,
            {"parameter_indices": [1, 0]},
            InvalidRequestError,
            "expected strictly rising indices",
        ),
        (
            SIZE,
            {"parameter_indices": [0, 2]},
            InvalidRequestError,
            "expected strictly rising indices",
        ),
        (SIZE, {"generation": 10**6}, StepStateError, "read the partition again"),
        (SIZE, {"state": [{"parameter_index": 0, "name": ""}]}, InvalidRequestError, "expected a unique name"),
        (SIZE, {"state": [{"parameter_index": 2, "name": "a"}]}, InvalidRequestError, "in the partition"),
        (SIZE, {"state": [{"parameter_index": 0, "name": "a", "dtype": 0}]}, InvalidRequestError, "unknown dtype"),
        (
            SIZE,
            {"state": [{"parameter_index": 0, "name": "a", "dtype": 1}] * 2},
            InvalidRequestError,
            "expected a unique name",
        ),
        (SIZE, {"state": [{"parameter_index": 0, "name": "a", "dtype": 1}]}, ChunkError, "the last chunk"),
        (
            SIZE,
            {"state": [{"parameter_index": 0, "name": "a", "dtype": 1, "shape": [1 << 19, 1 << 19]}]},
            CapacityError,
            "do not fit the memory budget",
        ),
        (
            SIZE,
            {"state": [{"parameter_index": 0, "name": "a", "dtype": 1, "shape": [1 << 40, 1 << 40]}]},
            InvalidRequestError,
            "expected at most 1099511627776 bytes",
        ),
        (
            SIZE,
            {"state": [{"parameter_index": 0, "name": "a", "dtype": 1, "shape": [1] * 65}]},
            InvalidRequestError,
            "'a' has 65 dimensions, expected at most 64",
        ),
    ],
)
def test_malformed_stage_request_leaves_no_trace(
    server: ShardServer, size: int, changes: dict[str, Any], kind: type[ShardwellError], text: str
) -> None:
    one = prepared(server)
    stub = server.client.byte_request_stub("StagePartition")
    error = error_of(lambda: stub(iter(messages(one, bytes(size), **changes)), timeout=20))
    assert type(error) is kind
    assert text in str(error)
    assert server.unreserved_bytes() == 0
    assert isinstance(error_of(lambda: confirm(one)), IncompleteStepError)


def test_non_finite_values_are_rejected(server: ShardServer) -> None:
    one = prepared(server)
    part = descend(read(one))
    part.values[1][17] = float("nan")
    error = error_of(lambda: stage(one, part))
    assert isinstance(error, NonFiniteError)
    assert error.data["parameter"] == "u.b"
    assert server.unreserved_bytes() == 0


def test_staged_memory_counts_against_the_budget_until_it_is_released() -> None:
    """Staged partitions need memory beyond the reservation. Their state then counts as optimizer state."""
    with ShardServer(budget_bytes=6 * PLAIN.size_bytes) as small:
        one = prepared(small)
        part = descend(read(one))
        part.state = {index: {"large": torch.zeros(8 * value.numel())} for index, value in part.values.items()}
        assert isinstance(error_of(lambda: stage(one, part)), CapacityError)
        assert small.unreserved_bytes() == 0
        part.state = {index: {"average": value.clone()} for index, value in part.values.items()}
        stage(one, part)
        assert small.unreserved_bytes() == 2 * SIZE
        update(one)
        assert small.unreserved_bytes() == 0
        assert small.evaluate(lambda: one.shard.optimizer_bytes) == SIZE
        one.drop()
        assert small.evaluate(lambda: small.store.memory.used_bytes) == 0
