"""Estimates of a training run: memory of trainers and servers, bytes per step, and transfer time. Pure arithmetic.

The numbers follow the code: flat vectors have the size of their ``UnitLayout``, the rehearsal gathers and frees units,
and a server's buffers are those that it reserves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from shardwell.module.strategy import ReplicaOptions, ShardingStrategy
from shardwell.planning.activations import SavedActivations
from shardwell.planning.options import PlanOptions
from shardwell.planning.rehearsal import PlannedUnit, Rehearsal, rehearse
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import UnitLayout, cut
from shardwell_wire.shared_segment import HEAD_BYTES
from shardwell_wire.topology import World
from shardwell_wire.wire_dtypes import PUSH_NAMES, stream_size

_RESERVED_STATES = 2
"""State tensors that a server reserves for every shard, whatever the optimizer."""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """A trainer of the first pipeline stage, in bytes. Does not include the interpreter and libraries."""

    weights_bytes: int
    """Peak of the weights: in use, prefetched and kept."""
    ahead_bytes: int
    """Maximum of prefetched weights that have not been used yet. Part of ``weights_bytes``."""
    kept_bytes: int
    """Maximum of weights kept for their next use in the step. Part of ``weights_bytes``."""
    idle_bytes: int
    """Idle buffers for the next units, at the peak."""
    gradients_bytes: int
    """Gradients in ``.grad``: of the unit in its backward and of the units that contain it."""
    push_bytes: int
    """Gradients that are being sent."""
    activation_bytes: int | None
    """Activations that autograd saves for the backward; None if unknown."""
    received_bytes: int
    """Weights received per step, including the trainer's share of the weights that its host's cache receives."""
    sent_bytes: int
    """Gradients sent per step."""

    @property
    def total_bytes(self) -> int:
        """Total, without unknown activations."""
        total = self.weights_bytes + self.idle_bytes + self.gradients_bytes + self.push_bytes
        return total + (self.activation_bytes or 0)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The shard server with the largest shards, in bytes. Does not include the interpreter and libraries."""

    weights_bytes: int
    optimizer_bytes: int
    contributions_bytes: int
    """One gradient per data-parallel rank, held until the commit."""
    mean_bytes: int
    """Mean of the contributions; 0 at dp=1."""
    encoded_bytes: int
    """Weights encoded in a lossy wire dtype, cached for all trainers while memory suffices."""
    staging_bytes: int
    """One buffer of the size of the largest shard."""
    reserved_bytes: int
    """The part of its memory budget that it reserves."""
    sent_bytes: int
    """Weights sent per step to all trainers."""
    received_bytes: int
    """Gradients received per step from all trainers."""

    @property
    def total_bytes(self) -> int:
        """Total, without staging, which is used only if versions or streams overlap."""
        held = self.weights_bytes + self.optimizer_bytes + self.encoded_bytes
        return held + self.contributions_bytes + self.mean_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """The estimates of a run."""

    options: PlanOptions
    num_parameters: int
    model_bytes: int
    num_units: int
    replica_bytes: int
    """Weights, gradients and optimizer state in a trainer of a replicated model."""
    trainer: TrainerPlan
    host_cache_bytes: int
    """Weights in shared memory of a host, in addition to the trainers' own memory."""
    server: ServerPlan

    @property
    def link_seconds(self) -> dict[str, float]:
        """Minimum seconds per step for which each link direction is busy. Trainers use the link of their host."""
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
        """Lower bound of a step's seconds: the busiest link's time, if links are full duplex and all work overlaps."""
        return max(self.link_seconds.values())


def make_plan(units: Sequence[PlannedUnit], options: PlanOptions, saved: SavedActivations | None = None) -> Plan:
    """Estimates a run.

    Args:
        units: Units in the order in which ``auto_wrap`` makes them, the root unit last.
        options: The run.
        saved: Activations that autograd saves; unused if ``options.activation_bytes`` is set.

    Raises:
        WorldError: The blocks cannot be split evenly over the pipeline stages.
        UsageError: There is no unit.
    """
    if not units:
        raise UsageError("the model has no parameters: there is nothing to plan")
    whole = sum(unit.size_bytes for unit in units)
    stages = [_Stage.rehearsed(stage, options) for stage in _cut_into_stages(units, options.world)]
    first = stages[0]
    return Plan(
        options=options,
        num_parameters=sum(parameter.numel for unit in units for parameter in unit.layout.parameters),
        model_bytes=whole,
        num_units=len(units),
        replica_bytes=2 * whole + sum(options.state_bytes(unit.layout) for unit in units),
        trainer=_plan_trainer(first, options, _activation_bytes(units, first, options, saved)),
        host_cache_bytes=sum(unit.size_bytes + HEAD_BYTES * options.num_servers for unit in first.cached),
        server=_plan_server(stages, options),
    )


@dataclass(frozen=True, slots=True)
class _Stage:
    """The trainer of one pipeline stage and tensor-parallel rank."""

    units: list[PlannedUnit]
    cached: list[PlannedUnit]
    """The units in the cache of the host."""
    rehearsal: Rehearsal

    @classmethod
    def rehearsed(cls, units: list[PlannedUnit], options: PlanOptions) -> _Stage:
        cached = [] if options.reads_servers else _cached(units, options)
        in_place = units if options.reads_servers else cached
        return cls(units, cached, rehearse(units, options, {unit.name for unit in in_place}))

    def received_bytes(self, options: PlanOptions, trainers: int, hosts: int) -> int:
        """Returns the bytes of weights that servers send per step to this stage's trainers on ``hosts`` hosts."""
        cached = {unit.name for unit in self.cached}
        return sum(
            _wire_bytes(unit.layout, options.gather_dtype)
            * (hosts if unit.name in cached else trainers * self.rehearsal.gathers[unit.name])
            for unit in self.units
            if not options.reads_servers
        )

    def pushed_bytes(self, options: PlanOptions) -> int:
        return sum(_wire_bytes(unit.layout, options.push_dtype) for unit in self.units)


def _cut_into_stages(units: Sequence[PlannedUnit], world: World) -> list[list[PlannedUnit]]:
    """Returns the units of each pipeline stage, cut for tensor parallelism.

    Blocks are split evenly over the stages, other units are on the first stage. Every matrix is cut along its first
    dim, vectors are whole on each tensor-parallel rank.

    Raises:
        WorldError: The blocks cannot be split evenly.
    """
    num_blocks = len({unit.block for unit in units if unit.block is not None})
    if world.pp > 1:
        world.check_fits(num_layers=num_blocks or 1)
    per_stage = max(1, num_blocks // world.pp)
    stages: list[list[PlannedUnit]] = [[] for _ in range(world.pp)]
    for unit in units:
        stage = 0 if unit.block is None else unit.block // per_stage
        stages[stage].append(replace(unit, layout=_cut_for_tp(unit.layout, world.tp)))
    return stages


def _cut_for_tp(layout: UnitLayout, tp: int) -> UnitLayout:
    parameters = [
        replace(parameter, shape=(math.ceil(parameter.shape[0] / tp), *parameter.shape[1:]))
        if len(parameter.shape) > 1
        else parameter
        for parameter in layout.parameters
    ]
    return UnitLayout(layout.unit, tuple(parameters))


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


def _activation_bytes(
    units: Sequence[PlannedUnit], stage: _Stage, options: PlanOptions, saved: SavedActivations | None
) -> int | None:
    if options.activation_bytes is not None or saved is None:
        return options.activation_bytes
    own = {call.module for unit in stage.units for call in unit.calls}
    calls = [call for unit in units for call in unit.calls]
    # On the CPU, offloading to "cpu" moves nothing.
    moved = options.offload_to not in (None, "cpu")
    return saved.peak_bytes(
        absent={call.module for call in calls} - own,
        recomputed={call.module for call in calls if call.can_recompute and options.checkpoint_activations},
        moved=own if moved else (),
        moved_min_bytes=options.offload_min_bytes,
    )


def _plan_trainer(stage: _Stage, options: PlanOptions, activation_bytes: int | None) -> TrainerPlan:
    sizes, ranks = [unit.size_bytes for unit in stage.units], options.ranks_per_host
    # Gradients in shared memory are copied at once, so none are in flight. They are never rounded.
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
    """Returns the peak bytes of gradients: of a unit and the units that contain it, or of a replica's bucket."""
    held = {unit.name: unit.size_bytes for unit in units}
    if options.strategy is ShardingStrategy.NO_SHARD and streams:
        bucket_bytes = ReplicaOptions().bucket_bytes
        largest = {unit.name: max(spec.size_bytes for spec in unit.layout.parameters) for unit in units}
        held = {name: min(size, bucket_bytes + largest[name]) for name, size in held.items()}
    # With pipeline stages, a unit that contains another may belong to another stage.
    return max(held[unit.name] + sum(held.get(outer, 0) for outer in unit.outer_units) for unit in units)


def _wire_bytes(layout: UnitLayout, dtype: str, start: int = 0, stop: int | None = None) -> int:
    """Returns the bytes of a part of a flat vector on the wire."""
    stop = layout.size_bytes if stop is None else stop
    return stop - start if dtype == "float32" else stream_size(layout, layout.segments(start, stop), PUSH_NAMES[dtype])


def _plan_server(stages: Sequence[_Stage], options: PlanOptions) -> ServerPlan:
    world, count = options.world, options.num_servers
    held, states, largest, encoded = [0] * count, [0.0] * count, [0] * count, [0] * count
    # Each tensor-parallel rank has a part of every unit, and its own units on the servers.
    for unit in [unit for stage in stages for unit in stage.units for _ in range(world.tp)]:
        unit_states = options.state_bytes(unit.layout)
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
