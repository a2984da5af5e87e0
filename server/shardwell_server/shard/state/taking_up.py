"""Takes up the shards that a former process of this server left in shared memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from shardwell_server.shard.arithmetic.shard_optimizer import OptimizerContent, PartContent
from shardwell_server.shard.memory.budget import Grant, Memory
from shardwell_server.shard.memory.mapped_memory import ShardFile, SharedMemory
from shardwell_server.shard.restart import shard_record
from shardwell_server.shard.restart.shard_files import ShardFiles
from shardwell_server.shard.restart.shard_record import PartRecord, ShardDescription, StepWord
from shardwell_server.shard.restart.undo import SUFFIX as UNDO_SUFFIX
from shardwell_server.shard.restart.undo import UndoLog, restore_interrupted
from shardwell_server.shard.shard_spec import ROLES, Role
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.unit.unit_shard import UnitShard, new_shard
from shardwell_server.shard.unit.values import LiveBuffer
from shardwell_wire.errors import ShardwellError
from shardwell_wire.host.shared_memory import HEAD_BYTES, UPDATING
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

logger = logging.getLogger(__name__)

ShardKey = tuple[str, str, int]
"""Run id, unit and start of a shard."""


@dataclass(frozen=True, slots=True)
class TakenShard:
    """A shard of a former process."""

    shard: UnitShard
    can_update: bool
    """Whether a step is prepared, or its update was interrupted."""

    def describe(self) -> coordinator_pb2.HeldShard:
        """Returns the message for the coordinator."""
        shard = self.shard
        return coordinator_pb2.HeldShard(
            run=shard.run.name,
            run_id=shard.run.run_id,
            unit=shard.unit,
            unit_index=shard.index,
            start_bytes=shard.start_bytes,
            stop_bytes=shard.stop_bytes,
            version=shard.version or 0,
            can_update=self.can_update,
            updating=shard.values.updating,
            placement=shard.placement,
            role=ROLES[shard.role],
            held_versions=shard.values.held.versions,
        )


class ShardsOfFormer:
    """The shards that a former process of this server left, primaries and backups.

    Requests find them as soon as they are taken up. Trainers are refused until the server is registered. The response
    to the registration says which of the shards this process keeps, and the role of each.

    Args:
        shared: Shared memory, whose folder a former process may have left.
        runs: The runs of this server by run id, to which the shards are added.
    """

    def __init__(self, shared: SharedMemory, memory: Memory, runs: dict[str, HostedRun]) -> None:
        self._shared, self._memory = shared, memory
        self._logs: dict[str, UndoLog] = {}
        """By run id."""
        self._shards: dict[ShardKey, TakenShard] = {}
        # Interrupted updates are undone before anything is read: step words may belong to them.
        restored, records = restore_interrupted(shared), shared.records()
        if records and not restored:
            logger.error("none of the %d shards of the former process in %s can be used", len(records), shared.folder)
        for name, data in records.items() if restored else ():
            try:
                self._take(name, data)
            # A record that was written by other software may contain anything.
            except (OSError, ValueError, LookupError, TypeError, ShardwellError) as error:
                logger.warning("cannot take up a shard of the former process: record %s: %s", name, error)
        used = {file for taken in self._shards.values() for file in taken.shard.shared_files}
        shared.remove_all_but(used)
        for taken in self._shards.values():
            identity = taken.shard.run
            run = runs.setdefault(identity.run_id, HostedRun(identity, self._logs[identity.run_id]))
            run.add_shard(taken.shard)
            run.kept_versions |= set(taken.shard.values.held.versions)  # until the next update names them
            if taken.shard.spec.asynchronous:  # older versions are lost, and work items start again
                run.read_by_rank().start_at(taken.shard.version or 0)
        logger.info("took up %d of %d shards of former processes in %s", len(self._shards), len(records), shared.folder)

    def held(self) -> list[coordinator_pb2.HeldShard]:
        """Returns the shards that the coordinator is asked to adopt."""
        return [taken.describe() for taken in self._shards.values()]

    def settle(self, adopted: Iterable[coordinator_pb2.HeldShard]) -> Mapping[UnitShard, Role | None]:
        """Returns the shards with their roles. None: the coordinator did not adopt the shard, and the caller drops it.

        Later calls return nothing.
        """
        backup = shard_pb2.SHARD_ROLE_BACKUP
        roles = {
            (held.run_id, held.unit, held.start_bytes): Role.BACKUP if held.role == backup else Role.PRIMARY
            for held in adopted
        }
        settled = {taken.shard: roles.get(key) for key, taken in self._shards.items()}
        self._shards.clear()
        return settled

    def _take(self, name: str, data: bytes) -> None:
        record, values = read(self._shared, data)
        spec, key = record.spec, (record.spec.run.run_id, record.spec.unit, record.spec.start_bytes)
        if key in self._shards:
            raise ValueError(f"{spec.what} has two records")
        if values.shown not in (record.version, UPDATING):
            raise ValueError(f"{spec.what} shows version {values.shown}, expected {record.version}")
        undo = self._logs.setdefault(spec.run.run_id, UndoLog(self._memory, self._shared))
        files = ShardFiles(spec, self._memory, self._shared, undo)
        shard = new_shard(spec, self._memory, record.role, files)
        shard.backups.placement = record.relocation
        try:
            self._restore(shard, files, name, record, values)
        except BaseException:
            self._memory.release([spec.memory_key])
            raise
        self._shards[key] = TakenShard(shard, can_update=record.prepared is not None)

    def _restore(
        self, shard: UnitShard, files: ShardFiles, name: str, record: ShardDescription, values: ShardFile
    ) -> None:
        if values.shown == UPDATING and record.prepared is None:
            # The update of the version before was complete, but its end was not shown.
            values.show(record.version)
        files.take_up(name, record, values)
        grant = Grant(self._memory, shard.initial_quota, shard.size_bytes, reserved=shard.initial_quota.try_acquire())
        shard.values.take_up(LiveBuffer.from_file(values, grant), record.version, self._held_files(record))
        parts = [_part(files, part) for part in record.parts]
        content = OptimizerContent(parts, record.averages_started)
        shard.take_up(content, None if files.mean is None else files.mean.tensor, record.prepared)

    def _held_files(self, record: ShardDescription) -> list[ShardFile]:
        size_bytes = HEAD_BYTES + record.spec.size_bytes
        found = list[ShardFile]()
        for name in filter(self._shared.has, record.held):
            try:
                found.append(ShardFile(self._shared.open(name, size_bytes), is_new=False))
            except OSError as error:  # the version counts as lost, and the others are taken up
                logger.warning("cannot take up an older version of %s: %s: %s", record.spec.what, name, error)
        return found


def recorded_files(shared: SharedMemory) -> set[str]:
    """Returns the names of the files that the next process of this server needs, as their records name them."""
    found = set(shared.names(UNDO_SUFFIX))
    for name, data in shared.records().items():
        with suppress(ValueError, LookupError, TypeError):  # the next process cannot read it either, and says so
            record = shard_record.decode(data)
            found |= {file for file in (name, record.values, *record.files, *record.held) if shared.has(file)}
    return found


def read(shared: SharedMemory, data: bytes) -> tuple[ShardDescription, ShardFile]:
    """Returns the state that a former process saved for a shard, and the file of its values.

    Args:
        shared: Shared memory with the files.
        data: The shard's record.

    Raises:
        ValueError: The record is damaged, or another version of the software wrote it.
        OSError: The file of the values is missing.
    """
    record = shard_record.decode(data)
    values = ShardFile(shared.open(record.values, HEAD_BYTES + record.spec.size_bytes), is_new=False)
    return record.continued(StepWord.read(values.step_word)), values


def _part(files: ShardFiles, part: PartRecord) -> PartContent:
    return PartContent(
        part.algorithm,
        part.step_count,
        {name: files.tensor_at(place) for name, place in part.state.items()},
        None if part.average is None else files.tensor_at(part.average),
        part.fresh_algorithm,
        part.initializers,
        {name: files.tensor_at(place) for name, place in part.fresh_state.items()},
        None if part.fresh_average is None else files.tensor_at(part.fresh_average),
    )
