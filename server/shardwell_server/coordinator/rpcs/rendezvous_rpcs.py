"""Rpcs with which trainers find each other: exchanged addresses and key-value stores.

Note: [Lost replica stores]
    Stores are not durable. After a coordinator restart, the store of every replica epoch is lost, and a trainer that
    waits for a key would wait without end. Trainers with a complete process group do not need their store. The epoch
    is therefore renewed when a trainer of the replica uses the store. All of them then form their group again.
    ``StoreCheck`` does not count as a use, because NCCL calls it from time to time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from shardwell_server.coordinator.ranks.members import Member
from shardwell_server.coordinator.rendezvous import KeyValueStore
from shardwell_server.coordinator.rpcs.coordinator_rpcs import CoordinatorRpcs, wait_limit
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.signals import poll
from shardwell_server.serving.rpc import Call, check_request_id
from shardwell_wire.errors import ConflictError, InvalidRequestError, StaleEpochError
from shardwell_wire.model.names import check_name
from shardwell_wire.v1 import coordinator_pb2

MAX_ADDRESSES = 1024
"""Most addresses that the trainers of one run may exchange."""

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
            if len(run.addresses) >= MAX_ADDRESSES and request.name not in run.addresses:
                raise InvalidRequestError(f"run {run.name!r} already has {MAX_ADDRESSES} addresses: use fewer names")
            if run.addresses.get(request.name) != request.address:
                run.addresses[request.name] = request.address
                run.changes.touch()
                run.changed.notify()

        async def check() -> str | None:
            run.require_member(member.name, member.epoch)
            return run.addresses.get(request.name)

        with member.serving_rpc(self._state.clock):
            address = await poll(run.changed, check, wait_limit(call, request.wait_s))
            await self._state.save(run)
        return coordinator_pb2.ExchangeAddressResponse(address=address)

    async def FindRelay(
        self, request: coordinator_pb2.FindRelayRequest, call: Call
    ) -> coordinator_pb2.FindRelayResponse:
        run, member = self._member(request)
        used = Counter(each.relay for each in run.members.live.values())
        relay = self._state.cluster.relay_for(member.host, member.process, refused=set(request.refused), used=used)
        member.relay = "" if relay is None else relay.server_id
        if relay is None:
            return coordinator_pb2.FindRelayResponse()
        return coordinator_pb2.FindRelayResponse(
            server_id=relay.server_id, address=relay.address, incarnation=relay.incarnation
        )

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
            store = self._torchrun_store(request.rendezvous)
            return _found(await store.wait(request.keys, wait_s), store, request.keys)
        run, member = self._member(request)

        async def check() -> list[bytes] | None:  # the replica may have another epoch since the request waits
            return _replica_store(run, member, request.replica_epoch, is_used=True).get(request.keys)

        with member.serving_rpc(self._state.clock):
            store = _replica_store(run, member, request.replica_epoch, is_used=True)
            values = await poll(store.changed, check, wait_s)
        return _found(values, _replica_store(run, member, request.replica_epoch), request.keys)

    async def StoreAdd(self, request: coordinator_pb2.StoreAddRequest, call: Call) -> coordinator_pb2.StoreAddResponse:
        total = self._store(request).add(request.key, request.amount, request.context.request_id)
        return coordinator_pb2.StoreAddResponse(value=total)

    async def StoreCheck(
        self, request: coordinator_pb2.StoreCheckRequest, call: Call
    ) -> coordinator_pb2.StoreCheckResponse:
        store = self._store(request, is_used=False)
        missing = store.missing(request.keys)[:_MAX_MISSING_KEYS]
        return coordinator_pb2.StoreCheckResponse(missing=missing, key_count=len(store))

    async def StoreDelete(
        self, request: coordinator_pb2.StoreDeleteRequest, call: Call
    ) -> coordinator_pb2.StoreDeleteResponse:
        deleted = self._store(request).delete(request.key, request.context.request_id)
        return coordinator_pb2.StoreDeleteResponse(deleted=deleted)

    def _store(self, request: Any, *, is_used: bool = True) -> KeyValueStore:
        """Returns the store that a request uses: of a rendezvous of torchrun, or of a trainer's replica."""
        if request.rendezvous:
            check_request_id(request.context.request_id)  # the store keeps it
            return self._torchrun_store(request.rendezvous)
        run, member = self._member(request)
        return _replica_store(run, member, request.replica_epoch, is_used=is_used)

    def _torchrun_store(self, rendezvous: str) -> KeyValueStore:
        """Returns the store of a rendezvous of torchrun.

        Raises:
            InvalidRequestError: The name is invalid.
            ConflictError: The cluster has no token. torchrun's agents unpickle what they read from the store, so a
                client without a token could run code in them.
            CapacityError: There are too many stores.
        """
        check_name("rendezvous", rendezvous)
        if self._issuer.key is None:
            raise ConflictError(
                f"rendezvous {rendezvous!r}: torchrun's agents unpickle what they read from this store, and this "
                "cluster has no token, so any client could run code in them: start the coordinator and the shard "
                "servers with --token-file"
            )
        return self._torchrun_stores.open(rendezvous)


def _replica_store(run: Run, member: Member, replica_epoch: int, *, is_used: bool = False) -> KeyValueStore:
    """Returns the store of a trainer's replica, also if its values were lost in a coordinator restart.

    Args:
        replica_epoch: The epoch that the trainer knows.
        is_used: True if the trainer exchanges something with the others. A lost store then renews the replica's epoch.
            See Note: [Lost replica stores].

    Raises:
        StaleEpochError: The replica has another epoch now, so this epoch's store is void.
        InvalidRequestError: The trainer is in no replica of several trainers.
    """
    run.require_member(member.name, member.epoch)
    if (
        is_used
        and replica_epoch == run.owners.replica_epoch_of(member.name)
        and replica_epoch in run.owners.stores.lost
    ):
        run.owners.renew_replicas({member.name})
    current = run.owners.replica_epoch_of(member.name)
    if not current:
        raise InvalidRequestError(
            f"trainer {member.name!r} of run {run.name!r} has no replica store: only owners of ranks of a world with "
            f"cp * tp * pp above 1 have one, and the run has {run.settings.world}"
        )
    if replica_epoch != current:
        raise StaleEpochError(
            f"epoch {replica_epoch} of the replica of trainer {member.name!r} has ended: a trainer of it was lost or "
            "replaced, or the coordinator restarted before all had met. Form its process group again",
            run=run.name,
            trainer=member.name,
        )
    return run.owners.stores.open(current)


def _found(values: list[bytes] | None, store: KeyValueStore, keys: Sequence[str]) -> coordinator_pb2.StoreGetResponse:
    if values is not None:
        return coordinator_pb2.StoreGetResponse(found=True, values=values)
    return coordinator_pb2.StoreGetResponse(missing=store.missing(keys)[:_MAX_MISSING_KEYS])
