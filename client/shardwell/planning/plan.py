"""What a training run will take: memory of trainers and servers, bytes per step, and their time. Pure arithmetic.

Counted as the code does it: a unit's flat vector as ``UnitLayout`` lays it out, the units in flight as ``rehearsal``
has them gathered and freed, a server's buffers as its ``memory.py`` reserves them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardwell.module.strategy import ReplicaOptions, ShardingStrategy
from shardwell.planning.activations import SavedActivations
from shardwell.planning.options import PlanOptions, state_bytes
from shardwell.planning.planned_units import PlannedUnit, cut_into_stages
from shardwell.planning.rehearsal import Rehearsal, rehearse
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import UnitLayout, cut
from shardwell_wire.shared_segment import HEAD_BYTES
from shardwell_wire.wire_dtypes import NAMES, stream_size

_RESERVED_STATES = 2
"""A server sets this many aside for every shard, whatever the optimizer."""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """One trainer, that of the first pipeline stage. Bytes; the interpreter and libraries are not in it."""

    weights_bytes: int
    """Units in use, fetched ahead and kept, at most at once."""
    ahead_bytes: int
    """Of them, those that wait for their first use, at most at once."""
    kept_bytes: int
    """Of them, those that wait for their next use in the step, at most at once."""
    idle_bytes: int
    """Buffers kept for the next units, at the peak."""
    gradients_bytes: int
    """Gradients in ``.grad``: of the unit in its backward and of those around it."""
    push_bytes: int
    """Gradients on their way."""
    activation_bytes: int | None
    """What autograd keeps for the backward; None if not known."""
    received_bytes: int
    """Weights per step; its part of what comes to the cache of its host."""
    sent_bytes: int
    """Gradients per step."""

    @property
    def total_bytes(self) -> int:
        """Of what is known."""
        known = self.weights_bytes + self.idle_bytes + self.gradients_bytes + self.push_bytes
        return known + (self.activation_bytes or 0)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The shard server with the most to hold. Bytes; the interpreter and libraries are not in it."""

    weights_bytes: int
    optimizer_bytes: int
    contributions_bytes: int
    """One gradient per data-parallel rank, until the commit."""
    mean_bytes: int
    """Their mean; none at dp=1."""
    encoded_bytes: int
    """Weights as a lossy wire dtype has them, kept for all who ask while there is room."""
    staging_bytes: int
    """Room for one buffer of its largest shard."""
    reserved_bytes: int
    """What it sets aside of its memory budget."""
    sent_bytes: int
    """Weights per step, to all trainers."""
    received_bytes: int
    """Gradients per step, of all trainers."""

    @property
    def total_bytes(self) -> int:
        """Without staging, which is used where versions or streams overlap."""
        held = self.weights_bytes + self.optimizer_bytes + self.encoded_bytes
        return held + self.contributions_bytes + self.mean_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run takes."""

    options: PlanOptions
    num_parameters: int
    model_bytes: int
    num_units: int
    replica_bytes: int
    """Weights, gradients and optimizer state: what a trainer of a replicated model would hold."""
    trainer: TrainerPlan
    host_cache_bytes: int
    """Weights that the trainers of a host share in memory, beside their own."""
    server: ServerPlan

    @property
    def link_seconds(self) -> dict[str, float]:
        """Seconds per step for which each link direction is busy at least; a link of trainers is that of their host."""
        ranks = self.options.ranks_per_host
        busy = {
            "trainer in": self.trainer.received_bytes * ranks,
            "trainer out": self.trainer.sent_bytes * ranks,
            "server in": self.server.received_bytes,
            "server out": self.server.sent_bytes,
        }
        used = not self.options.same_host
        return {link: used * size_bytes / self.options.bandwidth for link, size_bytes in busy.items()}

    @property
    def transfer_seconds(self) -> float:
        """A step takes no less: the busiest link's time, links being full duplex and everything overlapped."""
        return max(self.link_seconds.values())


def make_plan(units: Sequence[PlannedUnit], options: PlanOptions, saved: SavedActivations | None = None) -> Plan:
    """Works out what a run takes.

    Args:
        units: In the order in which ``auto_wrap`` makes them, the unit around all others last.
        options: The run.
        saved: What autograd keeps, unless ``options`` say how much.

    Raises:
        WorldError: The blocks can not be split evenly over the pipeline stages.
        UsageError: There is no unit.
    """
    if not units:
        raise UsageError("the model has no parameters: there is nothing to plan")
    whole = sum(unit.size_bytes for unit in units)
    stages = [_Stage.rehearsed(stage, options) for stage in cut_into_stages(units, options.world)]
    first = stages[0]
    return Plan(
        options=options,
        num_parameters=sum(parameter.numel for unit in units for parameter in unit.layout.parameters),
        model_bytes=whole,
        num_units=len(units),
        replica_bytes=2 * whole + sum(state_bytes(unit.layout, options.optimizer) for unit in units),
        trainer=_plan_trainer(first, options, _activation_bytes(units, first, options, saved)),
        host_cache_bytes=sum(unit.size_bytes + HEAD_BYTES * options.num_servers for unit in first.cached),
        server=_plan_server(stages, options),
    )


@dataclass(frozen=True, slots=True)
class _Stage:
    """The trainer of one pipeline stage and tensor-parallel rank."""

    units: list[PlannedUnit]
    cached: list[PlannedUnit]
    """Those in the cache of its host."""
    rehearsal: Rehearsal

    @classmethod
    def rehearsed(cls, units: list[PlannedUnit], options: PlanOptions) -> _Stage:
        cached = [] if options.reads_servers else _cached(units, options)
        in_place = units if options.reads_servers else cached
        return cls(units, cached, rehearse(units, options, {unit.name for unit in in_place}))

    def received_bytes(self, options: PlanOptions, trainers: int, hosts: int) -> int:
        """Weights per step that so many trainers of this stage on so many hosts get from servers."""
        cached = {unit.name for unit in self.cached}
        return sum(
            _wire_bytes(unit.layout, options.gather_dtype)
            * (hosts if unit.name in cached else trainers * self.rehearsal.gathers[unit.name])
            for unit in self.units
            if not options.reads_servers
        )

    def pushed_bytes(self, options: PlanOptions) -> int:
        return sum(_wire_bytes(unit.layout, options.push_dtype) for unit in self.units)


def _cached(units: Sequence[PlannedUnit], options: PlanOptions) -> list[PlannedUnit]:
    """Units are taken in as they are declared, if they fit."""
    if options.strategy is ShardingStrategy.HYBRID_SHARD:
        return list(units)
    cached, room = [], options.host_cache_bytes
    for unit in units:
        if unit.size_bytes <= room:
            cached.append(unit)
            room -= unit.size_bytes
    return cached


def _activation_bytes(
    units: Sequence[PlannedUnit], stage: _Stage, options: PlanOptions, saved: SavedActivations | None
) -> int | None:
    if options.activation_bytes is not None or saved is None:
        return options.activation_bytes
    here = {call.module for unit in stage.units for call in unit.calls}
    calls = [call for unit in units for call in unit.calls]
    # What is offloaded "cpu" is there already.
    moved = options.offload_to not in (None, "cpu")
    return saved.peak_bytes(
        absent={call.module for call in calls} - here,
        recomputed={call.module for call in calls if call.can_recompute and options.checkpoint_activations},
        moved=here if moved else (),
        moved_min_bytes=options.offload_min_bytes,
    )


def _plan_trainer(stage: _Stage, options: PlanOptions, activation_bytes: int | None) -> TrainerPlan:
    sizes, ranks = [unit.size_bytes for unit in stage.units], options.ranks_per_host
    # What is pushed through shared memory is copied there at once; it is never rounded.
    streams = not (options.same_host and options.push_dtype == "float32")
    return TrainerPlan(
        weights_bytes=stage.rehearsal.peak_bytes,
        ahead_bytes=stage.rehearsal.ahead_bytes,
        kept_bytes=stage.rehearsal.kept_bytes,
        idle_bytes=stage.rehearsal.idle_bytes,
        gradients_bytes=_gradients(stage.units, options, streams=streams),
        push_bytes=min(sum(sizes), max(options.push_bytes, *sizes)) if streams else 0,
        activation_bytes=activation_bytes,
        received_bytes=stage.received_bytes(options, ranks, 1) // ranks,
        sent_bytes=stage.pushed_bytes(options),
    )


def _gradients(units: Collection[PlannedUnit], options: PlanOptions, *, streams: bool) -> int:
    """Those of a unit and of the units around it are here at once; a replica's leave in buckets."""
    held = {unit.name: unit.size_bytes for unit in units}
    if options.strategy is ShardingStrategy.NO_SHARD and streams:
        bucket_bytes = ReplicaOptions().bucket_bytes
        largest = {unit.name: max(spec.size_bytes for spec in unit.layout.parameters) for unit in units}
        held = {name: min(size, bucket_bytes + largest[name]) for name, size in held.items()}
    # With pipeline stages a unit around another may be another stage's.
    return max(held[unit.name] + sum(held.get(outer, 0) for outer in unit.around) for unit in units)


def _wire_bytes(layout: UnitLayout, dtype: str, start: int = 0, stop: int | None = None) -> int:
    """What a part of a flat vector takes on the wire."""
    stop = layout.size_bytes if stop is None else stop
    return stop - start if dtype == "float32" else stream_size(layout, layout.segments(start, stop), NAMES[dtype])


def _plan_server(stages: Sequence[_Stage], options: PlanOptions) -> ServerPlan:
    world, count = options.world, options.num_servers
    held, states, largest, encoded = [0] * count, [0.0] * count, [0] * count, [0] * count
    # Each of the tp ranks has its own part of every unit, and so has its own units on the servers.
    for unit in [unit for stage in stages for unit in stage.units for _ in range(world.tp)]:
        unit_states = state_bytes(unit.layout, options.optimizer)
        for server, (start, stop) in enumerate(cut(unit.size_bytes, [1.0] * count, options.min_shard_bytes)):
            held[server] += stop - start
            states[server] += unit_states * (stop - start) / max(1, unit.size_bytes)
            largest[server] = max(largest[server], stop - start)
            if options.gather_dtype != "float32":
                encoded[server] += _wire_bytes(unit.layout, options.gather_dtype, start, stop)
    most = max(range(count), key=lambda server: held[server])
    shards, share = held[most], held[most] / sum(held) if sum(held) else 0.0
    optimizer_bytes, mean = round(states[most]), shards if world.dp > 1 else 0
    hosts = -(-world.dp // options.ranks_per_host)
    sent = sum(stage.received_bytes(options, world.dp, hosts) for stage in stages) * world.tp
    received = sum(stage.pushed_bytes(options) for stage in stages) * world.tp * world.dp
    return ServerPlan(
        weights_bytes=shards,
        optimizer_bytes=optimizer_bytes,
        contributions_bytes=shards * world.dp,
        mean_bytes=mean,
        encoded_bytes=encoded[most],
        staging_bytes=largest[most],
        reserved_bytes=shards * (1 + world.dp) + max(_RESERVED_STATES * shards, optimizer_bytes) + mean + largest[most],
        sent_bytes=round(sent * share),
        received_bytes=round(received * share),
    )
