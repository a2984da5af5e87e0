"""Gathers units before their forwards and backwards, and frees them and pushes their gradients afterwards.

``residency.py`` decides; this module carries out the decisions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from typing import Any

import torch

from shardwell.module.gradients import GradientPushes, with_gradients
from shardwell.module.graph_tracking import NO_TASK, RunningBackwards, WatchedGraphs, backward_task
from shardwell.module.residency import Phase, ResidencyPolicy, UnitState
from shardwell.module.thread_guard import ThreadGuard
from shardwell.module.unit import ForwardCall, Unit, check_versions, fetch_ahead
from shardwell_wire.errors import UsageError


class ForwardBackward:
    """The forwards and backwards of one session's units.

    Not thread-safe. The thread that has entered ``guard`` calls it, and for nodes on a GPU autograd's device thread,
    while the other thread waits in the backward.

    Attributes:
        guard: Admits one thread at a time.
        graphs: The graphs that can still be used.
        entered: True if a forward has begun since the last commit.
        before_use: Called before a forward; may commit a step.
        is_last_backward: True if the end of a backward frees prefetched units that the backward did not use.
        roots: The units of the modules that contain all other units; empty if there are no such modules.

    Args:
        units: All units of the session, including units that are added later.
        policy: Decides what to gather, keep and free.
        pushes: Pushes gradients.
        together: Collects the gathers that start while its context is open, and sends them at its end.
        max_gathers_in_flight: Limit of gathers into this process that run at once; 0: no limit.
    """

    def __init__(
        self,
        units: Collection[Unit],
        policy: ResidencyPolicy[Unit],
        pushes: GradientPushes,
        together: Callable[[], AbstractContextManager[None]],
        *,
        max_gathers_in_flight: int,
    ) -> None:
        self.guard = ThreadGuard(self._thread_in_step)
        self.graphs = WatchedGraphs(self._before_node)
        self.entered = False
        self.before_use: Callable[[], None] = _nothing
        self.is_last_backward = True
        self.roots: tuple[Unit, ...] = ()
        self._units, self._policy, self._pushes, self._together = units, policy, pushes, together
        self._running: list[ForwardCall] = []
        """Forwards that are running, innermost last."""
        self._unsharded_by_hand: set[Unit] = set()
        self._backward_failed = False
        """True if an exception has left a backward since the last forward."""
        self._backwards = RunningBackwards(self.guard.enter_at_node, self._end_backward)
        self._max_in_flight = max_gathers_in_flight
        self._prefetches = True
        """False if no gather moves bytes, because all units are read in place."""
        self._in_flight: set[Future[int]] = set()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the forward of a sharded module with its hooks. No forward stays open, however the call ends."""
        entered = self.guard.enter()
        num_running = len(self._running)
        try:
            return function(*args, **kwargs)
        except BaseException:
            self._abandon(num_running)
            raise
        finally:
            if entered:
                self.guard.leave()

    def _abandon(self, num_running: int) -> None:
        """Ends the forwards that an exception left open, except the first ones. Keeps or frees their units."""
        left = self._running[num_running:]
        del self._running[num_running:]
        for call in reversed(left):
            self.graphs.calls.end(call)
            calls = call.unit.usage.forward_calls
            if call in calls:
                calls.remove(call)
        if backward_task() == NO_TASK:
            for unit in dict.fromkeys(call.unit for call in reversed(left)):
                if not unit.usage and unit.state is UnitState.UNSHARDED:  # a gather that was interrupted continues
                    if unit.written_parameter():
                        unit.free()
                    self.release(unit)

    def _thread_in_step(self) -> threading.Thread | None:
        """Returns the thread that may be reading weights or have a graph of the step, outside of every use."""
        by_hand = any(unit.state is UnitState.UNSHARDED for unit in self._unsharded_by_hand)
        return self.graphs.thread if by_hand or any(call.has_backward for call in self.graphs.calls) else None

    def unshard_by_hand(self, units: Iterable[Unit]) -> None:
        """Starts to gather units for reads outside of their forwards."""
        with self.guard:
            self.before_use()
            self.graphs.begin(later=True)
            for unit in units:
                self._unsharded_by_hand.add(unit)
                self.start_gather(unit)

    # Called by hooks.

    def pre_forward(self, unit: Unit) -> None:
        """Begins a forward of a unit: gathers the unit."""
        in_backward = backward_task() != NO_TASK
        if not in_backward:
            self.before_use()
            if not self.entered:
                self.entered, self._prefetches = True, fetch_ahead(self._units)
            self.graphs.begin()
        call = ForwardCall(unit, unit.generation)
        self._running.append(call)
        unit.usage.forward_calls.append(call)
        if not in_backward:
            if torch.is_grad_enabled():
                self.graphs.calls.begin(call)
            if self._backwards:
                self.end_failed_backward()
            self._backward_failed = False
            self._use(unit, Phase.FORWARD)
        else:  # activation checkpointing recomputes the forward, and its backward comes next
            self._backwards.current().units[unit] = None
            self._use(unit, Phase.BACKWARD)

    def post_forward(self, call: ForwardCall) -> None:
        """Ends a forward of a unit, which returned: may free the unit."""
        unit = call.unit
        if self._running and self._running[-1] is call:
            self._running.pop()
        self.graphs.calls.end(call)
        if backward_task() != NO_TASK:
            # `_end_backward` checks the version. Torch ignores an error raised here if checkpointing stops a recomputed
            # forward early, which it does by an exception.
            return
        if not self._frees_after_forward(call) or not self.free_unused(unit):
            unit.check_version()

    def _frees_after_forward(self, call: ForwardCall) -> bool:
        unit = call.unit
        expects_backward = call.has_backward and True in [module.training for module in unit.modules]
        return self._policy.frees_after_forward(unit, is_root=unit in self.roots, expects_backward=expects_backward)

    def _before_node(self, call: ForwardCall, node_number: int, gradients: object) -> None:
        """Runs before a node that was made in a forward call or reads the unit's weights: gathers the unit."""
        unit = call.unit
        if call.generation != unit.generation:
            raise UsageError(
                f"backward through unit {unit.name!r} with a graph that was made before the last optimizer.step() or "
                "in another work item: the weights of the graph are gone; run the forward again",
                unit=unit.name,
            )
        backward = self._backwards.current()
        ended = backward.end_calls_after(node_number)
        if self._policy.gathers_before_push(unit):
            # Free first, so that one unit is held at a time; gather next, so that the pushes below hide the gather.
            for other in ended:
                self._free_after_backward(other.unit)
            self.start_gather(unit)
        for other in ended:
            self._post_backward(other.unit)
        backward.begin(call)
        self._use(unit, Phase.BACKWARD)

    def _post_backward(self, unit: Unit) -> None:
        self._pushes.after_backward(unit, whole=False)
        self._free_after_backward(unit)

    def _free_after_backward(self, unit: Unit) -> None:
        if self._policy.frees_after_backward(unit):
            # Units that are read in place become KEPT, and `_end_backward` checks the versions of all kept units.
            self.free_unused(unit, checks_version=False)

    def _end_backward(self, units: Iterable[Unit]) -> None:
        """Ends a whole backward: pushes the remaining gradients of its units, and frees the units.

        In the backward of a reentrant checkpoint, units that the outer backward uses stay: their gradients are not
        complete.

        Checks all units that are read in place: the backward may have read units whose nodes have no hook.
        """
        used = list(units)
        check_versions(self._units)
        to_push = set(with_gradients(used))
        for unit in used:
            # Its backward may have ended before: a tied parameter's gradient may have come later.
            if unit in to_push and not unit.usage.backward_calls:
                self._pushes.after_backward(unit, whole=not self._backwards)
            if unit.state not in (UnitState.KEPT, UnitState.FREED):
                self._free_after_backward(unit)
            unit.watch_gradients()
        if not self._backwards and self.is_last_backward:
            for unit in self._policy.unused_prefetches(self._units):
                unit.free()

    # Gathering.

    def _use(self, unit: Unit, phase: Phase) -> None:
        if not self._prefetches and (not unit.needs_gather or unit.gather_at_once()):
            self._policy.order.observe(unit, phase)
            unit.unshard()
            return
        gathers = self._policy.begin_use(unit, phase)
        if gathers:
            self._await_room(unit)
            with self._together():
                self.start_gather(unit)
                self._prefetch(unit, phase)  # before the wait for this unit, so that the gathers overlap
        unit.unshard()
        if gathers and self._max_in_flight:  # the unit's own gather has ended, so another one may start
            self._prefetch(unit, phase)

    def _prefetch(self, unit: Unit, phase: Phase) -> None:
        for following, displaced in self._policy.prefetches(unit, phase):
            if not self._has_room():
                return
            for kept in displaced:
                kept.free()
            self.start_gather(following)

    def start_gather(self, unit: Unit) -> None:
        """Starts to gather a unit, unless a gather is running or done; waits while too many gathers are running."""
        if not unit.needs_gather:
            return
        self._await_room(unit)
        unit.start_gather()
        if self._max_in_flight and unit.in_flight is not None:
            self._in_flight.add(unit.in_flight)

    def _await_room(self, unit: Unit) -> None:
        while unit.needs_gather and not self._has_room():  # a gather that is needed now waits; prefetches are skipped
            wait(self._in_flight, return_when=FIRST_COMPLETED)

    def _has_room(self) -> bool:
        self._in_flight = {gather for gather in self._in_flight if not gather.done()}
        return not self._max_in_flight or len(self._in_flight) < self._max_in_flight

    def begin_step(self) -> None:
        """Starts to fetch the new version of replicas, in the order of the last forward."""
        with self._together():
            for unit in self._policy.gathers_at_step_start(self._units):
                if self._has_room():
                    self.start_gather(unit)

    # Freeing.

    def free_unused(self, unit: Unit, *, thorough: bool = False, checks_version: bool = True) -> bool:
        """Frees or keeps a unit, unless a forward or backward uses it.

        Args:
            unit: The unit.
            thorough: Also look for writes that torch does not count, which takes longer. ``Units.finish_item`` finds
                these writes otherwise.
            checks_version: Also check that the bytes did not change while in use, if they are read in place.

        Returns:
            Whether the unit was freed or kept.

        Raises:
            UsageError: A parameter was written in place; the write would be lost.
            VersionGoneError: Bytes that are read in place changed while in use.
        """
        usage = unit.usage
        if usage.forward_calls or usage.backward_calls or usage.in_backward_graph:
            return False
        written = unit.written_parameter() or (unit.written_page() if thorough else None)
        if written:
            unit.free()
            raise_written(unit, written)
        if checks_version:
            unit.check_version()
        self.release(unit)
        return True

    def release(self, unit: Unit) -> None:
        """Keeps a unit if the policy has room for it, otherwise frees it."""
        if unit.state is UnitState.KEPT:
            return
        for kept in self._policy.displaced_by_release(unit):
            kept.free()
        state = self._policy.state_after_release(unit)
        if state is UnitState.FREED:
            unit.free()
        elif state is not unit.state:
            unit.keep()

    def abort(self, leave: Callable[[Unit], None]) -> None:
        """Ends all forwards and backwards, and calls ``leave`` on every unit to keep or free it."""
        self._backwards.clear()
        self._backward_failed = False
        self._running.clear()
        self._unsharded_by_hand.clear()
        for unit in self._units:
            unit.usage.clear()
            leave(unit)

    def clean_up(self) -> None:
        """Frees all units if an exception stopped a forward or backward."""
        failed = self._backward_failed or self._backwards or self._running
        if failed and backward_task() == NO_TASK:
            self.abort(Unit.free)

    def end_failed_backward(self) -> None:
        """Ends the backwards that an exception has left. Their units stay until the next use, or ``clean_up``."""
        if self._backwards:
            self._backward_failed = True
            self._backwards.clear()
            for unit in self._units:
                unit.usage.backward_calls.clear()


def raise_written(unit: Unit, name: str) -> None:
    """Raises UsageError because a parameter was written in place."""
    raise UsageError(
        f"parameter {name!r} of unit {unit.name!r} was written in place. The values are stored on the shard servers, "
        "so the write is lost: change parameters before fully_shard",
        unit=unit.name,
        parameter=name,
    )


def _nothing() -> None:
    pass
