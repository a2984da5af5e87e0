"""Whether a trainer's membership in its run is valid, and whether the process group of its replica is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shardwell_wire.errors import ReplicaLostError, ShardwellError, StaleEpochError

logger = logging.getLogger(__name__)

_MAX_REJOINS = 5
"""Memberships in a row that may lapse without a commit in between. More often, the cause is not going to disappear."""


class MembershipState:
    """State of the memberships of one trainer, one after the other: valid, lapsed, or ended for good. Thread-safe.

    Args:
        run: Name of the run.

    Attributes:
        lapsed: True if the membership is over and may be followed by another one.
        ended: True if the membership has ended for good.
        rejoins_in_a_row: Memberships that have lapsed since the last commit.
        over: Event of the current membership. Set when it is over; ends the threads that keep it.
        when_lapsed: Called in any thread, once per membership that lapses.
        when_ended: Called once, in any thread, when the membership has ended for good.
    """

    def __init__(self, run: str) -> None:
        self._run, self._trainer, self._epoch = run, "", 0
        self._ended: ShardwellError | None = None
        self._lapse: StaleEpochError | None = None
        self.lapsed = self.ended = False
        self.rejoins_in_a_row = 0
        self.over = threading.Event()
        self.when_lapsed: Callable[[], None] = lambda: None
        self.when_ended: Callable[[], None] = lambda: None

    def begin(self, trainer: str, epoch: int) -> None:
        """Starts a membership, which is valid."""
        self._trainer, self._epoch = trainer, epoch
        self.over = threading.Event()
        self._lapse, self.lapsed = None, False

    @property
    def valid(self) -> bool:
        """True if the membership has neither lapsed nor ended."""
        return self._lapse is None and self._ended is None

    def check(self) -> None:
        """Raises the error that ended the membership, if it has ended for good."""
        if self._ended is not None:
            raise type(self._ended)(str(self._ended), **self._ended.data) from self._ended

    def require_valid(self) -> None:
        """Raises the error that ended the membership, also if it has only lapsed."""
        if self._ended is not None:
            self.check()
        if (lapse := self._lapse) is not None:
            raise StaleEpochError(str(lapse), **lapse.data) from lapse

    def note_rejoin(self) -> StaleEpochError:
        """Records that the trainer is about to join again. Returns why the membership lapsed.

        Raises:
            StaleEpochError: Memberships have lapsed again and again.
        """
        self.check()
        lapse = self._lapse
        assert lapse is not None
        self.rejoins_in_a_row += 1
        if self.rejoins_in_a_row > _MAX_REJOINS:
            self.end(
                StaleEpochError(
                    f"trainer {self._trainer!r} lost its membership in run {self._run!r} {_MAX_REJOINS + 1} times in a "
                    f"row without a commit in between, so it stops. The last time: {lapse}",
                    **lapse.data,
                )
            )
            self.check()
        return lapse

    def give_up(self, reason: str) -> None:
        """Makes the membership lapse on the trainer's own account. No effect if it is over already."""
        if self.valid:
            self._lapse, self.lapsed = StaleEpochError(reason), True
            self.over.set()

    def lapse(self, error: StaleEpochError, epoch: int | None = None) -> None:
        """Makes the membership lapse.

        Args:
            error: Why.
            epoch: The membership that the error concerns. None: the current one.
        """
        if self.valid and not self.over.is_set() and epoch in (None, self._epoch):
            logger.warning("trainer %r is no longer a member of run %r: %s", self._trainer, self._run, error)
            self._lapse, self.lapsed = error, True
            self.over.set()
            self.when_lapsed()

    def end(self, error: ShardwellError) -> None:
        """Ends the membership for good."""
        if self._ended is None and (not self.over.is_set() or self._lapse is not None):
            logger.error("trainer %r is no longer a member of run %r: %s", self._trainer, self._run, error)
            self.close(error)
            self.over.set()
            self.when_ended()

    def close(self, error: ShardwellError) -> None:
        """Ends the membership for good at the trainer's own wish: without a callback."""
        self._ended, self.ended, self.lapsed = error, True, False


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
        self._announced = self._dp_rank = 0
        self.formed = 0
        """Epoch of the process group with the other trainers of the replica. 0: this trainer has none."""
        self._lock = threading.Lock()
        self.when_void: Callable[[], None] = lambda: None

    @property
    def is_void(self) -> bool:
        """True if the trainer has a process group, and the trainers of its replica have changed since it was formed."""
        return 0 < self.formed < self._announced

    def announce(self, epoch: int) -> None:
        """Records an epoch that the coordinator announced. 0: the trainer has no replica with other trainers."""
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
        self.formed, self._dp_rank = epoch, dp_rank

    def close(self) -> None:
        """Records that the process group is closed."""
        self.formed = 0

    def require_valid(self) -> None:
        """Raises ReplicaLostError if the process group is void."""
        if self.is_void:
            raise self.lost_error()

    def lost_error(self) -> ReplicaLostError:
        """Returns the error for a void process group."""
        return ReplicaLostError(
            f"a trainer of replica {self._dp_rank} was lost or replaced, so the replica's process group is void (epoch "
            f"{self.formed}, now {self._announced}): {START_AGAIN}"
        )
