"""Tests of the shared-memory transport on a real server: buffers, sessions, rejections and released memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.transport.socket_transport import SocketTransport
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.transports.shm_transport import PROOF_FILE_BYTES
from shardwell_wire.errors import (
    AccessError,
    CapacityError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    VersionGoneError,
)
from shardwell_wire.host.shared_memory import NONCE_BYTES, opened
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import (
    PLAIN,
    ShardServer,
    assert_all,
    error_of,
    in_background,
    layout_of,
    train,
    unit,
)
from tests.support.shm_transport import ConnectedUnit, assert_only_parameters, header, shared_bytes
from tests.support.transports import Gradients, address_of, unsent

EMPTY = layout_of(a=((0,), "float32"))


pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture(params=["grpc", "socket"])
def connected(server: ShardServer, request: pytest.FixtureRequest) -> Iterator[ConnectedUnit]:
    with ConnectedUnit(unit(server, dp=2), request.param) as made:
        yield made


def fill(connected: ConnectedUnit, file: str, value: float) -> None:
    """Fills a gradient buffer."""
    with opened(connected.transport.open_file(file, size_bytes=connected.one.size)) as descriptor:
        os.pwrite(descriptor, torch.full((connected.one.size // 4,), value).numpy().tobytes(), 0)


def is_offered(connected: ConnectedUnit, file: str) -> bool:
    """Returns whether the server sends the trainer a descriptor of a file."""
    try:
        os.close(connected.transport._receive(file))
    except FileNotFoundError:
        return False
    return True


# Reading.


def test_mapped_shard_shows_updates_in_place(connected: ConnectedUnit) -> None:
    one = connected.one
    vector = connected.vector()
    assert vector.shows(0)
    train(one, 0)
    assert connected.locate(1).version == 1
    assert vector.shows(1)
    assert_all(one.split(vector.bytes), -1.0)
    with pytest.raises(VersionGoneError):
        vector.check(0)
    assert connected.locate().segment.file == connected.locate(1).segment.file


def test_segment_of_a_deleted_run_shows_no_version(connected: ConnectedUnit) -> None:
    vector, file = connected.vector(), connected.locate().segment.file
    connected.one.drop()
    assert not vector.shows(0)
    assert not is_offered(connected, file)
    assert isinstance(error_of(connected.locate), NotFoundError)


# Pushing.


def test_buffers_of_later_parts_are_reused(connected: ConnectedUnit) -> None:
    for part in range(4):
        connected.push(connected.one.filled(1.0), part=part)
    assert sorted(gradient_buffer.claimed for gradient_buffer in connected.gradient_buffers()) == [False, True]
    connected.push(connected.one.filled(1.0), rank=1)
    connected.one.prepare(0, (0, 0, 4), (1, 0, 1))
    connected.one.update(0)
    assert_all(connected.one.gather(1)[1], -2.5)
    assert [gradient_buffer.claimed for gradient_buffer in connected.gradient_buffers()] == [False, False]


def test_buffers_are_reused_in_the_next_step(connected: ConnectedUnit) -> None:
    for step in range(3):
        for rank in (0, 1):
            connected.push(connected.one.filled(1.0), step=step, rank=rank)
        connected.one.prepare(step)
        connected.one.update(step)
        connected.transport.release()
    assert len(connected.gradient_buffers()) == 2
    assert_all(connected.one.gather(3)[1], -3.0)


def test_buffer_of_an_interrupted_push_is_reused(connected: ConnectedUnit) -> None:
    class Interrupting(Gradients):
        def write_to(self, memory: memoryview) -> None:
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            connected.transport.prepare_push(
                unsent(address_of(connected.one), connected.header(), Interrupting(connected.one, []))
            )
        connected.prepare(connected.one.zeros(), rank=1)
        connected.transport.release(0)
        connected.transport.release(1)
    assert len(connected.gradient_buffers()) == 2


def test_buffer_of_a_duplicate_push_stays_free(connected: ConnectedUnit) -> None:
    connected.one.push(connected.one.filled(1.0))
    gradient_buffer = connected.open_gradient_buffer()
    fill(connected, gradient_buffer.file, 5.0)
    answer = connected.reduce(gradient_buffer.gradient_buffer_id)
    assert (answer.duplicate, answer.adopted) == (True, False)
    connected.one.push(connected.one.filled(1.0), rank=1)
    connected.one.prepare(0)
    connected.one.update(0)
    assert_all(connected.one.gather(1)[1], -1.0)


@pytest.mark.parametrize("part", [0, 1])
def test_repeated_request_returns_the_same_answer(connected: ConnectedUnit, part: int) -> None:
    for number in range(part):
        connected.one.push(connected.one.filled(1.0), part=number)
    gradient_buffer = connected.open_gradient_buffer()
    fill(connected, gradient_buffer.file, 1.0)
    answers = [connected.reduce(gradient_buffer.gradient_buffer_id, part=part) for _ in range(2)]
    assert [answer.duplicate for answer in answers] == [False, True]
    assert [answer.adopted for answer in answers] == [part == 0] * 2
    connected.one.push(connected.one.zeros(), rank=1)
    connected.one.prepare(0, (0, 0, part + 1), (1, 0, 1))
    connected.one.update(0)
    assert_all(connected.one.gather(1)[1], -(part + 1) / 2)


def test_buffer_with_a_contribution_rejects_other_contributions(connected: ConnectedUnit) -> None:
    gradient_buffer = connected.open_gradient_buffer()
    assert connected.reduce(gradient_buffer.gradient_buffer_id).adopted
    for changes in ({"rank": 1}, {"part": 1}, {"attempt": 1}):
        error = error_of(partial(connected.reduce, gradient_buffer.gradient_buffer_id, **changes))
        assert isinstance(error, StepStateError)
        assert "already holds a contribution: use another one" in str(error)
    connected.one.fence(0, (0, 1, 1))  # the fence drops attempt 0's contribution
    assert connected.reduce(gradient_buffer.gradient_buffer_id, attempt=1).adopted


def test_stale_requests_are_rejected_without_a_trace(connected: ConnectedUnit) -> None:
    one = connected.one
    one.fence(0, (0, 5, 3))
    gradient_buffer = connected.open_gradient_buffer()
    refused: list[tuple[type[ShardwellError], dict[str, Any]]] = [
        (StaleEpochError, {"epoch": 4, "attempt": 3}),
        (StaleEpochError, {"epoch": 5, "attempt": 2}),
        (StepStateError, {"epoch": 5, "attempt": 3, "step": 1}),
        (StepStateError, {"epoch": 5, "attempt": 3, "part": 1}),
    ]
    for kind, changes in refused:
        assert type(error_of(partial(connected.reduce, gradient_buffer.gradient_buffer_id, **changes))) is kind
    assert connected.server.evaluate(lambda: one.shard.gradient.contributions.by_rank) == {}
    assert connected.reduce(gradient_buffer.gradient_buffer_id, epoch=5, attempt=3).adopted
    one.push(one.filled(1.0), rank=1)
    one.prepare(0, (0, 3, 1), (1, 0, 1))
    assert isinstance(error_of(lambda: connected.push(one.zeros(), epoch=5, attempt=3, part=1)), StepStateError)
    one.update(0)
    assert (
        type(error_of(lambda: connected.reduce(gradient_buffer.gradient_buffer_id, epoch=5, attempt=3)))
        is VersionGoneError
    )


def test_buffer_of_another_unit_or_session_is_rejected(connected: ConnectedUnit) -> None:
    server, gradient_buffer = connected.server, connected.open_gradient_buffer()
    with ConnectedUnit(unit(server, layout_of("other", a=((60_000,), "float32")), index=1)) as other:
        error = error_of(
            lambda: other.reduce(gradient_buffer.gradient_buffer_id, transport_id=connected.transport.session_id)
        )
        assert isinstance(error, InvalidRequestError)
        assert "belongs to unit 'u' of run 'r', not to unit 'other'" in str(error)
        assert isinstance(error_of(lambda: other.reduce(gradient_buffer.gradient_buffer_id)), ConflictError)
    assert connected.server.evaluate(lambda: connected.one.shard.gradient.contributions.by_rank) == {}


def test_requests_for_another_run_are_rejected(connected: ConnectedUnit) -> None:
    with ConnectedUnit(unit(connected.server, run="other")) as other:
        for use in (
            lambda: connected.open_gradient_buffer(run="other", run_id="id-of-other"),
            lambda: other.reduce(1, transport_id=connected.transport.session_id),
            lambda: connected.server.call(
                "LocateShard",
                shard_pb2.LocateShardRequest(
                    run="other", run_id="id-of-other", unit="u", transport_id=connected.transport.session_id
                ),
            ),
        ):
            error = error_of(use)
            assert isinstance(error, ConflictError)
            assert "run 'r' with id id-of-r, but the request names run 'other' with id id-of-other" in str(error)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"unit": "nothing"}, NotFoundError),
        ({"rank": 2}, InvalidRequestError),
        ({"rank": (1 << 32) - 1}, InvalidRequestError),
        ({"stop_bytes": 64}, NotFoundError),
        ({"start_bytes": 1 << 63}, NotFoundError),
        ({"parameter_indices": [1, 0]}, InvalidRequestError),
        ({"parameter_indices": [0, 0]}, InvalidRequestError),
        ({"parameter_indices": [7]}, InvalidRequestError),
        ({"wire_dtype": 99}, InvalidRequestError),
        ({"wire_dtype": common_pb2.WIRE_DTYPE_BFLOAT16}, InvalidRequestError),
        ({"transport_id": ""}, ConflictError),
        ({"transport_id": "nowhere"}, ConflictError),
        ({"part": 1}, StepStateError),
    ],
)
def test_malformed_requests_are_rejected(
    connected: ConnectedUnit, changes: dict[str, Any], error: type[ShardwellError]
) -> None:
    gradient_buffer = connected.open_gradient_buffer()
    assert type(error_of(lambda: connected.reduce(gradient_buffer.gradient_buffer_id, **changes))) is error
    assert type(error_of(lambda: connected.reduce(gradient_buffer.gradient_buffer_id + 1))) is ConflictError
    assert connected.server.evaluate(lambda: connected.one.shard.gradient.contributions.by_rank) == {}
    assert [each.claimed for each in connected.gradient_buffers()] == [False]


def test_empty_requests_are_rejected(connected: ConnectedUnit) -> None:
    for rpc_name, request in (
        ("ReduceGradientBuffer", shard_pb2.ReduceGradientBufferRequest()),
        ("OpenGradientBuffer", shard_pb2.OpenGradientBufferRequest()),
        ("LocateShard", shard_pb2.LocateShardRequest()),
        ("OpenTransport", shard_pb2.OpenTransportRequest()),
    ):
        error = error_of(lambda: list(connected.server.client.stream(rpc_name, request, timeout_s=20.0)))  # noqa: B023
        assert isinstance(error, InvalidRequestError)


# The end of a session.


def test_close_releases_the_buffers(connected: ConnectedUnit) -> None:
    files = [connected.open_gradient_buffer().file for _ in range(3)]
    assert all(is_offered(connected, file) for file in files)
    assert shared_bytes(connected.server) == 4 * connected.one.size
    assert connected.server.unreserved_bytes() == connected.one.size, "the reservation covers two buffers"
    connected.transport.close()
    assert_only_parameters(connected.one)
    assert not any(is_offered(connected, file) for file in files)
    assert isinstance(error_of(connected.open_gradient_buffer), ConflictError)


def test_sessions_share_one_proof_file_removed_with_the_last(connected: ConnectedUnit) -> None:
    server, one = connected.server, connected.one
    memory, folder = server.store.memory, Path(server.evaluate(lambda: server.shm._proof.path)).parent  # type: ignore[union-attr]
    request = shard_pb2.OpenTransportRequest(
        run=one.run, run_id=one.identity.run_id, kind=common_pb2.TRANSPORT_KIND_SHM
    )
    before, count = server.evaluate(lambda: memory.used_bytes), len(list(folder.iterdir()))
    transports = [server.client.open("OpenTransport", request, timeout_s=20.0) for _ in range(20)]
    assert len({transport.answer.transport_id for transport in transports}) == 20
    assert {transport.answer.shm.file for transport in transports} == {server.evaluate(lambda: server.shm._proof.name)}  # type: ignore[union-attr]
    assert (server.evaluate(lambda: memory.used_bytes), len(list(folder.iterdir()))) == (before, count)
    for transport in transports:
        transport.end()
    connected.transport.close()
    server.until(lambda: not server.shm._open, "all sessions are closed")
    assert (server.evaluate(lambda: memory.used_bytes), len(list(folder.iterdir()))) == (
        before - PROOF_FILE_BYTES,
        count - 1,
    )


def test_client_that_cannot_read_the_servers_files_uses_no_session(connected: ConnectedUnit) -> None:
    """Such as one on another host, or of another user: it gets the answer of OpenTransport, but not the nonce."""
    answer, proof = connected.transport.session.answer, connected.transport.session.answer.shm.proof
    used_bytes = connected.server.evaluate(lambda: connected.server.store.memory.used_bytes)
    name, _, nonce = connected.transport.session_id.partition(".")
    assert (name, len(bytes.fromhex(nonce))) == (answer.transport_id, NONCE_BYTES)
    assert bytes.fromhex(nonce) not in answer.SerializeToString()
    for guess in (name, f"{name}.", f"{name}.{proof[:NONCE_BYTES].hex()}", f"{name}.{nonce[:-1]}", f".{nonce}"):
        for use in (
            lambda guess=guess: connected.open_gradient_buffer(transport_id=guess),
            lambda guess=guess: connected.server.call(
                "LocateShard",
                shard_pb2.LocateShardRequest(run="r", run_id="id-of-r", unit="u", transport_id=guess),
            ),
        ):
            error = error_of(use)
            assert isinstance(error, ConflictError)
            assert "with this nonce is open on this server" in str(error)
            assert nonce not in str(error)
    assert connected.server.evaluate(lambda: connected.server.store.memory.used_bytes) == used_bytes
    assert connected.open_gradient_buffer().file


def test_contribution_outlives_its_session(connected: ConnectedUnit) -> None:
    one = connected.one
    connected.push(one.filled(3.0))
    (buffer,) = [gradient_buffer.file for gradient_buffer in connected.gradient_buffers()]
    connected.transport.close()
    connected.server.until(lambda: buffer.sealed is not None and buffer.sealed.closed, "the buffer is closed")
    assert shared_bytes(connected.server) == 2 * one.size, "the contribution's memory is still in use"
    one.push(one.filled(1.0), rank=1)
    one.prepare(0)
    one.update(0)
    assert_all(one.gather(1)[1], -2.0)
    assert_only_parameters(one)


def test_push_that_waits_when_its_session_closes_is_rejected(connected: ConnectedUnit) -> None:
    """The buffer is released once."""
    one, server = connected.one, connected.server
    gradient_buffer, run = connected.open_gradient_buffer(), server.store.run("r")

    async def lock() -> None:
        await run._lock.acquire()

    asyncio.run_coroutine_threadsafe(lock(), server._loop).result(20)
    pushing = in_background(lambda: connected.reduce(gradient_buffer.gradient_buffer_id))
    server.until(lambda: bool(run._lock._waiters), "the push waits")
    connected.transport.close()
    server.until(lambda: not server.shm._open, "the session is closed")
    server.evaluate(run._lock.release)
    assert type(error_of(partial(next, pushing))) is ConflictError
    assert server.evaluate(lambda: one.shard.gradient.contributions.by_rank) == {}
    assert_only_parameters(one)


def test_deleted_run_releases_the_memory_of_open_sessions(connected: ConnectedUnit) -> None:
    one, server = connected.one, connected.server
    connected.push(one.filled(1.0))
    connected.open_gradient_buffer()
    one.drop()
    assert isinstance(error_of(lambda: connected.push(one.filled(1.0), rank=1)), ShardwellError)
    again = unit(server, dp=2, run_id="the-next")
    assert_only_parameters(again)
    assert server.evaluate(lambda: again.shard.gradient.contributions.by_rank) == {}
    again.drop()
    assert shared_bytes(server) == server.unreserved_bytes() == server.taken_bytes() == 0
    assert server.evaluate(lambda: server.store.memory.reserved_bytes) == 0


def test_push_to_an_unknown_run_raises_not_found(server: ShardServer) -> None:
    with ConnectedUnit(unit(server)) as connected:
        context = common_pb2.RequestContext(run="nowhere", run_id="id", epoch=1)
        assert type(error_of(lambda: connected.reduce(1, context=context))) is NotFoundError


def test_control_connection_survives_rejections_and_serves_its_own_run_only(server: ShardServer) -> None:
    with ConnectedUnit(unit(server), "socket") as connected, ConnectedUnit(unit(server, run="other")) as other:
        mine, theirs = connected.open_gradient_buffer(), other.open_gradient_buffer()
        assert type(error_of(lambda: connected.reduce(99))) is ConflictError
        context = other.one.context(0, 1)
        error = error_of(
            lambda: connected.reduce(
                theirs.gradient_buffer_id, transport_id=other.transport.session_id, context=context
            )
        )
        assert type(error) is AccessError
        assert (
            "session belongs to run 'r' with id id-of-r, but the request names run 'other' with id id-of-other"
            in str(error)
        )
        assert connected.reduce(mine.gradient_buffer_id).adopted
        assert server.evaluate(lambda: len(server.sockets._connections)) == 1


def test_server_without_shared_memory_rejects_control_messages() -> None:
    with ShardServer() as server:
        one = unit(server)
        with closing(SocketTransport(server.client, one.identity)) as transport:
            request = shard_pb2.ReduceGradientBufferRequest(
                header=header(one), transport_id="none", gradient_buffer_id=1
            )
            error = error_of(lambda: transport.control(request, timeout_s=20.0))
    assert type(error) is ConflictError
    assert "server 'here' does not offer the shm transport" in str(error)


def test_buffer_beyond_the_budget_raises_capacity_error() -> None:
    need = PLAIN.size_bytes * 4
    with closing(SharedMemory()) as shared, ShardServer(need + PLAIN.size_bytes, shared) as server:
        with ConnectedUnit(unit(server)) as connected:
            for _ in range(2):  # one within the reservation, and one in staging memory
                connected.open_gradient_buffer()
            error = error_of(connected.open_gradient_buffer)
            assert isinstance(error, CapacityError)
            assert len(connected.gradient_buffers()) == 2
        assert_only_parameters(connected.one)
        with ConnectedUnit(connected.one) as again:
            again.open_gradient_buffer()
