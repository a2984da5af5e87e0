"""All runs and shards that a shard server holds within its memory budget, and the lease under which it serves them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from shardwell_server.serving.rpc import RequestLog
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.restart.shard_files import ShardFiles
from shardwell_server.shard.restart.undo import UndoLog
from shardwell_server.shard.shard_spec import Role, ShardSpec
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.taking_up import ShardsOfFormer
from shardwell_server.shard.unit.unit_shard import UnitShard, new_shard
from shardwell_wire.errors import (
    InvalidRequestError,
    NotFoundError,
    RunDeletedError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
    UnitMismatchError,
)
from shardwell_wire.model.layout import BLOCK_BYTES
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.model.topology import MAX_WORLD_SIZE, check_data_ranks
from shardwell_wire.security.tokens import ClusterKey
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

logger = logging.getLogger(__name__)

_REMEMBERED_IDS = 1024
"""Number of deleted runs whose ids are remembered. Requests for these runs get a precise error and reserve nothing."""


@dataclass(slots=True)
class Traffic:
    """Bytes that a server has exchanged with trainers and readers."""

    gathered_bytes: int = 0
    """Weights that were sent over connections."""
    streamed_bytes: int = 0
    """Gradients that were accepted over connections."""
    adopted_bytes: int = 0
    """Gradients that were accepted in shared memory."""


class NamesRun(Protocol):
    """A message that names a run."""

    @property
    def run(self) -> str:
        """Name of the run."""
        ...

    @property
    def run_id(self) -> str:
        """Id of the run. Empty: not given."""
        ...


class ShardStore:
    """The state of a shard server. Used on one event loop; tensor work runs in ``threads``.

    Args:
        budget_bytes: Memory budget for all runs.
        shared: Shared memory for parameters, if trainers on this host may map them.
        key: Key of the cluster, with which the proofs of leases are checked. None: no proofs are needed.
    """

    def __init__(
        self,
        budget_bytes: int,
        threads: ThreadPoolExecutor,
        shared: SharedMemory | None = None,
        key: ClusterKey | None = None,
    ) -> None:
        self._key = key
        self.memory = Memory(budget_bytes, threads, shared)
        self.memory.unreserved.evict = lambda: self._release(UnitShard.evict)
        self.memory.unreserved.discard = lambda: self._release(lambda shard: shard.changes.discard())
        self.runs: dict[str, HostedRun] = {}
        """By run id. A run that was recreated under the name of a deleted run has another id."""
        self.of_former: ShardsOfFormer | None = None
        """Shards of a former process of this server. None: shards end with their process."""
        self._dropped: deque[str] = deque(maxlen=_REMEMBERED_IDS)
        self.lease = ServingLease(lambda: asyncio.get_running_loop().time())
        """Under which the server serves trainers."""
        self._lasting = shared if shared is not None and shared.restartable else None
        """Shared memory from which the next process can take up shards. None: there is none."""
        if self._lasting is not None:
            self.of_former = ShardsOfFormer(self._lasting, self.memory, self.runs)
        self.when_reduced: Callable[[HostedRun, UnitShard], None] = _ignore
        """Called when the mean gradient of a shard has been computed before the step is prepared."""
        self.requests = RequestLog()
        self.traffic = Traffic()
        self.replicated_bytes = 0
        """Bytes of copies of shards, and of steps, that backups have got: as streams, or from shared memory."""

    def run(self, name: str, run_id: str = "") -> HostedRun:
        """Returns the run with this name, and with this id if one is given.

        Raises:
            NotFoundError: This server holds nothing of the run.
            RunDeletedError: The run with this id was deleted.
            UnavailableError: This server has not registered yet, and holds nothing of the run.
        """
        exact = self.runs.get(run_id)
        if exact is not None and exact.name == name:
            return exact
        named = [run for run in self.runs.values() if run.name == name]
        if named and not run_id:
            return named[-1]  # older runs of the name are only waiting to be dropped
        self._check_not_dropped(RunIdentity(name, run_id))
        self.lease.check_confirmed()  # the coordinator may still name this server, whose former process has ended
        if named:
            raise NotFoundError(
                f"this server does not hold run {name!r} with id {run_id}, but another run of this name with id "
                f"{named[-1].identity.run_id}: the run was deleted and recreated, or the server was restarted",
                run=name,
                run_id=run_id,
            )
        known = ", ".join(sorted({run.name for run in self.runs.values()})[:10])
        raise NotFoundError(f"this server does not hold run {name!r}; it holds {known or 'none'}", run=name)

    def exact_run(self, request: NamesRun) -> HostedRun:
        """Returns the run that a request names by name and id.

        Raises:
            InvalidRequestError: The name or the id is missing.
            NotFoundError: As ``run``.
        """
        return self.run(*_named_run(request))

    def check_lease(self, context: common_pb2.RequestContext, lease: int | str) -> None:
        """Raises AccessError unless the sender of a request proves that the context's epoch is that of its lease.

        Args:
            lease: The leased dp rank, or ``INITIALIZER``.
        """
        if self._key is not None:
            self._key.check_lease(context.run_id, lease, context.epoch, context.lease_proof)

    def check_summed(self, run_id: str, summed: shard_pb2.SummedRank) -> None:
        """Raises AccessError unless a push proves the lease on another rank whose gradient it contains."""
        if self._key is not None:
            self._key.check_lease(run_id, summed.dp_rank, summed.epoch, summed.lease_proof)

    def _check_not_dropped(self, identity: RunIdentity) -> None:
        if identity.run_id in self._dropped:
            successor = next((run for run in self.runs.values() if run.name == identity.name), None)
            another = f"; another run of this name has id {successor.identity.run_id}" if successor else ""
            raise RunDeletedError(
                f"run {identity.name!r} with id {identity.run_id} was deleted{another}",
                run=identity.name,
                run_id=identity.run_id,
            )

    # ---- reservations ----

    def reserve(self, spec: ShardSpec, role: Role = Role.PRIMARY) -> UnitShard:
        """Reserves memory for a shard. Idempotent.

        Shards of a unit may share the server if their ranges do not overlap: primaries of one placement, and backups of
        any placement. A primary replaces unpublished primaries of an earlier placement of the unit or of its index. A
        shard of either role replaces backups of an earlier placement in its range. A backup reserves as much memory as
        a primary, so that it can become one at any time.

        Raises:
            InvalidRequestError: The range is not a valid range of the unit.
            UnitMismatchError: The unit is reserved with another layout or range, or its index belongs to another unit.
            StaleEpochError: The placement was released.
            StepStateError: A step is prepared, and the new unit would miss it. Or a backup to be replaced is being
                updated or read.
            CapacityError: The shard does not fit the budget.
            RunDeletedError: The run was deleted.
        """
        identity = spec.run
        _check_reservation(spec)
        self._check_not_dropped(identity)
        run = self.runs.get(identity.run_id) or self._new_run(identity)
        run.check_placement(spec.unit, spec.placement)
        known = [shard for shard in run.shards.values() if spec.unit == shard.unit or spec.index == shard.index]
        replaced = []
        for shard in known:
            if shard.spec == spec and shard.role is role:
                return shard
            if spec.is_beside(shard.spec, any_placement=Role.BACKUP in (role, shard.role)):
                continue
            is_primary = shard.role is Role.PRIMARY
            if shard.placement >= spec.placement or (is_primary and (shard.version or role is Role.BACKUP)):
                raise UnitMismatchError(
                    f"this server holds {shard.what} as unit {shard.index}, range [{shard.start_bytes}, "
                    f"{shard.stop_bytes}) of {shard.layout.size_bytes} bytes, dp {shard.dp}; the request reserves unit "
                    f"{spec.unit!r} as unit {spec.index} with another layout, range, dp or reduction groups",
                    unit=spec.unit,
                )
            replaced.append(shard)
        if run.prepared is not None and role is Role.PRIMARY:
            raise StepStateError(
                f"unit {spec.unit!r} of run {run.name!r} cannot be reserved now: step {run.prepared.step} is about to "
                "be committed without it",
                unit=spec.unit,
            )
        for shard in replaced:
            if shard.unchanging.locked():  # a thread may use its memory
                raise StepStateError(f"{shard.what} is being updated or read: reserve it again later", unit=spec.unit)
        self._drop_copies(run, replaced, _unreserved)
        shard = self._new_shard(run, spec, role)
        self.runs.setdefault(identity.run_id, run)
        return shard

    def _new_shard(self, run: HostedRun, spec: ShardSpec, role: Role) -> UnitShard:
        """Reserves memory for a shard without content, and adds it to its run. Raises CapacityError."""
        files = None if self._lasting is None else ShardFiles(spec, self.memory, self._lasting, run.undo)
        shard = new_shard(spec, self.memory, role, files)
        if spec.asynchronous:
            run.read_by_rank()
        run.add_shard(shard)
        return shard

    def _new_run(self, identity: RunIdentity) -> HostedRun:
        return HostedRun(identity, UndoLog(self.memory, self._lasting))

    def adopt(self, adopted: Iterable[coordinator_pb2.HeldShard]) -> None:
        """Gives the shards of a former process their roles, and drops those that the coordinator did not adopt."""
        settled = {} if self.of_former is None else self.of_former.settle(adopted)
        for shard, role in settled.items():
            if role is not None:
                shard.take_role(role)
                continue
            logger.info("dropped %s at version %s, which this server does not own any more", shard.what, shard.version)
            self._drop_copies(self.runs[shard.run.run_id], [shard], _unreserved)
        for run_id in {shard.run.run_id for shard in settled}:
            run = self.runs[run_id]
            if run.shards:
                run.take_up_step()
            else:
                run.end()
                del self.runs[run_id]
        if self.memory.shared is not None:
            self.memory.shared.remove_saved()
        self.lease.confirm()

    @property
    def keeps_shards(self) -> bool:
        """True if the next process of this server can take up shards that are here."""
        return self.memory.shared is not None and self.memory.shared.keeps_shards

    def describe_ending(self) -> str:
        """Returns which shards end with this process, and why. Empty: none do."""
        shards = [shard for run in self.runs.values() for shard in run.shards.values() if shard.version is not None]
        ending = [shard for shard in shards if not (self.keeps_shards and shard.is_recorded)]
        if not ending:
            return ""
        if self.memory.shared is None:
            why = "the server offers no shared memory"
        elif not self.memory.shared.restartable:
            why = "a server without --id cannot be taken up"
        elif not self.keeps_shards:
            why = "the process that would start this server again has ended"
        else:
            why = "shared memory is full, or their optimizer or kept gradients are not recorded"
        return f"{len(ending)} of {len(shards)} shards end with this process, such as {ending[0].what}: {why}"

    async def finish_work(self) -> None:
        """Waits for the exclusive work in progress, and rejects further work, because the process ends."""
        await asyncio.gather(*(run.finish_work() for run in self.runs.values()))

    def release(self, request: NamesRun, unit: str, placement: int) -> None:
        """Releases the reservations of a unit's shards, except those with a higher placement number. Idempotent.

        Raises:
            StepStateError: A shard has been updated. Nothing is released.
        """
        run = self.runs.get(named_identity(request).run_id)
        if run is None:
            return
        run.note_released(unit, placement)
        released = [shard for shard in run.shards_of(unit) if shard.placement <= placement]
        if updated := [shard for shard in released if shard.version]:
            raise StepStateError(
                f"the reservation of {updated[0].what} cannot be released: it is at version {updated[0].version}",
                unit=unit,
            )
        self._drop_copies(run, released, _unreserved)

    def empty(self, run: HostedRun, shard: UnitShard) -> UnitShard:
        """Replaces a shard by one without content, under the same reservation, because it is filled anew."""
        why = f"{shard.what} is filled anew on this server"
        self._drop_copies(run, [shard], lambda shard: StaleEpochError(why, unit=shard.unit))
        return self._new_shard(run, shard.spec, shard.role)

    def retire(self, run_id: str, unit: str, start_bytes: int, placement: int) -> None:
        """Stops serving a shard that belongs to another server, at once. Its memory is released in the background.

        Unknown shards, and shards with a later reservation, are ignored.
        """
        run = self.runs.get(run_id)
        shard = None if run is None else run.shards.get((unit, start_bytes))
        if run is None or shard is None or shard.placement > placement or shard.role is Role.RETIRED:
            return
        shard.retire()

        async def release() -> None:
            if run.shards.get((unit, start_bytes)) is shard:
                self.release_shard(run, shard)

        run.schedule(release)

    def release_shard(self, run: HostedRun, shard: UnitShard) -> None:
        """Drops a shard of any role, because another server has it now or nobody needs it. Call within
        ``HostedRun.exclusively``."""
        run.note_released(shard.unit, shard.placement)
        self._drop_copies(run, [shard], _moved)

    def _drop_copies(
        self, run: HostedRun, shards: Iterable[UnitShard], why: Callable[[UnitShard], ShardwellError]
    ) -> int:
        """Drops copies of shards with their records and files; returns the bytes of the budget that became free.

        Every copy that a server drops is dropped here.

        Args:
            why: Returns the error that readers and senders of a copy get.
        """
        dropped = list(shards)
        for shard in dropped:
            run.remove_shard(shard, why(shard))
        return self.memory.release(shard.spec.memory_key for shard in dropped)

    async def begin_restore(self, request: NamesRun, restore: int, min_epoch: int) -> None:
        """Drops all shards of a run that is about to be loaded from a checkpoint. Idempotent.

        Args:
            request: Names the run, which this server need not know.
            restore: Number of the attempt.
            min_epoch: Older epochs of trainers are rejected from now on.

        Raises:
            StaleEpochError: A later attempt has begun.
            RunDeletedError: The run was deleted.
        """
        identity = named_identity(request)
        self._check_not_dropped(identity)
        run = self.runs.setdefault(identity.run_id, self._new_run(identity))
        async with run.exclusively():
            if restore < run.restore:
                raise StaleEpochError(
                    f"attempt {restore} to load run {run.name!r} is over: attempt {run.restore} has begun", run=run.name
                )
            if restore > run.restore:
                self._drop_copies(run, run.shards.values(), _unreserved)
                self.memory.pool.trim()
                run.begin_restore(restore, min_epoch)

    async def drop(self, run_id: str) -> int:
        """Drops a run permanently; returns the bytes of the budget that became free."""
        # First, so that no request creates the run again while this one waits for the lock.
        if run_id not in self._dropped:
            self._dropped.append(run_id)
        run = self.runs.get(run_id)
        if run is None:
            return 0
        try:
            async with run.exclusively():
                why = f"run {run.name!r} was deleted"
                freed = self._drop_copies(run, run.shards.values(), lambda _: RunDeletedError(why, run=run.name))
                run.end()
                del self.runs[run_id]
                self.memory.pool.trim()
                return freed
        except RunDeletedError:
            return 0  # a concurrent request dropped the run

    def _release(self, what: Callable[[UnitShard], None]) -> None:
        for run in self.runs.values():
            for shard in run.shards.values():
                what(shard)


def named_identity(request: NamesRun) -> RunIdentity:
    """Returns the identity of the run that a request names. Raises InvalidRequestError if a part is missing."""
    return RunIdentity(*_named_run(request))


def _ignore(run: HostedRun, shard: UnitShard) -> None:
    """Does nothing."""


def _unreserved(shard: UnitShard) -> ShardwellError:
    return NotFoundError(f"{shard.what} is no longer reserved on this server: declare the unit again", unit=shard.unit)


def _moved(shard: UnitShard) -> ShardwellError:
    return NotFoundError(
        f"this server no longer has {shard.what}, [{shard.start_bytes}, {shard.stop_bytes}): the shard was moved to "
        "another server, which the coordinator names",
        unit=shard.unit,
    )


def _named_run(request: NamesRun) -> tuple[str, str]:
    for field, value in (("run", request.run), ("run_id", request.run_id)):
        if not value:
            raise InvalidRequestError(f"{field} is empty: set the run's name and id, which Join and ListRuns return")
    return request.run, request.run_id


def _check_reservation(spec: ShardSpec) -> None:
    check_data_ranks(spec.dp)
    if spec.max_contributions > MAX_WORLD_SIZE:
        raise InvalidRequestError(
            f"unit {spec.unit!r} is pushed by {spec.layout.contributors_per_item} ranks of a replica in a run with "
            f"dp={spec.dp}, which is "
            f"{spec.max_contributions} contributions per step: expected at most {MAX_WORLD_SIZE}"
        )
    start, stop, size = spec.start_bytes, spec.stop_bytes, spec.layout.size_bytes
    if not 0 <= start <= stop <= size or start % BLOCK_BYTES or (stop % BLOCK_BYTES and stop != size):
        raise InvalidRequestError(
            f"[{start}, {stop}) is not a valid range of unit {spec.unit!r} of {size} bytes: "
            f"expected bounds on multiples of {BLOCK_BYTES}"
        )


_USUAL_S = 10.0
"""Length of a lease until the coordinator has granted one."""


class ServingLease:
    """Limits how long a server serves trainers after the last heartbeat that the coordinator acknowledged.

    The coordinator replaces a silent server only after a longer time, so two servers never serve one shard. A new lease
    has no limit, until it is renewed first.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._expires_s = math.inf
        self.length_s = _USUAL_S
        """Length of the lease in seconds, as the coordinator grants it."""

    def suspend(self) -> None:
        """Ends the lease until ``confirm``: the server does not know yet which shards the coordinator has it serve."""
        self._expires_s = -math.inf

    def confirm(self) -> None:
        """Makes a suspended lease a new one."""
        if self._expires_s == -math.inf:
            self._expires_s = math.inf

    def renew(self, sent_s: float, lease_s: float) -> None:
        """Extends the lease.

        Args:
            sent_s: Time at which the acknowledged heartbeat was sent. The coordinator received it later.
        """
        former_s = self._expires_s if math.isfinite(self._expires_s) else -math.inf
        self._expires_s = max(former_s, sent_s + lease_s)
        self.length_s = lease_s

    @property
    def valid(self) -> bool:
        """True while this server may serve trainers."""
        return self._clock() < self._expires_s

    def check_confirmed(self) -> None:
        """Raises UnavailableError if the lease is suspended."""
        if self._expires_s == -math.inf:
            raise UnavailableError("this server has not registered with its coordinator yet: try again")

    def check(self) -> None:
        """Raises UnavailableError if the lease is suspended or has expired."""
        if not self.valid:
            self.check_confirmed()
            raise UnavailableError(
                f"the lease of this server expired {self._clock() - self._expires_s:.1f} s ago, because the "
                "coordinator has acknowledged no heartbeat since. Its shards may have moved to other servers: try "
                "again, or ask the coordinator which server has the shard now"
            )
