"""What a trainer has transferred, and how long its training thread has waited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from shardwell.transport.route_stats import RouteStats

_MAX_WAITS = 4096
_SHORTEST_WAIT_S = 1e-5


@dataclass
class TrafficStats:
    """Counts, bytes, and seconds that the training thread waited."""

    gather_count: int = 0
    gathered_bytes: int = 0
    in_place_bytes: int = 0
    """Bytes of weights that were read in the servers' memory, and not copied."""
    gather_wait_s: float = 0.0
    push_count: int = 0
    pushed_bytes: int = 0
    push_wait_s: float = 0.0
    push_copy_s: float = 0.0
    """Seconds that the training thread started pushes, without ``push_wait_s``. Gradients that go through shared memory
    are copied meanwhile."""

    def __post_init__(self) -> None:
        self.pushing = _Pushing(self)
        """Context whose duration, without waits for other pushes, is added to ``push_copy_s``. May not be nested."""
        self._waits: list[tuple[float, float]] = []
        self.routes = RouteStats()
        """What the routes of gradients have carried."""

    def as_dict(self) -> dict[str, float]:
        return {item.name: getattr(self, item.name) for item in fields(self)} | self.routes.as_dict()

    def take_gather_waits(self) -> list[tuple[float, float]]:
        """Returns start and end of each gather wait since the last call, by ``time.perf_counter``.

        Waits of less than 10 us are left out, and so are those after the first 4096.
        """
        waits, self._waits = self._waits, []
        return waits

    @contextmanager
    def waiting_for_gather(self) -> Iterator[None]:
        """Adds the time until the context ends to ``gather_wait_s``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.gather_wait_s += ended - started
            if ended - started >= _SHORTEST_WAIT_S and len(self._waits) < _MAX_WAITS:
                self._waits.append((started, ended))

    @contextmanager
    def waiting_for_push(self) -> Iterator[None]:
        """Adds the time until the context ends to ``push_wait_s``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.push_wait_s += time.perf_counter() - started


class _Pushing:
    """See ``TrafficStats.pushing``."""

    __slots__ = ("_started_s", "_stats")

    def __init__(self, stats: TrafficStats) -> None:
        self._stats, self._started_s = stats, 0.0

    def __enter__(self) -> None:
        self._started_s = time.perf_counter() - self._stats.push_wait_s

    def __exit__(self, *_: object) -> None:
        self._stats.push_copy_s += time.perf_counter() - self._stats.push_wait_s - self._started_s
