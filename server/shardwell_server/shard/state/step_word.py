"""The step that a shard has reached since its record was written: one word in the header of the shard's file.

Note: [Records and step words]
    A record describes a shard completely, as it was when the record was written: files, optimizer state, version, step
    counts. It is replaced only when more than these numbers changes, such as the files. Every step stores its numbers
    in one aligned word instead, which costs no system call. A process may be killed between any two stores, and the
    word is never torn, so the next process always finds the numbers of one instant. The word names the generation of
    the record that it continues. A new record replaces the old one by a rename; from then on, the old word is void.
    Every new record is followed by a word of its generation, so the word in the file is at most one generation older.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from shardwell_wire.shared_words import store_word

_WORD = struct.Struct("@Q")
_GENERATION_BITS, _UPDATE_BITS, _PREPARED_BITS, _VERSION_BITS = 8, 22, 2, 32
_UPDATES_AT = _GENERATION_BITS
_PREPARED_AT = _UPDATES_AT + _UPDATE_BITS
_VERSION_AT = _PREPARED_AT + _PREPARED_BITS

WORD_BYTES = _WORD.size
MAX_UPDATES = (1 << _UPDATE_BITS) - 1
"""Most updates that a word can count."""


class Prepared(enum.IntEnum):
    """Whether a step is prepared."""

    NO = 0
    GRADIENTS = 1
    """With a mean gradient of the segments that the record names."""
    SKIPPED = 2
    """Without gradients, because the step is skipped."""
    EMPTY = 3
    """Without gradients, because no rank pushed one."""


@dataclass(frozen=True, slots=True)
class StepWord:
    """See Note: [Records and step words]."""

    generation: int
    """Generation of the record that the word continues. 0: the word was never written."""
    version: int
    """The newest version of the shard."""
    updates: int
    """Updates since the record that changed the parts that the record names."""
    prepared: Prepared

    @classmethod
    def read(cls, place: memoryview) -> StepWord:
        """Returns the word at a place in shared memory."""
        word: int = _WORD.unpack_from(place, 0)[0]
        return cls(
            generation=word & ((1 << _GENERATION_BITS) - 1),
            version=word >> _VERSION_AT,
            updates=word >> _UPDATES_AT & MAX_UPDATES,
            prepared=Prepared(word >> _PREPARED_AT & ((1 << _PREPARED_BITS) - 1)),
        )

    def write(self, place: memoryview) -> None:
        """Stores the word."""
        word = self.generation | self.updates << _UPDATES_AT | self.prepared << _PREPARED_AT
        store_word(place, word | self.version << _VERSION_AT)


def next_generation(generation: int) -> int:
    """Returns the generation of the record after one of the given generation. Never 0."""
    return generation % ((1 << _GENERATION_BITS) - 1) + 1
