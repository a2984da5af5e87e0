"""The rpcs of the stores in which the trainers of a replica meet. See ``runs/replica_stores.py``.

Note: [Lost replica stores]
    Stores are not durable. After a coordinator restart, the store of every replica epoch is lost, and a trainer that
    waits for a key would wait without end. Trainers with a complete process group do not need their store. The epoch
    is therefore renewed when a trainer of the replica uses the store. All of them then form their group again.
    ``StoreCheck`` does not count as a use, because NCCL calls it from time to time.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwell_server.coordinator.runs.members import Member
from shardwell_server.coordinator.runs.replica_stores import ReplicaStore
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.waiting import poll
from shardwell_wire.errors import InvalidRequestError, StaleEpochError


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
