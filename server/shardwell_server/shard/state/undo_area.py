"""Progress of updates in shared memory, from which a new process finishes an update that its predecessor started.

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
import struct

from shardwell_server.shard.arithmetic.update_pieces import MAX_JOINT, Changed, Piece, Progress
from shardwell_server.shard.memory.shared_memory import SharedBuffer
from shardwell_wire import fault_points
from shardwell_wire.shared_words import store_word

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
