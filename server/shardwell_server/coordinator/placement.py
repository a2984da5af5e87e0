"""Declares units, cuts them into byte ranges, places these on shard servers, and publishes initial values."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.placed_units import Unit, require_same_layout
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.shard_servers import ShardServers, check_recoverable
from shardwell_server.coordinator.settings import MAX_UNITS
from shardwell_server.coordinator.signals import SharedCall, poll
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import ShardRecord
from shardwell_wire import fault_points
from shardwell_wire.errors import (
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
    UnitMismatchError,
)
from shardwell_wire.model.layout import UnitLayout, cut, cut_between
from shardwell_wire.v1 import common_pb2, shard_pb2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live server that may own a shard."""

    server_id: str
    free_bytes: int
    """Part of the memory budget that is not reserved."""
    budget_bytes: int
    """The memory budget."""


@dataclass(frozen=True, slots=True)
class Range:
    """A half-open byte range of a unit's flat vector and the server that will own it."""

    server_id: str
    start_bytes: int
    stop_bytes: int


def place(layout: UnitLayout, candidates: Sequence[Candidate], min_shard_bytes: int) -> list[Range]:
    """Cuts a unit into ranges in proportion to the free memory of the servers.

    With placement "tensor", cuts fall between tensors. A unit that is too small for all servers goes to servers that
    can hold it and have the largest part of their budgets free: many small units then spread in proportion to the
    budgets. The result does not depend on the order of the candidates.

    Args:
        candidates: At least one server.
        min_shard_bytes: Smallest range.

    Returns:
        Ranges in order, which cover the flat vector. A range is empty only if the unit is empty.
    """

    def rank(candidate: Candidate) -> tuple[bool, float, str]:
        is_too_full = candidate.free_bytes < layout.size_bytes
        return is_too_full, -candidate.free_bytes / candidate.budget_bytes, candidate.server_id

    ranked = sorted(candidates, key=rank)
    weights = [float(candidate.free_bytes) for candidate in ranked]
    if not any(weights):
        # No server has free memory. Place the unit anyway: the servers then refuse it, and their error says what to do.
        weights = [1.0] * len(ranked)
    if layout.placement == "tensor":
        bounds = cut_between(layout, weights, min_shard_bytes)
    else:
        bounds = cut(layout.size_bytes, weights, min_shard_bytes)
    ranges = [Range(candidate.server_id, start, stop) for candidate, (start, stop) in zip(ranked, bounds, strict=True)]
    return [piece for piece in ranges if piece.start_bytes < piece.stop_bytes] or ranges[:1]


logger = logging.getLogger(__name__)


class UnitPlacer:
    """Declares and publishes the units of every run."""

    def __init__(self, state: CoordinatorState, servers: ShardServers) -> None:
        self._state, self._servers = state, servers

    def resume(self, run: Run) -> None:
        """Continues the work of a former coordinator, which may have been killed while it placed any unit of a run.

        Units without values are placed again. Shards that the former coordinator has reserved and not recorded, or
        moved away and not released, are released in the background.
        """
        if run.checkpoints.restore is not None:
            return  # the restore places all units anew, on servers that drop all other shards
        for unit in run.units:
            unit.reserved = False
        for server in self._state.cluster.servers.values():
            if not server.ended:
                process = server.server_id, server.incarnation
                release = partial(self._release_unrecorded, run, process, run.changes.last_epoch)
                self._state.tasks.start(self._until_released(run, process, release))

    # Declaration

    async def declare(self, run: Run, layout: UnitLayout, wait_s: float) -> Unit:
        """Returns the unit with this layout. Places a new unit on servers. A rejected declaration has no effect.

        Raises:
            UnitMismatchError: The unit was declared with another layout.
            CapacityError: A server has no memory for its shard.
            UnavailableError: Too few servers registered within ``wait_s``, or an owner is unreachable.
            ConflictError: Shards of the run are lost.
        """
        unit = run.units.find(layout.unit)
        try:
            while unit is None or not self._is_reserved(unit):
                if unit is not None:
                    _require_same(run, unit, layout)
                await self._wait_for_servers(run, wait_s)
                # Concurrent declarations of one unit share one placement.
                placing = run.units.placing.setdefault(layout.unit, SharedCall())
                try:
                    unit = await placing(self._place, run, layout)
                finally:
                    run.units.placing.pop(layout.unit, None)
        except UnavailableError:
            self._servers.require_available(run)  # a permanent error takes precedence: retrying would not help
            raise
        _require_same(run, unit, layout)
        self._servers.require_available(run)
        return unit

    def _is_reserved(self, unit: Unit) -> bool:
        """True if the unit is published, or all its owners still have the memory they reserved."""
        return unit.published or (unit.reserved and not any(map(self._is_ending, unit.shards)))

    def _is_ending(self, shard: ShardRecord) -> bool:
        """True if a server process has ended, or is about to stop: it waits only for shards with values."""
        return self.has_ended(shard) or self._state.cluster.servers[shard.server_id].leaving

    def has_ended(self, shard: ShardRecord) -> bool:
        """True if the server process that received a shard has ended."""
        server = self._state.cluster.servers.get(shard.server_id)
        return server is None or server.incarnation != shard.incarnation or server.ended

    async def _wait_for_servers(self, run: Run, wait_s: float) -> None:
        """Waits for ``min_servers`` servers before the first unit of a run, and for one server before later units. See
        ``Cluster.can_place``."""
        cluster = self._state.cluster
        wanted = 1 if len(run.units) else self._state.settings.min_servers

        async def check() -> bool | None:
            check_recoverable(run, cluster)
            return cluster.can_place(wanted) or None

        if not await poll(cluster.changed, check, wait_s):
            raise UnavailableError(f"run {run.name!r} {cluster.describe_waiting(wanted)}")

    async def _place(self, run: Run, layout: UnitLayout) -> Unit | None:
        """Places a new unit, or a unit whose owners do not all have its memory and that has no values yet.

        The units of a run are placed one at a time. If a unit is refused, no later unit exists, and the next unit
        gets the same index.

        Returns:
            None if a chosen server has ended meanwhile. The caller must place the unit again.
        """
        async with run.units.placement_lock:
            unit = run.units.find(layout.unit)
            if unit is None:
                _check_new(run, layout)
                if (shards := await self._reserve(run, len(run.units), layout)) is None:
                    return None
                unit = Unit(len(run.units), layout, shards)
                run.units.add(unit)
            elif not self._is_reserved(unit):
                # Servers release and replace reservations before the new placement is durable. Whatever a trainer has
                # sent is void: it gets another epoch with the new placement, and sends the values again.
                unit.reserved = False
                run.revoke_initializer(layout)
                if (shards := await self._reserve(run, unit.index, unit.layout, former=unit.shards)) is None:
                    return None
                run.units.move(unit, shards)
                unit.reserved = True
            else:
                return unit
        owners = ", ".join(repr(shard.server_id) for shard in unit.shards)
        message = f"unit {unit.layout.unit!r}: {unit.layout.size_bytes} bytes on {owners}"
        self._state.events.add(EventKind.UNIT_PLACED, message, run=run.name)
        return unit

    # Reservation

    async def _reserve(
        self, run: Run, index: int, layout: UnitLayout, *, former: tuple[ShardRecord, ...] = ()
    ) -> tuple[ShardRecord, ...] | None:
        """Chooses servers for a unit, reserves memory on them, and stores the placement.

        If a server refuses, or the placement cannot be stored, all reservations are released.

        Args:
            former: Shards of the former placement. Their servers release them, unless they are chosen again: a server
                that receives a backup of the run later must not have a primary that the run does not know.

        Returns:
            None if a chosen server has ended meanwhile.
        """
        shards, placement = self._choose_servers(layout), run.changes.next_epoch()
        await self._state.save(run)  # no other placement may get this number, even after a restart
        chosen = {shard.server_id for shard in shards}
        left = [shard for shard in former if shard.server_id not in chosen and not self.has_ended(shard)]
        await asyncio.gather(*(self._release(run, layout.unit, placement, shard) for shard in left))
        try:
            await self._request_memory(run, index, layout, shards, placement)
            fault_points.reach("coordinator.placement.before_record", run=run.name, unit=layout.unit)
            await self._state.save_unit(run, Unit(index, layout, shards))
        except ShardwellError as error:
            await asyncio.gather(*(self._release(run, layout.unit, placement, shard) for shard in shards))
            if isinstance(error, UnavailableError | NotFoundError) and any(map(self.has_ended, shards)):
                return None
            raise
        return shards

    async def reserve(
        self, run: Run, index: int, layout: UnitLayout, placement: int, servers: Mapping[str, str]
    ) -> tuple[ShardRecord, ...]:
        """Chooses servers for a unit that is loaded from a checkpoint, and reserves memory. Stores nothing.

        Args:
            placement: A number that the run has not used for a placement of the unit.
            servers: Server processes to choose from: incarnations by server id. They have no other copies of the run.

        Raises:
            CapacityError: A server has no memory for its shard.
            UnavailableError: A server is unreachable, or none is live.
        """
        shards = self._choose_servers(layout, servers)
        await self._request_memory(run, index, layout, shards, placement)
        return shards

    async def _request_memory(
        self, run: Run, index: int, layout: UnitLayout, shards: tuple[ShardRecord, ...], placement: int
    ) -> None:
        ranges = {shard.server_id: shard for shard in shards}

        def request(server_id: str) -> shard_pb2.ReserveUnitRequest:
            return shard_pb2.ReserveUnitRequest(
                context=self._servers.context(run, 0),
                unit=layout.to_proto(),
                unit_index=index,
                start_bytes=ranges[server_id].start_bytes,
                stop_bytes=ranges[server_id].stop_bytes,
                dp=run.settings.world.dp,
                reduction_groups=run.settings.reduction_groups,
                placement=placement,
                asynchronous=run.asynchronous,
                keep_versions=run.settings.keep_versions,
            )

        responses = await self._servers.call_all(ranges, "ReserveUnit", request)
        for server_id, response in responses.items():
            self._state.cluster.note_free(server_id, response.free_bytes)

    def _choose_servers(self, layout: UnitLayout, among: Mapping[str, str] | None = None) -> tuple[ShardRecord, ...]:
        cluster, shards = self._state.cluster, []
        live = [at for at in cluster.staying if among is None or among.get(at.server_id) == at.incarnation]
        if not live:  # the last one was lost while other units were placed
            raise UnavailableError("no shard server is live: start one (shardwell-server shard --coordinator ...)")
        staying = [server for server in live if not server.draining] or live
        candidates = [Candidate(server.server_id, server.free_bytes, server.budget_bytes) for server in staying]
        for piece in place(layout, candidates, self._state.settings.min_shard_bytes):
            server = cluster.servers[piece.server_id]
            # Counted before the server confirms it, so that concurrent placements spread over the servers.
            server.reserved_bytes += piece.stop_bytes - piece.start_bytes
            shards.append(ShardRecord(piece.start_bytes, piece.stop_bytes, piece.server_id, server.incarnation))
        return tuple(sorted(shards, key=lambda shard: shard.start_bytes))

    async def _release(self, run: Run, unit: str, placement: int, shard: ShardRecord) -> None:
        """Releases a reservation. If the server is unavailable, the release is retried in the background."""
        request = shard_pb2.ReleaseUnitRequest(context=self._servers.context(run, 0), unit=unit, placement=placement)

        async def release() -> None:
            response = await self._servers.call(shard.server_id, "ReleaseUnit", request, retry_for_s=0.0)
            self._state.cluster.note_free(shard.server_id, response.free_bytes)

        server = self._state.cluster.servers.get(shard.server_id)
        if server is None or not server.live or not await self._try_release(run, shard.server_id, release):
            self._state.tasks.start(self._until_released(run, shard.process, release))

    async def _release_unrecorded(self, run: Run, process: tuple[str, str], last_placement: int) -> None:
        """Releases reservations of a run that a server process has, but not according to the run's records.

        Shards that were reserved after placement ``last_placement`` stay: they may not be recorded yet. Shards that the
        records name with a former process of the server stay, too: this process may take them up. So do updated ones.
        """
        listed = await self._servers.call(
            process[0], "ListShards", shard_pb2.ListShardsRequest(run=run.name), retry_for_s=0.0
        )
        recorded = {
            (unit.layout.unit, copy.start_bytes, copy.stop_bytes)
            for unit in run.units
            for copy in (*unit.shards, *unit.backups)
            if copy.server_id == process[0]
        }
        found = [
            shard_pb2.ShardReference(unit=at.unit, start_bytes=at.start_bytes, stop_bytes=at.stop_bytes)
            for at in listed.shards
            if not at.version and (at.unit, at.start_bytes, at.stop_bytes) not in recorded
        ]
        if found:
            request = shard_pb2.ReleaseShardsRequest(
                context=self._servers.context(run, run.committed_step), placement=last_placement, shards=found
            )
            response = await self._servers.call(process[0], "ReleaseShards", request, retry_for_s=0.0)
            self._state.cluster.note_free(process[0], response.free_bytes)

    async def _try_release(self, run: Run, server_id: str, release: Callable[[], Awaitable[None]]) -> bool:
        """Returns False if the server is unavailable. Other errors are logged."""
        try:
            await release()
        except UnavailableError:
            return False
        except NotFoundError:
            pass  # the server has no shard of the run
        except ShardwellError as error:
            logger.warning("run %r: reservations on server %r were not released: %s", run.name, server_id, error)
        return True

    async def _until_released(self, run: Run, process: tuple[str, str], release: Callable[[], Awaitable[None]]) -> None:
        """Calls ``release`` until the server process has answered, has ended, or the run is deleted."""
        reservation = ShardRecord(0, 0, *process)
        while not (run.deleted or self.has_ended(reservation)):
            if await self._try_release(run, process[0], release):
                return
            await asyncio.sleep(self._state.settings.lease_s / 3)

    # Publication

    async def publish(self, run: Run, unit: Unit, trainer: str, epoch: int) -> None:
        """Publishes the initial values that a trainer sent as version 0.

        Raises:
            StaleEpochError: Another trainer sends the initial values now.
            ConflictError: A server did not receive all of its values.
        """
        while not unit.published:
            _require_initializer(run, unit, trainer, epoch)
            self._servers.require_available(run)
            is_joined = unit.publishing.in_flight
            try:
                await unit.publishing(self._publish, run, unit, epoch)
            except ShardwellError:
                if not is_joined:
                    raise
                # The call of an earlier request failed, perhaps because its trainer is lost and its epoch over.

    async def _publish(self, run: Run, unit: Unit, epoch: int) -> None:
        if unit.published:
            return
        request = shard_pb2.PublishUnitRequest(
            context=common_pb2.RequestContext(run=run.name, run_id=run.identity.run_id, epoch=epoch),
            unit=unit.layout.unit,
            coordinator_epoch=self._state.term,
        )
        shards = unit.shards
        await self._servers.call_all(unit.owners, "PublishUnit", request)
        async with run.units.placement_lock:
            if unit.shards is not shards:
                return  # the unit was placed again: its owners have no values yet, even if they are the same as before
            if any(map(self._is_ending, shards)):  # and its values with it
                raise StaleEpochError(
                    f"unit {unit.layout.unit!r}: a shard server stopped before all initial values were published: "
                    "declare the unit again",
                    unit=unit.layout.unit,
                    epoch=epoch,
                )
            await self._state.save_unit(run, unit, published=True)
            unit.published = True
        self._state.events.add(EventKind.UNIT_PUBLISHED, f"unit {unit.layout.unit!r} is version 0", run=run.name)


def _require_initializer(run: Run, unit: Unit, trainer: str, epoch: int) -> None:
    """Raises StaleEpochError if the initial values of a unit are expected from another trainer, or another epoch."""
    initializer = run.initializer_of(unit.layout)
    if initializer is None or (trainer, epoch) != (initializer.trainer, initializer.epoch):
        current = 0 if initializer is None else initializer.epoch
        expected = "no trainer" if initializer is None else f"trainer {initializer.trainer!r} under epoch {current}"
        raise StaleEpochError(
            f"unit {unit.layout.unit!r}: trainer {trainer!r} sent initial values under epoch {epoch}, but they "
            f"are expected from {expected}: declare the unit again",
            unit=unit.layout.unit,
            epoch=current,
        )


def _require_same(run: Run, unit: Unit, layout: UnitLayout) -> None:
    """Raises UnitMismatchError if a declaration differs from the first one of the unit."""
    try:
        require_same_layout(unit.layout, layout)
    except UnitMismatchError as error:
        raise UnitMismatchError(f"{error}{_advice_on_rewrap(run)}", **error.data) from None


def _advice_on_rewrap(run: Run) -> str:
    """Returns the end of a message about units, if the run has those of a checkpoint."""
    if not run.checkpoints.lineage:
        return ""
    return (
        ". The run continues from a checkpoint: if the model is wrapped into other units on purpose, continue in a new "
        "run with join(..., rewrap=True)"
    )


def _check_new(run: Run, layout: UnitLayout) -> None:
    """Raises if the run cannot accept a new unit."""
    is_filled = run.filled_from is not None
    if run.committed_step and layout.holds_buffers and not is_filled:
        raise StepStateError(
            f"buffer {layout.parameters[0].name!r} is new, but run {run.name!r} has committed {run.committed_step} "
            "steps: every trainer must build the same model, with all its buffers, before the first step",
            buffer=layout.parameters[0].name,
        )
    if run.committed_step and not is_filled:
        raise StepStateError(
            f"unit {layout.unit!r} is new, but run {run.name!r} has committed {run.committed_step} steps: declare "
            "every unit before the first step, under the same name in every trainer. To wrap a model again, such as "
            "in a notebook, call shardwell.unwrap(model) before, or session.close() and shardwell.join again; it then "
            "continues with the run's values. Another model needs a run of its own, join(run=NAME)"
            f"{_advice_on_rewrap(run)}",
            unit=layout.unit,
        )
    if run.asynchronous and layout.holds_buffers:
        raise InvalidRequestError(
            f"consistency={run.settings.consistency}: the model has buffers, such as {layout.parameters[0].name!r}, "
            "whose values data rank 0 sets in each step. Use layers without buffers, or SYNCHRONOUS",
            buffer=layout.parameters[0].name,
        )
    if len(run.units) >= MAX_UNITS:
        raise CapacityError(
            f"unit {layout.unit!r} cannot be declared: run {run.name!r} has {len(run.units)} units, expected at most "
            f"{MAX_UNITS}. Wrap larger modules",
            unit=layout.unit,
        )
    if layout.tp_rank >= run.settings.world.tp or layout.pp_ranks[-1] >= run.settings.world.pp:
        raise InvalidRequestError(
            f"unit {layout.unit!r} has tp_rank={layout.tp_rank} and pp_rank={layout.pp_ranks[-1]}, which "
            f"{run.settings.world} does not have",
            unit=layout.unit,
        )
    if layout.cp != (1 if layout.holds_buffers else run.settings.world.cp):
        raise InvalidRequestError(
            f"unit {layout.unit!r} of {layout.kind} has cp={layout.cp}, but the run has {run.settings.world}",
            unit=layout.unit,
        )
    run.units.require_new_tensors(layout)
