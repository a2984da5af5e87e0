"""Tests of shared-memory sessions that break while a gradient is in a buffer: the step completes with the same bits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from shardwell.data_plane.shard import RemoteShard, Wire
from shardwell.transport import resending
from shardwell.transport.base import ignore
from shardwell.transport.grpc_transport import ShardClient
from shardwell.transport.server_connection import ConnectOptions, ServerConnection
from shardwell.transport.shm_transport import ShmTransport
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.requests.pushes import Push
from shardwell_server.shard.transports.shm_buffers import SharedGradientBuffer
from shardwell_wire.errors import CapacityError, ConflictError, UnavailableError
from shardwell_wire.model.layout import UnitLayout
from tests.support.shard_server import MIXED, ShardServer, layout_of, unit
from tests.support.transports import part_header

EMPTY = layout_of(a=((0,), "float32"))
PARTS = 2


pytestmark = pytest.mark.usefixtures("shared")


class Trainer:
    """Plays the only rank of a run: pushes its gradients in two parts per step."""

    def __init__(
        self, server: ShardServer, *, run: str = "r", layout: UnitLayout = MIXED, transports: str = "shm"
    ) -> None:
        self.server, self.one = server, unit(server, layout, run=run)
        address = server.client.address
        self.connection = ServerConnection(address, self.one.identity, ConnectOptions(transports.split(","), 64 << 10))
        run = self.one.identity
        self.shard = RemoteShard(run, layout, self.connection, self.one.start, self.one.stop, Wire(wait_limit_s=20.0))
        self._generator = torch.Generator().manual_seed(7)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    @property
    def transport(self) -> ShmTransport:
        shared = self.connection.transport
        assert isinstance(shared, ShmTransport)
        return shared

    def break_session(self) -> None:
        """Simulates a lost connection; returns when the server has closed the session."""
        self.transport.session.cut()
        self.server.until(lambda: not self.server.shm._open, "the transport is closed")

    def prepare(self, step: int, part: int) -> Callable[[], None]:
        """Writes a part of the next gradient to a buffer; returns a function that pushes it."""
        context = self.one.context(step, 1, f"{self.one.run}, step {step}, part {part}")
        header = part_header(context=context, part=part)
        flats = {
            segment.parameter_index: torch.randn(each.shape, generator=self._generator).to(each.dtype)
            for segment, each in zip(self.one.segments, self.one.zeros(), strict=True)
        }
        return partial(self.shard.prepare_push(header, flats), ignore)

    def end(self, step: int) -> None:
        self.one.prepare(step, (0, 0, PARTS))
        self.one.update(step)
        self.transport.release()

    def weights(self, steps: int) -> torch.Tensor:
        return self.one.flat(self.one.gather(steps)[1])


def undisturbed(server: ShardServer, layout: UnitLayout, steps: int) -> torch.Tensor:
    with Trainer(server, run="undisturbed", layout=layout) as trainer:
        for step in range(steps):
            for part in range(PARTS):
                trainer.prepare(step, part)()
            trainer.end(step)
        return trainer.weights(steps)


def assert_nothing_is_left(trainer: Trainer) -> None:
    """Checks that no gradient buffer counts against the budget once the sessions are closed."""
    trainer.connection.close()
    server, one = trainer.server, trainer.one
    server.until(lambda: not server.shm._open, "the transports are closed")  # an empty buffer has no bytes to wait for
    others = sum(shard.size_bytes for run in server.store.runs.values() for shard in run.shards.values())
    server.until(lambda: server.store.memory._shared_bytes == others, "gradient buffers are released")
    assert (server.taken_bytes(), server.unreserved_bytes()) == (0, 0)
    assert server.evaluate(lambda: one.shard.gradient.quota._free_count) == one.dp


@pytest.mark.parametrize("layout", [MIXED, EMPTY], ids=["mixed", "empty"])
@pytest.mark.parametrize("broken_part", range(PARTS))
def test_gradient_of_a_broken_session_is_pushed_over_the_next(
    server: ShardServer, layout: UnitLayout, broken_part: int
) -> None:
    expected = undisturbed(server, layout, 2)
    server.until(lambda: not server.shm._open, "the other trainer is gone")
    with Trainer(server, layout=layout) as trainer:
        for step in range(2):
            for part in range(PARTS):
                push = trainer.prepare(step, part)
                if part == broken_part:
                    before = trainer.transport
                    trainer.break_session()
                push()
            assert trainer.transport is not before
            trainer.end(step)
        assert trainer.connection.copies_gradients
        assert torch.equal(trainer.weights(2), expected)
        assert_nothing_is_left(trainer)


def break_once(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Breaks the session while the server answers the next ReduceGradientBuffer."""
    adopt, shm, calls = Push.adopt, trainer.server.shm, [trainer.transport.session]

    async def breaking(push: Push, gradient_buffer: SharedGradientBuffer, wait_s: float) -> bool:
        if not calls:
            return await adopt(push, gradient_buffer, wait_s)
        if when == "the answer is lost":
            await adopt(push, gradient_buffer, wait_s)
        calls.pop().cut()
        async with asyncio.timeout(20.0):
            # The session ends when the server sees its stream cancelled.
            while shm._open:
                await asyncio.sleep(0)
        if when == "the push meets a closed transport":
            return await adopt(push, gradient_buffer, wait_s)
        raise UnavailableError("the connection was lost")

    monkeypatch.setattr(Push, "adopt", breaking)


@pytest.mark.parametrize("when", ["the request is lost", "the push meets a closed transport", "the answer is lost"])
@pytest.mark.parametrize("broken_part", range(PARTS))
def test_session_that_breaks_during_a_push_is_replaced(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch, broken_part: int, when: str
) -> None:
    expected = undisturbed(server, MIXED, 2)
    server.until(lambda: not server.shm._open, "the other trainer is gone")
    with Trainer(server) as trainer:
        for step in range(2):
            for part in range(PARTS):
                if part == broken_part:
                    before = trainer.transport
                    break_once(trainer, monkeypatch, when)
                trainer.prepare(step, part)()
                monkeypatch.undo()
            assert trainer.transport is not before
            trainer.end(step)
        run = server.store.run("r")
        assert server.evaluate(lambda: run.duplicate_count) == (2 if when == "the answer is lost" else 0)
        assert torch.equal(trainer.weights(2), expected)
        assert_nothing_is_left(trainer)


@pytest.mark.parametrize("refused", ["create_sealed", "create"], ids=["a gradient buffer", "an shm session"])
@pytest.mark.parametrize("when", ["nothing was sent", "the request is lost", "the answer is lost"])
def test_gradient_of_a_broken_session_is_streamed_when_memory_is_full(
    server: ShardServer,
    shared: SharedMemory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
    when: str,
) -> None:
    expected = undisturbed(server, MIXED, 1)

    def full(*_: object) -> Any:
        raise CapacityError("the shared memory is full")

    server.until(lambda: not server.shm._open, "the other trainer is gone")
    with Trainer(server, transports="shm,grpc") as trainer:
        push = trainer.prepare(0, 0)
        if when == "nothing was sent":
            trainer.break_session()
        else:
            break_once(trainer, monkeypatch, when)
        monkeypatch.setattr(shared, refused, full)
        push()
        assert not trainer.connection.copies_gradients
        trainer.prepare(0, 1)()
        trainer.end(0)
        assert torch.equal(trainer.weights(1), expected)
        assert_nothing_is_left(trainer)
    assert "no shared memory for gradients, sending them over grpc: the shared memory is full" in caplog.text


def test_session_that_breaks_while_a_buffer_is_opened_is_replaced(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Trainer(server) as trainer:
        first = trainer.transport

        def breaking(name: str) -> Any:
            trainer.break_session()
            return first._open_gradient_buffer(name)

        monkeypatch.setattr(first._gradient_buffers, "_create", breaking)
        for part in range(PARTS):
            trainer.prepare(0, part)()
        trainer.end(0)
        assert trainer.transport is not first
        assert trainer.one.gather()[0] == 1
        assert_nothing_is_left(trainer)


@pytest.mark.parametrize("when", ["as the gradient is copied", "as it is pushed again"])
def test_session_that_breaks_before_a_buffer_is_mapped_is_replaced(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The server has named the file of the buffer, and removes it with the session."""
    with Trainer(server) as trainer:
        push = trainer.prepare(0, 0) if when == "as it is pushed again" else None
        first, call, broken = trainer.transport, ShardClient.call, list[ShmTransport]()
        if push is not None:
            trainer.break_session()

        def breaking(client: ShardClient, name: str, *arguments: Any, **options: Any) -> Any:
            answer = call(client, name, *arguments, **options)
            if name == "OpenGradientBuffer" and not broken:
                broken.append(trainer.transport)
                trainer.break_session()
            return answer

        monkeypatch.setattr(ShardClient, "call", breaking)
        monkeypatch.setattr(trainer.connection.policy, "asks", True)
        monkeypatch.setattr(trainer.connection.policy, "wait_limit_s", 20.0)
        (push or trainer.prepare(0, 0))()
        trainer.prepare(0, 1)()
        trainer.end(0)
        assert broken and trainer.transport is not broken[0]
        assert (broken[0] is first) == (push is None)
        assert trainer.connection.copies_gradients
        assert trainer.one.gather()[0] == 1
        assert_nothing_is_left(trainer)


def over_shared(connection: ServerConnection, action: Callable[[Any], Any]) -> Any:
    """Runs an action on the transport through shared memory. Repeats it when its session broke."""
    return connection.resending.run(
        lambda server, _: action(server.transports.require_shared()), resending.SHARED_TRANSFER
    )


def test_session_that_breaks_during_locate_is_replaced(server: ShardServer) -> None:
    with Trainer(server) as trainer:
        first, seen = trainer.transport, []

        def locate(transport: ShmTransport) -> int:
            seen.append(transport)
            if transport is first:
                trainer.break_session()
            return transport.locate(trainer.shard.address, 0, timeout_s=20.0).version

        assert over_shared(trainer.connection, locate) == 0
        assert seen == [first, trainer.transport]


def test_a_segment_is_located_over_the_next_session(server: ShardServer) -> None:
    with Trainer(server) as trainer:
        first = trainer.transport
        located = trainer.connection.locate(trainer.shard.address, 0, wait_limit_s=20.0)
        assert located is not None
        trainer.break_session()
        assert trainer.connection.locate(trainer.shard.address, 0, wait_limit_s=20.0) == located
        assert trainer.transport is not first


def test_error_on_an_intact_session_is_not_retried(
    server: ShardServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwell.transport.server_connection._NOTICE_S", 0.0)
    with Trainer(server) as trainer:
        seen = []

        def refused(transport: ShmTransport) -> None:
            seen.append(transport)
            raise ConflictError("no")

        with pytest.raises(ConflictError, match=r"^no$"):
            over_shared(trainer.connection, refused)
        assert seen == [trainer.transport]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
