"""What a training run will take: memory of trainers and servers, bytes per step, and their time. Pure arithmetic.

Counted as the code does it: a unit's flat vector as ``UnitLayout`` lays it out, the units in flight as ``Units``
gathers and frees them, a server's buffers as its ``memory.py`` reserves them. With ``tp`` above 1 every matrix is
taken to be cut along its first dim, and vectors to be whole on each rank; with ``pp`` above 1 the blocks are split
evenly over the stages and everything else is on the first, which is the stage that is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardwell.module.prefetch import MAX_UNITS_AHEAD
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import UnitLayout, cut
from shardwell_wire.topology import World
from shardwell_wire.wire_dtypes import NAMES, stream_size

OPTIMIZER_STATES = {
    **dict.fromkeys(("adam", "adamw", "nadam", "radam", "adamax", "adadelta", "lamb"), 2),
    **dict.fromkeys(("sgd-momentum", "rmsprop", "adagrad", "lion", "muon"), 1),
    "sgd": 0,
}
"""Tensors of a parameter's size and dtype that an optimizer keeps on the servers."""

_RESERVED_STATES = 2
"""A server sets this many aside for every shard, whatever the optimizer."""


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """One unit of a model that is not sharded yet."""

    layout: UnitLayout
    block: int | None
    """Which of the model's repeated blocks it is, or is in; None for embeddings, heads and the rest."""
    around: tuple[str, ...] = ()
    """Names of the units around it: they stay gathered while it computes."""
    is_root: bool = False
    """Whether it is around all others: it stays gathered from the forward to the backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The run to plan."""

    world: World = field(default_factory=World)
    """The grid of logical ranks, each played by a trainer of its own."""
    num_servers: int = 1
    """Shard servers, all with the same memory."""
    bandwidth: float = 1e9 / 8
    """Bytes per second and direction of every trainer's and every server's link."""
    optimizer: str = "adamw"
    """One of ``OPTIMIZER_STATES``."""
    gather_dtype: str = "float32"
    """How float32 weights travel."""
    push_dtype: str = "float32"
    """How float32 gradients travel."""
    prefetch_bytes: int = 128 << 20
    """As ``join``'s."""
    push_bytes: int = 64 << 20
    """As ``join``'s."""
    same_host: bool = False
    """Whether trainers read weights in the memory of servers of their host."""
    activation_bytes: int | None = None
    """What autograd keeps of one work item; None if it is not known."""
    min_shard_bytes: int = 64 << 10
    """As the coordinator's."""

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZER_STATES:
            raise UsageError(f"optimizer={self.optimizer!r}: expected one of {', '.join(sorted(OPTIMIZER_STATES))}")
        if self.num_servers < 1 or self.bandwidth <= 0:
            raise UsageError(
                f"num_servers={self.num_servers}, bandwidth={self.bandwidth}: expected at least 1 server and a "
                "positive number of bytes per second"
            )
        for name in ("gather_dtype", "push_dtype"):
            if getattr(self, name) not in NAMES:
                raise UsageError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(NAMES)}")


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """One trainer, that of the first pipeline stage. Bytes; the interpreter and libraries are not in it."""

    weights_bytes: int
    """Units in use at once, without those fetched ahead."""
    prefetch_bytes: int
    """Units fetched ahead, or memory kept for them."""
    gradients_bytes: int
    """Gradients in ``.grad``: of the unit in its backward and of those around it."""
    push_bytes: int
    """Gradients on their way."""
    activation_bytes: int | None
    """What autograd keeps for the backward; None if not known."""
    received_bytes: int
    """Weights per step."""
    sent_bytes: int
    """Gradients per step."""

    @property
    def total_bytes(self) -> int:
        """Of what is known."""
        known = self.weights_bytes + self.prefetch_bytes + self.gradients_bytes + self.push_bytes
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
        return self.weights_bytes + self.optimizer_bytes + self.contributions_bytes + self.mean_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run takes."""

    world: World
    num_servers: int
    bandwidth: float
    num_parameters: int
    model_bytes: int
    num_units: int
    replica_bytes: int
    """Weights, gradients and optimizer state: what a trainer of a replicated model would hold."""
    trainer: TrainerPlan
    server: ServerPlan

    @property
    def link_seconds(self) -> dict[str, float]:
        """Seconds per step for which each link direction is busy at least."""
        busy = {
            "trainer in": self.trainer.received_bytes,
            "trainer out": self.trainer.sent_bytes,
            "server in": self.server.received_bytes,
            "server out": self.server.sent_bytes,
        }
        return {link: size_bytes / self.bandwidth for link, size_bytes in busy.items()}

    @property
    def transfer_seconds(self) -> float:
        """A step takes no less: the busiest link's time, links being full duplex and everything overlapped."""
        return max(self.link_seconds.values())


def make_plan(units: Sequence[PlannedUnit], options: PlanOptions) -> Plan:
    """Works out what a run takes.

    Args:
        units: In the order in which ``auto_wrap`` makes them, the unit around all others last.
        options: The run.

    Raises:
        WorldError: The blocks can not be split evenly over the pipeline stages.
        UsageError: There is no unit.
    """
    if not units:
        raise UsageError("the model has no parameters: there is nothing to plan")
    world = options.world
    blocks = {unit.block for unit in units if unit.block is not None}
    if world.pp > 1:
        world.check_fits(num_layers=len(blocks) or 1)
    whole = sum(unit.layout.size_bytes for unit in units)
    stages = [_stage(units, stage, len(blocks), world) for stage in range(world.pp)]
    # Each of the tp ranks has its own part of every unit, and so has its own units on the servers.
    on_servers = [unit for stage in stages for unit in stage for _ in range(world.tp)]
    return Plan(
        world=world,
        num_servers=options.num_servers,
        bandwidth=options.bandwidth,
        num_parameters=sum(parameter.numel for unit in units for parameter in unit.layout.parameters),
        model_bytes=whole,
        num_units=len(units),
        replica_bytes=whole * (2 + OPTIMIZER_STATES[options.optimizer]),
        trainer=_plan_trainer(stages[0], options),
        server=_plan_server(on_servers, options),
    )


def _stage(units: Sequence[PlannedUnit], stage: int, num_blocks: int, world: World) -> list[PlannedUnit]:
    """The units of one pipeline stage, cut for tensor parallelism."""
    per_stage = max(1, num_blocks // world.pp)
    mine = [unit for unit in units if (0 if unit.block is None else unit.block // per_stage) == stage]
    return [replace(unit, layout=_cut_for_tp(unit.layout, world.tp)) for unit in mine]


def _cut_for_tp(layout: UnitLayout, tp: int) -> UnitLayout:
    parameters = [
        replace(parameter, shape=(math.ceil(parameter.shape[0] / tp), *parameter.shape[1:]))
        if len(parameter.shape) > 1
        else parameter
        for parameter in layout.parameters
    ]
    return UnitLayout(layout.unit, tuple(parameters))


def _plan_trainer(units: Sequence[PlannedUnit], options: PlanOptions) -> TrainerPlan:
    sizes = {unit.layout.unit: unit.layout.size_bytes for unit in units}
    # With pipeline stages a unit around this one may be another stage's.
    in_use = max(unit.layout.size_bytes + sum(sizes.get(outer, 0) for outer in unit.around) for unit in units)
    in_place = options.same_host
    return TrainerPlan(
        weights_bytes=0 if in_place else in_use,
        prefetch_bytes=0 if in_place else _ahead(units, options.prefetch_bytes),
        gradients_bytes=in_use,
        # What is pushed through shared memory is copied there at once.
        push_bytes=0 if in_place else min(sum(sizes.values()), max(options.push_bytes, *sizes.values())),
        activation_bytes=options.activation_bytes,
        received_bytes=0 if in_place else _received(units, options.gather_dtype),
        sent_bytes=_pushed(units, options.push_dtype),
    )


def _ahead(units: Sequence[PlannedUnit], limit_bytes: int) -> int:
    """The most that is fetched ahead of some unit, as ``Units`` does it."""
    most = 0
    for index, unit in enumerate(units):
        following = [later for later in units[index + 1 :] if later.layout.unit not in unit.around]
        ahead = 0
        for later in following[:MAX_UNITS_AHEAD]:
            if ahead + later.layout.size_bytes > limit_bytes:
                break
            ahead += later.layout.size_bytes
        most = max(most, ahead)
    return most


def _received(units: Sequence[PlannedUnit], dtype: str) -> int:
    """Weights come for the forward and for the backward; those of the unit around all others once."""
    return sum(_wire_bytes(unit.layout, dtype) * (1 if unit.is_root else 2) for unit in units)


def _pushed(units: Sequence[PlannedUnit], dtype: str) -> int:
    return sum(_wire_bytes(unit.layout, dtype) for unit in units)


def _wire_bytes(layout: UnitLayout, dtype: str) -> int:
    if dtype == "float32":
        return layout.size_bytes
    return stream_size(layout, layout.segments(0, layout.size_bytes), NAMES[dtype])


def _plan_server(units: Sequence[PlannedUnit], options: PlanOptions) -> ServerPlan:
    dp, weights = options.world.dp, [1.0] * options.num_servers
    held, largest = [0] * options.num_servers, [0] * options.num_servers
    for unit in units:
        for server, (start, stop) in enumerate(cut(unit.layout.size_bytes, weights, options.min_shard_bytes)):
            held[server] += stop - start
            largest[server] = max(largest[server], stop - start)
    most = max(range(options.num_servers), key=lambda server: held[server])
    shards, total = held[most], sum(held)
    share = shards / total if total else 0.0
    mean = shards if dp > 1 else 0
    return ServerPlan(
        weights_bytes=shards,
        optimizer_bytes=shards * OPTIMIZER_STATES[options.optimizer],
        contributions_bytes=shards * dp,
        mean_bytes=mean,
        staging_bytes=largest[most],
        reserved_bytes=shards * (1 + max(_RESERVED_STATES, OPTIMIZER_STATES[options.optimizer]) + dp)
        + mean
        + largest[most],
        sent_bytes=0 if options.same_host else round(_received(units, options.gather_dtype) * dp * share),
        received_bytes=round(_pushed(units, options.push_dtype) * dp * share),
    )
