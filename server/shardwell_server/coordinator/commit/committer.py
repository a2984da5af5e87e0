"""Two-phase commit of a step on the shard servers.

Note: [Commit order]
    1. ``PrepareStep`` on every server: the server confirms that it has every contribution in the manifest, reduces the
       gradients and returns partial norms. A failure here changes no parameter.
    2. ``PrepareUpdate`` or ``ConfirmPartitions`` on every server, if needed: the server confirms that it has everything
       that ``Update`` needs. A committed step must be applied, so no server may discover later that memory or an
       optimizer partition is missing.
    3. The commit record is written to disk. From here on the step is committed.
    4. ``Update`` on every server, repeated until the server acknowledges it, also after a coordinator restart.
       Trainers get their response after 3, without waiting for 4.
    5. ``PrepareStep`` and ``Fence`` of the next step wait for 4. A server that has not updated yet therefore never
       receives a request about the next step.

Everything runs on the event loop. After each ``await`` the step may have advanced, or an item may have been reset: the
code then compares ``Step.generation`` and ``Run.step`` with the values from before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from shardwell_server.coordinator.checkpoints.saving import CheckpointSaver
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.leases.trainers import TrainerLeases
from shardwell_server.coordinator.runs.committed_steps import PendingUpdate
from shardwell_server.coordinator.runs.gradient_norms import PreparedGradients
from shardwell_server.coordinator.runs.module_buffers import changed_buffers, next_run_state
from shardwell_server.coordinator.runs.proposals import StepProposal, committed_optimizer
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.step import Step
from shardwell_server.coordinator.servers.promoter import Promoter
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_server.optimizer_checks import allocation_key, units_that_count
from shardwell_wire import fault_points
from shardwell_wire.errors import (
    IncompleteStepError,
    NonFiniteError,
    NotFoundError,
    ShardwellError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.retry import retry_async
from shardwell_wire.v1 import common_pb2, shard_pb2

logger = logging.getLogger(__name__)

_RECHECK_S = 0.5
"""How often a waiting update checks whether its server is gone, in seconds."""

_DELAY_EVENT_AFTER_S = 1.0
"""Seconds after which an unacknowledged update is reported as an event."""


class Committer:
    """Prepares and commits steps. See Note: [Commit order].

    Args:
        state: State of the coordinator.
        servers: The shard servers.
        trainers: Fences trainers that lost their work when the next step starts.
        promoter: Tells servers about shards that move to them with a commit.
        checkpoints: Saves checkpoints between two steps.
    """

    def __init__(
        self,
        state: CoordinatorState,
        servers: ShardServers,
        trainers: TrainerLeases,
        promoter: Promoter,
        checkpoints: CheckpointSaver,
    ) -> None:
        self._state, self._servers, self._trainers = state, servers, trainers
        self._promoter, self._checkpoints = promoter, checkpoints

    # Preparation

    async def prepare(self, run: Run, *, norm_type: float = 0.0) -> PreparedGradients | None:
        """Prepares the finished step on the servers. Concurrent callers share one call.

        Returns:
            The gradient norms. None if the step was committed or an item was reset meanwhile.

        Raises:
            NonFiniteError: A gradient is not finite. Every call raises this until an item is reset.
            IncompleteStepError: A server lacks contributions. Every call raises this until an item is reset.
            StepStateError: A unit was declared but not published.
            ShardwellError: Another error of a server. The next call tries again.
        """
        step = run.step
        # The shared call may have prepared another norm type or a former generation: check again after each call.
        while step is not None and step is run.step and step.all_finished:
            if step.failure is not None:
                # A new exception for each caller: raising one instance again would extend its traceback every time.
                raise type(step.failure)(str(step.failure), **step.failure.data)
            if step.prepared is not None and step.prepared.has(norm_type):
                return step.prepared
            await run.calls.preparing(partial(self._prepare, run, step, norm_type))
        return None

    def start_preparing(self, run: Run) -> None:
        """Prepares the step in the background, while trainers learn that all items are finished.

        A failure is raised to the trainers that later ask for the norm or commit.
        """

        async def prepare() -> None:
            with suppress(ShardwellError):
                await self.prepare(run)

        self._state.tasks.start(prepare())

    async def prepare_or_skip(self, run: Run) -> PreparedGradients | None:
        """Calls ``prepare``. With scaled losses, skips a gradient that is not finite and prepares the step again."""
        step = run.step
        try:
            return await self.prepare(run)
        except NonFiniteError:
            if step is None or step is not run.step or not step.all_finished:
                raise
            proposal = step.proposals.leading(run.leader())
            if proposal is None or not proposal.optimizer.skip_non_finite:
                raise
            step.skip()
            return await self.prepare(run)

    async def _prepare(self, run: Run, step: Step, norm_type: float) -> None:
        generation = step.generation
        if unpublished := run.units.unpublished:
            raise StepStateError(
                f"step {step.number}: unit {unpublished[0]!r} has no initial values, because no trainer sent them: "
                "every trainer must build the same model",
                unit=unpublished[0],
            )
        await run.wait_until_updated()
        while step.unfenced and generation == step.generation and step is run.step and not run.deleted:
            await run.changed.wait()  # a fence that arrives after PrepareStep discards what was prepared
        if any(item.is_copy for item in step.items.values()):
            # The servers drop the contributions of trainers that lost to a copy. A restarted coordinator must not wait
            # for these trainers.
            await self._state.save(run)
        if generation != step.generation or step is not run.step:
            # An item was reset and is unfinished. The servers would accept an incomplete manifest.
            return
        optimizer = _expected_optimizer(run, step)

        def request(server_id: str) -> shard_pb2.PrepareStepRequest:
            return shard_pb2.PrepareStepRequest(
                context=self._servers.context(run, step.number),
                ranks=_manifest(run, step, server_id),
                dp=run.settings.world.dp,
                norm_type=norm_type,
                skip=step.skipped,
                optimizer=optimizer,
            )

        try:
            responses = await self._servers.call_all(run.units.servers, "PrepareStep", request)
        except ShardwellError as error:
            if generation != step.generation or step is not run.step:
                return  # the error is about a former attempt
            if not isinstance(error, NonFiniteError | IncompleteStepError):
                raise
            step.record_failure(error)
            self._state.events.add(EventKind.STEP_FAILED, f"step {step.number}: {error}", run=run.name)
            run.changed.notify()
            raise
        if generation != step.generation:
            return
        self._note_failed_backups(run, responses)
        prepared = (
            PreparedGradients.skipped(norm_type)
            if step.skipped
            else PreparedGradients.combine((norm for at in responses.values() for norm in at.units), norm_type)
        )
        ready = optimizer is not None and all(response.update_ready for response in responses.values())
        step.record_prepared(
            replace(
                prepared,
                memory_ready_for=allocation_key(optimizer) if optimizer and ready else None,
                changed_buffers=changed_buffers(responses.values(), run.units.layouts),
            )
        )

    # Commit

    async def commit(self, run: Run) -> None:
        """Commits the step in flight if every item is finished and the leader has proposed.

        Raises:
            ShardwellError: See ``prepare``; or the commit record could not be written. No parameter was changed.
        """
        await run.calls.committing(lambda: self._commit(run))

    async def _commit(self, run: Run) -> None:
        step, prepared = run.step, await self.prepare_or_skip(run)
        if step is None or prepared is None or run.deleted:
            return
        if (proposal := step.proposals.leading(run.leader())) is None:
            return
        generation = step.generation
        if not await self._confirm_update(run, step, proposal):
            return
        async with run.checkpoints.boundary:  # see Note: [Consistent checkpoints]
            if step is run.step and generation == step.generation and run.checkpoints.restore is None:
                await self._write_record(run, step, prepared, proposal)

    async def _write_record(self, run: Run, step: Step, prepared: PreparedGradients, proposal: StepProposal) -> None:
        """Writes the commit record and starts the next step."""
        if len(counted := units_that_count(proposal.optimizer, len(run.units))) < len(run.units):
            prepared = prepared.restricted_to(counted)
        other = prepared.other_norm
        record = CommitRecord(
            step=step.number,
            time=self._state.wall_clock(),
            leader=proposal.trainer_and_ranks,
            optimizer=proposal.optimizer.SerializeToString(deterministic=True),
            clip_coefficient=proposal.clip_coefficient,
            unit_order=proposal.unit_order,
            grad_norm=prepared.grad_norm,
            norm_type=other.norm_type if other is not None else None,
            other_norm=other.value if other is not None else None,
            skipped=step.skipped,
        )
        layouts, changed = run.units.layouts, prepared.changed_buffers
        state = next_run_state(run.commits.state, step, proposal.state, changed, layouts)
        fault_points.reach("coordinator.commit.before_record", step=step.number)
        try:
            with run.commits.writing_record():  # resets wait until the record is written
                if moves := run.planned_promotions():
                    # Stored together with the record. The targets have the prepared step and apply it.
                    run.relocate(moves)
                await self._state.save_commit(run, record, state)
        except ShardwellError as error:
            self._state.events.add(EventKind.STEP_FAILED, f"step {step.number}: {error}", run=run.name)
            if moves:
                # The new owners have no contributions of their own, and a restarted step goes to them.
                run.restart_step()
                self._state.tasks.start(self._store_moves(run))
            raise
        finally:
            run.changed.notify()
        fault_points.reach("coordinator.commit.after_record", step=step.number)
        # No ``await`` here: once ``writing`` is False, no other request may run before the step has advanced.
        run.advance(record, state)
        outcome = "skipped" if step.skipped else f"gradient norm {prepared.grad_norm:.6g}"
        self._state.events.add(EventKind.STEP_COMMITTED, f"step {step.number}: {outcome}", run=run.name)
        if moves:
            targets = ", ".join(sorted({repr(move.backup.server_id) for move in moves}))
            self._state.events.add(EventKind.SHARDS_MOVED, f"{len(moves)} shards moved to {targets}", run=run.name)
        self._promoter.start(run)
        self.start_updates(run)
        self._trainers.start_fencing(run)

    async def _store_moves(self, run: Run) -> None:
        """Stores planned moves whose commit record could not be written, and tells their servers."""
        await self._state.save_or_retry(run)
        self._promoter.start(run)
        self._trainers.start_fencing(run)

    def _note_failed_backups(self, run: Run, responses: Mapping[str, Any]) -> None:
        """Marks the backups that primaries report as failed. The commit record is stored together with this."""
        failed = {
            (status.unit_index, status.start_bytes, status.server_id): status.error
            for response in responses.values()
            for status in response.failed_backups
        }
        if run.fail_backups(failed):
            message = (
                f"{len(failed)} backups missed step {run.committed_step} and are built again: {min(failed.values())}"
            )
            self._state.events.add(EventKind.BACKUPS_LOST, message, run=run.name)

    async def _confirm_update(self, run: Run, step: Step, proposal: StepProposal) -> bool:
        """Asks every server to confirm that it can apply the update. See Note: [Commit order].

        Returns:
            False if an item was reset, or the leader's proposal changed meanwhile.

        Raises:
            IncompleteStepError: Not all optimizer partitions are staged.
            CapacityError: A server has no memory for the update.
        """
        generation, context = step.generation, self._servers.context(run, step.number)
        request: shard_pb2.ConfirmPartitionsRequest | shard_pb2.PrepareUpdateRequest
        if proposal.updates_on_trainers:
            rpc_name = "ConfirmPartitions"
            request = shard_pb2.ConfirmPartitionsRequest(context=context, optimizer=proposal.optimizer)
        elif step.prepared is not None and step.prepared.memory_ready_for == allocation_key(proposal.optimizer):
            return True
        else:
            rpc_name = "PrepareUpdate"
            request = shard_pb2.PrepareUpdateRequest(context=context, optimizer=proposal.optimizer)
        responses = await self._servers.call_all(run.units.servers, rpc_name, lambda _: request)
        unchanged = generation == step.generation and not run.deleted
        if unchanged:
            self._note_failed_backups(run, responses)
        return unchanged and step.proposals.leading(run.leader()) == proposal

    # Updates

    def start_updates(self, run: Run) -> None:
        """Sends the update of the last commit to every server, in the background."""
        if run.checkpoints.restore is not None:
            return  # the servers drop these shards
        for server_id, pending in run.commits.pending_updates.items():
            self.start_update(run, server_id, pending)

    def start_update(self, run: Run, server_id: str, pending: PendingUpdate) -> None:
        """Sends a pending update to its server, in the background."""
        self._state.tasks.start(self._update(run, run.commits.records[-1], server_id, pending))

    async def _update(self, run: Run, record: CommitRecord, server_id: str, pending: PendingUpdate) -> None:
        """Repeats ``Update`` until the server acknowledges it, the run is deleted, or the server process is gone.

        A server that is only lost may return with its shards. It then needs the update, unless they have moved.
        """
        request = shard_pb2.UpdateRequest(
            context=self._servers.context(run, record.step),
            optimizer=common_pb2.OptimizerStep.FromString(record.optimizer),
            clip_coefficient=record.clip_coefficient,
            unit_order=record.unit_order,
        )
        process, cluster, reported = (server_id, pending.incarnation), self._state.cluster, False

        async def attempt() -> None:
            if run.commits.pending_updates.get(server_id) is not pending:
                return  # the run was loaded from a checkpoint, or the server was replaced
            # A new primary applies the update only after it knows that it is the primary.
            while server_id in run.unconfirmed and not run.deleted and not cluster.is_gone(process):
                await run.changed.wait(_RECHECK_S)
            if run.deleted:
                return
            if cluster.is_gone(process):
                if cluster.may_return(process) and run.units.needs_updates(process):
                    raise UnavailableError("the server is lost, and no other server has its shards")
                return
            await self._release_retired(run, process)
            try:
                response = await self._servers.call(server_id, "Update", request, retry_for_s=0.0)
            except NotFoundError:
                if run.units.needs_updates(process):
                    raise
                return  # a backup was to be built there, and its memory is not reserved yet
            self._note_stale_backups(run, server_id, response)

        def note_failure(error: Exception) -> None:
            nonlocal reported
            pending.note_failed(str(error))
            if not reported and self._state.clock() - pending.since_s > _DELAY_EVENT_AFTER_S:
                reported = True
                message = f"step {record.step} is not updated yet: {error}"
                self._state.events.add(EventKind.UPDATE_DELAYED, message, run=run.name)

        await retry_async(attempt, errors=ShardwellError, check=note_failure)
        fault_points.reach("coordinator.update.acknowledged", step=record.step, server=server_id)
        if run.commits.pending_updates.get(server_id) is pending:
            run.commits.finish_update(server_id, pending)
            run.changed.notify()
            if not run.commits.pending_updates:
                self._checkpoints.start_if_due(run)

    async def _release_retired(self, run: Run, process: tuple[str, str]) -> None:
        """Makes a server drop the shards that moved to other servers with the commit, before it updates the others.

        Otherwise it would create the next version of them, and accept gradients from trainers that do not know the new
        servers yet.
        """
        if retired := run.units.retired_on(process):
            request = shard_pb2.ReleaseShardsRequest(
                context=self._servers.context(run, run.committed_step),
                placement=run.last_epoch,
                shards=[
                    shard_pb2.ShardReference(
                        unit=unit.layout.unit, start_bytes=backup.start_bytes, stop_bytes=backup.stop_bytes
                    )
                    for unit, backup in retired
                ],
            )
            await self._servers.call(process[0], "ReleaseShards", request, retry_for_s=0.0)

    def _note_stale_backups(self, run: Run, server_id: str, response: shard_pb2.UpdateResponse) -> None:
        """Marks the backups on a server that lacked the step."""
        stale = {
            (status.unit_index, status.start_bytes, server_id): status.error or "the step was missing"
            for status in response.stale_backups
        }
        if run.fail_backups(stale):
            message = f"{len(stale)} backups on {server_id!r} lacked step {run.committed_step - 1} and are built again"
            self._state.events.add(EventKind.BACKUPS_LOST, message, run=run.name)


def _expected_optimizer(run: Run, step: Step) -> common_pb2.OptimizerStep | None:
    """Returns the optimizer that the step will probably be committed with. The servers allocate memory for it early."""
    if (proposal := step.proposals.leading(run.leader())) is not None:
        return proposal.optimizer
    if (last_commit := run.commits.last) is None:
        return None
    last = committed_optimizer(last_commit.optimizer)
    if len(units_that_count(last, len(run.units))) == len(run.units):
        return last
    # Several optimizers alternate. Expect the one that followed the last time the units of ``last`` were updated.
    committed = [committed_optimizer(record.optimizer) for record in run.commits.records]
    successors = reversed([*pairwise(committed)])
    return next((after for before, after in successors if _same_units(before, last)), last)


def _same_units(one: common_pb2.OptimizerStep, other: common_pb2.OptimizerStep) -> bool:
    return list(one.units) == list(other.units)


def _manifest(run: Run, step: Step, server_id: str) -> list[shard_pb2.RankManifest]:
    """Returns the contributions that one server must have: every rank's attempt, and its number of parts per unit."""
    owned = {unit.index for unit in run.units if any(shard.server_id == server_id for shard in unit.shards)}
    return [
        shard_pb2.RankManifest(
            dp_rank=item.dp_rank,
            attempt=item.attempt,
            units=[
                common_pb2.UnitParts(unit_index=unit, part_count=count)
                for unit, count in sorted(item.parts.items())
                if unit in owned
            ],
        )
        for item in step.items.values()
    ]
