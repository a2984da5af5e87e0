"""A trainer's work items: each is started, computed and finished, and finished items are reported.

Note: [SIGTERM]
    Schedulers announce by SIGTERM that they take the machine away. The trainer leaves the run and exits with code 143
    within seconds. A work item that is nearly finished is finished and reported first, so that no other trainer has to
    compute it. Any other item is handed back. The handler is installed only if the script has none, because the process
    then would end without leaving.

Note: [Work without effect]
    A loop body reads names that its loop over ``step.batches`` sets. A trainer with a rank therefore gets a batch in
    each iteration, and computes its work once more if this is done already. This happens if the run was interrupted
    between ``optimizer.step()`` and the end of the loop body: the tracked objects at the end are not known, so the next
    process repeats the iteration. It also happens if another trainer has computed the work while this one was away.

    Such work is an attempt that is over: it reads the newest weights, its gradients are dropped, and buffers are
    restored. Data and seed are those of the step. In a repeated iteration, ``optimizer.step()`` restores the tracked
    objects, which the loop body may have changed before, and returns the commit that was recorded.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType

from shardwell.step.step_state import ItemState, WorkItemState
from shardwell.training.batch_fingerprint import fingerprint
from shardwell.training.rejoining import Iteration, Rejoining
from shardwell.training.training import Training
from shardwell_wire.errors import StaleEpochError, StepRestartedError, UsageError, VersionGoneError
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM

_NO_ATTEMPT = 2**32 - 1
"""Attempt of an item without effect, which the trainers of a replica must not mix with others."""

_NEARLY_DONE_S = 2.0
"""An item is finished first if at most this many seconds of its computation are left, by the time of the last item."""


class WorkItems:
    """Computes the work items of the step in flight that are leased to this trainer.

    Args:
        training: The model in training.
        rejoining: Joins the run again if the membership has lapsed.
        iteration: The iteration of the training loop.
    """

    def __init__(self, training: Training, rejoining: Rejoining, iteration: Iteration) -> None:
        self._training, self._rejoining, self._iteration = training, rejoining, iteration
        self._state, self._membership, self._store = training.state, training.membership, training.store
        self._units, self._buffers, self._committer = training.units, training.buffers, training.committer
        self.keeps_graphs = False
        """Whether graphs stay usable after an item of a plain loop, because several optimizers use them in turn."""
        self.attention_calls = 0
        """Calls of attention over whole sequences in this item. See ``ContextParallel``."""
        self.is_last = False
        """True if the process ends when the current item is finished and reported. See Note: [SIGTERM]."""
        self._item_started_s: float | None = None
        self._item_s: float | None = None
        """Seconds that the last item of ``step.batches`` took."""

    def start_batches(self) -> None:
        """Called when ``step.batches`` starts to yield the step's items.

        Raises:
            UsageError: A gradient was computed before, which belongs to no item.
            ReplicaLostError: Another trainer of the replica was lost.
        """
        self._training.replica.require_valid()
        if not self._state.in_batches and self._units.have_gradients:
            raise UsageError(
                f"a backward ran in step {self._state.number} before `for batch in step.batches(...)`: its gradient "
                "belongs to no batch, and no other trainer could recompute it. Run the backward inside that loop, or "
                "call optimizer.zero_grad() to drop the gradient"
            )
        if any(item.is_finished for item in self._state.items.values()):
            self._buffers.abandon_item()  # an iteration that has lost its effect has undone them
        self._state.in_batches = True
        self._training.monitor.begin_work(self._store.traffic.gather_wait_s)

    def without_effect(self, number: int) -> Iterator[WorkItemState]:
        """Yields items of this trainer's ranks for an iteration of the loop. See Note: [Work without effect]."""
        joined, positions = self._membership.joined, self._state.data_positions
        for at in (assignment.coordinates for assignment in self._membership.rank_assignments):
            item = coordinator_pb2.WorkItem(global_rank=at.global_rank, dp_rank=at.dp_rank, attempt=_NO_ATTEMPT)
            item.number, item.replica_epoch = number, joined.replica_epoch
            item.data_position = positions.get(at.dp_rank) or joined.state.data_positions[at.dp_rank]
            state = WorkItemState(item)
            state.abandon(state.key)
            yield state

    def start_item(self, item: WorkItemState) -> bool:
        """Starts a work item without gradients of an earlier attempt; returns False if its step is committed."""
        self._state.start_item(item)
        self._item_started_s = None if item.is_over else time.monotonic()
        item.scalars.clear()
        item.data_position = ""
        self.attention_calls = 0
        self._units.zero_grad()
        if item.is_over:
            return True
        try:
            self._buffers.start_item(self._state.number, item)
        except VersionGoneError:  # the step was committed with the work of another trainer
            item.abandon(item.key)
            self._state.current = None
            return False
        item.written = self._buffers.written()
        if self._store.gradients.may_have_twins:
            self._membership.start_item(self._state.number, item.item.global_rank)
        return True

    def agree_on_item(self, item: WorkItemState, batch: object) -> None:
        """Checks that all trainers of the replica start this item, the tensor-parallel ranks with the same batch.

        Raises:
            ReplicaLostError: They start different items, or one of them was lost.
            UsageError: Tensor-parallel ranks have different batches.
        """
        replica = self._training.replica
        replica.require_same_item(item.item, fingerprint(batch) if replica.has_tensor_ranks else 0)

    def _require_attention(self) -> None:
        """Raises UsageError if attention saw parts of sequences only."""
        world = self._membership.world
        if world.cp > 1 and not self.attention_calls and self._units.have_gradients:
            raise UsageError(
                f"{world} has context parallelism, but this work item called no attention over whole sequences: "
                "compute forward and backward in `with context:` of a shardwell.parallel.ContextParallel, and let "
                "every stage of the model call torch.nn.functional.scaled_dot_product_attention (for models of "
                "Hugging Face: attn_implementation='sdpa')"
            )
        self.attention_calls = 0

    def stop_item(self) -> None:
        """Called when the loop over ``step.batches`` ends early or raises: this trainer computes no item."""
        self._membership.end_item()

    def end_item(self) -> None:
        """Ends the current item: sends its remaining gradients and, for rank 0, its buffers.

        Drops them if the item's attempt is over.

        Raises:
            ReplicaLostError: Another trainer of the replica was lost, and this trainer's results are undefined.
        """
        current = self._state.current
        self._training.replica.require_results()
        self._require_attention()
        if current is not None and self._state.in_batches and (current.is_over or self._membership.lapsed):
            self.drop_current()
            self._restart_spoiled()
            self._end_time()
            return
        self._units.finish_item(keeps_graphs=self.keeps_graphs and not self._state.in_batches)
        if current is not None:
            self._store.gradients.push_drops(current)
            self._buffers.end_item(self._state.number, current)
        self._state.finish_item()
        self._end_time()

    def drop_current(self) -> None:
        """Drops the results of the current item."""
        self._units.zero_grad()
        self._store.gradients.abandon_sums()
        self._buffers.abandon_item()
        self._state.current = None

    def _restart_spoiled(self) -> bool:
        """Starts another attempt of the items that cannot be finished; returns whether there are any."""
        spoiled = [item for item in self._state.items.values() if item.is_spoiled and not self._membership.lapsed]
        for item in spoiled:
            try:
                self._store.gradients.restart(item)
            except (StaleEpochError, VersionGoneError):
                item.give_up()
            else:
                item.reopen()
        return bool(spoiled)

    def _end_time(self) -> None:
        """Measures the item that has ended. Stops the process if it should end with the item."""
        started, self._item_started_s = self._item_started_s, None
        if started is not None:
            self._item_s = time.monotonic() - started
        if self.is_last:
            self.is_last = False
            self._store.gradients.drain()
            counted = [item for item in self._state.items.values() if item.state is ItemState.FINISHED]
            self._committer.report_finished(self._state.number, [item.to_proto() for item in counted])
            raise SystemExit(EXIT_CODE)

    def remaining_s(self) -> float | None:
        """Returns the estimated time until the current item ends. None: unknown, or no item is being computed."""
        started, item_s = self._item_started_s, self._item_s
        return None if started is None or item_s is None else max(0.0, started + item_s - time.monotonic())

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
            if todo := [item for item in self._state.unfinished if not item.is_over]:
                return todo  # this trainer has joined again, or it has restarted items itself
            try:
                self._store.gradients.drain()
                self._membership.end_item()  # not before: an item is late too if its pushes take long
                if self._restart_spoiled():
                    continue
                response = self._report(accept_work=accept_work, accept_twins=self._accepts_twins)
            except StaleEpochError:
                if not self._membership.lapsed:
                    raise
                continue
            if response.all_finished:
                self._state.work_finished = True
            elif self._state.asynchronous and not response.work.items:
                self._state.restart(response.work.step, [], response.work.position)
                self._iteration.voided = True  # there is no work item for the rest of it
                return []
            elif self._state.asynchronous and response.work.step != self._state.number:
                return self._start(response.work)
            elif work := self._take(response.work.items):
                return work
        return []

    def _report(self, *, accept_work: bool, accept_twins: bool) -> coordinator_pb2.FinishWorkResponse:
        # The pushes of an item that is over were dropped. A plain loop reports it to learn the next attempt.
        finished = [
            item.to_proto()
            for item in self._state.items.values()
            if item.is_finished and not (item.is_over and self._state.in_batches)
        ]
        return self._committer.finish_work(
            self._state.number,
            finished,
            accept_work=accept_work,
            accept_twins=accept_twins,
            item_limit=self._state.item_limit,
        )

    def report_again(self, error: StepRestartedError) -> None:
        """Reports finished work to a coordinator that has restarted since. The refused rpc can then be repeated.

        Args:
            error: Why the coordinator refused an rpc about the finished work.

        Raises:
            StepRestartedError: ``error``, if work of the step was restarted.
        """
        if "ranks" not in error.data or self._membership.lapsed:
            raise error  # the coordinator knows the reports
        # Work that the answer grants instead stays leased to this trainer, and ``finish_work`` gets it again.
        if not self._report(accept_work=self._state.in_batches, accept_twins=False).all_finished:
            raise error

    def _start(self, work: coordinator_pb2.StepWork) -> list[WorkItemState]:
        """Starts the item of an asynchronous run that this trainer has waited for, or has to compute again.

        It reads a later version.
        """
        for item in self._state.items.values():
            self._store.gradients.forget_pushes(item)
        self._state.restart(work.step, work.items, work.position)
        self._state.in_batches = True
        self._units.invalidate()
        self._units.passes.begin_step()
        return self._state.unfinished

    @property
    def _accepts_twins(self) -> bool:
        """True if this trainer may compute the twin of an item that is late, and none has failed in this step."""
        failed = any(item.is_twin and item.is_over for item in self._state.items.values())
        return self._state.in_batches and self._store.gradients.can_compute_twins and not failed

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
        self._store.gradients.forget_pushes(state)
        self._state.repeat_item(state, item)


class Preemption:
    """Handles SIGTERM for the open sessions of this process. See Note: [SIGTERM]."""

    def __init__(self) -> None:
        self._sessions: list[WorkItems] = []
        self._stopping = False
        self._timer: threading.Timer | None = None

    def add(self, items: WorkItems) -> None:
        """Handles SIGTERM from now on, unless the script does or this is not the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._sessions:
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                return
            signal.signal(signal.SIGTERM, self._terminate)
        self._sessions.append(items)

    def remove(self, items: WorkItems) -> None:
        """Stops to handle SIGTERM after the last session."""
        if items not in self._sessions:
            return
        self._sessions.remove(items)
        if not self._sessions and threading.current_thread() is threading.main_thread():
            self._restore()

    def forget(self) -> None:
        """Called in a forked process, which has no session: SIGTERM ends it as usual."""
        if self._sessions:
            self._sessions.clear()
            self._restore()

    def _restore(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stopping = False
        if signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _terminate(self, number: int, _: FrameType | None) -> None:
        remaining = [left for items in self._sessions if (left := items.remaining_s()) is not None]
        if self._stopping or not remaining or max(remaining) > _NEARLY_DONE_S:
            logger.warning("SIGTERM: this trainer leaves the run; other trainers continue its work")
            raise SystemExit(EXIT_CODE)
        logger.warning("SIGTERM: this trainer leaves the run when its work item is finished")
        self._stopping = True
        for items in self._sessions:
            items.is_last = True
        # The estimate may be wrong.
        self._timer = threading.Timer(2 * _NEARLY_DONE_S, os.kill, (os.getpid(), number))
        self._timer.daemon = True
        self._timer.start()


preemption = Preemption()
"""Signal handlers belong to the process, and so does this object."""
