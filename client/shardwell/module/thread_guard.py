"""One thread at a time uses the units of a session. Another thread gets an error before any memory is touched.

The parameters of a module are objects that all threads share, and their memory is released when a use ends. A second
thread therefore cannot use the same modules at the same time. It may use them while no other thread does: between two
steps, or where both threads hold a lock of the user.

Autograd runs the nodes of a GPU in threads of its own, while the thread that called the backward waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from shardwell.module.graph_tracking import NO_TASK, backward_task
from shardwell_wire.errors import UsageError


class ThreadGuard:
    """Admits one thread at a time. A context manager around a use. A thread may nest its uses.

    Args:
        in_step: Returns the thread that has begun a step and not ended it, if there is one.
    """

    def __init__(self, in_step: Callable[[], threading.Thread | None]) -> None:
        self._in_step = in_step
        self._lock = threading.RLock()
        self._holder = 0
        """Identifier of the thread that acquired the lock last."""
        self._user = 0
        """Identifier of the thread that entered last."""
        self._is_reading = False
        """True if the holder only reads. Other threads wait for it, because a read has a deadline."""
        self._num_backwards = 0
        """Backwards that the holder is running."""
        self._late = 0
        """Identifier of the thread whose backward entered at its first node: another thread has made the graph."""

    def enter(self) -> bool:
        """Begins a use in the calling thread.

        Returns:
            Whether ``leave`` must be called: False in a thread of autograd, whose caller has entered already.

        Raises:
            UsageError: Another thread uses the units, or has begun a step and not ended it.
        """
        if not self._lock.acquire(blocking=False) and not self._acquire_late():
            return False
        self._holder = ident = threading.get_ident()
        if ident != self._user:
            self._take_over(ident)
        return True

    def leave(self) -> None:
        """Ends a use."""
        self._lock.release()

    def __enter__(self) -> bool:
        return self.enter()

    def __exit__(self, *_: object) -> None:
        if self.is_mine:
            self.leave()

    @property
    def is_mine(self) -> bool:
        """True if the calling thread has entered."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def enter_backward(self) -> None:
        """Begins a backward in the calling thread, which has made the graph. ``leave_backward`` must be called."""
        self.enter()
        self._num_backwards += 1

    def leave_backward(self) -> None:
        """Ends a backward."""
        self._num_backwards -= 1
        self.leave()

    def enter_at_node(self) -> None:
        """Begins a backward at its first node, unless the calling thread or the one that waits for it has entered."""
        if self.is_mine:
            return
        if self._lock.acquire(blocking=False):
            if _is_of_autograd():  # its caller could not leave: a lock belongs to the thread that acquired it
                self._lock.release()
                return
        elif not self._acquire_late():
            return
        self._holder = self._user = self._late = threading.get_ident()  # not `_take_over`: it was given the graph
        self._num_backwards += 1

    def leave_at_end(self) -> None:
        """Ends the calling thread's backward if it began at a node."""
        if self._late and self._late == threading.get_ident() and backward_task() == NO_TASK:
            self._user = self._late = 0
            self.leave_backward()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context of a gather into new memory. Possible in the middle of another thread's step."""
        nested = self.is_mine
        if not self._lock.acquire(blocking=False) and not self._acquire_late():
            yield
            return
        self._holder, before = threading.get_ident(), self._is_reading
        try:
            self._is_reading = before or not nested
            yield
        finally:
            self._is_reading = before
            self._lock.release()

    def _take_over(self, ident: int) -> None:
        """Makes the calling thread, which has the lock, the user."""
        this, other = threading.current_thread(), self._in_step()  # registers a thread that Python has not started
        if other is not None and other is not this and other.is_alive():
            self._lock.release()
            _refuse(other, "has begun a step with it and not ended the step")
        self._user = ident

    def _acquire_late(self) -> bool:
        """Acquires the lock after the other thread's read. Returns False in a thread of autograd.

        Raises:
            UsageError: The other thread does not only read.
        """
        if self._num_backwards and _is_of_autograd():
            return False
        other = next((thread for thread in threading.enumerate() if thread.ident == self._holder), None)
        if other is None:  # it was ended in the middle of a use
            self._lock = threading.RLock()
        elif not self._is_reading:
            _refuse(other, "is using it")
        return self._lock.acquire()


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
