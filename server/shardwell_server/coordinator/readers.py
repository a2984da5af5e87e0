"""The readers of a run: which version each of them has, as it said when it asked for weights, and who is waited for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.v1 import coordinator_pb2

FORGET_AFTER_S = 600.0
"""A reader that has not asked for this long is not listed any more."""
_MAX_READERS = 1000
_MAX_TEXT = 200
_MAX_HOLD_S = 86400.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a reader has reported. Not the message, which would keep the memory of its whole request."""

    name: str
    host: str
    version: int | None
    received_bytes: int
    hold_s: float
    """How long a run waits for the reader after its last request. 0: it does not."""
    at_s: float


class Readers:
    """What readers have reported. In memory only: after a coordinator restart, readers report again.

    Args:
        max_lag: ``RunSettings.max_reader_lag``.
    """

    def __init__(self, max_lag: int | None = None) -> None:
        self._max_lag = max_lag
        self._by_id: dict[str, _Seen] = {}
        """By random id of the reader, the one that has asked last at the end."""

    def note(self, report: coordinator_pb2.ReaderReport, now: float) -> None:
        """Records a report. Raises InvalidRequestError for texts that cannot be shown."""
        for name, text in (("reader_id", report.reader_id), ("name", report.name), ("host", report.host)):
            if len(text) > _MAX_TEXT or not text.isprintable():
                raise InvalidRequestError(f"{name}={text[:_MAX_TEXT]!r}: expected at most {_MAX_TEXT} characters")
        if not 0 <= report.hold_s <= _MAX_HOLD_S:
            raise InvalidRequestError(f"hold_s is {report.hold_s}: expected 0 to {_MAX_HOLD_S:g} seconds")
        self._by_id.pop(report.reader_id, None)
        if report.leaving or not report.reader_id:
            return
        version = report.version if report.HasField("version") else None
        self._by_id[report.reader_id] = _Seen(
            report.name, report.host, version, report.received_bytes, report.hold_s, now
        )
        if len(self._by_id) > _MAX_READERS:
            del self._by_id[next(iter(self._by_id))]

    def describe(self, newest: int, now: float) -> list[coordinator_pb2.ReaderSummary]:
        """Returns the readers that have asked lately, those that are furthest behind first."""
        self._by_id = {
            name: seen for name, seen in self._by_id.items() if now - seen.at_s < max(FORGET_AFTER_S, seen.hold_s)
        }
        summaries = [
            coordinator_pb2.ReaderSummary(
                name=seen.name,
                host=seen.host,
                version=seen.version,
                lag=None if seen.version is None else max(0, newest - seen.version),
                received_bytes=seen.received_bytes,
                silent_s=now - seen.at_s,
                hold_s=seen.hold_s,
            )
            for seen in self._by_id.values()
        ]
        return sorted(summaries, key=lambda each: (-each.lag, each.name))

    # ---- max_reader_lag ----

    def note_answered(self, reader_id: str, now: float) -> None:
        """Records that a request of a reader was answered, which may have taken long."""
        if (seen := self._by_id.get(reader_id)) is not None:
            self._by_id[reader_id] = replace(seen, at_s=now)

    def waited_for(self, newest: int, now: float) -> list[str]:
        """Returns a line for each reader that must read before the run commits the version after ``newest``."""
        return [
            f"reader {seen.name!r} on {seen.host} has read {_read(seen)}, and the run is at version {newest} with "
            f"max_reader_lag={self._max_lag}: it goes on when the reader has read version "
            f"{newest - (self._max_lag or 0)}, or {seen.hold_s:g} s after its last request, which was "
            f"{now - seen.at_s:.1f} s ago"
            for _, seen in self._behind(newest)
            if now - seen.at_s < seen.hold_s
        ]

    def give_up(self, newest: int, now: float) -> list[str]:
        """Stops waiting for readers that have been silent for too long. Returns a line for each, for users."""
        silent = [(name, seen) for name, seen in self._behind(newest) if now - seen.at_s >= seen.hold_s]
        self._by_id.update({name: replace(seen, hold_s=0.0) for name, seen in silent})
        return [
            f"reader {seen.name!r} on {seen.host} has read {_read(seen)} and has sent no request for {seen.hold_s:g} "
            f"s: version {newest + 1} is committed without it. The run waits for it again after its next request"
            for _, seen in silent
        ]

    def _behind(self, newest: int) -> list[tuple[str, _Seen]]:
        if self._max_lag is None:
            return []
        return [
            (name, seen)
            for name, seen in self._by_id.items()
            if seen.hold_s and newest - (seen.version or 0) > self._max_lag
        ]


def _read(seen: _Seen) -> str:
    return "no version yet" if seen.version is None else f"version {seen.version}"
