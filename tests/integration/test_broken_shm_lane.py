"""A lane through shared memory breaks while a gradient lies in its mailbox: the step goes on, with the same bits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch

from shardwell.data_plane.lanes import unheard
from shardwell.data_plane.remote_shard import RemoteShard, Wire
from shardwell.data_plane.server_connection import ServerConnection
from shardwell.data_plane.shm_lane import ShmLane
from shardwell_server.shard.lanes.mailboxes import Mailbox
from shardwell_server.shard.memory.shared_memory import SharedMemory
from shardwell_server.shard.requests.pushes import Push
from shardwell_wire.errors import CapacityError, ConflictError, UnavailableError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import shard_pb2
from tests.support.shard_server import MIXED, ShardServer, layout_of, unit

EMPTY = layout_of(a=((0,), "float32"))
PARTS = 2


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    with closing(SharedMemory()) as made:
        yield made


@pytest.fixture
def server(shared: SharedMemory) -> Iterator[ShardServer]:
    with ShardServer(shared=shared) as running:
        yield running
        running.until(lambda: not running.shm._open, "the lanes are closed")


class Trainer:
    """Plays the only rank of a run: pushes its gradients in two parts per step."""

    def __init__(self, server: ShardServer, *, run: str = "r", layout: UnitLayout = MIXED, kinds: str = "shm") -> None:
        self.server, self.one = server, unit(server, layout, run=run)
        address = server.client.address
        self.connection = ServerConnection(address, self.one.identity, kinds=kinds.split(","), chunk_bytes=64 << 10)
        run = self.one.identity
        self.shard = RemoteShard(run, layout, self.connection, self.one.start, self.one.stop, Wire(wait_limit_s=20.0))
        self._generator = torch.Generator().manual_seed(7)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    @property
    def lane(self) -> ShmLane:
        assert self.connection.shm is not None
        return self.connection.shm

    def break_lane(self) -> None:
        """As if its connection had been lost; returns when the server knows, and has forgotten the lane."""
        self.lane._rpc._call.cancel()
        self.server.until(lambda: not self.server.shm._open, "the lane is closed")

    def lay(self, step: int, part: int) -> Callable[[], None]:
        """Lays a part of the next gradient in a mailbox; returns what hands it over."""
        header = shard_pb2.ReduceScatterHeader(
            context=self.one.context(step, 1, f"{self.one.run}, step {step}, part {part}"),
            unit=self.one.layout.unit,
            part=part,
            parameter_indices=[segment.parameter_index for segment in self.one.segments],
        )
        flats = {
            segment.parameter_index: torch.randn(each.shape, generator=self._generator).to(each.dtype)
            for segment, each in zip(self.one.segments, self.one.zeros(), strict=True)
        }
        return partial(self.shard.begin_send(header, flats), unheard)

    def end(self, step: int) -> None:
        self.one.prepare(step, (0, 0, PARTS))
        self.one.update(step)
        self.lane.release()

    def weights(self, steps: int) -> torch.Tensor:
        return self.one.flat(self.one.gather(steps)[1])


def undisturbed(server: ShardServer, layout: UnitLayout, steps: int) -> torch.Tensor:
    with Trainer(server, run="undisturbed", layout=layout) as trainer:
        for step in range(steps):
            for part in range(PARTS):
                trainer.lay(step, part)()
            trainer.end(step)
        return trainer.weights(steps)


def assert_nothing_is_left(trainer: Trainer) -> None:
    """No mailbox counts against the budget once the lanes are closed."""
    trainer.connection.close()
    server, one = trainer.server, trainer.one
    server.until(lambda: not server.shm._open, "the lanes are closed")  # an empty mailbox has no bytes to wait for
    others = sum(shard.size_bytes for run in server.store.runs.values() for shard in run.shards.values())
    server.until(lambda: server.store.memory._shared_bytes == others, "mailboxes are given back")
    assert (server.taken_bytes(), server.staged_bytes()) == (0, 0)
    assert server.look(lambda: one.shard.contribution_cover._free_count) == one.dp


@pytest.mark.parametrize("layout", [MIXED, EMPTY], ids=["mixed", "empty"])
@pytest.mark.parametrize("broken_part", range(PARTS))
def test_a_gradient_in_a_mailbox_of_a_lane_that_is_gone(
    server: ShardServer, layout: UnitLayout, broken_part: int
) -> None:
    expected = undisturbed(server, layout, 2)
    server.until(lambda: not server.shm._open, "the other trainer is gone")
    with Trainer(server, layout=layout) as trainer:
        for step in range(2):
            for part in range(PARTS):
                hand_over = trainer.lay(step, part)
                if part == broken_part:
                    before = trainer.lane
                    trainer.break_lane()
                hand_over()
            assert trainer.lane is not before
            trainer.end(step)
        assert trainer.connection.pushes_through_shm
        assert torch.equal(trainer.weights(2), expected)
        assert_nothing_is_left(trainer)


def break_once(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Has the lane break while the server answers the next ReduceMailbox."""
    adopt, shm, calls = Push.adopt, trainer.server.shm, [trainer.lane._rpc._call]

    async def breaking(push: Push, mailbox: Mailbox) -> bool:
        if not calls:
            return await adopt(push, mailbox)
        if when == "the answer is lost":
            await adopt(push, mailbox)
        calls.pop().cancel()
        async with asyncio.timeout(20.0):
            while shm._open:
                await asyncio.sleep(0)
        if when == "the push meets a closed lane":
            return await adopt(push, mailbox)
        raise UnavailableError("the connection was lost")

    monkeypatch.setattr(Push, "adopt", breaking)


@pytest.mark.parametrize("when", ["the request is lost", "the push meets a closed lane", "the answer is lost"])
@pytest.mark.parametrize("broken_part", range(PARTS))
def test_a_lane_that_breaks_while_a_mailbox_is_handed_over(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch, broken_part: int, when: str
) -> None:
    expected = undisturbed(server, MIXED, 2)
    server.until(lambda: not server.shm._open, "the other trainer is gone")
    with Trainer(server) as trainer:
        for step in range(2):
            for part in range(PARTS):
                if part == broken_part:
                    before = trainer.lane
                    break_once(trainer, monkeypatch, when)
                trainer.lay(step, part)()
                monkeypatch.undo()
            assert trainer.lane is not before
            trainer.end(step)
        run = server.store.run("r")
        assert server.look(lambda: run.duplicate_count) == (2 if when == "the answer is lost" else 0)
        assert torch.equal(trainer.weights(2), expected)
        assert_nothing_is_left(trainer)


@pytest.mark.parametrize("refused", ["a mailbox", "a lane"])
@pytest.mark.parametrize("when", ["nothing was sent", "the request is lost", "the answer is lost"])
def test_without_room_for_it_in_another_mailbox_it_is_streamed(
    server: ShardServer,
    shared: SharedMemory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
    when: str,
) -> None:
    expected, create = undisturbed(server, MIXED, 1), shared.create

    def full(size_bytes: int, what: str) -> Any:
        if what.startswith(refused):
            raise CapacityError("the shared memory is full")
        return create(size_bytes, what)

    server.until(lambda: not server.shm._open, "the other trainer is gone")
    with Trainer(server, kinds="shm,grpc") as trainer:
        hand_over = trainer.lay(0, 0)
        if when == "nothing was sent":
            trainer.break_lane()
        else:
            break_once(trainer, monkeypatch, when)
        monkeypatch.setattr(shared, "create", full)
        hand_over()
        assert not trainer.connection.pushes_through_shm
        trainer.lay(0, 1)()
        trainer.end(0)
        assert torch.equal(trainer.weights(1), expected)
        assert_nothing_is_left(trainer)
    assert "no shared memory for gradients, sending them over grpc: the shared memory is full" in caplog.text


def test_a_lane_that_breaks_while_a_mailbox_is_opened(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with Trainer(server) as trainer:
        first = trainer.lane

        def breaking(name: str) -> Any:
            trainer.break_lane()
            return first._open_mailbox(name)

        monkeypatch.setattr(first._mailboxes, "_make", breaking)
        for part in range(PARTS):
            trainer.lay(0, part)()
        trainer.end(0)
        assert trainer.lane is not first
        assert trainer.one.gather()[0] == 1
        assert_nothing_is_left(trainer)


def test_a_lane_that_breaks_while_a_version_is_looked_for(server: ShardServer) -> None:
    with Trainer(server) as trainer:
        first, seen = trainer.lane, []

        def locate(lane: ShmLane) -> int:
            seen.append(lane)
            if lane is first:
                trainer.break_lane()
            return lane.locate(trainer.one.layout.unit, 0, timeout_s=20.0, retry_for_s=0.0).version

        assert trainer.connection.through_shm(locate) == 0
        assert seen == [first, trainer.lane]


def test_what_is_refused_on_a_lane_that_stands_is_not_tried_again(
    server: ShardServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwell.data_plane.server_connection._NOTICE_S", 0.0)
    with Trainer(server) as trainer:
        seen = []

        def refused(lane: ShmLane) -> None:
            seen.append(lane)
            raise ConflictError("no")

        with pytest.raises(ConflictError, match=r"^no$"):
            trainer.connection.through_shm(refused)
        assert seen == [trainer.lane]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
