"""Pushes gradients under the work items of the step in flight, and withdraws those of items that do not count."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import torch

from shardwell.data_plane.error_feedback import ErrorFeedback
from shardwell.data_plane.gradient_parts import GradientChecksums, GradientSample
from shardwell.data_plane.push import Pushes
from shardwell.data_plane.shard import RemoteUnit
from shardwell.data_plane.transfers import uninterrupted
from shardwell.membership.membership import Membership
from shardwell.memory.device_copies import to_host
from shardwell.step.step_state import FinishedStep, StepState, WorkItemState
from shardwell.store.run_servers import ShardServers
from shardwell.store.sums import ItemSums
from shardwell.transport.base import DIRECT
from shardwell_wire.errors import CapacityError, StaleEpochError, StepRestartedError, VersionGoneError
from shardwell_wire.v1 import coordinator_pb2

_SAMPLING_PERIOD, _SAMPLED_STEPS = 256, 4
"""The first steps of each period in which trainers report samples of their gradients. The coordinator warns if data
ranks have equal ones, because they probably read the same data."""


class ItemPushes:
    """The gradients that this trainer pushes for its work items: the ``GradientStore`` of a run.

    Args:
        membership: The membership of this trainer.
        state: State of the step in flight, which says where gradients belong.
        units: The declared units by index.
        pushes: Runs the pushes.
        servers: The servers, whose shared gradient buffers are released.
    """

    feedback: ErrorFeedback | None = None
    """Rounding errors of earlier pushes, if ``push_error_feedback`` is set."""
    sums: ItemSums | None = None
    """Adds gradients among trainers, as ``gradient_reduction`` says. None: this trainer pushes its own."""

    def __init__(
        self,
        membership: Membership,
        state: StepState,
        units: Mapping[int, RemoteUnit],
        pushes: Pushes,
        servers: ShardServers,
    ) -> None:
        self._membership, self._state, self._units = membership, state, units
        self._pushes, self._servers, self.stats = pushes, servers, pushes.stats
        self._kept_units: set[int] | None = set() if not state.number else None
        """Units of which the servers may hold gradients of earlier steps. None: any unit, because this trainer joined
        after the first step."""
        self._former_ranks = frozenset(state.items)
        """Logical ranks whose work items this trainer held in the previous step."""

    def start_step(self, finished: FinishedStep, kept_units: Collection[int]) -> None:
        """Called after a commit; see ``RunStore.start_step``."""
        before = self._kept_units
        self._kept_units = set()
        for unit in kept_units:
            if before is None or unit in before or unit in finished.pushed_units:
                self._kept_units.add(unit)
        self._former_ranks = finished.global_ranks
        self._servers.release_gradient_buffers()
        if self.feedback is not None:
            self.feedback.commit(self._state.number, finished.dp_ranks)

    def rejoin(self, *, moved: bool) -> None:
        """Called when this trainer has joined the run again; see ``RunStore.rejoin``."""
        if self.sums is not None:
            self.sums.rejoin()
        self._pushes.discard()
        if moved:
            self._servers.release_gradient_buffers()
        else:  # gradients of other items still count if this trainer had finished them
            for item in self._state.items.values():
                self._servers.release_gradient_buffers(item.item.dp_rank)
        if self.feedback is not None:
            self.feedback.restart(self._state.number, keep=not moved)
        if moved:
            self._kept_units, self._former_ranks = None, frozenset()

    def push(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See ``GradientStore.push``."""
        stats = self.stats
        with uninterrupted:  # the servers wait for every part that is counted
            started_s = time.perf_counter() - stats.push_wait_s
            try:
                membership = self._membership
                if not membership.valid:
                    membership.check()
                unit, current = self._units[unit_index], self._state.current or self._state.require_current()
                if current.is_over or not membership.valid:
                    self.abandon_sums()
                    return
                if self.sums is not None and not self.sums.allows_part(current, unit):
                    return
                if (headers := current.headers) is None:
                    headers = current.headers = current.make_headers(
                        membership.context(self._state.number, current.item),
                        partial(self.excuses, current, current.key),
                        membership.pp_rank,
                        membership.cp_rank,
                    )
                indices = []
                for index, _ in gradients:
                    indices.append(index)
                header, excuse = headers.start_part(unit_index, indices), headers.excuse
                if self._state.number % _SAMPLING_PERIOD < _SAMPLED_STEPS and membership.world.dp > 1:
                    current.sample = current.sample or GradientSample()
                    current.sample.add(gradients)
                if self.feedback is not None and gradients:
                    copies, copied = to_host([gradient for _, gradient in gradients])
                    copied()
                    whole = dict(zip(indices, copies, strict=True))
                    encoded = self.feedback.encode(unit_index, unit.layout, current.item.dp_rank, whole)
                    if encoded is not None:
                        self._pushes.push_encoded(unit, header, encoded, excuse, route=DIRECT)
                        return
                if self.sums is None or not self.sums.push(current, unit, header, gradients, excuse):
                    self._pushes.push(unit, header, gradients, excuse, route=DIRECT)
            finally:
                stats.push_copy_s += time.perf_counter() - stats.push_wait_s - started_s

    def push_buffers(
        self, unit: RemoteUnit, step: int, item: WorkItemState, buffers: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Starts to push new values of buffers. A failure is raised by the next push or drain.

        Args:
            unit: A unit of buffers.
            step: The step in flight.
            item: Work item of logical rank 0.
            buffers: ``(layout index, value)`` by increasing index. The values do not change until the commit.
        """
        self._membership.check()
        if item.is_over or self._membership.lapsed:
            return
        with uninterrupted:  # the servers wait for every part that is counted
            context = self._membership.context(step, item.item)
            headers = item.make_headers(context, partial(self.excuses, item, item.key))
            values = [(index, tensor.reshape(-1)) for index, tensor in buffers]
            self._pushes.push(unit, headers.start_part(unit.index), values, headers.excuse)

    def excuses(self, item: WorkItemState, key: tuple[int, int], error: BaseException) -> bool:
        """Returns whether a failed push does not matter, because the attempt of its item is over. In any thread."""
        # Servers reject pushes of an attempt that is over. A twin item also ends if a server has no memory.
        over = isinstance(error, StaleEpochError | VersionGoneError)
        if over or (isinstance(error, CapacityError) and item.is_twin):
            item.abandon(key)
        return self._membership.lapsed or item.is_over or item.key != key

    def streams_gradients(self, unit_index: int) -> bool:
        """See ``GradientStore.streams_gradients``."""
        return not all(shard.server.copies_gradients for shard in self._units[unit_index].shards)

    def compare(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See ``GradientStore.compare``."""
        current = self._state.require_current()
        if current.checksums is None:
            current.checksums = GradientChecksums()
        current.checksums.add(unit_index, gradients)

    def may_keep(self, unit_index: int) -> bool:
        """See ``GradientStore.may_keep``."""
        return self._kept_units is None or unit_index in self._kept_units

    def drop(self, unit_index: int, parameter_indices: Iterable[int]) -> None:
        """See ``GradientStore.drop``."""
        self._state.drop(unit_index, parameter_indices)

    def push_drops(self, current: WorkItemState) -> None:
        """Sends the dropped gradients of a work item that no push has reported. Called at the end of the item."""
        for unit_index in sorted(current.to_drop):
            held_before = current.item.global_rank in self._former_ranks
            if current.parts[unit_index] or self.may_keep(unit_index) or not held_before:
                self.push(unit_index, [])
        current.to_drop.clear()
        if self.sums is not None:
            self.sums.finish_item()

    def abandon_sums(self) -> None:
        """Drops gradients that are not yet added to those of other trainers, because their attempts are over."""
        if self.sums is not None and not self._state.is_without_effect:
            self.sums.abandon()

    def drain(self) -> None:
        """Waits until every push is acknowledged; raises the first error."""
        self._pushes.drain()

    def discard(self, *, include_empty: bool = False) -> None:
        """Withdraws the pushes of the current item, or between items those of all items of the step.

        A finished item stays finished: its rank then has no gradient in the step.

        Args:
            include_empty: Also restart finished items without a push.
        """
        current = self._state.current
        if self._membership.lapsed or self._state.is_without_effect:
            return
        for item in [current] if current else list(self._state.items.values()):
            if item.is_twin:
                item.abandon(item.key)  # the trainer of the late work item computes it, too
            if item.is_over:
                self._discard()
            elif item.parts or (include_empty and item.is_finished):
                self.restart(item)

    def restart(self, item: WorkItemState) -> None:
        """Restarts a work item whose gradients must not count."""
        self._discard()
        step, rank = self._state.number, item.item.global_rank
        request = coordinator_pb2.ResetWorkRequest(
            context=self._membership.context(step, item.item),
            trainer=self._membership.trainer,
            global_rank=rank,
            attempt=item.item.attempt,
            item_number=item.item.number,
        )
        try:
            response: coordinator_pb2.ResetWorkResponse = self._membership.poll(
                "ResetWork",
                request,
                lambda answer: answer.HasField("item"),
                what=f"the servers to drop the gradient of rank {rank} in step {step}",
                with_replica=True,
            )
        except StepRestartedError:  # in an asynchronous run: the item is computed again from another version
            item.give_up()
            return
        self._state.restart_item(item, response.item)
        self._servers.release_gradient_buffers(item.item.dp_rank)
        if self.feedback is not None:
            self.feedback.reset(item.item.dp_rank)

    def _discard(self) -> None:
        self.abandon_sums()  # otherwise a push may wait for other trainers
        self._pushes.discard()

    @property
    def can_compute_twins(self) -> bool:
        """True if a work item gives the same bits here as on another trainer.

        With error feedback, gradients depend on the rounding errors that each trainer has stored.
        """
        return self.feedback is None

    @property
    def may_have_twins(self) -> bool:
        """True if another trainer may compute an item of this one, too. A twin item would void the sums of the item."""
        return self.sums is None or not self.sums.active

    def forget_pushes(self, item: WorkItemState) -> None:
        """Forgets the pushes of an attempt that is over. Call it before the item's next attempt."""
        self._discard()
        self._servers.release_gradient_buffers(item.item.dp_rank)
        if self.feedback is not None:
            self.feedback.reset(item.item.dp_rank)
