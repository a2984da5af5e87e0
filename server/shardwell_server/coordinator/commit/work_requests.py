"""The rpcs with which trainers finish and restart the work of a step: FinishWork and ResetWork.

Each rpc waits at most ``wait_s`` and then returns what it waits for. Trainers repeat the whole request, so that a
restarted coordinator receives everything it needs.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from shardwell_server.coordinator.commit.preparation import StepPreparer
from shardwell_server.coordinator.commit.requested_steps import require_started, step_in_flight, step_of
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.inspection.stall import explain_stall
from shardwell_server.coordinator.leases.trainers import TrainerLeases
from shardwell_server.coordinator.runs.asynchronous_work import AsynchronousWork
from shardwell_server.coordinator.runs.finished_reports import newly_finished
from shardwell_server.coordinator.runs.members import Member
from shardwell_server.coordinator.runs.module_buffers import check_written_buffers
from shardwell_server.coordinator.runs.replicated_gradients import find_differences, note_gradients
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.step import Step
from shardwell_server.coordinator.runs.work_items import FinishedWork, WorkItem
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.waiting import poll
from shardwell_wire.errors import StepRestartedError, VersionGoneError
from shardwell_wire.v1 import coordinator_pb2


class WorkRequests:
    """Serves FinishWork and ResetWork of every run.

    Args:
        state: State of the coordinator.
        servers: The shard servers.
        trainers: Leases and fences work items.
        preparer: Prepares steps.
    """

    def __init__(
        self, state: CoordinatorState, servers: ShardServers, trainers: TrainerLeases, preparer: StepPreparer
    ) -> None:
        self._state, self._servers, self._trainers, self._preparer = state, servers, trainers, preparer

    async def finish_work(
        self,
        run: Run,
        member: Member,
        number: int,
        reports: Sequence[coordinator_pb2.FinishedItem],
        *,
        accept_work: bool,
        accept_copies: bool,
        wait_s: float,
    ) -> coordinator_pb2.FinishWorkResponse:
        """Marks items as finished. Waits until all items are finished, or the caller has to compute an item.

        Reports of former attempts have no effect. If the caller's items were restarted, the response contains them.
        """
        if isinstance(run.work, AsynchronousWork):
            step, is_committed = _reported_step(run, run.work, member, number, reports)
            if step is None and not is_committed:
                return await self._start_item(run, run.work, member, wait_s)
        else:
            step = step_in_flight(run, number)
        if step is None:
            return coordinator_pb2.FinishWorkResponse(all_finished=True, placement=run.relocations.announced)
        if member.note_behind(False):
            run.touch()
        reported = {report.global_rank for report in reports}
        finished = newly_finished(step, member.name, reports, len(run.units))
        written = check_written_buffers(step, finished, reports, run.units.layouts)
        note_gradients(finished, reports, run.units.layouts)
        are_last = run.work.finish_items(member, step, finished, written)
        self._compare_gradients(run, step, finished)
        if are_last:
            run.changed.notify()
            if not run.asynchronous:  # otherwise steps wait for their turn, and may not need the norm
                self._preparer.start(run, step)
        self._trainers.items.start_fencing(run)
        if member.note_accepts_reassigned_work(accept_work):
            run.touch()
        accept_copies = accept_copies and not run.asynchronous
        if not accept_copies:
            step.drop_copies(member.name)

        async def check() -> coordinator_pb2.FinishWorkResponse | None:
            return await self._find_work(
                run, member, step, reported, accept_work=accept_work, accept_copies=accept_copies
            )

        try:
            response = await poll(run.changed, check, wait_s)
        finally:
            run.members.stop_waiting_for_work(member.name)
        # The response may reveal new leases and epochs. They must survive a restart, so store them first.
        await self._state.save(run)
        response = response or coordinator_pb2.FinishWorkResponse(waiting_for=step.waiting_for())
        response.placement = run.relocations.announced
        return response

    def _compare_gradients(self, run: Run, step: Step, finished: Sequence[FinishedWork]) -> None:
        """Adds an event for each unit of which the trainers of a newly finished item computed different gradients."""
        for item in (work.item for work in finished if not work.item.unfinished):
            for unit, message in find_differences(item, step.number, run.settings.world, run.units):
                unit.note_different_gradients()
                self._state.events.add(EventKind.GRADIENTS_DIFFER, message, run=run.name)

    async def _find_work(
        self,
        run: Run,
        member: Member,
        step: Step,
        reported: Set[int],
        *,
        accept_work: bool,
        accept_copies: bool,
    ) -> coordinator_pb2.FinishWorkResponse | None:
        run.require_member(member.name, member.epoch)
        if not run.work.is_in_flight(step):
            return coordinator_pb2.FinishWorkResponse(all_finished=True)
        self._servers.require_available(run)
        if step.all_finished:
            return coordinator_pb2.FinishWorkResponse(all_finished=True, last_finished=step.last_finished)
        # Items that are leased to the caller and not reported as finished are its work, even if the response that
        # granted them was lost.
        if accept_work and not step.leased_to(member.name):
            run.members.wait_for_work(member.name)
            self._trainers.revoke_unfinished(run)
            self._trainers.items.lease_vacant_items(run)
            if accept_copies and not step.leased_to(member.name):
                self._trainers.items.copy_late_item(run, member)
        # A server that has not fenced the former attempt of a restarted item would mix its parts with those of the new
        # attempt.
        leased = step.leased_to(member.name)
        restarted = any(not reported.isdisjoint(item.members) for item in leased)
        copied = step.copied_by(member.name) is not None
        if (copied or (leased and (accept_work or restarted))) and all(item.fenced for item in leased):
            return coordinator_pb2.FinishWorkResponse(work=run.work.assigned_to(member.name))
        return None

    async def _start_item(
        self, run: Run, work: AsynchronousWork, member: Member, wait_s: float
    ) -> coordinator_pb2.FinishWorkResponse:
        """Waits until a trainer of an asynchronous run may start its next item."""

        async def check() -> coordinator_pb2.FinishWorkResponse | None:
            run.require_member(member.name, member.epoch)
            self._servers.require_available(run)
            if work.start_item(member.name) or work.has_all_items(member):
                return coordinator_pb2.FinishWorkResponse(work=work.assigned_to(member.name))
            run.members.wait_for_work(member.name)
            return None

        try:
            response = await poll(run.changed, check, wait_s)
        finally:
            run.members.stop_waiting_for_work(member.name)
        await self._state.save(run)
        response = response or coordinator_pb2.FinishWorkResponse(waiting_for=self._explain(run))
        response.placement = run.relocations.announced
        return response

    async def reset_work(
        self, run: Run, member: Member, request: coordinator_pb2.ResetWorkRequest, wait_s: float
    ) -> coordinator_pb2.ResetWorkResponse:
        """Starts a new attempt of the item that a rank belongs to. Servers drop the contributions of former attempts.

        Raises:
            VersionGoneError: The step is committed.
            StaleEpochError: The item was leased to another trainer.
            StepRestartedError: In an asynchronous run, the item is computed again from another version.
        """

        async def check() -> WorkItem | None:
            run.require_live(member.name)
            return None if run.commits.writing else await self._reset_item(run, member, request)

        item = await poll(run.changed, check, wait_s)
        if item is None:
            servers = ", ".join(map(repr, run.units.servers))
            lines = [*self._explain(run), f"servers {servers}: they drop the contributions of the former attempt"]
            return coordinator_pb2.ResetWorkResponse(waiting_for=lines)
        return coordinator_pb2.ResetWorkResponse(item=item.to_proto(request.global_rank))

    async def _reset_item(self, run: Run, member: Member, request: coordinator_pb2.ResetWorkRequest) -> WorkItem:
        number = request.context.step
        if number < run.committed_step and not run.asynchronous:
            raise VersionGoneError(
                f"step {number} is committed, so its work cannot be reset", step=number, version=run.committed_step
            )
        step = step_of(run, member, number, request.global_rank, request.item_number)
        if step is None:
            raise VersionGoneError(f"step {number} is committed, so its work cannot be reset", step=number)
        item = step.require_leased(member.name, request.global_rank, request.context.epoch)
        repeated = item.reset_id != "" and item.reset_id == request.context.request_id
        if not repeated and (not request.HasField("attempt") or request.attempt == item.attempt):
            # Expired trainers cannot reset their finished items, which the reset of this item invalidates too. Those of
            # this item's replica get the new attempt.
            expired = [each for each in run.members.expired if each.name not in item.trainers]
            self._trainers.revoke(run, expired)
            run.work.reset_item(step, item, request.context.request_id)
            message = f"{item} of step {number}: trainer {member.name!r} starts attempt {item.attempt}"
            self._state.events.add(EventKind.WORK_RESET, message, run=run.name)
        # Store the attempt before any server sees it: a restarted coordinator must not reuse its number.
        await self._state.save(run)
        await self._trainers.items.fence(run, [item])
        self._trainers.items.start_fencing(run)
        return item

    def _explain(self, run: Run) -> list[str]:
        return explain_stall(run, self._state.cluster, self._state.clock(), self._state.settings.min_servers).lines


def _reported_step(
    run: Run, work: AsynchronousWork, member: Member, number: int, reports: Sequence[coordinator_pb2.FinishedItem]
) -> tuple[Step | None, bool]:
    """Returns the step in flight of a reported item, and whether the item is committed.

    Returns:
        None and False if no item is reported, or if the reported one is computed again: the trainer wants an item.
    """
    require_started(run, number)
    try:
        steps = [work.find_step(member.name, number, report.global_rank, report.number) for report in reports]
    except StepRestartedError:
        return None, False
    return (steps[0], steps[0] is None) if steps else (None, False)
