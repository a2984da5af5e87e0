"""Collectives of tensor parallelism: operation, phase and bytes."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CollectivePhase(enum.Enum):
    """When a collective runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENTS = "gradients"
    """Once per step: when the gradients of a unit are pushed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationShape:
    """Size of a micro-batch."""

    batch: int
    """Sequences."""
    length: int
    """Tokens per sequence."""
    item_size: int = 4
    """Bytes per value of an activation."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of one forward, one backward or one push."""

    operation: str
    """``all_reduce``, ``all_gather`` or ``reduce_scatter``."""
    phase: CollectivePhase
    last_dim: int
    """Size of the last dimension of the whole tensor, whose other dimensions are batch and length. In the phase
    ``GRADIENTS``: number of elements."""
    item_size: int | None = None
    """Bytes per value. None: those of an activation."""
    count: int = 1
    """Number of equal collectives."""

    def payload_bytes(self, shape: ActivationShape) -> int:
        """Returns the bytes of the whole tensor, times ``count``."""
        positions = 1 if self.phase is CollectivePhase.GRADIENTS else shape.batch * shape.length
        return self.count * positions * self.last_dim * (self.item_size or shape.item_size)

    def describe(self, shape: ActivationShape | None = None) -> str:
        """Returns the operation, its phase and its bytes, such as ``forward all_reduce 4096 B``."""
        times = f"{self.count} x " if self.count > 1 else ""
        size = "" if shape is None else f" {self.payload_bytes(shape) // self.count} B"
        return f"{times}{self.phase.value} {self.operation}{size}"
