"""The current iteration of a loop over ``session.steps``, and how the loop goes on if the iteration loses its effect.

Note: [Void iterations]
    A shard server or this trainer may be lost after ``step.batches`` has ended, when the gradients can no longer be
    computed again in place. The iteration is then *void*: ``clip_grad_norm_`` and ``optimizer.step()`` return at once
    and commit nothing, and the rest of the loop body runs as usual. ``session.steps`` then yields the step again, with
    the tracked objects in the state that they had when the iteration began. If this trainer has joined the run again
    meanwhile and the run is at another step, the loop goes on at that step instead, as after ``shardwell.join``.

What a trainer does on SIGTERM, by which schedulers announce that they take the machine away.

Note: [SIGTERM]
    The trainer leaves the run and exits with code 143 within seconds. A work item that is nearly finished is finished
    and reported first, so that no other trainer has to compute it. Any other item is handed back. The handler is
    installed only if the script has none, because the process then would end without leaving.

Joins the run again when a trainer's membership has lapsed, and makes the trainer ready for the run's step.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from shardwell.membership.admission import START_AGAIN
from shardwell.membership.membership import Membership
from shardwell.module.units import Units
from shardwell.step.step_state import StepState
from shardwell.store.buffers import RunBuffers
from shardwell.store.run_store import RunStore
from shardwell.training.tracked_objects import TrackedObjects
from shardwell_wire.errors import ReplicaLostError, StepRestartedError
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


_NEARLY_DONE_S = 2.0
"""An item is finished first if at most this many seconds of its computation are left, by the time of the last item."""

_EXIT_CODE = 128 + signal.SIGTERM


class Computes(Protocol):
    """Computes work items."""

    def remaining_s(self) -> float | None:
        """Returns the estimated time until the current item ends. None: unknown, or no item is being computed."""
        ...

    def stop_after_item(self, stop: Callable[[], None]) -> None:
        """Has ``stop`` called when the current item is finished and reported."""
        ...


class Preemption:
    """Handles SIGTERM for the open sessions of this process. See Note: [SIGTERM]."""

    def __init__(self) -> None:
        self._trainers: list[Computes] = []
        self._stopping = False
        self._timer: threading.Timer | None = None

    def add(self, trainer: Computes) -> None:
        """Handles SIGTERM from now on, unless the script does or this is not the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._trainers:
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                return
            signal.signal(signal.SIGTERM, self._terminate)
        self._trainers.append(trainer)

    def remove(self, trainer: Computes) -> None:
        """Stops to handle SIGTERM after the last session."""
        if trainer not in self._trainers:
            return
        self._trainers.remove(trainer)
        if not self._trainers and threading.current_thread() is threading.main_thread():
            self._restore()

    def forget(self) -> None:
        """Called in a forked process, which has no session: SIGTERM ends it as usual."""
        if self._trainers:
            self._trainers.clear()
            self._restore()

    def _restore(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stopping = False
        if signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _terminate(self, number: int, _: FrameType | None) -> None:
        remaining = [left for trainer in self._trainers if (left := trainer.remaining_s()) is not None]
        if self._stopping or not remaining or max(remaining) > _NEARLY_DONE_S:
            logger.warning("SIGTERM: this trainer leaves the run; other trainers continue its work")
            raise SystemExit(_EXIT_CODE)
        logger.warning("SIGTERM: this trainer leaves the run when its work item is finished")
        self._stopping = True
        for trainer in self._trainers:
            trainer.stop_after_item(_exit)
        # The estimate may be wrong.
        self._timer = threading.Timer(2 * _NEARLY_DONE_S, os.kill, (os.getpid(), number))
        self._timer.daemon = True
        self._timer.start()


def _exit() -> None:
    raise SystemExit(_EXIT_CODE)


preemption = Preemption()
"""Signal handlers belong to the process, and so does this object."""


class Rejoining:
    """Starts another membership of a trainer, with everything that depends on the membership.

    Args:
        state: State of the step.
        membership: The membership of this trainer.
        store: Sends gradients.
        units: The sharded units.
        buffers: The run's buffers.
        iteration: The iteration of the training loop.
    """

    def __init__(
        self,
        state: StepState,
        membership: Membership,
        store: RunStore,
        units: Units,
        buffers: RunBuffers,
        iteration: Iteration,
    ) -> None:
        self._state, self._membership, self._store = state, membership, store
        self._units, self._buffers, self._iteration = units, buffers, iteration
        self._rollbacks = membership.joined.rollback_count
        """How often the run was rolled back before this trainer joined last."""
        store.join_again = self.join_again

    def join_again(self) -> bool:
        """Joins the run again if this trainer's membership has lapsed.

        Returns:
            False if the loop's iteration has lost its effect, because the run is at another step.

        Raises:
            StepRestartedError: In a plain loop, the gradients of the step are lost.
            ReplicaLostError: The trainer has another place on the tensor or pipeline axis now.
        """
        if not self._membership.lapsed:
            return True
        before, in_batches = self._state.number, self._state.in_batches
        computed = self._units.have_gradients
        if not self._membership.token_expired:
            self._store.reach_servers()
        joined = self._membership.rejoin()
        moved = self._take_over_step()
        if moved and self._iteration.running:
            self._iteration.move(joined)
            self._iteration.void(before, f"this trainer has joined the run again at step {self._state.number}")
            return False
        if in_batches:
            self._state.start_batches()
        elif computed:
            raise self.plain_loop_error()
        return True

    def refresh(self) -> None:
        """Takes over the run's step and this trainer's work items. Called when the replica's group was formed.

        Both may have changed since this trainer joined: the replica's items start a new attempt whenever another of its
        trainers joins.

        Raises:
            StaleEpochError: The membership has lapsed.
            ReplicaLostError: The trainer has another place on the tensor or pipeline axis now.
        """
        joined, before = self._membership.refresh(), self._state.number
        present = {rank: state.key for rank, state in self._state.items.items()}
        leased = {item.global_rank: (item.epoch, item.attempt) for item in joined.work.items}
        if (joined.work.step, leased) == (before, present):
            return
        if not self._take_over_step():
            return
        if self._iteration.running:
            self._iteration.move(joined)
            self._iteration.void(before, f"the run is at step {self._state.number}")
        else:
            self._iteration.restart(joined)

    def end_iteration(self) -> None:
        """Makes the rest of the loop's iteration have no effect, because this trainer has no more items to compute."""
        self._iteration.end_early()

    def start_over(self, group_epoch: int) -> None:
        """Ends the use of the model, and takes over the run's step for another one.

        Joins the run again, unless this trainer has done so since the replica's process group was formed. This gives
        the replica a new epoch, and the trainers of its former group notice that the group is void.

        Args:
            group_epoch: Epoch of the replica whose process group was formed last.

        Raises as ``Membership.rejoin`` and ``refresh``.
        """
        self._units.close()
        self._membership.end_item()
        if self._membership.lapsed or self._membership.epoch < group_epoch:
            self._store.reach_servers()
            self._membership.give_up("this trainer left its replica, which is formed again")
            self._membership.rejoin()
        else:
            self._membership.refresh()
        self._restart_step()
        self._store.forget_units()

    def _take_over_step(self) -> bool:
        """Makes the model ready for the run's step. Returns True if the run is at another step or was rolled back."""
        self._check_place()
        moved, state = self._restart_step(), self._membership.joined.state
        self._units.zero_grad()
        try:
            self._units.invalidate()
        finally:
            self._buffers.rejoin(state if moved else None, self._state.number, has_work=bool(self._state.items))
        self._units.begin_step()
        return moved

    def _restart_step(self) -> bool:
        """Starts the run's step with this trainer's work items. Returns as ``_take_over_step``."""
        joined = self._membership.joined
        moved = joined.work.step != self._state.number or joined.rollback_count != self._rollbacks
        self._rollbacks = joined.rollback_count
        self._state.restart(joined.work.step, joined.work.items, joined.work.position)
        self._store.rejoin(joined, moved=moved)
        return moved

    def _check_place(self) -> None:
        """Raises ReplicaLostError if this trainer's model belongs to other ranks than those that it has got now."""
        place = self._units.place
        for assignment in self._membership.rank_assignments:
            at = assignment.coordinates
            if (at.tp_rank, at.pp_rank) != (place.tp_rank, place.pp_rank):
                raise ReplicaLostError(
                    f"this trainer has joined the run again as tp rank {at.tp_rank} and pp rank {at.pp_rank}, but its "
                    f"model is that of tp rank {place.tp_rank} and pp rank {place.pp_rank}: {START_AGAIN}"
                )

    def plain_loop_error(self) -> StepRestartedError:
        """Returns the error for a loop that computes its own batches, after the step was made ready for them."""
        self._units.zero_grad()
        self._buffers.restore()
        return StepRestartedError(
            f"the gradients of step {self._state.number} are lost, because a shard server was lost or this trainer "
            "lost its place in the run: run the forward and the backward of the step again, then optimizer.step(). A "
            "loop `for batch in step.batches(...)` does this by itself",
            step=self._state.number,
        )
