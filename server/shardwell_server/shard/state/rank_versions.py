"""The version that each data rank's work item reads, in an asynchronous run."""

from __future__ import annotations

from collections.abc import Iterable

from shardwell_wire.v1 import shard_pb2


class RankVersions:
    """The version that each data rank's work item reads. Versions never fall."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._first = 0
        """The version with which the run started on this server."""

    def start_at(self, version: int) -> None:
        """Makes all ranks read at least this version: this process has no older one."""
        self._first = max(version, self._first)

    def of(self, dp_rank: int) -> int:
        """Returns the version that a rank's work item reads."""
        return max(self._versions.get(dp_rank, 0), self._first)

    def raise_to(self, dp_rank: int, version: int) -> None:
        """Makes a rank's next work item, or its restarted one, read a later version. An earlier one changes nothing."""
        self._versions[dp_rank] = max(version, self.of(dp_rank))

    def update(self, versions: Iterable[shard_pb2.RankVersion]) -> None:
        """Calls ``raise_to`` for several ranks."""
        for each in versions:
            self.raise_to(each.dp_rank, each.version)

    def needed(self, dp: int) -> set[int]:
        """Returns the versions that the work items of all ranks read."""
        return {self.of(dp_rank) for dp_rank in range(dp)}
