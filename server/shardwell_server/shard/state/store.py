"""Everything one shard server holds: runs and their shards, within its memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from shardwell_server.request_log import RequestLog
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.shared_memory import SharedMemory
from shardwell_server.shard.state.runs import Run
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_server.shard.threads import in_threads_of
from shardwell_wire.errors import (
    InvalidRequestError,
    NotFoundError,
    StepStateError,
    UnitMismatchError,
)
from shardwell_wire.layout import BLOCK_BYTES, UnitLayout
from shardwell_wire.topology import check_data_ranks


class ShardStore:
    """The state of a shard server. Used on one event loop; tensor work runs in ``threads``.

    Args:
        budget_bytes: What reservations are checked against.
        threads: Where tensor work runs.
        shared: Where parameters lie, if trainers of this host shall be able to map them.
    """

    def __init__(self, budget_bytes: int, threads: ThreadPoolExecutor, shared: SharedMemory | None = None) -> None:
        self.memory = Memory(budget_bytes)
        self._shared = shared
        self.memory.staging.make_room = self._make_room
        self.runs: dict[str, Run] = {}
        self.in_thread = in_threads_of(threads)
        self.requests = RequestLog()

    def run(self, name: str) -> Run:
        """Raises NotFoundError if the server holds nothing of the run."""
        if name in self.runs:
            return self.runs[name]
        known = ", ".join(sorted(self.runs)[:10])
        raise NotFoundError(f"no run {name!r} on this server; it has {known or 'none'}", run=name)

    def reserve(self, run_name: str, layout: UnitLayout, index: int, start: int, stop: int, dp: int) -> UnitShard:
        """Makes room for a shard; the same again is harmless.

        Raises:
            InvalidRequestError: The range is not one of the unit's.
            UnitMismatchError: The unit is there with another layout or range, or its index is another's.
            StepStateError: A step is prepared; a new unit would miss it.
            CapacityError: It does not fit the budget.
        """
        _check_reservation(run_name, layout, start, stop, dp)
        run = self.runs.get(run_name) or Run(run_name)
        wanted = (layout, index, start, stop, dp)
        known = next(
            (shard for shard in run.shards.values() if layout.unit == shard.unit or index == shard.index), None
        )
        if known is not None:
            if _identity(known) != wanted:
                raise UnitMismatchError(
                    f"{known.what} is here as unit {known.index}, [{known.start_bytes}, {known.stop_bytes}) of "
                    f"{known.layout.size_bytes} bytes with dp {known.dp}; unit {layout.unit!r}, number {index}, was "
                    "reserved with another layout, range or dp",
                    unit=layout.unit,
                )
            return known
        if run.prepared is not None:
            raise StepStateError(
                f"run {run_name!r} is about to commit step {run.prepared.step}: "
                f"unit {layout.unit!r} comes too late for it",
                unit=layout.unit,
            )
        self.memory.reserve(run_name, layout.unit, stop - start, dp)
        shard = UnitShard(run_name, layout, index, start, stop, dp, self.memory, self._shared)
        self.runs.setdefault(run_name, run).shards[layout.unit] = shard
        return shard

    async def drop(self, name: str) -> int:
        """Forgets a run; returns the bytes of the budget that are free again."""
        run = self.runs.get(name)
        if run is None:
            return 0

        async def drop() -> int:
            run.drop()
            del self.runs[name]
            freed = self.memory.release(name)
            self.memory.pool.trim()
            return freed

        try:
            return await run.alone(drop)
        except NotFoundError:
            return 0  # another request was faster

    def _make_room(self) -> None:
        for run in self.runs.values():
            for shard in run.shards.values():
                shard.make_room()


def _check_reservation(run_name: str, layout: UnitLayout, start: int, stop: int, dp: int) -> None:
    if not run_name:
        raise InvalidRequestError("a run needs a name")
    check_data_ranks(dp)
    if (
        not 0 <= start <= stop <= layout.size_bytes
        or start % BLOCK_BYTES
        or (stop % BLOCK_BYTES and stop != layout.size_bytes)
    ):
        raise InvalidRequestError(
            f"[{start}, {stop}) is no range of unit {layout.unit!r} of {layout.size_bytes} bytes: "
            f"expected bounds on multiples of {BLOCK_BYTES}"
        )


def _identity(shard: UnitShard) -> tuple[object, ...]:
    return shard.layout, shard.index, shard.start_bytes, shard.stop_bytes, shard.dp
