"""Parameters and buffers as a run stores them, and the choice of those, or of slices of them, that a reader wants."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from shardwell_wire.errors import StepStateError, UsageError
from shardwell_wire.model.layout import Box, Parameter, UnitLayout
from shardwell_wire.v1 import common_pb2, coordinator_pb2

Names = str | Sequence[str]
"""A glob pattern of names, or several."""
Slices = Mapping[str, tuple[int, int, int]]
"""By glob pattern: dim, index of the slice, and number of slices."""

_MAX_GAP_BYTES = 64 << 10
"""Ranges this close to each other are read as one."""


@dataclass(frozen=True)
class PlacedUnit:
    """A unit and the owners of its shards."""

    layout: UnitLayout
    shards: tuple[common_pb2.ShardRange, ...]

    @classmethod
    def from_proto(cls, unit: coordinator_pb2.UnitWeights) -> PlacedUnit:
        return cls(UnitLayout.from_proto(unit.spec), tuple(unit.shards))

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Returns a view of a parameter in the unit's flat vector. [shape of the parameter]"""
        parameter, start = self.layout.parameters[index], self.layout.starts[index]
        part = flat[start : start + parameter.size_bytes]
        return part.view(getattr(torch, parameter.dtype)).view(parameter.shape)


@dataclass(frozen=True)
class StoredPart:
    """A parameter or buffer in one unit: the whole tensor, or the part of one tensor-parallel rank."""

    unit: PlacedUnit
    index: int
    """Layout index in the unit."""

    @property
    def unit_name(self) -> str:
        """Name of the unit."""
        return self.unit.layout.unit

    @property
    def described(self) -> Parameter:
        """The layout entry."""
        return self.unit.layout.parameters[self.index]

    def copy_to(self, tensor: torch.Tensor, flat: torch.Tensor, region: Box | None = None) -> None:
        """Copies the part from its unit's flat vector to its place in a tensor.

        Args:
            tensor: The whole tensor, or a region of it.
            flat: The unit's flat vector. Only ``range_of`` the region is read.
            region: The region. None: the whole tensor.
        """
        own, view = self.described.box, self.unit.view(flat, self.index)
        if region is None or region.is_whole:
            tensor[own.slices].copy_(view)
        elif (common := own.intersection(region)) is not None:
            tensor[common.inside(region).slices].copy_(view[common.inside(own).slices])

    def range_of(self, region: Box) -> tuple[int, int] | None:
        """Returns the smallest range of the flat vector with what a region has of the part. None: it has nothing."""
        parameter = self.described
        if (common := parameter.box.intersection(region)) is None:
            return None
        inside, start = common.inside(parameter.box), self.unit.layout.starts[self.index]
        first, last = inside.position(0), inside.position(inside.numel - 1)
        return start + first * parameter.item_size, start + (last + 1) * parameter.item_size


@dataclass(frozen=True)
class StoredParameter:
    """A parameter or buffer as the run stores it, in one part or several."""

    name: str
    """Name in the model if the run knows it (see ``shown_names``), else in the run."""
    aliases: tuple[str, ...]
    """Other names of the same tied parameter."""
    parts: tuple[StoredPart, ...]
    """Its parts, in the order of the units. They do not overlap."""

    @property
    def names(self) -> tuple[str, ...]:
        """The name and the aliases."""
        return self.name, *self.aliases

    @property
    def names_in_run(self) -> tuple[str, ...]:
        """The names under which the run stores the parameter, which begin with the name of a ``fully_shard`` call."""
        described = self.parts[0].described.plain
        return described.name, *described.aliases

    @property
    def is_reshaped(self) -> bool:
        """True for a buffer that took its shape in the first step of the run."""
        return self.parts[0].described.is_reshaped

    @property
    def meta(self) -> torch.Tensor:
        """A tensor of the shape and dtype of the whole parameter on the meta device."""
        described = self.parts[0].described
        return torch.empty(described.box.whole, dtype=getattr(torch, described.dtype), device="meta")


def stored_parameters(units: Iterable[PlacedUnit], names: Mapping[str, tuple[str, ...]]) -> Sequence[StoredParameter]:
    """Returns the parameters of units, in the order of their first parts.

    Args:
        units: The units.
        names: See ``shown_names``.

    Raises:
        StepStateError: A part of a parameter is missing, or several units store a parameter.
    """
    parts: dict[str, list[StoredPart]] = {}
    for unit in units:
        for index, parameter in enumerate(unit.layout.parameters):
            if parameter.name in names:
                parts.setdefault(parameter.name, []).append(StoredPart(unit, index))
    for name, found in parts.items():
        stored, total = sum(part.described.numel for part in found), math.prod(found[0].described.box.whole)
        if stored > total:
            owners = ", ".join(repr(part.unit.layout.unit) for part in found)
            raise StepStateError(
                f"the units {owners} of the run all store {name!r}, so its value is not known: stages that share a "
                "parameter or buffer must be those of one split_model or ModelSplit.from_modules",
                parameter=name,
            )
        if stored != total:
            raise StepStateError(
                f"the run has {stored} of the {total} elements of parameter {name!r}: the trainers of a "
                "tensor-parallel rank have not declared their part yet. Try again when training has started",
                parameter=name,
            )
    return [StoredParameter(names[name][0], names[name][1:], tuple(found)) for name, found in parts.items()]


Chosen = tuple[StoredParameter, Box]
"""A parameter or buffer, and the region of it that a reader wants."""


def choose(stored: Sequence[StoredParameter], names: Names | None, slices: Slices | None, run: str) -> list[Chosen]:
    """Returns the parameters and buffers that a reader wants.

    Args:
        stored: All parameters and buffers of the run.
        names: See ``PinnedVersion.values``.
        slices: See ``PinnedVersion.values``.
        run: Name of the run, for errors.

    Raises:
        UsageError: A pattern matches nothing, or a slice does not exist.
    """
    patterns = ["*"] if names is None else [names] if isinstance(names, str) else list(names)
    for pattern in (*(patterns if names is not None else ()), *(slices or ())):
        if not any(_matches(each, pattern) for each in stored):
            known = f", such as {stored[0].name!r}" if stored else ""
            raise UsageError(f"run {run!r} has no parameter or buffer {pattern!r}: pass its names{known}, or patterns")
    wanted = [each for each in stored if any(_matches(each, pattern) for pattern in patterns)]
    return [(each, _region(each, slices or {})) for each in wanted]


def _matches(stored: StoredParameter, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in (*stored.names, *stored.names_in_run))


def _region(stored: StoredParameter, slices: Slices) -> Box:
    whole = stored.parts[0].described.box.whole
    found = next((found for pattern, found in slices.items() if _matches(stored, pattern)), None)
    if found is None:
        return Box(whole, (0,) * len(whole), whole)
    dim, index, count = found
    if not 0 <= dim < len(whole) or not 0 <= index < count:
        raise UsageError(
            f"slice {found!r} of {stored.name!r} with shape {whole}: expected (dim, index, count) with a dim below "
            f"{len(whole)}, and an index from 0 to count - 1"
        )
    size = -(-whole[dim] // count)  # as torch.chunk cuts
    start, stop = (min(each * size, whole[dim]) for each in (index, index + 1))
    offsets, shape = [0] * len(whole), list(whole)
    offsets[dim], shape[dim] = start, stop - start
    return Box(whole, tuple(offsets), tuple(shape))


def ranges_of(chosen: Iterable[Chosen]) -> dict[str, list[tuple[int, int]]]:
    """Returns the ranges of the flat vectors with what a reader wants, by unit. They rise and do not overlap."""
    found: dict[str, list[tuple[int, int]]] = {}
    for stored, region in chosen:
        for part in stored.parts:
            if (bounds := part.range_of(region)) is not None:
                found.setdefault(part.unit_name, []).append(bounds)
    for unit, ranges in found.items():
        joined = list[tuple[int, int]]()
        for start, stop in sorted(ranges):
            if joined and start - joined[-1][1] <= _MAX_GAP_BYTES:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            else:
                joined.append((start, stop))
        found[unit] = joined
    return found
