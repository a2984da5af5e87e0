"""What a trainer and the coordinator tell each other from a step's finished work to its commit record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from shardwell.session.membership import Membership
from shardwell.session.progress import ItemProgress
from shardwell_wire.v1 import common_pb2, coordinator_pb2

SliceUpdate = Callable[[Sequence[coordinator_pb2.SliceWork]], Sequence[coordinator_pb2.SliceWork]]


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

    def grad_norm(self, step: int, norm_type: float) -> float:
        """Global norm, before any clipping, of the mean gradient of a step whose work is finished or committed."""
        request = coordinator_pb2.PrepareGradientsRequest(
            context=self._membership.context(step),
            trainer=self._membership.trainer,
            norm_type=0.0 if norm_type == 2.0 else norm_type,
        )
        response: coordinator_pb2.PrepareGradientsResponse = self._membership.call("PrepareGradients", request)
        return response.other_norm if request.norm_type else response.grad_norm

    def commit(
        self,
        step: int,
        optimizer: common_pb2.OptimizerStep,
        clip_coefficient: float,
        *,
        unit_order: Sequence[int],
        state: coordinator_pb2.RunState,
        update_slices: SliceUpdate | None,
    ) -> coordinator_pb2.CommitStepResponse:
        """Hands in what a commit is made of; returns when the step is committed. ``Session.commit`` says more.

        Args:
            step: Number of the step.
            optimizer: Its hyper-parameters.
            clip_coefficient: What the gradient is multiplied with.
            unit_order: Indices of the units as the forward used them: earlier ones are updated first.
            state: What the run keeps beside the parameters.
            update_slices: Stages slices, if the optimizer runs on the trainers.
        """
        request = coordinator_pb2.CommitStepRequest(
            context=self._membership.context(step),
            trainer=self._membership.trainer,
            optimizer=optimizer,
            clip_coefficient=clip_coefficient,
            unit_order=unit_order,
            state=state,
        )
        started = time.perf_counter()
        response = self._poll_commit(request)
        while update_slices is not None and response.slices:
            request.staged_slices.extend(update_slices(response.slices))
            request.context.CopyFrom(self._membership.context(step))
            response = self._poll_commit(request)
        self._commit_wait_s += time.perf_counter() - started
        return response

    def _poll_commit(self, request: coordinator_pb2.CommitStepRequest) -> coordinator_pb2.CommitStepResponse:
        response: coordinator_pb2.CommitStepResponse = self._membership.poll(
            "CommitStep",
            request,
            lambda answer: answer.committed or answer.slices,
            what=f"the commit of step {request.context.step}",
        )
        return response
