"""Tests of partitions in shared staging buffers and of cached partitions: nothing stale is used, nothing is lost."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.data_plane.partition_updates import RemotePartition
from shardwell.data_plane.shard import RemoteShard, Wire
from shardwell.transport.partition_transfers import PartitionLocation, PartitionSegment, SharedPartitionSegment
from shardwell.transport.server_connection import ConnectOptions, ServerConnection
from shardwell.transport.shm_transport import ShmTransport
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.shard_spec import ShardSpec
from shardwell_server.shard.unit.partitions import Partitions, SharedStagingBuffer
from shardwell_wire.errors import (
    ConflictError,
    IncompleteStepError,
    InvalidRequestError,
    NonFiniteError,
    StaleEpochError,
    StepStateError,
)
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.model.topology import TRAINER_PREFIX, part_in
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import MIXED, PLAIN, OneUnit, ShardServer, assert_all, error_of, layout_of, unit

pytestmark = pytest.mark.usefixtures("shared")


class Trainer:
    """One trainer of a unit, with its own connection."""

    def __init__(self, one: OneUnit, transports: tuple[str, ...] = ("shm", "grpc")) -> None:
        self._one, self._partitions = one, {}
        self.server = ServerConnection(one.server.client.address, one.identity, ConnectOptions(transports, 64 << 10))
        self._shard = RemoteShard(one.identity, one.layout, self.server, one.start, one.stop, Wire())
        if (location := self._shard.locate()) is not None:
            self._shard.map(location)

    def partition(self, rank: int = 0) -> RemotePartition:
        if rank not in self._partitions:
            one = self._one
            place = PartitionLocation(
                one.layout, rank, *part_in(one.layout.size_bytes, one.dp, rank, one.start, one.stop)
            )
            self._partitions[rank] = RemotePartition(0, place, self._shard, 20)
        return self._partitions[rank]

    def read(self, step: int = 0, rank: int = 0, epoch: int = 1) -> PartitionSegment:
        return self.partition(rank).read(self._one.context(step, epoch))

    def stage(self, part: PartitionSegment, step: int = 0, rank: int = 0, epoch: int = 1, cache: bool = True) -> None:
        self.partition(rank).stage(lambda: self._one.context(step, epoch, uuid.uuid4().hex), part, cache=cache)

    def update(self, step: int = 0, rank: int = 0, epoch: int = 1) -> PartitionSegment:
        """Subtracts the gradient from the values, and adds it to a sum in the state."""
        part = self.read(step, rank, epoch)
        descend(part)
        self.stage(part, step, rank, epoch)
        return part


def descend(part: PartitionSegment) -> None:
    for index, gradient in part.gradients.items():
        part.values[index].sub_(gradient)
        state = part.state.setdefault(index, {"step": torch.tensor(0.0), "sum": torch.zeros_like(gradient), "count": 0})
        state["step"] += 1
        state["sum"] += gradient
        state["count"] += 1


@contextmanager
def trainer(one: OneUnit, *transports: str) -> Iterator[Trainer]:
    with closing_transports(Trainer(one, transports or ("shm", "grpc"))) as made:
        yield made


@contextmanager
def closing_transports(made: Trainer) -> Iterator[Trainer]:
    with closing(made.server):
        yield made


def newest_epoch(one: OneUnit, rank: int) -> int:
    return max(1, one.server.evaluate(lambda: one.server.store.run(one.run).fences.epoch(rank)))


def prepare(one: OneUnit, step: int, gradient: float = 1.0) -> None:
    for rank in range(one.dp):
        one.push(one.filled(gradient), step=step, rank=rank, epoch=newest_epoch(one, rank))
    one.prepare(step)


def commit(one: OneUnit, step: int) -> None:
    one.server.call("ConfirmPartitions", shard_pb2.ConfirmPartitionsRequest(context=one.context(step)))
    optimizer = common_pb2.OptimizerStep(algorithm=f"{TRAINER_PREFIX}Descent")
    request = shard_pb2.UpdateRequest(context=one.context(step), optimizer=optimizer, clip_coefficient=1.0)
    one.server.call("Update", request)


def sums(part: PartitionSegment) -> set[float]:
    return {value for state in part.state.values() for value in state["sum"].tolist()}


def files(shared: ShardServer) -> set[Path]:
    (folder,) = {Path(shared.shm._shared._directory)}
    return set(folder.iterdir())


@pytest.mark.parametrize(("layout", "dp"), [(PLAIN, 2), (MIXED, 1)], ids=["plain", "mixed"])
def test_steps_update_values_and_state_in_the_staging_buffer(server: ShardServer, layout: Any, dp: int) -> None:
    """The first step streams the state. Later steps alternate between two files."""
    one = unit(server, layout, dp=dp)
    with trainer(one) as own:
        paths = []
        for step in range(4):
            prepare(one, step)
            parts = [own.update(step, rank) for rank in range(dp)]
            assert all(isinstance(part, SharedPartitionSegment) for part in parts)
            commit(one, step)
            paths.append(frozenset(files(server)))
        assert all(state["count"] == 4 for part in parts for state in part.state.values())
        assert sums(parts[0]) == {4.0}
        assert paths[2] == paths[3], "no file is created once the state exists"
        assert_all([value for value in one.gather(4)[1] if value.numel()], -4.0)
        one.drop()
    assert server.unreserved_bytes() == 0
    server.until(lambda: server.store.memory.used_bytes == 0, "the closed sessions release their memory")


def test_values_and_state_change_only_with_the_update(server: ShardServer) -> None:
    one = unit(server)
    with trainer(one) as own, trainer(one, "grpc") as other:
        for step in range(2):
            prepare(one, step)
            own.update(step)
            assert_all(one.gather(step)[1], -float(step))
            seen = other.read(step)
            assert sums(seen) == ({1.0} if step else set())
            commit(one, step)


def test_staged_values_survive_another_read_of_the_partition(server: ShardServer) -> None:
    """Simulates a trainer whose coordinator restarted, while the step commits or updates."""
    one = unit(server)
    with trainer(one) as own:
        for step in range(3):
            prepare(one, step)
            first = own.update(step)
            again = own.read(step)
            for state in again.state.values():
                state["sum"].fill_(7.0)
            for value in again.values.values():
                value.fill_(7.0)
            if step == 2:
                again = own.update(step)
                assert sums(again) == {3.0}
            commit(one, step)
            if step > 0:  # the first state is streamed
                assert isinstance(first, SharedPartitionSegment)
                assert isinstance(again, SharedPartitionSegment)
                assert again.staging_buffer_id != first.staging_buffer_id
            assert_all(one.gather(step + 1)[1], -float(step + 1))
        prepare(one, 3)
        assert sums(own.read(3)) == {3.0}
        one.drop()
    assert server.unreserved_bytes() == 0
    server.until(lambda: server.store.memory.used_bytes == 0, "the closed sessions release their memory")


def test_restarted_work_item_invalidates_the_staging_buffer(server: ShardServer) -> None:
    one = unit(server)
    with trainer(one) as own:
        prepare(one, 0)
        own.update(0)
        commit(one, 0)
        prepare(one, 1, gradient=5.0)
        old = own.update(1)
        one.fence(1, (0, 1, 1))
        assert isinstance(error_of(lambda: own.read(1)), StepStateError)
        one.push(one.filled(1.0), step=1, attempt=1)
        one.prepare(1, (0, 1, 1))
        error = error_of(lambda: own.stage(old, 1))
        assert isinstance(error, StepStateError)
        assert "read the partition again" in str(error)
        assert sums(own.update(1)) == {2.0}
        commit(one, 1)
        assert_all(one.gather(2)[1], -2.0)


@pytest.mark.parametrize("transports", [("shm", "grpc"), ("grpc",)])
def test_values_staged_by_a_lost_trainer_are_applied(server: ShardServer, transports: tuple[str, ...]) -> None:
    """The next trainer finds the state and gets its own staging buffer."""
    one = unit(server)
    with trainer(one) as lost:
        for step in range(2):
            prepare(one, step)
            lost.update(step)
            if step == 0:
                commit(one, step)
    server.until(lambda: not one.shard.partitions._staging_buffers, "the lost trainer's session is closed")
    commit(one, 1)
    with trainer(one, *transports) as heir:
        for step in (2, 3):
            prepare(one, step)
            part = heir.update(step, epoch=2)
            commit(one, step)
        assert sums(part) == {4.0}
        assert_all(one.gather(4)[1], -4.0)
        one.drop()
    server.until(lambda: server.store.memory.used_bytes == 0, "the closed sessions release their memory")


def test_trainer_lost_before_staging_leaves_no_trace(server: ShardServer) -> None:
    one = unit(server)
    with trainer(one) as lost:
        prepare(one, 0)
        lost.update(0)
        commit(one, 0)
        prepare(one, 1)
        part = lost.read(1)
        for value in part.values.values():
            value.fill_(7.0)
        for state in part.state.values():
            state["sum"].fill_(7.0)
    with trainer(one) as heir:
        assert sums(heir.update(1, epoch=2)) == {2.0}
        commit(one, 1)
    assert_all(one.gather(2)[1], -2.0)


def test_fenced_trainer_cannot_change_values(server: ShardServer) -> None:
    one = unit(server)
    with trainer(one) as lost, trainer(one) as heir:
        prepare(one, 0)
        heir.update(0, epoch=1)
        commit(one, 0)
        prepare(one, 1)
        part = lost.read(1, epoch=2)
        one.fence(1, (0, 3, 0))
        heir.update(1, epoch=3)
        for value in part.values.values():
            value.fill_(7.0)
        for state in part.state.values():
            state["sum"].fill_(7.0)
        for action in (lambda: lost.stage(part, 1, epoch=2), lambda: lost.read(1, epoch=2)):
            assert isinstance(error_of(action), StaleEpochError)
        commit(one, 1)
        prepare(one, 2)
        assert sums(heir.update(2, epoch=3)) == {3.0}
        for value in part.values.values():
            value.fill_(8.0)
        commit(one, 2)
        assert_all(one.gather(3)[1], -3.0)


def test_cached_values_and_state_are_not_fetched_again(server: ShardServer) -> None:
    one = unit(server)
    with trainer(one, "grpc") as own:
        prepare(one, 0)
        first = own.update(0)
        commit(one, 0)
        prepare(one, 1)
        second = own.read(1)
        assert all(second.values[index] is first.values[index] for index in first.values)
        descend(second)
        own.stage(second, 1, cache=False)
        commit(one, 1)
        assert own.partition().cached_bytes == 0
        prepare(one, 2)
        third = own.update(2)
        assert third.values[0] is not first.values[0]
        commit(one, 2)
        assert sums(third) == {3.0}
        assert_all(one.gather(3)[1], -3.0)


@pytest.mark.parametrize("transports", [("shm", "grpc"), ("grpc",)])
def test_cache_is_stale_after_another_trainers_update(server: ShardServer, transports: tuple[str, ...]) -> None:
    one = unit(server)
    with trainer(one, "grpc") as own, trainer(one, *transports) as other:
        prepare(one, 0)
        own.update(0, epoch=1)
        commit(one, 0)
        prepare(one, 1, gradient=5.0)
        other.update(1, epoch=2)
        commit(one, 1)
        prepare(one, 2)
        assert own.partition().cached_bytes
        assert sums(own.update(2, epoch=3)) == {7.0}
        commit(one, 2)
        assert_all(one.gather(3)[1], -7.0)


def test_cache_of_an_invalidated_update_is_stale(server: ShardServer) -> None:
    one = unit(server)
    with trainer(one, "grpc") as own:
        prepare(one, 0)
        own.update(0)
        commit(one, 0)
        prepare(one, 1, gradient=5.0)
        own.update(1)
        one.fence(1, (0, 1, 1))
        one.push(one.filled(1.0), step=1, attempt=1)
        one.prepare(1, (0, 1, 1))
        assert sums(own.update(1, epoch=2)) == {2.0}
        commit(one, 1)
        assert_all(one.gather(2)[1], -2.0)


def test_partitions_are_streamed_without_memory_for_a_staging_buffer() -> None:
    """The budget has no memory for a staging buffer."""
    with closing(SharedMemory()) as shared, ShardServer(5 * PLAIN.size_bytes, shared) as small:
        one = unit(small)
        with trainer(one) as own:
            prepare(one, 0)
            part = own.read(0)
            assert not isinstance(part, SharedPartitionSegment)
            own.stage(PartitionSegment(part.generation, part.values, part.gradients), 0)
            commit(one, 0)
        assert_all(one.gather(1)[1], 0.0)


def test_staging_buffer_is_released_when_memory_is_needed(server: ShardServer) -> None:
    one = unit(server)
    with trainer(one) as own:
        for step in range(2):
            prepare(one, step)
            own.update(step)
            commit(one, step)
        prepare(one, 2)
        part = own.read(2)
        server.evaluate(one.shard.evict)
        assert server.unreserved_bytes() == 0
        descend(part)
        own.stage(part, 2)
        assert server.unreserved_bytes() > 0, "the values were streamed"
        commit(one, 2)
        prepare(one, 3)
        part = own.update(3)
        assert isinstance(part, SharedPartitionSegment)
        assert sums(part) == {4.0}
        commit(one, 3)
        assert_all(one.gather(4)[1], -4.0)


def test_staging_buffer_released_for_its_own_state_leaves_no_memory() -> None:
    """There is memory for gradients and values, or for the state, but not for both."""
    size = 4096
    with closing(SharedMemory()) as shared:
        memory = Memory(8 * size, shared=shared)
        memory.reserve(("r", "u", 0), size, 1)
        assert memory.free_bytes == 3 * size
        layout = layout_of("u", a=((size // 4,), "float32"))
        spec = ShardSpec(run=RunIdentity("r", "id"), layout=layout, index=0, start_bytes=0, stop_bytes=size, dp=1)
        partitions = Partitions(spec, memory)
        memory.unreserved.evict = partitions.evict
        staging_buffer = SharedStagingBuffer("a staging buffer", partitions.bounds(0), memory, shared)
        partitions.add_staging_buffer(staging_buffer)
        with pytest.raises(ConflictError, match="stream the partition"):
            staging_buffer.allocate_state(3 * size)
        assert memory.unreserved.used_bytes == memory.used_bytes == 0
        with pytest.raises(FileNotFoundError):
            staging_buffer.file.open_for_trainer()


def test_invalid_reads_and_stages_are_rejected(server: ShardServer) -> None:
    one = unit(server)
    with trainer(one) as own:
        prepare(one, 0)
        own.update(0)
        commit(one, 0)
        prepare(one, 1)
        part = own.read(1)
        part.values[1][17] = float("inf")
        error = error_of(lambda: own.stage(part, 1))
        assert isinstance(error, NonFiniteError)
        assert error.data["parameter"] == "u.b"
        assert isinstance(error_of(lambda: commit(one, 1)), IncompleteStepError)
        one.fence(1, (0, 1, 0))
        assert isinstance(error_of(lambda: own.read(1, rank=0, epoch=0)), StaleEpochError)
        transport = own.server.transport
        assert isinstance(transport, ShmTransport)
        wrong = shard_pb2.OpenStagingBufferRequest(
            partition=shard_pb2.ReadPartitionRequest(context=one.context(1), unit="u", stop_bytes=4096),
            transport_id=transport.session_id,
        )
        assert isinstance(error_of(lambda: server.call("OpenStagingBuffer", wrong)), InvalidRequestError)
        unknown = shard_pb2.StageStagingBufferRequest(
            header=shard_pb2.StagePartitionHeader(context=one.context(1), unit="u", stop_bytes=one.size),
            transport_id=transport.session_id,
            staging_buffer_id=999,
        )
        error = error_of(lambda: server.call("StageStagingBuffer", unknown))
        assert "the shm session has no staging buffer 999" in str(error)
