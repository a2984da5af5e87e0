"""The step in flight, on one trainer: from the first work item begun to the commit."""

from __future__ import annotations

from shardwell.module.units import Units
from shardwell.session.progress import ItemProgress, StepProgress
from shardwell.session.run_state import RunBuffers, TrackedObjects
from shardwell.session.run_store import RunStore
from shardwell.session.step_end import SliceUpdate, StepEnd
from shardwell_wire.errors import UsageError
from shardwell_wire.v1 import common_pb2, coordinator_pb2


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
        self._committed_last = False
        """Whether nothing happened since the last commit."""

    @property
    def wait_s(self) -> dict[str, float]:
        """Seconds that the training thread waited for other trainers' work and for commits."""
        return self._step_end.stats

    def enter(self) -> None:
        """A loop comes to the step."""
        self._committed_last = False

    def begin_item(self, item: ItemProgress) -> None:
        """The work item that gradients belong to from now on; nothing of an earlier try remains."""
        self._committed_last = False
        self.progress.begin(item)
        self._units.zero_grad()
        self._buffers.begin_item()

    def zero_grad(self) -> None:
        """Drops the current item's gradients, or, between items, those of all that are finished."""
        self._committed_last = False
        self._units.zero_grad()
        if self.progress.current is None:
            self._store.discard()

    def end_item(self) -> None:
        """The current item is computed: sends what is left of its gradients."""
        current = self.progress.current
        self._units.finish_item()
        if current is not None and current.item.global_rank == 0:
            self._buffers.end_item()
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

    def grad_norm(self, step: int, norm_type: float) -> float:
        """Global norm of a step's mean gradient, before any clipping; finishes the work first if it is in flight."""
        if step == self.progress.number:
            self._finish_loose_work()
        return self._step_end.grad_norm(step, norm_type)

    def commit(
        self,
        step: int,
        optimizer: common_pb2.OptimizerStep,
        clip_coefficient: float,
        update_slices: SliceUpdate | None = None,
    ) -> bool:
        """Hands in the step's hyper-parameters; returns when the step is committed.

        ``update_slices`` is needed if the optimizer runs on the trainers: it stages the slices that the coordinator
        gives this one and returns those that are staged.

        Returns:
            Whether the parameters were updated, the same on every trainer. False: a gradient was not finite, and
            ``optimizer.skip_non_finite`` said to commit without any then.

        Raises:
            UsageError: Nothing happened since the last commit.
            HyperparameterMismatchError: Another rank handed in different ones.
            NonFiniteError: A gradient is not finite; nothing changed. ``zero_grad`` on every trainer and
                committing again skips the step.
            DeadlineError: Others did not finish in time.
        """
        self._refuse_second_commit()
        replayed = step < self.progress.number
        if not replayed:
            self._finish_loose_work()
        response = self._step_end.commit(
            step,
            optimizer,
            clip_coefficient,
            unit_order=self._units.forward_order(),
            state=coordinator_pb2.RunState(
                step=step, tracked_json=self._tracked.to_json(), buffers=self._buffers.to_proto()
            ),
            update_slices=update_slices,
        )
        self._committed_last = True
        if not replayed:
            try:
                self._units.invalidate()
            finally:  # it may complain of a write, but the step is committed all the same
                self._buffers.committed(response.state.buffers)
                self.progress = StepProgress(response.next_work.step, response.next_work.items)
                self._store.advance(self.progress)
            self._units.begin_step()
        return not response.skipped

    def _refuse_second_commit(self) -> None:
        if self._committed_last and not self._units.used:
            raise UsageError(
                f"optimizer.step() was called again right after step {self.progress.number - 1} was committed: one "
                "call commits the gradients of all parameters. For several optimizers use "
                "shardwell.optim.Combined([...]); to commit a step without gradients call optimizer.zero_grad() before"
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
