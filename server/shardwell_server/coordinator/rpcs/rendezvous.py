"""Rpcs with which trainers find each other: exchanged addresses and key-value stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwell_server.coordinator.ranks.members import Member
from shardwell_server.coordinator.ranks.replica_stores import ReplicaStore
from shardwell_server.coordinator.rendezvous import find_store, open_store, wait_for_keys
from shardwell_server.coordinator.rpcs.base import CoordinatorRpcs, wait_limit
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.settings import poll
from shardwell_server.serving.rpc import Call, check_request_id
from shardwell_wire.model.names import check_name
from shardwell_wire.v1 import coordinator_pb2

_MAX_MISSING_KEYS = 64


class RendezvousRpcs(CoordinatorRpcs):
    """Rpcs with which trainers find each other."""

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
            address = await poll(run.changed, check, wait_limit(call, request.wait_s))
            await self._state.save(run)
        return coordinator_pb2.ExchangeAddressResponse(address=address)

    async def StoreSet(self, request: coordinator_pb2.StoreSetRequest, call: Call) -> coordinator_pb2.StoreSetResponse:
        store, request_id = self._store(request), request.context.request_id
        if not request.HasField("expected"):
            store.set(request.key, request.value, request_id)
            return coordinator_pb2.StoreSetResponse()
        value = store.compare_set(request.key, request.expected, request.value, request_id)
        return coordinator_pb2.StoreSetResponse(value=value)

    async def StoreGet(self, request: coordinator_pb2.StoreGetRequest, call: Call) -> coordinator_pb2.StoreGetResponse:
        wait_s = wait_limit(call, request.wait_s)
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
            check_request_id(request.context.request_id)  # the store keeps it
            return self._torchrun_stores.open(request.rendezvous)
        run, member = self._member(request)
        return find(run, member, request.replica_epoch)


def _found(values: list[bytes] | None, store: ReplicaStore, keys: Sequence[str]) -> coordinator_pb2.StoreGetResponse:
    if values is not None:
        return coordinator_pb2.StoreGetResponse(found=True, values=values)
    return coordinator_pb2.StoreGetResponse(missing=store.missing(keys)[:_MAX_MISSING_KEYS])
