"""Joins the run again when a trainer's membership has lapsed, and makes the trainer ready for the run's step."""

from __future__ import annotations

from shardwell.module.units import Units
from shardwell.session.iteration import Iteration
from shardwell.session.membership import Membership
from shardwell.session.run_buffers import RunBuffers
from shardwell.session.run_store import RunStore
from shardwell.session.step_state import StepState
from shardwell_wire.errors import ConflictError, StepRestartedError


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
        self._rollbacks = 0
        """How often the run was rolled back before this trainer joined last."""

    def join_again(self) -> bool:
        """Joins the run again if this trainer's membership has lapsed.

        Returns:
            False if the loop's iteration has lost its effect, because the run is at another step.

        Raises:
            StepRestartedError: In a plain loop, the gradients of the step are lost.
            ConflictError: The trainer has another place on the tensor or pipeline axis now.
        """
        if not self._membership.lapsed:
            return True
        before, in_batches = self._state.number, self._state.in_batches
        computed = self._units.have_gradients
        self._store.reach_servers()
        joined = self._membership.rejoin()
        self._check_place()
        moved = joined.committed_step != before or joined.rollback_count != self._rollbacks
        self._rollbacks = joined.rollback_count
        self._state.restart(joined.committed_step, joined.work.items)
        self._store.rejoin(joined, moved=moved)
        self._units.zero_grad()
        try:
            self._units.invalidate()
        finally:
            self._buffers.rejoin(joined.state if moved else None, self._state.number, has_work=bool(self._state.items))
        self._units.begin_step()
        if moved and self._iteration.running:
            self._iteration.move(joined)
            self._iteration.void(before, f"this trainer has joined the run again at step {self._state.number}")
            return False
        if in_batches:
            self._state.start_batches()
        elif computed:
            raise self.plain_loop_error()
        return True

    def _check_place(self) -> None:
        """Raises ConflictError if this trainer's model belongs to other ranks than those that it has got now."""
        place = self._units.place
        for assignment in self._membership.rank_assignments:
            at = assignment.coordinates
            if (at.tp_rank, at.pp_rank) != (place.tp_rank, place.pp_rank):
                raise ConflictError(
                    f"this trainer has joined the run again as tp rank {at.tp_rank} and pp rank {at.pp_rank}, but its "
                    f"model is that of tp rank {place.tp_rank} and pp rank {place.pp_rank}: start the process again, "
                    "so that it builds the model for its new place"
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
