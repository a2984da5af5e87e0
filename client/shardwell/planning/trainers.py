"""The trainers of a planned run: their units, their gathers, and what they receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwell.module.strategy import ShardingStrategy
from shardwell.parallel.schedules import micro_batches_in_flight
from shardwell.planning.division import Division, PlannedStage
from shardwell.planning.options import PlanOptions
from shardwell.planning.rehearsal import PlannedUnit, Rehearsal, rehearse, rehearse_schedule
from shardwell_wire.encoding import value_deltas
from shardwell_wire.encoding.wire_dtypes import GATHER_NAMES, PUSH_NAMES, stream_size
from shardwell_wire.model.layout import UnitLayout


def num_copies(unit: PlannedUnit, options: PlanOptions) -> int:
    """Returns the number of tensor-parallel ranks that have a unit of their own in place of this one."""
    return options.world.tp if unit.is_split else 1


def num_contributors(unit: PlannedUnit) -> int:
    """Returns the number of trainers of a replica that push gradients of a unit: one per stage that holds it."""
    return len(unit.layout.pp_ranks)


def stored_units(trainers: Sequence[RehearsedTrainer], options: PlanOptions) -> list[PlannedUnit]:
    """Returns the units that servers store. A unit that several stages hold is stored once.

    Args:
        trainers: Those of tensor-parallel rank 0, by pipeline rank.
        options: The run.
    """
    return [
        unit
        for pp_rank, trainer in enumerate(trainers)
        for unit in trainer.units
        if unit.layout.pp_ranks[0] == pp_rank
        for _ in range(num_copies(unit, options))
    ]


@dataclass(frozen=True, slots=True)
class RehearsedTrainer:
    """The trainer of one pipeline rank and of tensor-parallel rank 0."""

    stages: dict[int, PlannedStage]
    units: list[PlannedUnit]
    cached: list[PlannedUnit]
    """The units in the cache of the host."""
    bases: list[PlannedUnit]
    """The units whose streams the trainer keeps as bases of deltas."""
    rehearsal: Rehearsal
    in_flight: Sequence[Mapping[int, int]]
    """Numbers of micro-batches with activations, by stage, at several moments of a step."""

    @classmethod
    def rehearsed(cls, division: Division, pp_rank: int, options: PlanOptions) -> RehearsedTrainer:
        schedule = division.schedule
        indices = [0] if schedule is None else schedule.stages_of(pp_rank)
        stages = {index: division.stages[index] for index in indices}
        units = [unit for stage in stages.values() for unit in stage.units]
        cached = [] if options.reads_servers else _cached(units, options)
        in_place = {unit.name for unit in (units if options.reads_servers else cached)}
        bases = _bases([unit for unit in units if unit.name not in in_place], options)
        if schedule is None:
            return cls(stages, units, cached, bases, rehearse(units, options, in_place), [{0: 1}])
        in_flight = micro_batches_in_flight(schedule, pp_rank)
        return cls(stages, units, cached, bases, rehearse_schedule(units, in_place), in_flight)

    def received_bytes(self, options: PlanOptions, trainers: int, hosts: int, *, tp: int = 1) -> int:
        """Returns the bytes of weights that servers send per step.

        Args:
            options: The run.
            trainers: Data-parallel ranks that receive them.
            hosts: Hosts of these ranks.
            tp: Tensor-parallel ranks that receive them.
        """
        cached, bases = ({unit.name for unit in units} for units in (self.cached, self.bases))

        def num_transfers(name: str) -> int:
            gathers = self.rehearsal.gathers[name]
            return hosts if name in cached else trainers * (min(1, gathers) if name in bases else gathers)

        return tp * sum(
            wire_bytes(unit.layout, options.gather_dtype) * num_transfers(unit.name)
            for unit in self.units
            if not options.reads_servers
        )


def _bases(units: Sequence[PlannedUnit], options: PlanOptions) -> list[PlannedUnit]:
    """Returns the units whose streams are kept: in their order, each unit that fits."""
    if options.same_host or GATHER_NAMES[options.gather_dtype] not in value_deltas.WIRE_DTYPES:
        return []
    kept, free_bytes = [], options.delta_cache_bytes
    for unit in units:
        size_bytes = wire_bytes(unit.layout, options.gather_dtype)
        if size_bytes <= free_bytes:
            kept.append(unit)
            free_bytes -= size_bytes
    return kept


def _cached(units: Sequence[PlannedUnit], options: PlanOptions) -> list[PlannedUnit]:
    """Returns the units in the host cache: in the order of their declaration, each unit that fits."""
    if options.strategy is ShardingStrategy.HYBRID_SHARD:
        return list(units)
    cached, free_bytes = [], options.host_cache_bytes
    for unit in units:
        if unit.size_bytes <= free_bytes:
            cached.append(unit)
            free_bytes -= unit.size_bytes
    return cached


def wire_bytes(layout: UnitLayout, dtype: str, start: int = 0, stop: int | None = None) -> int:
    """Returns the bytes of a part of a flat vector on the wire."""
    stop = layout.size_bytes if stop is None else stop
    return stop - start if dtype == "float32" else stream_size(layout, layout.segments(start, stop), PUSH_NAMES[dtype])
