"""The rpcs that end a step: FinishWork, ResetWork, PrepareGradients and CommitStep.

Each rpc waits at most ``wait_s`` and then returns what it waits for. Trainers repeat the whole request, so that a
restarted coordinator receives everything it needs.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence, Set

from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.ranks.members import Member, tell
from shardwell_server.coordinator.rpcs.coordinator_rpcs import CoordinatorRpcs, wait_limit
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.signals import poll
from shardwell_server.coordinator.steps.proposals import (
    NormKind,
    OtherNorm,
    PreparedGradients,
    StepProposal,
    check_asynchronous,
    committed_optimizer,
    require_same_proposal,
    starts_anew,
    validate_proposal,
)
from shardwell_server.coordinator.steps.reports import check_reports, find_differences
from shardwell_server.coordinator.steps.step import FinishedWork, Step, WorkItem
from shardwell_server.coordinator.steps.work import AsynchronousWork
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_server.serving.rpc import Call
from shardwell_wire.errors import InvalidRequestError, StepRestartedError, StepStateError, VersionGoneError
from shardwell_wire.v1 import coordinator_pb2


class StepRpcs(CoordinatorRpcs):
    """Rpcs with which trainers end a step."""

    # Work items

    async def FinishWork(
        self, request: coordinator_pb2.FinishWorkRequest, call: Call
    ) -> coordinator_pb2.FinishWorkResponse:
        run, member = self._member(request)
        if request.HasField("item_limit"):
            member.item_limit = request.item_limit
        with member.serving_rpc(self._state.clock):
            response = await self._finish_work(run, member, request, wait_limit(call, request.wait_s))
        response.placement = run.relocations.announced
        self._issuer.prove_leases(run, response.work.items)
        return response

    async def _finish_work(
        self, run: Run, member: Member, request: coordinator_pb2.FinishWorkRequest, wait_s: float
    ) -> coordinator_pb2.FinishWorkResponse:
        """Marks items as finished. Waits until all items are finished, or the caller has to compute an item.

        Reports of former attempts have no effect. If the caller's items were restarted, the response contains them.
        """
        number, reports, accept_work = request.context.step, request.items, request.accept_work
        if isinstance(run.work, AsynchronousWork):
            step, is_committed = _reported_step(run, run.work, member, number, reports)
            if step is None and not is_committed:
                return await self._start_item(run, run.work, member, wait_s)
        else:
            step = _step_of(run, member, number)
        if step is None:
            return coordinator_pb2.FinishWorkResponse(all_finished=True)
        if member.note_behind(False):
            run.changes.touch()
        reported = {report.global_rank for report in reports}
        finished = check_reports(step, member.name, reports, run.units.layouts)
        self._compare_gradients(run, step, finished, is_allowed=request.allow_gradient_differences)
        are_last = run.work.finish_items(member, step, finished)
        if are_last:
            run.changed.notify()
            if not run.asynchronous:  # otherwise steps wait for their turn, and may not need the norm
                self._coordinator.preparer.start(run, step)
                if len(step.items) > 1 and (warning := run.equal_gradients.note(step)):
                    self._state.events.add(EventKind.GRADIENTS_EQUAL, warning, run=run.name)
                    run.notices.add(warning, now=self._state.wall_clock(), cause=EventKind.GRADIENTS_EQUAL)
                    tell(run.members)
        self._coordinator.trainers.items.start_fencing(run)
        if member.note_accepts_reassigned_work(accept_work):
            run.changes.touch()
        accept_twins = accept_work and request.accept_copies and not run.asynchronous
        if not accept_twins:
            step.drop_twin(member.name)

        async def check() -> coordinator_pb2.FinishWorkResponse | None:
            return self._find_work(run, member, step, reported, accept_work=accept_work, accept_twins=accept_twins)

        response = await self._poll_work(run, member, check, wait_s)
        return response or coordinator_pb2.FinishWorkResponse(waiting_for=step.waiting_for())

    async def _poll_work(
        self,
        run: Run,
        member: Member,
        check: Callable[[], Awaitable[coordinator_pb2.FinishWorkResponse | None]],
        wait_s: float,
    ) -> coordinator_pb2.FinishWorkResponse | None:
        """Waits until a trainer has work, or need not wait for it."""
        try:
            response = await poll(run.changed, check, wait_s)
        finally:
            run.members.waiting_for_work.pop(member.name, None)
        # The response may reveal new leases and epochs. They must survive a restart, so store them first.
        await self._state.save(run)
        return response

    def _compare_gradients(self, run: Run, step: Step, finished: Sequence[FinishedWork], *, is_allowed: bool) -> None:
        """Adds an event for each unit of which the trainers of an item computed different gradients.

        The event is added once per unit.

        Raises:
            ConflictError: They did, and differences are not allowed. All trainers of the item get this error.
        """
        for unit, item, message in find_differences(finished, step.number, run.settings.world, run.units):
            if not unit.gradients_differed:
                unit.gradients_differed = True
                self._state.events.add(EventKind.GRADIENTS_DIFFER, message, run=run.name)
            if not is_allowed:
                item.refused = item.epoch, item.attempt, message
                run.changed.notify()
                item.require_same_gradients()

    def _find_work(
        self, run: Run, member: Member, step: Step, reported: Set[int], *, accept_work: bool, accept_twins: bool
    ) -> coordinator_pb2.FinishWorkResponse | None:
        run.require_member(member.name, member.epoch)
        if not run.work.is_in_flight(step):
            return coordinator_pb2.FinishWorkResponse(all_finished=True)
        for item in step.items.values():
            if item.member_of(member.name) is not None:
                item.require_same_gradients()
        self._coordinator.servers.require_available(run)
        if step.all_finished:
            return coordinator_pb2.FinishWorkResponse(all_finished=True, last_finished=step.last_finished)
        # Items that are leased to the caller and not reported as finished are its work, even if the response that
        # granted them was lost.
        if accept_work and not step.leased_to(member.name):
            run.members.waiting_for_work[member.name] = None
            self._coordinator.trainers.revoke_unfinished(run)
            self._coordinator.trainers.items.lease_vacant_items(run)
            if accept_twins and not step.leased_to(member.name):
                self._coordinator.trainers.items.start_twin(run, member)
        # A server that has not fenced the former attempt of a restarted item would mix its parts with those of the new
        # attempt.
        leased = step.leased_to(member.name)
        restarted = any(not reported.isdisjoint(item.members) for item in leased)
        has_twin = step.twinned_by(member.name) is not None
        if (has_twin or (leased and (accept_work or restarted))) and all(item.fenced for item in leased):
            return coordinator_pb2.FinishWorkResponse(work=run.work.assigned_to(member.name))
        return None

    async def _start_item(
        self, run: Run, work: AsynchronousWork, member: Member, wait_s: float
    ) -> coordinator_pb2.FinishWorkResponse:
        """Waits until a trainer of an asynchronous run may start its next item."""

        async def check() -> coordinator_pb2.FinishWorkResponse | None:
            run.require_member(member.name, member.epoch)
            self._coordinator.servers.require_available(run)
            if work.start_item(member.name) or work.has_all_items(member):
                return coordinator_pb2.FinishWorkResponse(work=work.assigned_to(member.name))
            run.members.waiting_for_work[member.name] = None
            return None

        response = await self._poll_work(run, member, check, wait_s)
        return response or coordinator_pb2.FinishWorkResponse(waiting_for=self._explain_stall(run).lines)

    async def ResetWork(
        self, request: coordinator_pb2.ResetWorkRequest, call: Call
    ) -> coordinator_pb2.ResetWorkResponse:
        run, member = self._member(request, membership_epoch=False)

        async def check() -> WorkItem | None:
            run.require_member(member.name)
            return None if run.commits.writing else await self._reset_item(run, member, request)

        with member.serving_rpc(self._state.clock):
            item = await poll(run.changed, check, wait_limit(call, request.wait_s))
        if item is None:
            servers = ", ".join(map(repr, run.units.servers))
            drop = f"servers {servers}: they drop the contributions of the former attempt"
            return coordinator_pb2.ResetWorkResponse(waiting_for=[*self._explain_stall(run).lines, drop])
        response = coordinator_pb2.ResetWorkResponse(item=run.work.locate_data(item.to_proto(request.global_rank)))
        self._issuer.prove_leases(run, [response.item])
        return response

    async def _reset_item(self, run: Run, member: Member, request: coordinator_pb2.ResetWorkRequest) -> WorkItem:
        """Starts a new attempt of the item that a rank belongs to. Servers drop the contributions of former attempts.

        Raises:
            VersionGoneError: The step is committed.
            StaleEpochError: The item was leased to another trainer.
            StepRestartedError: In an asynchronous run, the item is computed again from another version.
        """
        number = request.context.step
        if number < run.committed_step and not run.asynchronous:
            raise VersionGoneError(
                f"step {number} is committed, so its work cannot be reset", step=number, version=run.committed_step
            )
        named = coordinator_pb2.ItemName(dp_rank=request.global_rank, number=request.item_number)
        step = _step_of(run, member, number, named)
        if step is None:
            raise VersionGoneError(f"step {number} is committed, so its work cannot be reset", step=number)
        item = step.require_leased(member.name, request.global_rank, request.context.epoch)
        repeated = item.reset_id != "" and item.reset_id == request.context.request_id
        if not repeated and (not request.HasField("attempt") or request.attempt == item.attempt):
            # Expired trainers cannot reset their finished items, which the reset of this item invalidates too. Expired
            # trainers of this item's replica get the new attempt.
            expired = [each for each in run.members.expired if each.name not in item.trainers]
            self._coordinator.trainers.revoke(run, expired)
            run.work.reset_item(step, item, request.context.request_id)
            message = f"{item} of step {number}: trainer {member.name!r} starts attempt {item.attempt}"
            self._state.events.add(EventKind.WORK_RESET, message, run=run.name)
        # Store the attempt before any server sees it: a restarted coordinator must not reuse its number.
        await self._state.save(run)
        await self._coordinator.trainers.items.fence(run, [item])
        self._coordinator.trainers.items.start_fencing(run)
        return item

    # The commit

    async def PrepareGradients(
        self, request: coordinator_pb2.PrepareGradientsRequest, call: Call
    ) -> coordinator_pb2.PrepareGradientsResponse:
        run, member = self._member(request)
        with member.serving_rpc(self._state.clock):
            return await self._prepare_gradients(run, member, request, wait_limit(call, request.wait_s))

    async def _prepare_gradients(
        self, run: Run, member: Member, request: coordinator_pb2.PrepareGradientsRequest, wait_s: float
    ) -> coordinator_pb2.PrepareGradientsResponse:
        """Returns the norms of a step's gradient once every item is finished.

        If another optimizer will use the gradients of some units, the norms wait until trainers of all tp ranks and pp
        ranks have named their units.

        Raises:
            NonFiniteError: A gradient is not finite.
            StepRestartedError: The caller must still compute work of the step.
            VersionGoneError: The step is committed, and its norms are no longer kept or no trainer asked for this one.
        """
        number, kept = request.context.step, request.kept_unit_indices
        item, kind = _item_of(run, request), _norm_kind(request)
        step = _step_of(run, member, number, item)
        if step is not None and kept and step.note_counted(request.unit_indices, kept):
            # Trainers of other ranks may wait for this list.
            run.changed.notify()

        async def check() -> PreparedGradients | None:
            # The caller may have lost its membership while it waited.
            run.require_member(member.name, member.epoch)
            if step is None or not run.work.is_in_flight(step):
                return _committed_norms(run, number, item, kind)
            self._coordinator.servers.require_available(run)
            step.require_finished(member.name)
            _require_workers(run, member, step)
            if not step.all_finished or (kept and step.uncounted(run.units.layouts)):
                return None
            prepared = await self._coordinator.preparer.prepare(run, step, kind=kind)
            return prepared if prepared is None or not kept else prepared.restricted_to(step.counted)

        prepared = await poll(run.changed, check, wait_s)
        if prepared is None:
            lines = self._explain_stall(run).lines
            if kept and step is not None and (missing := step.uncounted(run.units.layouts)):
                lines = [*lines, f"clip_grad_norm_ in the trainers that hold unit {missing[0]!r}"]
            return coordinator_pb2.PrepareGradientsResponse(waiting_for=lines)
        return coordinator_pb2.PrepareGradientsResponse(
            prepared=True,
            grad_norm=prepared.grad_norm,
            other_norm=(prepared.find(kind) if kind is not None else None) or 0.0,
            attempts=step.attempts if step is not None else 0,
        )

    async def CommitStep(
        self, request: coordinator_pb2.CommitStepRequest, call: Call
    ) -> coordinator_pb2.CommitStepResponse:
        run, member = self._member(request)
        proposal = StepProposal(
            trainer=member.name,
            trainer_and_ranks=run.work.describe_trainer(member.name),
            optimizer=request.optimizer,
            clip_coefficient=request.clip_coefficient,
            unit_order=tuple(request.unit_order),
            state=request.state if request.HasField("state") else None,
            norm_attempts=request.norm_attempts if request.HasField("norm_attempts") else None,
        )
        if request.HasField("item_limit"):
            member.item_limit = request.item_limit
        with member.serving_rpc(self._state.clock):
            response = await self._commit_step(run, member, request, proposal, wait_limit(call, request.wait_s))
        self._issuer.prove_leases(run, response.next_work.items)
        self._issuer.prove_leases(run, response.partitions)
        return response

    async def _commit_step(
        self,
        run: Run,
        member: Member,
        request: coordinator_pb2.CommitStepRequest,
        proposal: StepProposal,
        wait_s: float,
    ) -> coordinator_pb2.CommitStepResponse:
        """Adds a trainer's proposal and waits until the step is committed.

        If the optimizer runs on the trainers, the response may instead contain optimizer partitions for the caller to
        update.

        Raises:
            HyperparameterMismatchError: The proposal differs from the leader's.
            StepRestartedError: The caller's own work is not finished, or it clips by an outdated norm.
        """
        number, item = request.context.step, _item_of(run, request)
        step = _step_of(run, member, number, item)
        # Only the run's state shows whether this is the first step of an optimizer.
        proposal.optimizer.new_state = starts_anew(run.commits.state, proposal.optimizer.generation)
        # All trainers of a step propose the same update, and repeat it in every poll. It is validated once.
        if is_new := step is None or not step.proposals.prove_valid(proposal):
            validate_proposal(proposal, run.units.layouts, run.units.cuts)
            if run.asynchronous:
                check_asynchronous(proposal, run.settings.consistency)
        if step is not None:
            await self._coordinator.filler.check_step(run, proposal.optimizer)
        if step is not None and run.work.is_in_flight(step):
            run.commits.check_algorithms(proposal.optimizer, run.units.layouts)
            step.check_ready(proposal)
            step.proposals.add(proposal)
            names_units = is_new and proposal.norm_attempts is not None and step.note_counted(*proposal.norm_units)
            if step.partitions.note(request.staged_partitions) or names_units:
                run.changed.notify()

        async def check() -> coordinator_pb2.CommitStepResponse | None:
            run.require_member(member.name, member.epoch)
            if step is None or not run.work.is_in_flight(step):
                return self._committed_response(run, member, number, item, proposal)
            return await self._try_commit(run, member, step, item, proposal)

        response = await poll(run.changed, check, wait_s)
        await self._state.save(run)
        return response or coordinator_pb2.CommitStepResponse(waiting_for=self._explain_stall(run).lines)

    async def _try_commit(
        self, run: Run, member: Member, step: Step, item: coordinator_pb2.ItemName | None, proposal: StepProposal
    ) -> coordinator_pb2.CommitStepResponse | None:
        """Commits the step if all work is finished and the leader has proposed. Otherwise returns None."""
        self._coordinator.servers.require_available(run)
        step.check_ready(proposal)  # a work item may have been reset while the request waited
        _require_workers(run, member, step)
        if step.all_finished:
            self._coordinator.trainers.revoke_for_commit(run, step, updates_on_trainers=proposal.updates_on_trainers)
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
            newest, now = run.committed_step, self._state.clock()
            for message in run.readers.give_up(newest, now):
                self._state.events.add(EventKind.READER_SILENT, message, run=run.name)
            if run.readers.waited_for(newest, now):
                return None
            await self._coordinator.committer.commit(run, step)
        if run.work.is_in_flight(step):
            return None
        return self._committed_response(run, member, step.number, item, proposal)

    async def _partitions_for(self, run: Run, member: Member, step: Step) -> list[coordinator_pb2.PartitionWork]:
        """Returns the optimizer partitions that a trainer must update, once the gradients are reduced."""
        if await self._coordinator.preparer.prepare_or_skip(run, step) is None or not run.work.is_in_flight(step):
            return []
        run.require_member(member.name, member.epoch)
        position = run.owners.position_of(member.name)
        return step.partitions.assign(member.name, position, run.members.live, run.changes.next_epoch)

    def _committed_response(
        self, run: Run, member: Member, number: int, item: coordinator_pb2.ItemName | None, proposal: StepProposal
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
            means=json.loads(record.means) if record is not None and record.means else None,
        )
        if item is None:  # the run is synchronous
            acting, is_known = run.commits.acting.get(number, {}), number >= member.joined_step
            ranks = acting.get(member.name, []) if acting and is_known else run.acting_ranks(number, member)
            response.acting.global_ranks.extend(ranks)
        if (update := run.commits.update_before(number)) is not None:
            response.previous_update.server, response.previous_update.duration_s = update.server_id, update.duration_s
        state = run.commits.state
        if state is not None and state.buffer_versions:
            response.state.CopyFrom(state)
            response.state.ClearField("tracked_json")
            response.state.ClearField("ended_tracked_json")
            response.state.ClearField("data_positions")
        return response


def _require_started(run: Run, number: int) -> None:
    """Raises StepStateError if a step has not started."""
    if not run.started:
        raise StepStateError(f"run {run.name!r} has not started: wait until Join returns started=True")
    if number > run.committed_step:
        raise StepStateError(
            f"step {number} of run {run.name!r} has not started: step {run.committed_step} is in flight",
            step=run.committed_step,
        )


def _step_of(run: Run, member: Member, number: int, item: coordinator_pb2.ItemName | None = None) -> Step | None:
    """Returns a step in flight, or None if it is committed.

    Args:
        number: Number of the step, which is the version that the item reads.
        item: In an asynchronous run: the item.

    Raises:
        StepStateError: The step has not started.
        StepRestartedError: In an asynchronous run, the item is computed again from another version.
    """
    _require_started(run, number)
    if item is not None and isinstance(run.work, AsynchronousWork):
        return run.work.find_step(member.name, number, item.dp_rank, item.number)
    return run.work.steps[0] if number == run.committed_step else None


def _item_of(
    run: Run, request: coordinator_pb2.PrepareGradientsRequest | coordinator_pb2.CommitStepRequest
) -> coordinator_pb2.ItemName | None:
    """Returns the caller's item in an asynchronous run, which must be named. None: the run is synchronous."""
    if run.asynchronous and not request.HasField("item"):
        raise InvalidRequestError(
            f"item is not set: run {run.name!r} has consistency={run.settings.consistency}, in which the request names "
            "the work item"
        )
    return request.item if run.asynchronous else None


def _reported_step(
    run: Run, work: AsynchronousWork, member: Member, number: int, reports: Sequence[coordinator_pb2.FinishedItem]
) -> tuple[Step | None, bool]:
    """Returns the step in flight of a reported item, and whether the item is committed.

    Returns:
        None and False if no item is reported, or if the reported one is computed again: the trainer wants an item.
    """
    _require_started(run, number)
    try:
        steps = [work.find_step(member.name, number, report.global_rank, report.number) for report in reports]
    except StepRestartedError:
        return None, False
    return (steps[0], steps[0] is None) if steps else (None, False)


def _require_workers(run: Run, member: Member, step: Step) -> None:
    """Raises StepRestartedError if a trainer waits for work that nobody computes, and that it could compute itself.

    Work may be restarted when all trainers wait for the commit. Trainers that have computed an item repeat it, and
    ask for more. If their trainers are gone, the others have to ask.
    """
    if run.asynchronous or step.all_finished or not member.accepts_reassigned_work or run.owners.has_waiting_replica:
        return
    if not any(step.leased_to(name) for name in run.members.live):
        ranks = ", ".join(str(item.first_rank) for item in step.unfinished)
        raise StepRestartedError(
            f"step {step.number} has not finished: the work of rank {ranks} was restarted, and its trainer is gone; "
            f"trainer {member.name!r} may have to compute it"
        )


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


def _norm_kind(request: coordinator_pb2.PrepareGradientsRequest) -> NormKind | None:
    """Returns the norm that a request asks for besides the Euclidean norm. None: there is none."""
    norm_type, bound = request.norm_type, request.norm_bound
    if not norm_type >= 0:
        raise InvalidRequestError(f"norm_type is {norm_type}: expected a number above 0, infinity, or 0 for none")
    if not bound >= 0 or (bound and not norm_type):
        raise InvalidRequestError(
            f"norm_bound is {bound} with norm_type {norm_type}: expected a number above 0 together with a norm_type, "
            "or 0 for no bound"
        )
    return NormKind(norm_type, bound) if norm_type else None
