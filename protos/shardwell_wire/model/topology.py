"""The world of a run, the partitions of its optimizer, and its consistency mode.

A world is a grid ``dp x cp x tp x pp`` of logical ranks with coordinates, groups and neighbours. ``order`` lists its
axes, slowest first. With the default order, ``global_rank = ((dp_rank * cp + cp_rank) * tp + tp_rank) * pp + pp_rank``.
Worlds without context parallelism (``cp=1``) have the axes ``dp``, ``tp`` and ``pp`` only.

A partition is the part of a unit that a data rank updates if the optimizer runs on the trainers. The consistency mode
says when the gradients of a run's work items are applied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Self

from shardwell_wire.errors import InvalidRequestError, WorldError
from shardwell_wire.model.layout import BLOCK_BYTES, DTYPE_NAMES, ITEM_SIZES, MAX_DIMS, MAX_UNIT_BYTES, align
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

AXES = ("dp", "tp", "pp")
"""The axes of a world without context parallelism, in the default order, slowest first."""

CONTEXT_AXES = ("dp", "cp", "tp", "pp")
"""The axes of a world with context parallelism, in the default order."""

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
    "cp": common_pb2.AXIS_CONTEXT,
}
AXIS_NAMES: dict[int, str] = {number: name for name, number in AXIS_NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A logical rank and its coordinates in the world."""

    global_rank: int
    dp_rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int = 0

    def along(self, axis: str) -> int:
        """Returns the rank along one axis."""
        return {"dp": self.dp_rank, "tp": self.tp_rank, "pp": self.pp_rank, "cp": self.cp_rank}[axis]


@dataclass(frozen=True, slots=True)
class World:
    """The grid of logical ranks of a run.

    Args:
        dp: Size of the data axis: ranks that compute on different data with the same weights.
        tp: Size of the tensor axis: ranks that split single layers.
        pp: Size of the pipeline axis: ranks that run consecutive stages.
        order: The axes, slowest first. With context parallelism, ``cp`` comes after ``dp`` if it is left out.
        cp: Size of the context axis: ranks that compute on different parts of the same sequences.

    Raises:
        WorldError: A size is not positive or ``order`` is not a permutation of the axes.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    order: tuple[str, ...] = AXES
    cp: int = 1

    def __post_init__(self) -> None:
        for axis in CONTEXT_AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise WorldError(f"World({axis}={size!r}): expected an integer of at least 1", axis=axis)
        object.__setattr__(self, "order", _order(tuple(self.order), self.cp))
        if sorted(self.order) != sorted(self.axes):
            raise WorldError(f"World(order={self.order!r}): expected each of {self.axes} once, slowest first")
        if self.size > MAX_WORLD_SIZE:
            raise WorldError(f"{self} has {self.size} ranks, more than the limit of {MAX_WORLD_SIZE}")

    @property
    def size(self) -> int:
        """Number of logical ranks."""
        return self.dp * self.replica_size

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in the default order: with ``cp`` only if there is context parallelism."""
        return CONTEXT_AXES if self.cp > 1 else AXES

    @property
    def replica_size(self) -> int:
        """Number of logical ranks that compute one work item together: ``cp * tp * pp``."""
        return self.cp * self.tp * self.pp

    @property
    def replica_formula(self) -> str:
        """How ``replica_size`` follows from the axes, for messages."""
        return "cp * tp * pp" if self.cp > 1 else "tp * pp"

    def replica_ranks(self, dp_rank: int) -> tuple[int, ...]:
        """Returns the logical ranks of one dp rank, ordered by cp rank, then by tp rank and then by pp rank."""
        return tuple(
            self.global_rank(dp_rank=dp_rank, cp_rank=cp_rank, tp_rank=tp_rank, pp_rank=pp_rank)
            for cp_rank in range(self.cp)
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
        return Coordinates(global_rank, place["dp"], place["tp"], place["pp"], place.get("cp", 0))

    def rank_in_replica(self, at: Coordinates) -> int:
        """Returns the position of a logical rank in ``replica_ranks``."""
        return (at.cp_rank * self.tp + at.tp_rank) * self.pp + at.pp_rank

    def global_rank(self, *, dp_rank: int = 0, cp_rank: int = 0, tp_rank: int = 0, pp_rank: int = 0) -> int:
        """Returns the logical rank with the given coordinates. Raises WorldError if they are outside the world."""
        place, rank = {"dp": dp_rank, "cp": cp_rank, "tp": tp_rank, "pp": pp_rank}, 0
        if self.cp == 1 and cp_rank:
            raise WorldError(f"cp_rank {cp_rank} is not in {self}: expected 0, because cp is 1")
        for axis in self.order:
            size = getattr(self, axis)
            if not 0 <= place[axis] < size:
                raise WorldError(f"{axis}_rank {place[axis]} is not in {self}: expected 0 <= {axis}_rank < {size}")
            rank = rank * size + place[axis]
        return rank

    def group(self, global_rank: int, axis: str) -> tuple[int, ...]:
        """Returns the logical ranks whose coordinates differ from those of ``global_rank`` along ``axis`` only."""
        at = self.coordinates(global_rank)
        place = {name: at.along(name) for name in self.axes}
        return tuple(
            self.global_rank(**{f"{name}_rank": index if name == axis else place[name] for name in self.axes})
            for index in range(getattr(self, axis))
        )

    def stage_neighbours(self, global_rank: int) -> tuple[int | None, int | None]:
        """Returns the logical ranks of the previous and the next pipeline stage; None at the ends."""
        stages, at = self.group(global_rank, "pp"), self.coordinates(global_rank).pp_rank
        return (stages[at - 1] if at > 0 else None, stages[at + 1] if at + 1 < self.pp else None)

    def __iter__(self) -> Iterator[Coordinates]:
        return (self.coordinates(rank) for rank in range(self.size))

    def __str__(self) -> str:
        order = "" if self.order == self.axes else f", order={self.order}"
        sizes = ", ".join(f"{axis}={getattr(self, axis)}" for axis in self.axes)
        return f"World({sizes}{order})"

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
                f"or change dp to {max(1, world_size // self.replica_size)}"
            )
        if num_layers and num_layers % self.pp:
            fitting = [stages for stages in range(1, min(num_layers, MAX_STAGES_NAMED) + 1) if num_layers % stages == 0]
            raise WorldError(
                f"{num_layers} layers cannot be split evenly over pp={self.pp} pipeline stages: "
                f"use pp of {', '.join(map(str, fitting))}, or {align(num_layers, self.pp)} layers"
            )

    def to_proto(self) -> common_pb2.World:
        order = [AXIS_NUMBERS[axis] for axis in self.order]
        return common_pb2.World(dp=self.dp, tp=self.tp, pp=self.pp, order=order, cp=self.cp if self.cp > 1 else 0)

    @classmethod
    def from_proto(cls, world: common_pb2.World) -> World:
        """Decodes a world. Raises WorldError if the world is invalid."""
        order = tuple(AXIS_NAMES.get(axis, "unspecified") for axis in world.order) or AXES
        return cls(world.dp, world.tp, world.pp, order, world.cp or 1)


def _order(order: tuple[str, ...], cp: int) -> tuple[str, ...]:
    """Returns the order of a world's axes, which has ``cp`` only if there is context parallelism."""
    if cp == 1 and "cp" in order:
        return tuple(axis for axis in order if axis != "cp")
    if cp > 1 and "cp" not in order and "dp" in order:
        after = order.index("dp") + 1
        return (*order[:after], "cp", *order[after:])
    return order


def check_data_ranks(dp: int) -> None:
    """Raises WorldError if a run cannot have this number of data ranks."""
    if not 1 <= dp <= MAX_WORLD_SIZE:
        raise WorldError(f"dp is {dp}: expected 1 to {MAX_WORLD_SIZE} data ranks", axis="dp")


def checked_groups(dp: int, groups: Iterable[int]) -> tuple[int, ...]:
    """Returns the sizes of reduction groups, innermost first. Empty: one group, in rank order.

    Args:
        dp: Number of logical data ranks.

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


TRAINER_PREFIX = "trainer/"
"""Prefix of ``OptimizerStep.algorithm`` for optimizers that run on the trainers."""


def runs_on_trainers(algorithm: str) -> bool:
    """Returns whether an optimizer runs on the trainers. Others run on the shard servers."""
    return algorithm.startswith(TRAINER_PREFIX)


def partition_of(size_bytes: int, dp: int, dp_rank: int) -> tuple[int, int]:
    """Returns a data rank's partition as a half-open range of a unit's flat vector. May be empty.

    Args:
        dp: Number of logical data ranks.
    """
    # The same ranges as ``cut`` with equal weights, in constant time: servers compute them for thousands of ranks.
    used = min(dp, max(1, size_bytes // BLOCK_BYTES))
    return _even_bound(size_bytes, used, dp_rank), _even_bound(size_bytes, used, dp_rank + 1)


def _even_bound(size_bytes: int, used: int, dp_rank: int) -> int:
    """Returns the start of a data rank's partition if the first ``used`` ranks share the vector evenly."""
    if dp_rank >= used:
        return size_bytes
    return min(size_bytes, round(size_bytes * float(dp_rank) / used / BLOCK_BYTES) * BLOCK_BYTES)


def part_in(size_bytes: int, dp: int, dp_rank: int, start_bytes: int, stop_bytes: int) -> tuple[int, int]:
    """Returns the intersection of a partition and the shard ``[start_bytes, stop_bytes)``. May be empty."""
    start, stop = partition_of(size_bytes, dp, dp_rank)
    low = max(start, start_bytes)
    return low, max(low, min(stop, stop_bytes))


def state_size(tensor: shard_pb2.StateTensor) -> int:
    """Returns the size of a state tensor in a stream, in bytes. Raises KeyError if its dtype is unknown."""
    return math.prod(tensor.shape) * ITEM_SIZES[DTYPE_NAMES[tensor.dtype]]


def check_state_tensor(tensor: shard_pb2.StateTensor, what: str) -> None:
    """Raises InvalidRequestError unless a state tensor in a request has a known dtype and a possible size.

    Args:
        what: Names what the tensor belongs to, in errors.
    """
    if len(tensor.shape) > MAX_DIMS:  # before the size is computed: the product of many sizes takes long
        raise InvalidRequestError(
            f"{what}: state {tensor.name!r} has {len(tensor.shape)} dimensions, expected at most {MAX_DIMS}"
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise InvalidRequestError(f"{what}: state {tensor.name!r} has the unknown dtype {tensor.dtype}")
    if not all(0 <= size <= MAX_UNIT_BYTES for size in tensor.shape) or state_size(tensor) > MAX_UNIT_BYTES:
        raise InvalidRequestError(
            f"{what}: state {tensor.name!r} has shape {list(tensor.shape)}, expected at most {MAX_UNIT_BYTES} bytes"
        )


def state_places(tensors: Iterable[shard_pb2.StateTensor]) -> tuple[list[tuple[int, int]], int]:
    """Returns the layout of state tensors in shared memory, aligned like parameters.

    Returns:
        The half-open byte range of each tensor, and the total size in bytes.

    Raises:
        KeyError: A dtype is unknown.
    """
    ranges, stop = [], 0
    for tensor in tensors:
        start = align(stop)
        stop = start + state_size(tensor)
        ranges.append((start, stop))
    return ranges, stop


def values_offset(start_bytes: int, stop_bytes: int) -> int:
    """Returns the offset of the values, after the gradients, in a staging buffer for ``[start_bytes, stop_bytes)``."""
    return align(stop_bytes - start_bytes, BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class Consistency:
    """Consistency mode of a run: ``SYNCHRONOUS``, ``ASYNCHRONOUS`` or ``BOUNDED_STALENESS(s)``.

    Args:
        asynchronous: Whether each work item is committed by itself.
        max_staleness: How many items a data rank may be ahead of the slowest one. None: any number.
    """

    asynchronous: bool
    max_staleness: int | None = None

    def __str__(self) -> str:
        if self.max_staleness is not None:
            return f"BOUNDED_STALENESS({self.max_staleness})"
        return "ASYNCHRONOUS" if self.asynchronous else "SYNCHRONOUS"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the mode that ``str`` describes. Raises InvalidRequestError if there is none."""
        name, _, argument = text.strip().upper().partition("(")
        if name in ("SYNCHRONOUS", "ASYNCHRONOUS") and not argument:
            return cls(name == "ASYNCHRONOUS")
        if name == "BOUNDED_STALENESS" and argument.endswith(")") and argument[:-1].isdecimal():
            return cls(True, int(argument[:-1]))
        raise InvalidRequestError(
            f"consistency={text!r}: expected SYNCHRONOUS, ASYNCHRONOUS or BOUNDED_STALENESS(s), with s the number of "
            "items that a data rank may be ahead of the slowest one"
        )

    @classmethod
    def from_proto(cls, config: coordinator_pb2.RunConfig) -> Self:
        """Returns the mode of a run's settings."""
        bounded = config.consistency == coordinator_pb2.CONSISTENCY_BOUNDED_STALENESS
        asynchronous = bounded or config.consistency == coordinator_pb2.CONSISTENCY_ASYNCHRONOUS
        return cls(asynchronous, config.max_staleness if bounded else None)

    def to_fields(self) -> dict[str, Any]:
        """Returns the fields of ``RunConfig`` that describe the mode. None for a synchronous run."""
        if not self.asynchronous:
            return {}
        if self.max_staleness is None:
            return {"consistency": coordinator_pb2.CONSISTENCY_ASYNCHRONOUS}
        return {"consistency": coordinator_pb2.CONSISTENCY_BOUNDED_STALENESS, "max_staleness": self.max_staleness}


SYNCHRONOUS = Consistency(asynchronous=False)
"""A step has one work item per data rank, and is committed when all of them are finished."""
ASYNCHRONOUS = Consistency(asynchronous=True)
"""Each work item is committed by itself when it is finished."""


def BOUNDED_STALENESS(max_staleness: int) -> Consistency:
    """Returns the mode in which each work item is committed by itself, and no data rank is far ahead of the others.

    Args:
        max_staleness: A data rank starts an item only if it is at most this many items ahead of the slowest data rank.

    Raises:
        InvalidRequestError: The number is negative.
    """
    if max_staleness < 0:
        raise InvalidRequestError(f"BOUNDED_STALENESS({max_staleness}): expected at least 0")
    return Consistency(asynchronous=True, max_staleness=max_staleness)
