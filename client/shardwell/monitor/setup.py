"""The options and sizes of a session that advice depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitoredSetup:
    """The options and sizes of a session that advice depends on."""

    trainer: str
    """Name of this trainer."""
    transports: str
    """``transports`` of ``join``."""
    streamed: Mapping[str, bool]
    """The servers whose weights are streamed, by address, and whether each is on this host."""
    gather_dtype: str
    push_dtype: str
    prefetch_bytes: int
    keep_bytes: int
    """0 also if kept weights share ``prefetch_bytes``."""
    max_gathers_in_flight: int
    unit_bytes: tuple[int, ...]
    """Size of each unit's flat vector."""
    memory_bytes: int
    """Memory that this process could use for gathered weights when the report was made: what is free on the device
    of the units, and what the weights and their idle buffers take."""

    routes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Route and reason of each unit whose gradient was pushed, by the unit's name. Empty: all gradients are pushed
    directly."""
    corrupt_transfers: Mapping[str, int] = field(default_factory=dict)
    """Transfers since ``join`` whose bytes arrived with a wrong checksum, by the servers' addresses. Empty: none."""

    @property
    def model_bytes(self) -> int:
        """Size of all weights."""
        return sum(self.unit_bytes)

    @property
    def largest_unit_bytes(self) -> int:
        """Size of the largest unit."""
        return max(self.unit_bytes, default=0)
