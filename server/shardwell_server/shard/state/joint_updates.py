"""Updates small shards of a run together, and reduces the gradients of small shards together.

One call per parameter group replaces one per shard. Most shards of a model of many small units are updated this way in
all steps but the first, in which optimizer state is created. ``UnitShard.update`` is the general case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwell_server.shard.arithmetic.reduction import SmallReduction, reduce_small
from shardwell_server.shard.arithmetic.shard_optimizer import JointPart, JointUpdate, ShardOptimizer
from shardwell_server.shard.restart.undo import CopyPlan, UndoLog
from shardwell_server.shard.unit.unit_shard import StepUpdate, UnitShard
from shardwell_wire import fault_points

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
