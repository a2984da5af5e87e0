"""A trainer's work items: each is started, computed and finished, and finished items are reported."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from shardwell.module.units import Units
from shardwell.monitor.step_times import StepMonitor
from shardwell.session.membership import Membership
from shardwell.session.rejoining import Rejoining
from shardwell.session.replica import ReplicaGroup
from shardwell.session.run_buffers import RunBuffers
from shardwell.session.run_store import RunStore
from shardwell.session.step_commit import StepCommitter
from shardwell.session.step_state import StepState, WorkItemState
from shardwell_wire.errors import StaleEpochError, StepRestartedError, UsageError, VersionGoneError
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class WorkItems:
    """Computes the work items of the step in flight that are leased to this trainer.

    Args:
        state: State of the step.
        membership: The membership of this trainer.
        committer: Reports finished items.
        store: Sends gradients.
        units: The sharded units.
        buffers: The run's buffers.
        rejoining: Joins the run again if the membership has lapsed.
        monitor: Measures the steps.
        replica: The replica's process group.
    """

    def __init__(
        self,
        state: StepState,
        membership: Membership,
        committer: StepCommitter,
        store: RunStore,
        units: Units,
        buffers: RunBuffers,
        rejoining: Rejoining,
        monitor: StepMonitor,
        replica: ReplicaGroup,
    ) -> None:
        self._state, self._membership, self._committer, self._store = state, membership, committer, store
        self._units, self._buffers, self._rejoining, self._monitor = units, buffers, rejoining, monitor
        self._replica = replica
        self.keeps_graphs = False
        """Whether graphs stay usable after an item of a plain loop, because several optimizers use them in turn."""
        self._item_started_s: float | None = None
        self._item_s: float | None = None
        """Seconds that the last item of ``step.batches`` took."""
        self._stop: Callable[[], None] | None = None
        """Called when the current item is finished and reported."""

    def start_batches(self) -> None:
        """Called when ``step.batches`` starts to yield the step's items.

        Raises:
            UsageError: A gradient was computed before, which belongs to no item.
            ReplicaLostError: Another trainer of the replica was lost.
        """
        self._replica.require_valid()
        if not self._state.in_batches and self._units.have_gradients:
            raise UsageError(
                f"a backward ran in step {self._state.number} before `for batch in step.batches(...)`: its gradient "
                "belongs to no batch, and no other trainer could recompute it. Run the backward inside that loop, or "
                "call optimizer.zero_grad() to drop the gradient"
            )
        self._state.start_batches()
        self._monitor.begin_work()

    def start_item(self, item: WorkItemState) -> bool:
        """Starts a work item without gradients of an earlier attempt; returns False if the attempt is over already."""
        self._state.start_item(item)
        self._item_started_s = time.monotonic()
        self._units.zero_grad()
        try:
            self._buffers.start_item(self._state.number, item)
        except VersionGoneError:  # the step was committed with the work of another trainer
            item.abandon(item.key)
            self._state.leave_item()
            return False
        item.record_written(self._buffers.written())
        if self._store.pushes.may_be_copied:
            self._membership.start_item(self._state.number, item.item.global_rank)
        self._replica.require_same_item(item.item)
        return True

    def stop_item(self) -> None:
        """Called when the loop over ``step.batches`` ends early or raises: this trainer computes no item."""
        self._membership.end_item()

    def end_item(self) -> None:
        """Ends the current item: sends its remaining gradients and, for rank 0, its buffers.

        Drops them if the item's attempt is over.
        """
        current = self._state.current
        if current is not None and self._state.in_batches and self._is_over(current):
            self._units.zero_grad()
            self._store.pushes.abandon_sums()
            self._buffers.abandon_item()
            self._state.leave_item()
            self._restart_spoiled()
            self._end_time()
            return
        self._units.finish_item(keeps_graphs=self.keeps_graphs and not self._state.in_batches)
        if current is not None:
            self._store.pushes.push_drops(current)
            self._buffers.end_item(self._state.number, current)
        self._state.finish_item()
        self._end_time()

    def _restart_spoiled(self) -> bool:
        """Starts another attempt of the items that cannot be finished; returns whether there are any."""
        spoiled = [item for item in self._state.items.values() if item.spoiled and not self._membership.lapsed]
        for item in spoiled:
            try:
                self._store.pushes.restart(item)
            except (StaleEpochError, VersionGoneError):
                item.give_up()
            else:
                item.finished = False
        return bool(spoiled)

    def _end_time(self) -> None:
        """Measures the item that has ended. Stops the process if it should end with the item."""
        started, self._item_started_s = self._item_started_s, None
        if started is not None:
            self._item_s = time.monotonic() - started
        if self._stop is not None:
            stop, self._stop = self._stop, None
            self._store.pushes.drain()
            finished = [item.to_proto() for item in self._state.items.values() if item.finished and not item.abandoned]
            self._committer.report_finished(self._state.number, finished)
            stop()

    def remaining_s(self) -> float | None:
        """See ``Computes.remaining_s`` in ``preemption.py``."""
        started, item_s = self._item_started_s, self._item_s
        return None if started is None or item_s is None else max(0.0, started + item_s - time.monotonic())

    def stop_after_item(self, stop: Callable[[], None]) -> None:
        """See ``Computes.stop_after_item`` in ``preemption.py``."""
        self._stop = stop

    def _is_over(self, item: WorkItemState) -> bool:
        """True if gradients of the item's attempt do not count any more."""
        return item.abandoned or self._membership.lapsed

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
            if todo := [item for item in self._state.unfinished if not item.abandoned]:
                return todo  # this trainer has joined again, or it has restarted items itself
            try:
                self._store.pushes.drain()
                self._membership.end_item()  # not before: an item is late too if its pushes take long
                if self._restart_spoiled():
                    continue
                response = self._report(accept_work=accept_work, accept_copies=self._accepts_copies)
            except StaleEpochError:
                if not self._membership.lapsed:
                    raise
                continue
            if response.all_finished:
                self._state.finish_work()
            elif self._state.asynchronous and not response.work.items:
                self._state.restart(response.work.step, [], response.work.position)
                self._rejoining.end_iteration()
                return []
            elif self._state.asynchronous and response.work.step != self._state.number:
                return self._start(response.work)
            elif work := self._take(response.work.items):
                return work
        return []

    def _report(self, *, accept_work: bool, accept_copies: bool) -> coordinator_pb2.FinishWorkResponse:
        # The pushes of an abandoned item were dropped. A plain loop reports it to learn the next attempt.
        finished = [
            item.to_proto()
            for item in self._state.items.values()
            if item.finished and not (item.abandoned and self._state.in_batches)
        ]
        return self._committer.finish_work(
            self._state.number,
            finished,
            accept_work=accept_work,
            accept_copies=accept_copies,
            item_limit=self._state.item_limit,
        )

    def after_reports(self, call: Callable[[], Result]) -> Result:
        """Calls an rpc about finished work. Coordinators that have restarted since need the reports of the work again.

        Raises:
            StepRestartedError: Work of the step was restarted.
        """
        while True:
            try:
                return call()
            except StepRestartedError as error:
                if "ranks" not in error.data or self._membership.lapsed:
                    raise  # the coordinator knows the reports
                # Work that the answer grants instead stays leased to this trainer, and ``finish_work`` gets it again.
                if not self._report(accept_work=self._state.in_batches, accept_copies=False).all_finished:
                    raise

    def _start(self, work: coordinator_pb2.StepWork) -> list[WorkItemState]:
        """Starts the item of an asynchronous run that this trainer has waited for, or has to compute again.

        It reads a later version.
        """
        for item in self._state.items.values():
            self._store.pushes.forget_pushes(item)
        self._state.restart(work.step, work.items, work.position)
        self._state.start_batches()
        self._units.invalidate()
        self._units.begin_step()
        return self._state.unfinished

    @property
    def _accepts_copies(self) -> bool:
        """True if this trainer may compute a copy of an item that is late, and none has failed in this step."""
        failed = any(item.item.copy and item.abandoned for item in self._state.items.values())
        return self._state.in_batches and self._store.pushes.can_copy_items and not failed

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
        self._store.pushes.forget_pushes(state)
        self._state.repeat_item(state, item)
