"""Counts the gradients that this trainer has sent over each route, see ``TransferOptions.gradient_reduction``."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

DIRECT, HIERARCHICAL, ALLREDUCE = "direct", "hierarchical", "allreduce"
ROUTES = (DIRECT, HIERARCHICAL, ALLREDUCE)
"""Where the gradients of a unit are added first: on the servers, among the trainers of a node, or of several nodes."""


@dataclass(slots=True)
class RouteTotals:
    """What one route has carried. The names are those of ``Session.stats``, after the name of the route."""

    count: int = 0
    """Pushed gradients, or pushed shares of sums."""
    pushed_bytes: int = 0
    """Bytes pushed to the servers."""
    peer_bytes: int = 0
    """Bytes of this trainer's gradients that went to other trainers, in shared memory or over the network."""
    seconds: float = 0.0
    """Seconds from the start of each push until the servers had acknowledged it, added up. Pushes overlap. Includes the
    time for which a small push waits for others, to share a message with them."""


@dataclass(slots=True)
class RouteStats:
    """The totals of all routes. Thread-safe."""

    _totals: dict[str, RouteTotals] = field(default_factory=lambda: {route: RouteTotals() for route in ROUTES})
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, route: str, *, pushed_bytes: int, seconds: float, peer_bytes: int = 0, count: int = 1) -> None:
        """Adds gradients of units, or this trainer's shares of sums."""
        with self._lock:
            totals = self._totals[route]
            totals.count += count
            totals.pushed_bytes += pushed_bytes
            totals.peer_bytes += peer_bytes
            totals.seconds += seconds

    def as_dict(self) -> dict[str, float]:
        """Returns the totals as numbers, such as ``direct_count`` and ``allreduce_peer_bytes``."""
        with self._lock:
            return {
                f"{route}_{name}": getattr(totals, name)
                for route, totals in self._totals.items()
                for name in RouteTotals.__slots__
            }
