"""Decides which gradients of a trainer's work items are added among trainers, before they are pushed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from shardwell.data_plane.pushes_in_flight import Excuse
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell.session.gradient_routes import GradientRoutes
from shardwell.session.membership import Membership
from shardwell.session.step_state import ItemAttempt, StepState, WorkItemState
from shardwell.transport.push_header import PartHeader
from shardwell.transport.route_stats import HIERARCHICAL
from shardwell_wire.errors import StaleEpochError

logger = logging.getLogger(__name__)


class ItemSums:
    """Hands gradients to ``GradientSums`` if the other trainers of the group are expected to do the same.

    They do so in the first attempt at their own items, which ``step.batches`` yields: it can yield them again when a
    sum is void. Gradients of a unit that is pushed in several parts are added on the servers, because the parts of each
    rank are added first.

    Args:
        membership: The membership of this trainer.
        state: State of the step in flight.
        routes: The routes of units, and the groups that add their gradients.
    """

    def __init__(self, membership: Membership, state: StepState, routes: GradientRoutes) -> None:
        self._membership, self._state, self.routes = membership, state, routes
        self._in_parts: set[int] = set()
        """Units that were pushed in several parts."""

    @property
    def active(self) -> bool:
        """False if this trainer pushes its own gradients for good."""
        return self.routes.active

    @property
    def node_summed_bytes(self) -> int:
        """Bytes of gradients of other trainers of this node that this trainer has added."""
        node = self.routes.groups.get(HIERARCHICAL)
        return node.summed_bytes if node is not None else 0

    def allows_part(self, current: WorkItemState, unit: RemoteUnit) -> bool:
        """Called before a part is pushed; returns False if it must not be, because the item has to be restarted."""
        if current.parts[unit.index]:
            self._in_parts.add(unit.index)
            if unit.index in current.shared_units:
                logger.info(
                    "unit %r is pushed in several parts: its gradients are added on the servers from now on, and the "
                    "work of rank %d is computed again; call set_requires_gradient_sync(False) before all but the last "
                    "backward",
                    unit.layout.unit,
                    current.item.global_rank,
                )
                current.spoil()
                self.skip()
                return False
        return True

    def push(
        self,
        current: WorkItemState,
        unit: RemoteUnit,
        header: PartHeader,
        gradients: Sequence[tuple[int, torch.Tensor]],
        excuse: Excuse,
    ) -> bool:
        """Starts to add the gradients to those of the other trainers; returns False if this trainer pushes its own."""
        if not self._is_first_attempt(current):
            self.skip()
            return False
        if header.part or header.dropped_indices or unit.index in self._in_parts or not _can_be_summed(unit, gradients):
            return False
        if (group := self.routes.choose(unit)) is None:
            return False
        if group.route == HIERARCHICAL and any(shard.server.copies_gradients for shard in unit.shards):
            return False  # gradients go to a server of this host through shared memory
        if (this_round := group.start_round(self._state.number)) is None:
            return False
        attempt = ItemAttempt(current, current.key)

        def excuse_sum(error: BaseException) -> bool:
            if isinstance(error, StaleEpochError):
                attempt.spoil()  # a rank of the sum has another attempt, possibly not this trainer's
            return excuse(error)

        current.shared_units.add(unit.index)
        group.push(this_round, unit, header, gradients, attempt, excuse_sum)
        return True

    def _is_first_attempt(self, current: WorkItemState) -> bool:
        (own, *_), item = self._membership.rank_assignments, current.item
        is_own = item.global_rank == own.coordinates.global_rank
        return is_own and not item.attempt and not item.copy and self._state.in_batches

    def finish_item(self) -> None:
        """Called when all gradients of a work item are pushed. The other trainers expect no more in this step."""
        self.routes.for_each(lambda group: group.finish_version(self._state.number))

    def skip(self) -> None:
        """Pushes own gradients for the rest of the step. The other trainers do not wait for this one."""
        self.routes.for_each(lambda group: group.skip(self._state.number))

    def abandon(self) -> None:
        """Drops the gradients in flight, whose attempts are over, and skips the rest of the step."""
        self.routes.for_each(lambda group: group.abandon(self._state.number))

    def leave(self, reason: str) -> None:
        """Pushes own gradients from now on."""
        self.routes.for_each(lambda group: group.leave(reason))

    def close(self) -> None:
        """See ``GradientSums.close``."""
        self.routes.for_each(lambda group: group.close())


def _can_be_summed(unit: RemoteUnit, gradients: Sequence[tuple[int, torch.Tensor]]) -> bool:
    """True if gradients of one pipeline stage are added in their own dtype."""
    # Servers add 16-bit gradients in float32 and round once.
    has_wide = bool(gradients) and all(gradient.element_size() >= 4 for _, gradient in gradients)
    in_one_stage = len(unit.layout.pp_ranks) == 1
    return has_wide and in_one_stage
