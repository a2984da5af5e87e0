"""Backups of shards: which backups a primary has, and what a backup has of the step in flight."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TypeAlias

from shardwell_wire.v1 import shard_pb2

StepContent: TypeAlias = "shard_pb2.StepContent.ValueType"


@dataclass(eq=False)
class Backup:
    """A backup on another server, as its primary sees it. Used on the event loop."""

    server_id: str
    address: str
    """host:port of the server."""
    reservation: int
    """Number of the backup's reservation."""
    acknowledged: set[tuple[object, ...]] = field(default_factory=set)
    """What the backup has of the step in flight; see ``Replicator``."""
    shares_host: bool = True
    """False once the server could not read a file in shared memory of this server."""
    failure: str = ""
    """Why the backup is out of sync. Empty: it is not."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while something is sent to the backup."""


class Backups:
    """The backups of one primary on this server. Used on the event loop.

    A backup that missed something is out of sync for good: it stays listed with its failure until it is built again,
    and nothing more is sent to it.
    """

    def __init__(self) -> None:
        self.placement = 0
        """Number of the relocation that made this server the primary. 0: the shard was declared here."""
        self._by_server: dict[str, Backup] = {}

    @property
    def in_sync(self) -> list[Backup]:
        """Backups that have the committed state and everything that was sent since."""
        return [backup for backup in self._by_server.values() if not backup.failure]

    @property
    def failed(self) -> list[Backup]:
        """Backups that are out of sync."""
        return [backup for backup in self._by_server.values() if backup.failure]

    def on(self, server_id: str) -> Backup | None:
        """Returns the backup on a server, also if it is out of sync."""
        return self._by_server.get(server_id)

    def add(self, backup: Backup) -> None:
        """Adds a backup that has the committed state. Replaces an earlier one on the same server."""
        self._by_server[backup.server_id] = backup

    def fail(self, backup: Backup, reason: str) -> None:
        """Records that a backup has missed something."""
        backup.failure = backup.failure or reason

    def forget(self, server_id: str) -> None:
        """Forgets the backup on a server, because it is about to be built anew."""
        self._by_server.pop(server_id, None)

    def take_over(self, placement: int, backups: list[Backup]) -> None:
        """Sets the backups, because a relocation has made this server the primary."""
        self.placement = placement
        self._by_server = {backup.server_id: backup for backup in backups}


@dataclass(eq=False)
class Replica:
    """What a backup on this server has of the step in flight. Used on the event loop."""

    step: int
    placement: int
    """Number of the relocation that made the sender the primary."""
    generation: int
    """Rises whenever the gradient of the step changes on the primary."""
    contents: set[StepContent] = field(default_factory=set)
    """What has arrived."""
    confirmed: bool = False
    """True once the primary has confirmed that nothing is missing. Only then can the step be applied."""

    @property
    def order(self) -> tuple[int, int]:
        """Later content has a higher order."""
        return self.placement, self.generation
