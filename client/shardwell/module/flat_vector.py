"""The memory of one unit's flat vector in this process."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardwell.memory.buffer_pool import BufferPool
from shardwell.memory.completion import Exchange
from shardwell.memory.device_copies import Arrival
from shardwell.memory.nan_pages import nan_storage
from shardwell_wire.codec import memory_at
from shardwell_wire.layout import UnitLayout

_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Not in every version of torch; without it memory is freed and allocated, which page-faults."""


@dataclass(slots=True)
class Memory:
    """Bytes that the flat vectors of all units take here, and memory to use for them again."""

    pool: BufferPool = field(default_factory=lambda: BufferPool(0))
    """For vectors on the CPU."""
    live_bytes: int = 0
    peak_bytes: int = 0
    fetching_bytes: int = 0
    """Of units in the state FETCHING."""
    kept_bytes: int = 0
    """Of units in the state KEPT."""

    def take(self, size_bytes: int) -> None:
        """Counts memory taken, or given back if negative."""
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class FlatVector:
    """One storage that gets memory of the unit's size, and loses it.

    Tensors placed in it stay placed: when the storage's memory changes they, and whatever views of them
    autograd saved, lie in the new memory, or in none, which on the CPU reads as NaN. Bytes are written from
    outside torch, so no version counter moves. (``Tensor.numpy`` would make the storage unresizable for ever.)

    Args:
        layout: What lies where.
        device: Where the memory is.
        memory: Counts it.
    """

    def __init__(self, layout: UnitLayout, device: torch.device, memory: Memory) -> None:
        self.storage = (
            nan_storage(layout.size_bytes)
            if device.type == "cpu" and _CAN_SWAP
            else torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        )
        self._layout = layout
        self._device = device
        self._memory = memory
        self._arrival: Arrival | None = None
        self._staging: torch.Tensor | None = None
        self._lent: torch.Tensor | None = None
        """What the pool lent; while it is in use its memory is the storage's."""
        self.in_place = False
        """Whether the memory is the store's, and is neither taken nor given back."""

    def lie_in(self, memory: torch.Tensor) -> None:
        """From now on the vector is this memory; what is placed anew lies there. uint8. [size_bytes]"""
        self.storage, self.in_place = memory.untyped_storage(), True

    def allocate(self) -> None:
        """Takes the memory, with whatever is in it."""
        if self.in_place:
            return
        if self._device.type == "cpu" and _CAN_SWAP:
            self._lent = self._memory.pool.take(self._layout.size_bytes)
            self.storage._swap_data_ptr_(self._lent.untyped_storage())  # type: ignore[attr-defined]
        else:
            self.storage.resize_(self._layout.size_bytes)
        self._memory.take(self._layout.size_bytes)

    def release(self) -> None:
        """Gives the memory back."""
        self.abandon()
        if self.in_place:
            return
        if self._lent is not None:
            self.storage._swap_data_ptr_(self._lent.untyped_storage())  # type: ignore[attr-defined]
            self._memory.pool.give(self._lent)
            self._lent = None
        else:
            self.storage.resize_(0)
        self._memory.take(-self._layout.size_bytes)

    def abandon(self) -> None:
        """What is in the receive buffer is not wanted any more."""
        if self._arrival is not None:
            self._arrival.abandon()
        self._staging = self._arrival = None

    def place(self, index: int) -> torch.Tensor:
        """A contiguous tensor on a parameter's part; for autograd it is no view of anything."""
        spec, start = self._layout.parameters[index], self._layout.starts[index]
        dtype = getattr(torch, spec.dtype)
        strides = torch.empty(spec.shape, dtype=dtype, device="meta").stride()
        tensor = torch.empty(0, dtype=dtype, device=self._device)
        return tensor.set_(self.storage, start // spec.item_size, spec.shape, strides)

    def receive_buffer(self) -> memoryview:
        """Host memory to write the vector's bytes to; ``receive`` makes them the vector's. [size_bytes]"""
        if self._device.type == "cpu":
            return memory_at(self.storage.data_ptr(), self._layout.size_bytes)
        if self._device.type == "cuda":
            self._arrival = Arrival(self._bytes())
            self._staging = self._arrival.staging
        else:
            self._staging = torch.empty(self._layout.size_bytes, dtype=torch.uint8)
        return memory_at(self._staging.data_ptr(), self._layout.size_bytes)

    def received(self) -> None:
        """Everything is written to the receive buffer: on a GPU the copy begins. From any thread."""
        arrival = self._arrival
        if arrival is not None:
            arrival.begin()

    @property
    def device_type(self) -> str:
        """Where the memory is."""
        return self._device.type

    def complete(self, start_bytes: int, stop_bytes: int, exchange: Exchange, limit_s: float) -> None:
        """See ``Completable.complete``; on the CPU and on a GPU."""
        if self._arrival is not None:
            self._arrival.complete(start_bytes, stop_bytes, exchange, limit_s)
        else:
            exchange(self._bytes())

    def receive(self) -> None:
        """Takes over what was written to the receive buffer; on a GPU the compute stream waits, not the caller."""
        if self._arrival is not None:
            self._arrival.begin()
            self._arrival.order()
        elif self._staging is not None:
            self._bytes().copy_(self._staging)
        self._staging = self._arrival = None

    def send_buffer(self) -> memoryview:
        """Host memory with the vector's bytes, until it is released. [size_bytes]"""
        if self._device.type == "cpu":
            return memory_at(self.storage.data_ptr(), self._layout.size_bytes)
        self._staging = self._bytes().cpu()
        return memory_at(self._staging.data_ptr(), self._layout.size_bytes)

    def _bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(self.storage)
