"""The rpcs with which trainers end a step: PrepareGradients and CommitStep.

Each rpc waits at most ``wait_s`` and then returns what it waits for. Trainers repeat the whole request, so that a
restarted coordinator receives everything it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwell_server.coordinator.checkpoints.filling import UnitFiller
from shardwell_server.coordinator.commit.committer import Committer
from shardwell_server.coordinator.commit.preparation import StepPreparer
from shardwell_server.coordinator.commit.requested_steps import named_step
from shardwell_server.coordinator.inspection.stall import explain_stall
from shardwell_server.coordinator.leases.trainers import TrainerLeases
from shardwell_server.coordinator.runs.asynchronous_work import AsynchronousWork
from shardwell_server.coordinator.runs.gradient_norms import NormKind, OtherNorm, PreparedGradients
from shardwell_server.coordinator.runs.members import Member
from shardwell_server.coordinator.runs.optimizer_generations import starts_anew
from shardwell_server.coordinator.runs.proposals import (
    StepProposal,
    check_asynchronous,
    committed_optimizer,
    require_same_proposal,
    validate_proposal,
)
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.step import Step
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_server.coordinator.waiting import poll
from shardwell_wire.errors import VersionGoneError
from shardwell_wire.v1 import coordinator_pb2


class CommitRequests:
    """Serves PrepareGradients and CommitStep of every run.

    Args:
        state: State of the coordinator.
        servers: The shard servers.
        trainers: Leases and fences work items.
        preparer: Prepares steps.
        committer: Commits steps.
        filler: Knows the checkpoint that a run continues from.
    """

    def __init__(
        self,
        state: CoordinatorState,
        servers: ShardServers,
        trainers: TrainerLeases,
        preparer: StepPreparer,
        committer: Committer,
        filler: UnitFiller,
    ) -> None:
        self._state, self._servers, self._trainers = state, servers, trainers
        self._preparer, self._committer, self._filler = preparer, committer, filler

    async def prepare_gradients(
        self,
        run: Run,
        member: Member,
        number: int,
        item: coordinator_pb2.ItemName | None = None,
        *,
        kind: NormKind | None,
        wait_s: float,
        counted: Sequence[int] = (),
        kept: Sequence[int] = (),
    ) -> coordinator_pb2.PrepareGradientsResponse:
        """Returns the norms of a step's gradient once every item is finished.

        Args:
            run: The run.
            member: The trainer that sent the request.
            number: Number of the step.
            item: The trainer's item, in an asynchronous run.
            kind: Another norm to compute besides the Euclidean norm. None: none.
            wait_s: Longest time to wait in seconds.
            counted: Units of this trainer over which to compute the norms. Empty: all units of the run.
            kept: Units of this trainer whose gradients another optimizer will use. If there are any, the norms wait
                until trainers of all tp ranks and pp ranks have named their units.

        Raises:
            NonFiniteError: A gradient is not finite.
            StepRestartedError: The caller must still compute work of the step.
            VersionGoneError: The step is committed, and its norms are no longer kept or no trainer asked for this one.
        """
        step = named_step(run, member, number, item)
        if step is not None and kept and step.note_counted(counted, kept):
            run.changed.notify()

        async def check() -> PreparedGradients | None:
            run.require_member(member.name, member.epoch)
            if step is None or not run.work.is_in_flight(step):
                return _committed_norms(run, number, item, kind)
            self._servers.require_available(run)
            step.require_finished(member.name)
            if not step.all_finished or (kept and step.uncounted(run.units.layouts)):
                return None
            prepared = await self._preparer.prepare(run, step, kind=kind)
            return prepared if prepared is None or not kept else prepared.restricted_to(step.counted)

        prepared = await poll(run.changed, check, wait_s)
        if prepared is None:
            lines = self._explain(run)
            if kept and step is not None and (missing := step.uncounted(run.units.layouts)):
                lines = [*lines, f"clip_grad_norm_ in the trainers that hold unit {missing[0]!r}"]
            return coordinator_pb2.PrepareGradientsResponse(waiting_for=lines)
        return coordinator_pb2.PrepareGradientsResponse(
            prepared=True,
            grad_norm=prepared.grad_norm,
            other_norm=(prepared.find(kind) if kind is not None else None) or 0.0,
            attempts=step.attempts if step is not None else 0,
        )

    async def commit_step(
        self,
        run: Run,
        member: Member,
        number: int,
        proposal: StepProposal,
        wait_s: float,
        staged: Sequence[coordinator_pb2.PartitionWork] = (),
        item: coordinator_pb2.ItemName | None = None,
    ) -> coordinator_pb2.CommitStepResponse:
        """Adds a trainer's proposal and waits until the step is committed.

        If the optimizer runs on the trainers, the response may instead contain optimizer partitions for the caller to
        update. ``staged`` names the partitions that the caller has already staged, ``item`` the caller's item in an
        asynchronous run.

        Raises:
            HyperparameterMismatchError: The proposal differs from the leader's.
            StepRestartedError: The caller's own work is not finished, or it clips by an outdated norm.
        """
        step = named_step(run, member, number, item)
        proposal.optimizer.new_state = starts_anew(run.commits.state, proposal.optimizer.generation)
        if is_new := step is None or not step.proposals.prove_valid(proposal):
            validate_proposal(proposal, run.units.layouts, run.units.cuts)
            if run.asynchronous:
                check_asynchronous(proposal, run.settings.consistency)
        if step is not None:
            await self._filler.check_step(run, proposal.optimizer)
        if step is not None and run.work.is_in_flight(step):
            run.check_algorithms(proposal.optimizer)
            step.check_ready(proposal)
            step.proposals.add(proposal)
            names_units = is_new and proposal.norm_attempts is not None and step.note_counted(*proposal.norm_units)
            if step.partitions.note(staged) or names_units:
                run.changed.notify()

        async def check() -> coordinator_pb2.CommitStepResponse | None:
            run.require_member(member.name, member.epoch)
            if step is None or not run.work.is_in_flight(step):
                return self._committed_response(run, member, number, item, proposal)
            return await self._try_commit(run, member, step, item, proposal)

        response = await poll(run.changed, check, wait_s)
        await self._state.save(run)
        return response or coordinator_pb2.CommitStepResponse(waiting_for=self._explain(run))

    async def _try_commit(
        self,
        run: Run,
        member: Member,
        step: Step,
        item: coordinator_pb2.ItemName | None,
        proposal: StepProposal,
    ) -> coordinator_pb2.CommitStepResponse | None:
        """Commits the step if all work is finished and the leader has proposed. Otherwise returns None."""
        self._servers.require_available(run)
        step.check_ready(proposal)  # a work item may have been reset while the request waited
        if step.all_finished:
            self._trainers.revoke_for_commit(run, step, updates_on_trainers=proposal.updates_on_trainers)
        # Repeat this after every change: the leader may have proposed since, and a reset drops all proposals.
        step.proposals.restore(proposal)
        leaders, layouts = run.work.leaders(step), run.units.layouts
        step.proposals.reject_if_different(member.name, leaders, layouts)
        if step.proposals.leading(leaders, layouts) is not None and step.all_finished:
            if proposal.updates_on_trainers:
                if work := await self._partitions_for(run, member, step):
                    return coordinator_pb2.CommitStepResponse(partitions=work, new_state=proposal.optimizer.new_state)
                if not step.partitions.all_staged:
                    return None
            await self._committer.commit(run, step)
        if run.work.is_in_flight(step):
            return None
        return self._committed_response(run, member, step.number, item, proposal)

    async def _partitions_for(self, run: Run, member: Member, step: Step) -> list[coordinator_pb2.PartitionWork]:
        """Returns the optimizer partitions that a trainer must update, once the gradients are reduced."""
        if await self._preparer.prepare_or_skip(run, step) is None or not run.work.is_in_flight(step):
            return []
        run.require_member(member.name, member.epoch)
        position = run.rank_owners.position_of(member.name, run.settings)
        return step.partitions.assign(member.name, position, run.members.live, run.next_epoch)

    def _committed_response(
        self,
        run: Run,
        member: Member,
        number: int,
        item: coordinator_pb2.ItemName | None,
        proposal: StepProposal,
    ) -> coordinator_pb2.CommitStepResponse:
        """Returns the response for a committed step, with the caller's current work and the run's current state."""
        record = _record_of(run, number, item)
        if isinstance(run.work, AsynchronousWork):
            run.work.start_item(member.name)
        elif record is not None:
            # A trainer that joined after the commit repeats the step without its gradients. It may not know the norms
            # from which the committed clipping was computed, so its own clipping is accepted.
            # An optimizer whose first step was committed since does not start with new state any more.
            proposal.optimizer.new_state |= committed_optimizer(record.optimizer).new_state
            committed, is_known = StepProposal.from_record(record), number >= member.joined_step
            require_same_proposal(committed, proposal, run.units.layouts, clipping=is_known)
        response = coordinator_pb2.CommitStepResponse(
            committed=True,
            placement=run.relocations.announced,
            grad_norm=record.grad_norm if record is not None else 0.0,
            version=number + 1 if record is None else record.step + 1,
            skipped=record is not None and record.skipped,
            next_work=run.work.assigned_to(member.name),
            record_s=run.commits.record_s if number == run.committed_step - 1 else 0.0,
            residuals=run.wanted_residuals(member),
            staleness=None if record is None else record.staleness,
        )
        if (update := run.commits.update_before(number)) is not None:
            response.previous_update.server, response.previous_update.duration_s = update.server_id, update.duration_s
        state = run.commits.state
        if state is not None and state.buffer_versions:
            response.state.CopyFrom(state)
            response.state.ClearField("tracked_json")
        return response

    def _explain(self, run: Run) -> list[str]:
        return explain_stall(run, self._state.cluster, self._state.clock(), self._state.settings.min_servers).lines


def _record_of(run: Run, number: int, item: coordinator_pb2.ItemName | None) -> CommitRecord | None:
    """Returns the record of a committed step. In an asynchronous run: of a trainer's item. None: it is not kept."""
    return run.commits.find(number) if item is None else run.commits.find_item(item.dp_rank, item.number)


def _committed_norms(
    run: Run, number: int, item: coordinator_pb2.ItemName | None, kind: NormKind | None
) -> PreparedGradients:
    if (record := _record_of(run, number, item)) is None:
        raise VersionGoneError(
            f"step {number} is committed and its norms are no longer kept: step {run.committed_step} is in flight",
            step=number,
        )
    norms = tuple(OtherNorm(NormKind(norm_type, bound), value) for norm_type, bound, value in record.other_norms)
    prepared = PreparedGradients(record.grad_norm, norms)
    if kind is not None and prepared.find(kind) is None:
        raise VersionGoneError(
            f"step {number} is committed, and no trainer asked for its norm of type {kind.norm_type} before",
            step=number,
        )
    return prepared
