"""Follows a run's placement: moves this trainer's shards to the servers that own them now.

Note: [Moved shards]
    The coordinator raises the run's placement whenever a shard gets another server process: a backup was promoted, a
    server was restarted or drained, or the run was rolled back. Trainers learn the placement from every answer of the
    coordinator and from the membership stream. A thread of this trainer then asks for the present owners and connects
    to them. Operations that a move has broken wait for this thread and are repeated at the new owner
    (``ShardOwner.run``). Nothing else in the trainer depends on where a shard is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from shardwell.session.membership import Membership
from shardwell_wire.errors import ShardwellError, UnavailableError
from shardwell_wire.retry import backoff
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5

_LIST_AGAIN_S = 0.5
"""How long a server that cannot be reached is retried before the owners are listed again."""

MoveShards = Callable[[coordinator_pb2.ListUnitsResponse, bool], None]
"""``(units, anew)``: moves all shards to their owners; ``anew``: through new connections and mappings."""


class ShardRelocations:
    """Applies the moves of a run's shards in a background thread. See Note: [Moved shards]. Thread-safe.

    Args:
        membership: The membership of this trainer.
        limit_s: How long ``settle`` waits.
    """

    def __init__(self, membership: Membership, limit_s: float) -> None:
        self._membership, self._limit_s = membership, limit_s
        self._move: MoveShards | None = None
        self._changed = threading.Condition()
        """Protects the next fields."""
        self._applied = membership.joined.placement
        self._requests, self._served = 0, 0
        self._anew = False
        self._error: ShardwellError | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._listed, self._listed_s = 0, 0.0
        """Placement and time of the last list of owners. Used in the thread only."""

    def attach(self, move: MoveShards) -> None:
        """Sets the function that moves the shards. Called in the background thread."""
        self._move = move

    def wake(self) -> None:
        """Called when the coordinator has reported another placement. Returns at once."""
        with self._changed:
            if self._is_pending() and not self._closed:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="shardwell-relocation", daemon=True)
                    self._thread.start()
                self._changed.notify_all()

    def refresh(self) -> None:
        """Starts to connect to all owners anew, which ends the transfers in flight. Returns at once."""
        with self._changed:
            self._requests += 1
            self._anew = True
        self.wake()

    def recheck(self) -> None:
        """Starts to compare all shards with their owners. Returns at once."""
        with self._changed:
            self._requests += 1
        self.wake()

    def try_settle(self, limit_s: float) -> None:
        """Waits for a limited time until all shards are connected to their owners."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._is_pending(), min(limit_s, self._limit_s))

    def settle(self) -> None:
        """See ``Moves.settle``."""
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            settled = self._changed.wait_for(lambda: self._closed or not self._is_pending(), self._limit_s)
            error = self._error
        self._membership.check()
        if not settled:
            raise UnavailableError(
                f"shards of run {self._membership.run!r} have other servers now, and this trainer could not reach them "
                f"for {self._limit_s:.0f} s: {error}. Check the network between this host and the shard servers"
            ) from error

    def check(self) -> None:
        """Called before a retry of a request to a shard server; raises if a retry is pointless.

        Raises:
            UnavailableError: This is the thread that moves shards, and the list of owners may be out of date.
        """
        self._membership.check()
        if threading.current_thread() is self._thread and (
            self._membership.placement > self._listed or time.monotonic() - self._listed_s > _LIST_AGAIN_S
        ):
            raise UnavailableError("a server does not answer, and its shards may have moved to another server")

    def require_valid(self) -> None:
        """See ``Moves.require_valid``."""
        self._membership.require_valid()

    def close(self) -> None:
        """Stops the thread and all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_pending(self) -> bool:
        return self._membership.placement > self._applied or self._requests > self._served

    def _run(self) -> None:
        pauses = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._is_pending())
                if self._closed:
                    return
                requests, anew, self._anew = self._requests, self._anew, False
            started = time.monotonic()
            try:
                units = self._membership.list_units()
                self._listed, self._listed_s = units.placement, time.monotonic()
                assert self._move is not None
                self._move(units, anew)
            except (ShardwellError, OSError) as error:
                logger.info("shards have moved, and cannot be reached yet: %s", error)
                with self._changed:
                    self._anew = self._anew or anew
                    self._error = error if isinstance(error, ShardwellError) else UnavailableError(str(error))
                    self._changed.wait_for(lambda: self._closed, next(pauses))
                continue
            pauses = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            logger.info("placement %d of the shards applied in %.3f s", units.placement, time.monotonic() - started)
            with self._changed:
                self._applied, self._served, self._error = units.placement, requests, None
                self._changed.notify_all()
