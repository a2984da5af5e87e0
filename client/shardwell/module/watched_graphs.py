"""The autograd graphs of one session's units: which nodes say that a unit is about to be needed."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

from shardwell.module.usage import ForwardCall, ForwardCalls

_MAX_NUMBERS = 1 << 16

BeforeNode = Callable[[ForwardCall, int, object], None]


class WatchedGraphs:
    """The graphs that may still be used.

    Args:
        before_node: Is called with a forward call and the number of one of its nodes before that node runs.
    """

    def __init__(self, before_node: BeforeNode) -> None:
        self._before_node = before_node
        self.calls = ForwardCalls()
        self.watched: set[int] = set()
        """Numbers of the nodes that have a hook."""
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """From now on this thread may make a graph with a unit's weights."""
        self._thread = threading.current_thread()

    @property
    def may_be_of_this_thread(self) -> bool:
        """Whether the numbers of this session's nodes mean something in graphs that this thread made.

        Each thread numbers its nodes from 0: in another thread's graph these numbers are of quite other nodes.
        """
        return self._thread is threading.current_thread()

    def watch(self, node: Any, number: int, call: ForwardCall) -> None:
        """Has a node tell before it runs that the unit of a call is needed."""
        self.watched.add(number)
        if len(self.watched) > _MAX_NUMBERS:  # some graph is always in use, as with several optimizers
            self.watched -= set(sorted(self.watched)[: _MAX_NUMBERS // 2])
        node.register_prehook(functools.partial(self._before_node, call, number))

    def watch_input(self, node: Any, number: int) -> None:
        """Watches the node of a forward's argument if another unit's forward made it, and did not return it."""
        if number in self.watched:
            return
        call = self.calls.made(number)
        if call is not None and call.stop_node_number != math.inf:
            self.watch(node, number, call)

    def forget(self) -> None:
        """The graphs became unusable."""
        self.calls.clear()
        self.watched.clear()
        self._thread = None
