"""Lanes through shared memory: trainers of this host map shards, lay gradients in mailboxes, update slices on desks."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shardwell_server.shard.lanes.mailboxes import Mailbox
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.shared_memory import SharedBuffer, SharedMemory
from shardwell_server.shard.memory.slice_desks import Desk
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire.codec import memory_at
from shardwell_wire.errors import ConflictError
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import shard_pb2

_PROOF_BYTES = 32
PROOF_FILE_BYTES = 1 << 20
"""Size of the file with the proof, which trainers also measure with."""


class ShmLane:
    """One trainer's mailboxes and desks.

    Args:
        run: The run that the lane is for.
        shared: Where mailboxes are made.
        memory: Whose budget they count against.
    """

    def __init__(self, run: RunIdentity, shared: SharedMemory, memory: Memory) -> None:
        self._run, self._shared, self._memory = run, shared, memory
        self._mailboxes: dict[int, Mailbox] = {}
        self._desks: dict[int, tuple[UnitShard, int, Desk]] = {}
        self._numbers = itertools.count(1)

    def check_run(self, run: RunIdentity) -> None:
        """Raises ConflictError for another run, also for one of the same name."""
        if run != self._run:
            raise ConflictError(
                f"the lane is open for run {self._run.name!r} with id {self._run.run_id}, not for {run.name!r} with id "
                f"{run.run_id}: open another lane"
            )

    def open_mailbox(self, shard: UnitShard) -> tuple[int, Mailbox]:
        """A new mailbox and its number.

        Raises:
            CapacityError: Beyond the memory budget, or the shared memory is full.
        """
        what = f"a mailbox for {shard.what}"
        room = self._memory.try_room(shard.size_bytes, shard.contribution_cover, what)
        try:
            shared = self._shared.create(shard.size_bytes, what)
        except BaseException:
            room.give()
            raise
        number = next(self._numbers)
        self._mailboxes[number] = Mailbox(shard, shared, room)
        return number, self._mailboxes[number]

    def mailbox(self, number: int) -> Mailbox:
        """Raises ConflictError if the lane has no such mailbox."""
        if number not in self._mailboxes:
            raise ConflictError(f"the lane has no mailbox {number}")
        return self._mailboxes[number]

    def desk(self, shard: UnitShard, dp_rank: int) -> tuple[int, Desk]:
        """The desk for a rank's slice, a new one if there is none that is free, and its number.

        What is staged on one stays staged, for the step may be about to commit: that desk is given up, and is gone
        once it is not needed.

        Raises:
            CapacityError: Beyond the memory budget, or the shared memory is full.
        """
        for number, (owner, rank, desk) in list(self._desks.items()):
            if owner is shard and rank == dp_rank and desk.held:
                shard.slices.close_desk(desk)
            if desk.closed:
                del self._desks[number]
            elif owner is shard and rank == dp_rank:
                return number, desk
        desk, number = shard.slices.open_desk(dp_rank), next(self._numbers)
        self._desks[number] = shard, dp_rank, desk
        return number, desk

    def opened_desk(self, number: int, shard: UnitShard, dp_rank: int) -> Desk:
        """Raises ConflictError if the lane has no such desk for a rank's slice."""
        owner, rank, desk = self._desks.get(number, (None, None, None))
        if desk is None or owner is not shard or rank != dp_rank:
            raise ConflictError(f"the lane has no desk {number} for {shard.what}, rank {dp_rank}")
        return desk

    def close(self) -> None:
        """Gives all mailboxes and desks up."""
        for mailbox in self._mailboxes.values():
            mailbox.close()
        self._mailboxes.clear()
        for shard, _, desk in self._desks.values():
            shard.slices.close_desk(desk)
        self._desks.clear()


class ShmLanes:
    """The lanes that are open, by name.

    Args:
        shared: Where mailboxes are made.
        memory: Whose budget they count against.
    """

    def __init__(self, shared: SharedMemory, memory: Memory) -> None:
        self._shared, self._memory = shared, memory
        self._open: dict[str, ShmLane] = {}
        self._proof: SharedBuffer | None = None

    @asynccontextmanager
    async def open(self, run: RunIdentity) -> AsyncIterator[shard_pb2.OpenLaneResponse]:
        """See ``LaneOffer.open``."""
        name, proof = secrets.token_hex(8), self._proof or self._prove()
        lane = self._open[name] = ShmLane(run, self._shared, self._memory)
        try:
            offer = shard_pb2.SharedMemoryOffer(path=proof.path, proof=bytes(_proof_in(proof)))
            yield shard_pb2.OpenLaneResponse(lane=name, shm=offer)
        finally:
            del self._open[name]
            lane.close()
            if not self._open:
                proof.unlink()
                self._memory.note_shared(-PROOF_FILE_BYTES)
                self._proof = None

    def _prove(self) -> SharedBuffer:
        """Makes the file that shows trainers that they share this memory: one for all lanes, while any is open."""
        self._proof = self._shared.create(PROOF_FILE_BYTES, "a lane")
        _proof_in(self._proof)[:] = secrets.token_bytes(_PROOF_BYTES)
        self._memory.note_shared(PROOF_FILE_BYTES)
        return self._proof

    def lane(self, name: str, run: RunIdentity) -> ShmLane:
        """An open lane of a run.

        Raises:
            ConflictError: It is not open, or for another run.
        """
        lane = self._open.get(name)
        if lane is None:
            raise ConflictError(f"no shm lane {name!r} is open here")
        lane.check_run(run)
        return lane


def _proof_in(file: SharedBuffer) -> memoryview:
    return memory_at(file.tensor.data_ptr(), _PROOF_BYTES)
