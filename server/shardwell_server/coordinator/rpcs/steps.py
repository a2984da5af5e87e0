"""Rpcs that end a step: finished and restarted work, norms, and the commit."""

from __future__ import annotations

from shardwell_server.coordinator.rpcs.base import CoordinatorRpcs, wait_limit
from shardwell_server.coordinator.runs.gradient_norms import NormKind
from shardwell_server.coordinator.runs.proposals import StepProposal
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.rpc import Call
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.v1 import coordinator_pb2


class StepRpcs(CoordinatorRpcs):
    """Rpcs with which trainers end a step."""

    async def ResetWork(
        self, request: coordinator_pb2.ResetWorkRequest, call: Call
    ) -> coordinator_pb2.ResetWorkResponse:
        run, member = self._member(request, membership_epoch=False)
        with member.serving_rpc(self._state.clock):
            response = await self._coordinator.work_requests.reset_work(
                run, member, request, wait_limit(call, request.wait_s)
            )
        if response.HasField("item"):
            self._issuer.prove_leases(run, [response.item])
        return response

    async def FinishWork(
        self, request: coordinator_pb2.FinishWorkRequest, call: Call
    ) -> coordinator_pb2.FinishWorkResponse:
        run, member = self._member(request)
        if request.HasField("item_limit"):
            member.note_item_limit(request.item_limit)
        with member.serving_rpc(self._state.clock):
            response = await self._coordinator.work_requests.finish_work(
                run,
                member,
                request.context.step,
                request.items,
                accept_work=request.accept_work,
                accept_copies=request.accept_copies and request.accept_work,
                wait_s=wait_limit(call, request.wait_s),
            )
        self._issuer.prove_leases(run, response.work.items)
        return response

    async def PrepareGradients(
        self, request: coordinator_pb2.PrepareGradientsRequest, call: Call
    ) -> coordinator_pb2.PrepareGradientsResponse:
        run, member = self._member(request)
        with member.serving_rpc(self._state.clock):
            return await self._coordinator.commit_requests.prepare_gradients(
                run,
                member,
                request.context.step,
                _item_name(run, request),
                kind=_norm_kind(request),
                wait_s=wait_limit(call, request.wait_s),
                counted=request.unit_indices,
                kept=request.kept_unit_indices,
            )

    async def CommitStep(
        self, request: coordinator_pb2.CommitStepRequest, call: Call
    ) -> coordinator_pb2.CommitStepResponse:
        run, member = self._member(request)
        proposal = StepProposal(
            trainer=member.name,
            trainer_and_ranks=run.describe_trainer(member.name),
            optimizer=request.optimizer,
            clip_coefficient=request.clip_coefficient,
            unit_order=tuple(request.unit_order),
            state=request.state if request.HasField("state") else None,
            norm_attempts=request.norm_attempts if request.HasField("norm_attempts") else None,
        )
        if request.HasField("item_limit"):
            member.note_item_limit(request.item_limit)
        with member.serving_rpc(self._state.clock):
            response = await self._coordinator.commit_requests.commit_step(
                run,
                member,
                request.context.step,
                proposal,
                wait_limit(call, request.wait_s),
                request.staged_partitions,
                _item_name(run, request),
            )
        self._issuer.prove_leases(run, response.next_work.items)
        self._issuer.prove_leases(run, response.partitions)
        return response


def _item_name(
    run: Run, request: coordinator_pb2.PrepareGradientsRequest | coordinator_pb2.CommitStepRequest
) -> coordinator_pb2.ItemName | None:
    """Returns the caller's item in an asynchronous run. None: it is not named, or the run is synchronous."""
    return request.item if run.asynchronous and request.HasField("item") else None


def _norm_kind(request: coordinator_pb2.PrepareGradientsRequest) -> NormKind | None:
    """Returns the norm that a request asks for besides the Euclidean norm. None: there is none."""
    norm_type, bound = request.norm_type, request.norm_bound
    if not norm_type >= 0:
        raise InvalidRequestError(f"norm_type is {norm_type}: expected a number above 0, infinity, or 0 for none")
    if not bound >= 0 or (bound and not norm_type):
        raise InvalidRequestError(
            f"norm_bound is {bound} with norm_type {norm_type}: expected a number above 0 together with a norm_type, "
            "or 0 for no bound"
        )
    return NormKind(norm_type, bound) if norm_type else None
