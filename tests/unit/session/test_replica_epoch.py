"""Void process groups of replicas: what a trainer learns from the coordinator, and when it raises ReplicaLostError."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shardwell.grid.process_group import end_connections, open_connections
from shardwell.membership.membership import Membership, ReplicaEpoch
from shardwell.options import JoinConfig
from shardwell.step.step_commit import StepCommitter
from shardwell_wire.connection.protocol_versions import own_versions
from shardwell_wire.errors import ReplicaLostError
from shardwell_wire.model.topology import World
from shardwell_wire.security.credentials import NO_CREDENTIALS
from shardwell_wire.v1 import coordinator_pb2

WAITING = coordinator_pb2.FinishWorkResponse(waiting_for=["rank 1"])
FINISHED = coordinator_pb2.FinishWorkResponse(all_finished=True)


class News:
    """A membership stream whose messages the test chooses."""

    def __init__(self) -> None:
        self._messages: queue.Queue[coordinator_pb2.KeepMembershipResponse | None] = queue.Queue()

    def tell(self, replica_epoch: int, replica_error: str = "") -> None:
        message = coordinator_pb2.KeepMembershipResponse(replica_epoch=replica_epoch, replica_error=replica_error)
        self._messages.put(message)

    def __iter__(self) -> Iterator[coordinator_pb2.KeepMembershipResponse]:
        while (message := self._messages.get()) is not None:
            yield message

    def end(self) -> None:
        self._messages.put(None)


class FakeCoordinator:
    """Answers a trainer of replica epoch 3. ``finish_work`` answers FinishWork."""

    address, credentials = "coordinator:1", NO_CREDENTIALS

    def __init__(self) -> None:
        self.news = News()
        self.waits: list[float] = []
        self.finish_work: Callable[[], coordinator_pb2.FinishWorkResponse] = lambda: WAITING

    def call(self, rpc_name: str, request: Any, **_: Any) -> Any:
        if rpc_name == "Join":
            world, version = World(tp=2).to_proto(), own_versions().newest
            return coordinator_pb2.JoinResponse(
                started=True,
                trainer="a",
                epoch=1,
                lease_s=60.0,
                config=coordinator_pb2.RunConfig(world=world),
                run_id="id",
                protocol_version=version,
                replica_epoch=3,
            )
        if rpc_name == "FinishWork":
            self.waits.append(request.wait_s)
            return self.finish_work()
        assert rpc_name == "Leave"
        return coordinator_pb2.LeaveResponse()

    def watch(self, rpc_name: str, _: Any) -> News:
        assert rpc_name == "KeepMembership"
        return self.news


@contextmanager
def joined() -> Iterator[tuple[FakeCoordinator, Membership, StepCommitter]]:
    coordinator = FakeCoordinator()
    membership = Membership(JoinConfig(run="r", address=coordinator.address), coordinator)  # type: ignore[arg-type]
    try:
        yield coordinator, membership, StepCommitter(membership)
    finally:
        membership.leave()


def answers(*responses: coordinator_pb2.FinishWorkResponse) -> Callable[[], coordinator_pb2.FinishWorkResponse]:
    left = iter(responses)
    return lambda: next(left)


def test_trainer_that_waits_for_a_step_learns_that_its_replica_has_lost_a_trainer() -> None:
    with joined() as (coordinator, membership, committer):
        membership.replica_epoch.form(3, dp_rank=5)
        coordinator.finish_work = answers(WAITING, WAITING, FINISHED)
        committer.finish_work(0, [], accept_work=True)
        assert set(coordinator.waits) == {1.0}, "a void group is noticed soon"
        told = queue.SimpleQueue[None]()
        membership.replica_epoch.when_void = lambda: told.put(None)
        coordinator.news.tell(4)
        told.get(timeout=20)
        coordinator.finish_work = lambda: WAITING
        with pytest.raises(ReplicaLostError, match=r"trainer of replica 5 was lost .*epoch 3, now 4.*start this"):
            committer.finish_work(0, [], accept_work=True)
        assert coordinator.waits[-1] == 0.0
        coordinator.finish_work = lambda: FINISHED
        committer.finish_work(0, [], accept_work=True)  # a trainer of the replica may have left after the last step
        membership.replica_epoch.close()
        coordinator.finish_work = answers(WAITING, FINISHED)
        committer.finish_work(0, [], accept_work=True)  # no group
        membership.replica_epoch.form(4, dp_rank=5)
        coordinator.finish_work = answers(WAITING, FINISHED)
        committer.finish_work(0, [], accept_work=True)  # the group is formed again


def test_trainer_without_a_group_waits_as_long_as_before() -> None:
    with joined() as (coordinator, membership, committer):
        coordinator.finish_work = answers(WAITING, FINISHED)
        membership.replica_epoch.announce(4)
        committer.finish_work(0, [], accept_work=True)
        assert set(coordinator.waits) == {10.0}


def test_trainer_learns_with_which_error_another_one_has_left() -> None:
    with joined() as (coordinator, membership, _):
        epoch = membership.replica_epoch
        epoch.form(3, dp_rank=5)
        assert not epoch.wait_until_void(0.0)
        coordinator.news.tell(4, "trainer 'b' (logical rank 1) has left with ValueError: bad batch")
        assert epoch.wait_until_void(20)
        with pytest.raises(
            ReplicaLostError, match=r"^trainer 'b' \(logical rank 1\) has left with ValueError: bad batch\. "
        ):
            epoch.require_valid()
        epoch.announce(5)
        assert epoch.error, "the newest epoch may have another reason"
        epoch.form(5, dp_rank=5)
        assert not epoch.error


def test_only_newer_epochs_make_a_group_void() -> None:
    epoch, calls = ReplicaEpoch(), list[int]()
    epoch.when_void = lambda: calls.append(len(calls))
    for announced in (2, 7, 3, 0):
        epoch.announce(announced)
    epoch.form(7, dp_rank=0)
    epoch.announce(5)
    epoch.announce(7)
    epoch.require_valid()
    epoch.form(8, dp_rank=0)  # the stream is late
    epoch.require_valid()
    assert not calls
    epoch.announce(9)
    epoch.announce(9)
    assert epoch.is_void and calls == [0]
    epoch.form(0, dp_rank=0)  # a replica of one trainer
    epoch.require_valid()


def test_connections_that_are_ended_fail_at_once_and_others_stay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = open_connections()
        pairs = []
        for _ in range(2):
            ours = socket.create_connection(server.getsockname())
            pairs.append((ours, server.accept()[0]))
        (first, peer), (second, other) = pairs
        try:
            made = open_connections() - before
            assert len(made) == 4
            peer.sendall(b"arrived")
            assert end_connections({each for each in made if each.local == first.getsockname()}) == 1
            assert (first.recv(16), first.recv(16), peer.recv(16)) == (b"arrived", b"", b"")
            other.sendall(b"x")
            assert second.recv(1) == b"x"
        finally:
            for each in (*pairs[0], *pairs[1]):
                each.close()
