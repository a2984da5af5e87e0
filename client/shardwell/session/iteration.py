"""The current iteration of a loop over ``session.steps``, and how the loop goes on if the iteration loses its effect.

Note: [Void iterations]
    A shard server or this trainer may be lost after ``step.batches`` has ended, when the gradients can no longer be
    computed again in place. The iteration is then *void*: ``clip_grad_norm_`` and ``optimizer.step()`` return at once
    and commit nothing, and the rest of the loop body runs as usual. ``session.steps`` then yields the step again, with
    the tracked objects in the state that they had when the iteration began. If this trainer has joined the run again
    meanwhile and the run is at another step, the loop goes on at that step instead, as after ``shardwell.join``.
"""

from __future__ import annotations

import logging

from shardwell.session.tracked_objects import TrackedObjects
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)


class Iteration:
    """One iteration of a training loop at a time. See Note: [Void iterations].

    Args:
        tracked: The run's tracked objects.
    """

    def __init__(self, tracked: TrackedObjects) -> None:
        self._tracked = tracked
        self._start: dict[str, str] | None = None
        self._joined: coordinator_pb2.JoinResponse | None = None
        self.voided = False
        """True if the rest of the iteration has no effect."""

    @property
    def running(self) -> bool:
        """True in a loop over ``session.steps``."""
        return self._start is not None

    def begin(self) -> None:
        """Called when an iteration starts."""
        self.voided, self._joined = False, None
        self._start = self._tracked.to_json()

    def end(self) -> None:
        """Called when the loop has ended."""
        self.voided, self._joined, self._start = False, None, None

    def void(self, step: int, reason: str) -> None:
        """Makes the rest of the iteration have no effect."""
        if not self.voided:
            logger.warning("step %d is computed again in another iteration of the loop: %s", step, reason)
        self.voided = True

    def end_early(self) -> None:
        """Makes the rest of the iteration have no effect, because there is no work item for it."""
        self.voided = True

    def move(self, joined: coordinator_pb2.JoinResponse) -> None:
        """Records that this trainer has joined the run again and that the run is at another step."""
        self._joined = joined

    def restart(self, joined: coordinator_pb2.JoinResponse) -> None:
        """Restores the tracked objects outside of an iteration, because the run is at another step."""
        self._tracked.replace(joined.state.tracked_json)

    def resume(self) -> bool:
        """Restores the tracked objects after a void iteration.

        Returns:
            True if the loop goes on at the run's step; False if it repeats the iteration.
        """
        joined, start = self._joined, self._start
        if joined is not None:
            self._tracked.replace(joined.state.tracked_json)
            return True
        assert start is not None
        self._tracked.restore(start)
        return False
