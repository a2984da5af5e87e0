"""The lane through shared memory on a real server: the same bits and errors as over gRPC, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.data_plane.socket_lane import SocketLane
from shardwell_server.shard.lanes.shm_lane import PROOF_FILE_BYTES
from shardwell_server.shard.memory.shared_memory import SharedMemory
from shardwell_wire.errors import (
    AccessError,
    CapacityError,
    ConflictError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    VersionGoneError,
)
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import (
    MIXED,
    PLAIN,
    ShardServer,
    assert_all,
    error_of,
    in_background,
    layout_of,
    train,
    unit,
)
from tests.support.shm_lane import LanedUnit, assert_only_parameters, header, shared_bytes

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


@pytest.fixture(params=["grpc", "socket"])
def laned(server: ShardServer, request: pytest.FixtureRequest) -> Iterator[LanedUnit]:
    with LanedUnit(unit(server, dp=2), request.param) as made:
        yield made


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


def test_a_mailbox_that_is_never_handed_over_is_used_again(laned: LanedUnit) -> None:
    def interrupt(_: memoryview) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            laned.lane.lay(laned.header(), interrupt)
        laned.lane.lay(laned.header(rank=1), lambda memory: None)
        laned.lane.release(0)
        laned.lane.release(1)
    assert len(laned.mailboxes()) == 2


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
            lambda: laned.open_mailbox(run="other", run_id="id-of-other"),
            lambda: other.reduce(1, lane=laned.lane._name),
            lambda: laned.server.call(
                "LocateShard",
                shard_pb2.LocateShardRequest(run="other", run_id="id-of-other", unit="u", lane=laned.lane._name),
            ),
        ):
            error = error_of(use)
            assert isinstance(error, ConflictError)
            assert "open for run 'r' with id id-of-r, not for 'other' with id id-of-other" in str(error)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
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
        assert isinstance(error, InvalidRequestError)


# The end of a lane.


def test_closing_the_lane_gives_the_mailboxes_back(laned: LanedUnit) -> None:
    paths = [laned.open_mailbox().path for _ in range(3)]
    assert shared_bytes(laned.server) == 4 * laned.one.size
    assert laned.server.staged_bytes() == laned.one.size, "two are covered by the reservation"
    laned.lane.close()
    assert_only_parameters(laned.one)
    assert not any(Path(path).exists() for path in paths)
    assert isinstance(error_of(laned.open_mailbox), ConflictError)


def test_many_lanes_take_one_file_which_ends_with_the_last(laned: LanedUnit) -> None:
    server, one = laned.server, laned.one
    memory, folder = server.store.memory, Path(server.look(lambda: server.shm._proof.path)).parent  # type: ignore[union-attr]
    request = shard_pb2.OpenLaneRequest(run=one.run, run_id=one.identity.run_id, kind=common_pb2.LANE_KIND_SHM)
    before, count = server.look(lambda: memory.used_bytes), len(list(folder.iterdir()))
    lanes = [server.client.open("OpenLane", request, timeout_s=20.0) for _ in range(20)]
    assert len({lane.answer.lane for lane in lanes}) == 20
    assert {lane.answer.shm.path for lane in lanes} == {server.look(lambda: server.shm._proof.path)}  # type: ignore[union-attr]
    assert (server.look(lambda: memory.used_bytes), len(list(folder.iterdir()))) == (before, count)
    for lane in lanes:
        lane.end()
    laned.lane.close()
    server.until(lambda: not server.shm._open, "all lanes are closed")
    assert (server.look(lambda: memory.used_bytes), len(list(folder.iterdir()))) == (
        before - PROOF_FILE_BYTES,
        count - 1,
    )


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
    mailbox, run = laned.open_mailbox(), server.store.run("r")

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
    assert isinstance(error_of(lambda: laned.push(one.filled(1.0), rank=1)), ShardwellError)
    again = unit(server, dp=2, run_id="the-next")
    assert_only_parameters(again)
    assert server.look(lambda: again.shard.contributions.by_rank) == {}
    again.drop()
    assert shared_bytes(server) == server.staged_bytes() == server.taken_bytes() == 0
    assert server.look(lambda: server.store.memory.reserved_bytes) == 0


def test_a_mailbox_of_a_run_that_is_not_here(server: ShardServer) -> None:
    with LanedUnit(unit(server)) as laned:
        context = common_pb2.RequestContext(run="nowhere", run_id="id", epoch=1)
        assert type(error_of(lambda: laned.reduce(1, context=context))) is NotFoundError


def test_a_connection_goes_on_after_a_refusal_and_hands_over_for_its_own_run_only(server: ShardServer) -> None:
    with LanedUnit(unit(server), "socket") as laned, LanedUnit(unit(server, run="other")) as other:
        mine, theirs = laned.open_mailbox(), other.open_mailbox()
        assert type(error_of(lambda: laned.reduce(99))) is ConflictError
        context = other.one.context(0, 1)
        error = error_of(lambda: laned.reduce(theirs.mailbox, lane=other.lane._name, context=context))
        assert type(error) is AccessError
        assert "the lane was opened for run 'r' with id id-of-r, not for 'other' with id id-of-other" in str(error)
        assert laned.reduce(mine.mailbox).adopted
        assert server.look(lambda: len(server.sockets._connections)) == 1


def test_a_server_without_shared_memory_refuses_mailboxes_over_a_socket() -> None:
    with ShardServer() as server:
        one = unit(server)
        with closing(SocketLane(server.client, one.identity)) as lane:
            request = shard_pb2.ReduceMailboxRequest(header=header(one), lane="none", mailbox=1)
            error = error_of(lambda: lane.reduce_mailbox(request, timeout_s=20.0, retry_for_s=0.0))
    assert type(error) is ConflictError
    assert "this server offers no lane through shared memory" in str(error)


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
