"""Gradients of a unit that were encoded before they are cut into shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwell_wire.wire_dtypes import WireDtype


@dataclass(frozen=True, slots=True, eq=False)
class EncodedGradients:
    """One part of a contribution, as it travels; each server's part is a range of it."""

    indices: tuple[int, ...]
    """Of the parameters, rising."""
    wire_dtype: WireDtype
    """How float32 gradients travel."""
    stream: memoryview
    """Of the whole unit."""
    stored_bytes: int
    """Of the gradients before they were encoded."""
    give_back: Callable[[], None]
    """To be called when nobody reads the stream any more."""
