"""What a check gets: its device, its time, and rows to fill. Imports nothing that a machine may lack."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

ROW = "ROW "
"""Begins the lines of a check's output that are rows."""


@dataclass(frozen=True)
class Check:
    """One check of the table."""

    name: str
    limit_s: float
    function: str
    """``module.function`` of this package, which gets a ``Task``."""
    needs: tuple[str, ...] = ()
    """Packages that the check imports, in addition to those of the SDK and its servers."""
    num_gpus: int = 1


@dataclass
class Task:
    """A check that is running."""

    device: torch.device
    deadline_s: float
    """When the check is stopped, on the clock of ``time.monotonic``."""
    num_failed: int = field(default=0, init=False)

    @property
    def on_gpu(self) -> bool:
        """False for the same code with tiny sizes on a CPU."""
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        """Seconds until the check is stopped."""
        return self.deadline_s - time.monotonic()

    def row(self, what: str, value: object = "", ok: bool | None = None) -> None:
        """Reports one row.

        Args:
            what: What was tried or measured.
            value: The result, with its unit.
            ok: Whether the goal is reached. None: the row has no goal.
        """
        self.num_failed += ok is False
        print(ROW + json.dumps({"what": what, "value": str(value), "ok": ok}), flush=True)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Reports an exception of the block as a row that failed, and goes on after the block."""
        try:
            yield
        except Exception as error:
            self.row(what, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300], False)

    def sync(self) -> None:
        """Waits until the device has done all its work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, function: Callable[[], object], *, repeats: int = 3) -> float:
        """Returns the shortest duration of a call, its work on the device included. The first call is not counted."""
        found = []
        for _ in range(repeats + 1):
            self.sync()
            started = time.perf_counter()
            function()
            self.sync()
            found.append(time.perf_counter() - started)
        return min(found[1:])

    def peak_bytes(self) -> int:
        """Returns the peak of this process's memory on the GPU since ``reset_peak``. 0 on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.on_gpu else 0

    def reset_peak(self) -> None:
        """Begins a new peak, after cached memory was released."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
