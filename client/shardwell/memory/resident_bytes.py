"""The bytes that the flat vectors of all units take in this process. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ResidentBytes:
    """Bytes that the flat vectors of all units take in this process."""

    live_bytes: int = 0
    peak_bytes: int = 0
    """Maximum of ``live_bytes`` so far."""
    fetching_bytes: int = 0
    """Bytes of units in the state FETCHING, without replicas."""
    kept_bytes: int = 0
    """Bytes of units in the state KEPT, without replicas."""
    freed_bytes: int = 0
    """Bytes that were released so far."""
    recent_peak_bytes: int = 0
    """Maximum of ``live_bytes`` since the last ``take_recent_peak``."""

    def add(self, size_bytes: int) -> None:
        """Counts memory that was allocated, or released if the number is negative."""
        self.live_bytes += size_bytes
        if size_bytes < 0:
            self.freed_bytes -= size_bytes
        elif self.live_bytes > self.recent_peak_bytes:
            self.recent_peak_bytes = self.live_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def take_recent_peak(self) -> int:
        """Returns the maximum of ``live_bytes`` since the last call."""
        peak_bytes, self.recent_peak_bytes = self.recent_peak_bytes, self.live_bytes
        return peak_bytes
