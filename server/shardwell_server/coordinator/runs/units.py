"""The units of one run, and where their shards live."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwell_server.coordinator.storage.records import ShardRecord
from shardwell_server.coordinator.waiting import SharedCall
from shardwell_wire.errors import NotFoundError
from shardwell_wire.layout import UnitLayout


@dataclass(slots=True)
class Unit:
    """A unit, and where its shards live: its owners have set memory aside."""

    index: int
    layout: UnitLayout
    shards: tuple[ShardRecord, ...]
    published: bool = False
    publishing: SharedCall[None] = field(default_factory=SharedCall)


class DeclaredUnits:
    """The units of a run, by index.

    Args:
        run: Name of the run.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._units: list[Unit] = []
        self._by_name: dict[str, Unit] = {}
        self._unit_of_parameter: dict[str, str] = {}
        self._processes: list[tuple[str, str]] | None = None

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    @property
    def layouts(self) -> list[UnitLayout]:
        return [unit.layout for unit in self]

    @property
    def cuts(self) -> list[list[int]]:
        """Where the shards of each unit begin, in bytes of its flat vector."""
        return [[shard.start_bytes for shard in unit.shards] for unit in self]

    @property
    def servers(self) -> dict[str, str]:
        """Servers that hold shards, each with the incarnation of a process that was given some."""
        return dict(self.processes)

    @property
    def processes(self) -> list[tuple[str, str]]:
        """The server processes that were given shards: id and incarnation."""
        if self._processes is None:
            given = {(shard.server_id, shard.incarnation) for unit in self for shard in unit.shards}
            self._processes = sorted(given)
        return self._processes

    def of_process(self, process: tuple[str, str]) -> list[Unit]:
        """The units of which a server process, by id and incarnation, was given shards."""
        return [unit for unit in self if any((at.server_id, at.incarnation) == process for at in unit.shards)]

    def add(self, unit: Unit) -> None:
        """Takes in the unit with the next index."""
        assert unit.index == len(self)
        self._units.append(unit)
        self._processes = None
        self._by_name[unit.layout.unit] = unit
        self._unit_of_parameter.update(dict.fromkeys(unit.layout.index_by_name, unit.layout.unit))

    def move(self, unit: Unit, shards: tuple[ShardRecord, ...]) -> None:
        """Other server processes have the unit's shards now."""
        unit.shards = shards
        self._processes = None

    def find(self, name: str) -> Unit | None:
        return self._by_name.get(name)

    def require(self, name: str) -> Unit:
        """Raises NotFoundError if no unit of that name was declared."""
        unit = self.find(name)
        if unit is None:
            raise NotFoundError(f"run {self._run!r} has no unit {name!r}: declare it first", run=self._run, unit=name)
        return unit

    def holder_of(self, parameter: str) -> str | None:
        """Name of the unit that a parameter is in, by its name."""
        return self._unit_of_parameter.get(parameter)
