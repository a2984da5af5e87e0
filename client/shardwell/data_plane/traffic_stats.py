"""What a trainer has transferred, and how long its training thread has waited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields


@dataclass
class TrafficStats:
    """Counts, bytes, and seconds that the training thread waited."""

    gather_count: int = 0
    gathered_bytes: int = 0
    gather_wait_s: float = 0.0
    push_count: int = 0
    pushed_bytes: int = 0
    push_wait_s: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @contextmanager
    def waiting_for_gather(self) -> Iterator[None]:
        """Adds the time until the context ends to ``gather_wait_s``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.gather_wait_s += time.perf_counter() - started

    @contextmanager
    def waiting_for_push(self) -> Iterator[None]:
        """Adds the time until the context ends to ``push_wait_s``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.push_wait_s += time.perf_counter() - started
