"""Rounds of one kind of exchange between the trainers of a node, and what happens when the trainers disagree.

Note: [Order of rounds]
    Members exchange units in the order in which their training threads asked for them, numbered from 0 in every
    version. If a member is late or asks for a different unit, the round is cancelled for all members, and each of them
    works alone for the rest of the version. They exchange again from the next version.
"""

from __future__ import annotations

import logging
from typing import Protocol

from shardwell.data_plane.node_group import Outcome, Round

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long to wait for live members. If they arrive later, each member works alone for the rest of the version."""

MAX_FAILURES = 3
"""Consecutive versions with a cancelled round after which the group is disabled."""

_AFTER_ALL = 1 << 62
"""Number of a round after all rounds of a version."""


class Members(Protocol):
    """The members, which decide together whether a round takes place. See ``NodeRendezvous``."""

    def decide(self, this_round: Round, unit: int, patience_s: float) -> Outcome: ...

    def cancel(self, this_round: Round) -> Outcome: ...

    def leave(self) -> None: ...


class NodeRounds:
    """The rounds of one member. See Note: [Order of rounds].

    Args:
        members: The members of the group.
        name: What a round exchanges, for log lines.
        alone: What a trainer does without the group, for log lines.
        patience_s: How long to wait for live members.
    """

    def __init__(self, members: Members, *, name: str, alone: str, patience_s: float = PATIENCE_S) -> None:
        self._members, self._name, self._alone, self._patience_s = members, name, alone, patience_s
        self._last = Round(-1, 0)
        self._separate_version, self._num_failures = -1, 0
        """The last version with a cancelled round, and the number of such versions in a row."""
        self.left = False
        """True if this member works alone for good."""

    def next(self, version: int) -> Round | None:
        """Starts the next round of a version. None: this member works alone. Called by the training thread."""
        number = self._last.number + 1 if self._last.version == version else 0
        self._last = Round(version, number)
        return None if self.is_closed(version) else self._last

    def is_closed(self, version: int) -> bool:
        """True if this member works alone for the rest of a version, or for good."""
        return self.left or self._separate_version == version

    def agree(self, this_round: Round, unit: int) -> bool:
        """Waits for the other members; returns whether all of them exchange the unit in this round.

        Raises:
            MemberGoneError, OSError: A member is gone, or the members cannot agree. This member has left the group.
        """
        if self.is_closed(this_round.version):
            return False
        try:
            if self._members.decide(this_round, unit, self._patience_s) is Outcome.EXCHANGE:
                return True
        except BaseException as error:
            self.leave(error)
            raise
        if not self.is_closed(this_round.version):
            self._separate(this_round)
        return False

    def cancel(self, this_round: Round) -> None:
        """Cancels a round that this member cannot take part in, and works alone for the rest of the version.

        The other members do not wait for it then.
        """
        self._separate_version = this_round.version
        try:
            self._members.cancel(this_round)
        except OSError as error:
            self.leave(error)

    def skip(self, version: int) -> None:
        """Works alone for the rest of a version. Called in any thread."""
        if not self.is_closed(version):
            self.cancel(Round(version, _AFTER_ALL))

    def leave(self, reason: BaseException | str) -> None:
        """Leaves the group for good."""
        if not self.left:
            self.left = True
            why = str(reason).partition("\n")[0] or type(reason).__name__
            logger.warning("node group: this trainer %s from now on: %s", self._alone, why)
            self._members.leave()

    def _separate(self, this_round: Round) -> None:
        """Works alone for the rest of the version, and for good after ``MAX_FAILURES``."""
        version = this_round.version
        self._num_failures = self._num_failures + 1 if self._separate_version == version - 1 else 1
        self._separate_version = version
        if self._num_failures >= MAX_FAILURES:
            self.leave(
                f"in {MAX_FAILURES} consecutive steps its trainers asked for different units, or one was too late"
            )
            return
        logger.warning(
            "node group: %s %d of step %d was cancelled: the trainers of this node asked for different units, or one "
            "did not arrive within %.0f s; each of them %s for the rest of the step",
            self._name,
            this_round.number,
            version,
            self._patience_s,
            self._alone,
        )
