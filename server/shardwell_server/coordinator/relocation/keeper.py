"""Keeps the copies of shards as wanted: backups, drained servers, evenly spread shards.

``choose_server`` and ``plan_moves`` choose servers from the registry alone.

Note: [Wanted copies]
    Every decision follows from the current state: the primaries and backups of a run, its number of backups, whether
    shards are to be spread evenly, and which servers are draining. All of this is durable, so a restarted coordinator
    continues. A *round* releases copies that are not wanted, and builds a few that are missing. A planned move builds a
    backup on the target, in addition to the wanted ones. The next commit makes it the primary
    (``Relocations.moves``), and the former primary is released. A move therefore takes no backup away, unless no
    server has memory for the additional copy. A copy in sync is released only after its primary has answered: until
    then, it may be the only one.

    Copying a shard takes bandwidth from training, so a round copies a bounded number of bytes, and the next round waits
    for the next commit, or for a pause if there is none. Rounds follow each other without a pause while shards of a
    server that is about to stop are copied.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwell_server.coordinator.committer import UpdateSender
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.leases.trainer_leases import ItemLeases
from shardwell_server.coordinator.placed_units import Unit
from shardwell_server.coordinator.promotion import Promoter
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.cluster import Cluster, Server
from shardwell_server.coordinator.servers.shard_servers import ShardServers, reference
from shardwell_server.coordinator.signals import poll
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import BackupRecord, BackupState, ShardRecord
from shardwell_wire import fault_points
from shardwell_wire.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

ShardKey = tuple[int, int]
"""A shard of a run: unit index and first byte."""


@dataclass(frozen=True, slots=True)
class OwnedShard:
    """A shard and the server of its primary."""

    key: ShardKey
    size_bytes: int
    server_id: str


def host_of(server: Server) -> str:
    """Returns a name of the server's host: the boot id of its process if known, else the host of its address."""
    return server.process.partition("/")[0] or server.address.rpartition(":")[0]


def choose_server(cluster: Cluster, holders: Collection[str], refused: Collection[str]) -> Server | None:
    """Returns the server for another copy of a shard: on another host where there is one, with the most free memory.

    Args:
        holders: Ids of the servers that have a copy.
        refused: Ids of servers that have no memory, or cannot be reached.

    Returns:
        None if no live server can take a copy.
    """
    hosts = {host_of(cluster.servers[holder]) for holder in holders if holder in cluster.servers}
    able = [
        server
        for server in cluster.live
        if not server.draining and server.server_id not in holders and server.server_id not in refused
    ]
    return min(able, key=lambda server: (host_of(server) in hosts, -server.free_bytes, server.server_id), default=None)


def plan_moves(
    shards: Sequence[OwnedShard], servers: Sequence[str], refused: Mapping[ShardKey, Collection[str]]
) -> dict[ShardKey, str]:
    """Returns moves that spread the bytes of a run's primaries evenly: the new server of each shard that moves.

    Repeatedly moves the largest shard that makes the difference between two servers smaller. The same state gives the
    same plan, so moves that have not happened yet stay planned.

    Args:
        servers: Ids of the servers that may own shards.
        refused: Servers that have no memory for a shard.
    """
    loads = dict.fromkeys(sorted(servers), 0)
    owned: dict[str, list[OwnedShard]] = {server: [] for server in loads}
    for shard in sorted(shards, key=lambda shard: (-shard.size_bytes, shard.key)):
        if shard.server_id in loads:
            loads[shard.server_id] += shard.size_bytes
            owned[shard.server_id].append(shard)
    moves: dict[ShardKey, str] = {}
    while (move := _best_move(loads, owned, refused)) is not None:
        shard, source, target = move
        owned[source].remove(shard)
        owned[target].append(shard)
        loads[source] -= shard.size_bytes
        loads[target] += shard.size_bytes
        # The plan may move a shard several times, and back to its present server in the end.
        if target == shard.server_id:
            moves.pop(shard.key, None)
        else:
            moves[shard.key] = target
    return moves


def _best_move(
    loads: Mapping[str, int], owned: Mapping[str, Sequence[OwnedShard]], refused: Mapping[ShardKey, Collection[str]]
) -> tuple[OwnedShard, str, str] | None:
    """Returns the largest shard of the fullest server, and its target, that makes their difference smaller."""
    sources = sorted(loads, key=lambda server: (-loads[server], server))
    for source in sources:
        for target in reversed(sources):
            gap = loads[source] - loads[target]
            fitting = [
                shard
                for shard in owned[source]
                if 0 < shard.size_bytes < gap and target not in refused.get(shard.key, ())
            ]
            if fitting:
                # The shard closest to half of the gap evens out the two servers best.
                best = min(fitting, key=lambda shard: (abs(2 * shard.size_bytes - gap), shard.key))
                return best, source, target
    return None


logger = logging.getLogger(__name__)

_ROUND_BYTES = 32 << 20
"""Bytes of parameters that one round copies. Optimizer state, which is copied too, is about twice as much."""
_ROUND_SHARDS = 4
"""Most shards that are copied at the same time."""
_PAUSE_S = 1.0
"""Longest pause between rounds that copied shards. A commit ends the pause."""
_TICK_S = 0.25
"""How often runs are checked without any other reason."""
_REFUSED_FOR_S = 30.0
"""How long a server that had no memory for a copy, or could not be reached for it, is not asked again."""


@dataclass(slots=True)
class _Notes:
    """What the keeper remembers about a run. Not durable: only pauses and events depend on it."""

    refused: dict[tuple[ShardKey, str], float] = field(default_factory=dict)
    """When a server without memory for a shard, or out of reach, may be asked again, by shard and server."""
    release_problems: dict[str, str] = field(default_factory=dict)
    """Why copies on a server were not released the last time, by server."""
    complete: bool = False
    """True if all wanted backups were in sync."""
    problem: str = ""
    """Why the last build failed."""


class BackupKeeper:
    """Builds, moves and releases the copies of every run's shards. See Note: [Wanted copies].

    Args:
        promoter: Tells servers about moved shards, and releases copies.
        items: Fences former attempts.
        updates: Sends updates to new backups.
    """

    def __init__(
        self,
        state: CoordinatorState,
        servers: ShardServers,
        promoter: Promoter,
        items: ItemLeases,
        updates: UpdateSender,
    ) -> None:
        self._state, self._servers, self._promoter, self._items = state, servers, promoter, items
        self._copies, self._updates = servers.copies, updates
        self._notes: dict[str, _Notes] = {}
        """By run id."""
        self._drained: set[tuple[str, str]] = set()
        """Draining server processes that were reported as drained."""

    def start(self) -> None:
        """Watches all runs in the background."""
        self._state.tasks.start(self._watch())

    async def _watch(self) -> None:
        while True:
            for run in self._state.runs.values():
                if not run.calls.building.in_flight and self.has_work(run):
                    self._state.tasks.start(run.calls.building(self._work, run))
            existing = {run.identity.run_id for run in self._state.runs.values()}
            self._notes = {run_id: notes for run_id, notes in self._notes.items() if run_id in existing}
            self._report_drained()
            await self._state.cluster.changed.wait(_TICK_S)

    # Changes of what is wanted

    def set_count(self, run: Run, backups: int) -> None:
        """Changes the number of backups of a run's shards."""
        if backups != run.settings.backups:
            run.settings.backups = backups
            run.changes.touch()
            run.changed.notify()
            self._note(run).complete = False

    async def drain(
        self, server_id: str, *, epoch: int = 0, cancel: bool = False
    ) -> coordinator_pb2.DrainServerResponse:
        """Starts draining a server, or stops it, and reports the progress.

        Args:
            epoch: Epoch of the process that asks for its own draining. 0: someone else asks.
            cancel: True to stop draining.

        Raises:
            NotFoundError: The server is not registered.
            StaleEpochError: Another process has the id.
        """
        server = self._state.cluster.require(server_id)
        if epoch and epoch != server.epoch:
            raise StaleEpochError(
                f"server {server_id!r}: the process with epoch {epoch} was replaced by one with epoch {server.epoch}",
                server=server_id,
                epoch=server.epoch,
            )
        if epoch:
            server.leaving = True
        if server.draining == cancel:
            server.draining = not cancel
            await self._state.storage.save_server(server.to_record())
            if not cancel:
                message = f"server {server_id!r} at {server.address} hands its shards to other servers"
                self._state.events.add(EventKind.SERVER_DRAINING, message)
            self._state.cluster.changed.notify()
        return self._describe_drain(server)

    def _describe_drain(self, server: Server) -> coordinator_pb2.DrainServerResponse:
        process = (server.server_id, server.incarnation)
        held: list[ShardRecord] = []
        waiting_for = []
        for run in self._state.runs.values():
            # A unit without values loses nothing: the next declaration places it on other servers.
            published = [unit for unit in run.units if unit.published or unit.publishing.in_flight]
            own = [at for unit in published for at in (*unit.shards, *unit.backups) if at.process == process]
            held += own
            if own and server.draining:
                waiting_for += self.explain_drain(run, server)
        return coordinator_pb2.DrainServerResponse(
            shard_count=len(held), size_bytes=sum(shard.size_bytes for shard in held), waiting_for=waiting_for
        )

    async def rebalance(self, run: Run, *, report_only: bool) -> coordinator_pb2.RebalanceRunResponse:
        """Starts moving shards of a run until they are spread evenly, and reports the progress.

        Raises:
            InvalidRequestError: The run is asynchronous.
        """
        if run.asynchronous:
            raise InvalidRequestError(
                f"run {run.name!r} has consistency={run.settings.consistency}, in which shards cannot move"
            )
        if not report_only and not run.relocations.rebalancing:
            run.relocations.set_rebalancing(True)
            await self._state.save(run)
            self._state.cluster.changed.notify()
        targets = self._targets(run) if run.relocations.rebalancing else {}
        moving = [shard for unit, shard in self._shards(run) if (unit.index, shard.start_bytes) in targets]
        return coordinator_pb2.RebalanceRunResponse(
            rebalancing=run.relocations.rebalancing,
            shard_count=len(moving),
            size_bytes=sum(shard.size_bytes for shard in moving),
        )

    def explain_drain(self, run: Run, server: Server) -> list[str]:
        """Returns why a server cannot hand over its shards of a run, one line each. Empty: it is handing them over."""
        own = [(unit, shard) for unit, shard in self._shards(run) if shard.server_id == server.server_id]
        if run.asynchronous and own:
            protected = sum(any(copy.in_sync for copy in self._good(unit, shard)) for unit, shard in own)
            return [
                f"run {run.name!r} has consistency={run.settings.consistency}, in which shards cannot move; "
                f"{protected} of its {len(own)} shards on the server have a backup in sync. If all have one, stop the "
                "server: the backups replace it, and the work items in flight are computed again. Otherwise add "
                f"backups first (shardwell backups {run.name} 1)"
            ]
        stuck = [
            (unit, shard)
            for unit, shard in own
            if not self._good(unit, shard) and self._choose(run, unit, shard) is None
        ]
        if not stuck:
            return []
        problem = self._note(run).problem
        what = f"no other live server can take the shards of run {run.name!r}: start more servers"
        return [f"{what} ({problem})" if problem else what]

    # Rounds

    def _note(self, run: Run) -> _Notes:
        return self._notes.setdefault(run.identity.run_id, _Notes())

    def has_work(self, run: Run) -> bool:
        """True if copies must be built, moved or released."""
        if (
            run.deleted
            or not run.relocations.settled
            or run.calls.relocating.in_flight
            or run.checkpoints.restore is not None
        ):
            return False
        if not self._concerns(run):
            return False
        self._copies.settle(run)
        return any(self.unwanted(run)) or bool(self._missing(run)) or self._update_moves(run)

    def _concerns(self, run: Run) -> bool:
        """False if a run has no copies and none are wanted. Cheap: called at every change in the cluster."""
        return bool(
            run.settings.backups
            or run.relocations.rebalancing
            or run.relocations.moves
            or any(server.draining for server in self._state.cluster.servers.values())
            or any(unit.backups for unit in run.units)
        )

    async def _work(self, run: Run) -> None:
        """Runs one round, and waits for the next commit or a pause if shards were copied."""
        notes, step = self._note(run), run.committed_step
        await self._release_unwanted(run)
        builds = self._take_builds(run)
        if builds:
            run.changes.touch()
            await self._state.save_or_retry(run)  # a record of every copy, before any memory is reserved
            outcomes = await asyncio.gather(*(self._build(run, unit, backup) for unit, backup in builds))
            notes.complete = notes.complete and all(outcomes)
        self._update_moves(run)
        if run.relocations.moves and not run.members.live:
            await self._move_now(run)
        self._report(run)
        if (builds or run.relocations.moves) and not (builds and self._is_urgent(run)):
            await self._pause(run, step)

    def _is_urgent(self, run: Run) -> bool:
        """True if a server that is about to stop still has shards of a run."""
        servers = (self._state.cluster.servers.get(server_id) for server_id, _ in run.units.holders)
        return any(server is not None and server.live and server.leaving for server in servers)

    async def _pause(self, run: Run, step: int) -> None:
        """Waits for a commit after a step, at most ``_PAUSE_S``."""

        async def check() -> bool | None:
            return run.committed_step != step or run.deleted or None

        await poll(run.changed, check, _PAUSE_S)

    async def _release_unwanted(self, run: Run) -> None:
        # One server after the other: until its copies are released, those on others may replace a lost primary.
        for process in dict.fromkeys(backup.process for _, backup in [*self.unwanted(run)]):
            for unit, backup in [each for each in self.unwanted(run) if each[1].process == process]:
                primary = unit.shard_at(backup.start_bytes)
                if not backup.is_wanted or (backup.in_sync and not await self._servers.is_running(primary)):
                    continue  # it is to be released already, or may have to replace its primary
                if backup in unit.backups and self._copies.is_confirmed(run, primary):
                    run.units.set_backup_state(unit, backup, BackupState.RELEASING)
            if (server := self._state.cluster.servers.get(process[0])) is None or not server.live:
                continue
            problems = self._note(run).release_problems
            try:
                await self._promoter.release(run, process)
            except ShardwellError as error:
                if problems.get(process[0]) != str(error):
                    problems[process[0]] = str(error)
                    logger.warning("run %r: copies on %r are not released: %s", run.name, process[0], error)
            else:
                problems.pop(process[0], None)

    async def _build(self, run: Run, unit: Unit, backup: BackupRecord) -> bool:
        notes, key = self._note(run), (unit.index, backup.start_bytes)
        try:
            done = await self._copy(run, unit, backup)
        except ShardwellError as error:
            if isinstance(error, CapacityError):
                notes.refused[key, backup.server_id] = self._state.clock() + _REFUSED_FOR_S
                if any(each is backup for each in unit.backups):
                    run.units.remove_backup(unit, backup)
            elif isinstance(error, UnavailableError | DeadlineError):  # after repetitions for a lease
                self._give_up(run, unit, backup)
            self._add_problem(run, f"a copy of unit {unit.layout.unit!r} on {backup.server_id!r}: {error}")
            return False
        if done:
            notes.problem = ""
        return done

    def _give_up(self, run: Run, unit: Unit, backup: BackupRecord) -> None:
        """Gives up a server that the primary or the coordinator cannot reach, if another one can have the copy."""
        shard, key = unit.shard_at(backup.start_bytes), (unit.index, backup.start_bytes)
        if any(each is backup for each in unit.backups) and self._choose(run, unit, shard) is not None:
            self._note(run).refused[key, backup.server_id] = self._state.clock() + _REFUSED_FOR_S
            run.units.set_backup_state(unit, backup, BackupState.RELEASING)

    def _add_problem(self, run: Run, problem: str) -> None:
        notes = self._note(run)
        if problem != notes.problem:
            notes.problem = problem
            self._state.events.add(EventKind.BACKUPS_DELAYED, problem, run=run.name)

    async def _copy(self, run: Run, unit: Unit, backup: BackupRecord) -> bool:
        """Copies a shard from its primary to a backup, which is in sync afterwards. Replaces an outdated copy.

        Returns:
            False if the primary is not confirmed, or the backup missed a step meanwhile, or the shard has another
            primary. It must be built again.

        Raises:
            CapacityError: The server has no memory for the backup.
            ShardwellError: A server is unavailable, or refused.
        """
        primary, relocations = unit.shard_at(backup.start_bytes), run.relocations.count
        if not self._copies.is_confirmed(run, primary):
            return False
        # First drop what an earlier attempt has left. A reservation with a higher number is then a new one.
        release = shard_pb2.ReleaseShardsRequest(
            context=self._servers.context(run, run.committed_step),
            placement=await self._next_number(run),
            shards=[reference(unit, backup)],
        )
        released = await self._servers.call(backup.server_id, "ReleaseShards", release, retry_for_s=0.0)
        if released.free_bytes:
            self._state.cluster.note_free(backup.server_id, released.free_bytes)
        placement = await self._next_number(run)
        reserved = await self._servers.call(
            backup.server_id,
            "ReserveUnit",
            shard_pb2.ReserveUnitRequest(
                context=self._servers.context(run, 0),
                unit=unit.layout.to_proto(),
                unit_index=unit.index,
                start_bytes=backup.start_bytes,
                stop_bytes=backup.stop_bytes,
                dp=run.settings.world.dp,
                reduction_groups=run.settings.reduction_groups,
                placement=placement,
                role=shard_pb2.SHARD_ROLE_BACKUP,
                asynchronous=run.asynchronous,
                keep_versions=run.settings.keep_versions,
            ),
        )
        target = self._state.cluster.require(backup.server_id)
        self._state.cluster.note_free(backup.server_id, reserved.free_bytes)
        await run.wait_until_updated()  # copies while trainers compute, not while servers update
        if not self._is_current(run, unit, primary, backup):
            return False
        copied = await self._servers.call(
            primary.server_id,
            "CopyShard",
            shard_pb2.CopyShardRequest(
                context=self._servers.context(run, run.committed_step),
                shard=reference(unit, backup),
                placement=placement,
                target_server_id=backup.server_id,
                target_address=target.address,
            ),
        )
        fault_points.reach("coordinator.backup.copied", unit=unit.layout.unit, server=backup.server_id)
        # A relocation meanwhile may have told the primary which backups it has, without this one.
        if not self._is_current(run, unit, primary, backup) or run.relocations.count != relocations:
            return False
        if copied.version < run.committed_step:
            # The commit of this step came before the copy, so the backup's server may have acknowledged the update
            # without it.
            self._updates.repeat(run, backup.process)
        run.units.set_backup_state(unit, backup, BackupState.IN_SYNC, placement=placement)
        await self._state.save(run)
        run.changed.notify()
        return True

    def _is_current(self, run: Run, unit: Unit, primary: ShardRecord, backup: BackupRecord) -> bool:
        """True if the primary and the backup are as they were when the build started."""
        unchanged = any(each is backup for each in unit.backups) and any(each is primary for each in unit.shards)
        return unchanged and not run.deleted

    async def _next_number(self, run: Run) -> int:
        """Returns the number of a reservation or release. No other gets it, even after a restart. All of them are lower
        than that of a later restore, whose shards they must not affect.

        Raises:
            StepStateError: The run is being loaded from a checkpoint, which drops all copies.
        """
        if run.checkpoints.restore is not None:
            raise StepStateError(f"run {run.name!r} is being loaded from a checkpoint", run=run.name)
        number = run.changes.next_epoch()
        await self._state.save(run)
        return number

    # What is wanted

    def _shards(self, run: Run) -> Iterator[tuple[Unit, ShardRecord]]:
        for unit in run.units:
            if unit.published:
                for shard in unit.shards:
                    yield unit, shard

    def _good(self, unit: Unit, shard: ShardRecord) -> list[BackupRecord]:
        """Returns the backups that count: in sync or being built, on a server that stays."""
        return [backup for backup in unit.backups_of(shard) if backup.is_wanted and not self._is_draining(backup)]

    def _is_draining(self, shard: ShardRecord) -> bool:
        server = self._state.cluster.servers.get(shard.server_id)
        return server is not None and server.draining

    def _targets(self, run: Run) -> dict[ShardKey, str]:
        """Returns the servers that shards are to move to. Empty id: any other server."""
        if run.asynchronous:
            return {}  # a copy of a shard has the newest version only
        targets = {(unit.index, shard.start_bytes): "" for unit, shard in self._shards(run) if self._is_draining(shard)}
        if run.relocations.rebalancing:
            staying = [server.server_id for server in self._state.cluster.live if not server.draining]
            owned = [
                OwnedShard((unit.index, shard.start_bytes), shard.size_bytes, shard.server_id)
                for unit, shard in self._shards(run)
            ]
            refused: dict[ShardKey, set[str]] = {}
            for key, server_id in self._refused(run):
                refused.setdefault(key, set()).add(server_id)
            targets |= plan_moves(owned, staying, refused)
        return targets

    def _refused(self, run: Run) -> list[tuple[ShardKey, str]]:
        notes, now = self._note(run), self._state.clock()
        notes.refused = {at: until for at, until in notes.refused.items() if until > now}
        return list(notes.refused)

    def _target_copy(self, unit: Unit, shard: ShardRecord, target: str) -> BackupRecord | None:
        """Returns the copy that a shard moves to: the one on ``target``, or any that counts, in sync first."""
        able = [backup for backup in self._good(unit, shard) if target in ("", backup.server_id)]
        return min(able, key=lambda backup: not backup.in_sync, default=None)

    def unwanted(self, run: Run) -> Iterator[tuple[Unit, BackupRecord]]:
        """Yields the copies to be released, with their units."""
        targets, wanted = self._targets(run), run.settings.backups
        for unit in run.units:
            for backup in unit.backups:
                if backup.state is BackupState.RELEASING and self._can_be_asked(backup):
                    yield unit, backup
        for unit, shard in self._shards(run):
            key, good = (unit.index, shard.start_bytes), self._good(unit, shard)
            moving = self._target_copy(unit, shard, targets[key]) if key in targets else None
            others = sorted((at for at in good if at is not moving), key=lambda at: not at.in_sync)
            yield from ((unit, backup) for backup in others[wanted:])
            enough = sum(at.in_sync for at in good) >= wanted or not self._can_take(run, unit, shard)
            for backup in unit.backups_of(shard):
                if self._is_draining(backup) and backup.is_wanted and enough:
                    yield unit, backup

    def _can_be_asked(self, backup: BackupRecord) -> bool:
        server = self._state.cluster.servers.get(backup.server_id)
        return server is not None and server.live

    def _can_take(self, run: Run, unit: Unit, shard: ShardRecord) -> bool:
        return self._choose(run, unit, shard) is not None or bool(self._good(unit, shard))

    def _choose(self, run: Run, unit: Unit, shard: ShardRecord) -> Server | None:
        """Returns a server for another copy of a shard."""
        key = (unit.index, shard.start_bytes)
        refused = {server_id for at, server_id in self._refused(run) if at == key}
        holders = {shard.server_id, *(backup.server_id for backup in unit.backups_of(shard))}
        return choose_server(self._state.cluster, holders, refused)

    def _missing(self, run: Run) -> list[tuple[Unit, ShardRecord, str | None]]:
        """Returns (unit, shard, server) of the copies to build. None: the server of a building record."""
        targets, wanted = self._targets(run), run.settings.backups
        found: list[tuple[Unit, ShardRecord, str | None]] = []
        for unit, shard in self._shards(run):
            key, good = (unit.index, shard.start_bytes), self._good(unit, shard)
            if any(not backup.in_sync for backup in good):
                found.append((unit, shard, None))
                continue
            if key in targets and self._target_copy(unit, shard, targets[key]) is None:
                target = targets[key] or getattr(self._choose(run, unit, shard), "server_id", "")
                holds = {shard.server_id, *(backup.server_id for backup in unit.backups_of(shard))}
                if target and target not in holds:
                    found.append((unit, shard, target))
            elif len(good) < wanted + (key in targets) and (server := self._choose(run, unit, shard)) is not None:
                found.append((unit, shard, server.server_id))
        return found

    def _take_builds(self, run: Run) -> list[tuple[Unit, BackupRecord]]:
        """Returns the copies that this round builds. Adds records of new ones."""
        builds: list[tuple[Unit, BackupRecord]] = []
        size_bytes = 0
        for unit, shard, server_id in self._missing(run):
            if builds and (len(builds) >= _ROUND_SHARDS or size_bytes + shard.size_bytes > _ROUND_BYTES):
                break
            if server_id is None:
                backup = next(at for at in self._good(unit, shard) if not at.in_sync)
                if not self._can_be_asked(backup):
                    continue
            else:
                server = self._state.cluster.servers[server_id]
                backup = BackupRecord(shard.start_bytes, shard.stop_bytes, server_id, server.incarnation)
                run.units.add_backup(unit, backup)
                server.reserved_bytes += shard.size_bytes  # so that the next choice counts it
            builds.append((unit, backup))
            size_bytes += shard.size_bytes
        return builds

    # Moves

    def _update_moves(self, run: Run) -> bool:
        """Plans the promotions of the next commit. Returns True if trainers that could commit are missing."""
        targets, moves = self._targets(run), {}
        for unit, shard in self._shards(run):
            key = (unit.index, shard.start_bytes)
            if key in targets:
                copy = self._target_copy(unit, shard, targets[key])
                if copy is not None and copy.in_sync and self._stays_protected(run, unit, shard, copy):
                    moves[key] = copy.server_id
        run.relocations.plan_moves(moves)
        if run.relocations.rebalancing and not targets:
            run.relocations.set_rebalancing(False)
            self._state.events.add(EventKind.RUN_REBALANCED, "its shards are spread evenly", run=run.name)
        return bool(moves) and not run.members.live

    def _stays_protected(self, run: Run, unit: Unit, shard: ShardRecord, target: BackupRecord) -> bool:
        """True if a shard has enough backups besides the copy that it moves to, or cannot get more."""
        others = [backup for backup in self._good(unit, shard) if backup is not target]
        if sum(backup.in_sync for backup in others) >= run.settings.backups:
            return True
        return all(backup.in_sync for backup in others) and self._choose(run, unit, shard) is None

    async def _move_now(self, run: Run) -> None:
        """Moves shards of a run without trainers, which commits nothing. What was pushed to the step is dropped."""
        if (
            run.commits.writing
            or run.commits.pending_updates
            or not run.relocations.settled
            or not (promotions := run.relocations.planned_promotions())
        ):
            return
        run.relocations.promote(promotions)
        run.work.restart()
        await self._state.save_or_retry(run)
        targets = ", ".join(sorted({repr(at.backup.server_id) for at in promotions}))
        self._state.events.add(EventKind.SHARDS_MOVED, f"{len(promotions)} shards moved to {targets}", run=run.name)
        self._promoter.start(run)
        while not run.relocations.settled and not run.deleted:
            await run.changed.wait(_PAUSE_S)
        self._items.start_fencing(run)

    # Reports

    def _report(self, run: Run) -> None:
        notes, wanted = self._note(run), run.settings.backups
        shards = list(self._shards(run))
        complete = all(sum(at.in_sync for at in self._good(unit, shard)) >= wanted for unit, shard in shards)
        if complete and not notes.complete and wanted and shards:
            size_bytes = wanted * sum(shard.size_bytes for _, shard in shards)
            message = f"{wanted} of each of {len(shards)} shards, {size_bytes} bytes of parameters"
            self._state.events.add(EventKind.BACKUPS_IN_SYNC, message, run=run.name)
        notes.complete = complete

    def _report_drained(self) -> None:
        draining = {(at.server_id, at.incarnation) for at in self._state.cluster.servers.values() if at.draining}
        self._drained &= draining
        for process in draining - self._drained:
            if not any(process in run.units.holders for run in self._state.runs.values()):
                self._drained.add(process)
                message = f"server {process[0]!r} has no shards any more: it may be stopped"
                self._state.events.add(EventKind.SERVER_DRAINED, message)
