"""The place of a trainer that ``torchrun`` or a similar launcher started: its rank and its world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from shardwell.session.environment import read_environment
from shardwell_wire.errors import UsageError
from shardwell_wire.topology import World


@dataclass(frozen=True, slots=True)
class TorchrunPlace:
    """The position of this process among those that ``torchrun`` or a similar launcher started."""

    rank: int
    """RANK: index of this process, from 0, over all hosts."""
    world_size: int
    """WORLD_SIZE: number of processes on all hosts; at least 2."""
    local_world_size: int
    """LOCAL_WORLD_SIZE: number of processes on this host. Equals ``world_size`` if the launcher does not set it."""
    dp_rank: int | None = None
    """SHARDWELL_DP_RANK: the launcher started the trainers of the replica with this dp rank. None: of all replicas."""

    @classmethod
    def from_env(cls, environment: Mapping[str, str]) -> Self | None:
        """Reads RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and SHARDWELL_DP_RANK.

        Returns:
            None without a launcher or with a single process.

        Raises:
            UsageError: A variable is not a valid number.
        """
        if not environment.get("RANK") or not environment.get("WORLD_SIZE"):
            return None
        rank, world_size = (_launcher_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
        if world_size < 2:
            return None
        if rank >= world_size:
            raise UsageError(f"RANK={rank}, WORLD_SIZE={world_size}: expected RANK below WORLD_SIZE")
        local = _launcher_number(environment, "LOCAL_WORLD_SIZE") if environment.get("LOCAL_WORLD_SIZE") else world_size
        dp_rank = read_environment(cls, environment).get("dp_rank")
        return cls(rank, world_size, local, dp_rank)

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of ``JoinConfig`` that follow from the launcher and are not in ``given``.

        The world is ``dp=WORLD_SIZE``. If the world has WORLD_SIZE ranks, each process plays the logical rank RANK
        under a name that survives a restart by the launcher. With SHARDWELL_DP_RANK, each process plays the rank with
        number RANK in this replica.

        Args:
            given: Fields that arguments or SHARDWELL_* variables set.

        Raises:
            UsageError: The number of processes is not that of a replica.
            WorldError: The world has no such dp rank.
        """
        found: dict[str, Any] = {}
        if "world" not in given:
            found["world"] = World(dp=self.world_size)
        world: World = given.get("world") or found["world"]
        if self.dp_rank is not None and self.world_size != world.replica_size:
            raise UsageError(
                f"SHARDWELL_DP_RANK={self.dp_rank}, WORLD_SIZE={self.world_size}: the launcher must start all trainers "
                f"of one replica, which are tp * pp = {world.replica_size} in {world}"
            )
        ranks = range(world.size) if self.dp_rank is None else world.replica_ranks(self.dp_rank)
        if len(ranks) == self.world_size and not given.keys() & {"trainer", "global_rank"}:
            found["global_rank"], found["trainer"] = ranks[self.rank], f"rank-{ranks[self.rank]}"
        if not given.get("address") and not given.keys() & {"world_size", "min_trainers"}:
            found["world_size"] = self.world_size  # no other process can join a private cluster
        return found


def _launcher_number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r}: expected an integer of at least 0, as torchrun sets it")
    return int(text)
