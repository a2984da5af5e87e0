"""Makes and changes messages by their descriptors."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

_MAX_DEPTH = 4
_MAX_KEPT = 64
"""Values that are kept per field name."""

_INTS = (0, 1, 2, 3, 7, 63, 64, 255, 4096, 65_535, 65_536, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40)
_LONG_INTS = (1 << 53, (1 << 63) - 1, (1 << 64) - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.1, 1e-300, 5e-324, 1e30, 1e308, float("inf"), float("-inf"), float("nan"))
_STRINGS = (
    *("", " ", "x", "0", "*", "fuzzed", "a" * 200, "a" * 201, "b" * 1001, "c" * 70_000, "\0", "a\nb", "e\u0301\u202e"),
    *("../../x", "file", "127.0.0.1:1", "[::1]:0", "localhost:99999", "%s%n", "{}", "[" * 5000, "{" * 5000, "9" * 5000),
)
_BYTES = (b"", b"\0", b"x" * 16, b"\xff" * 32, bytes(5000), b"y" * 70_000)
_COUNTS = (1, 2, 3, 10, 100, 2000)

_RANGES = {
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_SINT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_FIXED32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_SINT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.TYPE_FIXED64: (0, (1 << 64) - 1),
    FieldDescriptor.TYPE_ENUM: (0, 12),
}
"""Smallest and largest value by type. Enums include numbers without a name."""


class Values:
    """Values that real messages had, by field name. A run's name or an epoch fits the same field of other messages."""

    def __init__(self) -> None:
        self._seen: defaultdict[str, list[Any]] = defaultdict(list)

    def learn(self, message: Message) -> None:
        """Keeps the values of a message."""
        for field, value in message.ListFields():
            for each in _elements(field, value):
                if field.type == FieldDescriptor.TYPE_MESSAGE:
                    self.learn(each)
                elif each not in (seen := self._seen[field.name]) and len(seen) < _MAX_KEPT:
                    seen.append(each)

    def of(self, name: str) -> list[Any]:
        """Returns the values of fields with this name."""
        return self._seen.get(name, [])

    def merged(self, other: Values) -> Values:
        """Returns the values of both."""
        merged = Values()
        for values in (self, other):
            for name, seen in values._seen.items():
                merged._seen[name].extend(seen)
        return merged


class Mutator:
    """Makes and changes messages.

    Args:
        rng: Makes the choices. Hypothesis offers one that it can shrink.
        values: Values for fields.
    """

    def __init__(self, rng: random.Random, values: Values) -> None:
        self._rng, self._values = rng, values

    def make(self, descriptor: Any, depth: int = 0) -> Message:
        """Returns a new message."""
        message = GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if self._rng.random() < 0.6:
                self._change(message, field, depth)
        return message

    def changed(self, message: Message) -> Message:
        """Returns a copy with a few changes."""
        copy = type(message)()
        copy.CopyFrom(message)
        for _ in range(self._rng.choice((1, 1, 1, 2, 3, 5))):
            self._change_somewhere(copy, 0)
        return copy

    def bytes_of(self, message: Message) -> bytes:
        """Returns a serialised message, which is rarely damaged."""
        data = message.SerializeToString()
        if data and self._rng.random() < 0.04:
            at = self._rng.randrange(len(data))
            return self._rng.choice(
                (data[:at], data[:at] + bytes([data[at] ^ 0x81]) + data[at + 1 :], data + data[at:])
            )
        return data

    def _change_somewhere(self, message: Message, depth: int) -> None:
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = self._rng.choice(fields)
        if field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field) and self._rng.random() < 0.8:
            inner = _elements(field, getattr(message, field.name)) if field in dict(message.ListFields()) else ()
            if inner := list(inner):
                self._change_somewhere(self._rng.choice(inner), depth + 1)
                return
        self._change(message, field, depth)

    def _change(self, message: Message, field: Any, depth: int) -> None:
        if _is_map(field) or self._rng.random() < 0.1:
            message.ClearField(field.name)
        elif not _is_repeated(field):
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                if depth < _MAX_DEPTH:
                    getattr(message, field.name).CopyFrom(self.make(field.message_type, depth + 1))
            else:
                setattr(message, field.name, self._value(field))
        else:
            self._extend(getattr(message, field.name), field, depth)

    def _extend(self, repeated: Any, field: Any, depth: int) -> None:
        if self._rng.random() < 0.3:
            del repeated[:]
        count = self._rng.choice(_COUNTS)
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            few = [self._value(field) for _ in range(min(count, 3))]
            if self._rng.random() < 0.3 and isinstance(few[0], int):
                _, high = _RANGES[field.type]
                few = list(range(min(count, high)))
            repeated.extend(few * (-(-count // len(few))) if len(few) < count and _is_short(few) else few)
        elif depth < _MAX_DEPTH:
            made = self.make(field.message_type, depth + 1)
            if made.ByteSize() * count > 1 << 18:
                count = 1
            repeated.extend([made] * count)

    def _value(self, field: Any) -> Any:
        seen = self._values.of(field.name)
        if seen and self._rng.random() < 0.6:
            value = self._rng.choice(seen)
            if isinstance(value, int) and self._rng.random() < 0.3:
                value += self._rng.choice((-1, 1))
            return self._fitting(field, value)
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._rng.choice(_STRINGS)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._rng.choice(_BYTES)
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self._rng.random() < 0.5
        if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            return self._rng.choice(_FLOATS)
        return self._fitting(field, self._rng.choice(_INTS + _LONG_INTS) * self._rng.choice((1, 1, 1, -1)))

    def _fitting(self, field: Any, value: Any) -> Any:
        """Returns a value that the field can have: a field of another message may have the same name."""
        if field.type in _RANGES:
            low, high = _RANGES[field.type]
            return min(max(low, value), high) if isinstance(value, int) else low
        kinds = {FieldDescriptor.TYPE_STRING: str, FieldDescriptor.TYPE_BYTES: bytes, FieldDescriptor.TYPE_BOOL: bool}
        kind = kinds.get(field.type, float)
        return (
            kind(value)
            if isinstance(value, int | float | kind) and kind is not bytes
            else (value if isinstance(value, kind) else kind())
        )


def decoded(descriptor: Any, data: bytes) -> Message | None:
    """Returns a message. None: the bytes do not decode."""
    try:
        return GetMessageClass(descriptor).FromString(data)
    except DecodeError:
        return None


def _elements(field: Any, value: Any) -> Iterable[Any]:
    if _is_map(field):
        return ()
    return value if _is_repeated(field) else (value,)


def _is_short(values: list[Any]) -> bool:
    return not isinstance(values[0], str | bytes) or max(map(len, values)) < 300


def _is_repeated(field: Any) -> bool:
    return bool(field.is_repeated)


def _is_map(field: Any) -> bool:
    return field.type == FieldDescriptor.TYPE_MESSAGE and bool(field.message_type.GetOptions().map_entry)
