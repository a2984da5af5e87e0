"""The readers of a run: which version each of them has, as it said when it asked for weights."""

from __future__ import annotations

from dataclasses import dataclass

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.v1 import coordinator_pb2

FORGET_AFTER_S = 600.0
"""A reader that has not asked for this long is not listed any more."""
_MAX_READERS = 1000
_MAX_TEXT = 200


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a reader has reported. Not the message, which would keep the memory of its whole request."""

    name: str
    host: str
    version: int | None
    received_bytes: int
    at_s: float


class Readers:
    """What readers have reported. In memory only: after a coordinator restart, readers report again."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Seen] = {}
        """By random id of the reader, the one that has asked last at the end."""

    def note(self, report: coordinator_pb2.ReaderReport, now: float) -> None:
        """Records a report. Raises InvalidRequestError for texts that cannot be shown."""
        for name, text in (("reader_id", report.reader_id), ("name", report.name), ("host", report.host)):
            if len(text) > _MAX_TEXT or not text.isprintable():
                raise InvalidRequestError(f"{name}={text[:_MAX_TEXT]!r}: expected at most {_MAX_TEXT} characters")
        self._by_id.pop(report.reader_id, None)
        if report.leaving or not report.reader_id:
            return
        version = report.version if report.HasField("version") else None
        self._by_id[report.reader_id] = _Seen(report.name, report.host, version, report.received_bytes, now)
        if len(self._by_id) > _MAX_READERS:
            del self._by_id[next(iter(self._by_id))]

    def describe(self, newest: int, now: float) -> list[coordinator_pb2.ReaderSummary]:
        """Returns the readers that have asked lately, those that are furthest behind first."""
        self._by_id = {name: seen for name, seen in self._by_id.items() if now - seen.at_s < FORGET_AFTER_S}
        summaries = [
            coordinator_pb2.ReaderSummary(
                name=seen.name,
                host=seen.host,
                version=seen.version,
                lag=None if seen.version is None else max(0, newest - seen.version),
                received_bytes=seen.received_bytes,
                silent_s=now - seen.at_s,
            )
            for seen in self._by_id.values()
        ]
        return sorted(summaries, key=lambda each: (-each.lag, each.name))
