"""Copies of everything that an update of several shards changes, until the update is complete.

Note: [Interrupted updates of several shards]
    Small shards of a run are updated together, all of them or none. Before the first byte changes, everything that the
    update changes is copied: values, optimizer state, averages, and the step words of the shards. Copies are in one
    file of the run, after a table of the places where they belong. A word in the file's header says whether the copies
    count. It is set when table and copies are complete. It is cleared when values, state and step words are those of
    the next version, which readers may see only afterwards. A process that finds the word set copies everything back,
    before it reads any step word, and repeats the update of all these shards. Interrupted updates of single shards are
    continued instead: see ``undo_area.py``.

Progress of updates in shared memory, from which a new process finishes an update that its predecessor started.

Note: [Interrupted updates]
    The operating system keeps every store of a killed process, and nothing after it. Stores of one thread are in
    program order, and a tensor operation joins its threads before it returns. The progress of a shard's update is one
    aligned word in the header of the shard's file: the step, the number of pieces that are applied, and whether the
    next piece has started. Before a piece starts, the tensors that it changes are copied to the run's undo area. The
    word changes when the copies are complete, and again when the piece is. A new process repeats the update of the same
    step: it skips the pieces that are applied, and restores the copies of a started piece. A run updates one shard at a
    time, and the interrupted shard first, so one area is enough.
"""

from __future__ import annotations

import ctypes
import json
import logging
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from shardwell_server.shard.arithmetic.update_pieces import MAX_JOINT, Changed, Piece, Progress
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.shared_memory import SharedBuffer, SharedMemory
from shardwell_wire import fault_points
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import CapacityError
from shardwell_wire.host.shared_memory import store_word

logger = logging.getLogger(__name__)

SUFFIX = ".joint"
"""End of the file's name."""

_TABLE_SIZE_AT, _HEAD_BYTES, _COPY_ALIGNMENT, _GRANULE = 8, 64, 64, 64 << 10
_NUMBER = struct.Struct("@Q")
_WHOLE, _COUNTS = 0, 1


@dataclass(frozen=True, slots=True, order=True)
class ChangedRange:
    """Consecutive bytes that an update changes."""

    address: int
    size_bytes: int
    file: str = ""
    """The shared file that contains them. Empty: no other process continues with them."""
    offset_bytes: int = 0
    """Their position in the file."""

    @classmethod
    def of(cls, tensor: torch.Tensor, file: str = "", offset_bytes: int = 0) -> ChangedRange:
        """Returns the range of a contiguous tensor."""
        assert tensor.is_contiguous()
        return cls(tensor.data_ptr(), tensor.nbytes, file, offset_bytes)


class CopyPlan:
    """Where the copies of an update are. The plan serves every update of the same shards.

    Args:
        ranges: What the update changes.
    """

    def __init__(self, ranges: Iterable[ChangedRange]) -> None:
        self.ranges = list(_merged(ranges))
        sizes = [-(-each.size_bytes // _COPY_ALIGNMENT) * _COPY_ALIGNMENT for each in self.ranges]
        offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        rows = [
            (each.file, each.offset_bytes, each.size_bytes, offset)
            for each, offset in zip(self.ranges, offsets, strict=True)
            if each.file
        ]
        self.table = json.dumps(rows).encode()
        self._copies_at = -(-(_HEAD_BYTES + len(self.table)) // _COPY_ALIGNMENT) * _COPY_ALIGNMENT
        self.size_bytes = self._copies_at + sum(sizes)
        """Size of the file."""
        self.places = [
            (each.address, self._copies_at + offset, each.size_bytes)
            for each, offset in zip(self.ranges, offsets, strict=True)
        ]
        """Address of each range, position of its copy in the file, and size."""


def _merged(ranges: Iterable[ChangedRange]) -> Iterable[ChangedRange]:
    """Yields larger ranges: memory between tensors of one file is copied too if this saves a copy."""
    last: ChangedRange | None = None
    for each in sorted(ranges):
        if last is not None:
            gap = each.address - last.address - last.size_bytes
            same = bool(each.file) and each.file == last.file
            if same and gap <= _COPY_ALIGNMENT and each.offset_bytes - last.offset_bytes == each.address - last.address:
                size_bytes = max(last.size_bytes, each.address + each.size_bytes - last.address)
                last = ChangedRange(last.address, size_bytes, last.file, last.offset_bytes)
                continue
            yield last
        last = each
    if last is not None:
        yield last


class JointUndo:
    """The copies of the update that runs. See Note: [Interrupted updates of several shards].

    Args:
        memory: The server's memory budget.
        shared: Shared memory that outlives the process. None: the copies serve this process only.
    """

    def __init__(self, memory: Memory | None = None, shared: SharedMemory | None = None) -> None:
        self._memory, self._shared = memory, shared
        self._file: SharedBuffer | None = None
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._start = 0
        self._head = memoryview(bytearray(_HEAD_BYTES))
        self._plan: CopyPlan | None = None

    def reserve(self, plan: CopyPlan) -> bool:
        """Returns whether there is memory for the copies."""
        if self._tensor.numel() >= plan.size_bytes:
            return True
        self.close()
        size_bytes = -(-plan.size_bytes // _GRANULE) * _GRANULE
        if self._shared is None:
            self._tensor = torch.empty(size_bytes, dtype=torch.uint8)
        else:
            try:
                self._file = self._shared.create(size_bytes, "copies for updates", SUFFIX)
            except CapacityError:
                return False
            self._tensor = self._file.tensor
            if self._memory is not None:
                self._memory.note_shared(size_bytes)
        self._start = self._tensor.data_ptr()
        self._head = memory_at(self._start, _HEAD_BYTES)
        return True

    def begin(self, plan: CopyPlan) -> None:
        """Copies what the update is about to change. ``reserve`` returned True for the plan."""
        if plan is not self._plan:
            memory_at(self._start + _HEAD_BYTES, len(plan.table))[:] = plan.table
            _NUMBER.pack_into(self._head, _TABLE_SIZE_AT, len(plan.table))
            self._plan = plan
        start, move = self._start, ctypes.memmove
        for address, offset, size_bytes in plan.places:
            move(start + offset, address, size_bytes)
        store_word(self._head, _COUNTS)

    def end(self) -> None:
        """The update is complete: the copies do not count any more."""
        store_word(self._head, _WHOLE)

    def restore(self) -> None:
        """Copies everything back: nothing has changed."""
        assert self._plan is not None
        for address, offset, size_bytes in self._plan.places:
            ctypes.memmove(address, self._start + offset, size_bytes)
        self.end()

    def close(self) -> None:
        """Removes the file. Call while no update runs."""
        if self._file is not None:
            if self._memory is not None:
                self._memory.note_shared(-self._tensor.numel())
            self._file.unlink()
            self._file = None
        self._tensor, self._plan = torch.empty(0, dtype=torch.uint8), None


def restore_interrupted(shared: SharedMemory) -> bool:
    """Undoes the updates of several shards in which a former process was interrupted. Can be repeated.

    Returns:
        False if one cannot be undone. No shard of the former process can be used then.
    """
    for name in shared.names(SUFFIX):
        try:
            _restore(shared, shared.open_whole(name))
        # A file that was written by other software may contain anything.
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            logger.warning("cannot undo an update of the former process: file %s: %s", name, error)
            return False
    return True


def _restore(shared: SharedMemory, file: SharedBuffer) -> None:
    head = memory_at(file.tensor.data_ptr(), _HEAD_BYTES)
    if _NUMBER.unpack_from(head, 0)[0] != _COUNTS:
        return
    table_size: int = _NUMBER.unpack_from(head, _TABLE_SIZE_AT)[0]
    rows = json.loads(file.tensor[_HEAD_BYTES : _HEAD_BYTES + table_size].numpy().tobytes())
    copies_at = -(-(_HEAD_BYTES + table_size) // _COPY_ALIGNMENT) * _COPY_ALIGNMENT
    opened: dict[str, SharedBuffer] = {}
    for target, offset, size_bytes, copy in rows:
        if target not in opened:
            opened[target] = shared.open_whole(target)
        own = file.tensor[copies_at + copy : copies_at + copy + size_bytes]
        opened[target].tensor[offset : offset + size_bytes].copy_(own)
    store_word(head, _WHOLE)


_WORD = struct.Struct("@Q")
_STARTED, _PIECE_BITS = 1, 32
_ALIGNMENT = 64
_MAX_TENSORS = 5 * MAX_JOINT
"""More tensors than any piece changes."""


def area_bytes(copied_bytes: int) -> int:
    """Returns the size of an area for pieces that change tensors of this size together."""
    return copied_bytes + _MAX_TENSORS * _ALIGNMENT


class UndoArea:
    """Copies of the tensors that the current piece of an update changes.

    Args:
        shared: The file.
    """

    def __init__(self, shared: SharedBuffer) -> None:
        self.shared = shared
        self.size_bytes = shared.tensor.numel()
        self._start = shared.tensor.data_ptr()

    def save(self, changed: Changed) -> None:
        """Copies what a piece changes to the area."""
        place = self._start
        for address, size_bytes in changed.ranges:
            self._check(place, size_bytes)
            ctypes.memmove(place, address, size_bytes)
            place += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT

    def restore(self, changed: Changed) -> None:
        """Copies it back."""
        place = self._start
        for address, size_bytes in changed.ranges:
            self._check(place, size_bytes)
            ctypes.memmove(address, place, size_bytes)
            place += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT

    def _check(self, place: int, size_bytes: int) -> None:
        assert place + size_bytes <= self._start + self.size_bytes


class SharedProgress(Progress):
    """The progress of the update of one shard. See Note: [Interrupted updates].

    Args:
        area: The run's undo area.
        word: The shard's progress word.
        step: The step. What the word says about another step is void.
    """

    def __init__(self, area: UndoArea, word: memoryview, step: int) -> None:
        super().__init__()
        self._area, self._place = area, word
        self._word: int = _WORD.unpack_from(word, 0)[0]
        if self._word >> _PIECE_BITS != step:
            self._write(step << _PIECE_BITS)

    @property
    def done(self) -> int:
        return (self._word & ((1 << _PIECE_BITS) - 1)) >> 1

    def run(self, piece: Piece) -> None:
        changed = piece.changed
        if changed is not None:
            if self._word & _STARTED:
                self._area.restore(changed)  # a former process was interrupted in this piece
            else:
                self._area.save(changed)
                self._write(self._word | _STARTED)
        try:
            piece.run()
        except BaseException:
            if changed is not None:
                self._area.restore(changed)
                self._write(self._word & ~_STARTED)
            raise
        fault_points.reach("server.update.in_piece", piece=self.done)
        self._write((self._word & ~_STARTED) + 2)

    def _write(self, word: int) -> None:
        self._word = word
        store_word(self._place, word)
