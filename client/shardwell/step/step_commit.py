"""The coordinator's rpcs at the end of a step: finished work, the gradient norm and the commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shardwell.membership.membership import Membership
from shardwell.monitor.step_times import CommitFacts, LastFinished, ServerUpdate
from shardwell_wire import fault_points
from shardwell_wire.errors import ShardwellError
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GradNorm:
    """A norm of a step's mean gradient."""

    value: float
    attempts: int
    """Number of attempts of the step's work. It differs after the gradient was recomputed."""


PartitionUpdate = Callable[[Sequence[coordinator_pb2.PartitionWork], bool], Sequence[coordinator_pb2.PartitionWork]]
"""Updates and stages optimizer partitions, with new optimizer state or not; returns those that are staged."""


@dataclass(frozen=True, slots=True)
class StepUpdate:
    """The update that an optimizer asks a commit to apply."""

    optimizer: common_pb2.OptimizerStep
    """Algorithm and hyper-parameters."""
    clip_coefficient: float = 1.0
    """Factor of the gradient."""
    norm_attempts: int | None = None
    """``GradNorm.attempts`` of the norm that determined the coefficient. None: no norm was used."""
    update_partitions: PartitionUpdate | None = None
    """Called with the partitions that the coordinator assigns to this trainer. None: the servers update."""


class StepCommitter:
    """Calls the coordinator at the end of each step.

    Args:
        allow_gradient_differences: Whether tensor-parallel ranks may have other gradients of what all of them hold.

    Attributes:
        stats: Seconds that the training thread has waited for other trainers' work, for norms and for commits, and has
            updated optimizer partitions, by the names of ``Session.stats``.
    """

    def __init__(self, membership: Membership, *, allow_gradient_differences: bool = False) -> None:
        self._membership, self._allow_gradient_differences = membership, allow_gradient_differences
        self.stats = dict.fromkeys(("finish_wait_s", "norm_wait_s", "commit_wait_s", "partition_update_s"), 0.0)
        self._last_finished: LastFinished | None = None

    def take_facts(self, response: coordinator_pb2.CommitStepResponse) -> CommitFacts:
        """Returns what the coordinator has said about the step that was committed.

        Args:
            response: The answer to the step proposal.
        """
        last, self._last_finished = self._last_finished, None
        update = response.previous_update if response.HasField("previous_update") else None
        return CommitFacts(
            last_finished=last,
            previous_update=None if update is None else ServerUpdate(update.server, update.duration_s),
            record_s=response.record_s,
            staleness=response.staleness if response.HasField("staleness") else None,
        )

    def finish_work(
        self,
        step: int,
        finished: Sequence[coordinator_pb2.FinishedItem],
        *,
        accept_work: bool,
        accept_twins: bool = False,
        item_limit: int | None = None,
    ) -> coordinator_pb2.FinishWorkResponse:
        """Reports finished items; returns when all items of the step are finished or this trainer gets more work.

        Args:
            finished: All items that this trainer has finished in the step.
            accept_work: Whether this trainer can compute items of lost trainers.
            accept_twins: Whether this trainer can compute items, too, that are late at other trainers.
            item_limit: In an asynchronous run, number of items that each data rank is to compute. None: not known.

        Returns:
            Whether all items are finished, or the items that this trainer must compute: those of lost trainers, and
            its own that were restarted.

        Raises:
            DeadlineError: Other trainers did not finish in time.
            ReplicaLostError: Another trainer of this trainer's replica was lost.
            ConflictError: The tensor-parallel ranks of an item have different gradients of what all hold.
        """
        request = coordinator_pb2.FinishWorkRequest(
            context=self._membership.context(step),
            trainer=self._membership.trainer,
            items=finished,
            accept_work=accept_work,
            accept_copies=accept_twins,
            item_limit=item_limit,
            allow_gradient_differences=self._allow_gradient_differences,
        )
        fault_points.reach("client.finish_work.before", step=step)
        started = time.perf_counter()
        response: coordinator_pb2.FinishWorkResponse = self._membership.poll(
            "FinishWork",
            request,
            lambda answer: answer.all_finished or answer.HasField("work"),
            what=f"the work of step {step}",
            with_replica=True,
        )
        self.stats["finish_wait_s"] += time.perf_counter() - started
        if response.HasField("last_finished"):
            last = response.last_finished
            self._last_finished = LastFinished(last.global_rank, last.trainer, last.late_s)
        fault_points.reach("client.finish_work.after", step=step)
        return response

    def report_finished(self, step: int, finished: Sequence[coordinator_pb2.FinishedItem]) -> None:
        """Reports finished items and does not wait for anything. Errors have no effect: the process is about to end."""
        request = coordinator_pb2.FinishWorkRequest(
            context=self._membership.context(step),
            trainer=self._membership.trainer,
            items=finished,
            allow_gradient_differences=self._allow_gradient_differences,
        )
        try:
            self._membership.call("FinishWork", request)
        except ShardwellError as error:
            logger.info("the last work item was not reported: %s", error)

    def grad_norm(
        self,
        step: int,
        norm_type: float,
        bound: float = 0.0,
        counted: Sequence[int] = (),
        kept: Sequence[int] = (),
        *,
        item: coordinator_pb2.ItemName | None = None,
    ) -> GradNorm:
        """Returns a norm of the mean gradient of a step whose work is finished.

        Args:
            norm_type: The norm's p.
            bound: Elements count as clamped to ``[-bound, bound]``. 0: not clamped.
            counted: Units of this trainer to include. Empty: all units of the run.
            kept: Units of this trainer to leave out.
            item: This trainer's item, in an asynchronous run.

        Raises:
            DeadlineError: The servers did not reduce the gradient in time.
            ReplicaLostError: Another trainer of this trainer's replica was lost.
            StepRestartedError: This trainer's work of the step was restarted.
        """
        request = coordinator_pb2.PrepareGradientsRequest(
            context=self._membership.context(step),
            trainer=self._membership.trainer,
            # Servers always compute the 2-norm of the gradient as it is, so only another norm is requested.
            norm_type=0.0 if norm_type == 2.0 and not bound else norm_type,
            norm_bound=bound,
            # Without kept units every unit counts, and nobody has to wait for the lists of other ranks.
            unit_indices=counted if kept else (),
            kept_unit_indices=kept,
            item=item,
        )
        started = time.perf_counter()
        response: coordinator_pb2.PrepareGradientsResponse = self._membership.poll(
            "PrepareGradients",
            request,
            lambda answer: answer.prepared,
            what=f"the gradient norm of step {step}",
            with_replica=True,
        )
        self.stats["norm_wait_s"] += time.perf_counter() - started
        return GradNorm(response.other_norm if request.norm_type else response.grad_norm, response.attempts)

    def commit(
        self,
        step: int,
        update: StepUpdate,
        *,
        unit_order: Sequence[int],
        state: coordinator_pb2.RunState,
        item: coordinator_pb2.ItemName | None = None,
        item_limit: int | None = None,
    ) -> coordinator_pb2.CommitStepResponse:
        """Sends this trainer's step proposal; returns when the step is committed. See ``StepInFlight.commit``.

        Args:
            step: Number of the step.
            update: The update to apply.
            unit_order: Indices of the units in the order of the forward. The servers update units in this order.
            state: State of the run beside the parameters.
            item: This trainer's item, in an asynchronous run.
            item_limit: As in ``finish_work``.

        Raises:
            StepRestartedError: Work of the step was restarted.
            ReplicaLostError: Another trainer of this trainer's replica was lost. The step may be committed.
        """
        request = coordinator_pb2.CommitStepRequest(
            context=self._membership.context(step),
            trainer=self._membership.trainer,
            optimizer=update.optimizer,
            clip_coefficient=update.clip_coefficient,
            norm_attempts=update.norm_attempts,
            unit_order=unit_order,
            state=state,
            item=item,
            item_limit=item_limit,
        )
        propose: Callable[[], coordinator_pb2.CommitStepResponse] = partial(
            self._membership.poll,
            "CommitStep",
            request,
            lambda answer: answer.committed or answer.partitions,
            what=f"the commit of step {step}",
            with_replica=True,
        )
        if fault_points.armed_points:
            fault_points.reach("client.commit.before", step=step)
        started = time.perf_counter()
        response = propose()
        # If the optimizer runs on the trainers, an answer may ask for updated partitions before the step is committed.
        while update.update_partitions is not None and response.partitions:
            update_started = time.perf_counter()
            request.staged_partitions.extend(update.update_partitions(response.partitions, response.new_state))
            self.stats["partition_update_s"] += time.perf_counter() - update_started
            # A proposal with staged partitions is another request, which needs a request id of its own.
            request.context.CopyFrom(self._membership.context(step))
            response = propose()
        self.stats["commit_wait_s"] += time.perf_counter() - started
        self._membership.note_commit()
        if fault_points.armed_points:
            fault_points.reach("client.commit.after", step=step)
        return response
