"""One shard of one unit: its values, the gradient of the step in flight, and how an update makes the next version.

Shards have backups on other servers: which ones a primary has, and what a backup has of the step in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch

from shardwell_server import optimizer_checks
from shardwell_server.shard.arithmetic.algorithms import Settings
from shardwell_server.shard.arithmetic.reduction import MAX_BYTES
from shardwell_server.shard.arithmetic.shard_optimizer import (
    OptimizerContent,
    RestoredPart,
    ShardOptimizer,
    allocate_ordinary,
    settings_of,
)
from shardwell_server.shard.arithmetic.update_pieces import Clipping
from shardwell_server.shard.concurrency import OpenStreams
from shardwell_server.shard.memory.budget import BufferQuota, Memory
from shardwell_server.shard.memory.mapped_memory import ShardFile
from shardwell_server.shard.restart.shard_files import RecordedState, ShardFiles
from shardwell_server.shard.restart.shard_record import PreparedRecord
from shardwell_server.shard.restart.undo import ChangedRange, locate, mapped, place_of
from shardwell_server.shard.shard_spec import Role, Segments, ShardSpec, shaped
from shardwell_server.shard.unit.encoded_versions import EncodedVersions
from shardwell_server.shard.unit.partitions import Partitions
from shardwell_server.shard.unit.step_gradient import PushedBuffers, StepGradient
from shardwell_server.shard.unit.values import Snapshots, Values
from shardwell_server.shard.unit.version_changes import VersionChanges
from shardwell_wire.errors import (
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.model.topology import runs_on_trainers
from shardwell_wire.v1 import common_pb2, shard_pb2

StepContent: TypeAlias = "shard_pb2.StepContent.ValueType"


@dataclass(frozen=True, slots=True)
class StepUpdate:
    """What makes the next version of a run's shards from a step's mean gradients."""

    step: int
    """The step. Shards at this version get the next one."""
    optimizer: common_pb2.OptimizerStep
    """The step's optimizer, valid by itself."""
    groups: Mapping[int, Sequence[int]]
    """The group of each parameter, by unit index. Units that are not named are not optimised."""
    key: bytes
    """``optimizer_checks.allocation_key`` of the optimizer."""
    clip_coefficient: float = 1.0
    """Factor for every gradient."""

    @classmethod
    def of(cls, step: int, optimizer: common_pb2.OptimizerStep, clip_coefficient: float = 1.0) -> StepUpdate:
        """Returns the update of a step by an optimizer."""
        # Tuples are faster to read than fields of a message.
        groups = {unit.unit_index: tuple(unit.group_indices) for unit in optimizer.units}
        return cls(step, optimizer, groups, optimizer_checks.allocation_key(optimizer), clip_coefficient)

    @property
    def runs_on_trainers(self) -> bool:
        """True if trainers run the optimizer and stage the new values."""
        return runs_on_trainers(self.optimizer.algorithm)

    def settings(self) -> list[Settings]:
        """Returns the settings of each parameter group."""
        return [settings for _, settings in settings_of(self.optimizer)]

    @property
    def clipping(self) -> Clipping:
        """How gradients are scaled and clamped."""
        value = self.optimizer.clip_value if self.optimizer.HasField("clip_value") else None
        return Clipping(self.clip_coefficient, value)

    @property
    def decay(self) -> float | None:
        """Weight of the previous averages. None: they do not change."""
        return self.optimizer.ema_decay if self.optimizer.HasField("ema_decay") else None


class UnitShard:
    """One shard of a unit of parameters. Used on the event loop; methods named ``compute_*`` run in a thread.

    Args:
        spec: Run, unit and range of the shard.
        role: What the server does with the shard.
        files: Files from which another process of the server can take up the shard. None: nothing outlives the process.
    """

    def __init__(
        self, spec: ShardSpec, memory: Memory, role: Role = Role.PRIMARY, files: ShardFiles | None = None
    ) -> None:
        self.spec, self.role, self.memory, self._files = spec, role, memory, files
        self.run, self.layout, self.index, self.dp = spec.run, spec.layout, spec.index, spec.dp
        self.start_bytes, self.stop_bytes, self.size_bytes = spec.start_bytes, spec.stop_bytes, spec.size_bytes
        self.unit, self.what, self.placement = spec.unit, spec.what, spec.placement
        parts = Segments(spec)
        self.plans, self.segments, self.segment_of = parts.plans, parts.segments, parts.segment_of
        self.numbers_of, self.views = parts.numbers_of, parts.views
        self.partitions = Partitions(spec, memory)
        self.gradient = (PushedBuffers if spec.layout.holds_buffers else StepGradient)(
            spec, parts, memory, self.partitions, files
        )
        """The gradient of the step in flight."""
        self.unchanging = asyncio.Lock()
        """Held while the committed state is updated, and by readers of all of it outside ``HostedRun.exclusively``."""
        self.backups = Backups()
        """Backups on other servers, if this shard is a primary."""
        self.received_step: ReceivedStep | None = None
        """What this shard has of the step in flight, if it is a backup."""
        self.updated_by_trainers = False
        """True if trainers ran the optimizer of the last update."""
        self.out_of_sync = ""
        """Why this shard, a backup, can never become a primary. Empty: it can."""
        self.values = Values(self.what, self.unit, memory, spec.held_versions)
        self.streams = OpenStreams()
        """Streams being received: initial values, contributions by rank, and optimizer partitions."""
        self.optimizer: ShardOptimizer | None = None
        """The optimizer with its state. None before the first update is prepared."""
        self.optimizer_bytes = 0
        """Size of the optimizer's state on this server, including that of optimizers that run on the trainers."""
        self.initial_quota = BufferQuota(1)
        self.reader_copies = Snapshots(self.what, self.unit, memory)
        """Averages and replaced encodings that still have readers. ``Values`` has the snapshots of older versions."""
        self.encoded = EncodedVersions(self.plans, spec.start_bytes, memory, self.reader_copies)
        self.changes = VersionChanges(
            spec.layout, self.plans, spec.start_bytes, self.encoded, memory, self.reader_copies
        )

    @property
    def version(self) -> int | None:
        """The newest published version. None before the initial values are published."""
        return self.values.version

    def update_order(self, place: Mapping[int, int]) -> tuple[bool, int, int]:
        """Returns a key by which the shards of a run are updated in a step: buffers first, then in the given order.

        Args:
            place: Positions of units, by index. Other units follow, by index.
        """
        return not self.layout.holds_buffers, place.get(self.index, len(place)), self.index

    def check_range(self, start_bytes: int, stop_bytes: int) -> None:
        """Raises NotFoundError if the range of a stream differs from the shard's."""
        if (start_bytes, stop_bytes) != (self.start_bytes, self.stop_bytes):
            raise NotFoundError(
                f"{self.what}: this server owns [{self.start_bytes}, {self.stop_bytes}), "
                f"got [{start_bytes}, {stop_bytes}). The unit may have been cut anew",
                unit=self.unit,
            )

    def evict(self) -> None:
        """Releases everything that can be recreated or reread."""
        self.encoded.discard()
        self.changes.discard()
        self.values.evict()
        self.reader_copies.evict(self.values.has)
        self.partitions.evict()

    def drop(self, why: ShardwellError) -> None:
        """Releases everything. Waiting callers, readers and senders get the error."""
        self.streams.end_all(why)
        self.gradient.drop()
        self.gradient.kept.drop()
        self.partitions.close()
        self.encoded.discard()
        self.changes.discard()
        self.reader_copies.drop(why)
        if self._files is not None:
            self._files.close()
        self.values.drop(why)

    # ---- updating ----

    def check_update(self, update: StepUpdate) -> None:
        """Raises if ``update`` cannot make the next version.

        Raises:
            StepStateError: The step is not reduced, or is not the next step.
            InvalidRequestError: The optimizer does not fit the unit.
            ConflictError: The optimizer's state belongs to another algorithm.
        """
        groups = update.groups.get(self.index)
        self.values.check_not_dropped()
        if self.version != update.step or self.gradient.reduced is None:
            raise StepStateError(
                f"{self.what} cannot be updated for step {update.step}: it is at version {self.version} and has "
                f"{'a' if self.gradient.reduced else 'no'} reduced gradient",
                unit=self.unit,
            )
        if update.runs_on_trainers:
            self.check_partitions()
        if groups is not None and len(groups) != len(self.layout.parameters):
            raise InvalidRequestError(
                f"{self.what} has {len(self.layout.parameters)} parameters, but the optimizer names groups "
                f"for {len(groups)}"
            )
        if self.gradient.kept_numbers(groups) and self.gradient.contributions.has_sums:
            raise InvalidRequestError(
                f"{self.what} has sums of several ranks' gradients, which cannot be kept for a later step: several "
                "optimizers in turn need gradient_reduction='direct'"
            )
        if groups is not None:
            optimizer_checks.check_fit(update.optimizer, groups, self.layout, (self.start_bytes, self.stop_bytes))

    def check_partitions(self) -> None:
        """Raises IncompleteStepError unless the partitions of all data ranks are staged."""
        self.partitions.check_staged()

    async def prepare_update(self, update: StepUpdate) -> None:
        """Allocates the memory that ``update`` will need. Readers see no change.

        Args:
            update: The update, checked by ``check_update``.

        Raises:
            CapacityError: The memory does not fit the budget, or the operating system has none.
        """
        gradient, optimizer, key = self.gradient, update.optimizer, update.key
        numbers = gradient.kept_numbers(update.groups.get(self.index))
        if numbers and gradient.contributions.by_rank:
            gradient.kept.reserve(gradient.contributions.by_rank, numbers)
        if update.runs_on_trainers:
            return  # staged values have their memory already
        assert gradient.reduced is not None
        present, chosen = [each is not None for each in gradient.reduced.gradients], self._chosen_groups(update)
        applied, state_bytes = self._require_optimizer(), 0
        if applied.is_prepared(present, chosen, key):
            return
        try:
            state_bytes, workspace_bytes = applied.needs(present, optimizer, chosen)
            reserved_bytes = self.partitions.state_bytes + state_bytes
            self.memory.reserve_optimizer(self.spec.memory_key, reserved_bytes, workspace_bytes)
            await gradient.compute(lambda: applied.prepare(present, optimizer, chosen, key))
            if self._files is not None:
                self._files.reserve_undo(applied.piece_bytes)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise CapacityError(
                f"the operating system refused to allocate {state_bytes or 'some'} bytes for the optimizer's state of "
                f"{self.what}, which --memory-budget allows. The step is not committed: lower the budget to what "
                "this process may use, add shard servers, or use an optimizer with less state",
                unit=self.unit,
                needed_bytes=state_bytes,
            ) from error
        finally:
            self.note_optimizer()
        self.record()

    def _require_optimizer(self) -> ShardOptimizer:
        """Returns the optimizer. Makes it when it is needed first."""
        if self.optimizer is None:
            assert self.values.live is not None
            views = zip(self.views(self.values.live.buffer), self.segments, strict=True)
            parameters = [shaped(part, self.layout, segment) for part, segment in views]
            allocate = allocate_ordinary if self._files is None else self._files.allocate
            self.optimizer = ShardOptimizer(parameters, allocate)
        return self.optimizer

    def note_optimizer(self) -> None:
        """Records the size of the optimizer's state in the memory budget."""
        own_bytes = 0 if self.optimizer is None else self.optimizer.size_bytes
        self.optimizer_bytes = self.partitions.state_bytes + own_bytes
        self.memory.note_optimizer(self.spec.memory_key, self.optimizer_bytes)

    async def update(self, update: StepUpdate, *, hold: bool = False, for_readers: bool = False) -> None:
        """Makes the next version from the version of the step and the mean gradient.

        After an error, the same call finishes the update. Until then, neither version can be read. If ``hold`` is True,
        the version of the step stays readable: for a work item, or if there is memory ``for_readers``.
        """
        await self.prepare_update(update)
        self._supersede(self.values.has if hold else self.values.held.find)
        changes = self.changes_values(update)
        async with self.values.becoming(update.step + 1, changes=changes, hold=hold, for_readers=for_readers):
            await self.gradient.compute(partial(self.compute_update, update))
        if update.runs_on_trainers:
            self.partitions.settle()
        self._end_step()
        self.updated_by_trainers = update.runs_on_trainers
        self.note_optimizer()

    def _supersede(self, readable: Callable[[int], object]) -> None:
        self.encoded.supersede()
        self.changes.supersede()
        self.reader_copies.supersede(readable)

    def _end_step(self) -> None:
        self.gradient.end_step()
        self.received_step = None

    # ---- updating together with other shards ----

    def joinable(self, update: StepUpdate) -> ShardOptimizer | None:
        """Returns the optimizer if ``JointUpdates`` can make the next version: it changes nothing but small tensors."""
        optimizer, gradient = self.optimizer, self.gradient
        if optimizer is None or gradient.reduced is None or self.size_bytes > MAX_BYTES or not self.values.is_unread:
            return None
        if self.unchanging.locked() or gradient.kept.ranks or gradient.kept_numbers(update.groups.get(self.index)):
            return None
        present = [each is not None for each in gradient.reduced.gradients]
        is_prepared = optimizer.is_prepared(present, self._chosen_groups(update), update.key)
        if not is_prepared or optimizer.joint_parts is None:
            return None
        return optimizer if self._files is None or self._files.can_save_update(self._state()) else None

    def changed_ranges(self) -> list[ChangedRange]:
        """Returns what a joint update changes."""
        assert self.optimizer is not None and self.optimizer.joint_parts is not None
        file, values = self.values_file, [part.values for part in self.optimizer.joint_parts]
        places = [(tensor.data_ptr(), tensor.nbytes) for tensor in (*values, *self.optimizer.changed_state())]
        if file is not None:
            places.append(place_of(file.step_word))
        arenas = [] if self._files is None else self._files.arenas
        files = mapped([*([] if file is None else [file.shared]), *arenas])
        return [locate(files, *each) for each in places]

    def begin_joint_update(self, version: int) -> None:
        """Begins to change the values in place: neither this nor the next version can be read."""
        self._supersede(self.values.held.find)
        self.values.begin_unread(version)

    def save_joint_update(self, version: int) -> None:
        """Describes the updated state, for the next process."""
        if self._files is not None:
            self._files.save_update(version, 0 if self.optimizer is None else self.optimizer.update_count)

    def end_joint_update(self, version: int, *, changes: bool) -> None:
        """Publishes the next version."""
        self.values.end_in_place(version, changes=changes)
        self._end_step()
        self.updated_by_trainers = False

    def changes_values(self, update: StepUpdate) -> bool:
        """True if the update of the reduced step may change a value of the shard."""
        if update.runs_on_trainers:
            return True
        assert self.gradient.reduced is not None
        chosen = zip(self.gradient.reduced.gradients, self._chosen_groups(update), strict=True)
        return any(gradient is not None and group >= 0 for gradient, group in chosen)

    def compute_update(self, update: StepUpdate) -> None:
        """Applies the optimizer, or the values that trainers staged, in place."""
        gradient, files = self.gradient, self._files
        assert gradient.reduced is not None and self.values.live is not None and self.version is not None
        numbers = gradient.kept_numbers(update.groups.get(self.index))
        if numbers or gradient.kept.ranks:
            # Gradients are kept before the next version becomes readable, because trainers then overwrite their
            # gradient buffers. They are kept before the optimizer runs, because keeping is idempotent and an optimizer
            # step is not.
            gradient.kept.compute_keep(gradient.contributions.by_rank, numbers)
        if update.runs_on_trainers:
            if files is not None:
                files.remove_record()
            self.partitions.compute_apply(self.values.live.buffer)
        else:
            assert self.optimizer is not None
            progress = None if files is None else files.progress(self._state(), self.optimizer.piece_bytes)
            gradients, chosen = gradient.reduced.gradients, self._chosen_groups(update)
            self.optimizer.step(gradients, update.optimizer, chosen, update.clip_coefficient, update.key, progress)
        if files is not None:
            files.save(self._state(self.version + 1))

    # ---- files that outlive the process ----

    @property
    def relocation(self) -> int:
        """Number of the relocation that made the server of this backup's primary the primary. 0 for a primary."""
        return self.backups.placement if self.role is Role.BACKUP else 0

    @property
    def is_recorded(self) -> bool:
        """True if another process of the server can take up the shard."""
        return self._files is not None and self._files.has_record

    def record(self) -> None:
        """Describes the shard's state, from which another process of the server can then continue."""
        if self._files is not None:
            self._files.save(self._state())

    async def record_prepared(self) -> None:
        """As ``record``, once the gradients of a step are reduced. Repeated calls have no effect."""
        if self._files is not None and not self.gradient.mean.recorded:
            if self.gradient.recorded_segments is None:
                await self.gradient.share_mean()
            self.record()
            self.gradient.mean.recorded = True

    def _state(self, updated_to: int | None = None) -> RecordedState | None:
        """Returns the state that the shard's record describes. None: the shard has state that no record can describe.

        Args:
            updated_to: The version that an update has just made. None: the published version.
        """
        values, gradient, version = self.values_file, self.gradient, updated_to or self.version
        if self.role is Role.RETIRED or gradient.kept.ranks or self.partitions.states or version is None:
            return None
        if values is None:
            return None
        step, reduced = None, gradient.reduced
        if updated_to is None and reduced is not None and (present := gradient.recorded_segments) is not None:
            step = PreparedRecord(present, reduced.skipped)
        return RecordedState(
            role=self.role,
            relocation=self.relocation,
            version=version,
            values=values,
            optimizer=self.optimizer,
            prepared=step,
            held=self.values.held.file_names,
        )

    @property
    def values_file(self) -> ShardFile | None:
        """The file of the values. None: they are in ordinary memory."""
        return None if self.values.live is None else self.values.live.file

    @property
    def shared_files(self) -> list[str]:
        """Names of the files from which another process of the server can take up the shard."""
        values = [] if self.values_file is None else [self.values_file.name]
        return values if self._files is None else [*values, *self.values.held.file_names, *self._files.names]

    def take_up(self, content: OptimizerContent, mean: torch.Tensor | None, prepared: PreparedRecord | None) -> None:
        """Continues with the state of a former process, after its values.

        Args:
            content: The optimizer's state.
            mean: The mean gradient's file. uint8. [size_bytes]
            prepared: The prepared step. None: there was none.
        """
        if content.parts:
            self._require_optimizer().take_up(content)
            self.note_optimizer()
        if prepared is not None:
            self.gradient.take_up(mean, prepared)
            self._confirm_step()

    def _confirm_step(self) -> None:
        """Lets a backup apply the prepared step of a former process. Anything that its primary sends replaces it."""
        if self.role is Role.BACKUP and self.version is not None:
            self.received_step = ReceivedStep(self.version, self.backups.placement, generation=0, confirmed=True)

    def check_averaged(self) -> None:
        """Raises StepStateError if there are no averages to read."""
        if self.optimizer is None or not self.optimizer.averages.has_started:
            raise StepStateError(
                f"{self.what} has no moving average: set optimizer.ema_decay before a step", unit=self.unit
            )

    def compute_averages(self, out: torch.Tensor) -> None:
        """Writes the shard's bytes with averages in place of values, where there are any. [size_bytes]"""
        assert self.values.live is not None and self.optimizer is not None
        out.copy_(self.values.live.buffer)
        for number, view in enumerate(self.views(out)):
            if (average := self.optimizer.averages[number]) is not None:
                view.copy_(average.reshape(-1))

    def _chosen_groups(self, update: StepUpdate) -> list[int]:
        """The group of each segment's parameter. -1: not optimised."""
        groups = update.groups.get(self.index)
        return [-1 if groups is None else groups[segment.parameter_index] for segment in self.segments]

    # ---- roles ----

    def check_primary(self) -> None:
        """Raises UnavailableError if this shard is a backup or has moved, so that trainers must not use it."""
        if self.role is not Role.PRIMARY:
            has = "has a backup of" if self.role is Role.BACKUP else "is no longer the primary of"
            raise UnavailableError(
                f"this server {has} {self.what}: ask the coordinator which server has the primary, and try again there",
                unit=self.unit,
            )

    def retire(self) -> None:
        """Rejects all later requests of trainers and all later steps: another server owns the shard."""
        self.role = Role.RETIRED

    def take_role(self, role: Role) -> None:
        """Makes the shard a primary or a backup. The prepared step stays, if there is one: its update may be due."""
        if role is self.role:
            return
        self.role = role
        if self.gradient.reduced is not None:
            self._confirm_step()
        self.record()

    def begin_step(self, received: ReceivedStep) -> None:
        """Starts to collect what the primary sends under a new generation. Drops what was sent earlier."""
        self.drop_step()
        self.received_step = received

    def drop_step(self) -> None:
        """Drops what a backup has of the step in flight."""
        was_recorded = self.gradient.mean.recorded
        self.gradient.drop()
        self.received_step = None
        if was_recorded:
            self.record()

    def has_prepared(self, step: int) -> bool:
        """True if this shard received the prepared step as a backup, and can apply it."""
        received = self.received_step
        return received is not None and received.step == step and received.confirmed

    def mark_out_of_sync(self, reason: str) -> None:
        """Records that this backup has missed a step. Its memory stays reserved until it is released or built anew."""
        self.out_of_sync = self.out_of_sync or reason
        self.drop_step()

    # ---- importing ----

    def allocate_values(self) -> None:
        """Allocates the memory of the first version of a shard whose state is imported. Its padding is zero.

        Raises:
            CapacityError: The operating system has no memory.
        """
        grant = self.memory.grant(self.size_bytes, self.initial_quota, f"imported values of {self.what}")
        received = grant.incoming(self.size_bytes)
        received.buffer.zero_()
        self.values.accept_initial(self.values.initial_epoch, received)

    def allocate_optimizer(self, parts: Sequence[RestoredPart], *, averages_begun: bool) -> list[RestoredPart]:
        """Allocates state that is imported; returns its memory, which the caller fills.

        Args:
            parts: The state of each segment. Tensors may be on the meta device.
            averages_begun: Whether a step has updated moving averages.

        Raises:
            CapacityError: The state does not fit the memory budget.
        """
        if not averages_begun and all(part.algorithm is None for part in parts):
            return [RestoredPart() for _ in parts]
        tensors = [tensor for part in parts for tensor in (*part.state.values(), part.average) if tensor is not None]
        self.memory.reserve_optimizer(self.spec.memory_key, sum(tensor.nbytes for tensor in tensors), 0)
        optimizer = self._require_optimizer()
        made = optimizer.allocate_like(parts)
        optimizer.restore(made, averages_begun=averages_begun)
        return made


class BufferShard(UnitShard):
    """A shard of buffers.

    It is fenced, prepared, read and pinned like a shard of parameters. The contribution of data rank 0 contains the new
    values of the buffers that its work item changed, and ``update`` copies them. There is no mean, no norm and no
    optimizer. A step that is skipped because a gradient is not finite stores new values too: as in PyTorch, the forward
    has already changed the buffers.
    """

    def check_partitions(self) -> None:
        """Does nothing: optimizers that run on the trainers stage nothing for buffers."""

    async def prepare_update(self, update: StepUpdate) -> None:
        """Does nothing: an update of buffers needs no memory."""

    def changes_values(self, update: StepUpdate) -> bool:
        return bool(self.gradient.contributions.by_rank)

    def compute_update(self, update: StepUpdate) -> None:
        """Copies the values that rank 0 pushed into the shard. Can be repeated."""
        assert self.values.live is not None and self.version is not None
        if self._files is not None:
            self._files.begin_update(self._state())
        self.gradient.compute_write(self.values.live.buffer)
        if self._files is not None:
            self._files.save(self._state(self.version + 1))


def new_shard(spec: ShardSpec, memory: Memory, role: Role, files: ShardFiles | None) -> UnitShard:
    """Returns a shard without content, and reserves its memory. Arguments as in ``UnitShard``.

    Raises:
        CapacityError: The shard does not fit the memory budget.
    """
    shard = (BufferShard if spec.layout.holds_buffers else UnitShard)(spec, memory, role, files)
    memory.reserve(
        spec.memory_key,
        spec.size_bytes,
        spec.max_contributions,
        holds_buffers=spec.layout.holds_buffers,
        held_versions=spec.held_versions,
    )
    return shard


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
        self.by_server: dict[str, Backup] = {}
        """The backups by server id, also those that are out of sync."""

    @property
    def in_sync(self) -> list[Backup]:
        """Backups that have the committed state and everything that was sent since."""
        return [backup for backup in self.by_server.values() if not backup.failure]

    def add(self, backup: Backup) -> None:
        """Adds a backup that has the committed state. Replaces an earlier one on the same server."""
        self.by_server[backup.server_id] = backup

    def take_over(self, placement: int, backups: list[Backup]) -> None:
        """Sets the backups, because a relocation has made this server the primary."""
        self.placement = placement
        self.by_server = {backup.server_id: backup for backup in backups}


@dataclass(eq=False)
class ReceivedStep:
    """What a backup on this server has received of the step in flight. Used on the event loop."""

    step: int
    placement: int
    """Number of the relocation that made the sender the primary."""
    generation: int
    """Rises whenever the gradient of the step changes on the primary."""
    contents: set[StepContent] = field(default_factory=set)
    """The kinds of content that have arrived."""
    confirmed: bool = False
    """True once the primary has confirmed that nothing is missing. Only then can the step be applied."""

    @property
    def order(self) -> tuple[int, int]:
        """Later content has a higher order."""
        return self.placement, self.generation
