"""Copies of a shard's bytes that only their readers need, in room that others may want."""

from __future__ import annotations

from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.state.parameters import Parameters
from shardwell_wire.errors import ShardwellError, VersionGoneError


class ReaderCopies:
    """Each of them until its last reader is done.

    Once there is a newer version they give way to what needs their room, for their readers may be
    arbitrarily slow.

    Used on the event loop.

    Args:
        what: Names the shard in errors.
        unit: The unit's name, for errors.
        memory: Where the copies were lent.
    """

    def __init__(self, what: str, unit: str, memory: Memory) -> None:
        self._what, self._unit, self._memory = what, unit, memory
        self._copies: list[Parameters] = []

    def find(self, version: int) -> Parameters | None:
        """The copy of a version."""
        return next((copy for copy in self._copies if copy.version == version), None)

    def add(self, copy: Parameters) -> None:
        """A copy that is complete."""
        self._copies.append(copy)
        if copy.readers == 0:
            self._give_back(copy)

    def release(self, copy: Parameters) -> None:
        """A reader is done with a copy, or with what may become one."""
        copy.readers -= 1
        if copy.readers == 0 and copy in self._copies:
            self._give_back(copy)

    def supersede(self) -> None:
        """There is a newer version, or there will be in a moment."""
        for copy in self._copies:
            copy.newest = False
        if self._memory.staging.wanted:
            self.make_room()

    def make_room(self, *, held_too: bool = True) -> None:
        """Takes those of older versions from their readers."""
        for copy in [copy for copy in self._copies if not copy.newest and (held_too or not copy.holders)]:
            self._revoke(copy, self._gone(copy))

    def drop(self, why: ShardwellError) -> None:
        """Takes all from their readers, who are told why."""
        for copy in list(self._copies):
            self._revoke(copy, why)

    def _revoke(self, copy: Parameters, why: ShardwellError) -> None:
        copy.revoked = why
        self._give_back(copy)

    def _give_back(self, copy: Parameters) -> None:
        self._copies.remove(copy)
        self._memory.take_back(copy.buffer)

    def _gone(self, copy: Parameters) -> VersionGoneError:
        return VersionGoneError(
            f"version {copy.version} of {self._what} has been overwritten, and its copy gave way",
            unit=self._unit,
            version=copy.version,
        )
