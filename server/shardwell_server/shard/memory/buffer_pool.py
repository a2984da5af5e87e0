"""Buffers that are used again: a fresh allocation page-faults at a tenth of memcpy's speed."""

from __future__ import annotations

import torch

from shardwell_wire.errors import CapacityError


class BufferPool:
    """Byte tensors, taken and given back on the event loop only.

    Idle buffers are kept for the next taker of their size as long as everything fits the limit.

    Args:
        limit_bytes: What taken and idle buffers and ``elsewhere_bytes`` may come to before idle ones are freed.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.taken_bytes = 0
        self.idle_bytes = 0
        self.elsewhere_bytes = 0
        """What else counts against the limit: optimizer state, which torch allocates, and shared memory."""
        self._limit_bytes = limit_bytes
        self._idle: dict[int, list[torch.Tensor]] = {}

    def take(self, size_bytes: int) -> torch.Tensor:
        """A buffer with any content. [size_bytes]

        Raises:
            CapacityError: The system has no memory for it, though the budget has.
        """
        idle = self._idle.get(size_bytes)
        if idle:
            buffer = idle.pop()
            self.idle_bytes -= size_bytes
        else:
            buffer = _allocate(size_bytes)
        self.taken_bytes += size_bytes
        self._fit()
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back; nobody may use it any more."""
        size_bytes = buffer.numel()
        self.taken_bytes -= size_bytes
        if size_bytes:
            self._idle.setdefault(size_bytes, []).append(buffer)
            self.idle_bytes += size_bytes
        self._fit()

    def part_with(self, buffer: torch.Tensor) -> None:
        """A buffer that was taken is counted elsewhere from now on."""
        self.taken_bytes -= buffer.numel()

    def take_over(self, buffer: torch.Tensor) -> None:
        """Takes back a buffer that was counted elsewhere."""
        self.taken_bytes += buffer.numel()
        self.give(buffer)

    def trim(self) -> None:
        """Frees what is idle."""
        self._idle.clear()
        self.idle_bytes = 0

    def _fit(self) -> None:
        while self.idle_bytes and self.taken_bytes + self.elsewhere_bytes + self.idle_bytes > self._limit_bytes:
            size_bytes = max(size for size, idle in self._idle.items() if idle)
            self._idle[size_bytes].pop()
            self.idle_bytes -= size_bytes


def _allocate(size_bytes: int) -> torch.Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise CapacityError(
            f"the system gave no memory for {size_bytes} bytes, which --memory-budget has room for: lower the budget "
            "to what this process may use"
        ) from error
