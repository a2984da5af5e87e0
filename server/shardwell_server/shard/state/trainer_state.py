"""The state of an optimizer that runs on the trainers, cut and joined when the servers' shards are cut anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.layout import Segment, UnitLayout
from shardwell_wire.v1 import shard_pb2


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The state that a trainer's optimizer keeps for a range of one data rank's optimizer partition."""

    dp_rank: int
    start_bytes: int
    """Start of the half-open range in the unit's flat vector."""
    stop_bytes: int
    """End of the range."""
    tensors: Sequence[shard_pb2.StateTensor]
    """Descriptions of the tensors."""
    data: Sequence[torch.Tensor]
    """Bytes of each tensor. Each uint8."""

    def cut(self, layout: UnitLayout, start_bytes: int, stop_bytes: int) -> TrainerState:
        """Returns the state of a range within this range. Copies nothing.

        Raises:
            InvalidRequestError: A tensor does not have one element per value, and would be cut.
        """
        before = _segments(layout, self.start_bytes, self.stop_bytes)
        after = _segments(layout, start_bytes, stop_bytes)
        tensors, data = [], []
        for tensor, content in zip(self.tensors, self.data, strict=True):
            outside, inside = before[tensor.parameter_index], after.get(tensor.parameter_index)
            if inside is None:
                continue
            if not tensor.shape or inside == outside:
                tensors.append(tensor)
                data.append(content)
                continue
            if not _is_elementwise(tensor, outside):
                raise _uncuttable(layout, tensor)
            item_bytes = content.numel() // (outside.stop_element - outside.start_element)
            low = (inside.start_element - outside.start_element) * item_bytes
            high = (inside.stop_element - outside.start_element) * item_bytes
            tensors.append(_with_elements(tensor, inside))
            data.append(content[low:high])
        return replace(self, start_bytes=start_bytes, stop_bytes=stop_bytes, tensors=tensors, data=data)


def merge_trainer_states(layout: UnitLayout, bounds: tuple[int, int], states: Sequence[TrainerState]) -> TrainerState:
    """Joins the states of adjacent ranges of one data rank's partition.

    Args:
        layout: The unit.
        bounds: The joined range, half-open, in the unit's flat vector.
        states: Its pieces, in the order of their ranges.

    Raises:
        InvalidRequestError: A tensor is cut, but does not have one element per value; or a number differs between the
            pieces of a parameter; or a piece lacks a tensor.
    """
    found: dict[tuple[int, str], list[tuple[shard_pb2.StateTensor, torch.Tensor, Segment]]] = {}
    for state in states:
        segments = _segments(layout, state.start_bytes, state.stop_bytes)
        for tensor, content in zip(state.tensors, state.data, strict=True):
            piece = tensor, content, segments[tensor.parameter_index]
            found.setdefault((tensor.parameter_index, tensor.name), []).append(piece)
    inside, tensors, data = _segments(layout, *bounds), [], []
    for (index, name), pieces in found.items():
        tensor, whole = pieces[0][0], inside[index]
        covered = sum(segment.stop_element - segment.start_element for _, _, segment in pieces)
        if covered != whole.stop_element - whole.start_element:
            parameter = layout.parameters[index].name
            raise InvalidRequestError(
                f"the state {name!r} of parameter {parameter!r} exists for {covered} elements of "
                f"{whole.stop_element - whole.start_element}: the pieces do not belong to one version",
                parameter=parameter,
            )
        if len(pieces) == 1 or not tensor.shape:
            tensors.append(tensor)
            data.append(equal_tensor([content for _, content, _ in pieces], f"state {name!r} of a partition"))
        elif all(_is_elementwise(piece, segment) for piece, _, segment in pieces):
            tensors.append(_with_elements(tensor, whole))
            data.append(torch.cat([content for _, content, _ in pieces]))
        else:
            raise _uncuttable(layout, tensor)
    return TrainerState(
        dp_rank=states[0].dp_rank, start_bytes=bounds[0], stop_bytes=bounds[1], tensors=tensors, data=data
    )


def equal_tensor(tensors: Sequence[torch.Tensor], what: str) -> torch.Tensor:
    """Returns the first of several tensors that must have equal bytes. Raises InvalidRequestError if they do not."""
    first = _bytes_of(tensors[0])
    if not all(torch.equal(first, _bytes_of(other)) for other in tensors[1:]):
        raise InvalidRequestError(f"the {what} differs between its pieces: {', '.join(map(str, tensors))}")
    return tensors[0]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _segments(layout: UnitLayout, start_bytes: int, stop_bytes: int) -> dict[int, Segment]:
    """Returns the segments of a range by parameter index."""
    return {segment.parameter_index: segment for segment in layout.segments(start_bytes, stop_bytes)}


def _is_elementwise(tensor: shard_pb2.StateTensor, segment: Segment) -> bool:
    """True if a tensor has one element per value of its part, so that it can be cut like the values."""
    return list(tensor.shape) == [segment.stop_element - segment.start_element]


def _with_elements(tensor: shard_pb2.StateTensor, segment: Segment) -> shard_pb2.StateTensor:
    """Returns the description of an element-wise tensor for another part of its parameter."""
    other = shard_pb2.StateTensor()
    other.CopyFrom(tensor)
    other.shape[:] = [segment.stop_element - segment.start_element]
    return other


def _uncuttable(layout: UnitLayout, tensor: shard_pb2.StateTensor) -> InvalidRequestError:
    name = layout.parameters[tensor.parameter_index].name
    return InvalidRequestError(
        f"the state {tensor.name!r} of parameter {name!r} has shape {list(tensor.shape)}, not one element per value: "
        "it cannot be cut over other servers; use as many servers as before",
        parameter=name,
    )
