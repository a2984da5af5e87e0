"""Units of a run and the servers that own their shards: placement, relocations, and who has confirmed them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwell_server.coordinator.run_checkpoints import RunCheckpoints
from shardwell_server.coordinator.signals import RunChanges, SharedCall
from shardwell_server.coordinator.storage.records import BackupRecord, BackupState, ShardRecord
from shardwell_wire.errors import ConflictError, NotFoundError, UnitMismatchError
from shardwell_wire.model.layout import Parameter, UnitLayout


class Relocations:
    """Relocations of a run's shards. ``changes``: counts the changes of the run."""

    def __init__(self, units: DeclaredUnits, checkpoints: RunCheckpoints, changes: RunChanges) -> None:
        self._units, self._checkpoints, self._changes = units, checkpoints, changes
        self.count = 0
        """Number of relocations: the placement of the run. Trainers learn ``announced``."""
        self.announced = 0
        """Newest placement that is durable."""
        self.unconfirmed: set[str] = set()
        """Servers that have not acknowledged that they are the primaries of their shards since a relocation."""
        self.releasing: set[tuple[str, str]] = set()
        """Server processes that may still have, and serve, shards of which they were the primaries. The step goes on
        when they have released these shards: trainers could push to them instead of to the new primaries."""
        self.moves: dict[tuple[int, int], PlannedMove] = {}
        """What the next commit moves, by (unit index, start) of the shard."""
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
        self._changes.changed.notify()
        return True

    def forget_plans(self) -> None:
        """Forgets confirmations and planned moves, because all units are placed anew."""
        self.unconfirmed, self.releasing, self.moves = set(), set(), {}

    def raise_count(self) -> None:
        """Counts a relocation. Call it in the same turn of the event loop as the changes of the units."""
        self.count += 1
        self._changes.touch()
        self._changes.changed.notify()

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

    def plan_moves(self, targets: Mapping[tuple[int, int], str]) -> None:
        """Plans what the next commit moves. Replaces the former plan.

        Args:
            targets: The server that gets the primary, by (unit index, start) of the shard.
        """
        units = list(self._units)
        self.moves = {
            (index, start_bytes): PlannedMove(server_id, units[index].processes_in_sync(start_bytes))
            for (index, start_bytes), server_id in targets.items()
        }

    def planned_promotions(self) -> list[Promotion]:
        """Returns the promotions of planned moves whose shards have all backups in sync that they had when planned.

        A backup may miss a step between the plan and the commit. A move would then release the last copy beside the
        new primary. None while a checkpoint is being saved: the former primaries, which write it, would be released.
        """
        if self._checkpoints.in_flight is not None:
            return []
        units = list(self._units)
        return [
            Promotion(units[index], backup, keep_former=True)
            for (index, start_bytes), move in self.moves.items()
            if move.in_sync <= units[index].processes_in_sync(start_bytes)
            for backup in units[index].backups
            if (backup.start_bytes, backup.server_id) == (start_bytes, move.server_id) and backup.in_sync
        ]

    def fail_backups(self, failed: Collection[tuple[int, int, str]], state: BackupState) -> bool:
        """Marks backups, given as (unit index, start, server id), that missed a step. Returns True if any was in sync.

        Backups that are being built are marked again, so that the build in progress does not count.

        Args:
            state: New state of those in sync: FORMER if the step is not committed yet, else BUILDING.
        """
        any_in_sync, units = False, list(self._units)
        for index, start_bytes, server_id in failed:
            for backup in units[index].backups if index < len(units) else ():
                key = (backup.start_bytes, backup.server_id)
                if key == (start_bytes, server_id) and backup.is_wanted:
                    any_in_sync = any_in_sync or backup.in_sync
                    self._units.set_backup_state(units[index], backup, state if backup.in_sync else backup.state)
        return any_in_sync

    def note_confirmed(self, server_id: str, count: int) -> None:
        """Records that a server acknowledged its shards after a relocation. Ignored if there was another one since."""
        if count == self.count:
            self.unconfirmed.discard(server_id)
            self._changes.changed.notify()

    def note_released(self, process: tuple[str, str]) -> None:
        """Records that a server process serves none of its former shards: it has released them, or is gone."""
        if process in self.releasing and not any(copy.process == process for _, copy in self._units.former):
            self.releasing.discard(process)
            self._changes.changed.notify()

    @property
    def settled(self) -> bool:
        """True if every primary has confirmed its role, and no other server still has to release a shard."""
        return not (self.unconfirmed or self.releasing)

    def set_rebalancing(self, rebalancing: bool) -> None:
        """Starts or ends moving shards to spread them evenly."""
        self.rebalancing = rebalancing
        self._changes.touch()


@dataclass(slots=True)
class Unit:
    """A unit whose shards are reserved on servers."""

    index: int
    layout: UnitLayout
    shards: tuple[ShardRecord, ...]
    """The primaries, in the order of their ranges."""
    published: bool = False
    """True once the initial values are version 0."""
    reserved: bool = field(default=True, kw_only=True)
    """False while it is unknown whether the owners have the memory of a unit that is not published: the unit is being
    placed again, or a former coordinator may have been placing it."""
    backups: tuple[BackupRecord, ...] = ()
    """Copies on other server processes, in any state."""
    publishing: SharedCall[None] = field(default_factory=SharedCall)
    gradients_differed: bool = False
    """True if tensor-parallel ranks have computed different gradients of a parameter that all of them hold."""

    @property
    def owners(self) -> set[str]:
        """Ids of the servers that own shards of the unit."""
        return {shard.server_id for shard in self.shards}

    def backups_of(self, shard: ShardRecord) -> list[BackupRecord]:
        """Returns the backups of a shard, in any state."""
        return [backup for backup in self.backups if backup.start_bytes == shard.start_bytes]

    def processes_in_sync(self, start_bytes: int) -> frozenset[tuple[str, str]]:
        """Returns the server processes with backups in sync of the shard that starts at a byte."""
        return frozenset(
            backup.process for backup in self.backups if backup.start_bytes == start_bytes and backup.in_sync
        )

    def shard_at(self, start_bytes: int) -> ShardRecord:
        """Returns the primary of the shard that starts at a byte. Raises KeyError if no shard starts there."""
        for shard in self.shards:
            if shard.start_bytes == start_bytes:
                return shard
        raise KeyError(start_bytes)


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A move of a primary to a backup's server, with the next commit."""

    server_id: str
    in_sync: frozenset[tuple[str, str]]
    """The server processes with backups in sync when the move was planned. One of them is the target."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """A backup that becomes the primary of its shard."""

    unit: Unit
    backup: BackupRecord
    keep_former: bool
    """True if the copy of the former primary may come back. It then becomes a former copy."""


@dataclass(frozen=True, slots=True)
class Initializer:
    """The trainer that sends initial values, and the epoch that its requests carry."""

    trainer: str
    epoch: int


class DeclaredUnits:
    """The units of a run, by index. ``changes``: counts the changes of the run."""

    def __init__(self, run: str, changes: RunChanges) -> None:
        self._run, self._changes = run, changes
        self._units: list[Unit] = []
        self._by_name: dict[str, Unit] = {}
        self._units_of_parameter: dict[str, list[Unit]] = {}
        self._processes: list[tuple[str, str]] | None = None
        self._holders: list[tuple[str, str]] | None = None
        self._former: list[tuple[Unit, BackupRecord]] | None = None
        self.unsaved: set[int] = set()
        """Indices of the units whose shards or backups changed since they were stored."""
        self.initializers: dict[int, Initializer] = {}
        """Trainers that send initial values, by the rank of dp rank 0 that holds the unit. Empty until the first unit
        is declared."""
        self.placing: dict[str, SharedCall[Unit | None]] = {}
        """Placements in flight, by unit name."""
        self.placement_lock = asyncio.Lock()
        """Held while a unit of the run is placed, so that a refused unit does not leave a gap in the indices."""

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    @property
    def layouts(self) -> list[UnitLayout]:
        """Layouts of all units, by index."""
        return [unit.layout for unit in self]

    @property
    def cuts(self) -> list[list[int]]:
        """Start of every shard in bytes of its unit's flat vector, by unit index."""
        return [[shard.start_bytes for shard in unit.shards] for unit in self]

    @property
    def unpublished(self) -> list[str]:
        """Names of the units that have no initial values yet."""
        return [unit.layout.unit for unit in self if not unit.published]

    @property
    def servers(self) -> dict[str, str]:
        """Incarnations of the server processes that received shards, by server id."""
        return dict(self.processes)

    @property
    def processes(self) -> list[tuple[str, str]]:
        """Server processes that received shards, as (server id, incarnation)."""
        if self._processes is None:
            self._processes = sorted({(shard.server_id, shard.incarnation) for unit in self for shard in unit.shards})
        return self._processes

    def owned_by(self, process: tuple[str, str]) -> list[Unit]:
        """Returns the units of which a server process, given as (server id, incarnation), owns shards."""
        return [unit for unit in self if any(at.process == process for at in unit.shards)]

    @property
    def holders(self) -> list[tuple[str, str]]:
        """Server processes with primaries or backups, as (server id, incarnation)."""
        if self._holders is None:
            backups = {backup.process for unit in self for backup in unit.backups}
            self._holders = sorted({*self.processes, *backups})
        return self._holders

    @property
    def former(self) -> list[tuple[Unit, BackupRecord]]:
        """The former copies, with their units."""
        if self._former is None:
            self._former = [(at, copy) for at in self for copy in at.backups if copy.state is BackupState.FORMER]
        return self._former

    @property
    def updated_processes(self) -> list[tuple[str, str]]:
        """Server processes that receive every update: those with primaries, or with backups that are kept. Also those
        with former copies, which they release before."""
        kept = {backup.process for unit in self for backup in unit.backups if backup.state is not BackupState.RELEASING}
        return sorted({*self.processes, *kept})

    def needs_updates(self, process: tuple[str, str]) -> bool:
        """True if a server process, given as (server id, incarnation), has a primary or a backup that is in sync."""
        return any(
            holder.process == process
            for unit in self
            for holder in (*unit.shards, *(backup for backup in unit.backups if backup.in_sync))
        )

    def retired_on(self, process: tuple[str, str]) -> list[tuple[Unit, BackupRecord]]:
        """Returns the copies that a server process must release, with their units."""
        return [
            (unit, backup)
            for unit in self
            for backup in unit.backups
            if backup.process == process and backup.state is BackupState.RELEASING
        ]

    def add(self, unit: Unit) -> None:
        """Adds the unit with the next index."""
        assert unit.index == len(self)
        self._units.append(unit)
        self._processes = self._holders = self._former = None
        self._by_name[unit.layout.unit] = unit
        for name in unit.layout.index_by_name:
            self._units_of_parameter.setdefault(name, []).append(unit)

    def load(self, units: Sequence[Unit]) -> None:
        """Replaces all units, because the run was loaded from a checkpoint. Known names in the model stay."""
        names = {each.name: each.model_names for unit in self for each in unit.layout.parameters if each.model_names}
        self._units, self._by_name, self._units_of_parameter, self.initializers = [], {}, {}, {}
        for unit in units:
            self.add(unit)
        self.set_model_names(names)
        self.unsaved.clear()

    def set_model_names(self, names: Mapping[str, tuple[str, ...]]) -> None:
        """Sets ``Parameter.model_names`` by the names in the run. Ignores names that no unit has."""
        for unit in {unit.index: unit for name in names for unit in self._units_of_parameter.get(name, ())}.values():
            if (named := unit.layout.named(names)) is not unit.layout:
                unit.layout = named
                self.unsaved.add(unit.index)
                self._changes.touch()

    def move(self, unit: Unit, shards: tuple[ShardRecord, ...]) -> None:
        """Replaces the shards of a unit after it was placed on other server processes."""
        unit.shards = shards
        self._note_relocated(unit)

    # Relocation. ``CoordinatorState.save`` stores these changes together with the run.

    def promote(self, promotion: Promotion) -> None:
        """Makes a backup the primary of its shard."""
        unit, backup = promotion.unit, promotion.backup
        former = unit.shard_at(backup.start_bytes)
        primary = ShardRecord(backup.start_bytes, backup.stop_bytes, backup.server_id, backup.incarnation)
        unit.shards = tuple(primary if shard is former else shard for shard in unit.shards)
        rest = [each for each in unit.backups if each is not backup]
        if promotion.keep_former:
            copy = BackupRecord(former.start_bytes, former.stop_bytes, former.server_id, former.incarnation)
            rest.append(replace(copy, state=BackupState.FORMER))
        unit.backups = tuple(rest)
        self._note_relocated(unit)

    def adopt(self, unit: Unit, copy: ShardRecord, incarnation: str) -> None:
        """Records that a restarted process of the same server has a copy. A copy other than the primary is a former
        one from now on."""
        if isinstance(copy, BackupRecord):
            adopted = replace(copy, incarnation=incarnation, state=BackupState.FORMER)
            unit.backups = tuple(adopted if each is copy else each for each in unit.backups)
        else:
            primary = replace(copy, incarnation=incarnation)
            unit.shards = tuple(primary if each is copy else each for each in unit.shards)
        self._note_relocated(unit)

    def add_backup(self, unit: Unit, backup: BackupRecord) -> None:
        """Adds a backup that is to be built."""
        unit.backups = (*unit.backups, backup)
        self._note_relocated(unit)

    def set_backup_state(
        self, unit: Unit, backup: BackupRecord, state: BackupState, *, placement: int | None = None
    ) -> BackupRecord:
        """Changes the state of a backup, and the number of its reservation if given. Returns the new record."""
        changed = replace(backup, state=state, placement=backup.placement if placement is None else placement)
        unit.backups = tuple(changed if each is backup else each for each in unit.backups)
        self._note_relocated(unit)
        return changed

    def remove_backup(self, unit: Unit, backup: BackupRecord) -> None:
        """Removes a backup whose memory is released or gone."""
        unit.backups = tuple(each for each in unit.backups if each is not backup)
        self._note_relocated(unit)

    def _note_relocated(self, unit: Unit) -> None:
        self._processes = self._holders = self._former = None
        self.unsaved.add(unit.index)
        self._changes.touch()

    def set_initializer(self, global_rank: int, initializer: Initializer | None) -> None:
        """Sets the trainer that sends the initial values of a rank's units. None: there is none."""
        self.initializers.pop(global_rank, None)
        if initializer is not None:
            self.initializers[global_rank] = initializer

    def find(self, name: str) -> Unit | None:
        return self._by_name.get(name)

    def require(self, name: str) -> Unit:
        """Returns a unit by name. Raises NotFoundError if it was not declared."""
        unit = self.find(name)
        if unit is None:
            raise NotFoundError(f"run {self._run!r} has no unit {name!r}: declare it first", run=self._run, unit=name)
        return unit

    def require_new_tensors(self, layout: UnitLayout) -> None:
        """Checks that no unit has a parameter or buffer of a new unit, except other parts of the same parameter.

        Raises:
            ConflictError: A unit has the tensor, or a part that overlaps; or its parts differ in their whole.
        """
        for name, index in layout.index_by_name.items():
            for unit in self._units_of_parameter.get(name, ()):
                self._require_other_part(unit.layout, layout, name, layout.parameters[index])

    def _require_other_part(self, declared: UnitLayout, layout: UnitLayout, name: str, new: Parameter) -> None:
        former, owner = declared.parameters[declared.index_by_name[name]], declared.unit
        if not (former.is_part and new.is_part):
            raise ConflictError(
                f"{tensor_noun(layout)} {name!r} of unit {layout.unit!r} already belongs to unit {owner!r}: wrap the "
                "model in the same way in every trainer, or use another run",
                parameter=name,
            )
        whole, other = (new.name, new.whole_shape, new.dtype, new.aliases), former
        if whole != (other.name, other.whole_shape, other.dtype, other.aliases):
            raise ConflictError(
                f"parameter {name!r} of unit {layout.unit!r} is a part of a {new.dtype} tensor of shape "
                f"{new.whole_shape}, but unit {owner!r} has a part of a {other.dtype} tensor of shape "
                f"{other.whole_shape}: every trainer must build the same model",
                parameter=name,
            )
        if new.box.overlaps(former.box):
            raise ConflictError(
                f"parameter {name!r} of unit {layout.unit!r} has elements that unit {owner!r} has too: the part of "
                f"shape {new.shape} at {new.offsets} overlaps the part of shape {former.shape} at {former.offsets}",
                parameter=name,
            )


def tensor_noun(layout: UnitLayout) -> str:
    """Returns the noun for the unit's tensors in messages."""
    return "buffer" if layout.holds_buffers else "parameter"


def _stages(layout: UnitLayout) -> str:
    return f"stage{'s' if len(layout.pp_ranks) > 1 else ''} {', '.join(map(str, layout.pp_ranks))}"


def require_same_layout(declared: UnitLayout, layout: UnitLayout) -> None:
    """Raises UnitMismatchError, naming the first difference, if two declarations of a unit differ."""
    unit = layout.unit

    def require_same(expected: object, actual: object, how: str, advice: str) -> None:
        if expected != actual:
            message = f"unit {unit!r} was declared {how}: {advice}"
            raise UnitMismatchError(message, unit=unit, expected=expected, actual=actual)

    ours, theirs = declared.placement, layout.placement
    how = f"with placement {ours!r}, now with {theirs!r}"
    require_same(ours, theirs, how, "every trainer must pass the same to fully_shard")
    how = f"with {declared.kind}, now with {layout.kind}"
    require_same(declared.kind, layout.kind, how, "give the unit another name")
    advice = (
        "names of units are unique over all stages. All trainers must divide the model into the same stages. Wrap with "
        "auto_wrap, which uses the names in the model, or pass fully_shard(..., name=)"
    )
    stages, others = _stages(declared), _stages(layout)
    require_same(stages, others, f"by pipeline {stages}, now by {others}", advice)
    how = f"with cp={declared.cp}, now with cp={layout.cp}"
    require_same(declared.cp, layout.cp, how, "every trainer must pass the same world to join")
    how = f"for tensor-parallel rank {declared.tp_rank}, now for rank {layout.tp_rank}"
    require_same(declared.tp_rank, layout.tp_rank, how, "give the unit another name")
    for expected, got in zip(declared.parameters, layout.parameters, strict=False):
        for what in ("name", "shape", "dtype", "aliases", "whole_shape", "offsets"):
            left, right = getattr(expected, what), getattr(got, what)
            if left != right:
                raise UnitMismatchError(
                    f"unit {unit!r}: {tensor_noun(layout)} {expected.name!r} was declared with {what} {left!r}, now "
                    f"with {right!r}: every trainer must build the same model, and another model needs another run",
                    unit=unit,
                    parameter=expected.name,
                    expected=left,
                    actual=right,
                )
    if len(declared.parameters) != len(layout.parameters):
        longer = max(declared.parameters, layout.parameters, key=len)
        first = longer[min(len(declared.parameters), len(layout.parameters))].name
        raise UnitMismatchError(
            f"unit {unit!r} was declared with {len(declared.parameters)} {declared.kind}, now with "
            f"{len(layout.parameters)}: only one declaration contains {first!r}; every trainer must build the same "
            "model",
            unit=unit,
            parameter=first,
        )
