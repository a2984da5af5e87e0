"""The ``ParameterStore`` of a run: gathers units, and pushes gradients under the work items of the step in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardwell.data_plane.abandoned import AbandonableGather, InPlaceOrNewest, NewestInPlace, read_newest
from shardwell.data_plane.error_feedback import ErrorFeedback
from shardwell.data_plane.interrupts import uninterrupted
from shardwell.data_plane.node_gathers import NodeGathers
from shardwell.data_plane.partition_updates import PartitionUpdates
from shardwell.data_plane.remote_shard import RemoteShard, Wire
from shardwell.data_plane.traffic import RemoteUnit, Traffic
from shardwell.memory.device_copies import Completable, to_host
from shardwell.module.store import InitialValues
from shardwell.session.buffer_store import RemoteBuffers
from shardwell.session.config import JoinConfig
from shardwell.session.membership import Membership
from shardwell.session.process_groups import form_node_group
from shardwell.session.run_units import ShardMappings, UnitDeclarations
from shardwell.session.servers import ShardServers
from shardwell.session.step_state import FinishedStep, StepState, WorkItemState
from shardwell.transport.partitions import PartitionSegment
from shardwell.transport.server_connection import ServerConnection
from shardwell.transport.shared_vector import SharedVector
from shardwell_wire import wire_dtypes
from shardwell_wire.errors import CapacityError, StaleEpochError, UsageError, VersionGoneError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, coordinator_pb2

_REACH_LIMIT_S = 60.0
"""How long a trainer that was cut off tries to reach the servers before it joins again."""

_REOPEN_TIMEOUT_S = 10.0
"""Deadline for opening a transport to another owner of a shard. A silent server is soon replaced."""

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
        self._units: dict[int, RemoteUnit] = {}
        self._traffic = Traffic(push_bytes=config.transfers.push_bytes)
        self._kept_units: set[int] | None = set() if not state.number else None
        """Units of which the servers may hold gradients of earlier steps. None: any unit, because this trainer joined
        after the first step."""
        self._former_ranks = frozenset(state.items)
        """Logical ranks whose work items this trainer held in the previous step."""
        self._partition_updates = PartitionUpdates(membership.world.dp, config.waits.wait_limit_s)
        self._wire, self._feedback = self._make_wire()
        self._rollback_count = membership.joined.rollback_count
        self._servers = ShardServers(membership, config)
        self._declarations = UnitDeclarations(membership, config.waits.wait_limit_s)
        self._mappings = ShardMappings(membership, config)
        self._buffer_wire = Wire(wait_limit_s=config.waits.wait_limit_s)
        self.buffers = RemoteBuffers(
            membership,
            self._declarations,
            partial(self._servers.shards, self._buffer_wire),
            self._traffic,
            self._mappings,
            self._excuses,
        )
        """Stores the run's buffers."""
        self._relocations = self._servers.relocations
        self._replaced: list[ServerConnection] = []
        """Connections to former owners of shards, which are not closed yet."""
        self._unmapped: defaultdict[int, set[int]] = defaultdict(set)
        """Numbers of moved shards that are not mapped again yet, by unit index."""
        self._relocations.attach(self._move)
        membership.attach(
            transports=self._servers.transport_reports,
            unreachable=self._servers.unreachable,
            when_ended=self._servers.disconnect,
            when_news=self._relocations.wake,
            when_lapsed=self._relocations.refresh,
        )
        group = form_node_group(membership, config) if config.transfers.node_group != "none" else None
        self._node = NodeGathers(group, self._traffic) if group is not None else None

    @property
    def stats(self) -> dict[str, float]:
        """Counts and bytes of gathers and pushes, and seconds that the training thread waited for them."""
        return {
            **self._traffic.stats.as_dict(),
            "received_bytes": self._servers.received_bytes,
            "sent_bytes": self._servers.sent_bytes,
            "cache_hit_bytes": self._mappings.cache_hit_bytes,
            "node_shared_bytes": self._node.shared_bytes if self._node is not None else 0,
        }

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
        if transfers != before and self._units:
            raise UsageError(
                f"gather_dtype={gather_dtype!r} and push_dtype={push_dtype!r} can not be set once a session has units: "
                "pass them to join, or to the first auto_wrap(memory=...)"
            )
        self._config = replace(self._config, transfers=transfers)
        self._wire, self._feedback = self._make_wire()

    def _make_wire(self) -> tuple[Wire, ErrorFeedback | None]:
        transfers, limit_s = self._config.transfers, self._config.waits.wait_limit_s
        wire = Wire(wire_dtypes.NAMES[transfers.gather_dtype], wire_dtypes.NAMES[transfers.push_dtype], limit_s)
        return wire, ErrorFeedback(wire.push_dtype, wire.encoded) if transfers.push_error_feedback else None

    def start_step(self, finished: FinishedStep, kept_units: Collection[int] = ()) -> None:
        """Called after a commit, when the state has moved to the next step and no transfer is in flight.

        Args:
            finished: The step that was committed.
            kept_units: Units whose gradients the commit kept for another optimizer, if there are any.
        """
        self._kept_units = {unit for unit in kept_units if unit in finished.pushed_units or self.may_keep(unit)}
        self._former_ranks = finished.global_ranks
        self._servers.release_gradient_buffers()
        if len(self._state.items) < len(finished.global_ranks):
            self._partition_updates.drop_cache()
            self._servers.free_gradient_buffers()
        if self._feedback is not None:
            self._feedback.commit()

    def declare(self, layout: UnitLayout, initial_values: InitialValues) -> int:
        """See ``ParameterStore.declare``. Returns once the run has initial values for the unit."""
        connect = partial(self._servers.shards, self._wire, layout)
        unit = self._declarations.declare(layout, initial_values, self._state.number, connect)
        self._units[unit.index] = self._mappings.map(unit, self._config.transfers.gather_dtype)
        self._note_declared(unit)
        return unit.index

    def _note_declared(self, unit: RemoteUnit) -> None:
        """Has the shards of a new unit moved if they have moved while the unit was declared."""
        if unit.placement < self._membership.placement or not self._servers.are_open(unit.shards):
            self._relocations.recheck()

    # ---- moves ----

    def _move(self, listed: coordinator_pb2.ListUnitsResponse, anew: bool) -> None:
        """Moves all shards to their owners. Called in the thread of ``ShardRelocations``, again if it has failed."""
        if anew:
            self._replaced += self._servers.forget()
        owners = {unit.unit_index: unit.shards for unit in listed.units}
        for units, wire in ((self._units, self._wire), (self.buffers.units, self._buffer_wire)):
            for index, unit in list(units.items()):
                units[index] = self._follow(unit, owners[index], wire, anew)
        used = {shard.server for unit in self._all_units() for shard in unit.shards}
        self._servers.retire([server for server in dict.fromkeys(self._replaced) if server not in used])
        self._replaced.clear()
        for index, moved in list(self._unmapped.items()):
            if index in self._units:
                gather_dtype = self._config.transfers.gather_dtype
                self._mappings.remap(self._units[index], sorted(moved), gather_dtype, wait=not anew)
            else:
                self.buffers.units[index] = self.buffers.remap(self.buffers.units[index])
            del self._unmapped[index]

    def _all_units(self) -> list[RemoteUnit]:
        return [*self._units.values(), *self.buffers.units.values()]

    def _follow(self, unit: RemoteUnit, owners: Sequence[common_pb2.ShardRange], wire: Wire, anew: bool) -> RemoteUnit:
        """Connects the shards of a unit to their owners; returns the unit."""
        ranges = [(owner.start_bytes, owner.stop_bytes) for owner in owners]
        if ranges != [(shard.start_bytes, shard.stop_bytes) for shard in unit.shards]:
            # Only a rollback cuts a unit anew.
            shards = tuple(self._servers.shard(wire, unit.layout, owner) for owner in owners)
            self._replaced += [shard.server for shard in unit.shards]
            if unit.vector is not None:
                unit.vector.cut(ranges)
            self._unmapped[unit.index] = set(range(len(shards)))
            return replace(unit, shards=shards)
        for number, (shard, owner) in enumerate(zip(unit.shards, owners, strict=True)):
            server = self._servers.connect(owner, open_timeout_s=_REOPEN_TIMEOUT_S)
            if anew or server is not shard.server:
                self._unmapped[unit.index].add(number)
            if server is not shard.server:
                self._replaced.append(shard.server)
                shard.move(server)
        return unit

    # ---- gathers ----

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
        gather = self._gather(unit_index, target, exact=exact, layout=layout, vector=vector)
        return AbandonableGather(
            gather,
            self._loses_version,
            lambda: self._gather_newest(unit_index, target, exact=exact, layout=layout),
            self._traffic.stats,
        )

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
            return read_newest(self._units[unit_index], read, self._config.waits.wait_limit_s)

        return self._traffic.run(gather)

    def _gather(
        self,
        unit_index: int,
        target: memoryview,
        *,
        exact: bool,
        layout: UnitLayout | None,
        vector: Completable | None,
    ) -> Future[int]:
        unit, version = self._units[unit_index], self._state.number
        if self._node is not None and vector is not None and not exact and self._is_shared_in_node(unit):
            return self._node.gather(unit, version, target, layout or unit.layout, vector)
        return self._traffic.gather(unit, version, target, layout, exact=exact)

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

    def gather_average(self, unit_index: int, target: memoryview) -> None:
        """See ``ParameterStore.gather_average``."""
        self._membership.check()
        for shard in self._units[unit_index].shards:
            shard.fetch_average(self._state.number, target[shard.start_bytes : shard.stop_bytes])

    def in_place(self, unit_index: int) -> SharedVector | None:
        """See ``ParameterStore.in_place``."""
        return self._units[unit_index].vector

    def share_on_host(self, unit_index: int) -> bool:
        """See ``ParameterStore.share_on_host``."""
        unit = self._units[unit_index]
        if unit.vector is None:
            unit = self._mappings.share_on_host(unit, self._config.transfers.gather_dtype)
            self._units[unit_index] = unit
        return unit.vector is not None or not unit.layout.size_bytes

    def await_version(self, unit_index: int) -> Future[int]:
        """See ``ParameterStore.await_version``."""
        self._membership.check()
        unit, limit_s = self._units[unit_index], self._config.waits.wait_limit_s
        assert unit.vector is not None
        newest = NewestInPlace(unit.vector, self._membership.check, limit_s)
        if self._computes_in_vain():
            return newest
        found = self._traffic.await_version(unit, self._state.number)
        return InPlaceOrNewest(found, newest, self._loses_version)

    # ---- pushes ----

    def streams_gradients(self, unit_index: int) -> bool:
        """See ``ParameterStore.streams_gradients``."""
        return not all(shard.server.copies_gradients for shard in self._units[unit_index].shards)

    def push(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See ``ParameterStore.push``."""
        with uninterrupted:  # the servers wait for every part that is counted
            self._push(unit_index, gradients)

    def _push(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._membership.check()
        unit, current = self._units[unit_index], self._state.require_current()
        if current.abandoned or self._membership.lapsed:
            return
        context = self._membership.context(self._state.number, epoch=current.item.epoch)
        header = current.start_part(context, unit.layout.unit, unit_index, (index for index, _ in gradients))
        excuse = partial(self._excuses, current, current.key)
        if self._feedback is not None and gradients:
            copies, copied = to_host([gradient for _, gradient in gradients])
            copied()
            whole = {index: flat for (index, _), flat in zip(gradients, copies, strict=True)}
            encoded = self._feedback.encode(unit_index, unit.layout, current.item.dp_rank, whole)
            if encoded is not None:
                self._traffic.push_encoded(unit, header, encoded, excuse)
                return
        self._traffic.push(unit, header, gradients, excuse)

    def _excuses(self, item: WorkItemState, key: tuple[int, int], error: BaseException) -> bool:
        """Returns whether a failed push does not matter, because the attempt of its item is over. In any thread."""
        # Servers reject pushes of an attempt that is over. A copy of a late item also ends if a server has no memory.
        over = isinstance(error, StaleEpochError | VersionGoneError)
        if over or (isinstance(error, CapacityError) and item.item.copy):
            item.abandon(key)
        return self._membership.lapsed or item.abandoned or item.key != key

    def may_keep(self, unit_index: int) -> bool:
        """See ``ParameterStore.may_keep``."""
        return self._kept_units is None or unit_index in self._kept_units

    def drop(self, unit_index: int, parameter_indices: Iterable[int]) -> None:
        """See ``ParameterStore.drop``."""
        self._state.drop(unit_index, parameter_indices)

    def push_drops(self, current: WorkItemState) -> None:
        """Sends the dropped gradients of a work item that no push has reported. Called at the end of the item."""
        for unit_index in sorted(current.to_drop):
            held_before = current.item.global_rank in self._former_ranks
            if current.parts[unit_index] or self.may_keep(unit_index) or not held_before:
                self.push(unit_index, [])
        current.clear_drops()

    def drain(self) -> None:
        """See ``ParameterStore.drain``."""
        self._traffic.drain()

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
            if item.item.copy:
                item.abandon(item.key)  # the trainer of the late work item computes it, too
            if item.abandoned:
                self._traffic.discard()
            elif item.parts or (include_empty and item.finished):
                self._reset(item)

    def _reset(self, item: WorkItemState) -> None:
        self._traffic.discard()
        step, rank = self._state.number, item.item.global_rank
        request = coordinator_pb2.ResetWorkRequest(
            context=self._membership.context(step, epoch=item.item.epoch),
            trainer=self._membership.trainer,
            global_rank=rank,
        )
        response: coordinator_pb2.ResetWorkResponse = self._membership.poll(
            "ResetWork",
            request,
            lambda answer: answer.HasField("item"),
            what=f"the servers to drop the gradient of rank {rank} in step {step}",
        )
        self._state.restart_item(item, response.item)
        self._servers.release_gradient_buffers(item.item.dp_rank)
        if self._feedback is not None:
            self._feedback.reset(item.item.dp_rank)

    @property
    def can_copy_items(self) -> bool:
        """True if a copy of a work item gives the same bits here as on another trainer.

        With error feedback, gradients depend on the rounding errors that each trainer has stored.
        """
        return self._feedback is None

    def forget_pushes(self, item: WorkItemState) -> None:
        """Forgets the pushes of an attempt that is over. Call it before the item's next attempt."""
        self._traffic.discard()
        self._servers.release_gradient_buffers(item.item.dp_rank)
        if self._feedback is not None:
            self._feedback.reset(item.item.dp_rank)

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
        if joined.rollback_count != self._rollback_count:
            self._rollback_count = joined.rollback_count
            self._mappings.start_over(joined.rollback_count)
            self._relocations.refresh()
        self._relocations.settle()
        self._traffic.discard()
        self._servers.release_gradient_buffers()
        self._partition_updates.drop_cache()
        if self._feedback is not None:
            self._feedback.restart(keep=not moved)
        if moved:
            self._kept_units, self._former_ranks = None, frozenset()
        if self._node is not None:
            self._node.leave("this trainer has joined the run again")

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

    def restart(self, item: WorkItemState) -> None:
        """Restarts a work item whose gradients must not count."""
        self._reset(item)

    def update_partitions(
        self, work: coordinator_pb2.PartitionWork, update: Callable[[int, PartitionSegment], None], *, keep_bytes: float
    ) -> None:
        """Reads, updates and stages the optimizer partitions of one dp rank; see ``PartitionUpdates.run``.

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
            return self._membership.context(self._state.number, epoch=work.epoch)

        units = self._units.values()
        self._partition_updates.run(units, work.dp_rank, make_context, update, cache_bytes=keep_bytes)

    def close(self) -> None:
        """Stops the threads and closes the connections. Waits for transfers, which use the memory of units."""
        self._servers.stop_probes()
        self._traffic.close()
        self._partition_updates.close()
        self._servers.disconnect()
        self._mappings.close()
        if self._node is not None:
            self._node.close()
        self._traffic.join(_CLOSE_LIMIT_S)
        self._partition_updates.join(_CLOSE_LIMIT_S)
