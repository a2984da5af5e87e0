"""The ``ParameterStore`` of a run: gathers units, and pushes gradients under the work items of the step in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from shardwell.data_plane.error_feedback import ErrorFeedback
from shardwell.data_plane.fetch import Fetches
from shardwell.data_plane.kept_streams import DeltaCache
from shardwell.data_plane.partition_updates import PartitionUpdates
from shardwell.data_plane.push import Pushes
from shardwell.data_plane.shard import RemoteUnit, Wire
from shardwell.data_plane.transfers import TrafficStats
from shardwell.grid.replica import form_node_group
from shardwell.membership.membership import Membership
from shardwell.module.flat_vector import FlatVector
from shardwell.module.parameter_store import InitialValues
from shardwell.options import ADAPTIVE, JoinConfig, TransferOptions
from shardwell.peers.node_gathers import NodeGathers
from shardwell.step.step_state import FinishedStep, StepState
from shardwell.store.item_transfers import ItemGathers, ItemPushes
from shardwell.store.module_buffers import RemoteBuffers
from shardwell.store.residuals import CheckpointResiduals
from shardwell.store.run_servers import ShardServers
from shardwell.store.run_units import MovableUnits, ShardMappings, UnitDeclarations, UnitMoves
from shardwell.store.sums import AdaptiveRoute, FixedRoute, GradientGroups, GradientRoutes, ItemSums
from shardwell.transport.partition_transfers import PartitionSegment
from shardwell.transport.route_stats import ALLREDUCE, DIRECT, HIERARCHICAL
from shardwell.transport.shared_vector import SharedVector, WrittenPages
from shardwell_wire.encoding import wire_dtypes
from shardwell_wire.errors import ShardwellError, UsageError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)

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
        self._stats = TrafficStats()
        self._fetches = Fetches(self._stats)
        self._written_pages = WrittenPages()
        background = self._background_pushes = Pushes(self._stats, push_bytes=config.transfers.push_bytes)
        self._partition_updates = PartitionUpdates(membership.world.dp, config.waits.wait_limit_s)
        self._deltas = DeltaCache(config.transfers.delta_cache_bytes)
        self._wire = self._make_wire()
        self._rollback_count = membership.joined.rollback_count
        self._servers = ShardServers(membership, config)
        self.pushes = ItemPushes(membership, state, self._units, background, self._servers)
        """Pushes gradients under the work items of the step."""
        self.gathers = ItemGathers(membership, state, self._units, self._fetches, config.waits.wait_limit_s)
        """Gathers units for the work items of the step."""
        self.residuals = CheckpointResiduals(membership, self.pushes)
        """Saves the rounding errors of pushes with checkpoints."""
        self._start_error_feedback()
        self._declarations = UnitDeclarations(membership, config.waits.wait_limit_s)
        self._must_check_model = state.number > 0
        self._mappings = ShardMappings(membership, config)
        self._buffer_wire = Wire(wait_limit_s=config.waits.wait_limit_s)
        self.buffers = RemoteBuffers(
            membership,
            self._declarations,
            partial(self._servers.shards, self._buffer_wire),
            background,
            self._mappings,
            self.pushes.excuses,
        )
        """Stores the run's buffers."""
        self._relocations = self._servers.relocations
        moves = UnitMoves(
            self._servers,
            (
                MovableUnits(self._units, lambda: self._wire, self._remap),
                MovableUnits(self.buffers.units, lambda: self._buffer_wire, self.buffers.remap),
            ),
        )
        self._relocations.attach(moves.move)
        membership.attach(
            transports=self._servers.transport_reports,
            unreachable=self._servers.unreachable,
            when_ended=self._servers.disconnect,
            when_news=self._relocations.wake,
            when_residuals_wanted=self.residuals.note_wanted,
            when_lapsed=self._relocations.refresh,
        )
        group = form_node_group(membership, config) if config.transfers.node_group != "none" else None
        self.gathers.node = NodeGathers(group, self._fetches) if group is not None else None
        if config.transfers.gradient_reduction != DIRECT:
            self.pushes.sums = ItemSums(membership, state, self._form_routes(background))

    def _form_routes(self, pushes: Pushes) -> GradientRoutes:
        """Connects this trainer with those with which it adds gradients."""
        reduction = self._config.transfers.gradient_reduction
        groups = GradientGroups(self._membership, self._config, pushes)
        uses_tls = self._membership.credentials.tls is not None
        if uses_tls and reduction == ALLREDUCE:
            raise UsageError(
                f"gradient_reduction={ALLREDUCE!r} in a cluster with TLS: the connections between trainers are not "
                f"encrypted. Use {HIERARCHICAL!r} or {DIRECT!r}"
            )
        formed = {
            HIERARCHICAL: groups.form_on_host() if reduction in (HIERARCHICAL, ADAPTIVE) else None,
            ALLREDUCE: groups.form_across_hosts() if reduction in (ALLREDUCE, ADAPTIVE) and not uses_tls else None,
        }
        rule = (
            AdaptiveRoute(groups.order, groups.owners, across_hosts=not uses_tls)
            if reduction == ADAPTIVE
            else FixedRoute(reduction)
        )
        return GradientRoutes(rule, {route: group for route, group in formed.items() if group is not None})

    @property
    def routes(self) -> dict[str, dict[str, str]]:
        """Route and reason of each unit whose gradient was pushed; see ``GradientRoutes.describe``."""
        return self.pushes.sums.routes.describe() if self.pushes.sums is not None else {}

    @property
    def stats(self) -> dict[str, float]:
        """Counts and bytes of gathers and pushes, and seconds that the training thread waited for them."""
        return {
            **self._stats.as_dict(),
            "received_bytes": self._servers.received_bytes,
            "sent_bytes": self._servers.sent_bytes,
            "corrupt_transfer_count": sum(self.corrupt_transfers.values()),
            **self._deltas.stats(),
            "cache_hit_bytes": self._mappings.cache_hit_bytes,
            "node_shared_bytes": self.gathers.node.shared_bytes if self.gathers.node is not None else 0,
            "node_summed_bytes": self.pushes.sums.node_summed_bytes if self.pushes.sums is not None else 0,
        }

    @property
    def corrupt_transfers(self) -> dict[str, int]:
        """Transfers whose bytes arrived with a wrong checksum and were repeated, by the servers' addresses."""
        return self._servers.corrupt_transfers

    @property
    def has_lapsed(self) -> bool:
        """True if this trainer is no member of the run now, and may join again."""
        return self._membership.lapsed

    @property
    def traffic(self) -> TrafficStats:
        """What this trainer has transferred."""
        return self._stats

    def moved_bytes(self) -> dict[str, tuple[int, int]]:
        """Returns the bytes received and sent over each transport; see ``ShardServers.moved_bytes``."""
        return self._servers.moved_bytes()

    @property
    def transfers(self) -> TransferOptions:
        """How weights and gradients travel."""
        return self._config.transfers

    @property
    def transports(self) -> list[dict[str, Any]]:
        """Each shard server's transport and its statistics."""
        return self._servers.describe()

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
            self.pushes.feedback = ErrorFeedback(self._wire.push_dtype, self._wire.encoded, self._state.number)
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
        self.pushes.start_step(finished, kept_units)
        self.residuals.start_step()
        kept, before = len(self._state.items), len(finished.global_ranks)
        if kept < before:
            self._partition_updates.drop_cache()
            self._servers.free_gradient_buffers(kept, before)

    def declare(self, layout: UnitLayout, initial_values: InitialValues) -> int:
        """See ``ParameterStore.declare``. Returns once the run has initial values for the unit."""
        connect = partial(self._servers.shards, self._wire, layout)

        def declare() -> int:
            unit = self._declarations.declare(layout, initial_values, self._state.number, connect)
            self._units[unit.index] = self._mappings.map(unit, self._config.transfers.gather_dtype)
            self._note_declared(unit)
            return unit.index

        return self.outlasting_lapses(declare)

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
        if unit.placement < self._membership.placement or not self._servers.are_open(unit.shards):
            self._relocations.recheck()

    def _remap(self, unit: RemoteUnit, moved: Sequence[int], wait: bool) -> RemoteUnit:
        self._mappings.remap(unit, moved, self._config.transfers.gather_dtype, wait=wait)
        return unit

    # ---- gathers ----

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
        return self.gathers.gather(unit_index, target, exact=exact, layout=layout, vector=vector)

    def gathering_together(self) -> AbstractContextManager[None]:
        """See ``ParameterStore.gathering_together``."""
        return self._fetches.together()

    def abandons_work(self) -> bool:
        """See ``ParameterStore.abandons_work``."""
        return self.gathers.abandons_work()

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
        return self._written_pages.exist(
            [unit.vector.pages for unit in self._units.values() if unit.vector is not None]
        )

    def fetches_in_place(self) -> bool:
        """See ``ParameterStore.fetches_in_place``."""
        return self._mappings.cache is not None

    def await_version(self, unit_index: int) -> Callable[[], int]:
        """See ``ParameterStore.await_version``."""
        return self.gathers.await_version(unit_index)

    # ---- pushes ----

    def streams_gradients(self, unit_index: int) -> bool:
        """See ``ParameterStore.streams_gradients``."""
        return not all(shard.server.copies_gradients for shard in self._units[unit_index].shards)

    def compare(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See ``ParameterStore.compare``."""
        self._state.require_current().checksums.add(unit_index, gradients)

    def push(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See ``ParameterStore.push``."""
        self.pushes.push(unit_index, gradients)

    def may_keep(self, unit_index: int) -> bool:
        """See ``ParameterStore.may_keep``."""
        return self.pushes.may_keep(unit_index)

    def drop(self, unit_index: int, parameter_indices: Iterable[int]) -> None:
        """See ``ParameterStore.drop``."""
        self._state.drop(unit_index, parameter_indices)

    def drain(self) -> None:
        """See ``ParameterStore.drain``."""
        self.pushes.drain()

    def discard(self) -> None:
        """See ``ParameterStore.discard``."""
        self.pushes.discard()

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
                # Not before: until now, a former owner that is cut off may have sent versions that do not count.
                self._forget_streams()
        self.pushes.rejoin(moved=moved)
        if moved:
            self._restore_residuals()
        self._partition_updates.drop_cache()
        if self.gathers.node is not None:
            self.gathers.node.leave("this trainer has joined the run again")

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
        units = [unit for unit in self._units.values() if unit.layout.is_updated_by(rank.tp_rank, rank.pp_rank)]
        self._partition_updates.run(units, rank.dp_rank, make_context, update, cache_bytes=keep_bytes)

    def close(self) -> None:
        """Stops the threads and closes the connections. Waits for transfers, which use the memory of units."""
        self._servers.stop_probes()
        self._fetches.close()
        self._background_pushes.close()
        self._partition_updates.close()
        self._servers.disconnect()
        self._mappings.close()
        if self.gathers.node is not None:
            self.gathers.node.close()
        if self.pushes.sums is not None:
            self.pushes.sums.close()
        self._fetches.join(_CLOSE_LIMIT_S)
        self._background_pushes.join(_CLOSE_LIMIT_S)
        self._partition_updates.join(_CLOSE_LIMIT_S)
