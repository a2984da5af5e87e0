"""Declaring units, placing them on servers, and publishing their initial values."""

from __future__ import annotations

import asyncio
import logging

from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.placement.ranges import place
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.run_records import unit_record
from shardwell_server.coordinator.runs.units import Unit
from shardwell_server.coordinator.servers.lost_shards import check_kept
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import ShardRecord
from shardwell_server.coordinator.waiting import SharedCall, poll
from shardwell_wire.errors import (
    ConflictError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
    UnitMismatchError,
)
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, shard_pb2

logger = logging.getLogger(__name__)


class Units:
    """The units of every run.

    Args:
        state: The runs.
        servers: The shard servers.
    """

    def __init__(self, state: CoordinatorState, servers: ShardServers) -> None:
        self._state, self._servers = state, servers

    async def declare(self, run: Run, layout: UnitLayout, wait_s: float) -> Unit:
        """A unit by its layout; placed on servers when it is new. One that is refused leaves no trace.

        Raises:
            UnitMismatchError: It was declared with another layout.
            CapacityError: A server has no room for its part.
            UnavailableError: Not enough servers came within ``wait_s``, or an owner is silent.
            ConflictError: An owner has lost shards of the run.
        """
        unit = run.units.find(layout.unit)
        try:
            while unit is None or not self._has_room(unit):
                if unit is not None:
                    require_same_layout(unit.layout, layout)
                await self._wait_for_servers(run, wait_s)
                placing = run.placing.setdefault(layout.unit, SharedCall())
                try:
                    unit = await placing(lambda: self._place(run, layout))
                finally:
                    run.placing.pop(layout.unit, None)
        except UnavailableError:
            self._servers.check(run)  # it may be known by now that waiting does not help
            raise
        require_same_layout(unit.layout, layout)
        self._servers.check(run)
        return unit

    def _has_room(self, unit: Unit) -> bool:
        """Whether the owners have set memory aside; if the unit is not published, they must still have it."""
        return unit.published or not any(self._has_lost(at) for at in unit.shards)

    def _has_lost(self, shard: ShardRecord) -> bool:
        """Whether the process that was given a shard has ended."""
        server = self._state.cluster.servers.get(shard.server_id)
        return server is None or server.incarnation != shard.incarnation or server.ended

    async def _wait_for_servers(self, run: Run, wait_s: float) -> None:
        """Waits for the servers that a run begins with. Later units, and those whose owner left, take what is there."""
        cluster = self._state.cluster
        wanted = 1 if len(run.units) else self._state.settings.min_servers

        async def enough() -> bool | None:
            check_kept(run, cluster)
            return len(cluster.live) >= wanted or None

        if not await poll(cluster.changed, enough, wait_s):
            raise UnavailableError(
                f"run {run.name!r} waits for shard servers: {len(cluster.live)} of {wanted} are there; start more "
                "(shardwell-server shard --coordinator ...), or lower --min-servers",
            )

    async def _place(self, run: Run, layout: UnitLayout) -> Unit | None:
        """Places a unit that is new, or has lost an owner before it had values; one unit of a run after the other.

        A refused unit so is always the last, and the next one gets its index.

        Returns:
            None: A server that was chosen has ended meanwhile. Place the unit again.
        """
        async with run.placing_turn:
            unit = run.units.find(layout.unit)
            if unit is None:
                _check_new(run, layout)
                if (shards := await self._reserve(run, len(run.units), layout)) is None:
                    return None
                unit = Unit(len(run.units), layout, shards)
                run.units.add(unit)
            elif not self._has_room(unit):
                if (shards := await self._reserve(run, unit.index, unit.layout)) is None:
                    return None
                run.units.move(unit, shards)
            else:
                return unit
        owners = ", ".join(repr(shard.server_id) for shard in unit.shards)
        message = f"unit {unit.layout.unit!r}: {unit.layout.size_bytes} bytes on {owners}"
        self._state.events.add(EventKind.UNIT_PLACED, message, run=run.name)
        return unit

    async def _reserve(self, run: Run, index: int, layout: UnitLayout) -> tuple[ShardRecord, ...] | None:
        """Chooses servers for a unit, has them make room, and stores where the unit lives.

        What was reserved is released if a server refuses, or if that cannot be stored.

        Returns:
            None: A server that was chosen has ended meanwhile.
        """
        shards, placement = self._choose(layout), run.next_epoch()
        await self._state.save(run)  # the number is never given to another placement
        ranges = {shard.server_id: shard for shard in shards}

        def request(server_id: str) -> shard_pb2.ReserveUnitRequest:
            return shard_pb2.ReserveUnitRequest(
                context=self._servers.context(run, 0),
                unit=layout.to_proto(),
                unit_index=index,
                start_bytes=ranges[server_id].start_bytes,
                stop_bytes=ranges[server_id].stop_bytes,
                dp=run.settings.world.dp,
                placement=placement,
            )

        try:
            responses = await self._servers.call_all(ranges, "ReserveUnit", request)
            await self._state.store(run, self._state.storage.save_units, [unit_record(Unit(index, layout, shards))])
        except ShardwellError as error:
            await asyncio.gather(*(self._release(run, layout.unit, placement, shard) for shard in shards))
            if isinstance(error, UnavailableError) and any(map(self._has_lost, shards)):
                return None
            raise
        for server_id, response in responses.items():
            self._note_free(server_id, response.free_bytes)
        return shards

    def _choose(self, layout: UnitLayout) -> tuple[ShardRecord, ...]:
        cluster = self._state.cluster
        shards = []
        for piece in place(layout, cluster.candidates(), self._state.settings.min_shard_bytes):
            server = cluster.servers[piece.server_id]
            # Until the server tells: so that units declared at the same time are spread.
            server.reserved_bytes += piece.stop_bytes - piece.start_bytes
            shards.append(ShardRecord(piece.start_bytes, piece.stop_bytes, piece.server_id, server.incarnation))
        return tuple(sorted(shards, key=lambda shard: shard.start_bytes))

    def _note_free(self, server_id: str, free_bytes: int) -> None:
        server = self._state.cluster.servers[server_id]
        server.reserved_bytes = max(0, server.budget_bytes - free_bytes)

    async def _release(self, run: Run, unit: str, placement: int, shard: ShardRecord) -> None:
        """Has an owner take its reservation back; if it cannot be reached, later and in the background."""
        request = shard_pb2.ReleaseUnitRequest(context=self._servers.context(run, 0), unit=unit, placement=placement)

        async def release() -> bool:
            try:
                response = await self._servers.call(shard.server_id, "ReleaseUnit", request, retry_for_s=0.0)
            except UnavailableError:
                return False
            except ShardwellError as error:
                logger.warning("run %r: the reservation of unit %r stays: %s", run.name, unit, error)
                return True
            self._note_free(shard.server_id, response.free_bytes)
            return True

        async def release_later() -> None:
            while not (run.deleted or self._has_lost(shard)):
                await asyncio.sleep(self._state.settings.lease_s / 3)
                if await release():
                    return

        if not await release():
            self._state.tasks.start(release_later())

    async def publish(self, run: Run, unit: Unit, trainer: str, epoch: int) -> None:
        """Makes the initial values that a trainer sent version 0.

        Raises:
            StaleEpochError: Another trainer sends the initial values now.
            ConflictError: A server does not have all of them.
        """
        if unit.published:
            return
        if (trainer, epoch) != run.initializer:
            now, current = run.initializer or ("nobody", 0)
            raise StaleEpochError(
                f"unit {unit.layout.unit!r}: trainer {trainer!r} sent initial values under epoch {epoch}, but they "
                f"are to come from {now!r} under epoch {current}: declare the unit again",
                unit=unit.layout.unit,
                epoch=current,
            )
        self._servers.check(run)
        while not unit.published:
            await unit.publishing(lambda: self._publish(run, unit, epoch))

    async def _publish(self, run: Run, unit: Unit, epoch: int) -> None:
        if unit.published:
            return
        request = shard_pb2.PublishUnitRequest(
            context=common_pb2.RequestContext(run=run.name, run_id=run.identity.run_id, epoch=epoch),
            unit=unit.layout.unit,
            coordinator_epoch=self._state.term,
        )
        await self._servers.call_all(_owners(unit), "PublishUnit", lambda _: request)
        await self._state.store(run, self._state.storage.save_units, [unit_record(unit, published=True)])
        unit.published = True
        self._state.events.add(EventKind.UNIT_PUBLISHED, f"unit {unit.layout.unit!r} is version 0", run=run.name)


def _owners(unit: Unit) -> set[str]:
    return {shard.server_id for shard in unit.shards}


def _check_new(run: Run, layout: UnitLayout) -> None:
    """Refuses a unit that the run cannot take in any more."""
    run.settings.require_trains(run.name)
    if run.committed_step and layout.holds_buffers:
        raise StepStateError(
            f"buffer {layout.parameters[0].name!r} is new, but run {run.name!r} has committed {run.committed_step} "
            "steps: every trainer must build the same model, with all its buffers, before the first step",
            buffer=layout.parameters[0].name,
        )
    if run.committed_step:
        raise StepStateError(
            f"unit {layout.unit!r} is new, but run {run.name!r} has committed {run.committed_step} steps: declare "
            "every unit before the first step, with the same names as in the trainers before",
            unit=layout.unit,
        )
    for name in layout.index_by_name:
        if (owner := run.units.holder_of(name)) is not None:
            raise ConflictError(
                f"{_thing(layout)} {name!r} of unit {layout.unit!r} is in unit {owner!r} already: wrap the model as "
                "the trainers before did, or use another run",
                parameter=name,
            )


def _thing(layout: UnitLayout) -> str:
    return "buffer" if layout.holds_buffers else "parameter"


def require_same_layout(declared: UnitLayout, layout: UnitLayout) -> None:
    """Raises UnitMismatchError naming the first difference between two layouts of a unit."""
    unit = layout.unit
    if declared.placement != layout.placement:
        raise UnitMismatchError(
            f"unit {unit!r} was declared with placement {declared.placement!r}, now with {layout.placement!r}: every "
            "trainer must pass the same to fully_shard",
            unit=unit,
            expected=declared.placement,
            actual=layout.placement,
        )
    if declared.kind != layout.kind:
        raise UnitMismatchError(
            f"unit {unit!r} was declared with {declared.kind}, now with {layout.kind}: give the unit another name",
            unit=unit,
            expected=declared.kind,
            actual=layout.kind,
        )
    for expected, got in zip(declared.parameters, layout.parameters, strict=False):
        for what in ("name", "shape", "dtype", "aliases"):
            left, right = getattr(expected, what), getattr(got, what)
            if left != right:
                raise UnitMismatchError(
                    f"unit {unit!r}: {_thing(layout)} {expected.name!r} was declared with {what} {left!r}, now with "
                    f"{right!r}: every trainer must build the same model",
                    unit=unit,
                    parameter=expected.name,
                    expected=left,
                    actual=right,
                )
    if len(declared.parameters) != len(layout.parameters):
        longer = max(declared.parameters, layout.parameters, key=len)
        first = longer[min(len(declared.parameters), len(layout.parameters))].name
        raise UnitMismatchError(
            f"unit {unit!r} was declared with {len(declared.parameters)} {declared.kind}, now with "
            f"{len(layout.parameters)}; {first!r} is in one of them only: every trainer must build the same model",
            unit=unit,
            parameter=first,
        )
