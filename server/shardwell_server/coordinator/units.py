"""Declaring units, placing them on servers, and publishing their initial values."""

from __future__ import annotations

from dataclasses import replace

from shardwell_server.coordinator.declared_units import Unit
from shardwell_server.coordinator.events import EventKind
from shardwell_server.coordinator.placement import place
from shardwell_server.coordinator.records import ShardRecord
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.run_records import unit_record
from shardwell_server.coordinator.servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.waiting import poll
from shardwell_wire.errors import (
    ConflictError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
    UnitMismatchError,
)
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, shard_pb2


class Units:
    """The units of every run.

    Args:
        state: The runs.
        servers: The shard servers.
    """

    def __init__(self, state: CoordinatorState, servers: ShardServers) -> None:
        self._state, self._servers = state, servers

    async def declare(self, run: Run, layout: UnitLayout, wait_s: float) -> Unit:
        """A unit by its layout; placed on servers when it is new.

        Raises:
            UnitMismatchError: It was declared with another layout.
            CapacityError: A server has no room for its part.
            UnavailableError: Not enough servers came within ``wait_s``, or an owner is silent.
            ConflictError: An owner has lost shards of the run.
        """
        unit = run.units.find(layout.unit)
        if unit is None:
            await self._wait_for_servers(run, wait_s)
            # Another trainer may have declared it in the meantime.
            unit = run.units.find(layout.unit) or self._place(run, layout)
        require_same_layout(unit.layout, layout)
        try:
            while not self._has_room(unit):
                await unit.in_flight(lambda: self._reserve(run, unit))
        except UnavailableError:
            self._servers.check(run)  # it may be known by now that waiting does not help
            raise
        self._servers.check(run)
        return unit

    def _has_room(self, unit: Unit) -> bool:
        """Whether the owners have set memory aside, and have not been restarted before the unit was published."""
        servers = self._state.cluster.servers
        return unit.published or (
            unit.reserved and all(servers[at.server_id].incarnation == at.incarnation for at in unit.shards)
        )

    async def _wait_for_servers(self, run: Run, wait_s: float) -> None:
        cluster, wanted = self._state.cluster, self._state.settings.min_servers

        async def enough() -> bool | None:
            return len(cluster.live) >= wanted or None

        if not await poll(cluster.changed, enough, wait_s):
            raise UnavailableError(
                f"run {run.name!r} waits for shard servers: {len(cluster.live)} of {wanted} are there; start more "
                "(shardwell-server shard --coordinator ...), or lower --min-servers",
            )

    def _place(self, run: Run, layout: UnitLayout) -> Unit:
        _check_new(run, layout)
        cluster = self._state.cluster
        ranges = place(layout, cluster.candidates(), self._state.settings.min_shard_bytes)
        shards = []
        for piece in ranges:
            server = cluster.servers[piece.server_id]
            # Until the server tells: so that units declared at the same time are spread.
            server.reserved_bytes += piece.stop_bytes - piece.start_bytes
            shards.append(ShardRecord(piece.start_bytes, piece.stop_bytes, piece.server_id, server.incarnation))
        unit = Unit(len(run.units), layout, tuple(sorted(shards, key=lambda shard: shard.start_bytes)))
        run.units.add(unit)
        return unit

    async def _reserve(self, run: Run, unit: Unit) -> None:
        """Stores where the unit shall live and has the owners make room; a repetition finds the same ranges."""
        if self._has_room(unit):
            return
        cluster = self._state.cluster
        processes = {shard.server_id: cluster.require(shard.server_id).incarnation for shard in unit.shards}
        run.units.move(unit, tuple(replace(shard, incarnation=processes[shard.server_id]) for shard in unit.shards))
        await self._store(run, unit)
        ranges = {shard.server_id: shard for shard in unit.shards}

        def request(server_id: str) -> shard_pb2.ReserveUnitRequest:
            return shard_pb2.ReserveUnitRequest(
                context=self._servers.context(run, 0),
                unit=unit.layout.to_proto(),
                unit_index=unit.index,
                start_bytes=ranges[server_id].start_bytes,
                stop_bytes=ranges[server_id].stop_bytes,
                dp=run.settings.world.dp,
            )

        responses = await self._servers.call_all(ranges, "ReserveUnit", request)
        for server_id, response in responses.items():
            server = cluster.servers[server_id]
            server.reserved_bytes = max(0, server.budget_bytes - response.free_bytes)
        unit.reserved = True
        owners = ", ".join(repr(shard.server_id) for shard in unit.shards)
        message = f"unit {unit.layout.unit!r}: {unit.layout.size_bytes} bytes on {owners}"
        self._state.events.add(EventKind.UNIT_PLACED, message, run=run.name)

    async def _store(self, run: Run, unit: Unit) -> None:
        """Makes durable where the unit lives; indices on disk have no gaps."""
        await self._state.save(run)
        units = [other for other in run.units.before(unit) if not other.stored] + [unit]
        await self._state.store(run, self._state.storage.save_units, [unit_record(each) for each in units])
        for each in units:
            each.stored = True

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
            await unit.in_flight(lambda: self._publish(run, unit, epoch))

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
