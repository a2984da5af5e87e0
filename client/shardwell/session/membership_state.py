"""Whether a trainer's membership is valid, has lapsed or has ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shardwell_wire.errors import ShardwellError, StaleEpochError

logger = logging.getLogger(__name__)

_MAX_REJOINS = 5
"""Memberships in a row that may lapse without a commit in between. More often, the cause is not going to disappear."""


class MembershipState:
    """State of the memberships of one trainer, one after the other: valid, lapsed, or ended for good. Thread-safe.

    Args:
        run: Name of the run.

    Attributes:
        over: Event of the current membership. Set when it is over; ends the threads that keep it.
        when_lapsed: Called in any thread, once per membership that lapses.
        when_ended: Called once, in any thread, when the membership has ended for good.
    """

    def __init__(self, run: str) -> None:
        self._run, self._trainer, self._epoch = run, "", 0
        self._ended: ShardwellError | None = None
        self._lapse: StaleEpochError | None = None
        self._rejoins_in_a_row = 0
        self.over = threading.Event()
        self.when_lapsed: Callable[[], None] = lambda: None
        self.when_ended: Callable[[], None] = lambda: None

    def begin(self, trainer: str, epoch: int) -> None:
        """Starts a membership, which is valid."""
        self._trainer, self._epoch = trainer, epoch
        self.over = threading.Event()
        self._lapse = None

    @property
    def ended(self) -> bool:
        """True if the membership has ended for good."""
        return self._ended is not None

    @property
    def lapsed(self) -> bool:
        """True if the membership is over and may be followed by another one."""
        return self._lapse is not None and self._ended is None

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
        self.check()
        if (lapse := self._lapse) is not None:
            raise StaleEpochError(str(lapse), **lapse.data) from lapse

    def note_commit(self) -> None:
        """Records that the run has committed a step with this trainer as a member."""
        self._rejoins_in_a_row = 0

    def note_rejoin(self) -> StaleEpochError:
        """Records that the trainer is about to join again. Returns why the membership lapsed.

        Raises:
            StaleEpochError: Memberships have lapsed again and again.
        """
        self.check()
        lapse = self._lapse
        assert lapse is not None
        self._rejoins_in_a_row += 1
        if self._rejoins_in_a_row > _MAX_REJOINS:
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
            self._lapse = StaleEpochError(reason)
            self.over.set()

    def lapse(self, error: StaleEpochError, epoch: int | None = None) -> None:
        """Makes the membership lapse.

        Args:
            error: Why.
            epoch: The membership that the error concerns. None: the current one.
        """
        if self.valid and not self.over.is_set() and epoch in (None, self._epoch):
            logger.warning("trainer %r is no longer a member of run %r: %s", self._trainer, self._run, error)
            self._lapse = error
            self.over.set()
            self.when_lapsed()

    def end(self, error: ShardwellError) -> None:
        """Ends the membership for good."""
        if self._ended is None and (not self.over.is_set() or self._lapse is not None):
            logger.error("trainer %r is no longer a member of run %r: %s", self._trainer, self._run, error)
            self._ended = error
            self.over.set()
            self.when_ended()

    def close(self, error: ShardwellError) -> None:
        """Ends the membership for good at the trainer's own wish: without a callback."""
        self._ended = error
