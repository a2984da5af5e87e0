"""What has changed between two versions of a run, as indices and values of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import xxhash

from shardwell.weights.stored_parameters import PlacedUnit, StoredParameter
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.shard_changes import ShardChanges, SpanChanges
from shardwell_wire.errors import CorruptDataError
from shardwell_wire.model.layout import Box, Segment

_BLOCK_NUMEL = 1 << 20
"""Elements that are copied at once to compute a checksum."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorChange(NamedTuple):
    """What has changed in a tensor of a run. Yielded by ``PinnedVersion.changes``."""

    name: str
    """Name of the tensor, as in ``PinnedVersion.values``."""
    indices: torch.Tensor | None
    """Rising indices of the changed elements in the flattened tensor. int64. [n] None: ``values`` is the tensor."""
    values: torch.Tensor
    """The new values, in the dtype of the run. [n], or the shape of the tensor."""

    def apply_to(self, tensor: torch.Tensor) -> None:
        """Writes the values into a tensor of any floating-point dtype, device and strides."""
        with torch.no_grad():
            if self.indices is None:
                tensor.copy_(self.values)
                return
            indices, values = self.indices.to(tensor.device), self.values.to(tensor.device, tensor.dtype)
            if tensor.is_contiguous():
                _bits(tensor.view(-1)).index_copy_(0, indices, _bits(values))
            else:
                tensor[torch.unravel_index(indices, tensor.shape)] = values


@dataclass(frozen=True)
class UnitChanges:
    """What has changed in a unit."""

    unit: PlacedUnit
    flat: torch.Tensor
    """The unit's flat vector, in which those shards have values that arrived whole. uint8. [size_bytes]"""
    shards: Sequence[tuple[int, int, ShardChanges | None]]
    """Start and end of each shard, and what has changed. None: the shard arrived whole."""

    def pieces(self, index: int) -> Iterator[_Piece]:
        """Yields what has changed in a parameter of the unit."""
        dtype = getattr(torch, self.unit.layout.parameters[index].dtype)
        for start, stop, changes in self.shards:
            if changes is None:
                for segment in self.unit.layout.segments(start, stop):
                    if segment.parameter_index == index:
                        yield _Piece(segment, self.flat[segment.start_bytes : segment.stop_bytes].view(dtype))
                continue
            for span, checksum in zip(changes.spans, changes.checksums, strict=True):
                if span.segment.parameter_index == index:
                    found = changes.of(span)
                    yield _Piece(span.segment, found.values, found, int(checksum))


class _Piece(NamedTuple):
    """What has changed in a segment of a parameter."""

    segment: Segment
    values: torch.Tensor
    changes: SpanChanges | None = None
    """None: ``values`` is the whole segment."""
    checksum: int = 0
    """XXH3-64 of the segment, in the dtype of ``values``."""


class StoredChanges:
    """What has changed in a tensor of a run since a version.

    Args:
        stored: The tensor.
        region: The region that a caller needs.
        units: What has changed, by unit. Units that are missing have not changed.
        since: The version.
    """

    def __init__(self, stored: StoredParameter, region: Box, units: Mapping[str, UnitChanges], since: int) -> None:
        self.stored, self._region, self._units, self._since = stored, region, units, since
        self._pieces = [
            (part, piece)
            for part in stored.parts
            if (changes := units.get(part.unit_name)) is not None
            for piece in changes.pieces(part.index)
        ]

    def check_result(self, tensor: torch.Tensor) -> None:
        """Checks that the changes turn a tensor into that of the pinned version. Does not write to the tensor.

        Raises:
            CorruptDataError: The tensor does not have the values of the older version.
        """
        for part, (segment, values, changes, checksum) in self._pieces:
            if changes is None:
                continue
            own = tensor.detach()[part.described.box.slices].reshape(-1)[segment.start_element : segment.stop_element]
            changes.resolve(own.index_select(0, changes.elements.to(own.device)).to("cpu", values.dtype))
            if _checksum(own, changes) != checksum:
                raise CorruptDataError(
                    f"{self.stored.name!r} does not have the values of version {self._since} in {values.dtype}, so "
                    "nothing was changed: read the whole version with values()",
                    parameter=self.stored.name,
                    version=self._since,
                )

    def find(self) -> TensorChange | None:
        """Returns what has changed in the region, counted in the region. None: nothing."""
        stored, region, dtype = self.stored, self._region, self.stored.meta.dtype
        if (
            region.numel
            and all(piece.changes is None for _, piece in self._pieces)
            and all(part.unit_name in self._units for part in stored.parts)
        ):
            value = torch.empty(region.shape, dtype=dtype)
            for part in stored.parts:
                part.copy_to(value, self._units[part.unit_name].flat, region)
            return TensorChange(stored.name, None, value)
        indices, values = list[torch.Tensor](), list[torch.Tensor]()
        for part, piece in self._pieces:
            elements = torch.arange(len(piece.values)) if piece.changes is None else piece.changes.elements
            places, is_inside = _places(part.described.box, region, elements + piece.segment.start_element)
            indices.append(places if is_inside is None else places[is_inside])
            values.append((piece.values if is_inside is None else piece.values[is_inside]).to(dtype))
        if not sum(map(len, indices)):
            return None
        all_indices, all_values = torch.cat(indices), torch.cat(values)
        if len(stored.parts) > 1 and not (all_indices[1:] > all_indices[:-1]).all():  # parts of several ranks alternate
            all_indices, order = all_indices.sort()
            all_values = all_values[order]
        return TensorChange(stored.name, all_indices, all_values)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view as integers of the same size, because ``index_copy_`` does not support float8."""
    return tensor.view(_INTEGERS.get(tensor.dtype.itemsize, tensor.dtype))


def _checksum(former: torch.Tensor, changes: SpanChanges) -> int:
    """Returns the XXH3-64 of a vector after a change. Copies a block at a time: new memory costs more than the copies.

    Args:
        former: The vector before the change, on any device and of any floating-point dtype.
        changes: The changed elements, with new values in the dtype of the result.
    """
    checksum, starts = xxhash.xxh3_64(), range(0, len(former), _BLOCK_NUMEL)
    block = torch.empty(min(len(former), _BLOCK_NUMEL), dtype=changes.values.dtype)
    bounds = torch.searchsorted(changes.elements, torch.tensor([*starts, len(former)])).tolist()
    for start, (first, last) in zip(starts, pairwise(bounds), strict=True):
        part = block[: len(former) - start].copy_(former[start : start + _BLOCK_NUMEL])
        _bits(part).index_copy_(0, changes.elements[first:last] - start, _bits(changes.values[first:last]))
        checksum.update(memory_at(part.data_ptr(), part.nbytes, part))
    return checksum.intdigest()


def _places(own: Box, region: Box, elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Maps elements of a flattened part to a flattened region.

    Returns:
        Places in the region, and which of them are inside. Each [len(elements)] None: all.
    """
    if own == region:
        return elements, None
    places, is_inside, stride = torch.zeros_like(elements), torch.ones(len(elements), dtype=torch.bool), 1
    for size, own_first, first, count in reversed(
        list(zip(own.shape, own.offsets, region.offsets, region.shape, strict=True))
    ):
        inside = elements % size + own_first - first
        is_inside &= (inside >= 0) & (inside < count)
        places, elements, stride = places + inside * stride, elements // size, stride * count
    return places, is_inside
