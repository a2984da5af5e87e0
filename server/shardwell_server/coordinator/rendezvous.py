"""The rpcs of the stores in which the trainers of a replica meet. See ``runs/replica_stores.py``."""

from __future__ import annotations

from collections.abc import Sequence

from shardwell_server.coordinator.runs.members import Member
from shardwell_server.coordinator.runs.replica_stores import ReplicaStore
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.waiting import poll
from shardwell_wire.errors import InvalidRequestError, StaleEpochError


def open_store(run: Run, member: Member, replica_epoch: int) -> ReplicaStore:
    """Returns the store of a trainer's replica.

    Raises:
        StaleEpochError: The trainers of the replica have changed since, so this epoch's store is void.
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
            f"the replica of trainer {member.name!r} now has epoch {current}, not {replica_epoch}: a trainer of it was "
            "lost or replaced. Form its process group again",
            run=run.name,
            trainer=member.name,
            epoch=current,
        )
    return run.replica_stores.open(current)


async def wait_for_keys(
    run: Run, member: Member, replica_epoch: int, keys: Sequence[str], wait_s: float
) -> list[bytes] | None:
    """Waits until all keys have values, and returns them. None: a key has none after ``wait_s``.

    Raises:
        StaleEpochError: The trainers of the replica have changed, also while the request waits.
    """

    async def check() -> list[bytes] | None:
        return open_store(run, member, replica_epoch).get(keys)

    return await poll(open_store(run, member, replica_epoch).changed, check, wait_s)
