"""Epoch of a trainer's replica: the newest that the coordinator announced, and that of the process group."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardwell_wire.errors import ReplicaLostError

START_AGAIN = (
    "run the training in session.run_replica(train), which then forms the replica again, or start this trainer again "
    "(shardwell launch --restart does)"
)
"""Advice to a trainer whose replica has lost a trainer."""


class ReplicaEpoch:
    """Compares the epoch in which a trainer formed its replica's process group with the newest epoch. Thread-safe.

    Note: [Void process groups]
        The replica gets a new epoch when one of its trainers is lost or replaced. A process group that was formed in an
        older epoch is *void*: its collectives cannot end. The trainer must raise ReplicaLostError, wherever it is. If
        it waits for the coordinator in a step, ``Membership.poll`` raises. If it starts a work item,
        ``ReplicaGroup.require_same_item`` raises. If it computes a work item, ``ReplicaGroup`` ends the group's
        connections, and the collective in which it waits fails.

    Epochs of a run only rise, so announcements may arrive in any order.

    Attributes:
        when_void: Called when the group becomes void, in the thread that learns it. Must return at once.
    """

    def __init__(self) -> None:
        self._announced = self._formed = self._dp_rank = 0
        self._lock = threading.Lock()
        self.when_void: Callable[[], None] = lambda: None

    @property
    def has_group(self) -> bool:
        """True if the trainer has a process group with other trainers."""
        return self._formed > 0

    @property
    def is_void(self) -> bool:
        """True if the trainer has a process group, and the trainers of its replica have changed since it was formed."""
        return 0 < self._formed < self._announced

    def announce(self, epoch: int) -> None:
        """Records an epoch of which the coordinator told. 0: the trainer has no replica with other trainers."""
        with self._lock:
            risen, self._announced = epoch > self._announced, max(epoch, self._announced)
        if risen and self.is_void:
            self.when_void()

    def form(self, epoch: int, dp_rank: int) -> None:
        """Records that the process group of an epoch exists.

        Args:
            epoch: The epoch. 0: the trainer is a replica by itself.
            dp_rank: Names the replica in messages.
        """
        self._formed, self._dp_rank = epoch, dp_rank

    def close(self) -> None:
        """Records that the process group is closed."""
        self._formed = 0

    def require_valid(self) -> None:
        """Raises ReplicaLostError if the process group is void."""
        if self.is_void:
            raise self.lost_error()

    def lost_error(self) -> ReplicaLostError:
        """Returns the error for a void process group."""
        return ReplicaLostError(
            f"a trainer of replica {self._dp_rank} was lost or replaced, so the replica's process group is void (epoch "
            f"{self._formed}, now {self._announced}): {START_AGAIN}"
        )
