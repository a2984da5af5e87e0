"""Tests of the node rendezvous: all members see the same outcome, and none waits for a missing member."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

import pytest

from shardwell.peers.host_folder import HostFolder
from shardwell.peers.node_group import CONNECTED, MemberGoneError, NodeRendezvous, Outcome, Round

LONG_S, SHORT_S = 60.0, 0.05
MakeRendezvous = Callable[[int], list[NodeRendezvous]]


@pytest.fixture
def make() -> Iterator[MakeRendezvous]:
    """Creates the rendezvous of a group whose members are all present."""
    made: list[NodeRendezvous] = []

    def make_rendezvous(size: int) -> list[NodeRendezvous]:
        key = uuid.uuid4().hex
        made.extend(NodeRendezvous(HostFolder(key), rank, size) for rank in range(size))
        return made

    yield make_rendezvous
    for rendezvous in made:
        rendezvous.close()


def decide_all(rendezvous_points: list[NodeRendezvous], this_round: Round, what: list[int]) -> list[Outcome]:
    with ThreadPoolExecutor(len(rendezvous_points)) as threads:
        return list(
            threads.map(
                lambda pair: pair[0].decide(this_round, pair[1], LONG_S), zip(rendezvous_points, what, strict=True)
            )
        )


@pytest.mark.parametrize("size", [2, 3])
def test_members_with_the_same_unit_exchange(make: MakeRendezvous, size: int) -> None:
    rendezvous_points = make(size)
    for this_round in (CONNECTED, Round(0, 0), Round(0, 1), Round(1, 0)):
        assert decide_all(rendezvous_points, this_round, [0] * size) == [Outcome.EXCHANGE] * size


def test_members_with_different_units_cancel_the_round(make: MakeRendezvous) -> None:
    rendezvous_points = make(3)
    assert decide_all(rendezvous_points, Round(0, 0), [4, 5, 4]) == [Outcome.CANCELLED] * 3
    assert decide_all(rendezvous_points, Round(1, 0), [4, 4, 4]) == [Outcome.EXCHANGE] * 3


def test_late_member_finds_the_round_cancelled(make: MakeRendezvous) -> None:
    first, second = make(2)
    assert first.decide(Round(0, 0), 7, SHORT_S) is Outcome.CANCELLED
    assert second.decide(Round(0, 0), 7, LONG_S) is Outcome.CANCELLED
    assert decide_all([first, second], Round(1, 0), [7, 7]) == [Outcome.EXCHANGE] * 2


def test_member_at_a_lower_round_does_not_wait(make: MakeRendezvous) -> None:
    rendezvous_points = make(2)
    rounds = (Round(0, 3), Round(1, 0))
    with ThreadPoolExecutor(2) as threads:
        behind, ahead = threads.map(
            lambda pair: pair[0].decide(pair[1], 7, 1.0), zip(rendezvous_points, rounds, strict=True)
        )
    assert (behind, ahead) == (Outcome.CANCELLED, Outcome.CANCELLED)


def test_round_that_took_place_keeps_its_outcome_when_a_member_goes_on(make: MakeRendezvous) -> None:
    """A member that reads the page late must not take the round for cancelled."""
    ahead, behind = make(2)
    for this_round in (Round(0, 0), Round(3, 0)):
        assert decide_all([ahead, behind], this_round, [7, 7]) == [Outcome.EXCHANGE] * 2
        later = Round(this_round.version, 5)
        assert ahead.cancel(later) is Outcome.CANCELLED
        assert behind.cancel(this_round) is Outcome.EXCHANGE
        assert behind.decide(Round(this_round.version, 1), 7, LONG_S) is Outcome.CANCELLED
        assert behind.cancel(later) is Outcome.CANCELLED


def test_cancelled_round_returns_at_once(make: MakeRendezvous) -> None:
    first, second = make(2)
    assert first.cancel(Round(0, 0)) is Outcome.CANCELLED
    assert second.decide(Round(0, 0), 7, LONG_S) is Outcome.CANCELLED


def test_complete_round_cannot_be_cancelled(make: MakeRendezvous) -> None:
    rendezvous_points = make(2)
    assert decide_all(rendezvous_points, Round(0, 0), [7, 7]) == [Outcome.EXCHANGE] * 2
    assert rendezvous_points[0].cancel(Round(0, 0)) is Outcome.EXCHANGE


def test_member_that_left_is_detected(make: MakeRendezvous) -> None:
    rendezvous_points = make(3)
    rendezvous_points[1].close()
    with pytest.raises(MemberGoneError, match="member 1 of 3 is gone"):
        rendezvous_points[0].decide(Round(0, 0), 7, LONG_S)
    assert rendezvous_points[2].decide(Round(0, 0), 7, LONG_S) is Outcome.CANCELLED


_COME = """
import sys
from shardwell.peers.host_folder import HostFolder
from shardwell.peers.node_group import NodeRendezvous
rendezvous = NodeRendezvous(HostFolder(sys.argv[1]), 1, 2)
print("there", flush=True)
sys.stdin.read()
"""


def test_killed_member_is_detected() -> None:
    key = uuid.uuid4().hex
    rendezvous = NodeRendezvous(HostFolder(key), 0, 2)
    process = subprocess.Popen([sys.executable, "-c", _COME, key], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert rendezvous.meet(LONG_S)
        process.kill()
        with pytest.raises(MemberGoneError):
            rendezvous.decide(Round(0, 0), 7, LONG_S)
    finally:
        process.kill()
        process.communicate()
        rendezvous.close()


def test_meet_returns_false_without_all_members(make: MakeRendezvous) -> None:
    (alone,) = make(1)
    other = NodeRendezvous(HostFolder(uuid.uuid4().hex), 0, 2)
    assert alone.meet(SHORT_S)
    assert not other.meet(SHORT_S)
    other.close()


def test_second_process_with_the_same_rank_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwell.peers.node_group._LOCK_LIMIT_S", SHORT_S)
    key = uuid.uuid4().hex
    rendezvous, folder = NodeRendezvous(HostFolder(key), 0, 2), HostFolder(key)
    with pytest.raises(BlockingIOError, match="another process has this rank"):
        NodeRendezvous(folder, 0, 2)
    folder.close()
    rendezvous.close()


def test_concurrent_reads_see_whole_records(make: MakeRendezvous) -> None:
    rendezvous, _ = make(2)
    with rendezvous._changing() as record:
        record.version, record.number, record.unit, record.num_arrived = 7, 3, 5, 1
    writing = (
        "import sys; from shardwell.peers.host_folder import HostFolder; "
        "from shardwell.peers.node_group import NodeRendezvous; "
        "rendezvous = NodeRendezvous(HostFolder(sys.argv[1]), 2, 3); print('there', flush=True)\n"
        "while True:\n with rendezvous._changing(): pass"
    )
    key = rendezvous._folder.path.name.rpartition("-")[2]
    process = subprocess.Popen([sys.executable, "-c", writing, key], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        seen = {astuple(rendezvous._read()) for _ in range(200_000)}
    finally:
        process.kill()
        process.communicate()
    assert seen == {(7, 3, 5, 1, Outcome.OPEN, 0, 0)}
