"""Maps logical ranks to coordinates, groups and neighbours.

A world is a grid ``dp x tp x pp``. ``order`` lists its axes, slowest first. With the default order,
``global_rank = dp_rank * (tp * pp) + tp_rank * pp + pp_rank``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from shardwell_wire.errors import WorldError
from shardwell_wire.layout import align
from shardwell_wire.v1 import common_pb2

AXES = ("dp", "tp", "pp")
"""The axes in the default order, slowest first."""

MAX_WORLD_SIZE = 1 << 16
"""Maximum number of logical ranks of a run. Coordinator and shard servers keep state for each rank."""

_MAX_GROUP_LEVELS = MAX_WORLD_SIZE.bit_length() - 1
"""Most reduction groups that contain one rank: each level has at least two groups of the level below."""

MAX_STAGES_NAMED = 256
"""Largest number of stages that an error message proposes."""

AXIS_NUMBERS: dict[str, common_pb2.Axis.ValueType] = {
    "dp": common_pb2.AXIS_DATA,
    "tp": common_pb2.AXIS_TENSOR,
    "pp": common_pb2.AXIS_PIPELINE,
}
AXIS_NAMES: dict[int, str] = {number: name for name, number in AXIS_NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A logical rank and its coordinates in the world."""

    global_rank: int
    dp_rank: int
    tp_rank: int
    pp_rank: int

    def along(self, axis: str) -> int:
        """Returns the rank along one axis."""
        return {"dp": self.dp_rank, "tp": self.tp_rank, "pp": self.pp_rank}[axis]


@dataclass(frozen=True, slots=True)
class World:
    """The grid of logical ranks of a run.

    Args:
        dp: Size of the data axis: ranks that compute on different data with the same weights.
        tp: Size of the tensor axis: ranks that split single layers.
        pp: Size of the pipeline axis: ranks that run consecutive stages.
        order: The axes, slowest first.

    Raises:
        WorldError: A size is not positive or ``order`` is not a permutation of the axes.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", tuple(self.order))
        for axis in AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise WorldError(f"World({axis}={size!r}): expected an integer of at least 1", axis=axis)
        if sorted(self.order) != sorted(AXES):
            raise WorldError(f"World(order={self.order!r}): expected each of {AXES} once, slowest first")
        if self.size > MAX_WORLD_SIZE:
            raise WorldError(f"{self} has {self.size} ranks, more than the limit of {MAX_WORLD_SIZE}")

    @property
    def size(self) -> int:
        """Number of logical ranks."""
        return self.dp * self.tp * self.pp

    @property
    def replica_size(self) -> int:
        """Number of logical ranks that compute one work item together: ``tp * pp``."""
        return self.tp * self.pp

    def replica_ranks(self, dp_rank: int) -> tuple[int, ...]:
        """Returns the logical ranks of one dp rank, ordered by tp rank and then by pp rank."""
        return tuple(
            self.global_rank(dp_rank=dp_rank, tp_rank=tp_rank, pp_rank=pp_rank)
            for tp_rank in range(self.tp)
            for pp_rank in range(self.pp)
        )

    def coordinates(self, global_rank: int) -> Coordinates:
        """Returns the coordinates of a logical rank. Raises WorldError if the rank does not exist."""
        if not 0 <= global_rank < self.size:
            raise WorldError(
                f"rank {global_rank} is not in {self}: expected 0 <= rank < {self.size}", global_rank=global_rank
            )
        place, rest = {}, global_rank
        for axis in reversed(self.order):
            rest, place[axis] = divmod(rest, getattr(self, axis))
        return Coordinates(global_rank, place["dp"], place["tp"], place["pp"])

    def global_rank(self, *, dp_rank: int = 0, tp_rank: int = 0, pp_rank: int = 0) -> int:
        """Returns the logical rank with the given coordinates. Raises WorldError if they are outside the world."""
        place, rank = {"dp": dp_rank, "tp": tp_rank, "pp": pp_rank}, 0
        for axis in self.order:
            size = getattr(self, axis)
            if not 0 <= place[axis] < size:
                raise WorldError(f"{axis}_rank {place[axis]} is not in {self}: expected 0 <= {axis}_rank < {size}")
            rank = rank * size + place[axis]
        return rank

    def group(self, global_rank: int, axis: str) -> tuple[int, ...]:
        """Returns the logical ranks whose coordinates differ from those of ``global_rank`` along ``axis`` only."""
        at = self.coordinates(global_rank)
        place = {name: at.along(name) for name in AXES}
        return tuple(
            self.global_rank(**{f"{name}_rank": index if name == axis else place[name] for name in AXES})
            for index in range(getattr(self, axis))
        )

    def stage_neighbours(self, global_rank: int) -> tuple[int | None, int | None]:
        """Returns the logical ranks of the previous and the next pipeline stage; None at the ends."""
        stages, at = self.group(global_rank, "pp"), self.coordinates(global_rank).pp_rank
        return (stages[at - 1] if at > 0 else None, stages[at + 1] if at + 1 < self.pp else None)

    def __iter__(self) -> Iterator[Coordinates]:
        return (self.coordinates(rank) for rank in range(self.size))

    def __str__(self) -> str:
        order = "" if self.order == AXES else f", order={self.order}"
        return f"World(dp={self.dp}, tp={self.tp}, pp={self.pp}{order})"

    def check_fits(self, *, world_size: int = 0, num_layers: int = 0) -> None:
        """Checks the world against the number of launched processes and of layers.

        Args:
            world_size: Processes that the launcher started, one per logical rank. 0: not known.
            num_layers: Layers to split over the pipeline stages. 0: not known.

        Raises:
            WorldError: The numbers do not match; the message says what to change.
        """
        if world_size and world_size != self.size:
            raise WorldError(
                f"{self} has {self.size} ranks but the launcher started {world_size} processes: start {self.size}, "
                f"or change dp to {max(1, world_size // (self.tp * self.pp))}"
            )
        if num_layers and num_layers % self.pp:
            fitting = [stages for stages in range(1, min(num_layers, MAX_STAGES_NAMED) + 1) if num_layers % stages == 0]
            raise WorldError(
                f"{num_layers} layers cannot be split evenly over pp={self.pp} pipeline stages: "
                f"use pp of {', '.join(map(str, fitting))}, or {align(num_layers, self.pp)} layers"
            )

    def to_proto(self) -> common_pb2.World:
        return common_pb2.World(dp=self.dp, tp=self.tp, pp=self.pp, order=[AXIS_NUMBERS[axis] for axis in self.order])

    @classmethod
    def from_proto(cls, world: common_pb2.World) -> World:
        """Decodes a world. Raises WorldError if the world is invalid."""
        order = tuple(AXIS_NAMES.get(axis, "unspecified") for axis in world.order) or AXES
        return cls(world.dp, world.tp, world.pp, order)


def check_data_ranks(dp: int) -> None:
    """Raises WorldError if a run cannot have this number of data ranks."""
    if not 1 <= dp <= MAX_WORLD_SIZE:
        raise WorldError(f"dp is {dp}: expected 1 to {MAX_WORLD_SIZE} data ranks", axis="dp")


def checked_groups(dp: int, groups: Iterable[int]) -> tuple[int, ...]:
    """Returns the sizes of reduction groups, innermost first. Empty: one group, in rank order.

    Args:
        dp: Number of logical data ranks.
        groups: Sizes of the groups.

    Raises:
        WorldError: A size is no integer of at least 2, or the sizes do not multiply to ``dp``.
    """
    sizes = tuple(groups)
    if sizes in ((), (dp,)):
        return ()
    if len(sizes) > _MAX_GROUP_LEVELS:
        raise WorldError(f"reduction_groups has {len(sizes)} sizes: expected at most {_MAX_GROUP_LEVELS} of at least 2")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 2:
            raise WorldError(f"reduction_groups={sizes!r}: expected integers of at least 2, got {size!r}")
    if prod(sizes) != dp:
        product = " * ".join(map(str, sizes))
        raise WorldError(
            f"reduction_groups={sizes!r}: expected sizes that multiply to dp={dp}, the number of data ranks, got "
            f"{product} = {prod(sizes)}"
        )
    return sizes
