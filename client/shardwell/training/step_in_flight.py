"""The step in flight on one trainer: commits it, settles interrupted commits, handles lost and dropped gradients."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence

from shardwell.step.step_commit import GradNorm, StepUpdate
from shardwell.step.step_state import StepPhase, WorkItemState
from shardwell.training.rejoining import Iteration, Rejoining
from shardwell.training.training import Training
from shardwell.training.work_items import WorkItems
from shardwell.transport.base import DIRECT
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
from shardwell_wire.model.names import check_scalars
from shardwell_wire.model.optimizers import KEPT_GROUP, NO_GROUP
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)


class StepInFlight:
    """The step in flight on one trainer: computes it, commits it and, after an interrupt, settles it.

    ``StepState`` has the state, and this class and ``WorkItems`` say when it changes.

    Attributes:
        state: State of the step.
        items: The work items of this trainer.
        iteration: The iteration of the training loop.
        rejoining: Joins the run again.
        monitor: Measures the steps.

    Args:
        training: The model in training.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self.state, self.monitor = training.state, training.monitor
        self._membership, self._committer = training.membership, training.committer
        self._store, self._units, self._buffers = training.store, training.units, training.buffers
        self.iteration = Iteration(training.tracked)
        self.rejoining = Rejoining(training, self.iteration)
        self.items = WorkItems(training, self.rejoining, self.iteration)
        self.several_optimizers = False
        """Whether several optimizers update the session's parameters in turn."""
        self.means: Mapping[str, float] = {}
        """Means over the data ranks of the numbers that were logged in the step that was committed last, by name."""
        self._has_missed_model: bool = False
        """True if the last step of a loop over ``step.batches`` ran no sharded module."""
        self.acting: coordinator_pb2.ActingRanks | None = None
        """Ranks for which this trainer acts after the step that was committed last. None: not known."""
        # A commit that was interrupted with the former model may be pending.
        training.units.passes.before_use = self.settle

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
        self.several_optimizers = self.items.keeps_graphs = several

    def enter(self) -> None:
        """Called when a loop over ``session.steps`` starts the step."""
        self._units.require_all()
        self.iteration.begin()
        self.state.skips_gradients = False

    def leave(self) -> None:
        """Called when the loop body of the step has ended."""
        self.settle()
        self.rejoining.join_again()

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
            self.state.work_finished = False  # it must be reported again
            self.state.dropped_late.clear()
        else:
            raise error
        if self.iteration.running and self.state.in_batches:
            self._units.zero_grad()
            self.iteration.void(self.state.number, str(error))
            return
        if not self.state.in_batches and not self.state.unfinished:
            self.items.finish_work(accept_work=False)  # raises if the items of this trainer were restarted, too
        raise error

    # ---- logged numbers ----

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds numbers to this trainer's current work item. See ``Step.log``.

        Args:
            step: Number of the step, as in ``StepState.position``.
            scalars: The numbers by name.
        """
        if self.iteration.voided or self._membership.lapsed:
            return  # the item is computed again
        if self.state.position > step and not self.state.asynchronous:
            return  # the loop repeats a committed step
        if (current := self.state.current) is None:
            calls = ", ".join(f"{name}=..." for name in scalars)
            raise UsageError(
                f"step.log({calls}) was called in step {self.state.number} outside of a work item, to which logged "
                "numbers belong: call it inside `for batch in step.batches(...)`. In a loop without step.batches, call "
                "it before clip_grad_norm_ and optimizer.step()"
            )
        check_scalars({*current.scalars, *scalars})
        current.scalars.update(scalars)

    # ---- dropped gradients ----

    def zero_grad(self) -> None:
        """Drops the gradients of the current item, or between items those of all finished items.

        In a plain loop a finished item is then computed again, with the next batch.
        """
        with self._units.passes.guard:
            self.state.skips_gradients = True
            self._units.zero_grad()
            if self.state.current is None and not self.iteration.voided and not self._membership.lapsed:
                self._reopen_items()

    def zero_grad_of(self, parameters: Mapping[int, Collection[int]]) -> None:
        """Drops one optimizer's gradients of this step and of earlier steps.

        Args:
            parameters: Indices of the optimizer's parameters by unit index.
        """
        self.state.skips_gradients = True
        self._units.drop_gradients(parameters)
        if self.iteration.voided or self._membership.lapsed:
            return
        pushed = {unit.index for unit in self._units if unit.pushes}
        for unit_index in pushed & parameters.keys():
            self._store.gradients.drop(unit_index, parameters[unit_index])
        if self.state.current is None and self.state.dropped_late and self.state.all_dropped:
            self._reopen_items()

    def _reopen_items(self) -> None:
        """Drops the gradients of all finished items and, in a plain loop, makes the items unfinished."""
        try:
            self._store.gradients.discard(include_empty=not self.state.in_batches)
        except VersionGoneError:
            if self.state.phase is not StepPhase.COMMITTING:
                raise
            self.settle()  # the interrupted optimizer.step() had committed the step
        except StaleEpochError:
            if not self._membership.lapsed:
                raise
            self.state.pending_update = None  # this trainer joins again before the next commit, without the gradients
        else:
            self.state.pending_update = None
            self.state.reopen_items()
            for item in self.state.items.values():
                if item.is_finished:  # the buffers were withdrawn together with the gradients
                    self._buffers.push_again(self.state.number, item)

    # ---- the commit ----

    def end_backwards(self, step: int) -> None:
        """Ends the current work item, if something was computed, so that a later backward of the item raises."""
        is_computed = step == self.state.position and self.state.current is not None and self._units.used
        if is_computed and not self._membership.lapsed:
            self.items.end_item()

    def grad_norm(
        self, step: int, norm_type: float, bound: float = 0.0, counted: Sequence[int] = (), kept: Sequence[int] = ()
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
                if not self.iteration.voided and self.rejoining.join_again():
                    if step == self.state.position:
                        self._finish_plain_loop(self.state.current)
                        step = self.state.number
                    item = self.state.item_name
                    while True:
                        try:
                            return self._committer.grad_norm(step, norm_type, bound, counted, kept, item=item)
                        except StepRestartedError as error:
                            self.items.report_again(error)
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
        if not self._membership.valid:
            self._membership.check()
        try:
            with self._units.passes.guard:
                if not self.iteration.voided and (not self._membership.lapsed or self.rejoining.join_again()):
                    return self._commit(step, update)
        except (StepRestartedError, StaleEpochError) as error:
            self.state.pending_update = None
            self._restarted(error)
        self._buffers.undo_items()
        return False

    def _commit(self, step: int, update: StepUpdate) -> bool:
        state, optimizer = self.state, update.optimizer
        if step < state.position:  # the loop repeats a committed step, and the coordinator repeats its answer
            self._units.zero_grad()  # of a loop without step.batches
            response = self._send_proposal(step, update)
            self.means, self.acting = dict(response.means), response.acting if response.HasField("acting") else None
            updated = [unit.unit_index for unit in optimizer.units if _updates(unit)]
            self._units.invalidate(updated if self.several_optimizers else None)
            self._units.passes.begin_step()
            self._buffers.restore()
            return not response.skipped
        if state.pending_update is None and not (state.in_batches or state.skips_gradients):
            self._require_work(optimizer)
        elif state.items and not state.skips_gradients:
            has_missed, self._has_missed_model = self._has_missed_model, not self._units.used
            if self._has_missed_model and not has_missed:
                logger.warning(
                    "step %d: no sharded module ran in the loop over step.batches, so this trainer has no gradient: "
                    "train the model that auto_wrap or fully_shard got",
                    state.number,
                )
        self._store.check_model()
        # If the commit is interrupted from here on, the next forward completes it.
        self._units.passes.before_use = self.settle
        state.pending_update = update
        try:
            current = state.current
            if current is None and self._buffers.by_name:
                self._buffers.check_untouched(step)
            if not state.in_batches and not self._units.used and self._uses_kept_gradients(optimizer):
                self._finish_empty_work()
                current = state.current
            self._finish_plain_loop(current)
            if state.dropped_late:
                self._mark_late_drops(optimizer)
            # All work of the step is finished. The answer arrives when the step is committed.
            response = self._send_proposal(state.number, update)
        except (DeadlineError, ReplicaLostError, UnavailableError):
            raise  # the other trainers may still commit the step, so the commit stays pending
        except Exception:
            state.pending_update = None
            raise
        self._advance(response, optimizer)
        return not response.skipped

    def settle(self) -> None:
        """Completes an ``optimizer.step()`` that an interrupt or a deadline ended, committed or not."""
        if (update := self.state.pending_update) is not None:
            logger.info("step %d: completing the optimizer.step() that was interrupted", self.state.number)
            self.commit(self.state.position, update)

    def _send_proposal(self, step: int, update: StepUpdate) -> coordinator_pb2.CommitStepResponse:
        state, tracked = self.state, self._training.tracked
        run_state = coordinator_pb2.RunState(step=step, tracked_json=tracked.to_json())
        while True:
            try:
                return self._committer.commit(
                    step,
                    update,
                    unit_order=self._units.forward_order(),
                    state=run_state,
                    item=state.item_name if state.asynchronous else None,
                    item_limit=state.item_limit,
                )
            except StepRestartedError as error:
                self.items.report_again(error)

    def _mark_late_drops(self, optimizer: common_pb2.OptimizerStep) -> None:
        """Marks gradients as unused that ``zero_grad`` dropped after the work was finished."""
        for unit in optimizer.units:
            for index in self.state.dropped_late.get(unit.unit_index, ()):
                unit.group_indices[index] = NO_GROUP

    def _advance(self, response: coordinator_pb2.CommitStepResponse, optimizer: common_pb2.OptimizerStep) -> None:
        """Moves to the step after the commit."""
        step, updated, kept = self.state.number, None, []
        self.means, self.acting = dict(response.means), response.acting if response.HasField("acting") else None
        self._training.tracked.note_commit()
        for unit in optimizer.units:
            if KEPT_GROUP in unit.group_indices:
                kept.append(unit.unit_index)
        if self.several_optimizers:
            updated = [unit.unit_index for unit in optimizer.units if _updates(unit)]
        try:
            self._units.invalidate(updated)
        finally:  # the step is committed, even if a parameter was written in place
            if response.HasField("residuals"):  # before the residuals of the next step replace them
                self._store.residuals.note_wanted(response.residuals)
            work = response.next_work
            finished = self.state.advance(work.step, work.items, work.position)
            self._store.start_step(finished, kept)
        self._units.passes.before_use = None
        self._units.passes.begin_step()  # after `start_step`: gathers read the version of the new step
        if self._buffers.by_name or not step:
            self._buffers.commit(response.state, step, self.state.number, has_work=bool(self.state.items))
        traffic = self._store.traffic
        gather_waits, traffic.gather_waits = traffic.gather_waits, []
        facts = self._committer.take_facts(response)
        if self.monitor.end_step(step, facts, self._training.sample(), gather_waits):
            self._training.report_to_coordinator()

    def _require_work(self, optimizer: common_pb2.OptimizerStep) -> None:
        """Raises UsageError if nothing was computed in the step of a plain loop."""
        state = self.state
        if not state.items or self._units.used:
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
        return self.several_optimizers and any(
            self._store.gradients.may_keep(unit.unit_index) and _updates(unit) for unit in optimizer.units
        )

    def _finish_plain_loop(self, current: WorkItemState | None) -> None:
        """Finishes the trainer's item in a plain loop, which has no end of its own, and waits for other trainers."""
        state = self.state
        if state.asynchronous and not state.in_batches:
            raise UsageError(
                "this run commits each work item by itself, so that a trainer may have to wait before its next item: "
                "run the forward and the backward inside `for batch in step.batches(...)`"
            )
        if current is not None:
            self.items.end_item()
        # When all work of the step is finished, another trainer has finished the items that are over.
        unfinished = {rank: item for rank, item in state.items.items() if not item.is_finished}
        if missing := [rank for rank, item in unfinished.items() if not (state.work_finished and item.is_over)]:
            raise UsageError(
                f"step {state.number}: the work of logical rank {', '.join(map(str, missing))} was not computed: "
                "run `for batch in step.batches(...)` to its end before optimizer.step()"
            )
        if not state.work_finished:
            self.items.finish_work(accept_work=False)

    def _finish_empty_work(self) -> None:
        """Finishes the step's items without computing them: the step uses gradients of earlier steps only.

        Items of lost trainers are empty for the same reason.
        """
        while not self.state.work_finished and self.state.items:
            for item in self.state.unfinished:
                self.state.current = item
                self.items.end_item()
            self.items.finish_work(accept_work=True)


def _updates(unit: common_pb2.UnitGroups) -> bool:
    """True if the optimizer updates a parameter of the unit."""
    return max(unit.group_indices, default=NO_GROUP) >= 0
