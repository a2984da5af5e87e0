"""One run on this server: its shards, its fences, and the step in flight.

Fences say which leases and attempts the run rejects; ``CoordinatorTerm``, which coordinators the server does.

``JointUpdates`` updates small shards of a run together, and ``reduce_shards`` reduces their gradients together: one
call per parameter group instead of one per shard. Most shards of a model of many small units are updated this way in
all steps but the first, in which optimizer state is created. ``UnitShard.update`` is the general case.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

from shardwell_server.shard.arithmetic.reduction import SmallReduction, reduce_small
from shardwell_server.shard.arithmetic.shard_optimizer import JointPart, JointUpdate, ShardOptimizer
from shardwell_server.shard.restart.undo import CopyPlan, UndoLog
from shardwell_server.shard.shard_spec import Role
from shardwell_server.shard.unit.portable_state import VersionCapture
from shardwell_server.shard.unit.unit_shard import StepUpdate, UnitShard
from shardwell_server.shard.unit.values import RankVersions
from shardwell_wire import fault_points
from shardwell_wire.errors import (
    AccessError,
    InvalidRequestError,
    NotFoundError,
    RunDeletedError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
)
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2, shard_pb2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedStep:
    """A step whose gradients are reduced, or are being reduced."""

    step: int
    manifest: bytes
    """The contributions that the coordinator named, and whether to skip them, in serialised form."""
    attempts: Mapping[int, int]
    """The attempt that counts, by dp rank."""
    norm: tuple[float, float]
    """Type and bound of the other norms in the answer. Type 0: there are none."""
    answer: shard_pb2.PrepareStepResponse | None
    """None until the gradients are reduced."""

    def applies(self, dp_rank: int) -> bool:
        """True if the step applies the contribution of a rank."""
        return not self.attempts or dp_rank in self.attempts  # a restarted server does not know the attempts


# Note: [Exclusive work on a run]
# Everything that adds, reduces, applies or drops gradients runs inside ``HostedRun.exclusively``, which holds one
# asyncio lock per run. Reads of values need no lock: ``Values`` gives each reader a version that stays unchanged.


class HostedRun:
    """The part of a run that this server hosts. Used on the event loop.

    Args:
        identity: Name and id of the run.
        undo: The log of its updates. None: one that ends with the process.
    """

    def __init__(self, identity: RunIdentity, undo: UndoLog | None = None) -> None:
        self.identity, self.undo = identity, undo or UndoLog()
        self.name = identity.name
        self.shards: dict[tuple[str, int], UnitShard] = {}
        """By unit name and start of the shard in bytes."""
        self.fences = Fences()
        self.rank_versions: RankVersions | None = None
        """The versions that work items read, in an asynchronous run. None: all ranks read the version of the step."""
        self.kept_versions: frozenset[int] = frozenset()
        """Older versions that readers can read, as the last update named them."""
        self.prepared: PreparedStep | None = None
        """The step that is prepared or is being prepared. It accepts no more gradients."""
        self.expected_optimizer: common_pb2.OptimizerStep | None = None
        """The optimizer with which the prepared step is expected to be committed. None: not known yet."""
        self.joint_updates = JointUpdates(self.undo)
        """Updates of several small shards at once."""
        self.complete: list[UnitShard] = []
        """Shards whose contributions seem to have arrived, to be reduced in the background."""
        self.pins: Counter[int] = Counter()
        """Readers that pin a version, by version."""
        self.duplicate_count = 0
        self.differing_duplicate_count = 0
        self.dropped = asyncio.Event()
        """Set when the run has been deleted."""
        self._stopping = False
        self.restore = 0
        """Number of the newest attempt to load the run from a checkpoint."""
        self.capture: VersionCapture | None = None
        """The version that a checkpoint writes in the background. None: there was none yet."""
        self._released: dict[str, int] = {}
        """By unit name: the highest placement number that was released."""
        self._tasks: set[asyncio.Future[None]] = set()
        self._lock = asyncio.Lock()

    # ---- shards ----

    def shards_of(self, unit: str) -> list[UnitShard]:
        """Returns all shards of a unit on this server, in the order of their ranges."""
        return sorted(
            (shard for (name, _), shard in self.shards.items() if name == unit), key=lambda shard: shard.start_bytes
        )

    def shard(self, unit: str, start_bytes: int | None = None, stop_bytes: int | None = None) -> UnitShard:
        """Returns the shard of a unit that contains a range.

        Args:
            unit: Name of the unit.
            start_bytes: Start of the range in the unit's flat vector. None: the server must have one shard of the unit.
            stop_bytes: End of the range. None: the shard contains the byte at ``start_bytes``.

        Raises:
            NotFoundError: This server has no shard of the unit, or none that contains the range.
            InvalidRequestError: No range is given, and the server has several shards of the unit.
        """
        exact = None if start_bytes is None else self.shards.get((unit, start_bytes))
        if exact is not None and (stop_bytes is None or stop_bytes <= exact.stop_bytes):
            return exact
        found = self.shards_of(unit)
        if not found:
            known = ", ".join(sorted({name for name, _ in self.shards})[:10])
            raise NotFoundError(
                f"run {self.name!r} has no unit {unit!r} on this server; it has {known or 'none'}", unit=unit
            )
        ranges = ", ".join(f"[{shard.start_bytes}, {shard.stop_bytes})" for shard in found[:10])
        if start_bytes is None:
            if len(found) == 1:
                return found[0]
            raise InvalidRequestError(
                f"this server has several shards of {found[0].what}, {ranges}: name the range in the request"
            )
        stop = start_bytes + 1 if stop_bytes is None else stop_bytes
        inside = [shard for shard in found if shard.start_bytes <= start_bytes and stop <= shard.stop_bytes]
        if inside:
            return inside[0]
        raise NotFoundError(
            f"{found[0].what}: no shard on this server contains [{start_bytes}, {stop}); it has {ranges}. The unit may "
            "have been cut anew",
            unit=unit,
        )

    def exact_shard(self, reference: shard_pb2.ShardReference) -> UnitShard:
        """Returns the shard with exactly a range. Raises NotFoundError if this server does not have it."""
        shard = self.shard(reference.unit, reference.start_bytes, reference.stop_bytes)
        if shard.spec.reference != (reference.unit, reference.start_bytes, reference.stop_bytes):
            raise NotFoundError(
                f"this server has [{shard.start_bytes}, {shard.stop_bytes}) of {shard.what}, not "
                f"[{reference.start_bytes}, {reference.stop_bytes})",
                unit=shard.unit,
            )
        return shard

    def primary(self, unit: str, start_bytes: int | None = None, stop_bytes: int | None = None) -> UnitShard:
        """Returns the primary of a unit that contains a range, for a trainer. Arguments and errors as ``shard``.

        Raises:
            UnavailableError: This server has a backup only.
        """
        shard = self.shard(unit, start_bytes, stop_bytes)
        shard.check_primary()
        return shard

    @property
    def published(self) -> list[UnitShard]:
        """The primaries that have values. Only these take part in steps: the coordinator may not know the others."""
        return [shard for shard in self.shards.values() if shard.version is not None and shard.role is Role.PRIMARY]

    @property
    def backups(self) -> list[UnitShard]:
        """The backups that have values, also those that are out of sync."""
        return [shard for shard in self.shards.values() if shard.version is not None and shard.role is Role.BACKUP]

    @property
    def step(self) -> int:
        """The step in flight: the lowest version of the primaries, or of the backups if there are no primaries."""
        versions = (shard.version for shard in self.published or self.backups)
        return min((version for version in versions if version is not None), default=0)

    def publish(self, unit: str, epoch: int) -> int:
        """Publishes the initial values of a unit's shards as version 0; returns the lowest version of the shards.

        Raises:
            NotFoundError: This server has no shard of the unit.
            StepStateError: The values of the epoch are not complete. Nothing is published.
        """
        shards = [shard for shard in self.shards_of(unit) if shard.role is Role.PRIMARY] or [self.primary(unit)]
        for shard in shards:
            shard.values.check_publishable(epoch)
        version = min(shard.values.publish(epoch) for shard in shards)
        for shard in shards:
            shard.record()
        return version

    def add_shard(self, shard: UnitShard) -> None:
        """Adds a newly reserved shard."""
        if not self.shards:
            # The run may have been rolled back while this server had no part in it, and repeat the steps of attempts.
            self.fences.restart(0)
        self.shards[shard.unit, shard.start_bytes] = shard

    def remove_shard(self, shard: UnitShard, why: ShardwellError) -> None:
        """Drops a shard. Its readers and senders get the error."""
        if self.capture is not None:
            self.capture.note_removed(shard)
        shard.drop(why)
        del self.shards[shard.unit, shard.start_bytes]

    def note_released(self, unit: str, placement: int) -> None:
        """Records that placements of a unit up to this number have been released."""
        self._released[unit] = max(placement, self._released.get(unit, 0))

    def check_placement(self, unit: str, placement: int) -> None:
        """Raises StaleEpochError if a placement of a unit has been released."""
        released = self._released.get(unit, -1)
        if placement <= released:
            raise StaleEpochError(
                f"placement {placement} of unit {unit!r} of run {self.name!r} was released, as were all up to "
                f"{released}: reserve the unit under a later placement",
                unit=unit,
            )

    # ---- checkpoints ----

    async def before_update(self, shard: UnitShard) -> None:
        """Call before a shard changes: a checkpoint may need its current version."""
        if self.capture is not None:
            await self.capture.before_update(shard)

    def is_captured(self, shard: UnitShard) -> bool:
        """True if a checkpoint still needs the current version of a shard, so that ``before_update`` may wait."""
        return self.capture is not None and self.capture.needs(shard)

    def begin_restore(self, restore: int, min_epoch: int) -> None:
        """Records that the run is loaded from a checkpoint. All shards were removed."""
        assert not self.shards
        self.restore, self.prepared, self.rank_versions = restore, None, None
        self.fences.restart(min_epoch)

    # ---- the step in flight ----

    def read_by_rank(self) -> RankVersions:
        """Lets each data rank read its own version, because the run is asynchronous. Returns these versions."""
        if self.rank_versions is None:
            self.rank_versions = RankVersions()
        return self.rank_versions

    def version_of(self, dp_rank: int, shard: UnitShard) -> int | None:
        """Returns the version of a shard that a rank's work item reads. None: the shard has no values yet."""
        if self.rank_versions is None or shard.version is None:
            return shard.version
        return self.rank_versions.of(dp_rank)

    def is_closed_to(self, dp_rank: int, step: int) -> bool:
        """True if a step is prepared that applies a rank's contribution, which can no longer change.

        Args:
            step: The version that the rank's work item reads.
        """
        if self.rank_versions is None:
            return self.is_prepared(step)
        return self.prepared is not None and self.prepared.applies(dp_rank)

    def is_prepared(self, step: int) -> bool:
        """True if a step is prepared or is being prepared. Such a step accepts no more gradients."""
        return self.prepared is not None and self.prepared.step == step

    def is_reduced(self, step: int) -> bool:
        """True if a step is prepared, and its gradients are reduced."""
        return self.prepared is not None and self.prepared.step == step and self.prepared.answer is not None

    def counts(self, dp_rank: int, attempt: int) -> bool:
        """True if the prepared step uses this attempt of a rank's work item."""
        return self.prepared is not None and self.prepared.attempts.get(dp_rank) == attempt

    def clear_prepared(self) -> None:
        """Records that no step is prepared: gradients are accepted again."""
        self.prepared = self.expected_optimizer = None

    def take_up_step(self) -> None:
        """Continues with the step that a former process had prepared, if it was prepared in all shards."""
        step = self.step
        waiting = [shard for shard in self.published if shard.version == step]
        if waiting and all(shard.gradient.reduced is not None for shard in waiting):
            self.prepared = PreparedStep(step, b"", {}, (0.0, 0.0), shard_pb2.PrepareStepResponse(version=step))
            return
        for shard in waiting:
            shard.gradient.drop()

    def count_duplicate(self, *, differs: bool) -> None:
        """Counts a gradient that was pushed again, and whether its bytes differ from the accepted ones."""
        self.duplicate_count += 1
        self.differing_duplicate_count += differs

    # ---- exclusive work ----

    @asynccontextmanager
    async def exclusively(self) -> AsyncIterator[None]:
        """Runs a block that works on the run's gradients while no other such block runs.

        See Note: [Exclusive work on a run].

        Raises:
            RunDeletedError: The run was deleted while the work waited for the lock.
            UnavailableError: The server is about to stop.
        """
        async with self._lock:
            if self.dropped.is_set():
                raise RunDeletedError(f"run {self.name!r} was deleted", run=self.name)
            if self._stopping:
                raise UnavailableError("this server is about to stop: try again")
            yield

    async def finish_work(self) -> None:
        """Waits for the work in progress, and rejects further work, because the process ends."""
        self._stopping = True
        async with self._lock:
            pass

    def schedule(self, work: Callable[[], Awaitable[None]]) -> None:
        """Starts work in the background, within ``exclusively``; logs errors."""

        async def run() -> None:
            try:
                async with self.exclusively():
                    await work()
            except RunDeletedError:
                return
            except UnavailableError:
                if not self._stopping:
                    raise

        task = asyncio.ensure_future(run())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background work on run %r failed", self.name, exc_info=error)

    def end(self) -> None:
        """Ends the run on this server, after all its shards were removed. Call within ``exclusively``."""
        assert not self.shards
        self.dropped.set()
        if self.capture is not None:
            self.capture.fail(NotFoundError(f"run {self.name!r} was deleted", run=self.name))
        self.joint_updates.close()


class Fences:
    """The oldest epoch and attempt that one run accepts from each logical dp rank.

    Only the coordinator raises these bounds; the numbers in a push do not. Epochs never fall. Attempts start at 0 in
    every step.
    """

    def __init__(self) -> None:
        self._epochs: dict[int, int] = {}
        self._attempts: dict[int, tuple[int, int]] = {}
        """By rank: a step, and the oldest attempt in it."""
        self._floor = 0
        """Epochs below this one are rejected for every rank."""

    def epoch(self, dp_rank: int) -> int:
        """Returns the oldest epoch that is accepted."""
        return max(self._floor, self._epochs.get(dp_rank, 0))

    def attempt(self, dp_rank: int, step: int) -> int:
        """Returns the oldest attempt that is accepted in a step."""
        of_step, attempt = self._attempts.get(dp_rank, (0, 0))
        return attempt if step == of_step else 0

    def restart(self, min_epoch: int) -> None:
        """Rejects all epochs below ``min_epoch``, and forgets attempts, because steps are repeated."""
        self._floor = max(self._floor, min_epoch)
        self._attempts = {}

    def check_epoch(self, dp_rank: int, epoch: int) -> None:
        """Raises StaleEpochError if a lease on a rank is over."""
        oldest = self.epoch(dp_rank)
        if epoch < oldest:
            raise StaleEpochError(
                f"the lease on rank {dp_rank} with epoch {epoch} is over: its lease now has epoch {oldest}",
                dp_rank=dp_rank,
                epoch=epoch,
                newest=oldest,
            )

    def raise_all(self, step: int, ranks: Iterable[shard_pb2.RankFence]) -> list[tuple[int, int]]:
        """Applies the coordinator's fences; returns ``(dp_rank, attempt)`` for each attempt that rose.

        Fences of an earlier step raise epochs only. A fence that names a version is about the item that reads it.
        A fence whose epoch is over may have been delayed until the run was loaded from a checkpoint: its attempt is one
        of a step that is repeated, and says nothing about the new attempts.
        """
        risen = []
        for fence in ranks:
            self._epochs[fence.dp_rank] = max(self.epoch(fence.dp_rank), fence.epoch)
            bound = (fence.version if fence.HasField("version") else step, fence.attempt)
            if fence.attempt and fence.epoch >= self._floor and bound > self._attempts.get(fence.dp_rank, (0, 0)):
                self._attempts[fence.dp_rank] = bound
                risen.append((fence.dp_rank, fence.attempt))
        return risen


class CoordinatorTerm:
    """The newest term that this server's coordinator has confirmed.

    The term in a request proves nothing, because anyone can send a request. A later term is accepted only after the
    coordinator has confirmed it.

    Args:
        ask: Asks the coordinator for its term and passes the answer to ``learn``. Raises UnavailableError or
            DeadlineError if the coordinator does not answer.
    """

    def __init__(self, ask: Callable[[], Awaitable[None]]) -> None:
        self._ask, self._newest = ask, 0

    def learn(self, term: int) -> None:
        """Records a term from the coordinator itself. An older term changes nothing."""
        self._newest = max(self._newest, term)

    def is_newest(self, term: int) -> bool:
        """True if no later term is known. Only the current coordinator's answers may drop runs."""
        return term == self._newest

    async def check(self, term: int) -> None:
        """Admits requests of the current coordinator only.

        Raises:
            StaleEpochError: A later coordinator has taken over.
            AccessError: The server's coordinator does not have this term.
            UnavailableError: The term is later than the known one, and the coordinator cannot be asked.
        """
        if term > self._newest:
            await self._ask()
        if term > self._newest:
            raise AccessError(
                f"the request has coordinator term {term}, but this server's coordinator has term {self._newest}: send "
                "the request to a server that is registered with your coordinator",
                epoch=self._newest,
            )
        if term < self._newest:
            raise StaleEpochError(
                f"coordinator term {term} is over, the current term is {self._newest}", epoch=self._newest
            )


MAX_BYTES = 1 << 20
"""Most values and state that are updated together: more do not stay in the cache between the copies and the update."""
MAX_SHARDS = 64
"""Most shards that are updated together. Readers wait for all of them."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The joint update of some shards, for all steps in which their optimizers keep their state."""

    parts: Sequence[Sequence[JointPart]]
    update: JointUpdate
    copies: CopyPlan


class JointUpdates:
    """The joint updates of one run. Used on the event loop, within ``HostedRun.exclusively``."""

    def __init__(self, undo: UndoLog) -> None:
        self._undo = undo
        self._plans: dict[tuple[int, ...], _Plan] = {}
        """By the identity of the shards. Only those of the last step are kept."""
        self._used: dict[tuple[int, ...], _Plan] = {}

    def begin_step(self) -> None:
        """Call before the updates of a step."""
        self._plans, self._used = self._used, {}

    def update(
        self, waiting: deque[UnitShard], step: StepUpdate, may_change: Callable[[UnitShard], bool]
    ) -> list[UnitShard]:
        """Makes the next version of several shards at once, and takes them from the front of ``waiting``.

        After an error, nothing has changed, and neither version of these shards can be read. The same update of each of
        them, together or by itself, then makes the next version.

        Args:
            waiting: Shards to update, in order.
            step: The update.
            may_change: Whether nobody needs the current version of a shard.

        Returns:
            The shards. Empty: the first one must be updated by itself.
        """
        if step.runs_on_trainers:
            return []
        found: list[UnitShard] = []
        optimizers: list[ShardOptimizer] = []
        size_bytes = 0
        for shard in waiting:
            optimizer = shard.joinable(step) if may_change(shard) else None
            if optimizer is None or len(found) == MAX_SHARDS:
                break
            size_bytes += shard.size_bytes + optimizer.size_bytes
            if found and size_bytes > MAX_BYTES:
                break
            found.append(shard)
            optimizers.append(optimizer)
        if len(found) < 2:
            return []
        plan = self._plan(found, optimizers, step)
        # Without memory for the copies, an interrupted update could not be undone.
        if not self._undo.reserve(plan.copies.size_bytes):
            return []
        self._run(found, optimizers, plan, step)
        for _ in found:
            waiting.popleft()
        return found

    def _plan(self, shards: Sequence[UnitShard], optimizers: Sequence[ShardOptimizer], step: StepUpdate) -> _Plan:
        key = tuple(map(id, shards))
        parts = [own for optimizer in optimizers if (own := optimizer.joint_parts) is not None]
        plan = self._plans.get(key)
        if plan is None or any(own is not former for own, former in zip(parts, plan.parts, strict=True)):
            update = JointUpdate(parts, [optimizer.averages for optimizer in optimizers], step.settings())
            copies = CopyPlan.merged(each for shard in shards for each in shard.changed_ranges())
            plan = _Plan(parts, update, copies)
        self._used[key] = plan
        return plan

    def _run(
        self, shards: Sequence[UnitShard], optimizers: Sequence[ShardOptimizer], plan: _Plan, step: StepUpdate
    ) -> None:
        version = step.step + 1
        for shard in shards:
            shard.begin_joint_update(version)
        # The copies are complete before the first byte changes. See Note: [Interrupted updates].
        self._undo.begin(plan.copies)
        try:
            gradients = [shard.gradient.reduced.gradients for shard in shards if shard.gradient.reduced is not None]
            fault_points.reach("server.update.joint", stage="begun")
            plan.update.run(gradients, step.settings(), step.clipping, step.decay)
        except BaseException:
            self._undo.restore()
            raise
        for shard, optimizer in zip(shards, optimizers, strict=True):
            optimizer.count_joint_update()
            shard.save_joint_update(version)
            fault_points.reach("server.update.joint", stage="saved")
        # All step words are written. If the process ended before this line, all shards would be undone.
        self._undo.end()
        fault_points.reach("server.update.joint", stage="complete")
        for shard, own in zip(shards, plan.parts, strict=True):
            shard.end_joint_update(version, changes=bool(own))

    def close(self) -> None:
        """Releases all memory."""
        self._plans, self._used = {}, {}
        self._undo.close()


_Begun: TypeAlias = tuple[UnitShard, SmallReduction]


async def reduce_shards(shards: Iterable[UnitShard]) -> None:
    """Computes the mean gradients that are missing. The shards belong to one run. Call in ``HostedRun.exclusively``.

    Small shards are reduced on the event loop: this takes less time than waking a thread for each of them.
    """
    alike: dict[object, list[_Begun]] = {}
    alone: list[UnitShard] = []
    try:
        for shard in shards:
            if (work := shard.gradient.begin_small()) is None:
                alone.append(shard)
            else:
                alike.setdefault((shard.gradient.order.key, work.mean.vector.dtype), []).append((shard, work))
        for begun in list(alike.values()):
            alone += _reduce_small(begun)
            begun.clear()
    finally:
        for begun in alike.values():
            for shard, work in begun:
                shard.gradient.mean.end_small(work, None)
    for shard in alone:
        await shard.gradient.reduce_alone()


def _reduce_small(begun: Sequence[_Begun]) -> list[UnitShard]:
    """Reduces shards with the same order of additions. Returns those whose means are not finite."""
    found = reduce_small([work for _, work in begun], begun[0][0].gradient.order)
    for (shard, work), reduced in zip(begun, found, strict=True):
        shard.gradient.mean.end_small(work, reduced)
    return [shard for (shard, _), reduced in zip(begun, found, strict=True) if reduced is None]
