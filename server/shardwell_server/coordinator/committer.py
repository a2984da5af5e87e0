"""Prepares and commits a step on the shard servers in two phases, and sends its update until each acknowledges it.

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
code then compares ``Step.generation`` and ``Run.work`` with the values from before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from shardwell_server.coordinator.checkpoints.saving import CheckpointSaver
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.leases.trainer_leases import ItemLeases
from shardwell_server.coordinator.promotion import Promoter
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.shard_servers import ShardServers, check_recoverable
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.steps.committed_steps import PendingUpdate, changed_buffers, next_run_state
from shardwell_server.coordinator.steps.proposals import NormKind, PreparedGradients, StepProposal, committed_optimizer
from shardwell_server.coordinator.steps.reports import mean_scalars
from shardwell_server.coordinator.steps.step import Step
from shardwell_server.coordinator.storage.records import BackupState, CommitRecord
from shardwell_server.optimizer_checks import allocation_key, units_that_count
from shardwell_wire import fault_points
from shardwell_wire.connection.channel import retry_async
from shardwell_wire.errors import (
    IncompleteStepError,
    NonFiniteError,
    NotFoundError,
    ShardwellError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.v1 import common_pb2, shard_pb2

_RECHECK_S = 0.5
"""How often a waiting update checks whether its server is gone, in seconds."""

_DELAY_EVENT_AFTER_S = 1.0
"""Seconds after which an unacknowledged update is reported as an event."""


class StepPreparer:
    """Makes the servers confirm and reduce the gradients of a finished step."""

    def __init__(self, state: CoordinatorState, servers: ShardServers) -> None:
        self._state, self._servers = state, servers

    async def prepare(self, run: Run, step: Step, *, kind: NormKind | None = None) -> PreparedGradients | None:
        """Prepares a finished step on the servers, and has one more norm computed. Concurrent callers share one call.

        In an asynchronous run, the next preparation of another step replaces this one. See ``prepare_in_turn``.

        Returns:
            The gradient norms. None if the step was committed or an item was reset meanwhile.

        Raises:
            NonFiniteError: A gradient is not finite. Every call raises this until an item is reset.
            IncompleteStepError: A server lacks contributions. Every call raises this until an item is reset.
            StepStateError: A unit was declared but not published.
            ShardwellError: Another error of a server. The next call tries again.
        """
        # The shared call may have prepared another norm or a former generation: check again after each call.
        while run.work.is_in_flight(step) and step.all_finished:
            if step.failure is not None:
                # A new exception for each caller: raising one instance again would extend its traceback every time.
                raise type(step.failure)(str(step.failure), **step.failure.data)
            if step.prepared is not None and step.prepared.find(kind) is not None:
                return step.prepared
            await run.calls.preparing(self._prepare_alone, run, step, kind)
        return None

    async def _prepare_alone(self, run: Run, step: Step, kind: NormKind | None) -> None:
        if not run.asynchronous:
            await self._prepare(run, step, kind)
            return
        async with run.calls.turn:
            await self._prepare(run, step, kind)

    async def prepare_in_turn(self, run: Run, step: Step) -> PreparedGradients | None:
        """As ``prepare_or_skip``, for a caller that holds ``StepCalls.turn`` until it has written the commit record."""
        while run.work.is_in_flight(step) and step.all_finished and step.prepared is None:
            try:
                if step.failure is not None:
                    raise type(step.failure)(str(step.failure), **step.failure.data)
                await self._prepare(run, step, None)
            except NonFiniteError as error:
                self._skip_or_raise(run, step, error)
        return step.prepared if run.work.is_in_flight(step) and step.all_finished else None

    def start(self, run: Run, step: Step) -> None:
        """Prepares a finished step in the background, while trainers learn that all items are finished.

        A failure is raised to the trainers that later ask for the norm or commit. They also prepare the step if the
        preparation of a former generation is still in flight here.
        """
        run.calls.preparing.start(self._prepare_alone, run, step, None)

    async def prepare_or_skip(self, run: Run, step: Step) -> PreparedGradients | None:
        """Calls ``prepare``. With scaled losses, skips a gradient that is not finite and prepares the step again."""
        try:
            return await self.prepare(run, step)
        except NonFiniteError as error:
            self._skip_or_raise(run, step, error)
            return await self.prepare(run, step)

    def _skip_or_raise(self, run: Run, step: Step, error: NonFiniteError) -> None:
        """Skips the gradient of a step, which is not finite, if losses are scaled. Otherwise raises the error."""
        if not run.work.is_in_flight(step) or not step.all_finished:
            raise error
        proposal = step.proposals.leading(run.work.leaders(step), run.units.layouts)
        if proposal is None or not proposal.optimizer.skip_non_finite:
            raise error
        step.skip()

    async def _prepare(self, run: Run, step: Step, kind: NormKind | None) -> None:
        generation = step.generation
        if unpublished := run.units.unpublished:
            raise StepStateError(
                f"step {step.number}: unit {unpublished[0]!r} has no initial values, because no trainer sent them: "
                "every trainer must build the same model",
                unit=unpublished[0],
            )
        await run.wait_until_updated()
        while (
            not run.asynchronous
            and step.unfenced
            and generation == step.generation
            and run.work.is_in_flight(step)
            and not run.deleted
        ):
            await run.changed.wait()  # a fence that arrives after PrepareStep discards what was prepared
        if any(item.is_twin for item in step.items.values()):
            # The servers drop the contributions of trainers that lost to a twin item. A restarted coordinator must not
            # wait for these trainers.
            await self._state.save(run)
        if generation != step.generation or not run.work.is_in_flight(step) or not step.all_finished:
            # An item was reset and is unfinished. The servers would accept an incomplete manifest.
            return
        if (lost := self._state.storage.why_lost) is not None:
            # A step may be committed whose record this coordinator could not confirm. The servers must still have what
            # they prepared for it when the next coordinator sends its update.
            raise type(lost)(str(lost), **lost.data)
        optimizer = _expected_optimizer(run, step)

        def request(server_id: str) -> shard_pb2.PrepareStepRequest:
            return shard_pb2.PrepareStepRequest(
                context=self._servers.context(run, run.committed_step),
                ranks=_manifest(run, step, server_id),
                dp=len(step.items),
                norm_type=0.0 if kind is None else kind.norm_type,
                norm_bound=0.0 if kind is None else kind.bound,
                skip=step.skipped,
                optimizer=optimizer,
            )

        for other in run.work.steps:
            if other is not step:
                other.prepared = None  # the servers prepare one step at a time
        try:
            responses = await self._servers.call_all(run.units.servers, "PrepareStep", request)
        except ShardwellError as error:
            if generation != step.generation or not run.work.is_in_flight(step):
                return  # the error is about a former attempt
            self._report(run, step, error)
            raise
        if generation != step.generation:
            return
        self.note_failed_backups(run, responses)
        prepared = (
            PreparedGradients.skipped(kind)
            if step.skipped
            else PreparedGradients.combine((norm for at in responses.values() for norm in at.units), kind)
        )
        ready = optimizer is not None and all(response.update_ready for response in responses.values())
        step.prepared = replace(
            prepared.add_norms(step.prepared),
            memory_ready_for=allocation_key(optimizer) if optimizer and ready else None,
            changed_buffers=changed_buffers(responses.values(), run.units.layouts),
        )

    def _report(self, run: Run, step: Step, error: ShardwellError) -> None:
        """Records an error that lasts until an item is reset.

        Raises:
            ConflictError: The cause is a lost shard.
            UnavailableError: The cause is that the run is being loaded from a checkpoint.
        """
        run.checkpoints.check_loaded(run.name)  # the servers have dropped the shards
        if not isinstance(error, NonFiniteError | IncompleteStepError):
            check_recoverable(run, self._state.cluster)  # a restarted server knows only that it lacks the run
            return
        step.failure = error
        self._state.events.add(EventKind.STEP_FAILED, f"step {step.number}: {error}", run=run.name)
        run.changed.notify()

    def note_failed_backups(self, run: Run, responses: Mapping[str, Any]) -> None:
        """Marks the backups that primaries report as failed. The commit record is stored together with this."""
        failed = {
            (status.unit_index, status.start_bytes, status.server_id): status.error
            for response in responses.values()
            for status in response.failed_backups
        }
        if run.relocations.fail_backups(failed, BackupState.FORMER):
            message = (
                f"{len(failed)} backups missed step {run.committed_step} and are built again: {min(failed.values())}"
            )
            self._state.events.add(EventKind.BACKUPS_LOST, message, run=run.name)


def _expected_optimizer(run: Run, step: Step) -> common_pb2.OptimizerStep | None:
    """Returns the optimizer that the step will probably be committed with. The servers allocate memory for it early."""
    if (proposal := step.proposals.leading(run.work.leaders(step), run.units.layouts)) is not None:
        return proposal.optimizer
    if (last_commit := run.commits.last) is None:
        return None
    last = committed_optimizer(last_commit.optimizer)
    if not last.units:
        return None  # the run was loaded from a checkpoint of another grid
    if len(units_that_count(last, len(run.units))) == len(run.units):
        return _next_of(last)
    # Several optimizers alternate. Expect the one that followed the last time the units of ``last`` were updated.
    committed = [committed_optimizer(record.optimizer) for record in run.commits.records]
    successors = reversed([*pairwise(committed)])
    return _next_of(next((after for before, after in successors if before.units == last.units), last))


def _next_of(optimizer: common_pb2.OptimizerStep) -> common_pb2.OptimizerStep:
    """Returns a committed optimizer as its next step has it: only the first one starts with new state."""
    if not optimizer.new_state:
        return optimizer
    following = common_pb2.OptimizerStep()
    following.CopyFrom(optimizer)
    following.ClearField("new_state")
    return following


def _manifest(run: Run, step: Step, server_id: str) -> list[shard_pb2.RankManifest]:
    """Returns the contributions that one server must have: every rank's attempt, and its number of parts per unit."""
    owned = {unit.index for unit in run.units if any(shard.server_id == server_id for shard in unit.shards)}
    return [
        shard_pb2.RankManifest(
            dp_rank=item.dp_rank,
            attempt=item.attempt,
            units=[
                common_pb2.UnitParts(unit_index=unit, part_count=count, pp_rank=pp_rank, cp_rank=cp_rank)
                for (unit, cp_rank, pp_rank), count in sorted(item.parts(run.settings.world).items())
                if unit in owned
            ],
        )
        for item in step.items.values()
    ]


class UpdateSender:
    """Sends the updates of committed steps, in the background.

    Args:
        promoter: Releases the copies of shards that have moved to other servers.
    """

    def __init__(
        self, state: CoordinatorState, servers: ShardServers, checkpoints: CheckpointSaver, promoter: Promoter
    ) -> None:
        self._state, self._servers, self._checkpoints, self._promoter = state, servers, checkpoints, promoter

    def start_all(self, run: Run) -> None:
        """Sends the update of the last commit to every server, in the background."""
        if run.checkpoints.restore is not None:
            return  # the servers drop these shards
        if run.commits.pending_updates:
            request = self._request(run)
            for server_id, pending in run.commits.pending_updates.items():
                self._state.tasks.start(self._send(run, request, server_id, pending))

    def repeat(self, run: Run, process: tuple[str, str]) -> None:
        """Sends the update of the last commit to one server process, in the background. It may have missed it."""
        run.commits.expect_update(process, self._state.clock())
        if (pending := run.commits.pending_updates.get(process[0])) is not None:
            self._state.tasks.start(self._send(run, self._request(run), process[0], pending))

    def _request(self, run: Run) -> shard_pb2.UpdateRequest:
        """Returns the update of the last commit."""
        record = run.commits.records[-1]
        return shard_pb2.UpdateRequest(
            context=self._servers.context(run, record.step),
            optimizer=committed_optimizer(record.optimizer),
            clip_coefficient=record.clip_coefficient,
            unit_order=record.unit_order,
            rank_versions=_rank_versions(run),
            kept_versions=run.kept_versions.before(record.step + 1),
        )

    async def _send(self, run: Run, request: shard_pb2.UpdateRequest, server_id: str, pending: PendingUpdate) -> None:
        """Repeats ``Update`` until the server acknowledges it, the run is deleted, or the server process is gone.

        A server that is only lost may return with its shards. It then needs the update, unless they have moved.
        """
        process, cluster, reported = (server_id, pending.incarnation), self._state.cluster, False
        step = request.context.step

        def is_pending() -> bool:
            return run.commits.pending_updates.get(server_id) is pending and not run.deleted

        async def attempt() -> None:
            # A new primary applies the update only after it knows that it is the primary. A server with a former copy
            # first learns whether it must drop it: otherwise it would create the next version of it, and accept
            # gradients from trainers that do not know the new primary yet.
            while (
                is_pending()
                and not cluster.is_gone(process)
                and (server_id in run.relocations.unconfirmed or self._promoter.are_open(run, process))
            ):
                await run.changed.wait(_RECHECK_S)
            if not is_pending():
                return  # the run was loaded from a checkpoint or deleted, or the server was replaced
            if cluster.is_gone(process):
                if cluster.may_return(process) and run.units.needs_updates(process):
                    raise UnavailableError("the server is lost, and no other server has its shards")
                return
            await self._promoter.release(run, process)
            try:
                response = await self._servers.call(server_id, "Update", request, retry_for_s=0.0)
            except NotFoundError:
                if run.units.needs_updates(process):
                    raise
                return  # a backup was to be built there, and its memory is not reserved yet
            self._note_stale_backups(run, server_id, response)
            if response.lost_versions and is_pending():
                why = f"server {server_id!r} does not have them: it was started, or got its shards, without them"
                self._state.note_lost_versions(run, response.lost_versions, why)
                await self._state.save(run)

        def note_failure(error: Exception) -> None:
            nonlocal reported
            pending.error = str(error)
            if not reported and self._state.clock() - pending.since_s > _DELAY_EVENT_AFTER_S:
                reported = True
                message = f"step {step} is not updated yet: {error}"
                self._state.events.add(EventKind.UPDATE_DELAYED, message, run=run.name)

        await retry_async(attempt, errors=ShardwellError, check=note_failure)
        fault_points.reach("coordinator.update.acknowledged", step=step, server=server_id)
        if run.commits.pending_updates.get(server_id) is pending:
            run.commits.finish_update(server_id, pending, self._state.clock())
            run.changed.notify()
            if not run.commits.pending_updates:
                self._checkpoints.start_if_due(run)

    def _note_stale_backups(self, run: Run, server_id: str, response: shard_pb2.UpdateResponse) -> None:
        """Marks the backups on a server that lacked the step."""
        stale = {
            (status.unit_index, status.start_bytes, server_id): status.error or "the step was missing"
            for status in response.stale_backups
        }
        if run.relocations.fail_backups(stale, BackupState.BUILDING):
            message = f"{len(stale)} backups on {server_id!r} lacked step {run.committed_step - 1} and are built again"
            self._state.events.add(EventKind.BACKUPS_LOST, message, run=run.name)


def _rank_versions(run: Run) -> list[shard_pb2.RankVersion]:
    """Returns the version that each work item of an asynchronous run reads after its last commit."""
    if not run.asynchronous:
        return []
    return [
        shard_pb2.RankVersion(dp_rank=dp_rank, version=step.number) for step in run.work.steps for dp_rank in step.items
    ]


class Committer:
    """Commits prepared steps. See Note: [Commit order].

    Args:
        items: Fences trainers that lost their work when the next step starts.
        promoter: Tells servers about shards that move to them with a commit.
    """

    def __init__(
        self,
        state: CoordinatorState,
        servers: ShardServers,
        items: ItemLeases,
        promoter: Promoter,
        preparer: StepPreparer,
        updates: UpdateSender,
    ) -> None:
        self._state, self._servers, self._items = state, servers, items
        self._promoter, self._preparer, self._updates = promoter, preparer, updates

    async def commit(self, run: Run, step: Step) -> None:
        """Commits a step if every item is finished and the leader has proposed.

        Raises:
            ShardwellError: As ``StepPreparer.prepare``, or the commit record could not be written. No parameter was
                changed.
        """
        is_joined = True
        while is_joined and run.work.is_in_flight(step):
            is_joined = run.asynchronous and run.calls.committing.in_flight
            try:
                await run.calls.committing(self._prepare_and_commit, run, step)
            except ShardwellError:
                if not is_joined:
                    raise
                # The commit of another step failed.

    async def _prepare_and_commit(self, run: Run, step: Step) -> None:
        if not run.asynchronous:
            await self._commit(run, step, await self._preparer.prepare_or_skip(run, step))
            return
        async with run.calls.turn:
            await self._commit(run, step, await self._preparer.prepare_in_turn(run, step))

    async def _commit(self, run: Run, step: Step, prepared: PreparedGradients | None) -> None:
        if prepared is None or run.deleted:
            return
        if run.asynchronous:  # another item may have been committed since the proposal was made
            step.proposals.start_anew(run.commits.state)
        if (proposal := step.proposals.leading(run.work.leaders(step), run.units.layouts)) is None:
            return
        generation = step.generation
        if not await self._confirm_update(run, step, proposal):
            return
        async with run.checkpoints.boundary:  # see Note: [Consistent checkpoints]
            if run.work.is_in_flight(step) and generation == step.generation and run.checkpoints.restore is None:
                await self._write_record(run, step, prepared, proposal)

    async def _write_record(self, run: Run, step: Step, prepared: PreparedGradients, proposal: StepProposal) -> None:
        """Writes the commit record and starts the next step."""
        if len(counted := units_that_count(proposal.optimizer, len(run.units))) < len(run.units):
            prepared = prepared.restricted_to(counted)
        record = CommitRecord(
            step=run.committed_step,
            time=self._state.wall_clock(),
            leader=proposal.trainer_and_ranks,
            optimizer=proposal.optimizer.SerializeToString(deterministic=True),
            clip_coefficient=proposal.clip_coefficient,
            unit_order=proposal.unit_order,
            grad_norm=prepared.grad_norm,
            other_norms=tuple((norm.kind.norm_type, norm.kind.bound, norm.value) for norm in prepared.other_norms),
            skipped=step.skipped,
            means=json.dumps(means) if (means := mean_scalars(step.items, run.settings.world)) else "",
            **_asynchronous_facts(run, step),
        )
        layouts, changed = run.units.layouts, prepared.changed_buffers
        state = next_run_state(run.commits.state, step, proposal.state, changed, layouts, proposal.optimizer.generation)
        fault_points.reach("coordinator.commit.before_record", step=record.step)
        try:
            step.recording = True
            with run.commits.writing_record():  # resets wait until the record is written
                # Stored together with the record.
                self._servers.copies.end_former(run)
                if moves := run.relocations.planned_promotions():
                    # The targets have the prepared step and apply it.
                    run.relocations.promote(moves)
                started_s = self._state.clock()
                await self._state.save_commit(run, step, record, state)
                run.commits.record_s = self._state.clock() - started_s
        except BaseException as error:
            run.changed.notify()
            if isinstance(error, ShardwellError):
                self._state.events.add(EventKind.STEP_FAILED, f"step {record.step}: {error}", run=run.name)
                if moves:
                    # The new owners have no contributions of their own, and a restarted step goes to them.
                    run.work.restart()
                    self._state.tasks.start(self._store_moves(run))
            raise
        finally:
            step.recording = False
        fault_points.reach("coordinator.commit.after_record", step=record.step)
        # No ``await`` here: once ``writing`` is False, no other request may run before the step has advanced.
        run.advance(step, record, state)
        self._promoter.start(run)
        self._updates.start_all(run)
        run.changed.notify()  # servers get their requests before the trainers that are answered compete for the CPU
        outcome = "skipped" if step.skipped else f"gradient norm {prepared.grad_norm:.6g}"
        if run.asynchronous:
            item = f"item {record.item} of dp rank {record.dp_rank}, which read version {record.base_version}"
            outcome = f"{item}, {outcome}"
        self._state.events.add(EventKind.STEP_COMMITTED, f"step {record.step}: {outcome}", run=run.name)
        if moves:
            targets = ", ".join(sorted({repr(move.backup.server_id) for move in moves}))
            self._state.events.add(EventKind.SHARDS_MOVED, f"{len(moves)} shards moved to {targets}", run=run.name)
        self._items.start_fencing(run)

    async def _store_moves(self, run: Run) -> None:
        """Stores planned moves whose commit record could not be written, and tells their servers."""
        await self._state.save_or_retry(run)
        self._promoter.start(run)
        self._items.start_fencing(run)

    async def _confirm_update(self, run: Run, step: Step, proposal: StepProposal) -> bool:
        """Asks every server to confirm that it can apply the update. See Note: [Commit order].

        Returns:
            False if an item was reset, or the leader's proposal changed meanwhile.

        Raises:
            IncompleteStepError: Not all optimizer partitions are staged.
            CapacityError: A server has no memory for the update.
        """
        generation, context = step.generation, self._servers.context(run, run.committed_step)
        request: shard_pb2.ConfirmPartitionsRequest | shard_pb2.PrepareUpdateRequest
        if proposal.updates_on_trainers:
            rpc_name = "ConfirmPartitions"
            request = shard_pb2.ConfirmPartitionsRequest(context=context, optimizer=proposal.optimizer)
        elif step.prepared is not None and step.prepared.memory_ready_for == allocation_key(proposal.optimizer):
            return True
        else:
            rpc_name = "PrepareUpdate"
            request = shard_pb2.PrepareUpdateRequest(context=context, optimizer=proposal.optimizer)
        responses = await self._servers.call_all(run.units.servers, rpc_name, request)
        unchanged = generation == step.generation and not run.deleted
        if unchanged:
            self._preparer.note_failed_backups(run, responses)
        return unchanged and step.proposals.leading(run.work.leaders(step), run.units.layouts) == proposal


def _asynchronous_facts(run: Run, step: Step) -> dict[str, Any]:
    """Returns the fields of an asynchronous step's commit record that a synchronous one does not have."""
    if not run.asynchronous:
        return {}
    (item,) = step.items.values()
    return {"trainer": item.first_trainer, "dp_rank": item.dp_rank, "item": item.number, "base_version": step.number}
