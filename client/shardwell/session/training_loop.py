"""The training loop of a session: which step an iteration has, and what ``optimizer.step()`` commits in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from shardwell.session.iteration import Iteration
from shardwell.session.membership import Membership
from shardwell.session.step import LoopPosition, Step
from shardwell.session.step_commit import StepUpdate
from shardwell.session.step_in_flight import StepInFlight
from shardwell.session.tracked_objects import TrackedObjects
from shardwell_wire.errors import UsageError

logger = logging.getLogger(__name__)


class TrainingLoop:
    """Yields the steps of a run, and commits them.

    Args:
        in_flight: The step in flight.
        iteration: The iteration of the loop.
        tracked: The run's tracked objects.
        membership: The membership of this trainer.
    """

    def __init__(
        self, in_flight: StepInFlight, iteration: Iteration, tracked: TrackedObjects, membership: Membership
    ) -> None:
        self._in_flight, self._iteration, self._tracked = in_flight, iteration, tracked
        self._membership = membership
        self._position: LoopPosition | None = None
        """Position of the loop over ``steps``. None: there is no such loop."""

    def steps(self, num_steps: int, optimizer_steps: int) -> Iterator[Step]:
        """Yields the steps from the committed one up to step ``num_steps``; see ``Session.steps``."""
        if optimizer_steps < 1:
            raise UsageError(f"steps(optimizer_steps={optimizer_steps!r}): expected at least 1")
        if self._committed >= num_steps * optimizer_steps:
            logger.warning(
                "run %r has committed %d steps, so steps(%d) has none left to train: ask for more steps, or start a "
                "new run under another name",
                self._membership.run,
                self._committed,
                num_steps,
            )
        if optimizer_steps > 1 and self._in_flight.state.asynchronous:
            raise UsageError(
                f"steps(optimizer_steps={optimizer_steps}) in a run that commits each work item by itself: call "
                "optimizer.step() once in the loop body"
            )
        number = self._first_iteration(optimizer_steps)
        loop: LoopPosition | None = None
        state = self._in_flight.state
        state.item_limit = num_steps if state.asynchronous else None
        try:
            while number < num_steps:
                loop = self._position = LoopPosition(number, optimizer_steps)
                self._in_flight.enter()
                yield Step(loop, self._in_flight, seed=self._membership.seed, dp=self._membership.world.dp)
                self._in_flight.leave()
                if self._iteration.voided:
                    number = self._first_iteration(optimizer_steps) if self._iteration.resume() else number
                else:
                    loop.require_end()
                    number += 1
                if state.asynchronous:
                    number = self._committed
        finally:
            if self._position is loop:  # another loop may have started
                self._position = None
                self._iteration.end()

    def _first_iteration(self, optimizer_steps: int) -> int:
        """Returns the iteration with which a loop starts. Restored objects need the end of the last committed step."""
        committed = self._committed
        return max(0, committed - 1 if self._tracked.restored else committed) // optimizer_steps

    @property
    def _committed(self) -> int:
        """Number of committed steps; in an asynchronous run, of committed work items of this trainer's rank."""
        return self._in_flight.state.position

    @property
    def step(self) -> int:
        """The step that ``optimizer.step()`` commits; a committed step while an iteration is repeated."""
        if self._position is None or self._in_flight.state.asynchronous:
            return self._committed
        return self._position.step

    def commit(self, update: StepUpdate) -> bool:
        """Commits the loop's step; returns whether parameters were updated. See ``StepInFlight.commit``."""
        position = self._position
        if position is not None and not self._iteration.voided:
            position.require_open()
        updated = self._in_flight.commit(self.step, update)
        if position is not None and not self._iteration.voided:
            position.record_commit()
        return updated

    @property
    def repeats_step(self) -> bool:
        """True if the rest of the iteration has no effect, because its step is computed again."""
        return self._iteration.voided
