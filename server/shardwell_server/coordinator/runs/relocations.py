"""Relocations of the shards of one run: which have happened, which servers have confirmed, which are planned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from shardwell_server.coordinator.runs.checkpoints import RunCheckpoints
from shardwell_server.coordinator.runs.units import DeclaredUnits, Promotion
from shardwell_server.coordinator.storage.records import BackupState
from shardwell_server.coordinator.waiting import Signal


class Relocations:
    """Relocations of a run's shards.

    Args:
        units: The units of the run.
        checkpoints: Its checkpoints.
        changed: Notified of every change.
        touch: Marks the run as changed; see ``Run.touch``.
    """

    def __init__(
        self, units: DeclaredUnits, checkpoints: RunCheckpoints, changed: Signal, touch: Callable[[], None]
    ) -> None:
        self._units, self._checkpoints, self._changed, self._touch = units, checkpoints, changed, touch
        self.count = 0
        """Number of relocations: the placement of the run. Trainers learn ``announced``."""
        self.announced = 0
        """Newest placement that is durable."""
        self.unconfirmed: set[str] = set()
        """Servers that have not acknowledged that they are the primaries of their shards since a relocation."""
        self.releasing: set[tuple[str, str]] = set()
        """Server processes that may still have, and serve, shards of which they were the primaries. The step goes on
        when they have released these shards: trainers could push to them instead of to the new primaries."""
        self.moves: dict[tuple[int, int], str] = {}
        """Planned moves: the server that a shard, given as (unit index, start), is promoted on with the next commit."""
        self.rebalancing = False
        """True while shards are moved to spread them evenly over the servers."""

    def restore(self, count: int, *, rebalancing: bool) -> None:
        """Restores the relocations after a coordinator restart."""
        self.count = self.announced = count
        self.rebalancing = rebalancing
        if count:
            self.unconfirmed = set(self._units.servers)  # the former coordinator may not have told them
            self.releasing = {copy.process for _, copy in self._units.former}

    def announce(self, count: int) -> bool:
        """Records that a placement is durable. Returns True if it is newer than the announced one."""
        if count <= self.announced:
            return False
        self.announced = count
        self._changed.notify()
        return True

    def forget_plans(self) -> None:
        """Forgets confirmations and planned moves, because all units are placed anew."""
        self.unconfirmed, self.releasing, self.moves = set(), set(), {}

    def raise_count(self) -> None:
        """Counts a relocation. Call it in the same turn of the event loop as the changes of the units."""
        self.count += 1
        self._touch()
        self._changed.notify()

    def promote(self, promotions: Iterable[Promotion]) -> None:
        """Makes backups the primaries of their shards. The servers must confirm this before the step goes on."""
        for promotion in promotions:
            if promotion.keep_former:
                self.releasing.add(promotion.unit.shard_at(promotion.backup.start_bytes).process)
            self.releasing.discard(promotion.backup.process)
            self._units.promote(promotion)
            self.moves.pop((promotion.unit.index, promotion.backup.start_bytes), None)
            self.unconfirmed.add(promotion.backup.server_id)
        self.raise_count()

    def plan(self, moves: Mapping[tuple[int, int], str]) -> None:
        """Replaces the planned moves, which the next commit makes."""
        self.moves = dict(moves)

    def planned_promotions(self) -> list[Promotion]:
        """Returns the promotions of planned moves whose targets are in sync.

        None while a checkpoint is being saved: the former primaries, which write it, would be released.
        """
        if self._checkpoints.in_flight is not None:
            return []
        units = list(self._units)
        return [
            Promotion(units[index], backup, keep_former=True)
            for (index, start_bytes), server_id in self.moves.items()
            for backup in units[index].backups
            if (backup.start_bytes, backup.server_id) == (start_bytes, server_id) and backup.in_sync
        ]

    def fail_backups(self, failed: Collection[tuple[int, int, str]], state: BackupState) -> bool:
        """Marks backups, given as (unit index, start, server id), that missed a step. Returns True if any was in sync.

        Backups that are being built are marked again, so that the build in progress does not count.

        Args:
            failed: The backups.
            state: New state of those in sync: FORMER if the step is not committed yet, else BUILDING.
        """
        any_in_sync, units = False, list(self._units)
        for index, start_bytes, server_id in failed:
            for backup in units[index].backups if index < len(units) else ():
                key = (backup.start_bytes, backup.server_id)
                if key == (start_bytes, server_id) and backup.is_wanted:
                    any_in_sync = any_in_sync or backup.in_sync
                    self._units.set_backup_state(units[index], backup, state if backup.in_sync else backup.state)
                    self._touch()
        return any_in_sync

    def note_confirmed(self, server_id: str, count: int) -> None:
        """Records that a server acknowledged its shards after a relocation. Ignored if there was another one since."""
        if count == self.count:
            self.unconfirmed.discard(server_id)
            self._changed.notify()

    def note_released(self, process: tuple[str, str]) -> None:
        """Records that a server process serves none of its former shards: it has released them, or is gone."""
        if process in self.releasing and not any(copy.process == process for _, copy in self._units.former):
            self.releasing.discard(process)
            self._changed.notify()

    @property
    def settled(self) -> bool:
        """True if every shard is served by its primary, which knows this, and by no other server."""
        return not (self.unconfirmed or self.releasing)

    def set_rebalancing(self, rebalancing: bool) -> None:
        """Starts or ends moving shards to spread them evenly."""
        self.rebalancing = rebalancing
        self._touch()
