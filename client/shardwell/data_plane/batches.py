"""What batches of small fetches and of small pushes have in common: which transfers share a message, and the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from itertools import islice
from typing import Protocol, TypeVar


class Sized(Protocol):
    """A transfer of known size."""

    size_bytes: int


Transfer = TypeVar("Transfer", bound=Sized)
Task = TypeVar("Task")


def take_batch(waiting: deque[Transfer], ready_count: int, *, max_count: int, usual_bytes: int) -> list[Transfer]:
    """Removes the transfers of the next message from a queue.

    Args:
        waiting: The queue.
        ready_count: Number of transfers at its front that may be sent.
        max_count: Most transfers of a message.
        usual_bytes: Size of a message. The transfers that may be sent are divided evenly over as many messages as this
            takes, so that no small message is left: a message with several transfers has at most 1.5 times this size.

    Returns:
        The transfers in order. Empty if ``ready_count`` is 0.
    """
    batch: list[Transfer] = []
    ready_bytes = sum(transfer.size_bytes for transfer in islice(waiting, ready_count))
    left_bytes = ready_bytes // max(1, (ready_bytes + usual_bytes // 2) // usual_bytes)
    while len(batch) < min(ready_count, max_count):
        left_bytes -= waiting[0].size_bytes
        if batch and left_bytes < 0:
            break
        batch.append(waiting.popleft())
    return batch


def run_all(tasks: deque[Task], run: Callable[[Task], None], threads: Executor, max_threads: int) -> None:
    """Runs tasks in this thread and in others. Returns when all have ended.

    Args:
        tasks: The tasks. They are removed.
        run: Runs one task.
        threads: The other threads. If none is free, this thread runs all tasks.
        max_threads: Most threads, with this one.
    """

    def work() -> None:
        while True:
            try:
                task = tasks.popleft()
            except IndexError:  # no task is left
                return
            run(task)

    helpers: list[Future[None]] = []
    with suppress(RuntimeError):  # the threads were shut down
        for _ in range(min(len(tasks), max_threads) - 1):
            helpers.append(threads.submit(work))
    work()
    for helper in helpers:
        if not helper.cancel():  # do not wait for a thread: all may be waiting like this one
            helper.result()
