"""What a trainer and the coordinator tell each other from a step's finished work to its commit record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardwell.session.membership import Membership
from shardwell.session.progress import ItemProgress
from shardwell_wire.v1 import common_pb2, coordinator_pb2


@dataclass(frozen=True, slots=True)
class GradNorm:
    """A norm of a step's mean gradient."""

    value: float
    attempts: int
    """Tells the gradient from that of an earlier attempt."""


PartitionUpdate = Callable[[Sequence[coordinator_pb2.PartitionWork]], Sequence[coordinator_pb2.PartitionWork]]


@dataclass(frozen=True, slots=True)
class StepUpdate:
    """What an optimizer asks a commit for."""

    optimizer: common_pb2.OptimizerStep
    """Algorithm and hyper-parameters."""
    clip_coefficient: float = 1.0
    """What the gradient is multiplied by."""
    norm_attempts: int | None = None
    """``GradNorm.attempts`` of the norm that the coefficient was computed from; None: of none."""
    update_partitions: PartitionUpdate | None = None
    """Stages the partitions that the coordinator assigns to this trainer and returns those that are staged. Needed if
    the
    optimizer runs on the trainers."""


class StepEnd:
    """The end of each step, as one trainer asks the coordinator about it.

    Args:
        membership: This trainer's place in the run.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._finish_wait_s = self._commit_wait_s = 0.0

    @property
    def stats(self) -> dict[str, float]:
        """Seconds that the training thread waited for other trainers' work and for commits."""
        return {"finish_wait_s": self._finish_wait_s, "commit_wait_s": self._commit_wait_s}

    def check(self) -> None:
        """Raises what ended the trainer's membership, if anything did."""
        self._membership.check()

    def finish_work(
        self, step: int, items: Iterable[ItemProgress], *, accept_work: bool
    ) -> coordinator_pb2.FinishWorkResponse:
        """Reports items; returns when all of the step are finished, or a lost trainer's come to this one.

        Raises:
            DeadlineError: Others did not finish in time.
        """
        request = coordinator_pb2.FinishWorkRequest(
            context=self._membership.context(step),
            trainer=self._membership.trainer,
            items=[progress.to_proto() for progress in items if progress.finished],
            accept_work=accept_work,
        )
        started = time.perf_counter()
        response: coordinator_pb2.FinishWorkResponse = self._membership.poll(
            "FinishWork",
            request,
            lambda answer: answer.all_finished or answer.HasField("work"),
            what=f"the work of step {step}",
        )
        self._finish_wait_s += time.perf_counter() - started
        return response

    def grad_norm(self, step: int, norm_type: float, unit_indices: Sequence[int] = ()) -> GradNorm:
        """Global norm, before any clipping, of the mean gradient of a step whose work is finished or committed.

        Raises:
            DeadlineError: The servers did not reduce the gradient in time.
        """
        request = coordinator_pb2.PrepareGradientsRequest(
            context=self._membership.context(step),
            trainer=self._membership.trainer,
            norm_type=0.0 if norm_type == 2.0 else norm_type,
            unit_indices=unit_indices,
        )
        response: coordinator_pb2.PrepareGradientsResponse = self._membership.poll(
            "PrepareGradients",
            request,
            lambda answer: answer.prepared,
            what=f"the gradient norm of step {step}",
        )
        return GradNorm(response.other_norm if request.norm_type else response.grad_norm, response.attempts)

    def commit(
        self,
        step: int,
        update: StepUpdate,
        *,
        unit_order: Sequence[int],
        state: coordinator_pb2.RunState,
    ) -> coordinator_pb2.CommitStepResponse:
        """Hands in what a commit is made of; returns when the step is committed. ``StepInFlight.commit`` says more.

        Args:
            step: Number of the step.
            update: What the optimizer asks for.
            unit_order: Indices of the units as the forward used them: earlier ones are updated first.
            state: What the run keeps beside the parameters.
        """
        request = coordinator_pb2.CommitStepRequest(
            context=self._membership.context(step),
            trainer=self._membership.trainer,
            optimizer=update.optimizer,
            clip_coefficient=update.clip_coefficient,
            norm_attempts=update.norm_attempts,
            unit_order=unit_order,
            state=state,
        )
        started = time.perf_counter()
        response = self._poll_commit(request)
        while update.update_partitions is not None and response.partitions:
            request.staged_partitions.extend(update.update_partitions(response.partitions))
            request.context.CopyFrom(self._membership.context(step))
            response = self._poll_commit(request)
        self._commit_wait_s += time.perf_counter() - started
        return response

    def _poll_commit(self, request: coordinator_pb2.CommitStepRequest) -> coordinator_pb2.CommitStepResponse:
        response: coordinator_pb2.CommitStepResponse = self._membership.poll(
            "CommitStep",
            request,
            lambda answer: answer.committed or answer.partitions,
            what=f"the commit of step {request.context.step}",
        )
        return response
