"""Rpcs that describe or change runs and the cluster: checkpoints, backups, drained servers, stalls and events."""

from __future__ import annotations

from collections.abc import AsyncIterator

from shardwell_server.coordinator.checkpoints.saving import add_report
from shardwell_server.coordinator.inspection import describe
from shardwell_server.coordinator.inspection.stall import explain_stall
from shardwell_server.coordinator.rpcs.coordinator_rpcs import CoordinatorRpcs, check_seconds, fingerprint, wait_limit
from shardwell_server.coordinator.settings import check_backups, check_layers
from shardwell_server.coordinator.signals import poll
from shardwell_server.serving.rpc import Call
from shardwell_wire.errors import InvalidRequestError, NotFoundError
from shardwell_wire.model.topology import World
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
        return await self._coordinator.backups.rebalance(run, report_only=request.report_only)

    async def DrainServer(
        self, request: coordinator_pb2.DrainServerRequest, call: Call
    ) -> coordinator_pb2.DrainServerResponse:
        return await self._coordinator.backups.drain(request.server_id, epoch=request.epoch, cancel=request.cancel)

    async def ForgetServer(
        self, request: coordinator_pb2.ForgetServerRequest, call: Call
    ) -> coordinator_pb2.ForgetServerResponse:
        await self._coordinator.server_leases.forget(request.server_id)
        return coordinator_pb2.ForgetServerResponse()


class InspectionRpcs(CoordinatorRpcs):
    """Rpcs that describe runs and the cluster."""

    async def ListRuns(self, request: coordinator_pb2.ListRunsRequest, call: Call) -> coordinator_pb2.ListRunsResponse:
        return coordinator_pb2.ListRunsResponse(
            runs=[describe.summarize_run(run) for _, run in sorted(self._state.runs.items()) if call.sees(run.identity)]
        )

    async def DescribeRun(
        self, request: coordinator_pb2.DescribeRunRequest, call: Call
    ) -> coordinator_pb2.DescribeRunResponse:
        return describe.describe_run(self._state.require_run(request.run), self._state.cluster, self._state.clock())

    async def DescribeWorld(
        self, request: coordinator_pb2.DescribeWorldRequest, call: Call
    ) -> coordinator_pb2.DescribeWorldResponse:
        if bool(request.run) == request.HasField("world"):
            raise InvalidRequestError("a DescribeWorld request must name either a run or a world, and not both")
        if request.run:
            run = self._state.require_run(request.run)
            described = describe.describe_world(run.settings.world, run)
            await self._state.save(run)  # a restarted coordinator must not issue the epochs of replicas again
            return described
        world = World.from_proto(request.world)
        check_layers(world, request.num_layers)
        return describe.describe_world(world, None)

    async def ListUnits(
        self, request: coordinator_pb2.ListUnitsRequest, call: Call
    ) -> coordinator_pb2.ListUnitsResponse:
        run = self._state.require_run(request.run)
        run.checkpoints.check_loadable(run.name)
        run.checkpoints.check_loaded(run.name)
        await self._state.save(run)  # the shards may have moved, and the response names their servers
        return describe.list_units(run, self._state.cluster)

    async def DescribeWeights(
        self, request: coordinator_pb2.DescribeWeightsRequest, call: Call
    ) -> coordinator_pb2.DescribeWeightsResponse:
        run = self._state.require_run(request.run)
        wanted = request.version if request.HasField("version") else None
        return await describe.describe_weights(run, self._state.cluster, wanted, wait_limit(call, request.wait_s))

    async def ListServers(
        self, request: coordinator_pb2.ListServersRequest, call: Call
    ) -> coordinator_pb2.ListServersResponse:
        response = describe.list_servers(self._state.cluster, self._state.runs.values(), self._state.clock())
        response.coordinator_insecure = self._state.settings.insecure
        return response

    async def ExplainStall(
        self, request: coordinator_pb2.ExplainStallRequest, call: Call
    ) -> coordinator_pb2.ExplainStallResponse:
        run = self._state.require_run(request.run)
        stall = explain_stall(run, self._state.cluster, self._state.clock(), self._state.settings.min_servers)
        return coordinator_pb2.ExplainStallResponse(
            step=run.committed_step, phase=stall.phase, phase_s=round(stall.phase_s, 3), waiting_for=stall.lines
        )

    async def WatchEvents(
        self, request: coordinator_pb2.WatchEventsRequest, call: Call
    ) -> AsyncIterator[coordinator_pb2.WatchEventsResponse]:
        check_seconds("duration_s", request.duration_s)
        async for event in self._state.events.watch(request.run, request.duration_s or None):
            yield event
