"""Shows gradients to the other trainers of a node, in shared memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from shardwell.data_plane.gradient_exchange import Shown, WholeGradient
from shardwell.data_plane.node_group import NodeRendezvous, Round
from shardwell.data_plane.node_rounds import PATIENCE_S, NodeRounds
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell.data_plane.shared_gradients import SharedGradients

logger = logging.getLogger(__name__)


class NodeExchange:
    """An ``Exchange`` in shared memory. If a member is late or has another unit, the round does not take place.

    Args:
        rendezvous: The rendezvous of the members. Closed with this object.
        memory: The memory in which the members show each other their gradients.
        patience_s: How long to wait for live members.
    """

    def __init__(self, rendezvous: NodeRendezvous, memory: SharedGradients, *, patience_s: float = PATIENCE_S) -> None:
        self._rendezvous, self._memory, self._patience_s = rendezvous, memory, patience_s
        self._rounds = NodeRounds(rendezvous, name="sum", alone="pushes its own gradients", patience_s=patience_s)

    @property
    def active(self) -> bool:
        """See ``Exchange``."""
        return not self._rounds.left

    def start_round(self, version: int) -> Round | None:
        """See ``Exchange``."""
        return self._rounds.next(version)

    def offer(
        self,
        this_round: Round,
        unit: RemoteUnit,
        own: WholeGradient,
        copied: Callable[[], None],
        sent: Callable[[], None],
    ) -> None:
        """See ``Exchange``. The gradient is written to shared memory by ``collect``, when a slot is free."""
        sent()

    def collect(
        self, this_round: Round, unit: RemoteUnit, own: WholeGradient, is_over: Callable[[], bool]
    ) -> Sequence[Shown] | None:
        """See ``Exchange``."""
        if is_over():
            self._rounds.skip(this_round.version)
        if self._rounds.is_closed(this_round.version):
            return None
        if not self._rendezvous.wait_for(lambda: self._memory.is_free(this_round), self._patience_s):
            self._rounds.cancel(this_round)
            return None
        try:
            self._memory.write(this_round, unit.layout, own)
        except OSError as error:  # shared memory is full
            logger.warning("node group: the gradient of %s cannot be shared: %s", unit.layout.unit, error)
            self._rounds.cancel(this_round)
            return None
        return self._memory.read_all(this_round, unit.layout) if self._rounds.agree(this_round, unit.index) else None

    def end_round(self, this_round: Round) -> None:
        """See ``Exchange``."""
        self._memory.end_round(this_round)

    def finish_version(self, version: int) -> None:
        """See ``Exchange``. Nothing to do: a member that expects more waits for a limited time."""

    def skip(self, version: int) -> None:
        """See ``Exchange``."""
        self._rounds.skip(version)

    def leave(self, reason: BaseException | str) -> None:
        """See ``Exchange``."""
        self._rounds.leave(reason)

    def stop(self) -> None:
        """See ``Exchange``."""
        self._rounds.left = True
        self._rendezvous.leave()

    def close(self) -> None:
        """See ``Exchange``."""
        self._rendezvous.close()
