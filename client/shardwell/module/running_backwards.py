"""The backwards that run now, and how far each is; reentrant checkpoints run further ones inside one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from shardwell.memory.allocator import keep_freed_memory
from shardwell.module.hooks import backward_task
from shardwell.module.usage import ForwardCall

if TYPE_CHECKING:
    from shardwell.module.unit import Unit


@dataclass(slots=True)
class RunningBackward:
    """One running backward."""

    calls: dict[ForwardCall, None] = field(default_factory=dict)
    """Forward calls whose backward has begun and is not over."""
    units: dict[Unit, None] = field(default_factory=dict)
    """All units that it used."""

    def begin(self, call: ForwardCall) -> None:
        """The backward of a forward call begins, if it has not."""
        if call in self.calls:
            return
        self.calls[call] = None
        self.units[call.unit] = None
        call.unit.usage.backward_calls.add(call)
        # With create_graph=True the graph of the backward keeps using the weights, without hooks.
        call.unit.usage.pinned |= torch.is_grad_enabled()

    def end_calls_after(self, node_number: int) -> list[ForwardCall]:
        """A node runs: the backwards of all calls that made only newer ones are over. Returns those calls."""
        over = [call for call in self.calls if call.first_node_number > node_number]
        self._end(over)
        return over

    def end(self) -> None:
        """No node is left: the backwards of all calls are over."""
        self._end(list(self.calls))

    def _end(self, calls: Iterable[ForwardCall]) -> None:
        for call in calls:
            del self.calls[call]
            call.unit.usage.backward_calls.discard(call)


class RunningBackwards:
    """All backwards that run in this process.

    Args:
        ended: Is called at the end of each with the units that it used, the last one first.
    """

    def __init__(self, ended: Callable[[Iterable[Unit]], None]) -> None:
        self._ended = ended
        self._by_task: dict[int, RunningBackward] = {}

    def __bool__(self) -> bool:
        return bool(self._by_task)

    def current(self) -> RunningBackward:
        """The one that runs in this thread; only in a hook of autograd."""
        task = backward_task()
        if task not in self._by_task:
            keep_freed_memory()
            self._by_task[task] = RunningBackward()
            Variable._execution_engine.queue_callback(lambda: self._end(task))
        return self._by_task[task]

    def forget(self) -> None:
        """They came to no end: an exception stopped them."""
        self._by_task.clear()

    def _end(self, task: int) -> None:
        backward = self._by_task.pop(task, RunningBackward())
        backward.end()
        self._ended(reversed(backward.units))
