"""How much memory a server may use, and buffers that are used again."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import psutil
import torch

from shardwell_wire.errors import CapacityError

DEFAULT_SHARE = 0.8
"""Part of the machine's or container's memory that a server takes as its budget by default."""

_OPTIMIZER_STATES = 2
"""Adam's two moments: the most that any optimizer served here keeps besides Adam's amsgrad."""


def default_budget_bytes() -> int:
    """80 % of what this process may use: the container's limit, or the machine's memory."""
    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return int(min(limits) * DEFAULT_SHARE)


def shard_need_bytes(shard_bytes: int, dp: int) -> int:
    """What a shard may come to use: parameters, optimizer state, contributions and their sum."""
    return shard_bytes * (1 + _OPTIMIZER_STATES + dp + (1 if dp > 1 else 0))


class MemoryBudget:
    """Reservations against a budget.

    Besides the shards' own needs one staging buffer of the largest shard is set aside: for initial
    values and for parts that are added to a contribution.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._needs: dict[tuple[str, str], int] = {}
        self._sizes: dict[tuple[str, str], int] = {}

    @property
    def reserved_bytes(self) -> int:
        """What is set aside."""
        return sum(self._needs.values()) + max(self._sizes.values(), default=0)

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.reserved_bytes)

    def reserve(self, run: str, unit: str, shard_bytes: int, dp: int) -> None:
        """Sets memory aside for a shard.

        Raises:
            CapacityError: It does not fit; nothing is set aside.
        """
        key, need = (run, unit), shard_need_bytes(shard_bytes, dp)
        staging = max(0, shard_bytes - max(self._sizes.values(), default=0))
        if need + staging > self.free_bytes:
            raise CapacityError(
                f"unit {unit!r} of run {run!r} needs {need + staging} bytes here ({shard_bytes} of parameters, with "
                f"optimizer state and the gradients of {dp} ranks), but {self.free_bytes} of the budget of "
                f"{self.budget_bytes} are free: add shard servers, raise --memory-budget, or use fewer data ranks",
                unit=unit,
                needed_bytes=need + staging,
                free_bytes=self.free_bytes,
            )
        self._needs[key], self._sizes[key] = need, shard_bytes

    def release(self, run: str) -> int:
        """Gives back what a run had; returns how much."""
        before = self.reserved_bytes
        for key in [key for key in self._needs if key[0] == run]:
            del self._needs[key], self._sizes[key]
        return before - self.reserved_bytes


class BufferPool:
    """Byte tensors that are used again: a fresh allocation page-faults at a tenth of memcpy's speed."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.taken_bytes = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        """A buffer with any content. [size_bytes]"""
        self.taken_bytes += size_bytes
        idle = self._idle[size_bytes]
        return idle.pop() if idle else torch.empty(size_bytes, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back; nobody may use it any more."""
        self.taken_bytes -= buffer.numel()
        self._idle[buffer.numel()].append(buffer)

    def trim(self) -> None:
        """Frees what is idle."""
        self._idle.clear()
