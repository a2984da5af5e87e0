"""gRPC servicer of ``CoordinatorService``: decodes requests, calls the core and encodes responses."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from hashlib import blake2b
from typing import Any

from google.protobuf.message import Message

from shardwell_server.call_server import CallServer
from shardwell_server.coordinator.checkpoints.residuals import add_report
from shardwell_server.coordinator.coordinator import Coordinator
from shardwell_server.coordinator.inspection import describe
from shardwell_server.coordinator.inspection.stall import explain_stall
from shardwell_server.coordinator.issuing import Issuer
from shardwell_server.coordinator.rendezvous import find_store, open_store, wait_for_keys
from shardwell_server.coordinator.runs.members import ItemInProgress, Member, TransportReport
from shardwell_server.coordinator.runs.parallel_plan import check_plan
from shardwell_server.coordinator.runs.proposals import StepProposal
from shardwell_server.coordinator.runs.rank_assignment import Applicant
from shardwell_server.coordinator.runs.replica_stores import ReplicaStore
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.servers.shard_servers import check_recoverable
from shardwell_server.coordinator.settings import RunSettings, check_backups, check_layers
from shardwell_server.coordinator.torchrun_stores import TorchrunStores
from shardwell_server.coordinator.waiting import poll
from shardwell_server.request_log import RequestLog
from shardwell_server.rpc import MAX_WAIT_S, Call
from shardwell_wire.errors import InvalidRequestError, NotFoundError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.names import check_name
from shardwell_wire.protocol_versions import negotiate
from shardwell_wire.tokens import ClusterKey
from shardwell_wire.topology import World
from shardwell_wire.v1 import coordinator_pb2

_DECLARE_WAIT_S = 20.0
"""Longest time that a declaration waits for shard servers. Well below the deadline of trainers, which then retry."""

_FILL_WAIT_S = 5.0
"""Longest time that a declaration waits until the servers have read a unit from a checkpoint."""

_MAX_MISSING_KEYS = 64


class CoordinatorServicer:
    """Serves the rpcs of the coordinator.

    Args:
        coordinator: The core that executes them.
        key: Key of the cluster, with which tokens for trainers and proofs are made. None: every caller is admitted.
        calls: Takes calls beside gRPC. None: nothing does.
    """

    def __init__(
        self, coordinator: Coordinator, key: ClusterKey | None = None, calls: CallServer | None = None
    ) -> None:
        self._issuer = Issuer(key)
        self._coordinator, self._state, self._calls = coordinator, coordinator.state, calls
        self._requests = RequestLog()
        self._torchrun_stores = TorchrunStores(is_protected=key is not None, clock=coordinator.state.clock)

    def run_id_of(self, name: str) -> str:
        """Returns the id of the run that has a name now. Empty: there is none."""
        run = self._state.runs.get(name)
        return "" if run is None else run.identity.run_id

    # Shard servers

    async def RegisterServer(
        self, request: coordinator_pb2.RegisterServerRequest, call: Call
    ) -> coordinator_pb2.RegisterServerResponse:
        version = negotiate(request.protocol, f"shard server {request.server_id!r}")
        epoch = await self._coordinator.server_leases.register(
            request.server_id,
            request.address,
            request.incarnation,
            request.budget_bytes,
            request.process,
            restartable=request.restartable,
            holds_shards=bool(request.held),
        )
        self._state.cluster.require(request.server_id).insecure = request.insecure
        adopted = await self._coordinator.adoption.adopt(request.server_id, request.incarnation, request.held)
        response = coordinator_pb2.RegisterServerResponse(
            epoch=epoch,
            lease_s=self._state.settings.lease_s,
            coordinator_epoch=self._state.term,
            adopted=adopted,
            protocol_version=version,
            retired_shards=await self._coordinator.relocator.retired_shards(request.server_id, request.incarnation),
        )
        return self._issuer.prove(response, request.nonce)

    async def HeartbeatServer(
        self, request: coordinator_pb2.HeartbeatServerRequest, call: Call
    ) -> coordinator_pb2.HeartbeatServerResponse:
        self._coordinator.server_leases.heartbeat(request)
        server = self._state.cluster.require(request.server_id)
        incarnation, server.insecure = server.incarnation, request.insecure
        response = coordinator_pb2.HeartbeatServerResponse(
            retired_shards=await self._coordinator.relocator.retired_shards(request.server_id, incarnation),
            coordinator_epoch=self._state.term,
            deleted_run_ids=self._coordinator.deleted_run_ids(request.run_ids),
        )
        return self._issuer.prove(response, request.nonce)

    async def KeepServerMembership(
        self, request: coordinator_pb2.KeepServerMembershipRequest, call: Call
    ) -> AsyncIterator[coordinator_pb2.KeepServerMembershipResponse]:
        leases = self._coordinator.server_leases
        calls = request.calls if request.HasField("calls") else None
        async with aclosing(leases.keep_membership(request.server_id, request.epoch, calls)) as stream:
            async for response in stream:
                yield response

    async def DeregisterServer(
        self, request: coordinator_pb2.DeregisterServerRequest, call: Call
    ) -> coordinator_pb2.DeregisterServerResponse:
        await self._coordinator.server_leases.deregister(request.server_id, request.epoch)
        return coordinator_pb2.DeregisterServerResponse()

    # Trainers

    async def Join(self, request: coordinator_pb2.JoinRequest, call: Call) -> coordinator_pb2.JoinResponse:
        wait_s = _wait_s(call, request.wait_s)
        version = negotiate(request.protocol, f"trainer {request.trainer!r}")
        settings = RunSettings.from_proto(request.config, world_size=request.world_size)
        applicant = _applicant(request, settings.world)
        if request.run_id:
            self._state.require_run(request.run, request.run_id)
        token_run_id = call.caller.run_id if call.caller is not None else ""
        run = await self._coordinator.restorer.find_or_create_run(request, settings, token_run_id)
        self._coordinator.checkpoints.check_directory(run)
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
        )
        if not started:
            if run.started and run.is_waiting_spare(member.name):
                response.waiting_for.append(f"all ranks have trainers: {member} is a spare until a rank is free")
            elif run.started and (missing := run.missing_peers(member.name)):
                names = ", ".join(f"trainer {name!r}" for name in missing)
                response.waiting_for.append(
                    f"{member} cannot start before its replica is complete: it waits for {names}"
                )
            response.waiting_for.extend(explain_stall(run, self._state.cluster, self._state.clock()).lines)
            return response
        describer = describe.RankDescriber(run.settings.world)
        response.rank_assignments.extend(map(describer.describe, run.ranks_of(member.name)))
        response.replica_epoch = run.replica_epoch_of(member.name)
        response.work.CopyFrom(run.work.assigned_to(member.name))
        self._issuer.prove_leases(run, response.work.items)
        if run.commits.state is not None:
            response.state.CopyFrom(run.commits.state)
        if (checkpoint := run.checkpoints.saved_at(run.committed_step)) is not None:
            response.checkpoint_url = checkpoint.url
        return response

    async def Heartbeat(
        self, request: coordinator_pb2.HeartbeatRequest, call: Call
    ) -> coordinator_pb2.HeartbeatResponse:
        run, transports = self._exact_run(request), TransportReport.from_proto(request.transports)
        member = self._coordinator.trainers.require_member(run, request.trainer, request.epoch)
        with member.serving_rpc(self._state.clock):
            member.note_connections(transports, request.unreachable, self._state.clock())
            if member.note_in_progress(_in_progress(request, self._state.clock())) and run.members.waiting_for_work:
                run.changed.notify()
            check_recoverable(run, self._state.cluster)
            return coordinator_pb2.HeartbeatResponse(
                committed_step=run.committed_step,
                placement=run.relocations.announced,
                residuals=run.wanted_residuals(member),
                token=self._issuer.renewed_token(run, member, call.caller),
            )

    async def KeepMembership(
        self, request: coordinator_pb2.KeepMembershipRequest, call: Call
    ) -> AsyncIterator[coordinator_pb2.KeepMembershipResponse]:
        run, trainers = self._exact_run(request), self._coordinator.trainers
        member = trainers.require_member(run, request.trainer, request.epoch)
        member.note_residuals(request.has_residuals)
        offer = None if self._calls is None else self._calls.offer
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
            trainers.leave(run, trainers.require_member(run, request.trainer, request.epoch))
            await self._state.save(run)
        return coordinator_pb2.LeaveResponse()

    async def DeclareUnit(
        self, request: coordinator_pb2.DeclareUnitRequest, call: Call
    ) -> coordinator_pb2.DeclareUnitResponse:
        layout = UnitLayout.from_proto(request.unit)
        run, member = self._member(request)
        with member.serving_rpc(self._state.clock):
            await self._coordinator.filler.check(run, layout)
            unit = await self._coordinator.placer.declare(run, layout, _wait_s(call, _DECLARE_WAIT_S))
            if not unit.published and run.filled_from is not None:
                await self._coordinator.filler.fill(run, unit, _wait_s(call, _FILL_WAIT_S))
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

    async def ExchangeAddress(
        self, request: coordinator_pb2.ExchangeAddressRequest, call: Call
    ) -> coordinator_pb2.ExchangeAddressResponse:
        check_name("name", request.name)
        run, member = self._member(request)
        if request.HasField("address"):
            check_name("address", request.address)
            run.set_address(request.name, request.address)

        async def check() -> str | None:
            run.require_member(member.name, member.epoch)
            return run.addresses.get(request.name)

        with member.serving_rpc(self._state.clock):
            address = await poll(run.changed, check, _wait_s(call, request.wait_s))
            await self._state.save(run)
        return coordinator_pb2.ExchangeAddressResponse(address=address)

    async def DeclareParallelPlan(
        self, request: coordinator_pb2.DeclareParallelPlanRequest, call: Call
    ) -> coordinator_pb2.DeclareParallelPlanResponse:
        check_plan(request.plan)
        run, member = self._member(request)
        with member.serving_rpc(self._state.clock):
            run.declare_parallel_plan(member.name, request.plan)
            await self._state.save(run)  # before any trainer trains by it
        return coordinator_pb2.DeclareParallelPlanResponse()

    # Replica stores

    async def StoreSet(self, request: coordinator_pb2.StoreSetRequest, call: Call) -> coordinator_pb2.StoreSetResponse:
        store = self._store(request)
        if not request.HasField("expected"):
            store.set(request.key, request.value)
            return coordinator_pb2.StoreSetResponse()
        value = store.compare_set(request.key, request.expected, request.value)
        return coordinator_pb2.StoreSetResponse(value=value)

    async def StoreGet(self, request: coordinator_pb2.StoreGetRequest, call: Call) -> coordinator_pb2.StoreGetResponse:
        wait_s = _wait_s(call, request.wait_s)
        if request.rendezvous:
            store = self._torchrun_stores.open(request.rendezvous)
            return _found(await store.wait(request.keys, wait_s), store, request.keys)
        run, member = self._member(request)
        with member.serving_rpc(self._state.clock):
            values = await wait_for_keys(run, member, request.replica_epoch, request.keys, wait_s)
        return _found(values, find_store(run, member, request.replica_epoch), request.keys)

    async def StoreAdd(self, request: coordinator_pb2.StoreAddRequest, call: Call) -> coordinator_pb2.StoreAddResponse:
        total = self._store(request).add(request.key, request.amount, request.context.request_id)
        return coordinator_pb2.StoreAddResponse(value=total)

    async def StoreCheck(
        self, request: coordinator_pb2.StoreCheckRequest, call: Call
    ) -> coordinator_pb2.StoreCheckResponse:
        store = self._store(request, find_store)
        missing = store.missing(request.keys)[:_MAX_MISSING_KEYS]
        return coordinator_pb2.StoreCheckResponse(missing=missing, key_count=len(store))

    async def StoreDelete(
        self, request: coordinator_pb2.StoreDeleteRequest, call: Call
    ) -> coordinator_pb2.StoreDeleteResponse:
        deleted = self._store(request).delete(request.key, request.context.request_id)
        return coordinator_pb2.StoreDeleteResponse(deleted=deleted)

    def _store(self, request: Any, find: Callable[[Run, Member, int], ReplicaStore] = open_store) -> ReplicaStore:
        """Returns the store that a request uses: of a rendezvous of torchrun, or of a trainer's replica."""
        if request.rendezvous:
            return self._torchrun_stores.open(request.rendezvous)
        run, member = self._member(request)
        return find(run, member, request.replica_epoch)

    # Steps

    async def ResetWork(
        self, request: coordinator_pb2.ResetWorkRequest, call: Call
    ) -> coordinator_pb2.ResetWorkResponse:
        run, member = self._member(request, membership_epoch=False)
        with member.serving_rpc(self._state.clock):
            response = await self._coordinator.step_requests.reset_work(
                run, member, request, _wait_s(call, request.wait_s)
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
            response = await self._coordinator.step_requests.finish_work(
                run,
                member,
                request.context.step,
                request.items,
                accept_work=request.accept_work,
                accept_copies=request.accept_copies and request.accept_work,
                wait_s=_wait_s(call, request.wait_s),
            )
        self._issuer.prove_leases(run, response.work.items)
        return response

    async def PrepareGradients(
        self, request: coordinator_pb2.PrepareGradientsRequest, call: Call
    ) -> coordinator_pb2.PrepareGradientsResponse:
        run, member = self._member(request)
        with member.serving_rpc(self._state.clock):
            return await self._coordinator.step_requests.prepare_gradients(
                run,
                member,
                request.context.step,
                _item_name(run, request),
                norm_type=_norm_type(request.norm_type),
                wait_s=_wait_s(call, request.wait_s),
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
            response = await self._coordinator.step_requests.commit_step(
                run,
                member,
                request.context.step,
                proposal,
                _wait_s(call, request.wait_s),
                request.staged_partitions,
                _item_name(run, request),
            )
        self._issuer.prove_leases(run, response.next_work.items)
        self._issuer.prove_leases(run, response.partitions)
        return response

    # Inspection and administration

    async def DeleteRun(
        self, request: coordinator_pb2.DeleteRunRequest, call: Call
    ) -> coordinator_pb2.DeleteRunResponse:
        repeated = self._requests.check(request.request_id, _fingerprint(request))
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

        ended = await poll(run.changed, check, _wait_s(call, request.wait_s))
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
        return await describe.describe_weights(run, self._state.cluster, wanted, _wait_s(call, request.wait_s))

    async def ListServers(
        self, request: coordinator_pb2.ListServersRequest, call: Call
    ) -> coordinator_pb2.ListServersResponse:
        response = describe.list_servers(self._state.cluster, self._state.runs.values(), self._state.clock())
        response.coordinator_insecure = self._state.settings.insecure
        return response

    async def ForgetServer(
        self, request: coordinator_pb2.ForgetServerRequest, call: Call
    ) -> coordinator_pb2.ForgetServerResponse:
        await self._coordinator.server_leases.forget(request.server_id)
        return coordinator_pb2.ForgetServerResponse()

    async def SetBackups(
        self, request: coordinator_pb2.SetBackupsRequest, call: Call
    ) -> coordinator_pb2.SetBackupsResponse:
        run = self._state.require_run(request.run)
        check_backups(request.backups)
        self._coordinator.backups.set_count(run, request.backups)
        await self._state.save(run)
        return coordinator_pb2.SetBackupsResponse()

    async def DrainServer(
        self, request: coordinator_pb2.DrainServerRequest, call: Call
    ) -> coordinator_pb2.DrainServerResponse:
        return await self._coordinator.drains.drain(request.server_id, epoch=request.epoch, cancel=request.cancel)

    async def RebalanceRun(
        self, request: coordinator_pb2.RebalanceRunRequest, call: Call
    ) -> coordinator_pb2.RebalanceRunResponse:
        run = self._state.require_run(request.run)
        return await self._coordinator.drains.rebalance(run, report_only=request.report_only)

    async def VerifyRun(
        self, request: coordinator_pb2.VerifyRunRequest, call: Call
    ) -> coordinator_pb2.VerifyRunResponse:
        return await self._coordinator.verifier.verify(self._state.require_run(request.run))

    async def ExplainStall(
        self, request: coordinator_pb2.ExplainStallRequest, call: Call
    ) -> coordinator_pb2.ExplainStallResponse:
        run = self._state.require_run(request.run)
        stall = explain_stall(run, self._state.cluster, self._state.clock())
        return coordinator_pb2.ExplainStallResponse(
            step=run.committed_step, phase=stall.phase, phase_s=round(stall.phase_s, 3), waiting_for=stall.lines
        )

    async def WatchEvents(
        self, request: coordinator_pb2.WatchEventsRequest, call: Call
    ) -> AsyncIterator[coordinator_pb2.WatchEventsResponse]:
        _check_seconds("duration_s", request.duration_s)
        async for event in self._state.events.watch(request.run, request.duration_s or None):
            yield event

    def _exact_run(self, request: Any) -> Run:
        """Returns the run that a request names by name and id. A later run of the same name has another id."""
        if not request.run_id:
            raise InvalidRequestError(f"run_id is empty: send the id of run {request.run!r} that Join returned")
        return self._state.require_run(request.run, request.run_id)

    def _member(self, request: Any, *, membership_epoch: bool = True) -> tuple[Run, Member]:
        """Returns the run and the live trainer that sent a request.

        Args:
            request: A request with a context and a trainer.
            membership_epoch: True if the context's epoch is that of the membership. Otherwise the caller checks it.
        """
        context = request.context
        run = self._exact_run(context)
        known = run.members.by_name.get(request.trainer)
        epoch = context.epoch if membership_epoch or known is None else known.epoch
        member = self._coordinator.trainers.require_member(run, request.trainer, epoch)
        # After the membership check, so that stale trainers cannot fill the log of request ids.
        self._requests.check(context.request_id, _fingerprint(request))
        return run, member


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
    _check_seconds("item_in_progress.for_s", item.for_s)
    return ItemInProgress(item.step, item.global_rank, now - item.for_s)


def _item_name(
    run: Run, request: coordinator_pb2.PrepareGradientsRequest | coordinator_pb2.CommitStepRequest
) -> coordinator_pb2.ItemName | None:
    """Returns the caller's item in an asynchronous run. None: it is not named, or the run is synchronous."""
    return request.item if run.asynchronous and request.HasField("item") else None


def _check_seconds(what: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise InvalidRequestError(f"{what} is {value}: expected a finite number of at least 0")


def _norm_type(value: float) -> float:
    if not value >= 0:
        raise InvalidRequestError(f"norm_type is {value}: expected a number above 0, infinity, or 0 for none")
    return value


def _wait_s(call: Call, wanted_s: float) -> float:
    """Returns how long an rpc may wait: ``wanted_s``, but at most its deadline and ``MAX_WAIT_S``."""
    _check_seconds("wait_s", wanted_s)
    return min(call.remaining_s(wanted_s), MAX_WAIT_S)


def _found(values: list[bytes] | None, store: ReplicaStore, keys: Sequence[str]) -> coordinator_pb2.StoreGetResponse:
    if values is not None:
        return coordinator_pb2.StoreGetResponse(found=True, values=values)
    return coordinator_pb2.StoreGetResponse(missing=store.missing(keys)[:_MAX_MISSING_KEYS])


def _fingerprint(request: Message) -> bytes:
    """Returns a digest that is equal for retries of a request, even if ``wait_s`` differs."""
    bare = type(request)()
    bare.CopyFrom(request)
    if "wait_s" in request.DESCRIPTOR.fields_by_name:
        bare.ClearField("wait_s")
    name = request.DESCRIPTOR.full_name.encode()
    return blake2b(name + bare.SerializeToString(deterministic=True), digest_size=16).digest()
