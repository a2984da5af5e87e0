"""Tests of trainers on a server with shared memory: fallbacks to streams, and several trainers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.data_plane.shard import RemoteShard, Wire
from shardwell.transport.base import ignore
from shardwell.transport.server_connection import ConnectOptions, ServerConnection
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_wire.errors import (
    CapacityError,
    ConflictError,
    UnavailableError,
)
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import (
    PLAIN,
    OneUnit,
    ShardServer,
    assert_all,
    error_of,
    layout_of,
    unit,
)
from tests.support.shm_transport import ConnectedUnit, assert_only_parameters, header, shared_bytes
from tests.support.transports import part_header

pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture
def connected(server: ShardServer) -> Iterator[ConnectedUnit]:
    with ConnectedUnit(unit(server, dp=2)) as made:
        yield made


# Fallbacks.


def connect(one: OneUnit, transports: str = "shm,grpc") -> ServerConnection:
    return ServerConnection(one.server.client.address, one.identity, ConnectOptions(transports.split(","), 64 << 10))


def remote(one: OneUnit, connection: ServerConnection) -> RemoteShard:
    return RemoteShard(one.identity, one.layout, connection, one.start, one.stop, Wire(wait_limit_s=20.0))


def flats(one: OneUnit, value: float) -> dict[int, torch.Tensor]:
    return dict(enumerate(one.filled(value)))


def test_gradients_are_streamed_with_one_warning_when_memory_is_full(
    connected: ConnectedUnit, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise CapacityError("the shared memory is full")

    assert connected.server._shared is not None
    one = connected.one
    with closing(connect(one)) as connection:
        monkeypatch.setattr(connected.server._shared, "create_sealed", full)
        for rank in (0, 1):
            remote(one, connection).prepare_push(part_header(connected.header(rank=rank)), flats(one, 1.0))(ignore)
    one.prepare(0)
    one.update(0)
    assert_all(one.gather(1)[1], -1.0)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "no shared memory for gradients, sending them over grpc" in warnings[0]
    assert_only_parameters(one)


def test_push_takes_another_buffer_while_the_server_has_not_dropped_a_lost_items_gradient(
    connected: ConnectedUnit,
) -> None:
    """A trainer loses the lease on an item. It begins another rank's item before the server learns of the loss."""
    one = connected.one
    with closing(connect(one)) as connection, closing(connect(one)) as other:
        mine = remote(one, connection)
        mine.prepare_push(part_header(connected.header(rank=1)), flats(one, 5.0))(ignore)
        connection.transports.require_shared().release(1)
        mine.prepare_push(part_header(connected.header(rank=0)), flats(one, 1.0))(ignore)
        one.fence(0, (1, 2, 1))
        header_of_1 = part_header(connected.header(rank=1, epoch=2, attempt=1))
        remote(one, other).prepare_push(header_of_1, flats(one, 3.0))(ignore)
    one.prepare(0, (0, 0, 1), (1, 1, 1))
    one.update(0)
    assert_all(one.gather(1)[1], -2.0)


def test_server_without_shared_memory_is_reached_over_grpc(caplog: pytest.LogCaptureFixture) -> None:
    with ShardServer() as server, closing(connect(one := unit(server))) as connection:
        assert (connection.transport.name, connection.copies_gradients) == ("grpc", False)
        assert "does not offer transport kind" in caplog.text
        assert isinstance(error_of(lambda: connect(one, "shm")), ConflictError)


def test_wrong_proof_file_falls_back_to_grpc(
    server: ShardServer, shared: SharedMemory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a server on another host with this host's name, or with another /dev/shm."""
    real, one = shared.create, unit(server)

    def elsewhere(size_bytes: int, what: str) -> Any:
        made = real(size_bytes, what)
        made.unlink()
        Path(made.path).write_bytes(bytes(size_bytes))
        return made

    monkeypatch.setattr(shared, "create", elsewhere)
    with closing(connect(one)) as connection:
        assert connection.transport.name == "grpc"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "on this host is not its socket" in warning
    server.until(lambda: not server.shm._open, "the unusable session is closed")


def test_shard_outside_shared_memory_cannot_be_located(
    server: ShardServer, shared: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise CapacityError("the shared memory is full")

    with monkeypatch.context() as patched:
        patched.setattr(shared, "create_shard_file", full)
        one = unit(server)
    with ConnectedUnit(one) as connected:
        error = error_of(connected.locate)
        assert isinstance(error, ConflictError)
        assert "is not in shared memory (the shared memory is full)" in str(error)
        connected.push(one.filled(1.0))
        one.prepare(0)
        one.update(0)
    assert_all(one.gather(1)[1], -1.0)
    one.drop()
    assert server.taken_bytes() == shared_bytes(server) == 0


# Several trainers.


def test_trainers_with_one_and_two_ranks_share_a_server(server: ShardServer) -> None:
    one = unit(server, dp=3)
    with ExitStack() as stack:
        first, second = (stack.enter_context(ConnectedUnit(one)) for _ in range(2))
        assert first.transport.session_id != second.transport.session_id
        for step in range(2):
            first.push(one.filled(1.0), step=step, rank=0)
            second.push(one.filled(2.0), step=step, rank=1)
            second.push(one.filled(6.0), step=step, rank=2)
            one.prepare(step)
            one.update(step)
            for connected in (first, second):
                connected.transport.release()
        assert [len(connected.gradient_buffers()) for connected in (first, second)] == [1, 2]
        assert torch.equal(first.vector().bytes, second.vector().bytes)
        assert_all(one.gather(2)[1], -6.0)
    assert_only_parameters(one)


def test_free_memory_closes_the_buffers_of_lost_ranks_only() -> None:
    """Otherwise the trainer that plays the ranks next finds no memory on a full server."""
    budget = PLAIN.size_bytes * 2 * 6 + PLAIN.size_bytes  # two units and one more buffer
    second = layout_of("v", a=((40_000,), "float32"), b=((20_000,), "float32"))
    with closing(SharedMemory()) as shared, ShardServer(budget, shared) as server:
        units = [unit(server, PLAIN, dp=2), unit(server, second, dp=2, index=1)]
        with closing(connect(units[0], "shm")) as both, closing(connect(units[0], "shm")) as late:
            session = both.transport
            for step, owners in enumerate([(both, both), (both, late)]):
                for one, (rank, owner) in product(units, enumerate(owners)):
                    own = part_header(header(one, step=step, rank=rank))
                    remote(one, owner).prepare_push(own, flats(one, 1.0))(ignore)
                manifests = [
                    shard_pb2.RankManifest(
                        dp_rank=rank,
                        units=[common_pb2.UnitParts(unit_index=index, part_count=1) for index in (0, 1)],
                    )
                    for rank in (0, 1)
                ]
                prepare = shard_pb2.PrepareStepRequest(context=units[0].context(step), ranks=manifests, dp=2)
                server.call("PrepareStep", prepare)
                units[0].update(step)
                both.transports.require_shared().release()
                both.free_memory(1, 2 - step)
                assert both.transport is session, "no session is reopened"
                assert server.evaluate(lambda: len(server.shm._open)) == 2
            assert late.copies_gradients and both.copies_gradients
            assert sorted(server.evaluate(lambda: [len(at._gradient_buffers) for at in server.shm._open.values()])) == [
                2,
                2,
            ]
        assert [one.gather()[0] for one in units] == [2, 2]
        assert_all(units[0].gather()[1], -2.0)


def test_buffers_that_could_not_be_closed_are_closed_the_next_time(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer has forgotten them, so nobody else would close them before the session ends."""
    one = unit(server, dp=2)
    with closing(connect(one, "shm")) as trainer:
        shard = remote(one, trainer)
        for rank in (0, 1):
            shard.prepare_push(part_header(header(one, step=0, rank=rank)), flats(one, 1.0))
        trainer.transports.require_shared().release()

        def open_count() -> int:
            return sum(server.evaluate(lambda: [len(at._gradient_buffers) for at in server.shm._open.values()]))

        def fail(rpc_name: str, *_: Any, **__: Any) -> None:
            raise UnavailableError(f"{rpc_name} was lost")

        with monkeypatch.context() as patch:
            patch.setattr(trainer.client, "call", fail)
            trainer.free_memory(1, 2)
        assert open_count() == 2
        trainer.free_memory(1, 1)
        assert open_count() == 1
