"""Gathers units for the work item of the step in flight, or the newest version for an item that no longer counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from shardwell.data_plane.abandoned import read_newest
from shardwell.data_plane.fetches import Alternative, Fetches
from shardwell.data_plane.in_place import wait_for_any
from shardwell.data_plane.node_gathers import NodeGathers
from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell.memory.device_copies import Completable
from shardwell.session.membership import Membership
from shardwell.session.step_state import StepState
from shardwell_wire.errors import StaleEpochError, VersionGoneError
from shardwell_wire.layout import UnitLayout


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
        vector: Completable | None = None,
    ) -> Future[int]:
        """See ``ParameterStore.gather``."""
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

    def present_version(self, unit_index: int) -> int | None:
        """See ``ParameterStore.present_version``."""
        self._membership.check()
        version = self._state.number
        is_present = not self._computes_in_vain() and self._fetches.is_present(self._units[unit_index], version)
        return version if is_present else None

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
            current.spoil()  # the shard has moved, and its former owner has released the memory that was read
        return True

    def _computes_in_vain(self) -> bool:
        """True if what the training thread computes now does not count: its work item or membership is over."""
        return self._membership.lapsed or ((current := self._state.current) is not None and current.abandoned)

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
            return shard.fetch_cast(version, layout, target)

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
