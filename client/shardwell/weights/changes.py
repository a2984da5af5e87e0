"""What has changed between two versions of a run, as indices and values of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import xxhash

from shardwell.weights.stored_parameters import PlacedUnit, StoredParameter, StoredPart
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.shard_changes import ShardChanges
from shardwell_wire.errors import CorruptDataError
from shardwell_wire.model.layout import Box, Segment

_BLOCK_NUMEL = 1 << 20
"""Elements that are copied at once to compute a checksum."""


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
                tensor.view(-1)[indices] = values
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
                        yield _Piece(segment, None, self.flat[segment.start_bytes : segment.stop_bytes].view(dtype))
                continue
            for span, checksum in zip(changes.spans, changes.checksums, strict=True):
                if span.segment.parameter_index == index:
                    yield _Piece(span.segment, *changes.of(span), int(checksum), partial(changes.resolve, span))


@dataclass(frozen=True, slots=True)
class _Piece:
    """What has changed in a segment of a parameter."""

    segment: Segment
    elements: torch.Tensor | None
    """Counted from the start of the segment. None: all."""
    values: torch.Tensor
    checksum: int = 0
    """XXH3-64 of the segment, in the dtype of ``values``."""
    resolve: Callable[[torch.Tensor], torch.Tensor] = lambda former: former
    """Returns the new values, from the former ones. Until its first call, ``values`` may have differences."""


def find_change(stored: StoredParameter, region: Box, units: Mapping[str, UnitChanges]) -> TensorChange | None:
    """Returns what has changed in a region of a tensor, counted in the region. None: nothing.

    Args:
        stored: The tensor.
        region: The region.
        units: What has changed, by unit. Units that are missing have not changed.
    """
    dtype, found = stored.meta.dtype, list(_pieces(stored, units))
    if (
        region.numel
        and all(piece.elements is None for _, piece in found)
        and all(part.unit_name in units for part in stored.parts)
    ):
        value = torch.empty(region.shape, dtype=dtype)
        for part in stored.parts:
            part.copy_to(value, units[part.unit_name].flat, region)
        return TensorChange(stored.name, None, value)
    indices, values = list[torch.Tensor](), list[torch.Tensor]()
    for part, piece in found:
        elements = torch.arange(len(piece.values)) if piece.elements is None else piece.elements
        places, is_inside = _places(part.described.box, region, elements + piece.segment.start_element)
        indices.append(places if is_inside is None else places[is_inside])
        values.append((piece.values if is_inside is None else piece.values[is_inside]).to(dtype))
    if not sum(map(len, indices)):
        return None
    all_indices, all_values = torch.cat(indices), torch.cat(values)
    if not (all_indices[1:] > all_indices[:-1]).all():  # parts of several ranks alternate
        all_indices, order = all_indices.sort()
        all_values = all_values[order]
    return TensorChange(stored.name, all_indices, all_values)


def check_result(stored: StoredParameter, units: Mapping[str, UnitChanges], tensor: torch.Tensor, since: int) -> None:
    """Checks that a tensor becomes that of the pinned version. Does not write to it. Resolves differences.

    Args:
        stored: The tensor in the run.
        units: What has changed, by unit.
        tensor: The tensor.
        since: The version that it should have.

    Raises:
        CorruptDataError: The tensor has other values than those of the version.
    """
    for part, piece in _pieces(stored, units):
        if piece.elements is None:
            continue
        segment = piece.segment
        own = tensor.detach()[part.described.box.slices].reshape(-1)[segment.start_element : segment.stop_element]
        former = own[piece.elements.to(own.device)].to("cpu", piece.values.dtype)
        if _checksum(own, piece.elements, piece.resolve(former)) != piece.checksum:
            raise CorruptDataError(
                f"{stored.name!r} does not have the values of version {since} in {piece.values.dtype}, so nothing was "
                "changed: read the whole version with values()",
                parameter=stored.name,
                version=since,
            )


def _checksum(former: torch.Tensor, elements: torch.Tensor, values: torch.Tensor) -> int:
    """Returns the XXH3-64 of a vector after a change. Copies a block at a time: new memory costs more than the copies.

    Args:
        former: The vector before the change. It has any device and any floating-point dtype.
        elements: Rising indices of the changed elements.
        values: The new values, in the dtype of the result.
    """
    checksum, block = xxhash.xxh3_64(), torch.empty(min(len(former), _BLOCK_NUMEL), dtype=values.dtype)
    starts = range(0, len(former), _BLOCK_NUMEL)
    bounds = torch.searchsorted(elements, torch.tensor([*starts, len(former)])).tolist()
    for start, (first, last) in zip(starts, pairwise(bounds), strict=True):
        part = block[: len(former) - start].copy_(former[start : start + _BLOCK_NUMEL])
        part[elements[first:last] - start] = values[first:last]
        checksum.update(memory_at(part.data_ptr(), part.nbytes, part))
    return checksum.intdigest()


def _pieces(stored: StoredParameter, units: Mapping[str, UnitChanges]) -> Iterator[tuple[StoredPart, _Piece]]:
    for part in stored.parts:
        if (changes := units.get(part.unit_name)) is not None:
            yield from ((part, piece) for piece in changes.pieces(part.index))


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
