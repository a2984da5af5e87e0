"""One shard of one unit: its values, the gradient of the step in flight, and how an update makes the next version.

One shard of a unit of buffers: data rank 0 pushes new values, and an update stores them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from shardwell_server import optimizer_checks
from shardwell_server.shard.arithmetic.reduction import MAX_BYTES, Reduced
from shardwell_server.shard.arithmetic.shard_optimizer import OptimizerContent, ShardOptimizer
from shardwell_server.shard.concurrency import InThread, OpenStreams, uninterrupted
from shardwell_server.shard.gradients.contributions import Contribution
from shardwell_server.shard.gradients.shard_gradients import ShardGradients
from shardwell_server.shard.memory.budget import BufferQuota, Grant, IncomingBuffer, Memory
from shardwell_server.shard.memory.shared_memory import ShardFile, SharedMemory
from shardwell_server.shard.optimizer.applied_optimizer import AppliedOptimizer
from shardwell_server.shard.optimizer.partitions import Partitions
from shardwell_server.shard.restart.shard_files import ShardFiles
from shardwell_server.shard.restart.shard_record import PreparedRecord
from shardwell_server.shard.restart.undo import ChangedRange
from shardwell_server.shard.shard_spec import Role, ShardSpec, shaped
from shardwell_server.shard.state.replication import Backups, Replica
from shardwell_server.shard.versions.encoded_versions import EncodedVersions
from shardwell_server.shard.versions.values import LiveBuffer, Snapshots, Values
from shardwell_wire.errors import (
    InvalidRequestError,
    ShardwellError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.model.topology import runs_on_trainers
from shardwell_wire.v1 import common_pb2, shard_pb2


class UnitShard(ShardGradients):
    """One shard of a unit of parameters. Used on the event loop; methods named ``compute_*`` run in a thread.

    Args:
        spec: Run, unit and range of the shard.
        memory: The server's memory budget.
        shared: Shared memory for the parameters, if trainers on this host may map them.
        files: Files from which another process of the server can take up the shard. None: nothing outlives the process.
    """

    def __init__(
        self,
        spec: ShardSpec,
        memory: Memory,
        shared: SharedMemory | None = None,
        role: Role = Role.PRIMARY,
        files: ShardFiles | None = None,
    ) -> None:
        super().__init__(spec, memory, Partitions(spec, memory, shared))
        self.role, self._files = role, files
        self.unchanging = asyncio.Lock()
        """Held while the committed state is updated, and by readers of all of it outside ``HostedRun.exclusively``."""
        self.backups = Backups()
        """Backups on other servers, if this shard is a primary."""
        self.replica: Replica | None = None
        """What this shard has of the step in flight, if it is a backup."""
        self.updated_by_trainers = False
        """True if trainers ran the optimizer of the last update."""
        self.out_of_sync = ""
        """Why this shard, a backup, can never become a primary. Empty: it can."""
        self.values = Values(self.what, self.unit, memory, shared, spec.held_versions)
        self.streams = OpenStreams()
        """Streams being received: initial values, contributions by rank, and optimizer partitions."""
        self.applied = AppliedOptimizer(spec, memory, self.partitions, files, self._parameters)
        self.initial_quota = BufferQuota(1)
        self.reader_copies = Snapshots(self.what, self.unit, memory)
        """Averages and replaced encodings that still have readers. ``Values`` has the snapshots of older versions."""
        self.encoded = EncodedVersions(self.plans, spec.start_bytes, memory, self.reader_copies)

    @property
    def version(self) -> int | None:
        """The newest published version. None before the initial values are published."""
        return self.values.version

    @property
    def optimizer(self) -> ShardOptimizer | None:
        """The optimizer with its state. None before the first update is prepared."""
        return self.applied.optimizer

    def evict(self) -> None:
        """Releases everything that can be recreated or reread."""
        self.encoded.discard()
        self.reader_copies.evict()
        self.values.evict()
        self.partitions.evict()

    def drop(self, why: ShardwellError) -> None:
        """Releases everything. Waiting callers, readers and senders get the error."""
        self.streams.end_all(why)
        self.drop_contributions()
        self.kept.drop()
        self.partitions.close()
        self.encoded.discard()
        self.reader_copies.drop(why)
        if self._files is not None:
            self._files.close()
        self.values.drop(why)

    # ---- updating ----

    def check_update(self, step: int, optimizer: common_pb2.OptimizerStep, groups: Sequence[int] | None) -> None:
        """Raises if ``update`` cannot make version ``step + 1``.

        Args:
            step: The step.
            optimizer: The step's optimizer, valid by itself.
            groups: The group of each parameter of the unit. None: no parameter is optimised.

        Raises:
            StepStateError: The step is not reduced, or is not the next step.
            InvalidRequestError: The optimizer does not fit the unit.
            ConflictError: The optimizer's state belongs to another algorithm.
        """
        self.values.check_not_dropped()
        if self.version != step or self.reduced is None:
            raise StepStateError(
                f"{self.what} cannot be updated for step {step}: it is at version {self.version} and has "
                f"{'a' if self.reduced else 'no'} reduced gradient",
                unit=self.unit,
            )
        if runs_on_trainers(optimizer.algorithm):
            self.check_partitions()
        if groups is not None and len(groups) != len(self.layout.parameters):
            raise InvalidRequestError(
                f"{self.what} has {len(self.layout.parameters)} parameters, but the optimizer names groups "
                f"for {len(groups)}"
            )
        if self.kept_numbers(groups) and self.contributions.has_sums:
            raise InvalidRequestError(
                f"{self.what} has sums of several ranks' gradients, which cannot be kept for a later step: several "
                "optimizers in turn need gradient_reduction='direct'"
            )
        if groups is not None:
            optimizer_checks.check_fit(optimizer, groups, self.layout, (self.start_bytes, self.stop_bytes))

    def check_partitions(self) -> None:
        """Raises IncompleteStepError unless the partitions of all data ranks are staged."""
        self.partitions.check_staged()

    async def prepare_update(
        self, in_thread: InThread, optimizer: common_pb2.OptimizerStep, groups: Sequence[int] | None, key: bytes
    ) -> None:
        """Allocates the memory that ``update`` will need. Readers see no change.

        Args:
            in_thread: Runs tensor work in a thread.
            optimizer: The step's optimizer, checked by ``check_update``.
            groups: The group of each parameter of the unit. None: no parameter is optimised.
            key: ``optimizer_checks.allocation_key`` of the optimizer.

        Raises:
            CapacityError: The memory does not fit the budget, or the operating system has none.
        """
        if (numbers := self.kept_numbers(groups)) and self.contributions.by_rank:
            self.kept.reserve(self.contributions.by_rank, numbers)
        if runs_on_trainers(optimizer.algorithm):
            return  # staged values have their memory already
        assert self.reduced is not None
        present, chosen = [gradient is not None for gradient in self.reduced.gradients], self._chosen_groups(groups)
        work = partial(self._compute, in_thread)
        if await self.applied.prepare(present, optimizer, chosen, key, work) and self._files is not None:
            self._files.save(self)

    def _parameters(self) -> list[torch.Tensor]:
        """Returns the parameters in their shapes, by segment number."""
        assert self.values.live is not None
        views = zip(self.views(self.values.live.buffer), self.segments, strict=True)
        return [shaped(part, self.layout, segment) for part, segment in views]

    async def update(
        self,
        in_thread: InThread,
        step: int,
        optimizer: common_pb2.OptimizerStep,
        groups: Sequence[int] | None,
        clip_coefficient: float,
        key: bytes,
        *,
        hold: bool = False,
    ) -> None:
        """Makes version ``step + 1`` from version ``step`` and the mean gradient.

        After an error, the same call finishes the update. Until then, neither version can be read. If ``hold`` is True,
        version ``step`` stays readable, because a work item reads it.
        """
        await self.prepare_update(in_thread, optimizer, groups, key)
        self.encoded.supersede()
        self.reader_copies.supersede()
        changes = self.changes_values(optimizer, groups)
        async with self.values.becoming(step + 1, in_thread, changes=changes, hold=hold):
            await self._compute(in_thread, lambda: self.compute_update(optimizer, groups, clip_coefficient, key))
        if runs_on_trainers(optimizer.algorithm):
            self.partitions.settle()
        self._end_step()
        self.updated_by_trainers = runs_on_trainers(optimizer.algorithm)
        self.applied.note_size()

    def _end_step(self) -> None:
        self.discard_reduced()
        self.contributions.end_step(self.counted)
        self.replica = None

    # ---- updating together with other shards ----

    def joinable(self, groups: Sequence[int] | None, key: bytes) -> ShardOptimizer | None:
        """Returns the optimizer if ``JointUpdates`` can make the next version: it changes nothing but small tensors.

        Args:
            groups: The group of each parameter of the unit. None: no parameter is optimised.
            key: ``optimizer_checks.allocation_key`` of the optimizer.
        """
        optimizer = self.optimizer
        if optimizer is None or self.reduced is None or self.size_bytes > MAX_BYTES or not self.values.is_unread:
            return None
        if self.unchanging.locked() or self.kept.ranks or self.kept_numbers(groups):
            return None
        present = [gradient is not None for gradient in self.reduced.gradients]
        if not optimizer.is_prepared(present, self._chosen_groups(groups), key) or optimizer.joint_parts is None:
            return None
        return optimizer if self._files is None or self._files.can_save_update(self) else None

    def changed_ranges(self) -> Iterator[ChangedRange]:
        """Yields what a joint update changes."""
        assert self.optimizer is not None and self.optimizer.joint_parts is not None
        file, files = self.values_file, self._files
        for part in self.optimizer.joint_parts:
            yield ChangedRange.of(part.values, *(() if file is None else (file.name, file.offset_of(part.values))))
        for tensor in self.optimizer.changed_state():
            yield ChangedRange.of(tensor) if files is None else files.range_of(tensor)
        if file is not None:
            address, size_bytes, offset = file.step_word_range
            yield ChangedRange(address, size_bytes, file.name, offset)

    def begin_joint_update(self, version: int) -> None:
        """Begins to change the values in place: neither this nor the next version can be read."""
        self.encoded.supersede()
        self.reader_copies.supersede()
        self.values.begin_unread(version)

    def save_joint_update(self, version: int) -> None:
        """Describes the updated state, for the next process."""
        if self._files is not None:
            self._files.save_update(self, version)

    def end_joint_update(self, version: int, *, changes: bool) -> None:
        """Publishes the next version."""
        self.values.end_in_place(version, changes=changes)
        self._end_step()
        self.updated_by_trainers = False

    def changes_values(self, optimizer: common_pb2.OptimizerStep, groups: Sequence[int] | None) -> bool:
        """True if the update of the reduced step may change a value of the shard."""
        if runs_on_trainers(optimizer.algorithm):
            return True
        assert self.reduced is not None
        chosen = zip(self.reduced.gradients, self._chosen_groups(groups), strict=True)
        return any(gradient is not None and group >= 0 for gradient, group in chosen)

    def compute_update(
        self, optimizer: common_pb2.OptimizerStep, groups: Sequence[int] | None, clip_coefficient: float, key: bytes
    ) -> None:
        """Applies the optimizer, or the values that trainers staged, in place."""
        assert self.reduced is not None and self.values.live is not None and self.version is not None
        numbers = self.kept_numbers(groups)
        files = self._files
        if numbers or self.kept.ranks:
            # Gradients are kept before the next version becomes readable, because trainers then overwrite their
            # gradient buffers. They are kept before the optimizer runs, because keeping is idempotent and an optimizer
            # step is not.
            self.kept.compute_keep(self.contributions.by_rank, numbers)
        if runs_on_trainers(optimizer.algorithm):
            if files is not None:
                files.remove_record()
            self.partitions.compute_apply(self.values.live.buffer)
        else:
            assert self.optimizer is not None
            progress = None if files is None else files.progress(self)
            chosen = self._chosen_groups(groups)
            self.optimizer.step(self.reduced.gradients, optimizer, chosen, clip_coefficient, key, progress)
        if files is not None:
            files.save(self, self.version + 1)

    # ---- files that outlive the process ----

    def acquire_mean_file(self) -> torch.Tensor | None:
        files = self._files
        if files is None:
            return None
        if files.mean is not None and files.mean.tensor is self.mean.filling:
            files.replace_mean(self)
        return files.acquire_mean(self)

    @property
    def is_described(self) -> bool:
        """False if the shard has state that its record cannot describe."""
        return self.role is not Role.RETIRED and not (self.kept.ranks or self.partitions.states)

    @property
    def relocation(self) -> int:
        """Of a backup: the relocation that made the server of its primary the primary's. Else 0."""
        return self.backups.placement if self.role is Role.BACKUP else 0

    @property
    def recorded_segments(self) -> list[int] | None:
        """Numbers of the segments that the next update has a gradient for. None: the gradient is not in its file."""
        if self.reduced is None:
            return None
        present = self.mean.present
        return present if self.mean.in_file or not present else None

    @property
    def is_recorded(self) -> bool:
        """True if another process of the server can take up the shard."""
        return self._files is not None and self._files.has_record

    def record(self) -> None:
        """Describes the shard's state, from which another process of the server can then continue."""
        if self._files is not None:
            self._files.save(self)

    async def record_prepared(self, in_thread: InThread) -> None:
        """As ``record``, once the gradients of a step are reduced. Repeated calls have no effect."""
        if self._files is None or self.mean.recorded:
            return
        if self.recorded_segments is None and (file := self.acquire_mean_file()) is not None:
            await self._write_mean(in_thread, file)
        self._files.save(self)
        self.mean.recorded = True

    @property
    def mean_path(self) -> str:
        """Path of the shared file with the mean gradient, laid out like the shard. Empty: it is in ordinary memory."""
        mean = None if self._files is None else self._files.mean
        return mean.path if mean is not None and self.mean.in_file else ""

    async def share_mean(self, in_thread: InThread) -> None:
        """Puts the mean gradient into a shared file, so that a backup on this host reads it there. Runs in
        ``HostedRun.exclusively``. Does nothing without a mean gradient, or if shared memory is full."""
        if self.reduced is None or self._files is None or self.recorded_segments is not None:
            return
        if (file := self.acquire_mean_file()) is not None:
            await uninterrupted(self._write_mean(in_thread, file))

    async def _write_mean(self, in_thread: InThread, file: torch.Tensor) -> None:
        await self._compute(in_thread, partial(self.compute_write_mean, file))
        self.mean.in_file = True

    def compute_write_mean(self, file: torch.Tensor) -> None:
        """Copies the gradients to their file. uint8. [size_bytes]"""
        self.mean.compute_write(file)

    @property
    def values_file(self) -> ShardFile | None:
        """The file of the values. None: they are in ordinary memory."""
        return None if self.values.live is None else self.values.live.file

    @property
    def shared_files(self) -> list[str]:
        """Names of the files from which another process of the server can take up the shard."""
        values = [] if self.values_file is None else [self.values_file.name]
        return values if self._files is None else [*values, *self._files.names]

    def take_up_values(self, file: ShardFile, version: int, grant: Grant) -> None:
        """Continues with the values of a former process; see ``Values.take_up``.

        Args:
            file: The values.
            version: Their version.
            grant: The memory's grant in the server's budget.
        """
        self.values.take_up(LiveBuffer.from_file(file, grant), version)

    def take_up(self, content: OptimizerContent, mean: torch.Tensor | None, prepared: PreparedRecord | None) -> None:
        """Continues with the state of a former process, after its values.

        Args:
            content: The optimizer's state.
            mean: The mean gradient's file. uint8. [size_bytes]
            prepared: The prepared step. None: there was none.
        """
        self.applied.take_up(content)
        if prepared is not None:
            self._take_up_gradients(mean, prepared)
            self.mean.in_file = self.mean.recorded = self.mean.from_former = True
            self._confirm_replica()

    def _confirm_replica(self) -> None:
        """Lets a backup apply the prepared step of a former process. Anything that its primary sends replaces it."""
        if self.role is Role.BACKUP and self.version is not None:
            self.replica = Replica(self.version, self.backups.placement, generation=0, confirmed=True)

    def _take_up_gradients(self, mean: torch.Tensor | None, prepared: PreparedRecord) -> None:
        self.mean.take_up(mean, prepared.present, skipped=prepared.skipped)

    def compute_averages(self, out: torch.Tensor) -> None:
        """Writes the shard's bytes with averages in place of values. [size_bytes]"""
        assert self.values.live is not None
        out.copy_(self.values.live.buffer)
        self.applied.compute_averages(self.views(out))

    def _chosen_groups(self, groups: Sequence[int] | None) -> list[int]:
        """The group of each segment's parameter. -1: not optimised."""
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
        if self.reduced is not None:
            self._confirm_replica()
        self.record()

    def begin_replica(self, replica: Replica) -> None:
        """Starts to collect what the primary sends under a new generation. Drops what was sent earlier."""
        self.drop_replica()
        self.replica = replica

    def drop_replica(self) -> None:
        """Drops what a backup has of the step in flight."""
        was_recorded = self.mean.recorded
        self.drop_contributions()
        self.replica = None
        if was_recorded:
            self.record()

    def has_prepared(self, step: int) -> bool:
        """True if this shard received the prepared step as a backup, and can apply it."""
        return self.replica is not None and self.replica.step == step and self.replica.confirmed

    def set_no_mean(self) -> None:
        """Records that the primary has no mean gradient of the step. What was received otherwise stays."""
        if self.reduced is None or not self.reduced.skipped:
            self.mean.set(None, (), skipped=True)

    def mark_out_of_sync(self, reason: str) -> None:
        """Records that this backup has missed a step. Its memory stays reserved until it is released or built anew."""
        self.out_of_sync = self.out_of_sync or reason
        self.drop_replica()

    # ---- importing ----

    def allocate_values(self) -> None:
        """Allocates the memory of the first version of a shard whose state is imported. Its padding is zero.

        Raises:
            CapacityError: The operating system has no memory.
        """
        grant = self._memory.grant(self.size_bytes, self.initial_quota, f"imported values of {self.what}")
        received = IncomingBuffer(grant.acquire_buffer(self.size_bytes), grant)
        received.buffer.zero_()
        self.values.accept_initial(self.values.initial_epoch, received)


def first_non_finite(views: Sequence[torch.Tensor]) -> int | None:
    """Returns the number of the first tensor that has NaN or infinity. None: all are finite."""
    return next((number for number, view in enumerate(views) if not bool(torch.isfinite(view).all())), None)


class BufferShard(UnitShard):
    """A shard of buffers.

    It is fenced, prepared, read and pinned like a shard of parameters. The contribution of data rank 0 contains the new
    values of the buffers that its work item changed, and ``update`` copies them. There is no mean, no norm and no
    optimizer. A step that is skipped because a gradient is not finite stores new values too: as in PyTorch, the forward
    has already changed the buffers.
    """

    @property
    def max_contributions(self) -> int:
        return 1

    @property
    def changed(self) -> list[int]:
        """Layout indices of the buffers that have new values, rising."""
        contribution = self.contributions.by_rank.get(0)
        present = sorted(contribution.present) if contribution is not None else []
        return [self.segments[number].parameter_index for number in present]

    def check_rank(self, dp_rank: int) -> None:
        if dp_rank != 0:
            raise InvalidRequestError(
                f"dp_rank is {dp_rank}, but {self.what} holds buffers, whose values come from data rank 0 only"
            )

    def check_sum(self, header: shard_pb2.ReduceScatterHeader) -> None:
        raise InvalidRequestError(f"{self.what} holds buffers, whose values are not added: leave summed empty")

    @property
    def seems_complete(self) -> bool:
        """Always False: there is nothing to reduce ahead."""
        return False

    @property
    def awaits_reduction(self) -> bool:
        """Always False, for the same reason."""
        return False

    async def reduce(self, in_thread: InThread) -> Reduced:
        """Returns a mean without gradients: buffers have no norm, and any value is accepted."""
        self.skip_reduction()
        assert self.reduced is not None
        return self.reduced

    def skip_reduction(self) -> None:
        if self.reduced is None:
            self.mean.set_empty(skipped=False)

    def set_no_mean(self) -> None:
        self.skip_reduction()

    def check_partitions(self) -> None:
        """Does nothing: optimizers that run on the trainers stage nothing for buffers."""

    async def prepare_update(
        self, in_thread: InThread, optimizer: common_pb2.OptimizerStep, groups: Sequence[int] | None, key: bytes
    ) -> None:
        """Does nothing: an update of buffers needs no memory."""

    async def update(
        self,
        in_thread: InThread,
        step: int,
        optimizer: common_pb2.OptimizerStep,
        groups: Sequence[int] | None,
        clip_coefficient: float,
        key: bytes,
        *,
        hold: bool = False,
    ) -> None:
        """Makes version ``step + 1`` from version ``step`` and the values that rank 0 pushed."""
        self.encoded.discard()
        self.reader_copies.supersede()
        has_new = bool(self.contributions.by_rank)
        async with self.values.becoming(step + 1, in_thread, changes=has_new):
            await self._compute(in_thread, self.compute_store)
        self.discard_reduced()
        self.contributions.end_step(self.counted)
        self.replica = None

    def compute_store(self) -> None:
        """Copies the new values into the shard. Can be repeated."""
        assert self.values.live is not None and self.version is not None
        if self._files is not None:
            self._files.begin_update(self)
        self._copy_new(self.values.live.buffer)
        if self._files is not None:
            self._files.save(self, self.version + 1)

    def _copy_new(self, target: torch.Tensor) -> None:
        if (contribution := self.contributions.by_rank.get(0)) is None:
            return
        for number in contribution.present:
            segment = self.segments[number]
            inside = slice(segment.start_bytes - self.start_bytes, segment.stop_bytes - self.start_bytes)
            target[inside].copy_(contribution.buffer[inside])

    @property
    def recorded_segments(self) -> list[int] | None:
        contribution = self.contributions.by_rank.get(0)
        present = [] if contribution is None else sorted(contribution.present)
        return present if self.mean.in_file or not present else None

    def compute_write_mean(self, file: torch.Tensor) -> None:
        self._copy_new(file)

    def _take_up_gradients(self, mean: torch.Tensor | None, prepared: PreparedRecord) -> None:
        self.skip_reduction()
        if mean is not None and prepared.present:
            taken = Contribution(0, 0, mean, self.views(mean), _do_nothing, set(prepared.present))
            self.contributions.add(0, taken)


def _do_nothing() -> None:
    pass
