"""Joins the run again when a trainer's membership has lapsed, and makes the trainer ready for the run's step.

Note: [Void iterations]
    A shard server or this trainer may be lost after ``step.batches`` has ended, when the gradients can no longer be
    computed again in place. The iteration is then *void*: ``clip_grad_norm_`` and ``optimizer.step()`` return at once
    and commit nothing, and the rest of the loop body runs as usual. ``session.steps`` then yields the step again, with
    the tracked objects in the state that they had when the iteration began. If this trainer has joined the run again
    meanwhile and the run is at another step, the loop goes on at that step instead, as after ``shardwell.join``.
"""

from __future__ import annotations

import logging

from shardwell.membership.membership import START_AGAIN
from shardwell.training.training import TrackedObjects, Training, tracked_state
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

    def move(self, joined: coordinator_pb2.JoinResponse) -> None:
        """Records that this trainer has joined the run again and that the run is at another step."""
        self._joined = joined

    def restart(self, joined: coordinator_pb2.JoinResponse) -> None:
        """Restores the tracked objects outside of an iteration, because the run is at another step."""
        stored, is_complete = tracked_state(joined)
        self._tracked.replace(stored, is_complete=is_complete)

    def resume(self) -> bool:
        """Restores the tracked objects after a void iteration.

        Returns:
            True if the loop goes on at the run's step; False if it repeats the iteration.
        """
        joined, start = self._joined, self._start
        if joined is not None:
            self.restart(joined)
            return True
        assert start is not None
        self._tracked.restore(start)
        return False


class Rejoining:
    """Starts another membership of a trainer, with everything that depends on the membership.

    Args:
        training: The model in training.
        iteration: The iteration of the training loop.
    """

    def __init__(self, training: Training, iteration: Iteration) -> None:
        self._state, self._membership, self._store = training.state, training.membership, training.store
        self._units, self._buffers, self._iteration = training.units, training.buffers, iteration
        self._rollbacks = training.membership.joined.rollback_count
        """How often the run was rolled back before this trainer joined last."""
        training.store.join_again = self.join_again

    def join_again(self) -> bool:
        """Joins the run again if this trainer's membership has lapsed.

        Returns:
            False if the loop's iteration has lost its effect, because the run is at another step.

        Raises:
            StepRestartedError: In a plain loop, the gradients of the step are lost.
            ReplicaLostError: The trainer has another place in its replica now.
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
            self._state.in_batches = True
        elif computed:
            raise self.plain_loop_error()
        return True

    def refresh(self) -> None:
        """Takes over the run's step and this trainer's work items. Called when the replica's group was formed.

        Both may have changed since this trainer joined: the replica's items start a new attempt whenever another of its
        trainers joins.

        Raises:
            StaleEpochError: The membership has lapsed.
            ReplicaLostError: The trainer has another place in its replica now.
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
        self._units.passes.begin_step()
        return moved

    def _restart_step(self) -> bool:
        """Starts the run's step with this trainer's work items. Returns as ``_take_over_step``."""
        joined = self._membership.joined
        moved = joined.work.step != self._state.number or joined.rollback_count != self._rollbacks
        self._rollbacks = joined.rollback_count
        self._state.data_positions.clear()  # ``joined`` has them
        self._state.restart(joined.work.step, joined.work.items, joined.work.position)
        self._store.rejoin(joined, moved=moved)
        return moved

    def _check_place(self) -> None:
        """Raises ReplicaLostError if this trainer's model belongs to other ranks than those that it has got now."""
        place = self._units.place
        for assignment in self._membership.rank_assignments:
            at = assignment.coordinates
            if (at.cp_rank, at.tp_rank, at.pp_rank) != (place.cp_rank, place.tp_rank, place.pp_rank):
                raise ReplicaLostError(
                    f"this trainer has joined the run again as cp rank {at.cp_rank}, tp rank {at.tp_rank} and pp rank "
                    f"{at.pp_rank}, but its model is that of cp rank {place.cp_rank}, tp rank {place.tp_rank} and pp "
                    f"rank {place.pp_rank}: {START_AGAIN}"
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
