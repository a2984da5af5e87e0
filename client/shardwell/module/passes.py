"""Forwards and backwards: gathers units before them, and frees the units and pushes their gradients afterwards.

``residency.py`` decides; this module carries out the decisions. ``Graphs`` knows which autograd nodes belong to which
forward call. ``ThreadGuard`` admits one thread at a time.

Note: [Node numbers]
    Autograd numbers nodes in the order in which a thread makes them, and a backward always runs the ready node with
    the highest number. The backward of a forward call therefore begins at a node that made one of the call's results.
    It has ended when a node runs whose number is lower than the call's first one. Hooks on the nodes of results are
    enough. Unlike hooks on tensors, they survive in-place operations. Inputs stay untouched: an alias of an input
    would change what ``is`` returns, and the order in which gradients are summed.

    Each thread numbers its nodes from 0. A number says nothing about a graph that another thread made.

Note: [One thread]
    The parameters of a module are objects that all threads share, and their memory is released when a use ends. A
    second thread therefore cannot use the same modules at the same time: it gets an error before any memory is touched.
    It may use them while no other thread does: between two steps, or where both threads hold a lock of the user.
    Autograd runs the nodes of a GPU in threads of its own, while the thread that called the backward waits for them.
"""

from __future__ import annotations

import functools
import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable

from shardwell.memory.buffers import keep_freed_memory
from shardwell.module.gradients import GradientPushes, with_gradients
from shardwell.module.parameter_store import ParameterStore
from shardwell.module.residency import Phase, ResidencyPolicy, UnitState
from shardwell.module.unit import ForwardCall, Unit, check_versions
from shardwell_wire.errors import UsageError

NO_TASK = -1
"""Value of ``backward_task`` outside of a backward."""

_MAX_CALLS = 1 << 15
_MAX_NUMBERS = 1 << 16

backward_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the backward that runs in this thread, or ``NO_TASK``. A nested backward has its own id."""

_active_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack

_next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class ForwardBackward:
    """The forwards and backwards of one session's units.

    Not thread-safe. The thread that has entered ``guard`` calls it, and for nodes on a GPU autograd's device thread,
    while the other thread waits in the backward.

    Attributes:
        guard: Admits one thread at a time.
        graphs: The graphs that can still be used.
        units: All units of the session by name, including units that are added later.
        entered: True if a forward has begun since the last commit.
        before_use: Called before the units are used, if it is not None; may commit a step.
        is_last_backward: True if the end of a backward frees prefetched units that the backward did not use.
        roots: The units of the modules that contain all other units; empty if there are no such modules.
        running: Forwards that are running, innermost last.

    Args:
        units: See ``units``.
        policy: Decides what to gather, keep and free.
        pushes: Pushes gradients.
        store: The store of all units.
        max_gathers_in_flight: Limit of gathers into this process that run at once; 0: no limit.
    """

    def __init__(
        self,
        units: Mapping[str, Unit],
        policy: ResidencyPolicy[Unit],
        pushes: GradientPushes,
        store: ParameterStore,
        *,
        max_gathers_in_flight: int,
    ) -> None:
        self.units = units
        self.guard = ThreadGuard(self._thread_in_step)
        self.graphs = Graphs(self._before_node)
        self.entered = False
        self.before_use: Callable[[], None] | None = None
        self.is_last_backward = True
        self.roots: tuple[Unit, ...] = ()
        self.running: list[ForwardCall] = []
        self._policy, self._pushes, self._store = policy, pushes, store
        self._unsharded_by_hand: set[Unit] = set()
        self._backwards: dict[int, RunningBackward] = {}
        """The backwards that use the units now, by ``backward_task``, innermost last. A reentrant checkpoint runs a
        backward inside another one."""
        self._backward_failed = False
        """True if an exception has left a backward since the last forward."""
        self._max_in_flight = max_gathers_in_flight
        self._prefetches = True
        """False if no gather moves bytes, because all units are read in place."""
        self._keeps_memory = False
        """True after the first backward has called ``keep_freed_memory``."""
        self._in_flight: set[Future[int]] = set()
        """The gathers that count for the limit."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of a sharded module that has hooks, as ``ShardedModule._call_impl`` calls the forward."""
        guard = self.guard
        entered = not guard.lock._is_owned() and guard.enter()  # type: ignore[attr-defined]
        num_running = len(self.running)
        try:
            if entered and self.before_use is not None:
                self.before_use()
            return function(*args, **kwargs)
        except BaseException:
            self.abandon(num_running)
            raise
        finally:
            if entered:
                guard.lock.release()

    def abandon(self, num_running: int) -> None:
        """Ends the forwards that an exception left open, except the first ones. Keeps or frees their units."""
        left = self.running[num_running:]
        del self.running[num_running:]
        for call in reversed(left):
            self.graphs.end(call)
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
            if self.before_use is not None:
                self.before_use()
            self.graphs.begin_later()
            for unit in units:
                self._unsharded_by_hand.add(unit)
                self.start_gather(unit)

    def join_forward(self, unit: Unit, reader: ForwardCall | None) -> None:
        """Gathers a freed unit whose weights the running forward of another unit reads, until that forward ends.

        Args:
            unit: The unit.
            reader: The forward. Ignored in a backward, whose end ends the use.
        """
        if backward_task() != NO_TASK:
            self._current_backward().units[unit] = None
            self._use(unit, Phase.BACKWARD)
            return
        assert reader is not None
        # Nodes are assigned as if the unit had been in use from the start, as it is in all later forwards.
        call = ForwardCall(unit, unit.generation, reader.first_node_number)
        self.running.insert(self.running.index(reader) + 1, call)
        unit.usage.forward_calls.append(call)
        self.graphs.begin_within(call, reader)
        self._use(unit, Phase.FORWARD)

    # Called by hooks.

    def pre_forward(self, unit: Unit) -> None:
        """Begins a forward of a unit: gathers the unit."""
        call = ForwardCall(unit, unit.generation)
        self.running.append(call)
        unit.usage.forward_calls.append(call)
        if backward_task() != NO_TASK:  # activation checkpointing recomputes the forward, and its backward comes next
            self._current_backward().units[unit] = None
            self._use(unit, Phase.BACKWARD)
            return
        if self.before_use is not None and not self.guard.lock._is_owned():  # type: ignore[attr-defined]
            self.before_use()  # a module that was compiled before it was sharded bypasses `ShardedModule._call_impl`
        if not self.entered:
            self.entered, self._prefetches = True, self._moves_bytes()
        self.graphs.begin(call)
        if self._backwards:
            self.end_failed_backward()
        self._backward_failed = False
        if not self._prefetches and unit.unshard_at_once():
            self._policy.order.observe(unit, Phase.FORWARD)
        else:
            self._use(unit, Phase.FORWARD)

    def post_forward(self, call: ForwardCall) -> None:
        """Ends a forward of a unit, which returned: may free the unit."""
        unit, running = call.unit, self.running
        if running and running[-1] is call:
            running.pop()
        call.stop_node_number = _next_node_number()
        opened = self.graphs.open
        if opened and opened[-1] is call:
            opened.pop()
        elif opened:
            self.graphs.end(call)
        if backward_task() != NO_TASK:
            # `_end_backward` checks the version. Torch ignores an error raised here if checkpointing stops a recomputed
            # forward early, which it does by an exception.
            return
        expects_backward = False
        if call.has_backward:
            for module in unit.modules:
                if module.training:
                    expects_backward = True
        frees = self._policy.frees_after_forward(unit, is_root=unit in self.roots, expects_backward=expects_backward)
        if (not frees or not self.free_unused(unit)) and unit.shared is not None:
            unit.check_version()

    def _before_node(self, call: ForwardCall, node_number: int, gradients: object) -> None:
        """Runs before a node that was made in a forward call or reads the unit's weights: gathers the unit."""
        unit = call.unit
        if call.generation != unit.generation:
            raise UsageError(
                f"backward through unit {unit.name!r} with a graph that was made before the last optimizer.step() or "
                "in another work item: the weights of the graph are gone; run the forward again",
                unit=unit.name,
            )
        backward = self._backwards.get(backward_task()) or self._current_backward()
        # The calls whose first node is above this one have no node left to run. See Note: [Node numbers].
        ended: list[ForwardCall] = []
        for other in backward.calls:
            if other.first_node_number > node_number:
                ended.append(other)
        for other in ended:
            del backward.calls[other]
            other.unit.usage.backward_calls.discard(other)
        if self._policy.gathers_before_push(unit):
            # Free first, so that one unit is held at a time; gather next, so that the pushes below hide the gather.
            for other in ended:
                self._free_after_backward(other.unit)
            self.start_gather(unit)
        for other in ended:
            self._pushes.after_backward(other.unit, whole=False)
            self._free_after_backward(other.unit)
        if call not in backward.calls:
            backward.calls[call] = backward.units[unit] = None
            unit.usage.backward_calls.add(call)
            # With create_graph=True, the graph of the backward itself reads the weights later, and has no hooks.
            unit.usage.in_backward_graph |= torch.is_grad_enabled()
        if not self._prefetches and unit.unshard_at_once():
            self._policy.order.observe(unit, Phase.BACKWARD)
        else:
            self._use(unit, Phase.BACKWARD)

    def _current_backward(self) -> RunningBackward:
        """Returns the backward of the calling thread, which must be in a hook of autograd."""
        task = backward_task()
        backward = self._backwards.get(task)
        if backward is None:
            if not self.guard.lock._is_owned():  # type: ignore[attr-defined]
                self.guard.enter_at_node()
            if not self._keeps_memory:
                self._keeps_memory = True
                keep_freed_memory()
            backward = self._backwards[task] = RunningBackward()
            # Autograd calls this after the last node of the backward, and never if the backward raises: see
            # `end_failed_backward`.
            Variable._execution_engine.queue_callback(functools.partial(self._end_backward, task))
        return backward

    def _free_after_backward(self, unit: Unit) -> None:
        if self._policy.frees_after_backward(unit):
            # Units that are read in place become KEPT, and `_end_backward` checks the versions of all kept units.
            self.free_unused(unit, checks_version=False)

    def _end_backward(self, task: int) -> None:
        """Ends a whole backward: pushes the remaining gradients of its units, and frees the units, last used first.

        In the backward of a reentrant checkpoint, units that the outer backward uses stay: their gradients are not
        complete.

        Checks all units that are read in place: the backward may have read units whose nodes have no hook.
        """
        backward = self._backwards.pop(task, None) or RunningBackward()
        for call in backward.calls:  # no node is left to run
            call.unit.usage.backward_calls.discard(call)
        whole = not self._backwards
        if not whole:  # the backward of a reentrant checkpoint: what it leaves to push ends with the outer one
            next(reversed(self._backwards.values())).units.update(backward.units)
        used = list(reversed(backward.units))
        check_versions(self.units.values())
        to_push = set(with_gradients(used))
        for unit in used:
            # Its backward may have ended before: a tied parameter's gradient may have come later.
            if unit in to_push and not unit.usage.backward_calls:
                self._pushes.after_backward(unit, whole=whole)
            if unit.state is not UnitState.KEPT and unit.state is not UnitState.FREED:
                self._free_after_backward(unit)
                if unit.state is UnitState.UNSHARDED:
                    unit.watch_gradients()
        if whole and self.is_last_backward:
            for unit in self._policy.unused_prefetches(self.units.values()):
                unit.free()

    # Gathering.

    def _use(self, unit: Unit, phase: Phase) -> None:
        """Makes a unit usable, and gathers the units that come next."""
        if _active_transform() is not None:  # of torch.func, which would wrap the memory of the flat vector
            with temporarily_clear_interpreter_stack():
                self._use(unit, phase)
            return
        gathers = self._policy.begin_use(unit, phase)
        if gathers:
            if self._max_in_flight:
                self._await_room(unit)
            with self._store.gathering_together():
                self.start_gather(unit)
                self._prefetch(unit, phase)  # before the wait for this unit, so that the gathers overlap
        unit.unshard()
        if gathers and self._max_in_flight:  # the unit's own gather has ended, so another one may start
            self._prefetch(unit, phase)

    def _moves_bytes(self) -> bool:
        """True if a gather of any unit moves bytes to this process: then it pays to start it before it is needed."""
        for unit in self.units.values():
            if unit.shared is None:
                return True
        return self._store.fetches_in_place()

    def _prefetch(self, unit: Unit, phase: Phase) -> None:
        for following, displaced in self._policy.prefetches(unit, phase):
            if self._max_in_flight and not self._has_room():
                return
            for kept in displaced:
                kept.free()
            self.start_gather(following)

    def gather_ahead(self, units: Sequence[Unit]) -> int:
        """Starts to gather units that run next, as far as the limits of prefetches allow.

        Args:
            units: Units in the order of their use.

        Returns:
            The number of units, from the first, whose gather is running or done.
        """
        if not self._prefetches:
            return len(units)
        with self._store.gathering_together():
            for number, unit in enumerate(units):
                if unit.needs_gather:
                    if not self._policy.has_room_ahead(unit) or not self._has_room():
                        return number
                    self.start_gather(unit)
        return len(units)

    def start_gather(self, unit: Unit) -> None:
        """Starts to gather a unit, unless a gather is running or done; waits while too many gathers are running."""
        if not self._max_in_flight:
            unit.start_gather()
        elif unit.needs_gather:
            self._await_room(unit)
            unit.start_gather()
            if unit.in_flight is not None:
                self._in_flight.add(unit.in_flight)

    def _await_room(self, unit: Unit) -> None:
        while unit.needs_gather and not self._has_room():  # a gather that is needed now waits; prefetches are skipped
            wait(self._in_flight, return_when=FIRST_COMPLETED)

    def _has_room(self) -> bool:
        self._in_flight = {gather for gather in self._in_flight if not gather.done()}
        return not self._max_in_flight or len(self._in_flight) < self._max_in_flight

    def begin_step(self) -> None:
        """Starts to fetch the new version of replicas, in the order of the last forward."""
        for unit in self.units.values():
            if unit.state is UnitState.STALE:
                break
        else:  # no unit is a replica
            return
        with self._store.gathering_together():
            for unit in self._policy.gathers_at_step_start(self.units.values()):
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
        written = None
        if unit.state is UnitState.UNSHARDED and unit.held.written():
            written = unit.written_parameter()
        if written or (thorough and (written := unit.written_page())):
            unit.free()
            raise_written(unit, written)
        if checks_version and unit.shared is not None:
            unit.check_version()
        self.release(unit)
        return True

    def release(self, unit: Unit) -> None:
        """Keeps a unit if the policy has room for it, otherwise frees it."""
        if unit.state is UnitState.KEPT:
            return
        if not unit.own_bytes and unit.state is UnitState.UNSHARDED:  # a unit that is read in place takes no memory
            unit.keep()
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
        self.running.clear()
        self._unsharded_by_hand.clear()
        for unit in self.units.values():
            usage = unit.usage
            if usage.forward_calls or usage.backward_calls or usage.in_backward_graph:
                usage.clear()
            leave(unit)

    def clean_up(self) -> None:
        """Frees all units if an exception stopped a forward or backward."""
        failed = self._backward_failed or self._backwards or self.running
        if failed and backward_task() == NO_TASK:
            self.abort(Unit.free)

    def end_failed_backward(self) -> None:
        """Ends the backwards that an exception has left. Their units stay until the next use, or ``clean_up``."""
        if self._backwards:
            self._backward_failed = True
            self._backwards.clear()
            for unit in self.units.values():
                unit.usage.backward_calls.clear()


def raise_written(unit: Unit, name: str) -> None:
    """Raises UsageError because a parameter was written in place."""
    written = unit.layout.parameters[unit.layout.index_by_name[name]]
    ignored = ", or pass this one as ignored_params, which keeps it in this trainer" if written.frozen else ""
    raise UsageError(
        f"parameter {written.shown_name!r} of unit {unit.name!r} was written in place. The values are stored on the "
        f"shard servers, so the write is lost: change parameters before fully_shard{ignored}",
        unit=unit.name,
        parameter=written.shown_name,
    )


@dataclass(slots=True, eq=False)
class RunningBackward:
    """One backward that is running."""

    calls: dict[ForwardCall, None] = field(default_factory=dict)
    """Forward calls whose backward has begun and not ended."""
    units: dict[Unit, None] = field(default_factory=dict)
    """All units that the backward has used, in the order of first use."""


class Graphs:
    """The graphs of one session that can still be used: their forward calls, and the hooks on their nodes.

    Attributes:
        calls: The forward calls whose graphs can still be used, in the order of their first node.
        open: The calls that have not ended, innermost last.
        watched: Numbers of the nodes that have a hook.
        exist: True if a graph with a unit's weights may have been made since ``clear``.
        thread: The thread that may have made a graph since ``clear``.
        first_number: The thread's nodes with a lower number do not read weights.

    Args:
        before_node: Called with a forward call and the number of one of its nodes, before that node runs.
    """

    def __init__(self, before_node: Callable[[ForwardCall, int, object], None]) -> None:
        self._before_node = before_node
        self.calls: list[ForwardCall] = []
        self._numbers: list[int] = []
        """Number of the first node of each call."""
        self.open: list[ForwardCall] = []
        self.watched: set[int] = set()
        self.exist = False
        self.thread: threading.Thread | None = None
        self.first_number = 0

    def begin(self, call: ForwardCall) -> None:
        """Adds a call that the calling thread begins, nested in the calls that have not ended, if it makes a graph."""
        self.exist = True
        if not torch.is_grad_enabled():
            return
        if self.thread is not threading.current_thread():
            self._begin_thread()
        call.outer = self.open[-1] if self.open else None
        self.open.append(call)
        self.calls.append(call)
        self._numbers.append(call.first_node_number)
        if len(self.calls) > _MAX_CALLS:  # a loop of forwards without a commit would grow the list
            del self.calls[: _MAX_CALLS // 2], self._numbers[: _MAX_CALLS // 2]

    def begin_within(self, call: ForwardCall, outer: ForwardCall) -> None:
        """Adds a call that begins with a running one, as if both had begun together."""
        self.exist = True
        if outer in self.open:
            call.outer = outer
            self.open.insert(self.open.index(outer) + 1, call)
            position = self.calls.index(outer) + 1
            self.calls.insert(position, call)
            self._numbers.insert(position, call.first_node_number)

    def begin_later(self) -> None:
        """Records that the calling thread may make a graph with a unit's weights later."""
        self.exist = True
        if self.thread is not threading.current_thread():
            self._begin_thread()

    def _begin_thread(self) -> None:
        if self.thread is not None:  # its numbers say nothing about the nodes of this thread
            self.clear()
            self.exist = True
        self.thread = threading.current_thread()
        self.first_number = _next_node_number()

    def end(self, call: ForwardCall) -> None:
        """Ends a call."""
        call.stop_node_number = _next_node_number()
        opened = self.open
        if opened and opened[-1] is call:
            opened.pop()
        elif call in opened:
            del opened[opened.index(call) :]

    def find(self, node_number: int) -> ForwardCall | None:
        """Returns the innermost call that made a node; None if the node was made outside of every call."""
        # Calls are in the order of their first node. The last call that began before the node may also have ended
        # before it. Then only an enclosing call can have made the node.
        position = bisect_right(self._numbers, node_number)
        call = self.calls[position - 1] if position else None
        while call is not None and call.stop_node_number <= node_number:
            call = call.outer
        return call

    def watch(self, node: Any, number: int, call: ForwardCall) -> None:
        """Hooks a node: ``before_node`` is called before it runs."""
        self.watched.add(number)
        if len(self.watched) > _MAX_NUMBERS:  # `clear` may never run, for example with several optimizers
            self.watched -= set(sorted(self.watched)[: _MAX_NUMBERS // 2])
        node.register_prehook(functools.partial(self._before_node, call, number))

    def watch_input(self, node: Any, number: int) -> None:
        """Hooks the node of a forward's argument if another unit's forward made the argument without returning it."""
        if number in self.watched:
            return
        call = self.find(number)
        if call is not None and call.stop_node_number != math.inf:
            self.watch(node, number, call)

    def clear(self) -> None:
        """Removes everything, because all graphs became unusable."""
        self.calls.clear()
        self._numbers.clear()
        self.open.clear()
        self.watched.clear()
        self.exist, self.thread = False, None


_NOTE_S = 0.05
"""How long a thread may take to note itself after it has acquired the lock of a ``ThreadGuard``."""


class ThreadGuard:
    """Admits one thread at a time. A context manager around a use. A thread may nest its uses. See Note: [One thread].

    Attributes:
        lock: Held by the thread that uses the units.
        late: Identifier of the thread whose backward entered at its first node: another thread has made the graph.
        num_backwards: Backwards that the holder is running. ``leave_backward`` ends one.

    Args:
        in_step: Returns the thread that has begun a step and not ended it, if there is one.
    """

    def __init__(self, in_step: Callable[[], threading.Thread | None]) -> None:
        self._in_step = in_step
        self.lock = threading.RLock()
        self.late = self.num_backwards = 0
        self._holder = 0
        """Identifier of the thread that acquired the lock last."""
        self._user = 0
        """Identifier of the thread that entered last."""
        self._is_reading = False
        """True if the holder only reads. Other threads wait for it, because a read has a deadline."""

    def enter(self) -> bool:
        """Begins a use in the calling thread.

        Returns:
            Whether ``lock`` must be released at its end: False in a thread of autograd, whose caller has entered.

        Raises:
            UsageError: Another thread uses the units, or has begun a step and not ended it.
        """
        if not self.lock.acquire(blocking=False) and not self._acquire_late():
            return False
        self._holder = ident = threading.get_ident()
        if ident != self._user:
            self._take_over(ident)
        return True

    __enter__ = enter

    def __exit__(self, *_: object) -> None:
        if self.lock._is_owned():  # type: ignore[attr-defined]
            self.lock.release()

    @property
    def is_mine(self) -> bool:
        """True if the calling thread has entered."""
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def leave_backward(self) -> None:
        """Ends a backward."""
        self.num_backwards -= 1
        self.lock.release()

    def enter_at_node(self) -> None:
        """Begins a backward at its first node, in a thread that has not entered, unless one waits for it that has."""
        if self.lock.acquire(blocking=False):
            if _is_of_autograd():  # its caller could not leave: a lock belongs to the thread that acquired it
                self.lock.release()
                return
        elif not self._acquire_late():
            return
        self._holder = self._user = self.late = threading.get_ident()  # not `_take_over`: it was given the graph
        self.num_backwards += 1

    def leave_at_end(self) -> None:
        """Ends the calling thread's backward if it began at a node."""
        if self.late and self.late == threading.get_ident() and backward_task() == NO_TASK:
            self._user = self.late = 0
            self.leave_backward()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context of a gather into new memory. Possible in the middle of another thread's step."""
        nested = self.is_mine
        if not self.lock.acquire(blocking=False) and not self._acquire_late():
            yield
            return
        self._holder, before = threading.get_ident(), self._is_reading
        try:
            self._is_reading = before or not nested
            yield
        finally:
            self._is_reading = before
            self.lock.release()

    def _take_over(self, ident: int) -> None:
        """Makes the calling thread, which has the lock, the user."""
        this, other = threading.current_thread(), self._in_step()  # registers a thread that Python has not started
        if other is not None and other is not this and other.is_alive():
            self.lock.release()
            _refuse(other, "has begun a step with it and not ended the step")
        self._user = ident

    def _acquire_late(self) -> bool:
        """Acquires the lock after the other thread's read. Returns False in a thread of autograd.

        Raises:
            UsageError: The other thread does not only read.
        """
        if self.num_backwards and _is_of_autograd():
            return False
        while (other := self._find_holder()) is None or other is threading.current_thread():
            # The thread that has the lock has not noted itself yet, or it was ended in the middle of a use.
            if self.lock.acquire(timeout=_NOTE_S):
                return True
            if other is None and self._find_holder() is None:
                self.lock = threading.RLock()
                return self.lock.acquire()
        if not self._is_reading:
            _refuse(other, "is using it")
        return self.lock.acquire()

    def _find_holder(self) -> threading.Thread | None:
        return next((thread for thread in threading.enumerate() if thread.ident == self._holder), None)


def _is_of_autograd() -> bool:
    """True in a thread that autograd has started for the nodes of a device."""
    return backward_task() != NO_TASK and isinstance(threading.current_thread(), threading._DummyThread)


def _refuse(other: threading.Thread, what: str) -> NoReturn:
    raise UsageError(
        f"thread {threading.current_thread().name!r} uses a sharded model while thread {other.name!r} {what}. Both "
        "threads have the same parameters, whose memory is released when a use ends. Use the model in one thread; or "
        "hold one threading.Lock in both threads, in the training thread from the forward to the end of "
        "optimizer.step(); or load the live weights into a plain model: shardwell.attach(address, run=...)"
        ".follow(plain_model)"
    )
