"""Servicer of ``CoordinatorService``: the rpcs of shard servers, and those of the other files of this folder.

Shard servers register, send heartbeats, and keep a stream open that shows that they live.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from shardwell_server.coordinator.rpcs.operators import AdministrationRpcs, InspectionRpcs
from shardwell_server.coordinator.rpcs.rendezvous_rpcs import RendezvousRpcs
from shardwell_server.coordinator.rpcs.step_rpcs import StepRpcs
from shardwell_server.coordinator.rpcs.trainer_rpcs import DeclarationRpcs, TrainerRpcs
from shardwell_server.serving.rpc import Call
from shardwell_wire.connection.protocol_versions import negotiate
from shardwell_wire.v1 import coordinator_pb2


class CoordinatorServicer(TrainerRpcs, DeclarationRpcs, RendezvousRpcs, StepRpcs, AdministrationRpcs, InspectionRpcs):
    """Serves the rpcs of the coordinator. Arguments as those of ``CoordinatorRpcs``."""

    def run_id_of(self, name: str) -> str:
        """Returns the id of the run that has a name now. Empty: there is none."""
        run = self._state.runs.get(name)
        return "" if run is None else run.identity.run_id

    async def RegisterServer(
        self, request: coordinator_pb2.RegisterServerRequest, call: Call
    ) -> coordinator_pb2.RegisterServerResponse:
        version = negotiate(request.protocol, f"shard server {request.server_id!r}")
        leases, relocator = self._coordinator.server_leases, self._coordinator.relocator
        # The process drops copies that other servers replace, so these servers must prove first that they live.
        await leases.prove_alive(relocator.replacing(request.server_id, request.held))
        epoch = await leases.register(
            request.server_id,
            request.address,
            request.incarnation,
            request.budget_bytes,
            request.process,
            restartable=request.restartable,
            holds_shards=bool(request.held),
            relay=request,
        )
        self._state.cluster.require(request.server_id).note_process(request)
        adopted = await relocator.adopt(request.server_id, request.incarnation, request.held)
        response = coordinator_pb2.RegisterServerResponse(
            epoch=epoch,
            lease_s=self._state.settings.lease_s,
            coordinator_epoch=self._state.term,
            adopted=adopted,
            protocol_version=version,
            retired_shards=await self._coordinator.promoter.named(request.server_id, request.incarnation),
        )
        return self._issuer.prove(response, request.nonce)

    async def HeartbeatServer(
        self, request: coordinator_pb2.HeartbeatServerRequest, call: Call
    ) -> coordinator_pb2.HeartbeatServerResponse:
        negotiate(request.protocol, f"shard server {request.server_id!r}")
        self._coordinator.server_leases.heartbeat(request)
        server = self._state.cluster.require(request.server_id)
        server.note_process(request)
        incarnation = server.incarnation
        response = coordinator_pb2.HeartbeatServerResponse(
            retired_shards=await self._coordinator.promoter.named(request.server_id, incarnation),
            coordinator_epoch=self._state.term,
            deleted_run_ids=self._coordinator.deleted_run_ids(request.run_ids),
            unreachable_because="" if server.reached else server.unreachable_because,
        )
        return self._issuer.prove(response, request.nonce)

    async def KeepServerMembership(
        self, request: coordinator_pb2.KeepServerMembershipRequest, call: Call
    ) -> AsyncIterator[coordinator_pb2.KeepServerMembershipResponse]:
        leases = self._coordinator.server_leases
        async with aclosing(leases.keep_membership(request)) as stream:
            async for response in stream:
                yield response

    async def DeregisterServer(
        self, request: coordinator_pb2.DeregisterServerRequest, call: Call
    ) -> coordinator_pb2.DeregisterServerResponse:
        leases = self._coordinator.server_leases
        await leases.deregister(request.server_id, request.epoch, keeps_copies=request.keeps_copies)
        return coordinator_pb2.DeregisterServerResponse()
