"""Options that ``SHARDWELL_*`` variables set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from shardwell_wire.consistency import Consistency
from shardwell_wire.errors import InvalidRequestError, UsageError

_PREFIX = "SHARDWELL_"


def read_environment(options: type[Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of a dataclass that ``SHARDWELL_<FIELD>`` variables set.

    Fields of other types than text, numbers, booleans and tuples of text or integers have no variable, and neither have
    those with the metadata ``environment=False``. An empty variable counts as not set.
    """
    values: dict[str, Any] = {}
    for option in fields(options):
        parse = _PARSERS.get(str(option.type).removesuffix(" | None"))
        variable = f"{_PREFIX}{option.name.upper()}"
        text = environment.get(variable)
        if parse is not None and text and option.metadata.get("environment", True):
            values[option.name] = parse(variable, text)
    return values


def _text(variable: str, text: str) -> str:
    return text


def _texts(variable: str, text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _integers(variable: str, text: str) -> tuple[int, ...]:
    return tuple(_integer(variable, part) for part in text.split(","))


def _integer(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{variable}={text!r}: expected an integer") from None


def _consistency(variable: str, text: str) -> Consistency:
    try:
        return Consistency.parse(text)
    except InvalidRequestError as error:
        raise UsageError(f"{variable}: {error}") from None


def _number(variable: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{variable}={text!r}: expected a number") from None


def _boolean(variable: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise UsageError(f"{variable}={text!r}: expected 0 or 1")
    return text == "1"


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "str": _text,
    "int": _integer,
    "float": _number,
    "bool": _boolean,
    "Consistency": _consistency,
    "tuple[str, ...]": _texts,
    "tuple[int, ...]": _integers,
}
"""Functions of a variable's name and text, by the type of the field."""
