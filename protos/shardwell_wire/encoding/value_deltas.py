"""Deltas: what changed between two streams of 16-bit values, losslessly.

A stream is cut into blocks of 256 values, and a delta has for each block the smallest of four encodings: the places of
the changed values, a mask of them, the differences of all values, or the new values. Differences are those of the
16-bit patterns as integers, modulo 2^16. An optimizer with a low learning rate moves a value by few representable
numbers, so that a difference fits one byte. docs/wire-format.md specifies the format.

A delta is encoded and applied in groups of blocks that fit a core's cache, each with a few numpy passes.

Changes are a delta with new values in place of differences, for clients that do not have the former values. Each
changed value takes one byte more. ``decode_changes`` lists what changes, or a delta, change.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardwell_wire.encoding.chunk_streams import Buffer
from shardwell_wire.errors import CorruptDataError
from shardwell_wire.v1 import common_pb2, shard_pb2

BLOCK_NUMEL = 256
"""Values per block. The place of a value in its block fits one byte."""

GROUP_BLOCKS = 512
"""Blocks per group. The values of a group have 256 KiB."""

ITEM_BYTES = 2
"""Size of a value."""

WIRE_DTYPES = (common_pb2.WIRE_DTYPE_BFLOAT16, common_pb2.WIRE_DTYPE_FLOAT16)
"""Wire dtypes whose streams have deltas."""

_MASK_BYTES = BLOCK_NUMEL // 8
_MASK, _ALL, _NEW = 32, 33, 34
"""Table entries of blocks with a mask, with all differences, and with new values. Smaller entries are the number of
changed values, whose places are listed."""

_ESCAPE = 0x80
"""A difference that does not fit one byte. The new value follows among the values."""

_GROUP_NUMEL = GROUP_BLOCKS * BLOCK_NUMEL

_Words = NDArray[np.uint16]
_Bytes = NDArray[np.uint8]
_Places = NDArray[np.int64]
_Flags = NDArray[np.bool_]


def encode(base: Buffer, stream: Buffer, limit_bytes: int, item_words: int = 0) -> list[bytes] | None:
    """Returns the delta, or the changes, from one stream to another one, in consecutive pieces.

    Args:
        base: The former stream.
        stream: The new stream, of the same, even size.
        limit_bytes: Largest useful size of a delta.
        item_words: For changes: 16-bit values per item. If an item changes, the changes have all its values. A power of
            two, at most 8. Items are aligned. 0: returns a delta.

    Returns:
        None if the delta has more than ``limit_bytes``.
    """
    before, after = _words(base), _words(stream)
    assert len(before) == len(after)
    pieces: list[bytes] = []
    for start in range(0, len(after), _GROUP_NUMEL):
        part = slice(start, start + _GROUP_NUMEL)
        for piece in _encode_group(_whole_blocks(before[part]), _whole_blocks(after[part]), item_words):
            pieces.append(piece)
            limit_bytes -= len(piece)
        if limit_bytes < 0:
            return None
    return pieces


def decode_changes(changes: Buffer, numel: int, what: str, is_delta: bool = False) -> tuple[_Places, _Words, _Flags]:
    """Returns what changes, or a delta, change in a stream of 16-bit values.

    Returns:
        Places, rising. At each of them, the new value or a difference, and whether it is a new value.

    Raises:
        CorruptDataError: The changes are malformed, or are of a stream of another size.
    """
    data, largest = _Sections(changes, what), _ALL if is_delta else _MASK
    found = [(np.empty(0, np.int64), np.empty(0, np.uint16), np.empty(0, np.bool_))]
    for start in range(0, numel, _GROUP_NUMEL):
        table = data.take(-(-min(_GROUP_NUMEL, numel - start) // BLOCK_NUMEL), "table")
        if not table.any():
            continue
        if ((table > largest) & (table != _NEW)).any():
            raise data.malformed(f"has table entry {table.max()}, expected at most {largest}, or {_NEW}")
        described = _changed_places(data, table)
        small = data.take(len(described), "differences") if is_delta else np.full(len(described), _ESCAPE, np.uint8)
        places = _places_of_values(described, table)
        words, is_new = np.zeros(len(places), np.uint16), np.ones(len(places), np.bool_)
        own = slice(None) if len(places) == len(described) else np.searchsorted(places, described)
        words[own], is_new[own] = small.view(np.int8).astype(np.int16).view(np.uint16), small == _ESCAPE
        words[is_new] = data.take(ITEM_BYTES * int(np.count_nonzero(is_new)), "values").view("<u2")
        inside = int(np.searchsorted(places, numel - start))
        if words[inside:].any():
            raise data.malformed("changes values after the end of the stream")
        found.append((places[:inside] + start, words[:inside], is_new[:inside]))
    data.require_end()
    places, words, is_new = (np.concatenate(each) for each in zip(*found, strict=True))
    return places, words, is_new


def apply_all(deltas: shard_pb2.StreamDeltas, received: memoryview, stream: memoryview, what: str) -> None:
    """Changes a stream into the one that consecutive deltas describe, in place.

    Args:
        deltas: Sizes of the deltas, and checksum of the stream that they give.
        received: The deltas, one after another.
        stream: The former stream. After an error its content is undefined.

    Raises:
        CorruptDataError: A delta is malformed, or the deltas give another stream.
    """
    position = 0
    for size_bytes in deltas.sizes_bytes:
        apply(received[position : position + size_bytes], stream, what)
        position += size_bytes
    checksum = xxhash.xxh3_64_intdigest(stream)
    if checksum != deltas.checksum:
        raise CorruptDataError(
            f"{what}: the deltas give a stream with checksum {checksum:#018x}, expected {deltas.checksum:#018x}"
        )


def apply(delta: Buffer, stream: memoryview, what: str) -> None:
    """Changes a stream into the one that a delta describes, in place.

    Args:
        stream: The former stream. After an error its content is undefined.

    Raises:
        CorruptDataError: The delta is malformed, or is of a stream of another size.
    """
    data, values = _Sections(delta, what), _words(stream)
    for start in range(0, len(values), _GROUP_NUMEL):
        group = values[start : start + _GROUP_NUMEL]
        if len(group) % BLOCK_NUMEL == 0:
            _apply_group(data, group)
            continue
        whole = _whole_blocks(group)
        _apply_group(data, whole)
        if whole[len(group) :].any():
            raise data.malformed("changes values after the end of the stream")
        group[:] = whole[: len(group)]
    data.require_end()


def _words(data: Buffer) -> _Words:
    if len(data) % ITEM_BYTES:
        raise ValueError(f"a stream of {len(data)} bytes does not consist of 16-bit values")
    return np.frombuffer(data, dtype="<u2")


def _whole_blocks(values: _Words) -> _Words:
    """Returns values with zeros up to the end of the last block."""
    missing = -len(values) % BLOCK_NUMEL
    return np.pad(values, (0, missing)) if missing else values


# ---- encoding ----


def _encode_group(before: _Words, after: _Words, item_words: int) -> Iterator[bytes]:
    """Yields the sections of a group: table, places, masks, differences, and values.

    Args:
        before: The former values.
        after: The new values.
        item_words: See ``encode``.
    """
    changed = before != after
    if item_words > 1:
        changed = np.repeat(changed.reshape(-1, item_words).any(axis=1), item_words)
    changed = changed.reshape(-1, BLOCK_NUMEL)
    # numpy selects values by places several times as fast as by flags.
    places = np.flatnonzero(changed)
    if not len(places):
        yield bytes(len(changed))
        return
    is_sparse = len(places) < len(after) // 16
    counts = np.bincount(places >> 8, minlength=len(changed)) if is_sparse else _counts(changed)
    found = after[places] - before[places] if is_sparse else (after - before)[places]
    escaped = np.arange(len(found)) if item_words else np.flatnonzero(_is_large(found))
    table = _table(counts, np.bincount(places[escaped] >> 8, minlength=len(counts)))
    yield table.tobytes()
    is_listed = table < _MASK
    yield (places if is_listed.all() else np.flatnonzero(changed[is_listed])).astype(np.uint8).tobytes()
    yield np.packbits(changed[table == _MASK], axis=1, bitorder="little").tobytes()
    if table.max() > _MASK:
        changed[table == _ALL], changed[table == _NEW] = True, False
        places = np.flatnonzero(changed)
        found = after[places] - before[places]
        escaped = np.arange(len(found)) if item_words else np.flatnonzero(_is_large(found))
    if not item_words:
        small = found.astype(np.uint8)
        small[escaped] = _ESCAPE
        yield small.tobytes()
    yield after[_places_of_values(places[escaped], table)].tobytes()


def _counts(flags: _Flags) -> _Places:
    """Returns the number of flags that are set in each block. [num_blocks, BLOCK_NUMEL] -> [num_blocks]"""
    lanes = flags.view(np.uint64).sum(axis=1)  # each byte counts up to 32 flags
    counts: _Places = lanes.view(np.uint8).reshape(-1, 8).sum(axis=1, dtype=np.int64)
    return counts


def _table(counts: _Places, large: _Places) -> _Bytes:
    """Chooses the smallest encoding of each block, from its numbers of changed values and of large differences."""
    if counts.max() < _MASK:
        return counts.astype(np.uint8)
    table = np.where(counts < _MASK, counts, _MASK)
    table[counts >= BLOCK_NUMEL - _MASK_BYTES] = _ALL
    # With places, a block has at most 4 bytes for each of 31 values. The other two may have more bytes than the values.
    size = np.minimum(counts + _MASK_BYTES, BLOCK_NUMEL) + ITEM_BYTES * large
    table[(table >= _MASK) & (size >= BLOCK_NUMEL * ITEM_BYTES)] = _NEW
    return table.astype(np.uint8)


def _is_large(differences: _Words) -> _Flags:
    """Returns which differences do not fit one byte: those beyond -127 to 127."""
    return (differences + np.uint16(127)) > 254


def _places_of_values(escaped: _Places, table: _Bytes) -> _Places:
    """Returns the places of the values that follow the differences, rising.

    Args:
        escaped: Places of the differences that do not fit one byte, rising.
        table: The table of the group. Blocks with new values have them all.
    """
    is_new = table == _NEW
    if not is_new.any():
        return escaped
    flags = np.zeros((len(table), BLOCK_NUMEL), dtype=np.bool_)
    flags.reshape(-1)[escaped] = True
    flags[is_new] = True
    return np.flatnonzero(flags)


# ---- applying ----


class _Sections:
    """Takes the sections of a delta, one after another."""

    def __init__(self, delta: Buffer, what: str) -> None:
        self._data, self._what, self._position = np.frombuffer(delta, dtype=np.uint8), what, 0

    def take(self, size_bytes: int, section: str) -> _Bytes:
        """Returns the next bytes. [size_bytes]"""
        taken = self._data[self._position : self._position + size_bytes]
        if len(taken) < size_bytes:
            raise self.malformed(f"has {len(taken)} of the {size_bytes} bytes of the {section}")
        self._position += size_bytes
        return taken

    def require_end(self) -> None:
        """Raises CorruptDataError if bytes are left."""
        if left := len(self._data) - self._position:
            raise self.malformed(f"has {left} bytes more than its blocks")

    def malformed(self, problem: str) -> CorruptDataError:
        """Returns the error for a malformed delta."""
        return CorruptDataError(f"{self._what}: the delta {problem}, at byte {self._position} of {len(self._data)}")


def _apply_group(data: _Sections, values: _Words) -> None:
    """Applies the delta of a group of whole blocks. [num_blocks * BLOCK_NUMEL]"""
    num_blocks = len(values) // BLOCK_NUMEL
    table = data.take(num_blocks, "table")
    if not table.any():
        return
    if (largest := int(table.max())) > _NEW:
        raise data.malformed(f"has table entry {largest}, expected at most {_NEW}")
    places = _changed_places(data, table)
    small = data.take(len(places), "differences")
    values[places] += small.view(np.int8).astype(np.int16).view(np.uint16)
    replaced = _places_of_values(places[np.flatnonzero(small == _ESCAPE)], table)
    values[replaced] = data.take(ITEM_BYTES * len(replaced), "values").view("<u2")


def _changed_places(data: _Sections, table: _Bytes) -> _Places:
    """Returns the places of all values of a group that have a difference, rising."""
    counts = np.where(table < _MASK, table, 0)
    listed = np.repeat(np.arange(len(table)) * BLOCK_NUMEL, counts)
    listed += data.take(len(listed), "places")
    if not (listed[1:] > listed[:-1]).all():
        raise data.malformed("lists places of changed values that do not rise")
    if table.max() < _MASK:
        return listed
    flags = np.zeros((len(table), BLOCK_NUMEL), dtype=np.bool_)
    flags.reshape(-1)[listed] = True
    has_mask = table == _MASK
    masks = data.take(_MASK_BYTES * int(np.count_nonzero(has_mask)), "masks").reshape(-1, _MASK_BYTES)
    flags[has_mask] = np.unpackbits(masks, axis=1, bitorder="little")
    flags[table == _ALL] = True
    return np.flatnonzero(flags)
