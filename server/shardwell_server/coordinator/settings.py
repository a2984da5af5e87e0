"""What a coordinator is told at its start, and what a run is told at its creation."""

from __future__ import annotations

from dataclasses import dataclass

from shardwell_wire.errors import ConflictError, RunMismatchError, WorldError
from shardwell_wire.topology import World
from shardwell_wire.v1 import coordinator_pb2

MAX_LAYERS = 1 << 16

MAX_RANK_ASSIGNMENT_ENTRIES = 1 << 20
"""A trainer's rank assignments name the members of their groups; more than this many do not fit a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a coordinator behaves."""

    lease_s: float = 10.0
    """A trainer or server that is silent for longer is taken to be lost."""
    min_servers: int = 1
    """Live shard servers to wait for before the first unit of a run is placed."""
    min_shard_bytes: int = 64 << 10
    """Units are not cut into smaller shards than this."""

    def __post_init__(self) -> None:
        if not 0.1 <= self.lease_s <= 3600:
            raise ValueError(f"lease_s={self.lease_s!r}: expected 0.1 to 3600 seconds")
        if self.min_servers < 1:
            raise ValueError(f"min_servers={self.min_servers!r}: expected at least 1")
        if self.min_shard_bytes < 1:
            raise ValueError(f"min_shard_bytes={self.min_shard_bytes!r}: expected at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """What a run is; fixed when it is created."""

    world: World
    seed: int
    min_trainers: int
    """Trainers that must be there before the first step; never 0."""
    num_layers: int
    """0: not known."""

    @property
    def trains(self) -> bool:
        """Whether steps can be taken; other worlds can be joined and looked at."""
        return self.world.tp == self.world.pp == 1

    def require_trains(self, run: str) -> None:
        """Raises ConflictError if steps cannot be taken."""
        if not self.trains:
            raise ConflictError(
                f"run {run!r} has {self.world}, which can be joined and looked at: only worlds with tp=1 and pp=1 take "
                "units and train"
            )

    @classmethod
    def from_proto(cls, config: coordinator_pb2.RunConfig, *, world_size: int) -> RunSettings:
        """Reads and checks what a trainer asks for.

        Args:
            config: The request's.
            world_size: Trainers the launcher says there are. 0: not known.

        Raises:
            WorldError: The world is impossible, or does not fit the trainers or the layers.
        """
        world = World.from_proto(config.world)
        world.check_fits(world_size=world_size)
        check_layers(world, config.num_layers)
        min_trainers = config.min_trainers or world.size
        if min_trainers > world.size:
            raise WorldError(f"min_trainers={min_trainers}: expected 1 to {world.size}, the size of {world}")
        if world.tp * world.pp > 1 and min_trainers < world.size:
            raise WorldError(
                f"min_trainers={min_trainers}: {world} needs a trainer for each of its {world.size} ranks, "
                "since only data ranks can share one"
            )
        entries = -(-world.size // min_trainers) * (world.dp + world.tp + world.pp)
        if entries > MAX_RANK_ASSIGNMENT_ENTRIES:
            raise WorldError(
                f"{world} with min_trainers={min_trainers} gives one trainer {-(-world.size // min_trainers)} ranks "
                f"with {entries} group members, more than the limit of {MAX_RANK_ASSIGNMENT_ENTRIES}: "
                "raise min_trainers"
            )
        return cls(world=world, seed=config.seed, min_trainers=min_trainers, num_layers=config.num_layers)

    def to_proto(self) -> coordinator_pb2.RunConfig:
        return coordinator_pb2.RunConfig(
            world=self.world.to_proto(), seed=self.seed, min_trainers=self.min_trainers, num_layers=self.num_layers
        )

    def require_same(self, run: str, other: RunSettings) -> None:
        """Raises RunMismatchError if a trainer asks for something else than the run is."""
        for name in ("world", "seed", "min_trainers", "num_layers"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs and not (name == "num_layers" and 0 in (ours, theirs)):
                raise RunMismatchError(
                    f"run {run!r} has {name}={ours}, but this trainer asks for {name}={theirs}: "
                    "use the run's, or another run name",
                    run=run,
                    name=name,
                    expected=ours,
                    actual=theirs,
                )


def check_layers(world: World, num_layers: int) -> None:
    """Raises WorldError if that many layers cannot be split over the world's stages. 0: not known."""
    if num_layers > MAX_LAYERS:
        raise WorldError(f"num_layers={num_layers}: expected at most {MAX_LAYERS}")
    world.check_fits(num_layers=num_layers)
