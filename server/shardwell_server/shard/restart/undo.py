"""Undoes updates that were interrupted, from copies of what they change.

Note: [Interrupted updates]
    The operating system keeps every store of a killed process, and nothing after it. Stores of one thread are in
    program order, and a tensor operation joins its threads before it returns. Before the first byte changes, everything
    that is about to change is therefore copied to the undo log of the run, after a table of the places where the copies
    belong. A word in the log's head says whether the copies count. It is set when table and copies are complete, and
    cleared when the change is. A new process that finds the word set copies everything back before it reads anything
    else of the shards, and repeats the change.

    Small shards are updated together, all of them or none: the copies are those of their whole update, with the step
    words of the shards. A larger shard is updated in pieces: the copies are those of one piece. One aligned word in the
    header of the shard's file counts the pieces that are applied. This word is among the copies, so a piece and its
    count are undone together. A new process repeats the update of the same step without the pieces that are applied. A
    run makes one change at a time, so it has one log.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from shardwell_server.shard.arithmetic.update_pieces import MAX_JOINT, Changed, Piece, Progress
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.mapped_memory import SharedBuffer, SharedMemory
from shardwell_wire import fault_points
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import CapacityError
from shardwell_wire.model.layout import BLOCK_BYTES

logger = logging.getLogger(__name__)

SUFFIX = ".before"
"""End of the names of the logs' files."""

_ROW = struct.Struct("@32sQQ")
"""A row of the table: name of the file, position in it, and size. The copies follow in the order of the rows."""
_HEAD_BYTES, _ALIGNMENT, _GRANULE = 64, 64, 64 << 10
_WHOLE, _COUNTS = 0, 1
_WORD_BYTES = 8
_STEP_SHIFT = 32
_MAX_RANGES = 5 * MAX_JOINT + 1
"""More ranges than any piece changes, with the count of pieces."""


class ChangedRange(NamedTuple):
    """Consecutive bytes that an update changes. A tuple, because every piece of an update makes some."""

    address: int
    size_bytes: int
    file: str = ""
    """The shared file that contains them. Empty: no other process continues with them."""
    offset_bytes: int = 0
    """Their position in the file."""


MappedFile = tuple[int, int, str]
"""Where a shared file is mapped, start and end, and its name."""


def mapped(buffers: Iterable[SharedBuffer]) -> list[MappedFile]:
    """Returns where shared files are mapped, for ``locate``."""
    starts = ((buffer.tensor.data_ptr(), buffer) for buffer in buffers)
    return [(start, start + buffer.tensor.numel(), buffer.name) for start, buffer in starts]


def locate(files: Sequence[MappedFile], address: int, size_bytes: int) -> ChangedRange:
    """Returns the range of some memory, which may be in one of several shared files."""
    for start, stop, name in files:
        if start <= address < stop:
            return ChangedRange(address, size_bytes, name, address - start)
    return ChangedRange(address, size_bytes)


def place_of(word: memoryview) -> tuple[int, int]:
    """Returns the address and the size of a word in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(word)), _WORD_BYTES


def _words(place: memoryview) -> memoryview:
    """Returns the aligned words at a place. An assignment is one store of the processor; see ``store_word``."""
    return place[: len(place) // _WORD_BYTES * _WORD_BYTES].cast("Q")


def _no_head() -> memoryview:
    return _words(memoryview(bytearray(_HEAD_BYTES)))


class CopyPlan:
    """Where the copies of a change are in the log. The plan serves every change of the same memory.

    Args:
        ranges: What changes.
    """

    def __init__(self, ranges: Sequence[ChangedRange]) -> None:
        # Ranges of files first: their copies have rows, and the position of a copy follows from the rows before it.
        shared = [each for each in ranges if each.file]
        self.ranges = [*shared, *(each for each in ranges if not each.file)]
        self.table = b"".join([_ROW.pack(name.encode(), offset, size) for _, size, name, offset in shared])
        self.places: list[tuple[int, int, int]] = []
        """Address of each range, position of its copy in the log, and size."""
        position = _copies_at(len(self.table))
        for address, size, _, _ in self.ranges:
            self.places.append((address, position, size))
            position += _aligned(size)
        self.size_bytes = position
        """Size of a log for the copies."""

    @classmethod
    def merged(cls, ranges: Iterable[ChangedRange]) -> CopyPlan:
        """Returns a plan with fewer copies: memory between ranges of one file is copied too."""
        return cls(list(_merged(ranges)))


def _merged(ranges: Iterable[ChangedRange]) -> Iterator[ChangedRange]:
    """Yields larger ranges: memory between ranges of one file is copied too if this saves a copy."""
    last: ChangedRange | None = None
    for each in sorted(ranges):
        if last is not None:
            gap = each.address - last.address - last.size_bytes
            same = bool(each.file) and each.file == last.file
            if same and gap <= _ALIGNMENT and each.offset_bytes - last.offset_bytes == each.address - last.address:
                size_bytes = max(last.size_bytes, each.address + each.size_bytes - last.address)
                last = ChangedRange(last.address, size_bytes, last.file, last.offset_bytes)
                continue
            yield last
        last = each
    if last is not None:
        yield last


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _copies_at(table_bytes: int) -> int:
    """Returns where the copies begin: on a page, as values do. A copy to another place within a page is slower."""
    return -(-(_HEAD_BYTES + table_bytes) // BLOCK_BYTES) * BLOCK_BYTES


class UndoLog:
    """The copies of the change that one run makes. See Note: [Interrupted updates].

    Args:
        shared: Shared memory that outlives the process. None: the copies serve this process only.
    """

    def __init__(self, memory: Memory | None = None, shared: SharedMemory | None = None) -> None:
        self._memory, self._shared = memory, shared
        self._file: SharedBuffer | None = None
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._start = 0
        self._head = _no_head()
        """Whether the copies count, and the size of the table. Each is stored at once, as by ``store_word``."""
        self._plan: CopyPlan | None = None
        self.plans: WeakKeyDictionary[Changed, CopyPlan] = WeakKeyDictionary()
        """Plans of the pieces that were run. A piece changes the same memory in every update of the same tensors."""

    def reserve_pieces(self, copied_bytes: int) -> bool:
        """As ``reserve``, for pieces that change tensors of this size together."""
        return self.reserve(_copies_at(_MAX_RANGES * _ROW.size) + copied_bytes + _MAX_RANGES * _ALIGNMENT)

    def reserve(self, size_bytes: int) -> bool:
        """Makes the log large enough. Returns False if shared memory is full. Call between two changes."""
        if self._tensor.numel() >= size_bytes:
            return True
        self.close()
        size_bytes = -(-size_bytes // _GRANULE) * _GRANULE
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
        self._head = _words(memory_at(self._start, _HEAD_BYTES, self._tensor))
        return True

    def begin(self, plan: CopyPlan) -> None:
        """Copies what is about to change. The log has room for the plan."""
        assert plan.size_bytes <= self._tensor.numel()
        start, move = self._start, ctypes.memmove
        if plan is not self._plan:
            move(start + _HEAD_BYTES, plan.table, len(plan.table))
            self._head[1] = len(plan.table)
            self._plan = plan
        for address, position, size_bytes in plan.places:
            move(start + position, address, size_bytes)
        self._head[0] = _COUNTS

    def end(self) -> None:
        """Ends a complete change, so that the copies do not count any more."""
        self._head[0] = _WHOLE

    def restore(self) -> None:
        """Copies everything back, as if nothing had changed."""
        assert self._plan is not None
        for address, position, size_bytes in self._plan.places:
            ctypes.memmove(address, self._start + position, size_bytes)
        self.end()

    def close(self) -> None:
        """Removes the log. Call between two changes."""
        if self._file is not None:
            if self._memory is not None:
                self._memory.note_shared(-self._tensor.numel())
            self._file.unlink()
            self._file = None
        self._tensor, self._plan = torch.empty(0, dtype=torch.uint8), None
        self._head = _no_head()  # the former one keeps the memory


def restore_interrupted(shared: SharedMemory) -> bool:
    """Undoes the changes in which a former process was interrupted. Can be repeated.

    Returns:
        False if one cannot be undone. No shard of the former process can be used then.
    """
    for name in shared.names(SUFFIX):
        try:
            if shared.size_of(name) < _HEAD_BYTES:
                continue  # the process was killed while it made the log, which has no copies yet
            _restore(shared, shared.open_whole(name))
        # A file that was written by other software may contain anything.
        except (OSError, ValueError, TypeError, RuntimeError, struct.error) as error:
            logger.warning("cannot undo an update of the former process: file %s: %s", name, error)
            return False
    return True


def _restore(shared: SharedMemory, log: SharedBuffer) -> None:
    head = _words(memory_at(log.tensor.data_ptr(), _HEAD_BYTES, log.tensor))
    if head[0] != _COUNTS:
        return
    table_bytes = head[1]
    table = log.tensor[_HEAD_BYTES : _HEAD_BYTES + table_bytes].numpy().tobytes()
    position, opened = _copies_at(table_bytes), dict[str, SharedBuffer]()
    for padded, offset, size_bytes in _ROW.iter_unpack(table):
        name = padded.rstrip(b"\0").decode()
        if name not in opened:
            opened[name] = shared.open_whole(name)
        opened[name].tensor[offset : offset + size_bytes].copy_(log.tensor[position : position + size_bytes])
        position += _aligned(size_bytes)
    head[0] = _WHOLE


class SharedProgress(Progress):
    """The progress of the update of one shard in pieces. See Note: [Interrupted updates].

    Args:
        undo: The run's log, with room for a piece.
        word: The shard's progress word, which has the step and the number of pieces that are applied.
        step: The step. What the word says about another step is void.
        files: Where the shard's files are mapped.
    """

    def __init__(self, undo: UndoLog, word: memoryview, step: int, files: Sequence[MappedFile] = ()) -> None:
        super().__init__()
        self._undo, self._files = undo, files
        self._count = locate(files, *place_of(word))
        self._words = _words(word)
        self._word = self._words[0]
        if self._word >> _STEP_SHIFT != step:
            self._write(step << _STEP_SHIFT)

    @property
    def done(self) -> int:
        return self._word & ((1 << _STEP_SHIFT) - 1)

    def run(self, piece: Piece) -> None:
        if piece.changed is None:
            piece.run()
            fault_points.reach("server.update.in_piece", piece=self.done)
            self._write(self._word + 1)
            return
        # Only the pieces of joined parts are made once: they alone are atomic, and have plans that are worth keeping.
        plan = self._undo.plans.get(piece.changed) if piece.atomic else None
        if plan is None:
            plan = CopyPlan([*[locate(self._files, *each) for each in piece.changed.ranges], self._count])
            if piece.atomic:
                self._undo.plans[piece.changed] = plan
        self._undo.begin(plan)
        try:
            piece.run()
        except BaseException:
            self._undo.restore()
            raise
        fault_points.reach("server.update.in_piece", piece=self.done)
        self._write(self._word + 1)
        self._undo.end()

    def _write(self, word: int) -> None:
        self._word = self._words[0] = word
