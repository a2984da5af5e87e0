"""Background work on a run: what is stored, and which calls are in flight."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from shardwell_server.coordinator.waiting import SharedCall


@dataclass(slots=True)
class UnsavedChanges:
    """Counts the changes of a run that must be durable before anyone can observe them."""

    made: int = 0
    saved: int = 0
    saving: SharedCall[None] = field(default_factory=SharedCall)

    def note_made(self) -> None:
        """Counts a change."""
        self.made += 1

    def note_saved(self, made: int) -> None:
        """Records that the first ``made`` changes are durable."""
        self.saved = made


@dataclass(slots=True)
class StepCalls:
    """Background work on the step in flight. At most one call of each kind is in flight per run."""

    preparing: SharedCall[None] = field(default_factory=SharedCall)
    """Asks the servers to reduce the gradients."""
    committing: SharedCall[None] = field(default_factory=SharedCall)
    """Writes the commit record."""
    fencing: SharedCall[None] = field(default_factory=SharedCall)
    """Fences former trainers of work items on the servers."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held in an asynchronous run while items are fenced, and from the preparation of a step to its commit record: the
    servers prepare one step at a time."""
    waking: SharedCall[None] = field(default_factory=SharedCall)
    """Waits until a work item is late, then wakes the trainers that wait for work."""
    promoting: SharedCall[None] = field(default_factory=SharedCall)
    """Tells servers that they are the primaries of shards."""
    relocating: SharedCall[None] = field(default_factory=SharedCall)
    """Gives shards of lost servers to others."""
    building: SharedCall[None] = field(default_factory=SharedCall)
    """Builds and releases backups."""

    def stop_repeating(self) -> None:
        """Cancels the calls that are repeated until all servers have answered. Some of these may never answer."""
        self.fencing.cancel()
        self.promoting.cancel()
