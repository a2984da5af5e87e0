"""The rpcs of a step: work is finished or begun anew, gradients are prepared, the step is committed."""

from __future__ import annotations

from collections.abc import Sequence

from shardwell_server.coordinator.commit.committer import Committer, norms_of
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.inspection.stall import explain
from shardwell_server.coordinator.leases.trainers import Trainers
from shardwell_server.coordinator.runs import buffers as run_buffers
from shardwell_server.coordinator.runs import partitions
from shardwell_server.coordinator.runs.members import Member
from shardwell_server.coordinator.runs.proposals import StepProposal, committed_optimizer, require_same, validate
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.run_records import finished_records
from shardwell_server.coordinator.runs.step import Item, OtherNorm, Prepared, Step, WorkState
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_server.coordinator.waiting import poll
from shardwell_wire.errors import (
    InvalidRequestError,
    StaleEpochError,
    StepStateError,
    VersionGoneError,
)
from shardwell_wire.partitions import runs_on_trainers
from shardwell_wire.v1 import coordinator_pb2


class Steps:
    """The steps of every run.

    Args:
        state: The runs.
        servers: The shard servers.
        trainers: Offers and fences work items.
        committer: Drives the commit.
    """

    def __init__(
        self, state: CoordinatorState, servers: ShardServers, trainers: Trainers, committer: Committer
    ) -> None:
        self._state, self._servers, self._trainers, self._committer = state, servers, trainers, committer

    async def finish(
        self,
        run: Run,
        member: Member,
        number: int,
        reports: Sequence[coordinator_pb2.FinishedItem],
        *,
        accept_work: bool,
        wait_s: float,
    ) -> coordinator_pb2.FinishWorkResponse:
        """Takes finished items and waits until all of the step are, or one is the caller's to compute."""
        run.settings.require_trains(run.name)
        step = _step_in_flight(run, number)
        if step is None:
            return coordinator_pb2.FinishWorkResponse(all_finished=True)
        news = step.check_finished(member.name, reports, len(run.units))
        run_buffers.note_written(step, [item for item, _ in news], reports, run.units.layouts)
        if step.finish(news, self._state.clock()):
            run.changed.notify()
            self._committer.start_preparing(run)
        if member.accepts_work is None or accept_work > member.accepts_work:
            # A trainer that has computed any item once can do it again, whatever this call is for.
            member.accepts_work = accept_work
            run.touch()

        async def look() -> coordinator_pb2.FinishWorkResponse | None:
            return await self._look_for_work(run, member, step, accept_work=accept_work)

        try:
            answer = await poll(run.changed, look, wait_s)
        finally:
            run.ready_to_work.pop(member.name, None)
        await self._state.save(run)
        return answer or coordinator_pb2.FinishWorkResponse(waiting_for=step.waiting_for())

    async def _look_for_work(
        self, run: Run, member: Member, step: Step, *, accept_work: bool
    ) -> coordinator_pb2.FinishWorkResponse | None:
        run.require(member.name, member.epoch)
        if step is not run.step:
            return coordinator_pb2.FinishWorkResponse(all_finished=True)
        self._servers.check(run)
        if step.all_finished:
            while step.all_finished and not step.recorded:
                await run.recording(lambda: self._record(run, step))
            return coordinator_pb2.FinishWorkResponse(all_finished=True) if step.recorded else None
        if accept_work:
            # What was leased to it and is not reported as finished is its to compute, told before or not.
            if not step.held_by(member.name):
                run.ready_to_work[member.name] = None
                self._trainers.reclaim_unfinished(run)
                self._trainers.offer(run)
            if step.held_by(member.name):
                return coordinator_pb2.FinishWorkResponse(work=run.work_of(member.name))
        return None

    async def _record(self, run: Run, step: Step) -> None:
        """Makes the finished items durable: trainers do not report them again once they know that all are."""
        generation = step.generation
        await self._state.store(run, self._state.storage.save_finished, step.number, finished_records(step))
        step.recorded = generation == step.generation

    async def reset(
        self, run: Run, member: Member, request: coordinator_pb2.ResetWorkRequest, wait_s: float
    ) -> coordinator_pb2.ResetWorkResponse:
        """Begins a rank's work anew under a higher attempt; what it pushed is dropped on every server.

        Raises:
            VersionGoneError: The step is committed.
            StaleEpochError: The rank went to another trainer.
        """

        async def look() -> Item | None:
            run.require_live(member.name)
            return None if run.writing_commit else await self._reset(run, member, request)

        item = await poll(run.changed, look, wait_s)
        if item is None:
            lines = [*self._explain(run), f"servers {', '.join(map(repr, run.units.servers))}: they drop the gradient"]
            return coordinator_pb2.ResetWorkResponse(waiting_for=lines)
        return coordinator_pb2.ResetWorkResponse(item=item.to_proto())

    async def _reset(self, run: Run, member: Member, request: coordinator_pb2.ResetWorkRequest) -> Item:
        number = request.context.step
        if number < run.committed_step:
            raise VersionGoneError(
                f"step {number} is committed: its work cannot begin anew", step=number, version=run.committed_step
            )
        step = _step_in_flight(run, number)
        assert step is not None
        item = _held_item(step, member, request)
        if not item.reset_id or item.reset_id != request.context.request_id:
            self._trainers.reclaim(run, run.members.lapsed)  # nobody else could begin their finished work anew
            run.reset(item, request.context.request_id)
            message = f"rank {item.global_rank} of step {number}: trainer {member.name!r} begins attempt {item.attempt}"
            self._state.events.add(EventKind.WORK_RESET, message, run=run.name)
        await self._state.save(run)
        await self._trainers.fence(run, [item])
        self._trainers.start_fencing(run)
        return item

    async def prepare(
        self,
        run: Run,
        member: Member,
        number: int,
        *,
        norm_type: float,
        wait_s: float,
        unit_indices: Sequence[int] = (),
    ) -> coordinator_pb2.PrepareGradientsResponse:
        """The norm of a step's gradients, once every item is finished, or what is waited for.

        Args:
            run: The run.
            member: Who asks.
            number: Of the step.
            norm_type: Another norm that is wanted beside the Euclidean one. 0: none.
            wait_s: Longest time to wait.
            unit_indices: Units whose gradients count. Empty: all.

        Raises:
            NonFiniteError: A gradient is not finite.
            VersionGoneError: The step was committed too long ago.
        """
        step = _step_in_flight(run, number)

        async def look() -> Prepared | None:
            run.require(member.name, member.epoch)
            if step is None or step is not run.step:
                return _prepared_for(run, number, norm_type)
            self._servers.check(run)
            return await self._committer.prepare(run, norm_type=norm_type) if step.all_finished else None

        prepared = await poll(run.changed, look, wait_s)
        if prepared is None:
            return coordinator_pb2.PrepareGradientsResponse(waiting_for=self._explain(run))
        if unit_indices:
            prepared = norms_of(prepared, set(unit_indices))
        other = prepared.other_norm
        return coordinator_pb2.PrepareGradientsResponse(
            prepared=True,
            grad_norm=prepared.grad_norm,
            other_norm=other.value if other is not None and norm_type else 0.0,
            attempts=step.attempts if step is not None else 0,
        )

    async def commit(
        self,
        run: Run,
        member: Member,
        number: int,
        step_proposal: StepProposal,
        wait_s: float,
        staged: Sequence[coordinator_pb2.PartitionWork] = (),
    ) -> coordinator_pb2.CommitStepResponse:
        """Takes a trainer's hyper-parameters and waits until the step is committed.

        If the optimizer runs on the trainers it answers with partitions to update when there are some for this one.
        Those in ``staged`` are done.

        Raises:
            HyperparameterMismatchError: They differ from those that count.
            StepStateError: The trainer's own work is not finished.
        """
        step = _step_in_flight(run, number)
        if step is None or not any(step_proposal.asks_the_same(known) for known in step.step_proposals.values()):
            validate(step_proposal, run.units.layouts, run.units.cuts)
        if step is not None:
            run.check_algorithms(step_proposal.optimizer)
            _check_ready(step, member, step_proposal)
            step.step_proposals[member.name] = step_proposal
            partitions.note_staged(run, step, staged)

        async def look() -> coordinator_pb2.CommitStepResponse | None:
            run.require(member.name, member.epoch)
            if step is None or step is not run.step:
                return self._committed(run, member, number, step_proposal)
            self._servers.check(run)
            _check_ready(step, member, step_proposal)
            if step.all_finished:
                self._trainers.reclaim_for_commit(
                    run, step, on_trainers=runs_on_trainers(step_proposal.optimizer.algorithm)
                )
            # Again: the one that decides may have come, and work that was begun anew clears all.
            run.step_proposal(step.step_proposals.get(member.name, step_proposal))
            if run.decision() is not None and step.all_finished:
                if runs_on_trainers(step_proposal.optimizer.algorithm):
                    if work := await self._partitions_for(run, member, step):
                        return coordinator_pb2.CommitStepResponse(partitions=work)
                    if not partitions.all_staged(step):
                        return None
                await self._committer.commit(run)
            return self._committed(run, member, number, step_proposal) if step is not run.step else None

        answer = await poll(run.changed, look, wait_s)
        await self._state.save(run)
        return answer or coordinator_pb2.CommitStepResponse(waiting_for=self._explain(run))

    async def _partitions_for(self, run: Run, member: Member, step: Step) -> list[coordinator_pb2.PartitionWork]:
        """The partitions for a trainer to update, once the gradient is complete."""
        if await self._committer.prepare_or_skip(run) is None or step is not run.step:
            return []
        return partitions.work_for(run, run.require(member.name, member.epoch), step)

    def _committed(
        self, run: Run, member: Member, number: int, step_proposal: StepProposal
    ) -> coordinator_pb2.CommitStepResponse:
        """The answer for a committed step; work and state are what is current."""
        record = run.commit_of(number)
        if record is not None:
            # A trainer that joined later goes through the step without having seen its gradients.
            clip = record.clip_coefficient if number >= member.joined_step else step_proposal.clip_coefficient
            require_same(_step_proposal_of(record, clip), step_proposal, run.units.layouts)
        response = coordinator_pb2.CommitStepResponse(
            committed=True,
            grad_norm=record.grad_norm if record is not None else 0.0,
            version=number + 1,
            skipped=record is not None and record.skipped,
            next_work=run.work_of(member.name),
        )
        if run.state is not None and run.state.buffer_versions:
            response.state.CopyFrom(run.state)
            response.state.ClearField("tracked_json")
        return response

    def _explain(self, run: Run) -> list[str]:
        return explain(run, self._state.cluster, self._state.clock()).lines


def _step_in_flight(run: Run, number: int) -> Step | None:
    """The step in flight, or None if ``number`` is committed. Raises StepStateError if it is yet to come."""
    if run.step is None:
        raise StepStateError(f"run {run.name!r} has not started: wait until Join answers that it has")
    if number > run.committed_step:
        raise StepStateError(
            f"step {number} of run {run.name!r} is yet to come: step {run.committed_step} is in flight",
            step=run.committed_step,
        )
    return run.step if number == run.committed_step else None


def _held_item(step: Step, member: Member, request: coordinator_pb2.ResetWorkRequest) -> Item:
    """The item whose work a trainer begins anew."""
    rank, epoch = request.global_rank, request.context.epoch
    if rank not in step.items:
        raise InvalidRequestError(f"there is no rank {rank}: the run has {len(step.items)}")
    item = step.items[rank]
    if epoch != item.epoch or item.holder != member.name or item.state is WorkState.VACANT:
        raise StaleEpochError(
            f"trainer {member.name!r} holds rank {rank} of step {step.number} under epoch {epoch} no more: "
            f"{item.holder!r} has epoch {item.epoch}",
            global_rank=rank,
            epoch=item.epoch,
        )
    return item


def _check_ready(step: Step, member: Member, step_proposal: StepProposal) -> None:
    """Raises StepStateError if a trainer commits too early, or by a norm that is out of date."""
    if items := step.held_by(member.name):
        ranks = ", ".join(str(item.global_rank) for item in items)
        raise StepStateError(
            f"trainer {member.name!r} commits step {step.number}, but has not finished the work of rank {ranks}: "
            "finish it first",
            ranks=ranks,
        )
    if step_proposal.norm_attempts is not None and step_proposal.norm_attempts != step.attempts:
        raise StepStateError(
            f"trainer {member.name!r} clips step {step.number} by a gradient norm that is out of date: a rank has "
            "begun its work anew since; call clip_grad_norm_ again"
        )


def _prepared_for(run: Run, number: int, norm_type: float) -> Prepared:
    record = run.commit_of(number)
    prepared = None if record is None else Prepared(record.grad_norm, _other_norm(record))
    if prepared is None or not prepared.has(norm_type):
        raise VersionGoneError(
            f"step {number} is committed and its norms are not kept: step {run.committed_step} is in flight",
            step=number,
        )
    return prepared


def _other_norm(record: CommitRecord) -> OtherNorm | None:
    if record.norm_type is None or record.other_norm is None:
        return None
    return OtherNorm(record.norm_type, record.other_norm)


def _step_proposal_of(record: CommitRecord, clip_coefficient: float) -> StepProposal:
    optimizer = committed_optimizer(record.optimizer)
    return StepProposal(record.decider, record.decider, optimizer, clip_coefficient, record.unit_order, None)
