"""A GPU that is not there: the SDK's code for GPUs runs, with values in host memory and copies that are done at once.

Streams and events record in which order work was given to them. Nothing here shows that a GPU keeps that order:
``make gpu-check`` does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from shardwell.memory import device_copies


class FakeEvent:
    """An event that has happened."""

    def __init__(self, blocking: bool = False) -> None:
        self.stream: FakeStream | None = None
        self.waited = 0

    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.waited += 1

    def query(self) -> bool:
        return True


class FakeStream:
    """A stream without work, which knows the events that it has waited for."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.waited_for: list[object] = []

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.waited_for.append(event)

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)


@dataclass
class FakeGpu:
    """What the SDK has asked of the GPU."""

    compute: FakeStream = field(default_factory=FakeStream)
    pinned_bytes: list[int] = field(default_factory=list)
    """Sizes of the pinned buffers, in the order of their allocation."""
    registered: dict[int, int] = field(default_factory=dict)
    """Sizes of the registered memory by address."""
    flags: set[int] = field(default_factory=set)
    error: int = 0
    """The error of ``cudaHostRegister``."""

    # ---- as torch.cuda.cudart() ----

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.flags.add(flags)
        if not self.error:
            self.registered[address] = size_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@contextmanager
def fake_gpu(error: int = 0) -> Iterator[FakeGpu]:
    """Makes the CPU a GPU for the SDK. The modules of the block stay on the CPU.

    Args:
        error: The error of registering memory. 0: none.
    """
    gpu = FakeGpu(error=error)

    @contextmanager
    def on_stream(stream: FakeStream) -> Iterator[None]:
        yield

    def pinned(size_bytes: int) -> torch.Tensor:
        gpu.pinned_bytes.append(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8)

    caches = (device_copies._gather_stream, device_copies._push_stream, device_copies._log_refused)
    for cache in caches:
        cache.cache_clear()
    replaced: dict[str, Any] = {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": on_stream,
        "current_stream": lambda device: gpu.compute,
        "current_device": lambda: 0,
        "cudart": lambda: gpu,
    }
    with pytest.MonkeyPatch.context() as patched:
        for name, value in replaced.items():
            patched.setattr(torch.cuda, name, value)
        patched.setattr(device_copies, "_pinned", pinned)
        patched.setattr(device_copies, "GPU_TYPES", {"cuda", "cpu"})
        patched.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
        patched.setattr(torch.Tensor, "is_cpu", property(lambda self: False))
        yield gpu
        gc.collect()  # memory that is still registered is unregistered here
    for cache in caches:
        cache.cache_clear()
