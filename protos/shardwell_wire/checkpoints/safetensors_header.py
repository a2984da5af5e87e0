"""The header of a safetensors file.

A file consists of the length of the header (8 bytes, little-endian), the header (JSON: name to dtype, shape and
half-open byte range after the header), and the bytes of the tensors in C order, without holes.
(https://github.com/huggingface/safetensors, "Format".)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwell_wire.errors import CorruptDataError
from shardwell_wire.layout import MAX_DIMS

LENGTH_BYTES = 8
"""Size of the header's length at the start of a file."""

MAX_HEADER_BYTES = 100_000_000
"""Limit of the header's size in the reference implementation, without its length."""

ITEM_SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "C64": 8,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes per element, by the format's names of dtypes."""

_ALIGNMENT_BYTES = 8
_METADATA = "__metadata__"
_MAX_SIZE = 1 << 62
"""Limit of sizes and offsets. Python's integers have none."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor of a file."""

    dtype: str
    """The format's name, such as ``F32``."""
    shape: tuple[int, ...]
    start_bytes: int
    """Half-open, in the file."""
    stop_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes


def make_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Returns the start of a file: the length and the header. The bytes of the tensors follow in the same order.

    Args:
        tensors: The format's name of the dtype, and the shape, by name.
        metadata: Additional strings.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        stop = position + math.prod(shape) * ITEM_SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_size(start: bytes, size_bytes: int, where: str) -> int:
    """Returns the size of the length and the header together. See Note: [Contents in errors] in ``reading.py``.

    Args:
        start: The first 8 bytes of the file.
        size_bytes: Size of the file.
        where: Path of the file, for errors.

    Raises:
        CorruptDataError: The header would be longer than the file or the format's limit.
    """
    length = int.from_bytes(start, "little")
    if len(start) < LENGTH_BYTES or length > min(size_bytes - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise CorruptDataError(
            f"{where} is not a safetensors file, or is truncated: {size_bytes} bytes, but its header is longer "
            f"than that, or than the limit of {MAX_HEADER_BYTES} bytes"
        )
    return LENGTH_BYTES + length


def parse_header(header: bytes, size_bytes: int, where: str) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Returns the tensors of a file by name, in the header's order, and its metadata.

    Args:
        header: The start of the file: the length and the header.
        size_bytes: Size of the file.
        where: Path of the file, for errors.

    Raises:
        CorruptDataError: The header does not parse, or does not describe exactly the bytes of the file.
    """
    try:
        content = parse_json(header[LENGTH_BYTES:])
        metadata = content.pop(_METADATA, {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError(f"{_METADATA} has a value that is no string")
        entries = {name: _parse_entry(name, entry, len(header)) for name, entry in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(f"{where} is not a safetensors file: its header does not parse ({error})") from error
    _check_ranges(entries, len(header), size_bytes, where)
    return entries, metadata


def parse_json(text: bytes) -> dict[str, Any]:
    """Returns a JSON object.

    Raises:
        ValueError: The text is not a JSON object, a key is repeated, or the nesting is too deep.
    """
    try:
        content = json.loads(text, object_pairs_hook=_without_repetitions)
    except RecursionError:
        raise ValueError("its nesting is too deep") from None
    if not isinstance(content, dict):
        raise ValueError(f"it is {type(content).__name__}, expected an object")
    return content


def _without_repetitions(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is repeated")
        found[key] = value
    return found


def _parse_entry(name: str, entry: Mapping[str, Any], data_start: int) -> HeaderEntry:
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise ValueError(f"tensor {name!r} has unknown dtype {dtype!r}")
    start, stop = entry["data_offsets"]
    if len(shape) > MAX_DIMS or not all(_is_size(size) for size in (*shape, start, stop)):
        raise ValueError(f"tensor {name!r} has shape {str(shape)[:200]} and data_offsets {[start, stop]}")
    return HeaderEntry(dtype, tuple(shape), data_start + start, data_start + stop)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_SIZE


def _check_ranges(entries: Mapping[str, HeaderEntry], data_start: int, size_bytes: int, where: str) -> None:
    """Raises CorruptDataError unless the tensors are stored one after another and fill the file."""
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start_bytes, item[1].stop_bytes)):
        needed = math.prod(entry.shape) * ITEM_SIZES[entry.dtype]
        if entry.start_bytes != position or entry.size_bytes != needed:
            raise CorruptDataError(
                f"{where}: tensor {name!r} {entry.shape} of {entry.dtype} has bytes [{entry.start_bytes}, "
                f"{entry.stop_bytes}) in the header, expected [{position}, {position + needed})"
            )
        position = entry.stop_bytes
    if position != size_bytes:
        kind = "truncated" if position > size_bytes else "longer than its header says"
        raise CorruptDataError(
            f"{where} is {kind}: {size_bytes - data_start} bytes of tensors, expected {position - data_start}"
        )
