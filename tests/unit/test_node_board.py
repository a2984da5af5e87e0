"""The board of a node: a turn ends the same way for everybody, and nobody waits for who is not there."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

import pytest

from shardwell.data_plane.host_folder import HostFolder
from shardwell.data_plane.node_board import CONNECTED, MemberGoneError, NodeBoard, Turn, Verdict

LONG_S, SHORT_S = 60.0, 0.05
MakeBoards = Callable[[int], list[NodeBoard]]


@pytest.fixture
def make() -> Iterator[MakeBoards]:
    """Makes the boards of a group in which everybody is there."""
    made: list[NodeBoard] = []

    def make_boards(size: int) -> list[NodeBoard]:
        key = uuid.uuid4().hex
        made.extend(NodeBoard(HostFolder(key), rank, size) for rank in range(size))
        return made

    yield make_boards
    for board in made:
        board.close()


def decide_all(boards: list[NodeBoard], turn: Turn, what: list[int]) -> list[Verdict]:
    with ThreadPoolExecutor(len(boards)) as threads:
        return list(threads.map(lambda pair: pair[0].decide(turn, pair[1], LONG_S), zip(boards, what, strict=True)))


@pytest.mark.parametrize("size", [2, 3])
def test_who_wants_the_same_goes_together(make: MakeBoards, size: int) -> None:
    boards = make(size)
    for turn in (CONNECTED, Turn(0, 0), Turn(0, 1), Turn(1, 0)):
        assert decide_all(boards, turn, [0] * size) == [Verdict.TOGETHER] * size


def test_who_wants_different_things_goes_apart(make: MakeBoards) -> None:
    boards = make(3)
    assert decide_all(boards, Turn(0, 0), [4, 5, 4]) == [Verdict.APART] * 3
    assert decide_all(boards, Turn(1, 0), [4, 4, 4]) == [Verdict.TOGETHER] * 3


def test_who_comes_too_late_finds_that_the_turn_is_off(make: MakeBoards) -> None:
    first, second = make(2)
    assert first.decide(Turn(0, 0), 7, SHORT_S) is Verdict.APART
    assert second.decide(Turn(0, 0), 7, LONG_S) is Verdict.APART
    assert decide_all([first, second], Turn(1, 0), [7, 7]) == [Verdict.TOGETHER] * 2


def test_who_waits_for_one_that_is_further_goes_on(make: MakeBoards) -> None:
    boards = make(2)
    turns = (Turn(0, 3), Turn(1, 0))
    with ThreadPoolExecutor(2) as threads:
        behind, ahead = threads.map(lambda pair: pair[0].decide(pair[1], 7, 1.0), zip(boards, turns, strict=True))
    assert (behind, ahead) == (Verdict.APART, Verdict.APART)


def test_a_turn_that_is_called_off_needs_no_waiting(make: MakeBoards) -> None:
    first, second = make(2)
    assert first.call_off(Turn(0, 0)) is Verdict.APART
    assert second.decide(Turn(0, 0), 7, LONG_S) is Verdict.APART


def test_a_turn_that_all_have_come_to_cannot_be_called_off(make: MakeBoards) -> None:
    boards = make(2)
    assert decide_all(boards, Turn(0, 0), [7, 7]) == [Verdict.TOGETHER] * 2
    assert boards[0].call_off(Turn(0, 0)) is Verdict.TOGETHER


def test_nobody_waits_for_one_that_left(make: MakeBoards) -> None:
    boards = make(3)
    boards[1].close()
    with pytest.raises(MemberGoneError, match="member 1 of 3 is gone"):
        boards[0].decide(Turn(0, 0), 7, LONG_S)
    assert boards[2].decide(Turn(0, 0), 7, LONG_S) is Verdict.APART


_COME = """
import sys
from shardwell.data_plane.host_folder import HostFolder
from shardwell.data_plane.node_board import NodeBoard
board = NodeBoard(HostFolder(sys.argv[1]), 1, 2)
print("there", flush=True)
sys.stdin.read()
"""


def test_nobody_waits_for_one_that_was_killed() -> None:
    key = uuid.uuid4().hex
    board = NodeBoard(HostFolder(key), 0, 2)
    process = subprocess.Popen([sys.executable, "-c", _COME, key], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert board.meet(LONG_S)
        process.kill()
        with pytest.raises(MemberGoneError):
            board.decide(Turn(0, 0), 7, LONG_S)
    finally:
        process.kill()
        process.communicate()
        board.close()


def test_a_meeting_ends_when_somebody_does_not_come(make: MakeBoards) -> None:
    (alone,) = make(1)
    other = NodeBoard(HostFolder(uuid.uuid4().hex), 0, 2)
    assert alone.meet(SHORT_S)
    assert not other.meet(SHORT_S)
    other.close()


def test_two_processes_cannot_be_the_same_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwell.data_plane.node_board._LOCK_LIMIT_S", SHORT_S)
    key = uuid.uuid4().hex
    board, folder = NodeBoard(HostFolder(key), 0, 2), HostFolder(key)
    with pytest.raises(BlockingIOError, match="another process is this member"):
        NodeBoard(folder, 0, 2)
    folder.close()
    board.close()


def test_who_looks_while_another_writes_sees_no_half_of_it(make: MakeBoards) -> None:
    board, _ = make(2)
    with board._changing() as record:
        record.version, record.number, record.what, record.num_there = 7, 3, 5, 1
    writing = (
        "import sys; from shardwell.data_plane.host_folder import HostFolder; "
        "from shardwell.data_plane.node_board import NodeBoard; "
        "board = NodeBoard(HostFolder(sys.argv[1]), 2, 3); print('there', flush=True)\n"
        "while True:\n with board._changing(): pass"
    )
    key = board._folder.path.name.rpartition("-")[2]
    process = subprocess.Popen([sys.executable, "-c", writing, key], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        seen = {astuple(board._read()) for _ in range(200_000)}
    finally:
        process.kill()
        process.communicate()
    assert seen == {(7, 3, 5, 1, Verdict.OPEN)}
