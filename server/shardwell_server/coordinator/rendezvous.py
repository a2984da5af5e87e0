"""The rpcs of the stores in which the trainers of a replica meet. See ``ranks/replica_stores.py``.

Note: [Lost replica stores]
    Stores are not durable. After a coordinator restart, the store of every replica epoch is lost, and a trainer that
    waits for a key would wait without end. Trainers with a complete process group do not need their store. The epoch
    is therefore renewed when a trainer of the replica uses the store. All of them then form their group again.
    ``StoreCheck`` does not count as a use, because NCCL calls it from time to time.

Key-value stores in which the agents of torchrun meet, one per rendezvous. See ``docs/running.md``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shardwell_server.coordinator.ranks.members import Member
from shardwell_server.coordinator.ranks.replica_stores import ReplicaStore
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.settings import poll
from shardwell_wire.errors import CapacityError, ConflictError, InvalidRequestError, StaleEpochError
from shardwell_wire.model.names import check_name


def open_store(run: Run, member: Member, replica_epoch: int) -> ReplicaStore:
    """Returns the store of a trainer's replica, for a trainer that exchanges something with the others.

    Renews the replica's epoch if the store is lost. See Note: [Lost replica stores].

    Raises as ``find_store``.
    """
    run.require_member(member.name, member.epoch)
    if replica_epoch == run.replica_epoch_of(member.name) and run.replica_stores.is_lost(replica_epoch):
        run.renew_replica(member.name)
    return find_store(run, member, replica_epoch)


def find_store(run: Run, member: Member, replica_epoch: int) -> ReplicaStore:
    """Returns the store of a trainer's replica, also if its values were lost in a coordinator restart.

    Raises:
        StaleEpochError: The replica has another epoch now, so this epoch's store is void.
        InvalidRequestError: The trainer is in no replica of several trainers.
    """
    run.require_member(member.name, member.epoch)
    current = run.replica_epoch_of(member.name)
    if not current:
        raise InvalidRequestError(
            f"trainer {member.name!r} of run {run.name!r} has no replica store: only owners of ranks of a world with "
            f"tp * pp above 1 have one, and the run has {run.settings.world}"
        )
    if replica_epoch != current:
        raise StaleEpochError(
            f"epoch {replica_epoch} of the replica of trainer {member.name!r} has ended: a trainer of it was lost or "
            "replaced, or the coordinator restarted before all had met. Form its process group again",
            run=run.name,
            trainer=member.name,
        )
    return run.replica_stores.open(current)


async def wait_for_keys(
    run: Run, member: Member, replica_epoch: int, keys: Sequence[str], wait_s: float
) -> list[bytes] | None:
    """Waits until all keys have values, and returns them. None: a key has none after ``wait_s``.

    Raises:
        StaleEpochError: The replica has another epoch. It may have changed while the request waited.
    """

    async def check() -> list[bytes] | None:
        return open_store(run, member, replica_epoch).get(keys)

    return await poll(open_store(run, member, replica_epoch).changed, check, wait_s)


MAX_STORES = 1024
MAX_STORE_KEYS = 4096
MAX_STORE_BYTES = 1 << 20
"""Largest size of one store. The state of a rendezvous has some hundred bytes per agent."""

IDLE_S = 600.0
"""Seconds without a request after which a store ends. The agents of a rendezvous write every few seconds."""


class TorchrunStores:
    """The stores of all rendezvous. They are kept in memory only.

    Args:
        is_protected: True if every rpc needs a token.
        clock: Returns monotonic seconds.
    """

    def __init__(self, *, is_protected: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_protected, self._clock = is_protected, clock
        self._stores: dict[str, ReplicaStore] = {}
        self._used: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._stores)

    def open(self, rendezvous: str) -> ReplicaStore:
        """Returns the store of a rendezvous, and removes stores that are not in use any more.

        Raises:
            InvalidRequestError: The name is invalid.
            ConflictError: The cluster has no token. torchrun's agents unpickle what they read from the store, so a
                client without a token could run code in them.
            CapacityError: There are too many stores.
        """
        check_name("rendezvous", rendezvous)
        if not self._is_protected:
            raise ConflictError(
                f"rendezvous {rendezvous!r}: torchrun's agents unpickle what they read from this store, and this "
                "cluster has no token, so any client could run code in them: start the coordinator and the shard "
                "servers with --token-file"
            )
        now = self._clock()
        for name in [name for name, used in self._used.items() if used < now - IDLE_S]:
            del self._stores[name], self._used[name]
        if rendezvous not in self._stores and len(self._stores) >= MAX_STORES:
            raise CapacityError(
                f"rendezvous {rendezvous!r}: the coordinator has {len(self._stores)} stores of torchrun already, as "
                f"many as it may have; a store ends {IDLE_S:g} s after its last use"
            )
        self._used[rendezvous] = now
        return self._stores.setdefault(rendezvous, ReplicaStore(max_keys=MAX_STORE_KEYS, max_bytes=MAX_STORE_BYTES))
