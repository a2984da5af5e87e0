"""The state of a run's shards in one version, while a checkpoint writes it in the background.

Note: [Copies for checkpoints]
    A checkpoint reads the memory of the shards while training goes on. An update changes values and optimizer state in
    place, so it calls ``before_update`` for each shard first. Whatever is not written yet is then copied, tensor by
    tensor, into unreserved memory. If there is none, the update waits until the tensor is written: memory stays within
    the budget. An update waits at most ``MAX_WAIT_S`` in all; then the checkpoint is given up, because training comes
    first. Usually nothing is copied: a checkpoint begins right after an update and is written before the next one.

    Tensors are copied as a whole, not by block. Updates write to every block of a tensor anyway, and their arithmetic
    would have to be interrupted between blocks.

    The writing thread reads windows of a few MiB under a lock, into a buffer of its own. The lock is never held while
    a window is written, so slow storage delays nobody who needs the lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence

import torch

from shardwell_server.shard.concurrency import InThread
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire.errors import CapacityError, ShardwellError, UnavailableError

MAX_WAIT_S = 5.0
"""Longest time in seconds that updates wait for one checkpoint."""

_SMALL_BYTES = 64 << 10
"""Tensors up to this size are copied when the capture begins, which costs less than tracking them."""


class CapturedShard:
    """The tensors of one shard in one version.

    Args:
        shard: The shard.
        tensors: Its tensors. Each contiguous, on the CPU.
        memory: Unreserved memory for copies.
    """

    def __init__(self, shard: UnitShard, tensors: Iterable[torch.Tensor], memory: Memory) -> None:
        self.shard = shard
        self.wanted = False
        """True if an update waits for the shard."""
        self.written = asyncio.Event()
        """Set when everything is written, or the capture has ended."""
        self._tensors: list[torch.Tensor | None] = [_bytes_of(tensor) for tensor in tensors]
        """Bytes of each tensor. None: written. uint8. [nbytes]"""
        self._is_live = [tensor is not None and tensor.numel() > _SMALL_BYTES for tensor in self._tensors]
        """Whether each tensor is memory of the shard, which an update will change."""
        for number, tensor in enumerate(self._tensors):
            if tensor is not None and not self._is_live[number]:
                self._tensors[number] = tensor.clone()
        self._copies: dict[int, torch.Tensor] = {}
        """Copies in unreserved memory, by number."""
        self._memory = memory
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        if all(tensor is None for tensor in self._tensors):
            self.written.set()

    # ---- in the writing thread ----

    def compute_read(self, number: int, start: int, target: torch.Tensor) -> bool:
        """Copies some bytes of a tensor.

        Args:
            number: Number of the tensor.
            start: Position of the first byte.
            target: Where to copy them to. uint8. [size]

        Returns:
            False if the tensor is gone, because the capture has ended.
        """
        with self._lock:
            source = self._tensors[number]
            if source is None:
                return False
            target.copy_(source[start : start + target.numel()])
            return True

    def compute_note_written(self, number: int) -> None:
        """Releases a tensor that is written."""
        with self._lock:
            self._tensors[number] = None
            copy = self._copies.pop(number, None)
            complete = all(tensor is None for tensor in self._tensors)
        if copy is not None:
            self._loop.call_soon_threadsafe(self._memory.release_buffer, copy)
        if complete:
            self._loop.call_soon_threadsafe(self.written.set)

    # ---- on the event loop ----

    async def detach(self, in_thread: InThread) -> bool:
        """Copies what is not written yet. Returns False if memory was short for a part of it."""
        copies, is_short = {}, False
        for number, tensor in enumerate(self._tensors):
            if tensor is None or not self._is_live[number] or number in self._copies:
                continue
            if (copy := self._memory.try_acquire(tensor.numel())) is not None:
                copies[number] = copy
            else:
                is_short = True

        def compute() -> None:
            for number, copy in copies.items():
                self._compute_copy(number, copy)

        if copies:
            await in_thread(compute)
        return not is_short

    def _compute_copy(self, number: int, copy: torch.Tensor) -> None:
        with self._lock:
            source = self._tensors[number]
            if source is not None:
                copy.copy_(source)
                self._tensors[number] = self._copies[number] = copy
                return
        self._loop.call_soon_threadsafe(self._memory.release_buffer, copy)

    def end(self) -> None:
        """Releases everything. The writing thread reads nothing of the shard any more."""
        with self._lock:
            self._tensors = [None] * len(self._tensors)
            copies, self._copies = self._copies, {}
        for copy in copies.values():
            self._memory.release_buffer(copy)
        self.written.set()


class VersionCapture:
    """The primary shards of a run in one version. See Note: [Copies for checkpoints].

    Args:
        version: The version.
        shards: The captured shards, in the order in which they should be written.
        in_thread: Runs copies in a thread.
    """

    def __init__(self, version: int, shards: Sequence[CapturedShard], in_thread: InThread) -> None:
        self.version, self.shards = version, tuple(shards)
        self.failure: ShardwellError | None = None
        """Why the capture ended early."""
        self._by_shard = {id(captured.shard): captured for captured in shards}
        self._in_thread = in_thread
        self._waited_s = 0.0

    def needs(self, shard: UnitShard) -> bool:
        """True if a captured shard is not written yet."""
        captured = self._by_shard.get(id(shard))
        return captured is not None and not captured.written.is_set()

    async def before_update(self, shard: UnitShard) -> None:
        """Makes sure that an update of a shard changes nothing that is not written. Runs before the update."""
        captured = self._by_shard.get(id(shard))
        if captured is None or captured.written.is_set() or await captured.detach(self._in_thread):
            return
        captured.wanted, loop = True, asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(max(0.0, MAX_WAIT_S - self._waited_s)):
                await captured.written.wait()
        except TimeoutError:
            self.fail(
                CapacityError(
                    f"{shard.what} could not be written before its next update, and there is no memory for a copy: "
                    "raise --memory-budget, or use faster storage"
                )
            )
        finally:
            self._waited_s += loop.time() - started

    def note_removed(self, shard: UnitShard) -> None:
        """Ends the capture if it needs a shard that is about to be dropped."""
        captured = self._by_shard.get(id(shard))
        if captured is not None and not captured.written.is_set():
            self.fail(UnavailableError(f"{shard.what} left this server while the checkpoint was written"))

    def fail(self, why: ShardwellError) -> None:
        """Ends the capture. The writing thread stops."""
        if self.failure is None:
            self.failure = why
        self.end()

    def end(self) -> None:
        """Releases all memory, because everything is written or the checkpoint was given up."""
        for captured in self.shards:
            captured.end()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the bytes of a tensor; None if it has none."""
    assert tensor.is_contiguous(), "state tensors are contiguous"
    return tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else None
