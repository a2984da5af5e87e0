"""Runs with the same name on a shard server, distinguished by their ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from typing import Any

import pytest

from shardwell.transport.base import into
from shardwell.transport.shm_transport import ShmTransport
from shardwell.transport.socket_transport import SocketTransport
from shardwell_server.shard.process.registration import Registration
from shardwell_server.shard.shard_spec import ShardSpec
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_wire.errors import InvalidRequestError, NotFoundError, RunDeletedError, ShardwellError
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2
from tests.support.shard_server import PLAIN, OneUnit, ShardServer, assert_all, error_of, train, unit
from tests.support.shm_transport import ConnectedUnit as ShmUnit
from tests.support.socket_transport import ConnectedUnit as SocketUnit

pytestmark = pytest.mark.usefixtures("shared")


def requests_of(one: OneUnit) -> dict[str, Callable[[], object]]:
    """Every request that changes a run."""
    return {
        "InitializeUnit": lambda: one.initialize(one.filled(9.0), epoch=9),
        "PublishUnit": lambda: one.publish(epoch=9),
        "ReduceScatter": lambda: one.push(one.filled(9.0), epoch=9),
        "Gather": one.gather,
        "Fence": lambda: one.fence(0, (0, 9, 9)),
        "PrepareStep": lambda: one.prepare(0),
        "Update": lambda: one.update(0, lr=9.0),
    }


def test_two_runs_with_one_name_are_separate(server: ShardServer) -> None:
    old = unit(server, run_id="old")
    new = unit(server, run_id="new")
    train(old, 0, gradient=5.0)
    train(new, 0, gradient=1.0)
    assert_all(old.gather()[1], -5.0)
    assert_all(new.gather()[1], -1.0)
    by_name = server.call("ListShards", shard_pb2.ListShardsRequest(run="r")).shards
    assert len(by_name) == 1
    old.drop()
    train(new, 1, gradient=1.0)
    assert_all(new.gather()[1], -2.0)


@pytest.mark.parametrize("missed", [False, True], ids=["dropped", "drop missed"])
def test_request_for_a_deleted_run_does_not_change_its_successor(server: ShardServer, missed: bool) -> None:
    old = unit(server, run_id="old")
    if not missed:
        old.drop()
    new = unit(server, run_id="new")
    for name, ask in requests_of(old).items():
        if missed:
            with suppress(ShardwellError):
                ask()
        else:
            error = error_of(ask)
            assert isinstance(error, RunDeletedError), name
            assert "with id old was deleted; another run of this name has id new" in str(error)
    train(new, 0)
    assert_all(new.gather()[1], -1.0)


def test_unknown_run_id_is_not_found_despite_a_known_name(server: ShardServer) -> None:
    unit(server, run_id="here")
    error = error_of(OneUnit(server, PLAIN, run_id="elsewhere").gather)
    assert type(error) is NotFoundError
    assert "does not hold run 'r' with id elsewhere, but another run of this name with id here" in str(error)


def test_only_reads_may_omit_the_run_id(server: ShardServer) -> None:
    one = unit(server)
    context = common_pb2.RequestContext(run="r", epoch=1)
    assert one.server.client.call("ListShards", shard_pb2.ListShardsRequest(run="r"), timeout_s=20.0).shards
    for ask in (
        lambda: one.push(one.filled(1.0), context=context),
        lambda: one.initialize(one.filled(1.0), context=context),
        lambda: one.reserve(context=context),
        lambda: server.call("DropRun", shard_pb2.DropRunRequest(context=context)),
        lambda: server.call("Update", shard_pb2.UpdateRequest(context=context)),
        lambda: next(
            server.client.stream(
                "OpenTransport",
                shard_pb2.OpenTransportRequest(run="r", kind=common_pb2.TRANSPORT_KIND_SOCKET),
                timeout_s=20.0,
            )
        ),
    ):
        error = error_of(ask)
        assert isinstance(error, InvalidRequestError)
        assert "run_id is empty" in str(error)


def test_delayed_reservation_of_a_deleted_run_is_rejected(server: ShardServer) -> None:
    old = unit(server, run_id="old")
    old.drop()
    new = unit(server, run_id="new")
    assert isinstance(error_of(old.reserve), RunDeletedError)
    assert list(server.evaluate(lambda: server.store.runs)) == ["new"]
    assert new.gather()[0] == 0


def test_session_of_a_deleted_run_ends_and_cannot_serve_its_successor(server: ShardServer) -> None:
    old = unit(server, run_id="old")
    with ShmUnit(old) as shm, closing(SocketTransport(server.client, old.identity)) as sockets:
        gradient_buffer = shm.open_gradient_buffer().gradient_buffer_id
        old.drop()
        new = unit(server, run_id="new")
        header = shm.header(context=new.context())
        request = shard_pb2.ReduceGradientBufferRequest(
            header=header, transport_id=shm.transport.session_id, gradient_buffer_id=gradient_buffer
        )
        assert isinstance(error_of(lambda: server.call("ReduceGradientBuffer", request)), ShardwellError)
        push = partial(sockets.push_stream, header, [memoryview(bytes(new.size))], timeout_s=20.0)
        assert isinstance(error_of(push), ShardwellError)
        server.until(lambda: not server.shm._open, "the session has ended")
        open_shm = partial(ShmTransport, control=None, timeout_s=20.0)
        for open_transport in (open_shm, SocketTransport):
            assert isinstance(error_of(lambda: open_transport(server.client, old.identity)), RunDeletedError)  # noqa: B023
        assert server.evaluate(lambda: new.shard.gradient.contributions.by_rank) == {}
        assert server.evaluate(lambda: server.store.memory._shared_bytes) == new.size


def test_socket_session_serves_its_own_run_only(server: ShardServer) -> None:
    connected = SocketUnit(server, run_id="old")
    new = unit(server, run_id="new")
    with closing(connected.transport):
        request = new.gather_request()
        error = error_of(
            lambda: connected.transport.fetch_stream(request, into(memoryview(bytearray(new.size))), timeout_s=20.0)
        )
        assert "socket session belongs to run 'r' with id old, but the request names run 'r' with id new" in str(error)


def test_heartbeat_answer_drops_deleted_runs() -> None:
    async def scenario(threads: ThreadPoolExecutor) -> None:
        store = ShardStore(1 << 30, threads)
        for run_id in ("old", "new"):
            identity = RunIdentity("r", run_id)
            store.reserve(
                ShardSpec(run=identity, layout=PLAIN, index=0, start_bytes=0, stop_bytes=PLAIN.size_bytes, dp=1)
            )
        reserved_bytes = store.memory.reserved_bytes
        registration = Registration("127.0.0.1:1", "s", store)
        reported: list[list[str]] = []

        async def call(rpc_name: str, request: Any) -> Any:
            reported.append(list(request.run_ids))
            return coordinator_pb2.HeartbeatServerResponse(coordinator_epoch=term, deleted_run_ids=["old", "unknown"])

        registration._call = call
        registration.term.learn(4)
        term = 3
        await registration._beat()
        assert not registration._dropping, "an answer of an older coordinator drops nothing"
        term = 4
        await registration._beat()
        await asyncio.gather(*registration._tasks)
        assert reported == [["old", "new"]] * 2
        assert list(store.runs) == ["new"]
        assert store.memory.reserved_bytes < reserved_bytes
        await registration._channel.close()

    with ThreadPoolExecutor(1) as threads:
        asyncio.run(scenario(threads))
