"""Estimates of a training run: memory of trainers and servers, bytes per step, and transfer time. Pure arithmetic.

The numbers follow the code: flat vectors have the size of their ``UnitLayout``, the rehearsal gathers and frees units,
and a server's buffers are those that it reserves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardwell.module.strategy import ReplicaOptions, ShardingStrategy
from shardwell.planning.division import Division
from shardwell.planning.options import PlanOptions
from shardwell.planning.rehearsal import PlannedUnit
from shardwell.planning.trainers import RehearsedTrainer, num_contributors, stored_units, wire_bytes
from shardwell_wire.errors import UsageError
from shardwell_wire.host.shared_memory import HEAD_BYTES
from shardwell_wire.model.layout import cut

_RESERVED_STATES = 2
"""State tensors that a server reserves for every shard, whatever the optimizer."""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """The trainers of one pipeline rank, in bytes. Does not include the interpreter and libraries."""

    stages: tuple[int, ...]
    """Pipeline stages of the trainer."""

    weights_bytes: int
    """Peak of the weights: in use, prefetched and kept."""
    ahead_bytes: int
    """Maximum of prefetched weights that have not been used yet. Part of ``weights_bytes``."""
    kept_bytes: int
    """Maximum of weights kept for their next use in the step. Part of ``weights_bytes``."""
    idle_bytes: int
    """Idle buffers for the next units, at the peak."""
    bases_bytes: int
    """Weights that are kept in their wire dtype as bases of deltas."""
    gradients_bytes: int
    """Gradients in ``.grad``: of the unit in its backward and of the units that contain it, or with a pipeline schedule
    of all units."""
    push_bytes: int
    """Gradients that are being sent."""
    activation_bytes: int | None
    """Activations that autograd saves for the backward, and outputs of stages; None if unknown."""
    stage_buffers_bytes: int
    """Buffers of all micro-batches for what other stages send: activations, and gradients of activations."""
    received_bytes: int
    """Weights received per step, including the trainer's share of the weights that its host's cache receives."""
    sent_bytes: int
    """Gradients sent per step."""
    sent_to_stages_bytes: int
    """Activations, and gradients of activations, sent to other trainers of the pipeline per step."""
    collective_bytes: int
    """Payload of the tensor-parallel collectives of the trainer's stages per step; 0 if it is unknown."""

    @property
    def total_bytes(self) -> int:
        """Total, without unknown activations."""
        total = self.weights_bytes + self.idle_bytes + self.bases_bytes
        total += self.gradients_bytes + self.push_bytes + self.stage_buffers_bytes
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
    division: Division
    num_parameters: int
    model_bytes: int
    num_units: int
    """Units of the run."""
    replica_bytes: int
    """Weights, gradients and optimizer state in a trainer of a replicated model."""
    trainers: tuple[TrainerPlan, ...]
    """By pipeline rank. All tensor-parallel ranks need the same, but only rank 0 sends gradients of whole
    parameters."""
    host_cache_bytes: int
    """Weights in shared memory of a host, in addition to the trainers' own memory."""
    server: ServerPlan

    @property
    def trainer(self) -> TrainerPlan:
        """The trainer that needs the most memory."""
        return max(self.trainers, key=lambda trainer: trainer.total_bytes)

    @property
    def link_seconds(self) -> dict[str, float]:
        """Minimum seconds per step for which each link direction is busy with weights and gradients.

        Trainers use the link of their host. Transfers between the trainers of a replica are not included.
        """
        ranks = self.options.ranks_per_host
        busy = {
            "trainer in": max(trainer.received_bytes for trainer in self.trainers) * ranks,
            "trainer out": max(trainer.sent_bytes for trainer in self.trainers) * ranks,
            "server in": self.server.received_bytes,
            "server out": self.server.sent_bytes,
        }
        used = not self.options.same_host
        return {link: used * size_bytes / self.options.bandwidth for link, size_bytes in busy.items()}

    @property
    def transfer_seconds(self) -> float:
        """Lower bound of a step's seconds: the busiest link's time, if links are full duplex and all work overlaps."""
        return max(self.link_seconds.values())


def make_plan(division: Division, options: PlanOptions) -> Plan:
    """Estimates a run.

    Args:
        division: The model, divided over the world of the run.
        options: The run. Its ``activation_bytes`` override the recorded activations of every trainer.

    Raises:
        UsageError: There is no unit.
    """
    if not any(stage.units for stage in division.stages):
        raise UsageError("the model has no parameters: there is nothing to plan")
    trainers = [RehearsedTrainer.rehearsed(division, pp_rank, options) for pp_rank in range(options.world.pp)]
    units = stored_units(trainers, options)
    model_bytes = sum(unit.size_bytes for unit in units)
    return Plan(
        options=options,
        division=division,
        num_parameters=sum(parameter.numel for unit in units for parameter in unit.layout.parameters),
        model_bytes=model_bytes,
        num_units=len(units),
        replica_bytes=2 * model_bytes + sum(options.state_bytes(unit.layout) for unit in units),
        trainers=tuple(_plan_trainer(trainer, division, options) for trainer in trainers),
        host_cache_bytes=max(
            sum(unit.size_bytes + HEAD_BYTES * options.num_servers for unit in trainer.cached) for trainer in trainers
        ),
        server=_plan_server(trainers, options),
    )


def _activation_bytes(trainer: RehearsedTrainer, options: PlanOptions) -> int | None:
    """Returns the peak of the activations of all stages and micro-batches; None: unknown."""
    if options.activation_bytes is not None:
        return options.activation_bytes
    sizes = {}
    for index, stage in trainer.stages.items():
        if stage.saved is None:
            return None
        calls = [call for unit in stage.units for call in unit.calls]
        sizes[index] = stage.saved.sizes(
            recomputed={call.module for call in calls if call.can_recompute and options.checkpoint_activations},
            # On the CPU, offloading to "cpu" moves nothing.
            moved={call.module for call in calls} if options.offload_to not in (None, "cpu") else (),
            moved_min_bytes=options.offload_min_bytes,
        )
    per_micro_batch = {index: sizes[index].held + stage.output_bytes for index, stage in trainer.stages.items()}
    held = max(sum(count * per_micro_batch[index] for index, count in counts.items()) for counts in trainer.in_flight)
    return held + max(each.peak - each.held for each in sizes.values())


def _plan_trainer(trainer: RehearsedTrainer, division: Division, options: PlanOptions) -> TrainerPlan:
    sizes, ranks = [unit.size_bytes for unit in trainer.units], options.ranks_per_host
    # Gradients in shared memory are copied at once, so none are in flight. They are never rounded.
    streams = not (options.same_host and options.push_dtype == "float32")
    schedule, stages = division.schedule, trainer.stages.values()
    crossing = sum(stage.received_bytes + stage.sent_bytes for stage in stages)
    crossing *= 0 if schedule is None else schedule.num_micro_batches
    return TrainerPlan(
        stages=tuple(trainer.stages),
        weights_bytes=trainer.rehearsal.peak_bytes,
        ahead_bytes=trainer.rehearsal.ahead_bytes,
        kept_bytes=trainer.rehearsal.kept_bytes,
        idle_bytes=trainer.rehearsal.idle_bytes,
        bases_bytes=sum(wire_bytes(unit.layout, options.gather_dtype) for unit in trainer.bases),
        gradients_bytes=sum(sizes) if schedule is not None else _gradients(trainer.units, options, streams=streams),
        push_bytes=min(sum(sizes), max(options.push_bytes, *sizes)) if streams else 0,
        activation_bytes=_activation_bytes(trainer, options),
        stage_buffers_bytes=crossing,
        received_bytes=trainer.received_bytes(options, ranks, 1) // ranks,
        sent_bytes=sum(wire_bytes(unit.layout, options.push_dtype) for unit in trainer.units),
        # What a stage receives in the forward, it sends back as gradients in the backward.
        sent_to_stages_bytes=crossing,
        collective_bytes=_collective_bytes(division, trainer.stages),
    )


def _collective_bytes(division: Division, stages: Collection[int]) -> int:
    described = division.description.stages if division.description is not None else ()
    return sum(
        collective.bytes_per_step
        for index, stage in enumerate(described)
        if index in stages
        for layer in stage.layers
        for collective in layer.collectives
    )


def _gradients(units: Collection[PlannedUnit], options: PlanOptions, *, streams: bool) -> int:
    """Returns the peak bytes of gradients: of a unit and the units that contain it, or of a replica's bucket."""
    held = {unit.name: unit.size_bytes for unit in units}
    if options.strategy is ShardingStrategy.NO_SHARD and streams:
        bucket_bytes = ReplicaOptions().bucket_bytes
        largest = {unit.name: max(spec.size_bytes for spec in unit.layout.parameters) for unit in units}
        held = {name: min(size, bucket_bytes + largest[name]) for name, size in held.items()}
    # The unit of a module may have no whole parameters, or no split ones.
    return max(held[unit.name] + sum(held.get(outer, 0) for outer in unit.outer_units) for unit in units)


def _plan_server(trainers: Sequence[RehearsedTrainer], options: PlanOptions) -> ServerPlan:
    world, count = options.world, options.num_servers
    held, states, largest, encoded = [0] * count, [0.0] * count, [0] * count, [0] * count
    contributed, means = [0] * count, [0] * count
    stored = stored_units(trainers, options)
    for unit in stored:
        unit_states = options.state_bytes(unit.layout)
        emptiest_first = sorted(range(count), key=held.__getitem__)
        ranges = cut(unit.size_bytes, [1.0] * count, options.min_shard_bytes)
        for server, (start, stop) in zip(emptiest_first, ranges, strict=True):
            held[server] += stop - start
            states[server] += unit_states * (stop - start) / max(1, unit.size_bytes)
            contributed[server] += (stop - start) * world.dp * num_contributors(unit)
            means[server] += stop - start if world.dp * num_contributors(unit) > 1 else 0
            largest[server] = max(largest[server], stop - start)
            if options.gather_dtype != "float32":
                encoded[server] += wire_bytes(unit.layout, options.gather_dtype, start, stop)
    most = max(range(count), key=lambda server: held[server])
    shards, share = held[most], held[most] / sum(held) if sum(held) else 0.0
    optimizer_bytes, mean = round(states[most]), means[most]
    hosts = -(-world.dp // options.ranks_per_host)
    sent = sum(trainer.received_bytes(options, world.dp, hosts, tp=world.tp) for trainer in trainers)
    received = world.dp * sum(wire_bytes(unit.layout, options.push_dtype) * num_contributors(unit) for unit in stored)
    return ServerPlan(
        weights_bytes=shards,
        optimizer_bytes=optimizer_bytes,
        contributions_bytes=contributed[most],
        mean_bytes=mean,
        encoded_bytes=encoded[most],
        staging_bytes=largest[most],
        reserved_bytes=shards
        + contributed[most]
        + max(_RESERVED_STATES * shards, optimizer_bytes)
        + mean
        + largest[most],
        sent_bytes=round(sent * share),
        received_bytes=round(received * share),
    )
