"""A trainer's work items: each is started, computed and finished, and finished items are reported.

Commits each step: settles interrupted commits, and handles gradients that were lost or dropped.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from shardwell.grid.replica import ReplicaGroup
from shardwell.membership.membership import Membership
from shardwell.module.units import Units
from shardwell.monitor.step_times import StepMonitor
from shardwell.step.step_commit import GradNorm, StepCommitter, StepUpdate
from shardwell.step.step_state import StepPhase, StepState, WorkItemState
from shardwell.store.buffers import RunBuffers
from shardwell.store.run_store import RunStore
from shardwell.training.rejoining import Iteration, Rejoining
from shardwell.training.tracked_objects import TrackedObjects
from shardwell.transport.route_stats import DIRECT
from shardwell_wire.errors import (
    DeadlineError,
    ReplicaLostError,
    ShardwellError,
    StaleEpochError,
    StepRestartedError,
    UnavailableError,
    UsageError,
    VersionGoneError,
)
from shardwell_wire.model.optimizers import KEPT_GROUP, NO_GROUP
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class WorkItems:
    """Computes the work items of the step in flight that are leased to this trainer.

    Args:
        state: State of the step.
        membership: The membership of this trainer.
        committer: Reports finished items.
        store: Sends gradients.
        units: The sharded units.
        buffers: The run's buffers.
        rejoining: Joins the run again if the membership has lapsed.
        monitor: Measures the steps.
        replica: The replica's process group.
    """

    def __init__(
        self,
        state: StepState,
        membership: Membership,
        committer: StepCommitter,
        store: RunStore,
        units: Units,
        buffers: RunBuffers,
        rejoining: Rejoining,
        monitor: StepMonitor,
        replica: ReplicaGroup,
    ) -> None:
        self._state, self._membership, self._committer, self._store = state, membership, committer, store
        self._units, self._buffers, self._rejoining, self._monitor = units, buffers, rejoining, monitor
        self._replica = replica
        self.keeps_graphs = False
        """Whether graphs stay usable after an item of a plain loop, because several optimizers use them in turn."""
        self._item_started_s: float | None = None
        self._item_s: float | None = None
        """Seconds that the last item of ``step.batches`` took."""
        self._stop: Callable[[], None] | None = None
        """Called when the current item is finished and reported."""

    def start_batches(self) -> None:
        """Called when ``step.batches`` starts to yield the step's items.

        Raises:
            UsageError: A gradient was computed before, which belongs to no item.
            ReplicaLostError: Another trainer of the replica was lost.
        """
        self._replica.require_valid()
        if not self._state.in_batches and self._units.have_gradients:
            raise UsageError(
                f"a backward ran in step {self._state.number} before `for batch in step.batches(...)`: its gradient "
                "belongs to no batch, and no other trainer could recompute it. Run the backward inside that loop, or "
                "call optimizer.zero_grad() to drop the gradient"
            )
        self._state.start_batches()
        self._monitor.begin_work()

    def start_item(self, item: WorkItemState) -> bool:
        """Starts a work item without gradients of an earlier attempt; returns False if the attempt is over already."""
        self._state.start_item(item)
        self._item_started_s = time.monotonic()
        self._units.zero_grad()
        try:
            self._buffers.start_item(self._state.number, item)
        except VersionGoneError:  # the step was committed with the work of another trainer
            item.abandon(item.key)
            self._state.leave_item()
            return False
        item.record_written(self._buffers.written())
        if self._store.pushes.may_be_copied:
            self._membership.start_item(self._state.number, item.item.global_rank)
        self._replica.require_same_item(item.item)
        return True

    def stop_item(self) -> None:
        """Called when the loop over ``step.batches`` ends early or raises: this trainer computes no item."""
        self._membership.end_item()

    def end_item(self) -> None:
        """Ends the current item: sends its remaining gradients and, for rank 0, its buffers.

        Drops them if the item's attempt is over.
        """
        current = self._state.current
        if current is not None and self._state.in_batches and self._is_over(current):
            self._units.zero_grad()
            self._store.pushes.abandon_sums()
            self._buffers.abandon_item()
            self._state.leave_item()
            self._restart_spoiled()
            self._end_time()
            return
        self._units.finish_item(keeps_graphs=self.keeps_graphs and not self._state.in_batches)
        if current is not None:
            self._store.pushes.push_drops(current)
            self._buffers.end_item(self._state.number, current)
        self._state.finish_item()
        self._end_time()

    def _restart_spoiled(self) -> bool:
        """Starts another attempt of the items that cannot be finished; returns whether there are any."""
        spoiled = [item for item in self._state.items.values() if item.spoiled and not self._membership.lapsed]
        for item in spoiled:
            try:
                self._store.pushes.restart(item)
            except (StaleEpochError, VersionGoneError):
                item.give_up()
            else:
                item.finished = False
        return bool(spoiled)

    def _end_time(self) -> None:
        """Measures the item that has ended. Stops the process if it should end with the item."""
        started, self._item_started_s = self._item_started_s, None
        if started is not None:
            self._item_s = time.monotonic() - started
        if self._stop is not None:
            stop, self._stop = self._stop, None
            self._store.pushes.drain()
            finished = [item.to_proto() for item in self._state.items.values() if item.finished and not item.abandoned]
            self._committer.report_finished(self._state.number, finished)
            stop()

    def remaining_s(self) -> float | None:
        """See ``Computes.remaining_s`` in ``preemption.py``."""
        started, item_s = self._item_started_s, self._item_s
        return None if started is None or item_s is None else max(0.0, started + item_s - time.monotonic())

    def stop_after_item(self, stop: Callable[[], None]) -> None:
        """See ``Computes.stop_after_item`` in ``preemption.py``."""
        self._stop = stop

    def _is_over(self, item: WorkItemState) -> bool:
        """True if gradients of the item's attempt do not count any more."""
        return item.abandoned or self._membership.lapsed

    def finish_work(self, *, accept_work: bool) -> list[WorkItemState]:
        """Reports finished items and waits for those of the other trainers.

        Returns:
            Work items that this trainer must compute: those of a lost trainer, and its own that were restarted. Empty
            when all items of the step are finished, or when the loop goes on at another step.

        Raises:
            StepRestartedError: In a plain loop, the trainer's item was restarted.
        """
        while not self._state.work_finished:
            if not self._rejoining.join_again():
                return []
            if todo := [item for item in self._state.unfinished if not item.abandoned]:
                return todo  # this trainer has joined again, or it has restarted items itself
            try:
                self._store.pushes.drain()
                self._membership.end_item()  # not before: an item is late too if its pushes take long
                if self._restart_spoiled():
                    continue
                response = self._report(accept_work=accept_work, accept_copies=self._accepts_copies)
            except StaleEpochError:
                if not self._membership.lapsed:
                    raise
                continue
            if response.all_finished:
                self._state.finish_work()
            elif self._state.asynchronous and not response.work.items:
                self._state.restart(response.work.step, [], response.work.position)
                self._rejoining.end_iteration()
                return []
            elif self._state.asynchronous and response.work.step != self._state.number:
                return self._start(response.work)
            elif work := self._take(response.work.items):
                return work
        return []

    def _report(self, *, accept_work: bool, accept_copies: bool) -> coordinator_pb2.FinishWorkResponse:
        # The pushes of an abandoned item were dropped. A plain loop reports it to learn the next attempt.
        finished = [
            item.to_proto()
            for item in self._state.items.values()
            if item.finished and not (item.abandoned and self._state.in_batches)
        ]
        return self._committer.finish_work(
            self._state.number,
            finished,
            accept_work=accept_work,
            accept_copies=accept_copies,
            item_limit=self._state.item_limit,
        )

    def after_reports(self, call: Callable[[], Result]) -> Result:
        """Calls an rpc about finished work. Coordinators that have restarted since need the reports of the work again.

        Raises:
            StepRestartedError: Work of the step was restarted.
        """
        while True:
            try:
                return call()
            except StepRestartedError as error:
                if "ranks" not in error.data or self._membership.lapsed:
                    raise  # the coordinator knows the reports
                # Work that the answer grants instead stays leased to this trainer, and ``finish_work`` gets it again.
                if not self._report(accept_work=self._state.in_batches, accept_copies=False).all_finished:
                    raise

    def _start(self, work: coordinator_pb2.StepWork) -> list[WorkItemState]:
        """Starts the item of an asynchronous run that this trainer has waited for, or has to compute again.

        It reads a later version.
        """
        for item in self._state.items.values():
            self._store.pushes.forget_pushes(item)
        self._state.restart(work.step, work.items, work.position)
        self._state.start_batches()
        self._units.invalidate()
        self._units.begin_step()
        return self._state.unfinished

    @property
    def _accepts_copies(self) -> bool:
        """True if this trainer may compute a copy of an item that is late, and none has failed in this step."""
        failed = any(item.item.copy and item.abandoned for item in self._state.items.values())
        return self._state.in_batches and self._store.pushes.can_copy_items and not failed

    def _take(self, items: Iterable[coordinator_pb2.WorkItem]) -> list[WorkItemState]:
        """Adds work items that the coordinator has leased to this trainer; returns those to compute.

        They have the coordinator's order, in which all trainers of a replica compute them.
        """
        known = self._state.items
        work = self._state.add_items([item for item in items if item.global_rank not in known])
        added = {state.item.global_rank for state in work}
        repeated = [item for item in items if item.global_rank not in added]
        for item in repeated:
            self._repeat(known[item.global_rank], item)
        if repeated and not self._state.in_batches:
            raise self._rejoining.plain_loop_error()
        return [known[item.global_rank] for item in items]

    def _repeat(self, state: WorkItemState, item: coordinator_pb2.WorkItem) -> None:
        """Makes an item unfinished, because its attempt is over and it is leased to this trainer again."""
        logger.warning(
            "step %d: the work of rank %d is computed again (attempt %d), because its gradients are lost",
            self._state.number,
            item.global_rank,
            item.attempt,
        )
        self._store.pushes.forget_pushes(state)
        self._state.repeat_item(state, item)


class StepInFlight:
    """The step in flight on one trainer: computes it, commits it and, after an interrupt, settles it.

    Every change of the step's state goes through ``StepState``.

    Attributes:
        state: State of the step.
        items: The work items of this trainer.
        rejoining: Joins the run again.
        monitor: Measures the steps.

    Args:
        state: State of the first step.
        membership: The membership of this trainer.
        committer: Calls the coordinator at the end of a step.
        store: Sends gradients.
        units: The sharded units.
        buffers: The run's buffers.
        tracked: The run's tracked objects.
        iteration: The iteration of the training loop.
        monitor: Measures the steps.
        replica: The replica's process group.
    """

    def __init__(
        self,
        state: StepState,
        membership: Membership,
        committer: StepCommitter,
        store: RunStore,
        units: Units,
        buffers: RunBuffers,
        tracked: TrackedObjects,
        iteration: Iteration,
        monitor: StepMonitor,
        replica: ReplicaGroup,
    ) -> None:
        self.state, self.monitor = state, monitor
        self._iteration = iteration
        self._membership, self._committer = membership, committer
        self._store, self._units = store, units
        self._buffers, self._tracked = buffers, tracked
        self.rejoining = Rejoining(state, membership, store, units, buffers, iteration)
        self.items = WorkItems(state, membership, committer, store, units, buffers, self.rejoining, monitor, replica)
        self._several_optimizers = False
        units.passes.before_use = self.settle

    def share_between_optimizers(self, several: bool) -> None:
        """Sets whether several optimizers update the session's parameters in turn.

        If so, a commit leaves the autograd graphs of the other optimizers' units usable.

        Raises:
            UsageError: Gradients are added among trainers. The servers cannot keep such sums for a later step.
        """
        if several and (reduction := self._store.transfers.gradient_reduction) != DIRECT:
            raise UsageError(
                f"several optimizers in one session need gradient_reduction={DIRECT!r}: with {reduction!r} the "
                "servers get sums of several ranks' gradients, which they cannot keep for another optimizer's step"
            )
        self._several_optimizers = self.items.keeps_graphs = several

    def enter(self) -> None:
        """Called when a loop over ``session.steps`` starts the step."""
        self._units.require_all()
        self._iteration.begin()
        self.state.skip_gradients(False)

    def leave(self) -> None:
        """Called when the loop body of the step has ended."""
        self.settle()
        self.rejoining.join_again()

    @property
    def voided(self) -> bool:
        """True if the rest of the loop's iteration has no effect. See Note: [Void iterations] in ``iteration.py``."""
        return self._iteration.voided

    # ---- restarts ----

    def _restarted(self, error: ShardwellError) -> None:
        """Handles work that was restarted after ``step.batches`` had ended. See Note: [Void iterations].

        Raises:
            StepRestartedError: In a plain loop, this trainer's item was restarted.
            ShardwellError: ``error``, if nothing can be done about it here.
        """
        if isinstance(error, StaleEpochError):
            self._membership.ask()  # a shard may be gone because of a rollback that this trainer does not know yet
        if self._membership.lapsed:
            if not self.rejoining.join_again():
                return
        elif isinstance(error, StepRestartedError):
            self.state.reopen_work()
        else:
            raise error
        if self._iteration.running and self.state.in_batches:
            self._units.zero_grad()
            self._iteration.void(self.state.number, str(error))
            return
        if not self.state.in_batches and not self.state.unfinished:
            self.items.finish_work(accept_work=False)  # raises if the items of this trainer were restarted, too
        raise error

    # ---- dropped gradients ----

    def zero_grad(self) -> None:
        """Drops the gradients of the current item, or between items those of all finished items.

        In a plain loop a finished item is then computed again, with the next batch.
        """
        with self._units.passes.guard:
            self.state.skip_gradients(True)
            self._units.zero_grad()
            if self.state.current is None and not self.voided and not self._membership.lapsed:
                self._reopen_items()

    def zero_grad_of(self, parameters: Mapping[int, Collection[int]]) -> None:
        """Drops one optimizer's gradients of this step and of earlier steps.

        Args:
            parameters: Indices of the optimizer's parameters by unit index.
        """
        self.state.skip_gradients(True)
        self._units.drop_gradients(parameters)
        if self.voided or self._membership.lapsed:
            return
        pushed = {unit.index for unit in self._units if unit.pushes}
        for unit_index in pushed & parameters.keys():
            self._store.drop(unit_index, parameters[unit_index])
        if self.state.current is None and self.state.dropped_late and self.state.all_dropped:
            self._reopen_items()

    def _reopen_items(self) -> None:
        """Drops the gradients of all finished items and, in a plain loop, makes the items unfinished."""
        try:
            self._store.pushes.discard(include_empty=not self.state.in_batches)
        except VersionGoneError:
            if self.state.phase is not StepPhase.COMMITTING:
                raise
            self.settle()  # the interrupted optimizer.step() had committed the step
        except StaleEpochError:
            if not self._membership.lapsed:
                raise
            self.state.abandon_commit()  # this trainer joins again before the next commit, without the gradients
        else:
            self.state.abandon_commit()
            self.state.reopen_items()
            for item in self.state.items.values():
                if item.finished:  # the buffers were withdrawn together with the gradients
                    self._buffers.push_again(self.state.number, item)

    # ---- the commit ----

    def end_backwards(self, step: int) -> None:
        """Ends the current work item, if something was computed, so that a later backward of the item raises."""
        is_computed = step == self.state.position and self.state.current is not None and self._units.used
        if is_computed and not self._membership.lapsed:
            self.items.end_item()

    def grad_norm(
        self,
        step: int,
        norm_type: float,
        bound: float = 0.0,
        counted: Sequence[int] = (),
        kept: Sequence[int] = (),
    ) -> GradNorm:
        """Returns a norm of a step's mean gradient. Finishes the work of the step in flight first.

        Args:
            step: Number of the step, as in ``StepState.position``.
            norm_type: The norm's p.
            bound: Elements count as clamped to ``[-bound, bound]``. 0: not clamped.
            counted: Units of this trainer to include. Empty: all units of the run.
            kept: Units of this trainer to leave out.

        Returns:
            The norm; NaN if it is not known, because the loop's iteration has lost its effect or the step is committed.
        """
        try:
            with self._units.passes.guard:
                if not self.voided and self.rejoining.join_again():
                    if step == self.state.position:
                        self._finish_plain_loop()
                        step = self.state.number
                    item = self.state.item_name
                    norm = partial(self._committer.grad_norm, step, norm_type, bound, counted, kept, item=item)
                    return self.items.after_reports(norm)
        except VersionGoneError as error:
            logger.info("the gradient norm of step %d is not known: %s", step, error)
        except (StepRestartedError, StaleEpochError) as error:
            self._restarted(error)
        return GradNorm(math.nan, 0)

    def commit(self, step: int, update: StepUpdate) -> bool:
        """Proposes an update; returns when the step is committed.

        Returns:
            Whether the parameters were updated; the same on every trainer. False if a gradient is not finite and
            ``skip_non_finite`` is set. Also False if the loop's iteration has lost its effect.

        Raises:
            UsageError: This trainer has computed nothing in the step.
            HyperparameterMismatchError: Another rank proposed other hyper-parameters.
            NonFiniteError: A gradient is not finite. Nothing has changed; ``zero_grad`` on every trainer and another
                commit skip the step.
            DeadlineError: Other trainers did not finish in time.
            ReplicaLostError: Another trainer of this trainer's replica was lost.
        """
        self._membership.check()
        try:
            with self._units.passes.guard:
                return not self.voided and self.rejoining.join_again() and self._commit(step, update)
        except (StepRestartedError, StaleEpochError) as error:
            self.state.abandon_commit()
            self._restarted(error)
            return False

    def _commit(self, step: int, update: StepUpdate) -> bool:
        state = self.state
        if step < state.position:
            response = self._send_proposal(step, update)
            self._buffers.restore()
            return not response.skipped
        if state.phase is not StepPhase.COMMITTING:
            self._require_work(update.optimizer)
        self._store.check_model()
        state.start_commit(update)
        try:
            if state.current is None:
                self._buffers.check_untouched(step)
            if not state.in_batches and not self._units.used and self._uses_kept_gradients(update.optimizer):
                self._finish_empty_work()
            self._finish_plain_loop()
            self._mark_late_drops(update.optimizer)
            response = self._send_proposal(state.number, update)
        except (DeadlineError, ReplicaLostError, UnavailableError):
            raise  # the other trainers may still commit the step, so the commit stays pending
        except Exception:
            state.abandon_commit()
            raise
        self._advance(response, update.optimizer)
        return not response.skipped

    def settle(self) -> None:
        """Completes an ``optimizer.step()`` that an interrupt or a deadline ended, committed or not."""
        if (update := self.state.pending_update) is not None:
            logger.info("step %d: completing the optimizer.step() that was interrupted", self.state.number)
            self.commit(self.state.position, update)

    def _send_proposal(self, step: int, update: StepUpdate) -> coordinator_pb2.CommitStepResponse:
        propose = partial(
            self._committer.commit,
            step,
            update,
            unit_order=self._units.forward_order(),
            state=coordinator_pb2.RunState(step=step, tracked_json=self._tracked.to_json()),
            item=self.state.item_name,
            item_limit=self.state.item_limit,
        )
        return self.items.after_reports(propose)

    def _mark_late_drops(self, optimizer: common_pb2.OptimizerStep) -> None:
        """Marks gradients as unused that ``zero_grad`` dropped after the work was finished."""
        if self.state.dropped_late:
            for unit in optimizer.units:
                for index in self.state.dropped_late.get(unit.unit_index, ()):
                    unit.group_indices[index] = NO_GROUP

    def _advance(self, response: coordinator_pb2.CommitStepResponse, optimizer: common_pb2.OptimizerStep) -> None:
        """Moves to the step after the commit."""
        step = self.state.number
        kept = [unit.unit_index for unit in optimizer.units if KEPT_GROUP in unit.group_indices]
        updated = [unit.unit_index for unit in optimizer.units if _updates(unit)]
        try:
            self._units.invalidate(updated if self._several_optimizers else None)
        finally:  # the step is committed, even if a parameter was written in place
            self._store.residuals.note_wanted(response.residuals)
            work = response.next_work
            finished = self.state.advance(work.step, work.items, work.position)
            self._store.start_step(finished, kept)
        self._units.begin_step()
        self._buffers.commit(response.state, step, self.state.number, has_work=bool(self.state.items))
        self.monitor.end_step(step, self._committer.take_facts(response))

    def _require_work(self, optimizer: common_pb2.OptimizerStep) -> None:
        """Raises UsageError if nothing was computed in the step and ``zero_grad`` was not called."""
        state = self.state
        if self._units.used or state.skips_gradients or state.in_batches or not state.items:
            return
        if self._uses_kept_gradients(optimizer):
            return
        raise UsageError(
            f"optimizer.step() was called in step {state.number}, but no forward has run on this trainer since "
            + (f"step {state.number - 1} was committed" if state.number else "the session was opened")
            + ", so there is no gradient. Run the model and loss.backward() first. To commit a step without "
            "gradients, call optimizer.zero_grad() right before optimizer.step()"
        )

    def _uses_kept_gradients(self, optimizer: common_pb2.OptimizerStep) -> bool:
        """True if the servers may hold gradients of earlier steps for the optimizer."""
        return self._several_optimizers and any(
            self._store.pushes.may_keep(unit.unit_index) and _updates(unit) for unit in optimizer.units
        )

    def _finish_plain_loop(self) -> None:
        """Finishes the trainer's item in a plain loop, which has no end of its own, and waits for other trainers."""
        if self.state.asynchronous and not self.state.in_batches:
            raise UsageError(
                "this run commits each work item by itself, so that a trainer may have to wait before its next item: "
                "run the forward and the backward inside `for batch in step.batches(...)`"
            )
        if self.state.current is not None:
            self.items.end_item()
        # An abandoned item is finished by another trainer once the work of all trainers is finished.
        done_elsewhere = self.state.work_finished
        if missing := [item for item in self.state.unfinished if not (done_elsewhere and item.abandoned)]:
            ranks = ", ".join(str(state.item.global_rank) for state in missing)
            raise UsageError(
                f"step {self.state.number}: the work of logical rank {ranks} was not computed: "
                "run `for batch in step.batches(...)` to its end before optimizer.step()"
            )
        if not self.state.work_finished:
            self.items.finish_work(accept_work=False)

    def _finish_empty_work(self) -> None:
        """Finishes the step's items without computing them: the step uses gradients of earlier steps only.

        Items of lost trainers are empty for the same reason.
        """
        while not self.state.work_finished and self.state.items:
            for item in self.state.unfinished:
                self.state.select_item(item)
                self.items.end_item()
            self.items.finish_work(accept_work=True)


def _updates(unit: common_pb2.UnitGroups) -> bool:
    """True if the optimizer updates a parameter of the unit."""
    return max(unit.group_indices, default=NO_GROUP) >= 0
