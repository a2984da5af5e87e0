"""What the users of a run should see in the logs of its trainers, such as that a checkpoint was not saved."""

from __future__ import annotations

from shardwell_wire.v1 import coordinator_pb2

_KEPT = 8


class Notices:
    """The newest notices of a run. Not durable. Used on the event loop."""

    def __init__(self) -> None:
        self._newest = 0
        self._kept: list[coordinator_pb2.Notice] = []

    @property
    def newest(self) -> int:
        """Number of the newest notice. 0: there was none."""
        return self._newest

    def add(self, message: str, *, now: float, cause: str = "") -> None:
        """Adds a notice.

        Args:
            message: The text.
            now: Seconds since 1970. Numbers rise with it, so that they also rise when the coordinator restarts.
            cause: See the message ``Notice``.
        """
        self._newest = max(self._newest + 1, int(1000 * now))
        self._kept = [*self._kept, coordinator_pb2.Notice(number=self._newest, message=message, cause=cause)][-_KEPT:]

    def after(self, number: int) -> list[coordinator_pb2.Notice]:
        """Returns the notices with higher numbers, oldest first."""
        return [notice for notice in self._kept if notice.number > number]

    def forget_failures(self) -> None:
        """Forgets the notices with a cause, which is remedied: trainers that join later need not know."""
        self._kept = [notice for notice in self._kept if not notice.cause]
