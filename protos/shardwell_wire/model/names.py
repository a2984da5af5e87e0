"""Names: of what a request may contain, and of a run, whose id distinguishes it from deleted runs of the same name.

Servers check every request before they process it. The limits of parallel plans and logged numbers, which trainers
report and the coordinator stores with the run, are here, too.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from shardwell_wire.errors import InvalidRequestError

MAX_NAME_LENGTH = 200
"""Maximum number of characters in the name of a run, trainer, host or server."""

MAX_PATH_LENGTH = 1000
"""Maximum number of characters in the qualified name of a unit or parameter."""

_SHOWN_LENGTH = 100
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+(%[^\]\s]+)?\]|[^:/\[\]\s]+")
"""A name or an IPv4 address, or an IPv6 address in brackets."""
_MAX_LISTED = 8


def check_name(what: str, value: str, max_length: int = MAX_NAME_LENGTH) -> None:
    """Raises InvalidRequestError unless a value is a valid name of a run, trainer or host.

    Args:
        what: Description of the value, for the error.
        max_length: Maximum number of characters.
    """
    if not 0 < len(value) <= max_length or not value.isprintable() or value != value.strip():
        raise _name_error(what, value, f"1 to {max_length} printable characters, without spaces at the ends")


def check_path(what: str, value: str) -> None:
    """As ``check_name``, for the qualified name of a unit or parameter."""
    check_name(what, value, MAX_PATH_LENGTH)


def check_id(what: str, value: str) -> None:
    """Raises InvalidRequestError unless a value is a valid id, which may be used in paths and commands."""
    if len(value) > MAX_NAME_LENGTH or not _ID.fullmatch(value):
        expected = f"1 to {MAX_NAME_LENGTH} letters, digits, '.', '_', ':' and '-', starting with a letter or digit"
        raise _name_error(what, value, expected)


def is_host(text: str) -> bool:
    """Returns whether a text is a host name, an IPv4 address, or an IPv6 address in brackets."""
    return _HOST.fullmatch(text) is not None


def is_address(text: str) -> bool:
    """Returns whether a text has the form ``host:port``."""
    host, _, port = text.rpartition(":")
    return is_host(host) and port.isdecimal() and 0 < int(port) < 1 << 16


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns some known names for the error about an unknown one, the most similar first."""
    by_likeness = sorted(known, key=lambda each: (-SequenceMatcher(None, name, each).ratio(), each))
    more = f" and {len(by_likeness) - _MAX_LISTED} more" if len(by_likeness) > _MAX_LISTED else ""
    return ", ".join(map(repr, by_likeness[:_MAX_LISTED])) + more


def _name_error(what: str, value: str, expected: str) -> InvalidRequestError:
    shown = repr(value)
    if len(value) > _SHOWN_LENGTH:
        shown = f"{value[:_SHOWN_LENGTH]!r}... ({len(value)} characters)"
    return InvalidRequestError(f"{what} is {shown}: expected {expected}")


_Check = Callable[[str, str], None]

_BY_FIELD: dict[str, _Check] = {
    "run": check_name,
    "run_id": check_id,
    "trainer": check_name,
    "host": check_name,
    "incarnation": check_name,
    "server_id": check_id,
    "transport_id": check_name,
    "unit": check_path,
    "parameter": check_path,
    "state_name": check_name,
}
"""Checks by field name, for all messages."""

_BY_MESSAGE_AND_FIELD: dict[tuple[str, str], _Check] = {
    ("UnitSpec", "name"): check_path,
    ("ParameterSpec", "name"): check_path,
    ("ParameterSpec", "aliases"): check_path,
    ("ParameterSpec", "model_names"): check_path,
    ("NamesInModel", "name"): check_path,
    ("NamesInModel", "model_names"): check_path,
    ("ExchangeAddressRequest", "name"): check_name,
}


def check_names(message: Message) -> None:
    """Checks all names in a request, including nested messages. An empty name counts as not set and is valid.

    Raises:
        InvalidRequestError: A name is invalid; the message names the field and the expected form.
    """
    strings, messages = _fields(message.DESCRIPTOR)
    for name, check, repeated in strings:
        value = getattr(message, name)
        for each in value if repeated else (value,):
            if each:
                check(name, each)
    for name, repeated in messages:
        if repeated:
            for inner in getattr(message, name):
                check_names(inner)
        elif message.HasField(name):
            check_names(getattr(message, name))


@cache
def _fields(descriptor: Descriptor) -> tuple[list[tuple[str, _Check, bool]], list[tuple[str, bool]]]:
    """Returns the string fields that contain names, and the message fields that may contain such fields.

    The last entry of each tuple is whether the field is repeated.
    """
    strings, messages = [], []
    for field in descriptor.fields:
        repeated = _is_repeated(field)
        if field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field):
            if any(_fields(field.message_type)):
                messages.append((field.name, repeated))
        elif field.type == FieldDescriptor.TYPE_STRING:
            check = _BY_MESSAGE_AND_FIELD.get((descriptor.name, field.name)) or _BY_FIELD.get(field.name)
            if check is not None:
                strings.append((field.name, check, repeated))
    return strings, messages


def _is_repeated(field: Any) -> bool:
    # Newer versions of protobuf provide a property and deprecate the label.
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED


def _is_map(field: Any) -> bool:
    return bool(field.message_type.GetOptions().map_entry)


_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Name and id of a run. Runs with the same name and different ids are different runs."""

    name: str
    """Chosen by the user. Can be reused once the run is deleted."""
    run_id: str
    """Random. The coordinator creates it with the run and never reuses it."""

    def __str__(self) -> str:
        return f"{self.name}#{self.run_id}"


def new_run_id() -> str:
    """Returns a new run id: 16 random hexadecimal digits."""
    return secrets.token_hex(_ID_BYTES)


MAX_SCALARS = 64
"""Most numbers that a training script logs for one work item."""

MAX_SCALAR_NAME_LENGTH = 100
"""Most characters in the name of such a number."""


def check_scalars(names: Collection[str]) -> None:
    """Raises InvalidRequestError if there are too many logged numbers, or a name is invalid."""
    if len(names) > MAX_SCALARS:
        raise InvalidRequestError(f"{len(names)} numbers are logged for one work item: expected at most {MAX_SCALARS}")
    for name in names:
        check_name("name of a logged number", name, MAX_SCALAR_NAME_LENGTH)


MAX_DATA_POSITION_BYTES = 32 << 10
"""Most bytes of the position of one data rank's streams of samples, with the position before the last batch."""


def check_data_position(position: str) -> None:
    """Raises InvalidRequestError if the position of a data rank's streams is too long to be part of every commit."""
    if (size := len(position.encode())) > MAX_DATA_POSITION_BYTES:
        raise InvalidRequestError(
            f"the position of a stream of samples has {size} bytes: expected at most {MAX_DATA_POSITION_BYTES}, "
            "because it is part of every commit. Let state_dict() of the stream return less, or leave it out: the "
            "samples before the position are then read again when another trainer continues"
        )


MAX_PLAN_BYTES = 256 << 10
"""Most bytes of a plan. Trainers leave out the last rows of a larger plan."""

MAX_PLAN_ROWS = 2048
"""Most rows of a plan: stages, layers and collectives of all models."""

MAX_PLAN_MODELS = 16
"""Most models of a plan."""
