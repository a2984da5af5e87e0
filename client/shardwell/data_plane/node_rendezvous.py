"""Where the trainers of a node agree, round by round, whether all of them exchange the same bytes now.

A collective cannot be taken back, and hangs if one member does not come. So nobody begins one before everybody is
known to stand at it: each notes its arrival on a rendezvous, a page of shared memory; who arrives last finds all there.
Whoever has waited for too long calls the round off, and who comes later reads that. One lock decides which was first.

Each member holds a lock on a file of its own for as long as it takes part. The kernel takes it from a process
that dies, so the others learn of that while they wait.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass

from shardwell.data_plane.host_folder import HostFolder, locked, polls, try_lock
from shardwell.transport.shared_vector import map_shared
from shardwell_wire.shared_files import open_file

_RENDEZVOUS, _MEMBER = "rendezvous", "member-"
_RECORD = struct.Struct("<5q")
_LOCK_LIMIT_S = 5.0
"""The lock is held for microseconds, unless whoever holds it was stopped."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _ROLL_CALL_S = 0.0001, 0.001, 0.05


class Outcome(enum.IntEnum):
    """What becomes of a round."""

    OPEN = 0
    """Not all members are there yet."""
    TOGETHER = 1
    """All are there and want the same: none of them rounds away any more."""
    APART = 2
    """One wanted something else, or did not come: each goes on by itself."""


class MemberGoneError(Exception):
    """A member died or left."""


@dataclass(order=True, frozen=True, slots=True)
class Round:
    """Rounds rise: who is at one has passed all lower ones."""

    version: int
    number: int
    """Of the rounds of a version, from 0."""


CONNECTED = Round(-1, 1)
"""All members can reach each other: before every version."""

_BEFORE_ALL = Round(-1, 0)


@dataclass(slots=True)
class _Record:
    """The highest round that anybody has come to."""

    version: int
    number: int
    what: int
    num_there: int
    outcome: int

    @property
    def this_round(self) -> Round:
        blank = not self.num_there and self.outcome == Outcome.OPEN  # zeros, as a file grows
        return _BEFORE_ALL if blank else Round(self.version, self.number)


class NodeRendezvous:
    """One member's view of the rendezvous. Used by one thread; ``close`` from any.

    Args:
        folder: That the members share, and nobody else; the rendezvous leaves it when it is closed.
        rank: This member, from 0.
        size: How many there are.

    Raises:
        OSError: The memory cannot be mapped, or somebody else is this member.
    """

    def __init__(self, folder: HostFolder, rank: int, size: int) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self._closed, self._is_inside = threading.Event(), True
        self._leaving = threading.Lock()
        self._presence = open_file(self._member_path(rank), write=True, create=True)
        try:
            descriptor = open_file(folder.path / _RENDEZVOUS, write=True, create=True)
        except BaseException:
            os.close(self._presence)
            raise
        try:
            # Another may be looking at this moment whether it is locked.
            if not any(try_lock(self._presence) for _ in polls(_LOCK_LIMIT_S, self._closed)):
                raise BlockingIOError(errno.EWOULDBLOCK, "another process is this member", self._member_path(rank))
            os.ftruncate(descriptor, mmap.PAGESIZE)
            self._memory = map_shared(descriptor, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(self._presence)
            raise
        finally:
            os.close(descriptor)

    def meet(self, limit_s: float) -> bool:
        """Waits until all members are there; returns whether they came."""
        return any(not self._missing() for _ in polls(limit_s, self._closed))

    def decide(self, this_round: Round, what: int, patience_s: float) -> Outcome:
        """Comes to a round, and waits for the others.

        Args:
            round: Higher than all that this member came to.
            what: Of which the members must want the same.
            patience_s: How long to wait for them.

        Returns:
            ``TOGETHER`` for all members, or ``APART`` for all.

        Raises:
            MemberGoneError: One is not there any more, so the round is off.
            TimeoutError: The rendezvous's lock was not to be had.
        """
        with self._changing() as record:
            if record.this_round < this_round:
                record.version, record.number = this_round.version, this_round.number
                record.what, record.num_there, record.outcome = what, 0, Outcome.OPEN
            elif record.this_round > this_round or record.outcome != Outcome.OPEN:
                return Outcome.APART
            record.num_there += 1
            if record.what != what:
                record.outcome = Outcome.APART
            elif record.num_there == self._size:
                record.outcome = Outcome.TOGETHER
        return self._await(this_round, patience_s)

    def call_off(self, this_round: Round) -> Outcome:
        """Has a round end apart unless all have come to it; returns what it ended as. Raises as ``decide``."""
        with self._changing() as record:
            if record.this_round < this_round:
                record.version, record.number, record.num_there = this_round.version, this_round.number, 0
                record.outcome = Outcome.APART
            elif record.this_round > this_round:
                return Outcome.APART
            elif record.outcome == Outcome.OPEN:
                record.outcome = Outcome.APART
            return Outcome(record.outcome)

    def leave(self) -> None:
        """Is no member from now on; the others find out at their next round. Harmless to repeat."""
        with self._leaving:  # two threads would close the descriptor twice, and it may be another file's by then
            if not self._closed.is_set():
                self._closed.set()
                fcntl.flock(self._presence, fcntl.LOCK_UN)
                os.close(self._presence)

    def close(self) -> None:
        """Leaves the folder, too; harmless to repeat.

        Not as soon as a member is found dead: the kernel may not have taken all of its locks yet, and the folder goes
        with the last who is in it.
        """
        self.leave()
        if self._is_inside:
            self._is_inside = False
            self._folder.close()

    def _await(self, this_round: Round, patience_s: float) -> Outcome:
        started = roll_call = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        while True:
            record = self._read()
            if record.this_round != this_round:  # of those who agree none goes on before all have exchanged
                return Outcome.APART
            if record.outcome != Outcome.OPEN:
                return Outcome(record.outcome)
            if self._closed.is_set():
                raise MemberGoneError("this trainer left")
            now = time.monotonic()
            if now - roll_call > _ROLL_CALL_S:
                roll_call = now
                if missing := self._missing():
                    if self.call_off(this_round) == Outcome.TOGETHER:
                        return Outcome.TOGETHER
                    raise MemberGoneError(f"member {missing[0]} of {self._size} is gone")
            if now - started > patience_s:
                return self.call_off(this_round)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank and not self._is_there(rank)]

    def _is_there(self, rank: int) -> bool:
        try:
            descriptor = open_file(self._member_path(rank), write=True)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(descriptor)
        finally:
            os.close(descriptor)

    def _member_path(self, rank: int) -> str:
        return str(self._folder.path / f"{_MEMBER}{rank}")

    @contextmanager
    def _changing(self) -> Iterator[_Record]:
        with locked(self._folder.path / _RENDEZVOUS, _LOCK_LIMIT_S, self._closed):
            record = self._read()
            yield record
            # In one copy: pack_into clears the fields first, and who waits reads without the lock.
            self._memory[: _RECORD.size] = _RECORD.pack(*astuple(record))

    def _read(self) -> _Record:
        return _Record(*_RECORD.unpack_from(self._memory, 0))
