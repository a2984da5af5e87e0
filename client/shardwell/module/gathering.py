"""When units are gathered: at their use, or ahead of it within limits."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

from shardwell.module.prefetch import Order, Phase
from shardwell.module.strategy import BackwardPrefetch
from shardwell.module.unit import UnitState

if TYPE_CHECKING:
    from shardwell.module.flat_vector import Memory
    from shardwell.module.unit import Unit


class Gathering:
    """Gathers units in the order in which they were used before, within limits.

    Args:
        memory: Of all units.
        prefetch_bytes: See the attribute.
        max_in_flight: How many gathers into this process's memory may be under way at once; 0: any number.
        backward_prefetch: When the next unit of a backward is gathered.
    """

    def __init__(
        self, memory: Memory, *, prefetch_bytes: int, max_in_flight: int, backward_prefetch: BackwardPrefetch
    ) -> None:
        self._memory, self._max_in_flight = memory, max_in_flight
        self.prefetch_bytes, self.backward_prefetch = prefetch_bytes, backward_prefetch
        self.order = Order()
        self._in_flight: set[Future[int]] = set()

    @property
    def prefetch_bytes(self) -> int:
        """How much may be gathered ahead of its use, beyond the units in use; so much memory is kept."""
        return self._prefetch_bytes

    @prefetch_bytes.setter
    def prefetch_bytes(self, prefetch_bytes: int) -> None:
        self._prefetch_bytes = prefetch_bytes
        self._memory.pool.set_limit(prefetch_bytes)

    def use(self, unit: Unit, phase: Phase) -> None:
        """Gathers a unit and starts to gather those that come next."""
        self.start(unit)
        self.order.observe(unit, phase)
        self._start_following(unit, phase)
        unit.unshard()
        if self._max_in_flight:  # the unit's own gather was one of them
            self._start_following(unit, phase)

    def start(self, unit: Unit) -> None:
        """Starts to gather a unit, unless that has been done; waits while too many gathers are under way."""
        if not unit.needs_gather:
            return
        while not self._has_room():
            wait(self._in_flight, return_when=FIRST_COMPLETED)
        unit.start_fetch()
        if self._max_in_flight and unit.in_flight is not None:
            self._in_flight.add(unit.in_flight)

    def start_ahead(self, unit: Unit) -> bool:
        """Starts to gather a unit that is not needed yet; returns False if too many gathers are under way."""
        if unit.needs_gather and not self._has_room():
            return False
        self.start(unit)
        return True

    def _has_room(self) -> bool:
        self._in_flight = {gather for gather in self._in_flight if not gather.done()}
        return not self._max_in_flight or len(self._in_flight) < self._max_in_flight

    def _start_following(self, unit: Unit, phase: Phase) -> None:
        is_forward = phase is Phase.FORWARD
        chosen = unit.settings.forward_prefetch if is_forward else unit.settings.backward_prefetch
        if chosen is not None:
            for following in chosen:
                self.start_ahead(following)
            return
        if not is_forward and self.backward_prefetch is not BackwardPrefetch.PRE:
            return
        # The memory of replicas is theirs for good: none of it is taken ahead.
        is_ahead = unit.state is UnitState.FETCHING and not unit.is_replica
        ahead_bytes = self._memory.fetching_bytes - (unit.own_bytes if is_ahead else 0)
        for following in self.order.upcoming():
            if not following.needs_gather:
                continue
            ahead_bytes += 0 if following.is_replica else following.precision.layout.size_bytes
            if ahead_bytes > self.prefetch_bytes or not self.start_ahead(following):
                return
