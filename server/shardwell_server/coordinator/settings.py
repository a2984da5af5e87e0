"""Settings of a coordinator and of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwell_wire.checkpoints.storage import CheckpointRoots
from shardwell_wire.errors import InvalidRequestError, RunMismatchError, WorldError
from shardwell_wire.model.topology import SYNCHRONOUS, Consistency, World, checked_groups
from shardwell_wire.v1 import coordinator_pb2

MAX_LAYERS = 1 << 16

MAX_KEEP_VERSIONS = 1000
"""Each ``Update`` names the kept versions."""
MAX_BACKUPS = 4
"""Most backups of a shard."""

MAX_RUNS = 4096
"""Most runs that exist at once."""

MAX_UNITS = 1 << 16
"""Most units of a run."""

MAX_GROUP_MEMBERS = 1 << 20
"""Most group members listed for one trainer's ranks. A longer list does not fit a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a coordinator."""

    lease_s: float = 10.0
    """Lease of a trainer or shard server in seconds. The lease expires after this much silence."""
    min_servers: int = 1
    """Live shard servers required before the first unit of a run is placed."""
    min_shard_bytes: int = 2 << 20
    """Smallest shard in bytes into which a unit is cut. Each shard has requests of its own in every step, which take a
    trainer and a server longer than the bytes of a smaller shard on one host or a fast network."""
    checkpoint_roots: CheckpointRoots = field(default_factory=CheckpointRoots)
    """The folders below which checkpoints are opened."""
    restart_wait_s: float = 20.0
    """Seconds that a run with a checkpoint waits for the restart of a server that has left its only copies of shards,
    before it goes back to the checkpoint. A run without a checkpoint waits without a limit."""
    insecure: str = ""
    """What the coordinator lacks although it listens on a network, for ``shardwell servers``. Empty: nothing."""

    def __post_init__(self) -> None:
        if not 0.1 <= self.lease_s <= 3600:
            raise ValueError(f"lease_s={self.lease_s!r}: expected 0.1 to 3600 seconds")
        if not self.restart_wait_s >= 0:
            raise ValueError(f"restart_wait_s={self.restart_wait_s!r}: expected at least 0 seconds")
        if self.min_servers < 1:
            raise ValueError(f"min_servers={self.min_servers!r}: expected at least 1")
        if self.min_shard_bytes < 1:
            raise ValueError(f"min_shard_bytes={self.min_shard_bytes!r}: expected at least 1")


@dataclass(kw_only=True, slots=True)
class RunSettings:
    """Settings of a run. They are fixed when the run is created, except ``backups``."""

    world: World
    seed: int
    min_trainers: int
    """Trainers that must join before the first step. At least 1."""
    num_layers: int
    """Number of layers of the model. 0: unknown."""
    backups: int = 0
    """Copies of every shard that other servers keep. May change while the run exists."""
    reduction_groups: tuple[int, ...] = ()
    """The order in which gradients are added; see Note: [Reduction groups] in ``sum_order.py``."""
    consistency: Consistency = SYNCHRONOUS
    """When gradients are applied."""
    keep_versions: int = 0
    """Versions besides the newest that readers can read."""
    max_reader_lag: int | None = None
    """Versions that readers which hold the run may be behind at a commit. None: readers are not waited for."""

    @classmethod
    def from_proto(cls, config: coordinator_pb2.RunConfig, *, world_size: int) -> RunSettings:
        """Decodes and checks the settings that a trainer asks for.

        Args:
            config: The settings in the request.
            world_size: Number of trainers that the launcher started. 0: unknown.

        Raises:
            WorldError: The world is invalid, or does not fit the number of trainers or layers, or the reduction groups.
        """
        world = World.from_proto(config.world)
        world.check_fits(world_size=world_size)
        check_layers(world, config.num_layers)
        min_trainers = config.min_trainers or world.size
        if min_trainers > world.size:
            raise WorldError(f"min_trainers={min_trainers}: expected 1 to {world.size}, the size of {world}")
        if min_trainers % world.replica_size:
            raise WorldError(
                f"min_trainers={min_trainers}: {world} needs a multiple of {world.replica_size} trainers, because "
                f"{world.replica_formula} = {world.replica_size} of them compute one dp rank together"
            )
        ranks_per_trainer = -(-world.size // min_trainers)
        group_members = ranks_per_trainer * (world.dp + world.cp + world.tp + world.pp)
        if group_members > MAX_GROUP_MEMBERS:
            raise WorldError(
                f"{world} with min_trainers={min_trainers} gives one trainer {ranks_per_trainer} ranks "
                f"with {group_members} group members, more than the limit of {MAX_GROUP_MEMBERS}: raise min_trainers"
            )
        check_backups(config.backups)
        if config.keep_versions > MAX_KEEP_VERSIONS:
            raise InvalidRequestError(f"keep_versions={config.keep_versions}: expected 0 to {MAX_KEEP_VERSIONS}")
        consistency = Consistency.from_proto(config)
        if consistency.asynchronous:
            _check_asynchronous(consistency, world, config)
        return cls(
            world=world,
            seed=config.seed,
            min_trainers=min_trainers,
            num_layers=config.num_layers,
            backups=config.backups,
            reduction_groups=checked_groups(world.dp, config.reduction_groups),
            consistency=consistency,
            keep_versions=config.keep_versions,
            max_reader_lag=config.max_reader_lag if config.HasField("max_reader_lag") else None,
        )

    def to_proto(self) -> coordinator_pb2.RunConfig:
        return coordinator_pb2.RunConfig(
            world=self.world.to_proto(),
            seed=self.seed,
            min_trainers=self.min_trainers,
            num_layers=self.num_layers,
            backups=self.backups or None,
            reduction_groups=self.reduction_groups,
            keep_versions=self.keep_versions,
            max_reader_lag=self.max_reader_lag,
            **self.consistency.to_fields(),
        )

    def require_same(self, run: str, requested: RunSettings) -> None:
        """Raises RunMismatchError if a trainer requests other settings than the run has."""
        names = ("world", "seed", "min_trainers", "num_layers", "reduction_groups", "consistency", "keep_versions")
        for name in (*names, "max_reader_lag"):
            ours, theirs = getattr(self, name), getattr(requested, name)
            if ours != theirs and not (name == "num_layers" and 0 in (ours, theirs)):
                raise RunMismatchError(
                    f"run {run!r} has {name}={ours}, but this trainer asks for {name}={theirs}: "
                    "use the value of the run, or another run name",
                    run=run,
                    name=name,
                    expected=ours,
                    actual=theirs,
                )


def _check_asynchronous(consistency: Consistency, world: World, config: coordinator_pb2.RunConfig) -> None:
    """Raises InvalidRequestError if a run has a setting that only synchronous runs can have."""
    for reason, what in (
        (world.replica_size > 1, f"{world}, but needs cp=1, tp=1 and pp=1"),
        (
            config.reduction_groups,
            f"reduction_groups={tuple(config.reduction_groups)}, but the gradient of each rank is applied by itself",
        ),
    ):
        if reason:
            raise InvalidRequestError(f"consistency={consistency}: the run has {what} in this mode. Use SYNCHRONOUS")


def check_backups(backups: int) -> None:
    """Raises InvalidRequestError if a run cannot have this number of backups."""
    if backups > MAX_BACKUPS:
        raise InvalidRequestError(f"backups={backups}: expected 0 to {MAX_BACKUPS}")


def check_layers(world: World, num_layers: int) -> None:
    """Raises WorldError if the layers cannot be split over the pipeline stages of a world. 0: unknown, not checked."""
    if num_layers > MAX_LAYERS:
        raise WorldError(f"num_layers={num_layers}: expected at most {MAX_LAYERS}")
    world.check_fits(num_layers=num_layers)
