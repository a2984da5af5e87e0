"""A shard's bytes seen as parts of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwell_wire.layout import Segment, UnitLayout


def view(buffer: torch.Tensor, layout: UnitLayout, segment: Segment, start_bytes: int) -> torch.Tensor:
    """The part of one parameter that lies in a shard's buffer.

    Args:
        buffer: The shard's bytes, uint8. [stop_bytes - start_bytes]
        layout: Of the unit.
        segment: Of the shard.
        start_bytes: Where the shard begins in the flat vector.

    Returns:
        A view with the parameter's dtype. [stop_element - start_element]
    """
    dtype: torch.dtype = getattr(torch, layout.parameters[segment.parameter_index].dtype)
    return buffer[segment.start_bytes - start_bytes : segment.stop_bytes - start_bytes].view(dtype)


def views(
    buffer: torch.Tensor, layout: UnitLayout, segments: Sequence[Segment], start_bytes: int
) -> list[torch.Tensor]:
    """``view`` of several segments."""
    return [view(buffer, layout, segment, start_bytes) for segment in segments]


def shaped(part: torch.Tensor, layout: UnitLayout, segment: Segment) -> torch.Tensor:
    """A part in the shape of its parameter if it is the whole parameter, else as it is."""
    parameter = layout.parameters[segment.parameter_index]
    return part.view(parameter.shape) if part.numel() == parameter.numel else part
