"""Rpcs with which trainers declare the model: its units, their initial values and the parallel plan."""

from __future__ import annotations

from shardwell_server.coordinator.inspection import describe
from shardwell_server.coordinator.rpcs.base import CoordinatorRpcs, wait_limit
from shardwell_server.coordinator.runs.parallel_plan import check_plan
from shardwell_server.rpc import Call
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import coordinator_pb2

_DECLARE_WAIT_S = 5.0
"""Longest time that a declaration waits for shard servers. Trainers then warn, and try again."""

_FILL_WAIT_S = 5.0
"""Longest time that a declaration waits until the servers have read a unit from a checkpoint."""


class DeclarationRpcs(CoordinatorRpcs):
    """Rpcs that declare a run's model."""

    async def DeclareUnit(
        self, request: coordinator_pb2.DeclareUnitRequest, call: Call
    ) -> coordinator_pb2.DeclareUnitResponse:
        layout = UnitLayout.from_proto(request.unit)
        run, member = self._member(request)
        with member.serving_rpc(self._state.clock):
            await self._coordinator.filler.check(run, layout)
            unit = await self._coordinator.placer.declare(run, layout, wait_limit(call, _DECLARE_WAIT_S))
            if not unit.published and run.filled_from is not None:
                await self._coordinator.filler.fill(run, unit, wait_limit(call, _FILL_WAIT_S))
            elif not unit.published:
                self._coordinator.trainers.revoke_initializer(run, layout, wanted_by=member)
            await self._state.save(run)  # the shards may have moved, and the response names their servers
            response = coordinator_pb2.DeclareUnitResponse(
                unit_index=unit.index,
                shards=describe.shard_ranges(unit, self._state.cluster),
                placement=run.relocations.announced,
            )
            if unit.published:
                response.version = run.committed_step
            elif run.filled_from is not None:
                response.loading = run.checkpoints.describe_filling(layout.unit)
            elif (initializer := run.choose_initializer(layout)) is not None and initializer.trainer == member.name:
                response.initialize, response.epoch = True, initializer.epoch
                self._issuer.prove_initializer(run, response)
            await self._state.save(run)
            return response

    async def PublishInitialUnit(
        self, request: coordinator_pb2.PublishInitialUnitRequest, call: Call
    ) -> coordinator_pb2.PublishInitialUnitResponse:
        run, member = self._member(request, membership_epoch=False)
        with member.serving_rpc(self._state.clock):
            unit = run.units.require(request.unit)
            await self._coordinator.placer.publish(run, unit, member.name, request.context.epoch)
            return coordinator_pb2.PublishInitialUnitResponse(version=run.committed_step)

    async def DeclareParallelPlan(
        self, request: coordinator_pb2.DeclareParallelPlanRequest, call: Call
    ) -> coordinator_pb2.DeclareParallelPlanResponse:
        check_plan(request.plan)
        run, member = self._member(request)
        with member.serving_rpc(self._state.clock):
            run.declare_parallel_plan(member.name, request.plan)
            await self._state.save(run)  # before any trainer trains by it
        return coordinator_pb2.DeclareParallelPlanResponse()
