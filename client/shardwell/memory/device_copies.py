"""Copies between the host and a GPU that run in parallel with the compute stream.

Each device has one stream for gathers and one for pushes, because the two directions do not slow each other down. Host
memory is pinned, and torch's allocator reuses it only after the copies from it are done; or it is shared memory that is
registered with CUDA. Events order the streams. Background threads wait for events, the training thread does not.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

logger = logging.getLogger(__name__)

Exchange = Callable[[torch.Tensor], None]
"""Writes the missing parts of a vector of which one part is in place. On a GPU, enqueues the work on the current stream
and does not wait. uint8. [size_bytes]"""

Place = Callable[[torch.Tensor], object]
"""Enqueues the work that writes bytes on a device to their places, on the current stream. uint8."""

GPU_TYPES = {"cuda"}
"""Types of the devices whose values this module copies. Tests add another one."""

_POLL_S = 0.0002

_ALIGN_BYTES = 64
"""Where a gradient begins in the copy of a unit's gradients: kernels then copy whole words."""


def is_gpu(device: torch.device) -> bool:
    """Returns whether values on a device are copied from and to the host by this module."""
    return device.type in GPU_TYPES


@functools.cache
def _gather_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache
def _push_stream(device: torch.device) -> torch.cuda.Stream:
    """Copies to the host, and of activations back from there: these must follow their copies to the host."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache
def _exchange_stream(device: torch.device) -> torch.cuda.Stream:
    """A separate stream: copies must continue if an exchange hangs because another process died."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Records an event for which threads wait without using a processor."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _pinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


class Arrival:
    """The transfer of one flat vector to a GPU: from a receive buffer, or from registered memory, in parts.

    Args:
        target: Memory on the device, just allocated by the thread that computes. uint8. [size_bytes]
    """

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._staging: torch.Tensor | None = None
        self._place: Place | None = None
        # Kernels of the memory's previous owner may still be running.
        self._reusable = torch.cuda.current_stream(target.device).record_event()
        self._copied: torch.cuda.Event | None = None
        self._exchanged: torch.cuda.Event | None = None
        self._abandoned = False
        self._lock = threading.Lock()

    def receive_buffer(self, size_bytes: int | None = None, place: Place | None = None) -> torch.Tensor:
        """Returns a receive buffer in pinned host memory, from which ``begin`` copies. Called from any thread.

        Args:
            size_bytes: Size of the buffer. None: the size of the vector.
            place: Writes the received bytes to the vector, if it is not a copy of them. They are on the device then.

        Returns:
            uint8. [size_bytes]
        """
        staging = _pinned(self._target.numel() if size_bytes is None else size_bytes)
        with self._lock:
            self._staging, self._place = staging, place
            self._copied = None  # an earlier transfer has failed
        return staging

    def begin(self) -> None:
        """Starts the copy, once the receive buffer is complete. Called from any thread; only the first call counts."""
        with self._lock:
            if self._staging is None or self._copied is not None or self._abandoned:
                return
            stream = _gather_stream(self._target.device)
            with torch.cuda.stream(stream):
                stream.wait_event(self._reusable)
                if self._exchanged is not None:  # the copy must follow a failed exchange
                    stream.wait_event(self._exchanged)
                if self._place is None:
                    self._target.copy_(self._staging, non_blocking=True)
                else:
                    self._place(self._staging.to(self._target.device, non_blocking=True))
                self._copied = stream.record_event()

    def copy(self, source: torch.Tensor, place: Place) -> None:
        """Copies a part of the vector from registered host memory, and waits until the device has it.

        Called from background threads, after which the memory may change.

        Args:
            source: The part, as it is stored. uint8.
            place: Writes it to the vector. Gets ``source``, and copies it to the device.
        """
        with self._lock:
            if self._abandoned:
                return
            stream = _gather_stream(self._target.device)
            with torch.cuda.stream(stream):
                stream.wait_event(self._reusable)
                place(source)
                self._copied = copied = _record(stream)
        copied.synchronize()

    def complete(self, start_bytes: int, stop_bytes: int, exchange: Exchange, limit_s: float) -> None:
        """Copies a part of the bytes, runs the exchange for the rest, and waits until the device is done.

        Called from a background thread before ``order``. Arguments and TimeoutError as ``FlatVector.complete``.
        """
        staging = self._staging
        assert staging is not None
        stream = _exchange_stream(self._target.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._reusable)
            self._target[start_bytes:stop_bytes].copy_(staging[start_bytes:stop_bytes], non_blocking=True)
            try:
                exchange(self._target)
            finally:
                self._exchanged = stream.record_event()
        # An exchange with a GPU process that died never ends by itself. `order` waits only for `_copied`, which is set
        # after the exchange has ended.
        deadline = time.monotonic() + limit_s
        while not self._exchanged.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the exchange took more than {limit_s:.0f} s")
            time.sleep(_POLL_S)
        with self._lock:
            self._copied = self._exchanged

    def order(self) -> None:
        """Makes the compute stream wait for the copy; the caller does not wait."""
        with self._lock:
            assert self._copied is not None
            torch.cuda.current_stream(self._target.device).wait_event(self._copied)

    def abandon(self) -> None:
        """Releases the memory: it is reused only after a running copy has ended, and no other copy starts."""
        with self._lock:
            self._abandoned = True
            if (last := self._copied or self._exchanged) is not None:
                torch.cuda.current_stream(self._target.device).wait_event(last)


def to_host(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Starts to copy tensors to the host. All that are on one GPU are copied together, in one transfer.

    Args:
        tensors: On any devices; must not change from now on.

    Returns:
        The copies, flat and contiguous, and a function that waits in any thread until they are complete. A tensor on
        the CPU is not copied.
    """
    copies, by_device = list[torch.Tensor](), dict[torch.device, list[int]]()
    for number, tensor in enumerate(tensors):
        if is_gpu(tensor.device):
            by_device.setdefault(tensor.device, []).append(number)
            copies.append(tensor)
        else:
            copies.append(_flat_on_cpu(tensor))
    events = []
    for device, numbers in by_device.items():
        packed, places = _pack([tensors[number] for number in numbers])
        copy, stream = _pinned(packed.numel()), _push_stream(device)
        # Kernels that write the tensors may still be queued on the compute stream.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copy.copy_(packed, non_blocking=True)
            # The allocator must not reuse the memory of the source before the copy has read it.
            packed.record_stream(stream)
            events.append(_record(stream))
        for number, (start_bytes, stop_bytes) in zip(numbers, places, strict=True):
            copies[number] = copy[start_bytes:stop_bytes].view(tensors[number].dtype)

    def wait() -> None:
        for event in events:
            event.synchronize()

    return copies, wait


def _pack(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Returns the bytes of tensors of one device in one tensor, and the range of each. One tensor is not copied.

    The work is enqueued on the compute stream, so the memory of the tensors can be reused there at once.
    """
    flats = [tensor.detach().contiguous().view(-1) for tensor in tensors]
    if len(flats) == 1:
        return flats[0].view(torch.uint8), [(0, flats[0].nbytes)]
    places, size_bytes = list[tuple[int, int]](), 0
    for flat in flats:
        places.append((size_bytes, size_bytes + flat.nbytes))
        size_bytes += -(-flat.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    packed = torch.empty(size_bytes, dtype=torch.uint8, device=flats[0].device)
    targets = [packed[start:stop].view(flat.dtype) for flat, (start, stop) in zip(flats, places, strict=True)]
    torch._foreach_copy_(targets, flats)
    return packed, places


def _flat_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    # A torch operation without effect still costs time, because it releases the interpreter lock.
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    return (tensor if tensor.is_contiguous() else tensor.contiguous()).view(-1)


def to_device(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a result of ``to_host`` back to a GPU. The compute stream waits for the copy, the caller does not.

    Args:
        source: Host memory that only ``to_host`` has used.
    """
    compute, stream = torch.cuda.current_stream(device), _push_stream(device)
    target = torch.empty_like(source, device=device)
    stream.wait_stream(compute)  # kernels of the memory's previous owner may still be running
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    target.record_stream(stream)
    compute.wait_stream(stream)
    return target


# ---- host memory that other processes write ----

_PORTABLE, _READ_ONLY = 1, 8
"""Flags of ``cudaHostRegister``: for all devices of the process, and memory that this process maps for reading."""


def register(address: int, size_bytes: int) -> bool:
    """Registers mapped memory with CUDA, so that GPUs read it without a copy by the processor.

    Args:
        address: Start of a mapping for reading that shares its pages with a file. CUDA would give a private mapping
            pages of its own, which show no later writes of other processes.
        size_bytes: Size of the mapping.

    Returns:
        False if CUDA cannot do so: the platform lacks the feature, or the process may not lock as much memory.
    """
    try:
        error = int(_runtime().cudaHostRegister(address, size_bytes, _PORTABLE | _READ_ONLY))
    except (RuntimeError, AssertionError, AttributeError) as reason:  # no CUDA, or a torch without the binding
        _log_refused(str(reason))
        return False
    if not error:
        return True
    _log_refused(f"CUDA error {error}")
    with suppress(RuntimeError, AssertionError):
        # CUDA reports an error again at the next start of a kernel, and forgets it then.
        torch.ones(1, device=torch.device("cuda", torch.cuda.current_device()))
    return False


def unregister(address: int, process_id: int) -> None:
    """Ends ``register``, before the memory is unmapped.

    Args:
        address: See ``register``.
        process_id: The process that registered the memory. A process that it forked has no access to the GPU.
    """
    if process_id == os.getpid():
        with suppress(RuntimeError):
            _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@functools.cache
def _log_refused(reason: str) -> None:
    """Logs once per reason, because every shard may meet it."""
    logger.warning("CUDA cannot register the servers' shared memory, so copies to the GPU are staged: %s", reason)
