"""The ``ParameterStore`` of a run: declares units and gathers them for the work items of the step in flight.

``item_pushes.py`` pushes their gradients. An item that does not count any more gathers the newest version.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

from shardwell.data_plane.error_feedback import ErrorFeedback
from shardwell.data_plane.fetch import Alternative, Fetches, read_newest, wait_for_any
from shardwell.data_plane.kept_streams import DeltaCache
from shardwell.data_plane.partition_updates import PartitionUpdates
from shardwell.data_plane.push import Pushes
from shardwell.data_plane.shard import RemoteShard, RemoteUnit, Wire
from shardwell.data_plane.transfers import TrafficStats
from shardwell.grid.replica import form_node_group
from shardwell.membership.membership import Membership
from shardwell.module.flat_vector import FlatVector
from shardwell.module.parameter_store import InitialValues
from shardwell.options import JoinConfig, TransferOptions
from shardwell.peers.node_group import NodeGathers
from shardwell.step.step_state import FinishedStep, StepState
from shardwell.store.host_relay import HostRelay
from shardwell.store.item_pushes import ItemPushes
from shardwell.store.module_buffers import RemoteBuffers
from shardwell.store.residuals import CheckpointResiduals
from shardwell.store.run_servers import ShardServers
from shardwell.store.run_units import MovableUnits, ShardMappings, UnitDeclarations, UnitMoves
from shardwell.store.sums import ItemSums
from shardwell.transport.base import DIRECT
from shardwell.transport.partition_transfers import PartitionSegment
from shardwell.transport.shared_vector import SharedVector, WrittenPages
from shardwell_wire.encoding import wire_dtypes
from shardwell_wire.errors import ShardwellError, StaleEpochError, UsageError, VersionGoneError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, coordinator_pb2

Result = TypeVar("Result")

_REACH_LIMIT_S = 60.0
"""How long a trainer that was cut off tries to reach the servers before it joins again."""

_CLOSE_LIMIT_S = 5.0
"""Seconds to wait for transfers in ``close``. A transfer ends with its connection, except while it is connecting."""


class RunStore:
    """Stores the sharded units on the run's shard servers.

    Args:
        membership: The membership of this trainer.
        config: Options of the trainer.
        state: State of the step in flight, which says what to gather and where gradients belong.
    """

    def __init__(self, membership: Membership, config: JoinConfig, state: StepState) -> None:
        self._state = state
        self._membership, self._config = membership, config
        self.join_again: Callable[[], object] = lambda: None
        """Joins the run again after the membership has lapsed. Set by ``Rejoining``."""
        self._units: dict[int, RemoteUnit] = {}
        self.traffic = TrafficStats()
        """What this trainer has transferred."""
        self._fetches = Fetches(self.traffic)
        self.gathering_together = self._fetches.together
        """See ``ParameterStore.gathering_together``."""
        self._written_pages = WrittenPages()
        background = self._background_pushes = Pushes(self.traffic, push_bytes=config.transfers.push_bytes)
        self._partition_updates = PartitionUpdates(membership.world.dp, config.waits.wait_limit_s)
        self._deltas = DeltaCache(config.transfers.delta_cache_bytes)
        self._wire = self._make_wire()
        self._rollback_count = membership.joined.rollback_count
        self.servers = ShardServers(membership, config)
        """The connections to the shard servers."""
        self.gradients = ItemPushes(membership, state, self._units, background, self.servers)
        """Pushes gradients under the work items of the step."""
        self.residuals = CheckpointResiduals(membership, self.gradients)
        """Saves the rounding errors of pushes with checkpoints."""
        self._start_error_feedback()
        self._declarations = UnitDeclarations(membership, self.servers, config.waits.wait_limit_s)
        self._must_check_model = state.number > 0
        self._model_names: dict[str, tuple[str, ...]] = {}
        """The names in the model that the run was told. Empty: those in the run."""
        self._relay = HostRelay(membership, config)
        self._mappings = ShardMappings(membership, config, self._relay, self._deltas)
        self._buffer_wire = Wire(wait_limit_s=config.waits.wait_limit_s)
        self.buffers = RemoteBuffers(
            membership, self._declarations, self.gradients, self._mappings, self._buffer_wire, self._note_declared
        )
        """Stores the run's buffers."""
        self._relocations = self.servers.relocations
        self._relay.when_found = self._relocations.recheck
        moves = UnitMoves(
            self.servers,
            (
                MovableUnits(self._units, lambda: self._wire, self._remap),
                MovableUnits(self.buffers.units, lambda: self._buffer_wire, self.buffers.remap),
            ),
        )
        self._relocations.attach(moves.connect, moves.map)
        group = form_node_group(membership, config) if config.transfers.node_group != "none" else None
        self._node = NodeGathers(group, self._fetches) if group is not None else None
        """Gathers units together with the other trainers of the node, if ``node_group`` is set."""
        if config.transfers.gradient_reduction != DIRECT:
            self.gradients.sums = ItemSums(membership, state, config, background, self._relay)

    @property
    def routes(self) -> dict[str, dict[str, str]]:
        """Route and reason of each unit whose gradient was pushed; see ``ItemSums.describe``."""
        return self.gradients.sums.describe() if self.gradients.sums is not None else {}

    @property
    def stats(self) -> dict[str, float]:
        """Counts and bytes of gathers and pushes, and seconds that the training thread waited for them."""
        return {
            **self.traffic.as_dict(),
            "received_bytes": self.servers.received_bytes + self._relay.counter.received_bytes,
            "sent_bytes": self.servers.sent_bytes + self._relay.counter.sent_bytes,
            "corrupt_transfer_count": sum(self.servers.corrupt_transfers.values()),
            **self._deltas.stats(),
            "cache_hit_bytes": self._mappings.copies.hit_bytes,
            "node_shared_bytes": self._node.shared_bytes if self._node is not None else 0,
            "node_summed_bytes": self.gradients.sums.node_summed_bytes if self.gradients.sums is not None else 0,
        }

    @property
    def has_lapsed(self) -> bool:
        """True if this trainer is no member of the run now, and may join again."""
        return self._membership.lapsed

    @property
    def transfers(self) -> TransferOptions:
        """How weights and gradients travel."""
        return self._config.transfers

    def set_wire_dtypes(self, gather_dtype: str | None, push_dtype: str | None) -> None:
        """Changes the dtypes in which 32-bit floats travel; None keeps the option of ``join``.

        Raises:
            UsageError: The session has units already, or the dtype is unknown.
        """
        before = self._config.transfers
        transfers = replace(
            before, gather_dtype=gather_dtype or before.gather_dtype, push_dtype=push_dtype or before.push_dtype
        )
        if transfers == before:
            return
        if self._units:
            raise UsageError(
                f"gather_dtype={gather_dtype!r} and push_dtype={push_dtype!r} can not be set once a session has units: "
                "pass join(transfers=shardwell.TransferOptions(...)), or set them with the first auto_wrap(memory=...)"
            )
        self._config = replace(self._config, transfers=transfers)
        self._wire = self._make_wire()
        self._start_error_feedback()

    def _make_wire(self) -> Wire:
        transfers, limit_s = self._config.transfers, self._config.waits.wait_limit_s
        gather_dtype, push_dtype = transfers.gather_dtype, transfers.push_dtype
        return Wire(
            wire_dtypes.GATHER_NAMES[gather_dtype],
            wire_dtypes.PUSH_NAMES[push_dtype],
            limit_s,
            deltas=self._deltas if self._deltas.budget_bytes else None,
        )

    def _start_error_feedback(self) -> None:
        """Starts error feedback for the dtype in which gradients travel, if it is asked for."""
        if self._config.transfers.push_error_feedback:
            self.gradients.feedback = ErrorFeedback(self._wire.push_dtype, self._wire.encoded, self._state.number)
            self._restore_residuals()

    def _restore_residuals(self) -> None:
        dp_ranks = {state.item.dp_rank for state in self._state.items.values()}
        self.residuals.restore(self._membership.joined.checkpoint_url, dp_ranks)

    def start_step(self, finished: FinishedStep, kept_units: Collection[int] = ()) -> None:
        """Called after a commit, when the state has moved to the next step and no transfer is in flight.

        Args:
            finished: The step that was committed.
            kept_units: Units whose gradients the commit kept for another optimizer, if there are any.
        """
        self.gradients.start_step(finished, kept_units)
        if self.gradients.feedback is not None:
            self.residuals.start_step()
        kept, before = len(self._state.items), len(finished.global_ranks)
        if kept < before:
            self._partition_updates.drop_cache()
            self.servers.free_gradient_buffers(kept, before)

    def declare(self, layout: UnitLayout, initial_values: InitialValues) -> int:
        """See ``ParameterStore.declare``. Returns once the run has initial values for the unit."""

        def declare() -> int:
            unit = self._declarations.declare(layout, initial_values, self._state.number, self._wire)
            self._units[unit.index] = self._mappings.map(unit, self._config.transfers.gather_dtype)
            self._note_declared(unit)
            return unit.index

        return self.outlasting_lapses(declare)

    def set_model_names(self, names: Mapping[str, tuple[str, ...]]) -> None:
        """Tells the run the names in the model of its parameters and buffers, if they have changed.

        Args:
            names: See ``model_names``.
        """
        new = {**dict.fromkeys(self._model_names, ()), **names}
        if self._units and new != self._model_names:
            layout = next(iter(self._units.values())).layout
            self.outlasting_lapses(lambda: self._declarations.set_model_names(layout, new, self._state.number))
            self._model_names = new

    def outlasting_lapses(self, action: Callable[[], Result]) -> Result:
        """Runs an action outside of a step's work. Repeats it after this trainer has joined the run again.

        The membership may lapse during the action, for example if the run is rolled back. A trainer that shares its
        work item with others does not join alone: ``Session.run_replica`` forms the replica again.
        """
        while True:
            try:
                return action()
            except ShardwellError:
                if not self._membership.lapsed or self._membership.world.replica_size > 1:
                    raise
            self.join_again()

    def check_model(self) -> None:
        """Checks once, if this trainer has joined after the first commit, that its model has all units of the run.

        Raises:
            UnitMismatchError: It lacks some.
        """
        if self._must_check_model:
            self._declarations.require_all(self._units.keys() | self.buffers.units.keys())
            self._must_check_model = False

    def _note_declared(self, unit: RemoteUnit) -> None:
        """Has the shards of a new unit moved if they have moved while the unit was declared."""
        if unit.placement < self._membership.placement or not self.servers.are_open(unit.shards):
            self._relocations.recheck()

    def _remap(self, unit: RemoteUnit, moved: Sequence[int], wait: bool) -> RemoteUnit:
        self._mappings.remap(unit, moved, self._config.transfers.gather_dtype, wait=wait)
        return unit

    # ---- gathers ----

    def gather(
        self,
        unit_index: int,
        target: memoryview | None,
        *,
        exact: bool = False,
        layout: UnitLayout | None = None,
        vector: FlatVector | None = None,
        is_repeated: bool = False,
    ) -> Future[int]:
        """See ``ParameterStore.gather``. ``is_repeated``: whether this gather replaces one that has failed."""
        if not self._membership.valid:
            self._membership.check()
        current = self._state.current
        if self._membership.lapsed or (current is not None and current.is_over):
            return self._gather_newest(unit_index, _buffer(target, vector), exact=exact, layout=layout)

        def alternative(error: BaseException) -> Future[int] | None:
            if not isinstance(error, VersionGoneError | StaleEpochError):
                return None
            if self._state.asynchronous and not is_repeated:
                # The commit of another item can break a read of the newest version while the servers move it to the
                # versions that they hold. They have it there.
                return self.gather(unit_index, target, exact=exact, layout=layout, vector=vector, is_repeated=True)
            if not self._loses_version():
                return None
            return self._gather_newest(unit_index, _buffer(target, vector), exact=exact, layout=layout)

        unit, version = self._units[unit_index], self._state.number
        if self._node is not None and vector is not None and not exact and self._is_shared_in_node(unit):
            buffer = _buffer(target, vector)
            return self._node.gather(unit, version, buffer, layout or unit.layout, vector, alternative)
        if target is None:
            assert vector is not None
            return self._gather_to_device(unit, version, vector, layout, alternative)
        return self._fetches.gather(unit, version, target, layout, exact=exact, alternative=alternative)

    def _gather_to_device(
        self,
        unit: RemoteUnit,
        version: int,
        vector: FlatVector,
        layout: UnitLayout | None,
        alternative: Alternative | None,
    ) -> Future[int]:
        """Starts to fetch a unit to a GPU: from registered memory if possible, otherwise through a receive buffer."""
        if all(shard.is_registered for shard in unit.shards):
            return self._fetches.gather_to_device(unit, version, vector.copier(unit.layout), alternative)
        if self._wire.gather_dtype == wire_dtypes.AS_STORED:  # the GPU casts
            return self._fetches.gather(unit, version, vector.receive_buffer(unit.layout), alternative=alternative)
        return self._fetches.gather(unit, version, vector.receive_buffer(), layout, alternative=alternative)

    def gather_average(self, unit_index: int, target: memoryview, version: int | None = None) -> None:
        """See ``ParameterStore.gather_average``."""
        self._membership.check()
        wanted = self._state.number if version is None else version
        for shard in self._units[unit_index].shards:
            shard.fetch_average(wanted, target[shard.start_bytes : shard.stop_bytes], member=version is None)

    def in_place(self, unit_index: int) -> SharedVector | None:
        """See ``ParameterStore.in_place``."""
        return self._units[unit_index].vector

    def share_on_host(self, unit_index: int) -> bool:
        """See ``ParameterStore.share_on_host``."""
        unit = self._units[unit_index]
        if self._state.asynchronous:
            return False  # the trainers of a host read different versions
        if unit.vector is None:
            unit = self._mappings.share_on_host(unit, self._config.transfers.gather_dtype)
            self._units[unit_index] = unit
        return unit.vector is not None or not unit.layout.size_bytes

    def present_version(self, unit_index: int) -> int | None:
        """See ``ParameterStore.present_version``."""
        if not self._membership.valid:
            self._membership.check()
            return None  # a lapsed trainer computes in vain
        current, version = self._state.current, self._state.number
        if current is not None and current.is_over:
            return None
        return version if self._fetches.is_present(self._units[unit_index], version) else None

    def wrote_in_place(self) -> bool:
        """See ``ParameterStore.wrote_in_place``."""
        pages = []
        for unit in self._units.values():
            if unit.vector is not None:
                pages.append(unit.vector.pages)
        return bool(pages) and self._written_pages.exist(pages)

    def fetches_in_place(self) -> bool:
        """See ``ParameterStore.fetches_in_place``."""
        return self._mappings.has_copies

    def await_version(self, unit_index: int) -> Callable[[], int]:
        """See ``ParameterStore.await_version``."""
        self._membership.check()
        unit, limit_s = self._units[unit_index], self._config.waits.wait_limit_s
        assert unit.vector is not None
        any_version = partial(wait_for_any, unit.vector, self._membership.check, self._relocations.recheck, limit_s)
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
            return read_newest(
                lambda: self._units[unit_index], read, self._membership.check, self._config.waits.wait_limit_s
            )

        return self._fetches.run(gather)

    def _is_shared_in_node(self, unit: RemoteUnit) -> bool:
        """True if the other trainers of the node are expected to gather the unit now.

        False for work items of lost trainers, for later attempts, and where an exchange would save nothing.
        """
        current, ranks = self._state.current, self._membership.rank_assignments
        return (
            current is not None
            and bool(ranks)  # a spare has none
            and current.item.global_rank == ranks[0].coordinates.global_rank
            and current.item.attempt == 0
            and all(shard.is_streamed for shard in unit.shards)
        )

    # ---- steps ----

    def reach_servers(self) -> None:
        """Waits for a limited time until this trainer reaches all servers of the run, before it joins again.

        A trainer that is still cut off would get work that it cannot do.
        """
        self._relocations.try_settle(_REACH_LIMIT_S)

    def rejoin(self, joined: coordinator_pb2.JoinResponse, *, moved: bool) -> None:
        """Called when this trainer has joined the run again and the state has the new items.

        Args:
            joined: The coordinator's answer.
            moved: Whether the run is at another step, or was rolled back.
        """
        rolled_back = joined.rollback_count != self._rollback_count
        if rolled_back:
            self._rollback_count = joined.rollback_count
            self._mappings.start_over(joined.rollback_count)
            self._relocations.refresh()
        try:
            self._relocations.settle()
        finally:
            if rolled_back:
                # This is not done earlier: until now, a former owner that is cut off may have sent versions that do
                # not count.
                self._forget_streams()
        self.gradients.rejoin(moved=moved)
        if moved:
            self._restore_residuals()
        self._partition_updates.drop_cache()
        if self._node is not None:
            self._node.leave("this trainer has joined the run again")

    def _forget_streams(self) -> None:
        for unit in self._units.values():
            for shard in unit.shards:
                shard.forget()

    def forget_units(self) -> None:
        """Forgets all units, because the model is going to be built again. Call it after ``rejoin``."""
        self._forget_streams()
        self._units.clear()
        self.buffers.units.clear()
        self._must_check_model = self._state.number > 0

    def update_partitions(
        self, work: coordinator_pb2.PartitionWork, update: Callable[[int, PartitionSegment], None], *, keep_bytes: float
    ) -> None:
        """Reads, updates and stages the optimizer partitions of one logical rank; see ``PartitionUpdates.run``.

        Args:
            work: The lease on the partitions.
            update: Called with a unit's index and a segment of its partition, which it changes in place.
            keep_bytes: Bytes of values and state that may stay in memory until the next step.

        Raises:
            StepStateError: The step's gradient has been recomputed or dropped.
            StaleEpochError: The partitions were leased to another trainer.
        """

        def make_context() -> common_pb2.RequestContext:
            self._membership.check()
            return self._membership.context(self._state.number, work)

        rank = self._membership.world.coordinates(work.global_rank)
        units = [
            unit for unit in self._units.values() if unit.layout.is_updated_by(rank.tp_rank, rank.pp_rank, rank.cp_rank)
        ]
        self._partition_updates.run(units, rank.dp_rank, make_context, update, cache_bytes=keep_bytes)

    def close(self) -> None:
        """Stops the threads and closes the connections. Waits for transfers, which use the memory of units."""
        self.servers.probe.close()
        self._fetches.close()
        self._background_pushes.close()
        self._partition_updates.close()
        self.servers.disconnect()
        self._relay.close()
        if self._node is not None:
            self._node.close()
        if self.gradients.sums is not None:
            self.gradients.sums.close()
        self._fetches.join(_CLOSE_LIMIT_S)
        self._background_pushes.join(_CLOSE_LIMIT_S)
        self._partition_updates.join(_CLOSE_LIMIT_S)


def _buffer(target: memoryview | None, vector: FlatVector | None) -> memoryview:
    """Returns the memory that a gather fills: ``target``, or else the receive buffer of a vector on a GPU."""
    if target is not None:
        return target
    assert vector is not None
    return vector.receive_buffer()
