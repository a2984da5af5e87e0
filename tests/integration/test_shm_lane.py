"""The lane through shared memory on a real server: the same bits and errors as over gRPC, and nothing left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.data_plane.remote_shard import RemoteShard, Wire
from shardwell.data_plane.server_connection import ServerConnection
from shardwell.data_plane.shared_vector import SegmentPlace, SharedVector
from shardwell.data_plane.shm_lane import ShmLane
from shardwell_server.shard.mailboxes import Mailbox
from shardwell_server.shard.shared_memory import SharedMemory
from shardwell_wire.errors import (
    CapacityError,
    ConflictError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
    VersionGoneError,
)
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, shard_pb2
from shardwell_wire.wire_dtypes import Piece
from tests.support.shard_server import (
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

AS_STORED = common_pb2.WIRE_DTYPE_UNSPECIFIED
EMPTY = layout_of(a=((0,), "float32"))


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    with closing(SharedMemory()) as made:
        yield made


@pytest.fixture
def server(shared: SharedMemory) -> Iterator[ShardServer]:
    with ShardServer(shared=shared) as running:
        yield running
        running.until(lambda: not running.shm._open, "the lanes are closed")


def header(
    one: OneUnit, *, step: int = 0, rank: int = 0, epoch: int = 1, **changes: Any
) -> shard_pb2.ReduceScatterHeader:
    fields = {
        "context": one.context(step, epoch),
        "unit": one.layout.unit,
        "dp_rank": rank,
        "parameter_indices": [segment.parameter_index for segment in one.segments],
        "start_bytes": one.start,
        "stop_bytes": one.stop,
    }
    return shard_pb2.ReduceScatterHeader(**{**fields, **changes})


class LanedUnit:
    """One unit of a server, reached over a shm lane."""

    def __init__(self, one: OneUnit) -> None:
        self.one, self.server = one, one.server
        self.lane = ShmLane(self.server.client, one.run, timeout_s=20.0)

    def __enter__(self) -> LanedUnit:
        return self

    def __exit__(self, *_: object) -> None:
        self.lane.close()

    def locate(self, version: int | None = None, *, timeout_s: float = 20.0) -> shard_pb2.LocateShardResponse:
        return self.lane.locate(self.one.layout.unit, version, timeout_s=timeout_s, retry_for_s=0.0)

    def vector(self) -> SharedVector:
        path = self.locate().segment.path
        return SharedVector(self.one.layout.unit, [SegmentPlace(path, self.one.start, self.one.stop)])

    def header(self, **options: Any) -> shard_pb2.ReduceScatterHeader:
        return header(self.one, **options)

    def push(self, gradients: list[torch.Tensor], **changes: Any) -> None:
        pieces = [
            Piece(segment.start_bytes, gradient) for segment, gradient in zip(self.one.segments, gradients, strict=True)
        ]
        laid = self.lane.lay(self.header(**changes), pieces, AS_STORED)
        self.lane.hand_over(laid, timeout_s=20.0, retry_for_s=0.0)

    def open_mailbox(self, **changes: Any) -> shard_pb2.OpenMailboxResponse:
        fields = {"run": self.one.run, "unit": self.one.layout.unit, "lane": self.lane._name}
        answer: shard_pb2.OpenMailboxResponse = self.server.call(
            "OpenMailbox", shard_pb2.OpenMailboxRequest(**{**fields, **changes})
        )
        return answer

    def reduce(self, mailbox: int, *, lane: str | None = None, **changes: Any) -> shard_pb2.ReduceMailboxResponse:
        request = shard_pb2.ReduceMailboxRequest(
            header=self.header(**changes), lane=self.lane._name if lane is None else lane, mailbox=mailbox
        )
        answer: shard_pb2.ReduceMailboxResponse = self.server.call("ReduceMailbox", request)
        return answer

    def mailboxes(self) -> list[Mailbox]:
        """Those that the server has for the lane."""
        return self.server.look(lambda: list(self.server.shm._open[self.lane._name]._mailboxes.values()))


@pytest.fixture
def laned(server: ShardServer) -> Iterator[LanedUnit]:
    with LanedUnit(unit(server, dp=2)) as made:
        yield made


def shared_bytes(server: ShardServer) -> int:
    return server.look(lambda: server.store.memory._shared_bytes)


def assert_only_parameters(one: OneUnit) -> None:
    """No mailbox counts against the budget, and nothing is staged."""
    server = one.server
    server.until(lambda: server.store.memory._shared_bytes == one.size, "mailboxes are given back")
    assert (server.taken_bytes(), server.staged_bytes()) == (0, 0)
    assert server.look(lambda: one.shard.contribution_cover._free_count) == one.dp


def fill(path: str, value: float) -> None:
    """Fills a mailbox as a trainer does."""
    size = Path(path).stat().st_size
    torch.from_file(path, shared=True, size=size, dtype=torch.uint8).view(torch.float32).fill_(value)


# Reading.


def test_a_shard_is_read_where_it_lies_and_seen_to_change(laned: LanedUnit) -> None:
    one = laned.one
    vector = laned.vector()
    assert vector.shows(0)
    train(one, 0)
    assert laned.locate(1).version == 1
    assert vector.shows(1)
    assert_all(one.split(vector.bytes), -1.0)
    with pytest.raises(VersionGoneError):
        vector.check(0)
    assert laned.locate().segment.path == laned.locate(1).segment.path


def test_locating_waits_for_the_version(laned: LanedUnit) -> None:
    waiting = in_background(partial(laned.locate, 1))
    laned.server.until(lambda: len(laned.one.shard.values._changed._waiters) == 1, "somebody waits")
    train(laned.one, 0)
    assert next(waiting).version == 1


def test_a_version_that_does_not_come_or_is_gone(laned: LanedUnit) -> None:
    error = error_of(lambda: laned.locate(1, timeout_s=0.2))
    assert isinstance(error, DeadlineError)
    train(laned.one, 0)
    assert isinstance(error_of(lambda: laned.locate(0)), VersionGoneError)


def test_a_deleted_run_is_seen_in_the_segment(laned: LanedUnit) -> None:
    vector, path = laned.vector(), laned.locate().segment.path
    laned.one.drop()
    assert not vector.shows(0)
    assert not Path(path).exists()
    assert isinstance(error_of(laned.locate), NotFoundError)


# Pushing.


@pytest.mark.parametrize("layout", [MIXED, PLAIN, EMPTY], ids=["mixed", "plain", "empty"])
def test_bits_are_those_of_grpc(server: ShardServer, layout: UnitLayout) -> None:
    """Two parts of two ranks, of which each goes one way in one run and the other way in the other."""
    generator = torch.Generator().manual_seed(1)
    results = []
    gradients: list[list[torch.Tensor]] = []
    for run in ("streams", "mailboxes", "both"):
        with LanedUnit(unit(server, layout, dp=2, run=run)) as laned:
            one = laned.one
            gradients = gradients or [
                [torch.randn(each.shape, generator=generator).to(each.dtype) for each in one.zeros()] for _ in range(4)
            ]
            for number, (part, rank) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
                through_mailbox = run == "mailboxes" or (run == "both" and part != rank)
                push = laned.push if through_mailbox else one.push
                push(gradients[number], rank=rank, part=part)
            one.prepare(0, (0, 0, 2), (1, 0, 2))
            one.update(0)
            results.append(one.flat(one.gather(1)[1]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_later_parts_leave_their_mailbox_free(laned: LanedUnit) -> None:
    for part in range(4):
        laned.push(laned.one.filled(1.0), part=part)
    assert sorted(mailbox.held for mailbox in laned.mailboxes()) == [False, True]
    laned.push(laned.one.filled(1.0), rank=1)
    laned.one.prepare(0, (0, 0, 4), (1, 0, 1))
    laned.one.update(0)
    assert_all(laned.one.gather(1)[1], -2.5)
    assert [mailbox.held for mailbox in laned.mailboxes()] == [False, False]


def test_mailboxes_are_used_again_in_the_next_step(laned: LanedUnit) -> None:
    for step in range(3):
        for rank in (0, 1):
            laned.push(laned.one.filled(1.0), step=step, rank=rank)
        laned.one.prepare(step)
        laned.one.update(step)
        laned.lane.release()
    assert len(laned.mailboxes()) == 2
    assert_all(laned.one.gather(3)[1], -3.0)


def test_a_duplicate_is_acknowledged_and_its_mailbox_stays_free(laned: LanedUnit) -> None:
    laned.one.push(laned.one.filled(1.0))
    mailbox = laned.open_mailbox()
    fill(mailbox.path, 5.0)
    answer = laned.reduce(mailbox.mailbox)
    assert (answer.duplicate, answer.adopted) == (True, False)
    laned.one.push(laned.one.filled(1.0), rank=1)
    laned.one.prepare(0)
    laned.one.update(0)
    assert_all(laned.one.gather(1)[1], -1.0)


@pytest.mark.parametrize("part", [0, 1])
def test_the_same_again_after_the_answer_was_lost(laned: LanedUnit, part: int) -> None:
    for number in range(part):
        laned.one.push(laned.one.filled(1.0), part=number)
    mailbox = laned.open_mailbox()
    fill(mailbox.path, 1.0)
    answers = [laned.reduce(mailbox.mailbox, part=part) for _ in range(2)]
    assert [answer.duplicate for answer in answers] == [False, True]
    assert [answer.adopted for answer in answers] == [part == 0] * 2
    laned.one.push(laned.one.zeros(), rank=1)
    laned.one.prepare(0, (0, 0, part + 1), (1, 0, 1))
    laned.one.update(0)
    assert_all(laned.one.gather(1)[1], -(part + 1) / 2)


def test_a_mailbox_is_one_contribution_only(laned: LanedUnit) -> None:
    mailbox = laned.open_mailbox()
    assert laned.reduce(mailbox.mailbox).adopted
    for changes in ({"rank": 1}, {"part": 1}, {"attempt": 1}):
        error = error_of(partial(laned.reduce, mailbox.mailbox, **changes))
        assert isinstance(error, StepStateError)
        assert "is a contribution: take another one" in str(error)
    laned.one.fence(0, (0, 1, 1))  # withdrawn
    assert laned.reduce(mailbox.mailbox, attempt=1).adopted


def test_stale_epochs_attempts_and_steps_are_refused_and_change_nothing(laned: LanedUnit) -> None:
    one = laned.one
    one.fence(0, (0, 5, 3))
    mailbox = laned.open_mailbox()
    refused: list[tuple[type[ShardwellError], dict[str, Any]]] = [
        (StaleEpochError, {"epoch": 4, "attempt": 3}),
        (StaleEpochError, {"epoch": 5, "attempt": 2}),
        (StepStateError, {"epoch": 5, "attempt": 3, "step": 1}),
        (StepStateError, {"epoch": 5, "attempt": 3, "part": 1}),
    ]
    for kind, changes in refused:
        assert type(error_of(partial(laned.reduce, mailbox.mailbox, **changes))) is kind
    assert laned.server.look(lambda: one.shard.contributions.by_rank) == {}
    assert laned.reduce(mailbox.mailbox, epoch=5, attempt=3).adopted
    one.push(one.filled(1.0), rank=1)
    one.prepare(0, (0, 3, 1), (1, 0, 1))
    assert isinstance(error_of(lambda: laned.push(one.zeros(), epoch=5, attempt=3, part=1)), StepStateError)
    one.update(0)
    assert type(error_of(lambda: laned.reduce(mailbox.mailbox, epoch=5, attempt=3))) is VersionGoneError


def test_a_mailbox_of_another_unit_or_lane(laned: LanedUnit) -> None:
    server, mailbox = laned.server, laned.open_mailbox()
    with LanedUnit(unit(server, layout_of("other", a=((60_000,), "float32")), index=1)) as other:
        error = error_of(lambda: other.reduce(mailbox.mailbox, lane=laned.lane._name))
        assert isinstance(error, InvalidRequestError)
        assert "is for unit 'u' of run 'r', not for unit 'other'" in str(error)
        assert isinstance(error_of(lambda: other.reduce(mailbox.mailbox)), ConflictError)
    assert laned.server.look(lambda: laned.one.shard.contributions.by_rank) == {}


def test_a_lane_is_for_one_run(laned: LanedUnit) -> None:
    with LanedUnit(unit(laned.server, run="other")) as other:
        for use in (
            lambda: laned.open_mailbox(run="other"),
            lambda: other.reduce(1, lane=laned.lane._name),
            lambda: laned.server.call(
                "LocateShard", shard_pb2.LocateShardRequest(run="other", unit="u", lane=laned.lane._name)
            ),
        ):
            error = error_of(use)
            assert isinstance(error, ConflictError)
            assert "open for run 'r', not for 'other'" in str(error)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"context": common_pb2.RequestContext(run="nowhere", epoch=1)}, NotFoundError),
        ({"unit": "nothing"}, NotFoundError),
        ({"rank": 2}, InvalidRequestError),
        ({"rank": (1 << 32) - 1}, InvalidRequestError),
        ({"stop_bytes": 64}, InvalidRequestError),
        ({"start_bytes": 1 << 63}, InvalidRequestError),
        ({"parameter_indices": [1, 0]}, InvalidRequestError),
        ({"parameter_indices": [0, 0]}, InvalidRequestError),
        ({"parameter_indices": [7]}, InvalidRequestError),
        ({"wire_dtype": 99}, InvalidRequestError),
        ({"wire_dtype": common_pb2.WIRE_DTYPE_BFLOAT16}, InvalidRequestError),
        ({"lane": ""}, ConflictError),
        ({"lane": "nowhere"}, ConflictError),
        ({"part": 1}, StepStateError),
    ],
)
def test_what_does_not_fit_is_refused(laned: LanedUnit, changes: dict[str, Any], error: type[ShardwellError]) -> None:
    mailbox = laned.open_mailbox()
    assert type(error_of(lambda: laned.reduce(mailbox.mailbox, **changes))) is error
    assert type(error_of(lambda: laned.reduce(mailbox.mailbox + 1))) is ConflictError
    assert laned.server.look(lambda: laned.one.shard.contributions.by_rank) == {}
    assert [each.held for each in laned.mailboxes()] == [False]


def test_nothing_at_all_is_refused(laned: LanedUnit) -> None:
    for rpc_name, request in (
        ("ReduceMailbox", shard_pb2.ReduceMailboxRequest()),
        ("OpenMailbox", shard_pb2.OpenMailboxRequest()),
        ("LocateShard", shard_pb2.LocateShardRequest()),
        ("OpenLane", shard_pb2.OpenLaneRequest()),
    ):
        error = error_of(lambda: list(laned.server.client.stream(rpc_name, request, timeout_s=20.0)))  # noqa: B023
        assert isinstance(error, NotFoundError | ConflictError)


# The end of a lane.


def test_closing_the_lane_gives_the_mailboxes_back(laned: LanedUnit) -> None:
    paths = [laned.open_mailbox().path for _ in range(3)]
    assert shared_bytes(laned.server) == 4 * laned.one.size
    assert laned.server.staged_bytes() == laned.one.size, "two are covered by the reservation"
    laned.lane.close()
    assert_only_parameters(laned.one)
    assert not any(Path(path).exists() for path in paths)
    assert isinstance(error_of(laned.open_mailbox), ConflictError)


def test_a_contribution_outlives_its_lane(laned: LanedUnit) -> None:
    one = laned.one
    laned.push(one.filled(3.0))
    (path,) = [mailbox.path for mailbox in laned.mailboxes()]
    laned.lane.close()
    laned.server.until(lambda: not Path(path).exists(), "the mailbox's name is gone")
    assert shared_bytes(laned.server) == 2 * one.size, "its memory is still in use"
    one.push(one.filled(1.0), rank=1)
    one.prepare(0)
    one.update(0)
    assert_all(one.gather(1)[1], -2.0)
    assert_only_parameters(one)


def test_a_lane_that_closes_while_its_push_waits_its_turn(laned: LanedUnit) -> None:
    """The push is void, and its mailbox is given back once."""
    one, server = laned.one, laned.server
    mailbox, run = laned.open_mailbox(), server.store.runs["r"]

    async def lock() -> None:
        await run._lock.acquire()

    asyncio.run_coroutine_threadsafe(lock(), server._loop).result(20)
    pushing = in_background(lambda: laned.reduce(mailbox.mailbox))
    server.until(lambda: bool(run._lock._waiters), "the push waits")
    laned.lane.close()
    server.until(lambda: not server.shm._open, "the lane is closed")
    server.look(run._lock.release)
    assert type(error_of(partial(next, pushing))) is ConflictError
    assert server.look(lambda: one.shard.contributions.by_rank) == {}
    assert_only_parameters(one)


def test_a_run_is_deleted_under_open_lanes(laned: LanedUnit) -> None:
    one, server = laned.one, laned.server
    laned.push(one.filled(1.0))
    laned.open_mailbox()
    one.drop()
    assert isinstance(error_of(lambda: laned.push(one.filled(1.0), rank=1)), NotFoundError)
    again = unit(server, dp=2)
    for mailbox in (1, 2):
        error = error_of(lambda: laned.reduce(mailbox))  # noqa: B023
        assert isinstance(error, InvalidRequestError), "it is laid out for what was deleted"
    laned.lane.close()
    assert_only_parameters(again)
    again.drop()
    assert shared_bytes(server) == server.staged_bytes() == server.taken_bytes() == 0
    assert server.look(lambda: server.store.memory.reserved_bytes) == 0


def test_a_mailbox_beyond_the_budget_is_refused() -> None:
    need = PLAIN.size_bytes * 4
    with closing(SharedMemory()) as shared, ShardServer(need + PLAIN.size_bytes, shared) as server:
        with LanedUnit(unit(server)) as laned:
            for _ in range(2):  # one that is reserved for, and one in the staging room
                laned.open_mailbox()
            error = error_of(laned.open_mailbox)
            assert isinstance(error, CapacityError)
            assert len(laned.mailboxes()) == 2
        assert_only_parameters(laned.one)
        with LanedUnit(laned.one) as again:
            again.open_mailbox()


# What a trainer makes of a server that offers less.


def connect(one: OneUnit, kinds: str = "shm,grpc") -> ServerConnection:
    return ServerConnection(one.server.client.address, one.run, kinds=kinds.split(","), chunk_bytes=64 << 10)


def remote(one: OneUnit, connection: ServerConnection) -> RemoteShard:
    return RemoteShard(one.run, one.layout, connection, one.start, one.stop, Wire(wait_limit_s=20.0))


def flats(one: OneUnit, value: float) -> dict[int, torch.Tensor]:
    return dict(enumerate(one.filled(value)))


def test_no_room_for_mailboxes_is_said_once_and_gradients_are_streamed(
    laned: LanedUnit, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise CapacityError("the shared memory is full")

    assert laned.server._shared is not None
    one = laned.one
    with closing(connect(one)) as connection:
        monkeypatch.setattr(laned.server._shared, "create", full)
        for rank in (0, 1):
            remote(one, connection).begin_send(laned.header(rank=rank), flats(one, 1.0))()
    one.prepare(0)
    one.update(0)
    assert_all(one.gather(1)[1], -1.0)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "no shared memory for gradients, sending them over grpc" in warnings[0]
    assert_only_parameters(one)


def test_a_server_without_shared_memory(caplog: pytest.LogCaptureFixture) -> None:
    with ShardServer() as server, closing(connect(one := unit(server))) as connection:
        assert (connection.kind, connection.shm, connection.pushes_through_shm) == ("grpc", None, False)
        assert "offers no lane" in caplog.text
        assert isinstance(error_of(lambda: connect(one, "shm")), UnavailableError)


def test_another_file_where_the_proof_should_be(
    laned: LanedUnit, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a host of the same name, or with another /dev/shm."""
    real = laned.server.shm._shared.create

    def elsewhere(size_bytes: int, what: str) -> Any:
        made = real(size_bytes, what)
        made.unlink()
        Path(made.path).write_bytes(bytes(size_bytes))
        return made

    monkeypatch.setattr(laned.server.shm._shared, "create", elsewhere)
    with closing(connect(laned.one)) as connection:
        assert connection.kind == "grpc"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "is another file here" in warning
    laned.server.until(lambda: len(laned.server.shm._open) == 1, "the lane that was of no use is closed")


def test_a_shard_that_found_no_room_in_shared_memory(
    server: ShardServer, shared: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise CapacityError("the shared memory is full")

    with monkeypatch.context() as patched:
        patched.setattr(shared, "create_segment", full)
        one = unit(server)
    with LanedUnit(one) as laned:
        error = error_of(laned.locate)
        assert isinstance(error, ConflictError)
        assert "is not in shared memory: the shared memory is full" in str(error)
        laned.push(one.filled(1.0))
        one.prepare(0)
        one.update(0)
    assert_all(one.gather(1)[1], -1.0)
    one.drop()
    assert server.taken_bytes() == shared_bytes(server) == 0


# Several trainers.


def test_two_trainers_and_one_that_plays_two_ranks(server: ShardServer) -> None:
    one = unit(server, dp=3)
    with ExitStack() as stack:
        first, second = (stack.enter_context(LanedUnit(one)) for _ in range(2))
        assert first.lane._name != second.lane._name
        for step in range(2):
            first.push(one.filled(1.0), step=step, rank=0)
            second.push(one.filled(2.0), step=step, rank=1)
            second.push(one.filled(6.0), step=step, rank=2)
            one.prepare(step)
            one.update(step)
            for laned in (first, second):
                laned.lane.release()
        assert [len(laned.mailboxes()) for laned in (first, second)] == [1, 2]
        assert torch.equal(first.vector().bytes, second.vector().bytes)
        assert_all(one.gather(2)[1], -6.0)
    assert_only_parameters(one)


def test_a_trainer_that_gives_ranks_up_gives_their_mailboxes_back() -> None:
    """Else whoever plays the ranks from now on finds no room where a server has none to spare."""
    budget = PLAIN.size_bytes * 2 * 6 + PLAIN.size_bytes  # two units, and one more buffer
    second = layout_of("v", a=((40_000,), "float32"), b=((20_000,), "float32"))
    with closing(SharedMemory()) as shared, ShardServer(budget, shared) as server:
        units = [unit(server, PLAIN, dp=2), unit(server, second, dp=2, index=1)]
        with closing(connect(units[0], "shm")) as both, closing(connect(units[0], "shm")) as late:
            for step, owners in enumerate([(both, both), (both, late)]):
                for one, (rank, owner) in product(units, enumerate(owners)):
                    remote(one, owner).begin_send(header(one, step=step, rank=rank), flats(one, 1.0))()
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
                assert both.shm is not None
                both.shm.release()
                both.give_mailboxes_back()
            assert late.pushes_through_shm
        assert [one.gather()[0] for one in units] == [2, 2]
        assert_all(units[0].gather()[1], -2.0)
