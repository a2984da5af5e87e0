"""Small pushes to one server, collected and sent in one message.

A message costs each side about as much time as the bytes of several small units. Pushes are held back until a batch is
full, until somebody waits for them, or until the next push finds them older than ``_MAX_AGE_S``. A thread starts with a
full batch: a push by itself wakes none.

Note: [Rejected pushes]
    A batch is sent once. If it fails, or the server rejects some of its parts, each of these parts is pushed by itself,
    with the retries, the explanations and the moves that a single push has. These may take as long as the session waits
    for a server, so they delay neither the other results of the batch nor each other. Only parts with the same key are
    pushed in order, and all of them before the next batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, Protocol, TypeVar

from shardwell.data_plane.batches import run_all, take_batch
from shardwell.data_plane.transfer_queue import closed_error
from shardwell_wire.errors import ShardwellError

logger = logging.getLogger(__name__)

MAX_STREAM_BYTES = 64 << 10
"""Largest part that a batch streams. The message is built from copies, which cost little at this size."""

_MAX_PARTS, _USUAL_BYTES = 32, 512 << 10
"""Most parts of a message, and usual size of their values; see ``take_batch``."""

_FULL_BYTES = 256 << 10
"""A batch is sent when its values have this size. Limits how long a server's reduction is delayed."""

_MAX_AGE_S = 0.01
"""A batch whose first push is older is sent with the next push."""

_MAX_ALONE = 8
"""Rejected parts of a batch that are pushed at the same time. A server must not occupy all threads."""


class BatchedPush(Protocol):
    """A push as a part of a batch."""

    key: tuple[int, int]
    """The shard. Pushes with the same key are sent in order."""
    size_bytes: int
    error: BaseException | None
    """Why the push failed. Set before it is reported as ended."""

    def push_alone(self) -> None:
        """Pushes the part by itself."""
        ...


Push = TypeVar("Push", bound=BatchedPush)


class PushBatches(Generic[Push]):
    """The small pushes to one server, in order. Thread-safe.

    Args:
        threads: Run the pushes. They must start calls in the order in which they are submitted.
        send: Sends pushes in one message; returns for each whether it was accepted.
        ended: Called in any thread with pushes that have ended.
    """

    def __init__(
        self,
        threads: Executor,
        send: Callable[[Sequence[Push]], Sequence[bool]],
        ended: Callable[[Sequence[Push]], None],
    ) -> None:
        self._threads, self._send_message, self._ended = threads, send, ended
        self._lock = threading.Lock()
        """Protects the next fields."""
        self._waiting: deque[Push] = deque()
        self._ready_count = self._held_bytes = 0
        """Pushes at the front of the queue that are not held back, and bytes of the others."""
        self._oldest_s = 0.0
        """When the first push that is held back was added."""
        self._is_sending = self._closed = False

    def add(self, push: Push) -> None:
        """Adds a push to the present batch. Raises UnavailableError if the session was closed."""
        with self._lock:
            if self._closed:
                raise closed_error()
            self._waiting.append(push)
            self._held_bytes += push.size_bytes
            held_count, now = len(self._waiting) - self._ready_count, time.monotonic()
            if held_count == 1:
                self._oldest_s = now
            if self._held_bytes >= _FULL_BYTES or held_count >= _MAX_PARTS or now - self._oldest_s > _MAX_AGE_S:
                self._start()

    def flush(self) -> None:
        """Starts the pushes that are held back."""
        if self._waiting:
            with self._lock:
                self._start()

    def close(self) -> None:
        """Fails the waiting pushes, and the parts of the batch in flight that would have to be pushed again."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._ready_count = 0
        for push in waiting:
            push.error = closed_error()
        self._ended(waiting)

    def _start(self) -> None:
        self._ready_count, self._held_bytes = len(self._waiting), 0
        if self._ready_count and not self._is_sending:
            self._threads.submit(self._run)
            self._is_sending = True

    def _run(self) -> None:
        while batch := self._next_batch():
            self._finish(batch, self._send(batch) if len(batch) > 1 else [False])

    def _next_batch(self) -> list[Push]:
        with self._lock:
            batch = take_batch(self._waiting, self._ready_count, max_count=_MAX_PARTS, usual_bytes=_USUAL_BYTES)
            self._ready_count -= len(batch)
            self._is_sending = bool(batch)
            return batch

    def _send(self, batch: Sequence[Push]) -> Sequence[bool]:
        try:
            return self._send_message(batch)
        except Exception as error:  # the pushes must be reported in any case
            defect = None if isinstance(error, ShardwellError | OSError) else error
            logger.info("%d parts of a batch are pushed one by one: %s", len(batch), error, exc_info=defect)
            return [False] * len(batch)

    def _finish(self, batch: Sequence[Push], accepted: Sequence[bool]) -> None:
        """Reports the pushes of a batch. See Note: [Rejected pushes]."""
        rejected = dict[tuple[int, int], list[Push]]()
        ended = list[Push]()
        for push, is_accepted in zip(batch, accepted, strict=True):
            if is_accepted:
                ended.append(push)
            else:
                rejected.setdefault(push.key, []).append(push)
        self._ended(ended)
        if rejected:
            run_all(deque(rejected.values()), self._push_in_order, self._threads, _MAX_ALONE)

    def _push_in_order(self, pushes: Sequence[Push]) -> None:
        for push in pushes:
            self._push_alone(push)

    def _push_alone(self, push: Push) -> None:
        try:
            if self._closed:
                raise closed_error()
            push.push_alone()
        except BaseException as error:
            push.error = error
        self._ended([push])
