"""Autograd graphs of sharded modules: which nodes belong to which forward call, and which backwards are running.

Note: [Node numbers]
    Autograd numbers nodes in the order in which a thread makes them, and a backward always runs the ready node with
    the highest number. The backward of a forward call therefore begins at a node that made one of the call's results.
    It has ended when a node runs whose number is lower than the call's first one. Hooks on the nodes of results are
    enough. Unlike hooks on tensors, they survive in-place operations. Inputs stay untouched: an alias of an input
    would change what ``is`` returns, and the order in which gradients are summed.

    Each thread numbers its nodes from 0. A number says nothing about a graph that another thread made.
"""

from __future__ import annotations

import functools
import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Variable

from shardwell.memory.allocator import keep_freed_memory
from shardwell.module.unit import ForwardCall, Unit

NO_TASK = -1
"""Value of ``backward_task`` outside of a backward."""

_MAX_CALLS = 1 << 15
_MAX_NUMBERS = 1 << 16


backward_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the backward that runs in this thread, or ``NO_TASK``. A nested backward has its own id."""


class ForwardCalls:
    """The forward calls whose graphs can still be used, to find the call that made a node."""

    def __init__(self) -> None:
        self._calls: list[ForwardCall] = []
        self._open: list[ForwardCall] = []

    def __iter__(self) -> Iterator[ForwardCall]:
        return iter(self._calls)

    def begin(self, call: ForwardCall) -> None:
        """Adds a call, nested in the calls that have not ended."""
        call.outer = self._open[-1] if self._open else None
        self._open.append(call)
        self._calls.append(call)
        if len(self._calls) > _MAX_CALLS:  # a loop of forwards without a commit would grow the list
            del self._calls[: _MAX_CALLS // 2]

    def end(self, call: ForwardCall) -> None:
        """Ends a call."""
        call.stop_node_number = torch._C._autograd._get_sequence_nr()
        if self._open and self._open[-1] is call:
            self._open.pop()
        elif call in self._open:
            del self._open[self._open.index(call) :]

    def find(self, node_number: int) -> ForwardCall | None:
        """Returns the innermost call that made a node; None if the node was made outside of every call."""
        # Calls are in the order of their first node. The last call that began before the node may also have ended
        # before it. Then only an enclosing call can have made the node.
        position = bisect_right(self._calls, node_number, key=lambda call: call.first_node_number)
        call = self._calls[position - 1] if position else None
        while call is not None and call.stop_node_number <= node_number:
            call = call.outer
        return call

    def clear(self) -> None:
        """Removes all calls, because their graphs became unusable."""
        self._calls.clear()
        self._open.clear()


class WatchedGraphs:
    """The graphs of one session that can still be used, and the hooks on their nodes.

    Args:
        before_node: Called with a forward call and the number of one of its nodes, before that node runs.
    """

    def __init__(self, before_node: Callable[[ForwardCall, int, object], None]) -> None:
        self._before_node = before_node
        self.calls = ForwardCalls()
        self.watched: set[int] = set()
        """Numbers of the nodes that have a hook."""
        self.exist = False
        """True if a graph with a unit's weights may have been made since ``clear``."""
        self.thread: threading.Thread | None = None
        """The thread that may have made a graph since ``clear``."""
        self.first_number = 0
        """The thread's nodes with a lower number do not read weights."""

    def begin(self, *, later: bool = False) -> None:
        """Records that the calling thread may make a graph with a unit's weights: now, or ``later``."""
        self.exist = True
        if (later or torch.is_grad_enabled()) and not self.made_by_this_thread:
            # Another thread's numbers say nothing about the nodes of this one.
            self.calls.clear()
            self.watched.clear()
            self.thread = threading.current_thread()
            self.first_number = torch._C._autograd._get_sequence_nr()

    @property
    def made_by_this_thread(self) -> bool:
        """True if the numbers in ``watched`` apply to graphs of the calling thread. See Note: [Node numbers]."""
        return self.thread is threading.current_thread()

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
        call = self.calls.find(number)
        if call is not None and call.stop_node_number != math.inf:
            self.watch(node, number, call)

    def clear(self) -> None:
        """Removes everything, because all graphs became unusable."""
        self.calls.clear()
        self.watched.clear()
        self.exist, self.thread = False, None


@dataclass(slots=True)
class RunningBackward:
    """One backward that is running."""

    calls: dict[ForwardCall, None] = field(default_factory=dict)
    """Forward calls whose backward has begun and not ended."""
    units: dict[Unit, None] = field(default_factory=dict)
    """All units that the backward has used."""

    def begin(self, call: ForwardCall) -> None:
        """Begins the backward of a forward call; no effect if it has begun."""
        if call in self.calls:
            return
        self.calls[call] = None
        self.units[call.unit] = None
        call.unit.usage.backward_calls.add(call)
        # With create_graph=True, the graph of the backward itself reads the weights later, and has no hooks.
        call.unit.usage.in_backward_graph |= torch.is_grad_enabled()

    def end_calls_after(self, node_number: int) -> list[ForwardCall]:
        """Ends and returns the calls that began after a node was made. See Note: [Node numbers]."""
        ended = [call for call in self.calls if call.first_node_number > node_number]
        if ended:
            self._end(ended)
        return ended

    def end(self) -> None:
        """Ends all calls: no node is left to run."""
        self._end(list(self.calls))

    def _end(self, calls: Iterable[ForwardCall]) -> None:
        for call in calls:
            del self.calls[call]
            call.unit.usage.backward_calls.discard(call)


class RunningBackwards:
    """The backwards that use one session's units now. A reentrant checkpoint runs a backward inside another one.

    Args:
        begins: Called in a backward's first hook.
        ended: Called at the end of each backward with the units that it used, the last one first.
    """

    def __init__(self, begins: Callable[[], None], ended: Callable[[Iterable[Unit]], None]) -> None:
        self._begins, self._ended = begins, ended
        self._by_task: dict[int, RunningBackward] = {}

    def __bool__(self) -> bool:
        return bool(self._by_task)

    def current(self) -> RunningBackward:
        """Returns the backward of the calling thread, which must be in a hook of autograd."""
        task = backward_task()
        if task not in self._by_task:
            self._begins()
            keep_freed_memory()
            self._by_task[task] = RunningBackward()
            # Autograd calls this after the last node of the backward, and never if the backward raises: see `clear`.
            Variable._execution_engine.queue_callback(lambda: self._end(task))
        return self._by_task[task]

    def clear(self) -> None:
        """Removes all backwards after an exception stopped them: their callbacks never run."""
        self._by_task.clear()

    def _end(self, task: int) -> None:
        backward = self._by_task.pop(task, RunningBackward())
        backward.end()
        if self._by_task:  # the backward of a reentrant checkpoint: what it leaves to push ends with the outer one
            next(reversed(self._by_task.values())).units.update(backward.units)
        self._ended(reversed(backward.units))
