"""Joins the run again when a trainer's membership has lapsed, and makes the trainer ready for the run's step."""

from __future__ import annotations

from shardwell.module.units import Units
from shardwell.session.iteration import Iteration
from shardwell.session.membership import Membership
from shardwell.session.replica_epoch import START_AGAIN
from shardwell.session.run_buffers import RunBuffers
from shardwell.session.run_store import RunStore
from shardwell.session.step_state import StepState
from shardwell_wire.errors import ReplicaLostError, StepRestartedError


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
