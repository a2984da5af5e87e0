"""Copies between the host and a GPU that the compute stream does not wait for.

Each device has one stream for them. Memory on the host is pinned; torch's allocator for it uses it again only when
the copies from it are done.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence

import torch

from shardwell.memory.completion import Exchange

_POLL_S = 0.0002


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache
def _exchange_stream(device: torch.device) -> torch.cuda.Stream:
    """Apart from the copies, which must go on if an exchange hangs because another process died."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Arrival:
    """One flat vector on its way to a GPU.

    Args:
        target: Its memory on the device, just allocated by the thread that computes. uint8. [size_bytes]
    """

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self.staging = torch.empty(target.numel(), dtype=torch.uint8, pin_memory=True)
        """Where the bytes are received. [size_bytes]"""
        # Who had the memory before may still be computing with it.
        self._free = torch.cuda.current_stream(target.device).record_event()
        self._copied: torch.cuda.Event | None = None
        self._exchanged: torch.cuda.Event | None = None
        self._abandoned = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """The bytes are there: starts to copy them. From any thread; once."""
        with self._lock:
            if self._copied is not None or self._abandoned:
                return
            stream = _copy_stream(self._target.device)
            with torch.cuda.stream(stream):
                stream.wait_event(self._free)
                if self._exchanged is not None:  # it failed, and was ended
                    stream.wait_event(self._exchanged)
                self._target.copy_(self.staging, non_blocking=True)
                self._copied = stream.record_event()

    def complete(self, start_bytes: int, stop_bytes: int, exchange: Exchange, limit_s: float) -> None:
        """Copies a part of the bytes and exchanges it for the others; waits until the device has done that.

        From a background thread, before anybody waits for the arrival. See ``Completable.complete``.
        """
        stream = _exchange_stream(self._target.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._free)
            self._target[start_bytes:stop_bytes].copy_(self.staging[start_bytes:stop_bytes], non_blocking=True)
            try:
                exchange(self._target)
            finally:
                self._exchanged = stream.record_event()
        # An exchange between GPUs whose other side died never ends by itself: nobody is told to wait for it before.
        give_up = time.monotonic() + limit_s
        while not self._exchanged.query():
            if time.monotonic() > give_up:
                raise TimeoutError(f"the exchange took more than {limit_s:.0f} s")
            time.sleep(_POLL_S)
        with self._lock:
            self._copied = self._exchanged

    def order(self) -> None:
        """Has the compute stream run what follows after the copy; the caller does not wait."""
        with self._lock:
            assert self._copied is not None
            torch.cuda.current_stream(self._target.device).wait_event(self._copied)

    def abandon(self) -> None:
        """The memory is given back: a copy that has begun ends before it is used again, none begins any more."""
        with self._lock:
            self._abandoned = True
            if (last := self._copied or self._exchanged) is not None:
                torch.cuda.current_stream(self._target.device).wait_event(last)


def to_host(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Starts to copy tensors to the host.

    Args:
        tensors: On any devices; changed by nobody from now on.

    Returns:
        The copies, flat and contiguous, those of tensors on the CPU being these themselves; and what waits, in
        any thread, until they are complete.
    """
    events = []
    copies = []
    for tensor in tensors:
        if tensor.device.type != "cuda":
            copies.append(_flat_on_cpu(tensor))
            continue
        source, stream = tensor.detach().contiguous().view(-1), _copy_stream(tensor.device)
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            copy.copy_(source, non_blocking=True)
            source.record_stream(stream)
            events.append(stream.record_event())
        copies.append(copy)

    def wait() -> None:
        for event in events:
            event.synchronize()

    return copies, wait


def _flat_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    # Operations that do nothing are not free: each gives up the interpreter lock.
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    return (tensor if tensor.is_contiguous() else tensor.contiguous()).view(-1)


def to_device(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies what ``to_host`` brought back to a GPU; the compute stream waits for it, not the caller.

    Args:
        source: In host memory, of which only the copy stream was told.
        device: Where to.
    """
    compute, stream = torch.cuda.current_stream(device), _copy_stream(device)
    target = torch.empty_like(source, device=device)
    stream.wait_stream(compute)  # who had the memory before may still be computing with it
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    target.record_stream(stream)
    compute.wait_stream(stream)
    return target
