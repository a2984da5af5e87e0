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
    """How long a run waits for the reader to read a version. 0: it does not."""
    at_s: float
    """Time of the last request."""
    awaits: int | None = None
    """The version that its open request waits for."""
    waited_since_s: float | None = None
    """When the run began to wait for the reader. None: it does not wait."""


class Readers:
    """What readers have reported. In memory only: after a coordinator restart, readers report again.

    Args:
        max_lag: ``RunSettings.max_reader_lag``.
    """

    def __init__(self, max_lag: int | None = None) -> None:
        self._max_lag = max_lag
        self._by_id: dict[str, _Seen] = {}
        """By random id of the reader, the one that has asked last at the end."""

    def note(self, report: coordinator_pb2.ReaderReport, now: float, awaits: int | None = None) -> None:
        """Records a report, and the version that its request waits for.

        Raises:
            InvalidRequestError: A text cannot be shown, or a number is out of range.
        """
        for name, text in (("reader_id", report.reader_id), ("name", report.name), ("host", report.host)):
            if len(text) > _MAX_TEXT or not text.isprintable():
                raise InvalidRequestError(f"{name}={text[:_MAX_TEXT]!r}: expected at most {_MAX_TEXT} characters")
        if not 0 <= report.hold_s <= _MAX_HOLD_S:
            raise InvalidRequestError(f"hold_s is {report.hold_s}: expected 0 to {_MAX_HOLD_S:g} seconds")
        former = self._by_id.pop(report.reader_id, None)
        if report.leaving or not report.reader_id:
            return
        version = report.version if report.HasField("version") else None
        seen = _Seen(report.name, report.host, version, report.received_bytes, report.hold_s, now, awaits)
        if former is not None and former.version == version:  # it has not read: a request alone gives no more time
            seen = replace(seen, hold_s=former.hold_s, waited_since_s=former.waited_since_s)
        self._by_id[report.reader_id] = seen
        if len(self._by_id) > _MAX_READERS:
            free = (name for name, each in self._by_id.items() if not each.hold_s)
            del self._by_id[next(free, next(iter(self._by_id)))]

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
            self._by_id[reader_id] = replace(seen, at_s=now, awaits=None)

    def waited_for(self, newest: int, now: float) -> list[str]:
        """Returns a line for each reader that must read before the run commits the version after ``newest``."""
        return [
            f"reader {seen.name!r} on {seen.host} has read {_read(seen)}, and the run is at version {newest} with "
            f"max_reader_lag={self._max_lag}: it goes on when the reader has read version "
            f"{newest - (self._max_lag or 0)}, or in {seen.hold_s - _waited_s(seen, now):.1f} s"
            for seen in self._behind(newest).values()
        ]

    def give_up(self, newest: int, now: float) -> list[str]:
        """Call before each attempt to commit. Stops waiting for readers whose time is over; returns a line for each."""
        if self._max_lag is None:
            return []
        behind = self._behind(newest)
        since = {name: now - _waited_s(seen, now) for name, seen in behind.items()}
        late = {name: seen for name, seen in behind.items() if now - since[name] >= seen.hold_s}
        for name, seen in self._by_id.items():
            hold_s = 0.0 if name in late else seen.hold_s
            self._by_id[name] = replace(seen, hold_s=hold_s, waited_since_s=since.get(name))
        return [
            f"reader {seen.name!r} on {seen.host} has read {_read(seen)}, and the run has waited {seen.hold_s:g} s for "
            f"it: version {newest + 1} is committed without it. The run waits for it again when it has read"
            for seen in late.values()
        ]

    def _behind(self, newest: int) -> dict[str, _Seen]:
        """Returns the readers that the run waits for. A reader that waits for a later version is not one of them."""
        if self._max_lag is None:
            return {}
        return {
            name: seen
            for name, seen in self._by_id.items()
            if seen.hold_s and newest - (seen.version or 0) > self._max_lag and (seen.awaits or 0) <= newest
        }


def _waited_s(seen: _Seen, now: float) -> float:
    return 0.0 if seen.waited_since_s is None else now - seen.waited_since_s


def _read(seen: _Seen) -> str:
    return "no version yet" if seen.version is None else f"version {seen.version}"
