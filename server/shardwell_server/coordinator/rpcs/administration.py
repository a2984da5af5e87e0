"""Rpcs that change runs and the cluster: checkpoints, backups, drained servers, deleted runs."""

from __future__ import annotations

from shardwell_server.coordinator.checkpoints.residuals import add_report
from shardwell_server.coordinator.inspection import describe
from shardwell_server.coordinator.rpcs.base import CoordinatorRpcs, fingerprint, wait_limit
from shardwell_server.coordinator.settings import check_backups
from shardwell_server.coordinator.waiting import poll
from shardwell_server.rpc import Call
from shardwell_wire.errors import NotFoundError
from shardwell_wire.v1 import coordinator_pb2


class AdministrationRpcs(CoordinatorRpcs):
    """Rpcs that change runs and the cluster outside of steps."""

    async def DeleteRun(
        self, request: coordinator_pb2.DeleteRunRequest, call: Call
    ) -> coordinator_pb2.DeleteRunResponse:
        repeated = self._requests.check(request.request_id, fingerprint(request))
        try:
            run = self._state.require_run(request.run, request.run_id)
        except NotFoundError:
            if repeated:
                return coordinator_pb2.DeleteRunResponse()
            raise
        freed_bytes = await self._coordinator.delete_run(run, force=request.force)
        return coordinator_pb2.DeleteRunResponse(freed_bytes=freed_bytes)

    async def SaveCheckpoint(
        self, request: coordinator_pb2.SaveCheckpointRequest, call: Call
    ) -> coordinator_pb2.SaveCheckpointResponse:
        run = self._state.require_run(request.run, request.run_id)
        checkpoint_id = request.checkpoint_id or self._coordinator.checkpoints.request(run).checkpoint_id

        async def check() -> coordinator_pb2.CheckpointProgress | None:
            progress = describe.checkpoint_progress(run, checkpoint_id)
            return None if progress.state == coordinator_pb2.CHECKPOINT_STATE_WRITING else progress

        ended = await poll(run.changed, check, wait_limit(call, request.wait_s))
        run.check_not_deleted()
        return coordinator_pb2.SaveCheckpointResponse(
            checkpoint=ended or describe.checkpoint_progress(run, checkpoint_id)
        )

    async def AddResiduals(
        self, request: coordinator_pb2.AddResidualsRequest, call: Call
    ) -> coordinator_pb2.AddResidualsResponse:
        run, member = self._member(request)
        with member.serving_rpc(self._state.clock):
            add_report(run, member, request)
        return coordinator_pb2.AddResidualsResponse()

    async def SetBackups(
        self, request: coordinator_pb2.SetBackupsRequest, call: Call
    ) -> coordinator_pb2.SetBackupsResponse:
        run = self._state.require_run(request.run)
        check_backups(request.backups)
        self._coordinator.backups.set_count(run, request.backups)
        await self._state.save(run)
        return coordinator_pb2.SetBackupsResponse()

    async def VerifyRun(
        self, request: coordinator_pb2.VerifyRunRequest, call: Call
    ) -> coordinator_pb2.VerifyRunResponse:
        return await self._coordinator.verifier.verify(self._state.require_run(request.run))

    async def RebalanceRun(
        self, request: coordinator_pb2.RebalanceRunRequest, call: Call
    ) -> coordinator_pb2.RebalanceRunResponse:
        run = self._state.require_run(request.run)
        return await self._coordinator.drains.rebalance(run, report_only=request.report_only)

    async def DrainServer(
        self, request: coordinator_pb2.DrainServerRequest, call: Call
    ) -> coordinator_pb2.DrainServerResponse:
        return await self._coordinator.drains.drain(request.server_id, epoch=request.epoch, cancel=request.cancel)

    async def ForgetServer(
        self, request: coordinator_pb2.ForgetServerRequest, call: Call
    ) -> coordinator_pb2.ForgetServerResponse:
        await self._coordinator.server_leases.forget(request.server_id)
        return coordinator_pb2.ForgetServerResponse()
