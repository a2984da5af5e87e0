"""The step in flight, on one trainer: from the first work item begun to the commit."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from shardwell.module.units import Units
from shardwell.session.progress import ItemProgress, StepProgress
from shardwell.session.run_buffers import RunBuffers
from shardwell.session.run_state import TrackedObjects
from shardwell.session.run_store import RunStore
from shardwell.session.step_end import GradNorm, StepEnd, StepUpdate
from shardwell_wire.errors import DeadlineError, UnavailableError, UsageError, VersionGoneError
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)

UNUSED, KEPT = -1, -2
"""Instead of the group of a parameter that a step does not optimise: its gradient is dropped, or kept for later."""


class StepInFlight:
    """Takes a trainer's units, gradients, buffers and tracked objects through one step after another.

    Attributes:
        progress: How far its work items of the step are.

    Args:
        end: Asks the coordinator.
        store: Takes the gradients.
        units: The sharded units.
        buffers: Belong to the run.
        tracked: Belong to the run.
        progress: Of the step that comes first.
    """

    def __init__(
        self,
        end: StepEnd,
        store: RunStore,
        units: Units,
        buffers: RunBuffers,
        tracked: TrackedObjects,
        progress: StepProgress,
    ) -> None:
        self._step_end, self._store, self._units = end, store, units
        self._buffers, self._tracked = buffers, tracked
        self.progress = progress
        self.takes_turns = False
        """Whether several optimizers of the session take turns: a commit then leaves graphs of other units usable."""
        self._dropped = False
        """Whether ``zero_grad`` was called since the step began: a commit without gradients is intended."""
        self._interrupted: StepUpdate | None = None
        """What the ``optimizer.step()`` asked for that was called last and did not come to its end."""
        units.passes.before_use = self.settle

    @property
    def wait_s(self) -> dict[str, float]:
        """Seconds that the training thread waited for other trainers' work and for commits."""
        return self._step_end.stats

    def enter(self) -> None:
        """Called when a loop over ``session.steps`` begins the step."""
        self._dropped = False

    def begin_batches(self) -> None:
        """``step.batches`` hands out the step's items from now on.

        Raises:
            UsageError: There is a gradient already, which belongs to none of them.
        """
        if not self.progress.in_batches and self._units.have_gradients:
            raise UsageError(
                f"a backward ran in step {self.progress.number} before `for batch in step.batches(...)`: its gradient "
                "belongs to no batch, so no other trainer could compute it anew. Run it inside that loop, or call "
                "optimizer.zero_grad() to drop it"
            )
        self.progress.in_batches = True

    def begin_item(self, item: ItemProgress) -> None:
        """The work item that gradients belong to from now on; nothing of an earlier try remains."""
        self.progress.begin(item)
        self._units.zero_grad()
        self._buffers.begin_item(self.progress.number, item)
        item.written = self._buffers.written()

    def zero_grad(self) -> None:
        """Drops the gradients of the current item. Between items it drops those of all items that are finished.

        In a plain loop a finished item is then computed anew: the step goes on with the next batch.
        """
        self._dropped = True
        self._units.zero_grad()
        if self.progress.current is None:
            self._begin_anew()

    def zero_grad_of(self, parameters: Mapping[int, Collection[int]]) -> None:
        """Drops the gradients of one optimizer's parameters, of this step and of earlier ones; others' stay.

        Args:
            parameters: Indices of parameters by unit index.
        """
        self._dropped = True
        self._units.drop_gradients(parameters)
        for unit_index, indices in parameters.items():
            self._store.drop(unit_index, indices)
        if self.progress.current is None and self.progress.dropped_late and self.progress.all_dropped:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Drops the gradients of all finished items; in a plain loop the items are then computed anew."""
        try:
            self._store.discard(empty_too=not self.progress.in_batches)
        except VersionGoneError:
            if self._interrupted is None:
                raise
            self.settle()  # the interrupted optimizer.step() had committed it
        else:
            self._interrupted = None
            self.progress.reopen()
            for item in self.progress.items.values():
                if item.finished:  # only its gradients are dropped
                    self._buffers.push_again(self.progress.number, item)

    def end_item(self) -> None:
        """The current item is computed: sends what is left of its gradients."""
        current = self.progress.current
        self._units.finish_item(keeps_graphs=self.takes_turns and not self.progress.in_batches)
        if current is not None:
            if current.to_drop:
                self._store.push_drops()
            self._buffers.end_item(self.progress.number, current)
        self.progress.end()

    def finish_work(self, *, accept_work: bool) -> list[ItemProgress]:
        """Reports finished items and waits for the other trainers' ones.

        Returns:
            A lost trainer's work items, now this one's; empty when all of the step are finished.
        """
        self._store.drain()
        response = self._step_end.finish_work(
            self.progress.number, self.progress.items.values(), accept_work=accept_work
        )
        self.progress.is_complete = response.all_finished
        return [] if response.all_finished else self.progress.add(response.work.items)

    def grad_norm(self, step: int, norm_type: float, unit_indices: Sequence[int] = ()) -> GradNorm:
        """Global norm of a step's mean gradient, before any clipping; finishes the work first if it is in flight.

        Args:
            step: Number of the step.
            norm_type: The norm's p.
            unit_indices: Units whose gradients count; empty: all.
        """
        if step == self.progress.number:
            self._finish_loose_work()
        return self._step_end.grad_norm(step, norm_type, unit_indices)

    def commit(self, step: int, update: StepUpdate) -> bool:
        """Sends what an optimizer asks for; returns when the step is committed.

        Returns:
            Whether the parameters were updated, the same on every trainer. False: a gradient was not finite, and
            ``skip_non_finite`` said to commit without any then.

        Raises:
            UsageError: This trainer has computed nothing for the step.
            HyperparameterMismatchError: Another rank sent different ones.
            NonFiniteError: A gradient is not finite; nothing changed. ``zero_grad`` on every trainer and
                committing again skips the step.
            DeadlineError: Others did not finish in time.
        """
        self._step_end.check()
        if step < self.progress.number:
            response = self._ask_commit(step, update)
            self._buffers.restore()
            return not response.skipped
        if self._interrupted is None:
            self._require_work(update.optimizer)
        self._interrupted = update
        try:
            if self.progress.current is None:
                self._buffers.check_untouched(step)
            if not self.progress.in_batches and not self._units.used and self._uses_kept_gradients(update.optimizer):
                self._finish_empty_work()
            self._finish_loose_work()
            self._drop_late(update.optimizer)
            response = self._ask_commit(step, update)
        except (DeadlineError, UnavailableError):
            raise  # other trainers may have it committed meanwhile
        except Exception:
            self._interrupted = None
            raise
        self._advance(response, update.optimizer)
        self._interrupted = None
        return not response.skipped

    def settle(self) -> None:
        """Completes an ``optimizer.step()`` that an interrupt or a deadline ended, whether it was committed or not."""
        if self._interrupted is not None:
            logger.info("step %d: completing the optimizer.step() that was interrupted", self.progress.number)
            self.commit(self.progress.number, self._interrupted)

    def _ask_commit(self, step: int, update: StepUpdate) -> coordinator_pb2.CommitStepResponse:
        return self._step_end.commit(
            step,
            update,
            unit_order=self._units.forward_order(),
            state=coordinator_pb2.RunState(step=step, tracked_json=self._tracked.to_json()),
        )

    def _drop_late(self, optimizer: common_pb2.OptimizerStep) -> None:
        """Has the commit drop gradients that ``zero_grad`` was called for when the work was finished already."""
        if self.progress.dropped_late:
            for unit in optimizer.units:
                for index in self.progress.dropped_late.get(unit.unit_index, ()):
                    unit.group_indices[index] = UNUSED

    def _advance(self, response: coordinator_pb2.CommitStepResponse, optimizer: common_pb2.OptimizerStep) -> None:
        """The step is committed: the next one begins here."""
        step = self.progress.number
        kept = [unit.unit_index for unit in optimizer.units if KEPT in unit.group_indices]
        updated = [unit.unit_index for unit in optimizer.units if max(unit.group_indices, default=UNUSED) >= 0]
        try:
            self._units.invalidate(updated if self.takes_turns else None)
        finally:  # it may complain of a write, but the step is committed all the same
            self.progress = StepProgress(response.next_work.step, response.next_work.items)
            self._interrupted = None  # whatever fails from here on, the step must not be committed once more
            self._store.advance(self.progress, kept)
            self._dropped = False
        self._units.begin_step()
        has_work = bool(self.progress.items)
        self._buffers.committed(response.state, step, self.progress.number, has_work=has_work)

    def _require_work(self, optimizer: common_pb2.OptimizerStep) -> None:
        """Raises UsageError if nothing was computed for the step, and not by intent."""
        if self._units.used or self._dropped or self.progress.in_batches or not self.progress.items:
            return
        if self._uses_kept_gradients(optimizer):
            return
        number = self.progress.number
        raise UsageError(
            f"optimizer.step() was called in step {number}, but no forward has run on this trainer since "
            + (f"step {number - 1} was committed" if number else "the session was opened")
            + ", so there is no gradient. Run the model and loss.backward() before it. To commit a step without "
            "gradients call optimizer.zero_grad() right before optimizer.step()"
        )

    def _uses_kept_gradients(self, optimizer: common_pb2.OptimizerStep) -> bool:
        """Whether the servers may have gradients for the optimizer that earlier steps left."""
        return self.takes_turns and any(
            self._store.may_keep(unit.unit_index) and max(unit.group_indices, default=UNUSED) >= 0
            for unit in optimizer.units
        )

    def _finish_loose_work(self) -> None:
        """In a plain loop nothing has finished this trainer's item yet."""
        if self.progress.current is not None:
            self.end_item()
        if missing := self.progress.unfinished:
            ranks = ", ".join(str(progress.item.global_rank) for progress in missing)
            raise UsageError(
                f"step {self.progress.number}: the work of logical rank {ranks} was not computed: "
                "run `for batch in step.batches(...)` to its end before optimizer.step()"
            )
        if not self.progress.is_complete:
            self.finish_work(accept_work=False)

    def _finish_empty_work(self) -> None:
        """The loop computes nothing in this step: it uses gradients of earlier ones. So there is nothing to compute in
        the work of lost trainers either.
        """
        while not self.progress.is_complete and self.progress.items:
            for item in self.progress.unfinished:
                self.progress.enter(item)
                self.end_item()
            self.finish_work(accept_work=True)
