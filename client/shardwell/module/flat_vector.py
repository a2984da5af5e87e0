"""The memory of one unit's flat vector in this process.

Note: [Swapped storages]
    Tensors, and the views that autograd saves, refer to a storage object and not to an address. Exchanging the data
    pointers of two storages therefore moves all their tensors together. The storage of a freed unit has pages that
    read as NaN; the storage of a gathered unit has a buffer of the pool. ``resize_`` would free and allocate the
    memory instead, which causes page faults.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from shardwell.memory.buffers import VectorMemory, nan_storage
from shardwell.memory.device_copies import Arrival, Exchange
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.model.layout import UnitLayout

_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Some versions of torch lack the method. ``resize_`` replaces it then. See Note: [Swapped storages]."""


class FlatVector:
    """One storage whose memory is repeatedly allocated and released. See Note: [Swapped storages].

    Tensors stay placed in the vector, whether it has memory or not. Bytes are written from outside torch, so no version
    counter changes. (``Tensor.numpy`` would make the storage permanently unresizable.)

    Args:
        layout: Position of each parameter.
        device: The device of the memory.
        memory: Provides and counts the memory.
    """

    def __init__(self, layout: UnitLayout, device: torch.device, memory: VectorMemory) -> None:
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
        self._pooled: torch.Tensor | None = None
        """Buffer from the pool. While the vector has memory, this tensor has the NaN pages: the two are swapped."""
        self.in_place = False
        """True if the memory belongs to the store and is neither allocated nor released here."""

    def use_shared(self, memory: torch.Tensor) -> None:
        """Replaces the storage permanently by shared memory of the store. uint8. [size_bytes]"""
        self.storage, self.in_place = memory.untyped_storage(), True

    def allocate(self) -> None:
        """Gets memory, with arbitrary content."""
        if self.in_place:
            return
        if self._device.type == "cpu" and _CAN_SWAP:
            self._pooled = self._memory.pool.acquire(self._layout.size_bytes)
            self.storage._swap_data_ptr_(self._pooled.untyped_storage())  # type: ignore[attr-defined]
        else:
            self.storage.resize_(self._layout.size_bytes)
        self._memory.add(self._layout.size_bytes)

    def release(self, *, reusable: bool = True) -> None:
        """Releases the memory.

        Args:
            reusable: False: a gather may still write to the memory, which is freed when the gather has ended.
        """
        if self.in_place:
            return
        self.abandon()
        if self._pooled is not None:
            self.storage._swap_data_ptr_(self._pooled.untyped_storage())  # type: ignore[attr-defined]
            if reusable:
                self._memory.pool.release(self._pooled)
            self._pooled = None
        else:
            self.storage.resize_(0)
        self._memory.add(-self._layout.size_bytes)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if a dense tensor is in memory that ``release`` takes away."""
        if self.in_place:
            return False
        start = self.storage.data_ptr()
        return start <= tensor.data_ptr() < start + self._layout.size_bytes

    def abandon(self) -> None:
        """Discards the content of the receive buffer."""
        if self._arrival is not None:
            self._arrival.abandon()
        self._staging = self._arrival = None

    def place(self, index: int) -> torch.Tensor:
        """Returns a contiguous tensor in a parameter's part; autograd does not treat it as a view."""
        spec, start = self._layout.parameters[index], self._layout.starts[index]
        dtype = getattr(torch, spec.dtype)
        strides = torch.empty(spec.shape, dtype=dtype, device="meta").stride()
        # set_ and not a slice of one base tensor: slices would share a version counter.
        tensor = torch.empty(0, dtype=dtype, device=self._device)
        return tensor.set_(self.storage, start // spec.item_size, spec.shape, strides)

    def expect(self) -> Arrival:
        """Prepares the vector on a GPU for a transfer. Called by the thread that computes, before the other methods.

        Returns:
            The transfer. Its ``begin`` starts the copy, once the receive buffer is complete.
        """
        self._arrival = Arrival(self._bytes())
        return self._arrival

    def receive_buffer(self, layout: UnitLayout | None = None) -> memoryview:
        """Returns host memory for the vector's bytes; ``receive`` completes the vector from there.

        Args:
            layout: The same parameters in the dtypes in which a GPU's vector is received: the GPU casts them. None: the
                dtypes of the vector.

        Returns:
            [layout.size_bytes]
        """
        if (arrival := self._arrival) is not None:
            layout = layout or self._layout
            place = None if layout == self._layout else partial(self._cast, layout, 0)
            staging = arrival.receive_buffer(layout.size_bytes, place)
            return memory_at(staging.data_ptr(), layout.size_bytes, staging)
        if self._device.type == "cpu":
            return self._memory_on_cpu()
        self._staging = torch.empty(self._layout.size_bytes, dtype=torch.uint8)
        return memory_at(self._staging.data_ptr(), self._layout.size_bytes, self._staging)

    def copier(self, layout: UnitLayout) -> Callable[[int, torch.Tensor], None]:
        """Returns a function that copies a part of the vector to a GPU from registered memory, and waits for the copy.

        The function may be called in any thread, with the start of the part in ``layout`` and the part, which is uint8.
        It does nothing once the vector has been released: it belongs to the transfer for which it was made.

        Args:
            layout: The same parameters in the dtypes of the memory.
        """
        arrival = self._arrival
        assert arrival is not None
        on_device = partial(torch.Tensor.to, device=self._device, non_blocking=True)

        def copy(start_bytes: int, source: torch.Tensor) -> None:
            if layout == self._layout:
                target = self._bytes()[start_bytes : start_bytes + source.numel()]
                arrival.copy(source, lambda source: target.copy_(source, non_blocking=True))
            else:
                arrival.copy(source, lambda source: self._cast(layout, start_bytes, on_device(source)))

        return copy

    def _cast(self, layout: UnitLayout, start_bytes: int, received: torch.Tensor) -> None:
        """Casts a part of the same parameters in other dtypes to the vector. On a GPU, only enqueues the work.

        Args:
            layout: The parameters in the other dtypes.
            start_bytes: Start of the part in that layout.
            received: The part, on the device of the vector. uint8. [part_bytes]
        """
        whole = self._bytes()
        for at in layout.segments(start_bytes, start_bytes + received.numel()):
            index, dtype = at.parameter_index, self._layout.parameters[at.parameter_index].dtype
            size, start = self._layout.parameters[index].item_size, self._layout.starts[index]
            target = whole[start + at.start_element * size : start + at.stop_element * size]
            source = received[at.start_bytes - start_bytes : at.stop_bytes - start_bytes]
            source = source.view(getattr(torch, layout.parameters[index].dtype))
            target.view(getattr(torch, dtype)).copy_(source)

    @property
    def device_type(self) -> str:
        """The device of the memory."""
        return self._device.type

    def complete(self, start_bytes: int, stop_bytes: int, exchange: Exchange, limit_s: float) -> None:
        """Takes a part from the receive buffer, runs the exchange for the rest, and waits for its end.

        Called from a background thread. Other processes write the rest directly to the vector's device. Afterwards the
        vector is complete.

        Args:
            start_bytes: Start of the part.
            stop_bytes: End of the part, exclusive.
            exchange: Writes the rest.
            limit_s: Seconds to wait for the device.

        Raises:
            TimeoutError: The exchange took longer. Once it has ended, the whole vector may be received instead.
        """
        if self._arrival is not None:
            self._arrival.complete(start_bytes, stop_bytes, exchange, limit_s)
        else:
            exchange(self._bytes())

    def receive(self) -> None:
        """Completes the vector from the receive buffer. On a GPU, only the compute stream waits for the copy."""
        if self._arrival is not None:
            self._arrival.begin()
            self._arrival.order()
        elif self._staging is not None:
            self._bytes().copy_(self._staging)
        self._staging = self._arrival = None

    def send_buffer(self) -> memoryview:
        """Returns host memory with the vector's bytes, valid until the release. [size_bytes]"""
        if self._device.type == "cpu":
            return self._memory_on_cpu()
        self._staging = self._bytes().cpu()
        return memory_at(self._staging.data_ptr(), self._layout.size_bytes, self._staging)

    def _memory_on_cpu(self) -> memoryview:
        # A gather may end after the last reference to the vector. The view needs both storages: either has the memory.
        return memory_at(self.storage.data_ptr(), self._layout.size_bytes, (self.storage, self._pooled))

    def _bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(self.storage)
