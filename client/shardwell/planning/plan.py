"""``plan_run``: from a model's function to the memory of trainers and servers, bytes per step, and transfer time.

The numbers of a trainer come from a dry run of the SDK's own code (``dry_run.py``), and those of a server from the
layouts that the trainer has declared: a server's buffers are those that it reserves. ``to_json`` and ``to_tables`` show
a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group, RenderableType
from rich.table import Table

from shardwell.module.strategy import ReplicaOptions, ShardingStrategy
from shardwell.module.unit import Unit
from shardwell.parallel.pipeline import micro_batches_in_flight
from shardwell.planning.dry_run import DryRun, dry_run, wire_bytes
from shardwell.planning.plan_model import Division, DivisionOptions, PlannedStage, PlanOptions, divide, load
from shardwell.tables import division_tables, format_size, report_table
from shardwell.wrapping.policies import WrapPolicy
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


def plan_run(
    model: str | Callable[..., Any],
    options: PlanOptions,
    *,
    division: DivisionOptions | None = None,
    batch: int | None = None,
    length: int = 1024,
    dtype: torch.dtype | None = None,
    policy: WrapPolicy | None = None,
) -> Plan:
    """Estimates a training run as ``shardwell plan`` does. The model takes no memory.

    Args:
        model: ``module:callable``, the path of a Hugging Face ``config.json``, or a callable. A callable returns the
            model, or ``(model, (tokens,))`` with the arguments of an example call. ``batch`` and ``length`` are passed
            if it has arguments of these names; ``batch`` is then the number of sequences of a micro-batch.
        options: World, servers, links and memory settings of the run.
        division: How the model is divided over the tensor and pipeline axes of the world. None: the defaults.
        batch: Sequences per work item. None: one per micro-batch.
        length: Tokens per sequence. With context parallelism: of the part of one rank.
        dtype: Default dtype of parameters. None: the model's.
        policy: As in ``auto_wrap``.

    Returns:
        The plan. ``plan.division.stages`` has the units of every stage, ``plan.division.description`` the layers.

    Raises:
        UsageError: The model cannot be built from shapes, not be divided or not be sharded; the message says why.
        TiedParameterError: Two stages of one trainer share a parameter.
    """
    division = division or DivisionOptions()
    schedule = division.schedule_plan(options.world)
    batch = batch if batch is not None else 1 if schedule is None else schedule.num_micro_batches
    if batch < 1 or length < 1:
        raise UsageError(f"batch={batch}, length={length}: expected at least 1")
    micro_batch = batch if schedule is None else schedule.micro_batch_size(batch)
    shapes = load(model, batch=micro_batch, length=length, dtype=dtype)
    return _make_plan(divide(shapes, options.world, division), options, policy)


def _make_plan(division: Division, options: PlanOptions, policy: WrapPolicy | None) -> Plan:
    runs = [dry_run(division, pp_rank, options, policy) for pp_rank in range(options.world.pp)]
    units = _stored_units(runs, options)
    if not units:
        raise UsageError("the model has no parameters: there is nothing to plan")
    model_bytes = sum(unit.size_bytes for unit in units)
    return Plan(
        options=options,
        division=division,
        num_parameters=sum(parameter.numel for unit in units for parameter in unit.layout.parameters),
        model_bytes=model_bytes,
        num_units=len(units),
        replica_bytes=2 * model_bytes + sum(options.state_bytes(unit.layout) for unit in units),
        trainers=tuple(_plan_trainer(run, pp_rank, division) for pp_rank, run in enumerate(runs)),
        host_cache_bytes=max(
            sum(unit.size_bytes + HEAD_BYTES * options.num_servers for unit in run.units if unit.index in run.cached)
            for run in runs
        ),
        server=_plan_server(runs, options),
    )


def _num_parts(unit: Unit, options: PlanOptions) -> int:
    """Returns the number of tensor-parallel ranks that have a unit of their own in place of this one."""
    return options.world.tp if unit.layout.holds_parts else 1


def _stored_units(runs: Sequence[DryRun], options: PlanOptions) -> list[Unit]:
    """Returns the units that servers store. A unit that several stages hold is stored once.

    Args:
        runs: The trainers of tensor-parallel rank 0, by pipeline rank.
    """
    return [
        unit
        for pp_rank, run in enumerate(runs)
        for unit in run.units
        if unit.layout.pp_ranks[0] == pp_rank
        for _ in range(_num_parts(unit, options))
    ]


def _plan_trainer(run: DryRun, pp_rank: int, division: Division) -> TrainerPlan:
    options, schedule, units = run.options, division.schedule, list(run.units)
    indices = [0] if schedule is None else schedule.stages_of(pp_rank)
    stages = {index: division.stages[index] for index in indices}
    sizes, ranks = [unit.size_bytes for unit in units], options.ranks_per_host
    crossing = sum(stage.received_bytes + stage.sent_bytes for stage in stages.values())
    crossing *= 0 if schedule is None else schedule.num_micro_batches
    in_flight = [{0: 1}] if schedule is None else micro_batches_in_flight(schedule, pp_rank)
    return TrainerPlan(
        stages=tuple(stages),
        weights_bytes=run.weights_bytes,
        ahead_bytes=run.ahead_bytes,
        kept_bytes=run.kept_bytes,
        idle_bytes=run.idle_bytes,
        bases_bytes=sum(wire_bytes(unit.layout, options.gather_dtype) for unit in units if unit.index in run.bases),
        gradients_bytes=_gradients(units, options) if schedule is None else sum(sizes),
        push_bytes=min(sum(sizes), max(options.push_bytes, *sizes)) if options.streams_gradients else 0,
        activation_bytes=_activation_bytes(stages, in_flight, options),
        stage_buffers_bytes=crossing,
        received_bytes=_received_bytes(run, ranks, 1) // ranks,
        sent_bytes=sum(run.sent_bytes(unit) for unit in units),
        # What a stage receives in the forward, it sends back as gradients in the backward.
        sent_to_stages_bytes=crossing,
        collective_bytes=_collective_bytes(division, stages),
    )


def _received_bytes(run: DryRun, trainers: int, hosts: int) -> int:
    """Returns the bytes of weights that servers send per step to so many data-parallel ranks on so many hosts."""
    total, bases = 0, run.bases
    for unit in run.units if not run.options.reads_servers else ():
        gathers = run.gathers[unit.index]
        transfers = trainers * (min(1, gathers) if unit.index in bases else gathers)
        total += wire_bytes(unit.layout, run.options.gather_dtype) * (hosts if unit.index in run.cached else transfers)
    return total


def _activation_bytes(
    stages: Mapping[int, PlannedStage], in_flight: Iterable[Mapping[int, int]], options: PlanOptions
) -> int | None:
    """Returns the peak of the activations of all stages and micro-batches; None: unknown.

    Args:
        in_flight: Numbers of micro-batches with activations, by stage, at several moments of a step.
    """
    if options.activation_bytes is not None:
        return options.activation_bytes
    held, extra = {}, 0
    for index, stage in stages.items():
        if stage.saved is None:
            return None
        size = stage.saved.sizes(
            recomputes=options.checkpoint_activations,
            # On the CPU, offloading to "cpu" moves nothing.
            moved_min_bytes=None if options.offload_to in (None, "cpu") else options.offload_min_bytes,
        )
        held[index], extra = size.held + stage.output_bytes, max(extra, size.peak - size.held)
    return extra + max(sum(count * held[index] for index, count in counts.items()) for counts in in_flight)


def _collective_bytes(division: Division, stages: Collection[int]) -> int:
    described = division.description.stages if division.description is not None else ()
    return sum(
        collective.bytes_per_step
        for index, stage in enumerate(described)
        if index in stages
        for layer in stage.layers
        for collective in layer.collectives
    )


def _gradients(units: Sequence[Unit], options: PlanOptions) -> int:
    """Returns the peak bytes of gradients: of a unit and the units around it, or of a bucket of each."""
    held = {unit: unit.size_bytes for unit in units}
    if options.strategy is ShardingStrategy.NO_SHARD and options.streams_gradients:
        bucket_bytes = ReplicaOptions().bucket_bytes
        largest = {unit: max(spec.size_bytes for spec in unit.layout.parameters) for unit in units}
        held = {unit: min(size, bucket_bytes + largest[unit]) for unit, size in held.items()}
    parts = {unit: {id(part) for module in unit.modules for part in module.modules()} for unit in units}
    return max(
        sum(held[outer] for outer in units if any(id(module) in parts[outer] for module in unit.modules))
        for unit in units
    )


def _plan_server(runs: Sequence[DryRun], options: PlanOptions) -> ServerPlan:
    world, count = options.world, options.num_servers
    held, states, largest, encoded = [0] * count, [0.0] * count, [0] * count, [0] * count
    contributed, means = [0] * count, [0] * count
    for unit in _stored_units(runs, options):
        unit_states = options.state_bytes(unit.layout)
        num_contributions = world.dp * unit.layout.contributors_per_item
        emptiest_first = sorted(range(count), key=held.__getitem__)
        ranges = cut(unit.size_bytes, [1.0] * count, options.min_shard_bytes)
        for server, (start, stop) in zip(emptiest_first, ranges, strict=True):
            held[server] += stop - start
            states[server] += unit_states * (stop - start) / max(1, unit.size_bytes)
            contributed[server] += (stop - start) * num_contributions
            means[server] += stop - start if num_contributions > 1 else 0
            largest[server] = max(largest[server], stop - start)
            if options.gather_dtype != "float32":
                encoded[server] += wire_bytes(unit.layout, options.gather_dtype, start, stop)
    most = max(range(count), key=lambda server: held[server])
    shards, share = held[most], held[most] / sum(held) if sum(held) else 0.0
    optimizer_bytes, mean = round(states[most]), means[most]
    hosts = -(-world.dp // options.ranks_per_host)
    sent = world.cp * world.tp * sum(_received_bytes(run, world.dp, hosts) for run in runs)
    pushed = sum(run.sent_bytes(unit) * _num_parts(unit, options) for run in runs for unit in run.units)
    received = world.dp * world.cp * pushed
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


# ---- tables ----

_COUNTS = ("num_parameters", "model_bytes", "num_units", "replica_bytes", "host_cache_bytes")
"""Fields of ``Plan``."""


def to_json(plan: Plan) -> dict[str, object]:
    """Returns the plan as numbers of bytes and seconds."""
    schedule, model = plan.division.schedule, plan.division.description
    return {
        "world": asdict(plan.options.world),
        "num_servers": plan.options.num_servers,
        "bandwidth": plan.options.bandwidth,
        "schedule": None if schedule is None else asdict(schedule),
        "model": None
        if model is None
        else MessageToDict(model, preserving_proto_field_name=True, always_print_fields_with_no_presence=True),
        **{name: getattr(plan, name) for name in _COUNTS},
        "trainers": [{**asdict(trainer), "total_bytes": trainer.total_bytes} for trainer in plan.trainers],
        "server": asdict(plan.server),
        "server_total_bytes": plan.server.total_bytes,
        "link_seconds": plan.link_seconds,
        "transfer_seconds": plan.transfer_seconds,
        "assumptions": list(assumptions(plan)),
    }


def to_tables(plan: Plan) -> RenderableType:
    """Returns tables of stages, trainers, servers and steps, and the assumptions."""
    world, num_servers = plan.options.world, plan.options.num_servers
    model, schedule = plan.division.description, plan.division.schedule
    return Group(
        f"{plan.num_parameters:,} parameters, {format_size(plan.model_bytes)}, in {plan.num_units} units; "
        f"{world.size} trainers as {world}, {num_servers} servers",
        *([] if model is None else division_tables([model], world.tp)),
        *([] if schedule is None else ["", schedule.describe()]),
        "",
        _trainer_table(plan),
        "",
        report_table(("EACH SERVER", ""), _server_rows(plan)),
        "",
        report_table(("EACH STEP", ""), _step_rows(plan)),
        "",
        "Assumed:",
        *(f"- {line}" for line in assumptions(plan)),
    )


def describe(plan: Plan, *, width: int = 160) -> str:
    """Returns the tables as text. ``width``: characters per line."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(to_tables(plan))
    return capture.get()


def assumptions(plan: Plan) -> Iterator[str]:
    """Yields the assumptions of the numbers, which a run may not meet."""
    options, world = plan.options, plan.options.world
    if plan.division.schedule is not None:
        yield "a step is one call of the schedule by each replica"
        yield (
            "the loss function is not included: cross entropy needs about three times the logits of a micro-batch on "
            "the last stage"
        )
    else:
        yield "a step is one forward and one backward of each rank, and uses units in the model's order"
    yield "trainers compute on the CPU; the interpreter and libraries are not included"
    if world.tp > 1:
        yield "tp: activations are not divided; rank 0 is shown, which alone sends the gradients of whole parameters"
    if world.cp > 1:
        yield (
            "cp: a sequence of the plan is one rank's part; the keys and values of whole sequences, which one layer at "
            "a time receives, and their transfers are not included"
        )
    if world.replica_size > 1:
        yield "transfers inside a replica are not part of the links' times"
    if options.same_host:
        yield "servers run on the trainers' hosts: no bytes cross a link"
    if plan.host_cache_bytes:
        ranks = options.ranks_per_host
        yield f"{ranks} data-parallel {'ranks share' if ranks > 1 else 'rank uses'} a host, its link and its cache"
    if any(trainer.bases_bytes for trainer in plan.trainers):
        yield "deltas: servers send what has changed, which depends on the values: weights are counted as a whole"
    if options.checkpoint_activations:
        yield "checkpoints: around the outermost units, except those with batch normalisation"
    if options.strategy is ShardingStrategy.NO_SHARD:
        yield "replicas: gradients are pushed in buckets of the default size"


def _trainer_table(plan: Plan) -> Table:
    headings = ["EACH TRAINER"]
    for pp_rank, trainer in enumerate(plan.trainers):
        stages = ", ".join(map(str, trainer.stages))
        headings.append("" if len(plan.trainers) == 1 else f"PP {pp_rank} (STAGE {stages})")
    rows = zip(*(_trainer_rows(trainer, plan) for trainer in plan.trainers), strict=True)
    return report_table(headings, ((row[0][0], *(value for _, value in row)) for row in rows))


def _trainer_rows(trainer: TrainerPlan, plan: Plan) -> Iterator[tuple[str, str]]:
    yield "weights, maximum at once", format_size(trainer.weights_bytes)
    yield "  prefetched", format_size(trainer.ahead_bytes)
    yield "  kept for their next use in the step", format_size(trainer.kept_bytes)
    yield "idle buffers for the next weights", format_size(trainer.idle_bytes)
    if any(each.bases_bytes for each in plan.trainers):
        yield f"weights kept as {plan.options.gather_dtype}, as bases of deltas", format_size(trainer.bases_bytes)
    yield "gradients", format_size(trainer.gradients_bytes)
    yield "gradients being sent, maximum", format_size(trainer.push_bytes)
    yield (
        "activations",
        "unknown: pass --activations" if trainer.activation_bytes is None else format_size(trainer.activation_bytes),
    )
    if any(each.stage_buffers_bytes for each in plan.trainers):
        yield "buffers for values of other stages", format_size(trainer.stage_buffers_bytes)
    yield "total", format_size(trainer.total_bytes)
    if plan.host_cache_bytes:
        yield "weights in shared memory, for all trainers of the host", format_size(plan.host_cache_bytes)
    yield "for comparison: a replica's weights, gradients and optimizer state", format_size(plan.replica_bytes)


def _server_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    server = plan.server
    yield "weights", format_size(server.weights_bytes)
    yield "optimizer state", format_size(server.optimizer_bytes)
    yield (
        f"contributions of {plan.options.world.dp * plan.options.world.cp} ranks",
        format_size(server.contributions_bytes),
    )
    yield "mean gradient", format_size(server.mean_bytes)
    if server.encoded_bytes:
        yield (
            f"weights encoded as {plan.options.gather_dtype}, while memory suffices",
            format_size(server.encoded_bytes),
        )
    yield "total", format_size(server.total_bytes)
    yield "reserved part of --memory-budget", format_size(server.reserved_bytes)


def _step_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    seconds, ranks = plan.link_seconds, plan.options.ranks_per_host
    trainers, verb = ("a trainer", "s") if ranks == 1 else (f"the {ranks} trainers of a host", "")
    received = max(trainer.received_bytes for trainer in plan.trainers) * ranks
    sent = max(trainer.sent_bytes for trainer in plan.trainers) * ranks
    yield f"{trainers} receive{verb} weights", f"{format_size(received)} in {seconds['trainer in']:.3g} s"
    yield f"{trainers} send{verb} gradients", f"{format_size(sent)} in {seconds['trainer out']:.3g} s"
    yield "a server sends weights", f"{format_size(plan.server.sent_bytes)} in {seconds['server out']:.3g} s"
    yield "a server receives gradients", f"{format_size(plan.server.received_bytes)} in {seconds['server in']:.3g} s"
    if collectives := max(trainer.collective_bytes for trainer in plan.trainers):
        yield "payload of a trainer's tensor-parallel collectives", format_size(collectives)
    if to_stages := max(trainer.sent_to_stages_bytes for trainer in plan.trainers):
        yield "a trainer sends to other stages", format_size(to_stages)
    busiest = max(seconds, key=lambda link: seconds[link])
    rate = f"{plan.options.bandwidth * 8 / 1e9:g} Gbit/s"
    yield "minimum time of the links alone", f"{plan.transfer_seconds:.3g} s at {rate} (busiest: {busiest})"
