"""Copies between the host and a GPU that run in parallel with the compute stream.

Each device has one stream for copies. Host memory is pinned; torch's allocator reuses it only after the copies from it
are done.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence

import torch

Exchange = Callable[[torch.Tensor], None]
"""Writes the missing parts of a vector of which one part is in place. On a GPU, enqueues the work on the current stream
and does not wait. uint8. [size_bytes]"""

_POLL_S = 0.0002


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache
def _exchange_stream(device: torch.device) -> torch.cuda.Stream:
    """A separate stream: copies must continue if an exchange hangs because another process died."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Arrival:
    """The transfer of one flat vector to a GPU.

    Args:
        target: Memory on the device, just allocated by the thread that computes. uint8. [size_bytes]
    """

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self.staging = torch.empty(target.numel(), dtype=torch.uint8, pin_memory=True)
        """Receive buffer in pinned host memory. [size_bytes]"""
        # Kernels of the memory's previous owner may still be running.
        self._reusable = torch.cuda.current_stream(target.device).record_event()
        self._copied: torch.cuda.Event | None = None
        self._exchanged: torch.cuda.Event | None = None
        self._abandoned = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Starts the copy, once the receive buffer is complete. Called from any thread; only the first call counts."""
        with self._lock:
            if self._copied is not None or self._abandoned:
                return
            stream = _copy_stream(self._target.device)
            with torch.cuda.stream(stream):
                stream.wait_event(self._reusable)
                if self._exchanged is not None:  # the copy must follow a failed exchange
                    stream.wait_event(self._exchanged)
                self._target.copy_(self.staging, non_blocking=True)
                self._copied = stream.record_event()

    def complete(self, start_bytes: int, stop_bytes: int, exchange: Exchange, limit_s: float) -> None:
        """Copies a part of the bytes, runs the exchange for the rest, and waits until the device is done.

        Called from a background thread before ``order``. Arguments and TimeoutError as ``FlatVector.complete``.
        """
        stream = _exchange_stream(self._target.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._reusable)
            self._target[start_bytes:stop_bytes].copy_(self.staging[start_bytes:stop_bytes], non_blocking=True)
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
    """Starts to copy tensors to the host.

    Args:
        tensors: On any devices; must not change from now on.

    Returns:
        The copies, flat and contiguous, and a function that waits in any thread until they are complete. A tensor on
        the CPU is not copied.
    """
    events = []
    copies = []
    for tensor in tensors:
        if tensor.device.type != "cuda":
            copies.append(_flat_on_cpu(tensor))
            continue
        source, stream = tensor.detach().contiguous().view(-1), _copy_stream(tensor.device)
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        # Kernels that write the tensor may still be queued on the compute stream.
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            copy.copy_(source, non_blocking=True)
            # The allocator must not reuse the memory of the source before the copy has read it.
            source.record_stream(stream)
            events.append(stream.record_event())
        copies.append(copy)

    def wait() -> None:
        for event in events:
            event.synchronize()

    return copies, wait


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
        source: Host memory that only the copy stream has used.
        device: The device to copy to.
    """
    compute, stream = torch.cuda.current_stream(device), _copy_stream(device)
    target = torch.empty_like(source, device=device)
    stream.wait_stream(compute)  # kernels of the memory's previous owner may still be running
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    target.record_stream(stream)
    compute.wait_stream(stream)
    return target
