"""Decides which gradients of a trainer's work items are added within its node, before they are pushed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from shardwell.data_plane.node_sums import NodeSums
from shardwell.data_plane.pushes import Excuse
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell.session.membership import Membership
from shardwell.session.step_state import ItemAttempt, StepState, WorkItemState
from shardwell_wire.errors import StaleEpochError
from shardwell_wire.v1 import shard_pb2

logger = logging.getLogger(__name__)


class ItemSums:
    """Hands gradients to ``NodeSums`` if the other trainers of the node are expected to do the same.

    They do so in the first attempt at their own items, which ``step.batches`` yields: it can yield them again when a
    sum is void. Gradients of a unit that is pushed in several parts are added on the servers, because the parts of each
    rank are added first.

    Args:
        membership: The membership of this trainer.
        state: State of the step in flight.
        node: Adds the gradients.
    """

    def __init__(self, membership: Membership, state: StepState, node: NodeSums) -> None:
        self._membership, self._state, self._node = membership, state, node
        self._in_parts: set[int] = set()
        """Units that were pushed in several parts."""

    @property
    def active(self) -> bool:
        """False if this trainer pushes its own gradients for good."""
        return self._node.active

    @property
    def summed_bytes(self) -> int:
        """See ``NodeSums.summed_bytes``."""
        return self._node.summed_bytes

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
                self._node.skip(self._state.number)
                return False
        return True

    def push(
        self,
        current: WorkItemState,
        unit: RemoteUnit,
        header: shard_pb2.ReduceScatterHeader,
        gradients: Sequence[tuple[int, torch.Tensor]],
        excuse: Excuse,
    ) -> bool:
        """Starts to add the gradients to those of the other trainers; returns False if this trainer pushes its own."""
        if not self._node.active:
            return False
        if not self._is_first_attempt(current):
            self.skip()
            return False
        if header.part or header.dropped_indices or unit.index in self._in_parts or not _can_be_summed(unit, gradients):
            return False
        if (this_round := self._node.start_round(self._state.number)) is None:
            return False
        attempt = ItemAttempt(current, current.key)

        def excuse_sum(error: BaseException) -> bool:
            if isinstance(error, StaleEpochError):
                attempt.spoil()  # a rank of the sum has another attempt, possibly not this trainer's
            return excuse(error)

        current.shared_units.add(unit.index)
        self._node.push(this_round, unit, header, gradients, attempt, excuse_sum)
        return True

    def _is_first_attempt(self, current: WorkItemState) -> bool:
        (own, *_), item = self._membership.rank_assignments, current.item
        is_own = item.global_rank == own.coordinates.global_rank
        return is_own and not item.attempt and not item.copy and self._state.in_batches

    def skip(self) -> None:
        """Pushes own gradients for the rest of the step. The other trainers do not wait for this one."""
        self._node.skip(self._state.number)

    def leave(self, reason: str) -> None:
        """Pushes own gradients from now on."""
        self._node.leave(reason)

    def close(self) -> None:
        """See ``NodeSums.close``."""
        self._node.close()


def _can_be_summed(unit: RemoteUnit, gradients: Sequence[tuple[int, torch.Tensor]]) -> bool:
    """True if gradients of one pipeline stage travel over the network and are added in their own dtype."""
    # Servers add 16-bit gradients in float32 and round once.
    has_wide = bool(gradients) and all(gradient.element_size() >= 4 for _, gradient in gradients)
    in_one_stage = len(unit.layout.pp_ranks) == 1
    return has_wide and in_one_stage and not any(shard.server.copies_gradients for shard in unit.shards)
