"""The audit log: a line of JSON for each refused request, and for each that changes members, runs or placements.

A line has the time, the rpc, the peer's address, the caller's role, run and trainer, and the names, folders and
addresses in the request. It has no tokens, keys or values. Requests that are repeated in every step, such as
heartbeats, pushes and reads, are recorded only if they are refused. The size of the log is limited, and so is the
number of refusals per second.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from typing import Any

from google.protobuf.message import Message

from shardwell_server.authorization import CALLER
from shardwell_wire.errors import ShardwellError, wire_message

AUDIT_LOG_VARIABLE = "SHARDWELL_AUDIT_LOG"

MAX_FILE_BYTES, FORMER_FILES = 16 << 20, 4
"""The log is renamed to ``PATH.1`` when it has this size. ``PATH.4`` is the oldest."""

MAX_REFUSALS_PER_S = 100
"""Further refusals in the same second are counted, and the next line has their number."""

_RECORDED = frozenset(
    (
        "RegisterServer",
        "DeregisterServer",
        "ForgetServer",
        "DrainServer",
        "Join",
        "Leave",
        "DeclareUnit",
        "PublishInitialUnit",
        "DeleteRun",
        "SaveCheckpoint",
        "SetBackups",
        "RebalanceRun",
        "VerifyRun",
        "OpenTransport",
        "PinVersion",
        "ReserveUnit",
        "ReleaseUnit",
        "PublishUnit",
        "DropRun",
        "BeginRestore",
        "BeginCheckpoint",
        "LoadShards",
        "CopyShard",
        "PromoteShards",
        "ReleaseShards",
    )
)
"""Rpcs that are recorded when they are admitted."""

_NAMES = ("run", "run_id", "trainer", "server_id", "unit", "target_server_id")
_PLACES = ("resume", "checkpoint_dir", "url", "address", "target_address")
"""Fields of requests that are recorded: names, and what the server opens or connects to."""
_LONGEST = 4096
"""Characters of a field that are recorded."""

_logger = logging.getLogger(__name__)


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--audit-log``."""
    parser.add_argument(
        "--audit-log",
        metavar="PATH",
        default=os.environ.get(AUDIT_LOG_VARIABLE, ""),
        help="file for lines of JSON that say who did what and what was refused, at most "
        f"{(FORMER_FILES + 1) * MAX_FILE_BYTES >> 20} MiB with its former parts ({AUDIT_LOG_VARIABLE}, default: none)",
    )


def start(path: str) -> None:
    """Writes the audit log of this process to a file that only this user can read. Empty: there is none.

    Raises:
        ValueError: The file cannot be written.
    """
    if not path:
        return
    try:
        handler = _PrivateFile(path, maxBytes=MAX_FILE_BYTES, backupCount=FORMER_FILES)
    except OSError as error:
        raise ValueError(f"--audit-log {path}: {error.strerror}") from error
    handler.addFilter(_RefusalLimit())
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    _logger.propagate = False


def record_admitted(path: str, peer: str, request: Message) -> None:
    """Records a request that is about to be handled, unless it is of a kind that repeats."""
    if _logger.handlers and path.rpartition("/")[2] in _RECORDED:
        _write("admitted", path, peer, names=_names_in(request))


def record_refused(path: str, peer: str, error: ShardwellError) -> None:
    """Records a request that was refused."""
    if _logger.handlers:
        status = "" if error.status is None else error.status.name
        _write("refused", path, peer, status=status, reason=wire_message(error))


def _write(outcome: str, path: str, peer: str, **facts: Any) -> None:
    caller = CALLER.get()
    of_caller = (
        {}
        if caller is None
        else {"role": caller.role, "run": caller.run, "run_id": caller.run_id, "trainer": caller.member}
    )
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "outcome": outcome,
        "rpc": path,
        "peer": peer,
        "caller": {name: value for name, value in of_caller.items() if value},
        **facts,
    }
    _logger.info("%s", "", extra={"line": line})


def _names_in(request: Message) -> dict[str, str]:
    """Returns the names of runs, trainers and servers in a request, and the folders and addresses."""
    fields, names = request.DESCRIPTOR.fields_by_name, dict[str, str]()
    for outer in ("context", "header", "config"):
        if outer in fields:
            names |= _names_in(getattr(request, outer))
    for name in (*_NAMES, *_PLACES):
        field = fields.get(name)
        if field is not None and field.message_type is None and (value := getattr(request, name)):
            names[name] = str(value)[:_LONGEST]
    return names


class _PrivateFile(RotatingFileHandler):
    """Writes lines to a file that only this user can read."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_open_private)

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(record.line, ensure_ascii=False)  # type: ignore[attr-defined]


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


class _RefusalLimit(logging.Filter):
    """Drops refusals above ``MAX_REFUSALS_PER_S`` and adds their number to the next line."""

    def __init__(self) -> None:
        super().__init__()
        self._second, self._count, self._dropped = 0, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        line: dict[str, Any] = record.line  # type: ignore[attr-defined]
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._count = second, 0
        if line["outcome"] == "refused":
            self._count += 1
            if self._count > MAX_REFUSALS_PER_S:
                self._dropped += 1
                return False
        if self._dropped:
            line["refusals_not_recorded"], self._dropped = self._dropped, 0
        return True
