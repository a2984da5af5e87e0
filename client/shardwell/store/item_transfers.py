"""Gathers and pushes of the work item of the step in flight.

An item that no longer counts gathers the newest version, and its pushes are withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch

from shardwell.data_plane.error_feedback import ErrorFeedback
from shardwell.data_plane.fetch import Alternative, Fetches, read_newest, wait_for_any
from shardwell.data_plane.push import Excuse, Pushes
from shardwell.data_plane.shard import RemoteShard, RemoteUnit
from shardwell.data_plane.transfers import uninterrupted
from shardwell.membership.membership import Membership
from shardwell.memory.device_copies import to_host
from shardwell.module.flat_vector import FlatVector
from shardwell.peers.node_gathers import NodeGathers
from shardwell.step.step_state import FinishedStep, PartHeaders, StepState, WorkItemState
from shardwell.store.run_servers import ShardServers
from shardwell.store.sums import ItemSums
from shardwell.transport.route_stats import DIRECT
from shardwell_wire.errors import CapacityError, StaleEpochError, StepRestartedError, VersionGoneError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import coordinator_pb2


class ItemGathers:
    """The units that this trainer gathers for its work items.

    Args:
        membership: The membership of this trainer.
        state: State of the step in flight, which says which version to gather.
        units: The declared units by index.
        fetches: Runs the fetches.
        wait_limit_s: How long to wait for a version.
    """

    node: NodeGathers | None = None
    """Gathers units together with the other trainers of the node, if ``node_group`` is set."""

    def __init__(
        self,
        membership: Membership,
        state: StepState,
        units: Mapping[int, RemoteUnit],
        fetches: Fetches,
        wait_limit_s: float,
    ) -> None:
        self._membership, self._state, self._units = membership, state, units
        self._fetches, self._wait_limit_s = fetches, wait_limit_s

    def gather(
        self,
        unit_index: int,
        target: memoryview,
        *,
        exact: bool = False,
        layout: UnitLayout | None = None,
        vector: FlatVector | None = None,
    ) -> Future[int]:
        """See ``ParameterStore.gather``."""
        if not self._membership.valid:
            self._membership.check()
        if self._computes_in_vain():
            return self._gather_newest(unit_index, target, exact=exact, layout=layout)
        version = self._state.number

        def alternative(error: BaseException) -> Future[int] | None:
            if isinstance(error, VersionGoneError | StaleEpochError) and self._loses_version():
                return self._gather_newest(unit_index, target, exact=exact, layout=layout)
            return None

        def start(alternative: Alternative | None) -> Future[int]:
            unit = self._units[unit_index]
            if self.node is not None and vector is not None and not exact and self._is_shared_in_node(unit):
                return self.node.gather(unit, version, target, layout or unit.layout, vector, alternative)
            return self._fetches.gather(unit, version, target, layout, exact=exact, alternative=alternative)

        if not self._state.asynchronous:
            return start(alternative)

        def again(error: BaseException) -> Future[int] | None:
            # The commit of another item can break a read of the newest version while the servers move it to the
            # versions that they hold. They have it there.
            return start(alternative) if isinstance(error, VersionGoneError | StaleEpochError) else None

        return start(again)

    def await_version(self, unit_index: int) -> Callable[[], int]:
        """See ``ParameterStore.await_version``."""
        self._membership.check()
        unit, limit_s = self._units[unit_index], self._wait_limit_s
        assert unit.vector is not None
        any_version = partial(wait_for_any, unit.vector, self._membership.check, limit_s)
        if self._computes_in_vain():
            return any_version
        version = self._fetches.await_version(unit, self._state.number)

        def version_or_any() -> int:
            try:
                return version()
            except (VersionGoneError, StaleEpochError):
                if not self._loses_version():
                    raise
            return any_version()

        return version_or_any

    def abandons_work(self) -> bool:
        """See ``ParameterStore.abandons_work``."""
        self._membership.ask()
        if self._membership.lapsed:
            return True
        current = self._state.current
        if not self._state.in_batches or current is None:
            return False
        if self._membership.committed_step > self._state.number:
            current.abandon(current.key)  # its step was committed with the work of another trainer
        else:
            # The shard has moved, and its former owner has released the memory that was read.
            current.spoil(current.key)
        return True

    def _computes_in_vain(self) -> bool:
        """True if what the training thread computes now does not count: its work item or membership is over."""
        return self._membership.lapsed or ((current := self._state.current) is not None and current.is_over)

    def _loses_version(self) -> bool:
        """Called when a gather failed: returns whether its version is gone because the work item does not count."""
        if self._computes_in_vain():
            return True
        return self.abandons_work()

    def _gather_newest(
        self, unit_index: int, target: memoryview, *, exact: bool, layout: UnitLayout | None
    ) -> Future[int]:
        """Starts to fetch the newest version, for a work item that does not count any more."""

        def read(shard: RemoteShard, version: int | None) -> int:
            if layout is None or layout == self._units[unit_index].layout:
                return shard.fetch(version, target[shard.start_bytes : shard.stop_bytes], exact=exact)
            return shard.prepare_fetch_cast(version, layout, target)()

        def gather() -> int:
            return read_newest(lambda: self._units[unit_index], read, self._membership.check, self._wait_limit_s)

        return self._fetches.run(gather)

    def _is_shared_in_node(self, unit: RemoteUnit) -> bool:
        """True if the other trainers of the node are expected to gather the unit now.

        False for work items of lost trainers, for later attempts, and where an exchange would save nothing.
        """
        current, (rank_assignment, *_) = self._state.current, self._membership.rank_assignments
        return (
            current is not None
            and current.item.global_rank == rank_assignment.coordinates.global_rank
            and current.item.attempt == 0
            and all(shard.is_streamed for shard in unit.shards)
        )


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What all pushes of one attempt at a work item have in common."""

    step: int
    key: tuple[int, int]
    """``WorkItemState.key``."""
    headers: PartHeaders
    excuse: Excuse


class ItemPushes:
    """The gradients that this trainer pushes for its work items.

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
        self._pushes, self._servers = pushes, servers
        self._kept_units: set[int] | None = set() if not state.number else None
        """Units of which the servers may hold gradients of earlier steps. None: any unit, because this trainer joined
        after the first step."""
        self._former_ranks = frozenset(state.items)
        """Logical ranks whose work items this trainer held in the previous step."""
        self._attempt: _Attempt | None = None
        """The attempt of the last push."""

    def start_step(self, finished: FinishedStep, kept_units: Collection[int]) -> None:
        """Called after a commit; see ``RunStore.start_step``."""
        self._kept_units = {unit for unit in kept_units if unit in finished.pushed_units or self.may_keep(unit)}
        self._former_ranks = finished.global_ranks
        self._servers.release_gradient_buffers()
        if self.feedback is not None:
            self.feedback.commit(self._state.number, finished.dp_ranks)

    def rejoin(self, *, moved: bool) -> None:
        """Called when this trainer has joined the run again; see ``RunStore.rejoin``."""
        if self.sums is not None:
            self.sums.abandon()
            self.sums.leave("this trainer has joined the run again")
        self._pushes.discard()
        self._servers.release_gradient_buffers()
        if self.feedback is not None:
            self.feedback.restart(self._state.number, keep=not moved)
        if moved:
            self._kept_units, self._former_ranks = None, frozenset()

    def push(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Starts to push one part of the current item's gradient; see ``ParameterStore.push``."""
        with uninterrupted, self._pushes.stats.pushing:  # the servers wait for every part that is counted
            self._push(unit_index, gradients)

    def _push(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        is_lapsed = not self._membership.valid
        if is_lapsed:
            self._membership.check()
        unit, current = self._units[unit_index], self._state.require_current()
        if current.is_over or is_lapsed:
            self.abandon_sums()
            return
        if self.sums is not None and not self.sums.allows_part(current, unit):
            return
        attempt = self._attempt_at(current)
        header = attempt.headers.start_part(unit_index, [index for index, _ in gradients])
        excuse = attempt.excuse
        if self.feedback is not None and gradients:
            copies, copied = to_host([gradient for _, gradient in gradients])
            copied()
            whole = {index: flat for (index, _), flat in zip(gradients, copies, strict=True)}
            encoded = self.feedback.encode(unit_index, unit.layout, current.item.dp_rank, whole)
            if encoded is not None:
                self._pushes.push_encoded(unit, header, encoded, excuse, route=DIRECT)
                return
        if self.sums is None or not self.sums.push(current, unit, header, gradients, excuse):
            self._pushes.push(unit, header, gradients, excuse, route=DIRECT)

    def _attempt_at(self, current: WorkItemState) -> _Attempt:
        """Returns what the pushes of the present attempt at a work item have in common."""
        step, key, found = self._state.number, current.key, self._attempt
        if found is None or found.headers.state is not current or (found.step, found.key) != (step, key):
            headers = current.headers(self._membership.context(step, current.item), self._membership.pp_rank)
            found = self._attempt = _Attempt(step, key, headers, partial(self.excuses, current, key))
        return found

    def excuses(self, item: WorkItemState, key: tuple[int, int], error: BaseException) -> bool:
        """Returns whether a failed push does not matter, because the attempt of its item is over. In any thread."""
        # Servers reject pushes of an attempt that is over. A twin item also ends if a server has no memory.
        over = isinstance(error, StaleEpochError | VersionGoneError)
        if over or (isinstance(error, CapacityError) and item.is_twin):
            item.abandon(key)
        return self._membership.lapsed or item.is_over or item.key != key

    def may_keep(self, unit_index: int) -> bool:
        """Returns whether the servers may keep gradients of a unit from earlier steps, for another optimizer."""
        return self._kept_units is None or unit_index in self._kept_units

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
        if self.sums is not None:
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
        if self._membership.lapsed:
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
        """Waits until no push is in flight and drops their errors."""
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
