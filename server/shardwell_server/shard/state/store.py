"""Everything one shard server holds: runs and their shards, within its memory."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from shardwell_server.request_log import RequestLog
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.shared_memory import SharedMemory
from shardwell_server.shard.state.buffer_shard import BufferShard
from shardwell_server.shard.state.runs import Run
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_server.shard.threads import in_threads_of
from shardwell_wire.errors import (
    InvalidRequestError,
    NotFoundError,
    RunDeletedError,
    StaleEpochError,
    StepStateError,
    UnitMismatchError,
)
from shardwell_wire.layout import BLOCK_BYTES, UnitLayout
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.topology import check_data_ranks

_REMEMBERED_IDS = 1024
"""Ids of dropped runs that are kept: requests that name one are answered precisely, and reserve nothing."""


class NamesRun(Protocol):
    """A message that says which run it is about."""

    @property
    def run(self) -> str:
        """Name of the run."""
        ...

    @property
    def run_id(self) -> str:
        """Id of the run; empty: not given."""
        ...


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
        """By id: what was left of a deleted run is never taken for another run of its name."""
        self._dropped: deque[str] = deque(maxlen=_REMEMBERED_IDS)
        self.in_thread = in_threads_of(threads)
        self.requests = RequestLog()

    def run(self, name: str, run_id: str = "") -> Run:
        """A run by its name; if an id is given, that very run.

        Raises:
            NotFoundError: The server holds nothing of the run.
            RunDeletedError: The run with this id was deleted.
        """
        exact = self.runs.get(run_id)
        if exact is not None and exact.name == name:
            return exact
        named = [run for run in self.runs.values() if run.name == name]
        if named and not run_id:
            return named[-1]  # what is left of an older one of the name is only to be dropped
        self._check_not_dropped(RunIdentity(name, run_id))
        if named:
            raise NotFoundError(
                f"this server holds nothing of run {name!r} with id {run_id}, but another run of this name, with id "
                f"{named[-1].identity.run_id}: the run was deleted and created anew, or the server was restarted",
                run=name,
                run_id=run_id,
            )
        known = ", ".join(sorted({run.name for run in self.runs.values()})[:10])
        raise NotFoundError(f"no run {name!r} on this server; it has {known or 'none'}", run=name)

    def exact_run(self, request: NamesRun) -> Run:
        """The very run that a request is about, which it must name by its id too.

        Raises:
            InvalidRequestError: The id is missing.
            NotFoundError: As ``run``.
        """
        return self.run(*_identity_in(request))

    def _check_not_dropped(self, identity: RunIdentity) -> None:
        if identity.run_id in self._dropped:
            now = next((run for run in self.runs.values() if run.name == identity.name), None)
            another = f", and another run of this name, with id {now.identity.run_id}, is here" if now else ""
            raise RunDeletedError(
                f"run {identity.name!r} was deleted (its id was {identity.run_id}){another}",
                run=identity.name,
                run_id=identity.run_id,
            )

    def reserve(
        self,
        request: NamesRun,
        layout: UnitLayout,
        index: int,
        start: int,
        stop: int,
        dp: int,
        placement: int = 0,
    ) -> UnitShard:
        """Makes room for a shard; the same again is harmless.

        What was reserved for the unit, or for another one with its index, under a lower placement number is given up.

        Raises:
            InvalidRequestError: The range is not one of the unit's.
            UnitMismatchError: The unit is there with another layout or range, or its index is another's.
            StaleEpochError: The placement was taken back, or there is a later one.
            StepStateError: A step is prepared; a new unit would miss it.
            CapacityError: It does not fit the budget.
            RunDeletedError: The run was deleted; the request was on its way meanwhile.
        """
        identity = RunIdentity(*_identity_in(request))
        _check_reservation(layout, start, stop, dp)
        self._check_not_dropped(identity)
        run = self.runs.get(identity.run_id) or Run(identity)
        _check_placement(run, layout.unit, placement)
        known = [shard for shard in run.shards.values() if layout.unit == shard.unit or index == shard.index]
        for shard in known:
            if shard.placement == placement and _identity(shard) == (layout, index, start, stop, dp):
                return shard
            if shard.placement >= placement or shard.version:
                raise UnitMismatchError(
                    f"{shard.what} is here as unit {shard.index}, [{shard.start_bytes}, {shard.stop_bytes}) of "
                    f"{shard.layout.size_bytes} bytes with dp {shard.dp}; unit {layout.unit!r}, number {index}, was "
                    "reserved with another layout, range or dp",
                    unit=layout.unit,
                )
        if run.prepared is not None:
            raise StepStateError(
                f"run {run.name!r} is about to commit step {run.prepared.step}: "
                f"unit {layout.unit!r} comes too late for it",
                unit=layout.unit,
            )
        for shard in known:
            self._release(run, shard)
        self.memory.reserve(str(identity), layout.unit, stop - start, dp, holds_buffers=layout.holds_buffers)
        kind = BufferShard if layout.holds_buffers else UnitShard
        shard = kind(identity, layout, index, start, stop, dp, self.memory, self._shared, placement)
        self.runs.setdefault(identity.run_id, run).shards[layout.unit] = shard
        return shard

    def release(self, request: NamesRun, unit: str, placement: int) -> None:
        """Takes the reservation of a unit back, if it has no higher placement number; the same again is harmless.

        Raises:
            StepStateError: The unit has been updated.
        """
        run = self.runs.get(RunIdentity(*_identity_in(request)).run_id)
        if run is None:
            return
        run.released[unit] = max(placement, run.released.get(unit, 0))
        shard = run.shards.get(unit)
        if shard is not None and shard.placement <= placement:
            if shard.version:
                raise StepStateError(
                    f"{shard.what} is at version {shard.version}: its reservation is in use", unit=unit
                )
            self._release(run, shard)

    def _release(self, run: Run, shard: UnitShard) -> None:
        why = NotFoundError(f"{shard.what} is placed on servers anew: declare it again", unit=shard.unit)
        shard.drop(why)
        del run.shards[shard.unit]
        self.memory.release_unit(str(run.identity), shard.unit)

    async def drop(self, run_id: str) -> int:
        """Forgets the run with this id for good; returns the bytes of the budget that are free again."""
        if run_id not in self._dropped:
            self._dropped.append(run_id)
        run = self.runs.get(run_id)
        if run is None:
            return 0

        async def drop() -> int:
            run.drop()
            del self.runs[run_id]
            freed = self.memory.release(str(run.identity))
            self.memory.pool.trim()
            return freed

        try:
            return await run.alone(drop)
        except RunDeletedError:
            return 0  # another request was faster

    def _make_room(self) -> None:
        for run in self.runs.values():
            for shard in run.shards.values():
                shard.make_room()


def _check_placement(run: Run, unit: str, placement: int) -> None:
    """Raises StaleEpochError if a placement was taken back."""
    if placement <= run.released.get(unit, -1):
        raise StaleEpochError(
            f"unit {unit!r} of run {run.name!r}: placement {placement} was taken back, up to {run.released[unit]}: "
            "reserve under a later one",
            unit=unit,
        )


def _identity_in(request: NamesRun) -> tuple[str, str]:
    for what, value in (("run", request.run), ("run_id", request.run_id)):
        if not value:
            raise InvalidRequestError(f"{what} is empty: name the run and its id, which Join and ListRuns return")
    return request.run, request.run_id


def _check_reservation(layout: UnitLayout, start: int, stop: int, dp: int) -> None:
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
