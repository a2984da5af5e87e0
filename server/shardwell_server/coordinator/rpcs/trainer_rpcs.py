"""Rpcs of trainers: membership, and the declared model. ``step_rpcs.py`` has those that end a step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from shardwell_server.coordinator.inspection import describe
from shardwell_server.coordinator.inspection.events import timestamp
from shardwell_server.coordinator.ranks.members import ItemInProgress, Member, TrainerDevice, TransportReport
from shardwell_server.coordinator.ranks.rank_assignment import Applicant
from shardwell_server.coordinator.rpcs.coordinator_rpcs import CoordinatorRpcs, check_seconds, wait_limit
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.shard_servers import check_recoverable
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.steps.reports import check_plan, check_step_report, require_same_plan
from shardwell_server.serving.rpc import Call
from shardwell_wire.connection.protocol_versions import negotiate
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import check_name
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2


class TrainerRpcs(CoordinatorRpcs):
    """Rpcs of a trainer's membership in a run."""

    async def Join(self, request: coordinator_pb2.JoinRequest, call: Call) -> coordinator_pb2.JoinResponse:
        wait_s = wait_limit(call, request.wait_s)
        version = negotiate(request.protocol, f"trainer {request.trainer!r}")
        settings = RunSettings.from_proto(request.config, world_size=request.world_size)
        applicant = _applicant(request, settings.world)
        if request.run_id:
            self._state.require_run(request.run, request.run_id)
        token_run_id = call.caller.run_id if call.caller is not None else ""
        self._coordinator.trainers.check_token(request.run, token_run_id)  # before anything that it names is opened
        checked = await self._coordinator.checkpoints.check_new_directory(request.run, request.config)
        run = await self._coordinator.restorer.find_or_create_run(request, settings, token_run_id)
        self._coordinator.checkpoints.check_directory(run, checked)
        if request.config.HasField("backups"):
            self._coordinator.backups.set_count(run, request.config.backups)
        # Joining and waiting for the start share one limit.
        deadline = self._state.clock() + wait_s
        member = await self._coordinator.trainers.join(
            run, applicant, request.incarnation, wait_s, replaced_epoch=request.replaced_epoch
        )
        if member is None:
            line = f"another process of trainer {applicant.name!r} may be alive: waiting until its lease expires"
            return coordinator_pb2.JoinResponse(waiting_for=[line])
        with member.serving_rpc(self._state.clock):
            remaining = max(0.0, deadline - self._state.clock())
            started = await self._coordinator.trainers.wait_for_start(run, member, remaining)
            response = self._describe_membership(run, member, started=started)
            response.protocol_version = version
            # The response may contain new epochs. A restarted coordinator must not issue them again.
            await self._state.save(run)
            response.placement = run.relocations.announced
            return response

    def _describe_membership(self, run: Run, member: Member, *, started: bool) -> coordinator_pb2.JoinResponse:
        response = coordinator_pb2.JoinResponse(
            started=started,
            trainer=member.name,
            epoch=member.epoch,
            lease_s=self._state.settings.lease_s,
            config=run.settings.to_proto(),
            committed_step=run.committed_step,
            run_id=run.identity.run_id,
            rollback_count=run.checkpoints.rollback_count,
            token=self._issuer.token(run, member),
            notices=run.notices.after(0),
            created=timestamp(run.created),
            created_by=run.created_by,
            created_on=run.created_on,
        )
        if not started:
            if run.started and run.owners.is_waiting_spare(member.name):
                response.waiting_for.append(f"all ranks have trainers: {member} is a spare until a rank is free")
            elif run.started and (missing := run.owners.missing_peers(member.name)):
                names = ", ".join(run.members.error_of(name) or f"trainer {name!r}" for name in missing)
                response.waiting_for.append(
                    f"{member} cannot start before its replica is complete: it waits for {names}"
                )
            response.waiting_for.extend(self._explain_stall(run).lines)
            return response
        describer = describe.RankDescriber(run.settings.world)
        response.rank_assignments.extend(map(describer.describe, run.owners.ranks_of(member.name)))
        response.replica_epoch = run.owners.replica_epoch_of(member.name)
        response.work.CopyFrom(run.work.assigned_to(member.name))
        self._issuer.prove_leases(run, response.work.items)
        if run.commits.state is not None:
            response.state.CopyFrom(run.commits.state)
            own = {at.coordinates.dp_rank for at in response.rank_assignments}
            for other in response.state.data_positions.keys() - own:
                del response.state.data_positions[other]
        if (checkpoint := run.checkpoints.saved_at(run.committed_step)) is not None:
            response.checkpoint_url = checkpoint.url
        return response

    async def Heartbeat(
        self, request: coordinator_pb2.HeartbeatRequest, call: Call
    ) -> coordinator_pb2.HeartbeatResponse:
        negotiate(request.protocol, f"trainer {request.trainer!r}")
        run, transports = self._exact_run(request), TransportReport.from_proto(request.transports)
        device = TrainerDevice.from_proto(request.device) if request.HasField("device") else None
        member = self._coordinator.trainers.require_member(run, request.trainer, request.epoch)
        check_step_report(request.report)
        with member.serving_rpc(self._state.clock):
            if request.HasField("report"):
                member.report = request.report
            for transport in member.note_connections(transports, request.unreachable, self._state.clock()):
                self._coordinator.trainers.report_corrupt(run, member, transport)
            if member.note_in_progress(_in_progress(request, self._state.clock())) and run.members.waiting_for_work:
                run.changed.notify()
            if request.HasField("ended_step"):
                run.note_ended(request.ended_step)
            if request.HasField("ended_iteration") and run.note_iteration(request.ended_iteration):
                self._state.tasks.start(self._state.save_iteration(run))
            check_recoverable(run, self._state.cluster)
            return coordinator_pb2.HeartbeatResponse(
                committed_step=run.committed_step,
                placement=run.relocations.announced,
                residuals=run.wanted_residuals(member),
                token=self._issuer.renewed_token(run, member, call.caller),
                device_user=run.members.note_device(member, device),
            )

    async def KeepMembership(
        self, request: coordinator_pb2.KeepMembershipRequest, call: Call
    ) -> AsyncIterator[coordinator_pb2.KeepMembershipResponse]:
        run, trainers = self._exact_run(request), self._coordinator.trainers
        member = trainers.require_member(run, request.trainer, request.epoch)
        member.has_residuals = request.has_residuals
        offer = None if self._calls is None else self._calls.offer(call.caller)
        async with aclosing(trainers.keep_membership(run, member)) as stream:
            async for response in stream:
                if offer is not None:
                    response.calls.CopyFrom(offer)
                    offer = None
                yield response

    async def Leave(self, request: coordinator_pb2.LeaveRequest, call: Call) -> coordinator_pb2.LeaveResponse:
        run = self._exact_run(request)
        member = run.members.by_name.get(request.trainer)
        if member is not None and (member.live or member.expired or member.epoch != request.epoch):
            trainers = self._coordinator.trainers
            if request.HasField("ended_step"):
                run.note_ended(request.ended_step)
            trainers.leave(run, trainers.require_member(run, request.trainer, request.epoch), request.error)
            await self._state.save(run)
        return coordinator_pb2.LeaveResponse()


def _applicant(request: coordinator_pb2.JoinRequest, world: World) -> Applicant:
    check_name("run", request.run)
    check_name("incarnation", request.incarnation)
    rank = request.global_rank if request.HasField("global_rank") else None
    if rank is not None:
        world.coordinates(rank)
    if request.process:
        check_name("process", request.process)
    return Applicant(request.trainer, request.host, rank, request.process)


def _in_progress(request: coordinator_pb2.HeartbeatRequest, now: float) -> ItemInProgress | None:
    if not request.HasField("item_in_progress"):
        return None
    item = request.item_in_progress
    check_seconds("item_in_progress.for_s", item.for_s)
    return ItemInProgress(item.step, item.global_rank, now - item.for_s)


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
            run.units.set_model_names({each.name: tuple(each.model_names) for each in request.names_in_model})
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
            if run.parallel_plan is None:
                run.parallel_plan = request.plan
                run.changes.touch()
            require_same_plan(run.name, run.parallel_plan, member.name, request.plan)
            await self._state.save(run)  # before any trainer trains by it
        return coordinator_pb2.DeclareParallelPlanResponse()
