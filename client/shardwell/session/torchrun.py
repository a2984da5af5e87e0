"""What ``torchrun``, or a launcher that sets the same variables, says about this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from shardwell_wire.errors import UsageError
from shardwell_wire.topology import World


@dataclass(frozen=True, slots=True)
class TorchrunPlace:
    """One of several processes that a launcher started to train one model together."""

    rank: int
    """RANK: from 0, over all hosts."""
    world_size: int
    """WORLD_SIZE: processes on all hosts; at least 2."""
    local_world_size: int
    """LOCAL_WORLD_SIZE: processes on this host; ``world_size`` if the launcher does not say."""

    @classmethod
    def from_env(cls, environment: Mapping[str, str]) -> Self | None:
        """Reads RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; None if there is no launcher or it started one process.

        Raises:
            UsageError: A variable is not a number that fits the others.
        """
        if not environment.get("RANK") or not environment.get("WORLD_SIZE"):
            return None
        rank, world_size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
        if world_size < 2:
            return None
        if rank >= world_size:
            raise UsageError(f"RANK={rank}, WORLD_SIZE={world_size}: expected RANK below WORLD_SIZE")
        local = _number(environment, "LOCAL_WORLD_SIZE") if environment.get("LOCAL_WORLD_SIZE") else world_size
        return cls(rank, world_size, local)

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What ``join`` takes from the launcher where neither arguments nor SHARDWELL_* say otherwise.

        The world is ``dp=WORLD_SIZE``. A world of that size has each logical rank played by the process of that
        RANK, under a name that it keeps when the launcher starts it again.

        Args:
            given: Fields of ``JoinConfig`` that are given.
        """
        found: dict[str, Any] = {}
        if "world" not in given:
            found["world"] = World(dp=self.world_size)
        world: World = given.get("world") or found["world"]
        if world.size == self.world_size and not given.keys() & {"trainer", "global_rank"}:
            found["global_rank"], found["trainer"] = self.rank, f"rank-{self.rank}"
        if not given.get("address") and not given.keys() & {"world_size", "min_trainers"}:
            found["world_size"] = self.world_size  # nobody else can join a private cluster
        return found


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r}: expected an integer of at least 0, as torchrun sets it")
    return int(text)
