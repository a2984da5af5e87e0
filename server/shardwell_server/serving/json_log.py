"""The log of a server process: text, or one JSON object per line with the run, step and request that a line is about.

The fields of a request are set once per rpc, and only for a log in JSON. Lines of background work have the fields of
the rpc that started it.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import Message

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_NAMES = {
    "run": "run",
    "trainer": "trainer",
    "server_id": "server",
    "unit": "unit",
    "step": "step",
    "request_id": "request",
}
"""Fields of requests that lines have, with their names in lines."""

_OUTER = ("context", "header", "partition", "config")
"""Fields of requests with messages that have further names."""

_LONGEST = 256
"""Characters of a name in a line."""

_request: ContextVar[dict[str, Any]] = ContextVar("request")
_enabled = False


def configure(level: str, form: str, process: str) -> None:
    """Starts the log of this process on standard error.

    Args:
        level: Lowest level that is logged, such as ``info``.
        form: ``text`` or ``json``.
        process: Name of the process in each line in JSON, such as the id of the server.
    """
    global _enabled  # noqa: PLW0603  # one log per process
    _enabled = form == "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if _enabled else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def note_request(path: str, peer: str, request: Message) -> None:
    """Makes the names in a request fields of the lines that the current task logs."""
    if _enabled:
        _request.set({"rpc": path.rpartition("/")[2], "peer": peer, **_names_in(request)})


def _names_in(request: Message) -> dict[str, Any]:
    fields, names = request.DESCRIPTOR.fields_by_name, dict[str, Any]()
    for outer in _OUTER:
        if outer in fields and fields[outer].message_type is not None:
            names |= _names_in(getattr(request, outer))
    for name, shown in _NAMES.items():
        field = fields.get(name)
        if field is None or field.message_type is not None:
            continue
        value = getattr(request, name)
        if isinstance(value, str):
            value = value[:_LONGEST]
        if value or (name == "step" and "epoch" in fields):  # step 0 of a context is a step
            names[shown] = value
    return names


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, message, and the fields that are known.

    ``extra={"fields": {...}}`` of a logging call adds fields to its line.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": self._process,
            **_request.get({}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
