"""Connections of trainers and shard servers: a stream that each process keeps open while it is a member.

Note: [Broken streams]
    A process keeps one stream to the coordinator open. The kernel closes its connection when the process ends, so a
    broken stream is the first sign of an end. It proves nothing by itself: proxies and networks cut connections, and
    the process then opens the stream again. After a break, the coordinator therefore decides as follows.

    - If the process is gone from the coordinator's own host, it has ended for certain. No grace is needed.
    - If the stream is open again, or any request arrives, within ``GRACE_S``, nothing has happened.
    - If the process still runs on the coordinator's host, or was silent before the break (it was stopped, and gRPC's
      keepalive closed the connection), only its lease decides.
    - Otherwise the process is disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

from shardwell_server.coordinator.signals import Signal
from shardwell_wire.errors import RunDeletedError, StaleEpochError
from shardwell_wire.host.server_folders import has_ended, runs_here

GRACE_S = 0.2
"""Time in which a process can open a broken stream again, in seconds."""

_CHECK_S = 0.02
"""Pause between checks during the grace, in seconds. A killed process closes its connections shortly before it ends."""


class ConnectionState(Enum):
    """What a broken stream means. See Note: [Broken streams]."""

    CONNECTED = auto()
    """The stream is open again, or a request arrived."""
    ENDED = auto()
    """The process has ended for certain."""
    DISCONNECTED = auto()
    """The process has probably ended."""
    UNKNOWN = auto()
    """The process runs or was silent before. Its lease decides."""


@dataclass(slots=True)
class MembershipConnection:
    """The membership streams of one process. Used on the event loop."""

    streams: int = 0
    """Open streams. A process that reconnects may briefly have two."""
    requests: int = 0
    """Requests received, streams included."""
    news: Signal = field(default_factory=Signal)
    """Notified when the open streams have something to send."""

    @contextmanager
    def stream(self, on_break: Callable[[], None]) -> Iterator[None]:
        """Counts an open stream while the block runs. Calls ``on_break`` afterwards if the process has broken it."""
        self.note_request()
        self.streams += 1
        try:
            try:
                yield
            finally:
                self.streams -= 1
        except (StaleEpochError, RunDeletedError):
            raise  # the coordinator ends the stream
        except BaseException:
            on_break()
            raise

    def note_request(self) -> None:
        """Counts a request, which shows that the process lives."""
        self.requests += 1

    async def settled_state(self, process: str, *, was_silent: bool, grace_s: float = GRACE_S) -> ConnectionState:
        """Returns the state of a process whose stream broke. Waits for at most ``grace_s``.

        Args:
            process: Process identity, as returned by ``server_folders.own_identity``. Empty: unknown.
            was_silent: True if the process had been silent for too long when its stream broke.
            grace_s: Time in which the process can open a stream, in seconds.
        """
        requests, clock = self.requests, asyncio.get_running_loop().time
        deadline = clock() + grace_s
        while True:
            if self.streams or self.requests != requests:
                return ConnectionState.CONNECTED
            if has_ended(process):
                return ConnectionState.ENDED
            if (remaining_s := deadline - clock()) <= 0:
                break
            await asyncio.sleep(min(remaining_s, _CHECK_S))
        return ConnectionState.UNKNOWN if was_silent or runs_here(process) else ConnectionState.DISCONNECTED
