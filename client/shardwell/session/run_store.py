"""The run's parameters behind the sharded module: which unit lives where, which step reads and writes what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardwell.data_plane.error_feedback import ErrorFeedback
from shardwell.data_plane.interrupts import uninterrupted
from shardwell.data_plane.node_gathers import NodeGathers, fetch
from shardwell.data_plane.partition_updates import PartitionUpdates
from shardwell.data_plane.remote_shard import RemoteShard, Wire
from shardwell.data_plane.traffic import RemoteUnit, Traffic
from shardwell.memory.device_copies import Completable, to_host
from shardwell.module.store import InitialValues
from shardwell.session.buffer_store import RemoteBuffers
from shardwell.session.config import JoinConfig
from shardwell.session.membership import Membership
from shardwell.session.node_members import form_node_group
from shardwell.session.progress import ItemProgress, StepProgress
from shardwell.session.reachability import Reachability
from shardwell.session.shards_in_place import ShardsInPlace
from shardwell.session.unit_declaration import UnitDeclarations
from shardwell.transport.base import KIND_NUMBERS
from shardwell.transport.partitions import PartitionSegment
from shardwell.transport.selector import ServerConnection
from shardwell.transport.server_guard import ServerGuard
from shardwell.transport.shared_vector import SharedVector
from shardwell_wire import wire_dtypes
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

_END_LIMIT_S = 5.0
"""What is under way ends with its connection, at once; only who is connecting to a dead host does not hear of it."""


class RunStore:
    """The ``ParameterStore`` of a run: declares units, and moves them for the step in flight.

    Args:
        membership: This trainer's place in the run.
        config: Limits of the data plane.
        progress: The step in flight; replaced by ``advance`` after each commit.
    """

    def __init__(self, membership: Membership, config: JoinConfig, progress: StepProgress) -> None:
        self.progress = progress
        self._membership, self._config = membership, config
        self._servers: dict[str, ServerConnection] = {}
        self._guards: dict[str, ServerGuard] = {}
        self._units: dict[int, RemoteUnit] = {}
        self._traffic = Traffic(push_bytes=config.transfers.push_bytes)
        self._kept_units: set[int] | None = set() if not progress.number else None
        """Units of which the servers may keep gradients of earlier steps; None: any, after a join."""
        self.spare_hint = ""
        """What a trainer without a logical rank is told that computes a gradient; empty: the usual."""
        self._last_ranks: set[int] = set(progress.items)
        """Logical ranks whose work this trainer did in the step before."""
        self._partition_updates = PartitionUpdates(membership.world.dp, config.waits.wait_limit_s)
        self._wire, self._feedback = self._make_wire()
        self._declarations = UnitDeclarations(membership, config.waits.wait_limit_s)
        self._shards_in_place = ShardsInPlace(membership, config)
        self.buffers = RemoteBuffers(
            membership,
            self._declarations,
            partial(self._reach, Wire(wait_limit_s=config.waits.wait_limit_s)),
            self._traffic,
            self._shards_in_place,
        )
        """Buffers, not parameters."""
        self._reachability = Reachability(lambda: list(self._guards.values()), membership.credentials)
        membership.attach(report=self._reachability.report, when_ended=self._end_transfers)
        group = form_node_group(membership, config) if config.transfers.node_group != "none" else None
        self._node = NodeGathers(group, self._traffic) if group is not None else None

    @property
    def stats(self) -> dict[str, float]:
        """Bytes and counts of gathers and pushes, and seconds the training thread waited for them."""
        servers = self._servers.values()
        return {
            **self._traffic.stats.as_dict(),
            "received_bytes": sum(server.received_bytes for server in servers),
            "sent_bytes": sum(server.sent_bytes for server in servers),
            "cache_hit_bytes": self._shards_in_place.hit_bytes,
            "node_shared_bytes": self._node.shared_bytes if self._node is not None else 0,
        }

    @property
    def transports(self) -> list[dict[str, Any]]:
        """Each shard server's transport and what it did."""
        return [server.describe() for server in self._servers.values()]

    def transport_reports(self) -> list[coordinator_pb2.TransportReport]:
        """What the coordinator is told of ``transports``. From any thread."""
        return [
            coordinator_pb2.TransportReport(
                address=server.address, kind=KIND_NUMBERS[server.kind], bytes_per_s=server.bytes_per_s
            )
            for server in list(self._servers.values())
        ]

    def set_wire_dtypes(self, gather_dtype: str | None, push_dtype: str | None) -> None:
        """Changes how 32-bit floats travel, before the first unit; None: as ``join`` was told.

        Raises:
            UsageError: There are units, or no such dtype.
        """
        before = self._config.transfers
        transfers = replace(
            before, gather_dtype=gather_dtype or before.gather_dtype, push_dtype=push_dtype or before.push_dtype
        )
        if transfers != before and self._units:
            raise UsageError(
                f"gather_dtype={gather_dtype!r} and push_dtype={push_dtype!r} can not be set once a session has units: "
                "give them to join, or to the first auto_wrap(memory=...)"
            )
        self._config = replace(self._config, transfers=transfers)
        self._wire, self._feedback = self._make_wire()

    def _make_wire(self) -> tuple[Wire, ErrorFeedback | None]:
        config = self._config
        wire = Wire(
            wire_dtypes.NAMES[config.transfers.gather_dtype],
            wire_dtypes.NAMES[config.transfers.push_dtype],
            config.waits.wait_limit_s,
        )
        return wire, ErrorFeedback(wire.push_dtype, wire.encoded) if config.transfers.push_error_feedback else None

    def advance(self, progress: StepProgress, kept_units: Collection[int] = ()) -> None:
        """The step is committed: from now on ``progress`` is the one in flight. Nothing is being gathered or pushed.

        Args:
            progress: Of the next step.
            kept_units: Units whose gradients the commit left for another optimizer's step, if there are any.
        """
        pushed = {unit for item in self.progress.items.values() for unit, indices in item.pushed.items() if indices}
        self._kept_units = {unit for unit in kept_units if unit in pushed or self.may_keep(unit)}
        self._last_ranks = set(self.progress.items)
        fewer_ranks = len(progress.items) < len(self.progress.items)
        self.progress = progress
        self._release_gradient_buffers()
        if fewer_ranks:
            self._partition_updates.forget()
            # Whoever plays the others now needs the room that is reserved for their gradients.
            for server in self._servers.values():
                server.release_gradient_buffers()
        if self._feedback is not None:
            self._feedback.commit()

    def declare(self, layout: UnitLayout, initial_values: InitialValues) -> int:
        """See ``ParameterStore.declare``. Returns once the run has initial values for the unit."""
        reach = partial(self._reach, self._wire, layout)
        unit = self._declarations.declare(layout, initial_values, self.progress.number, reach)
        self._units[unit.index] = self._shards_in_place.map(unit, self._config.transfers.gather_dtype)
        return unit.index

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
        unit, version = self._units[unit_index], self.progress.number
        if exact:
            assert layout is None or layout == unit.layout
            return self._traffic.gather(unit, version, target, exact=True)
        if self._node is not None and vector is not None and self._is_shared_in_node(unit):
            return self._node.gather(unit, version, target, layout or unit.layout, vector)
        return fetch(self._traffic, unit, version, target, layout or unit.layout)

    def _is_shared_in_node(self, unit: RemoteUnit) -> bool:
        """Whether the other trainers of the node can be expected to gather the unit now, too.

        Not in the work of a trainer that was lost, nor in work that is begun anew, nor where nothing would be saved.
        """
        current, (rank_assignment, *_) = self.progress.current, self._membership.rank_assignments
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
            shard.fetch_average(self.progress.number, target[shard.start_bytes : shard.stop_bytes])

    def in_place(self, unit_index: int) -> SharedVector | None:
        """See ``ParameterStore.in_place``."""
        return self._units[unit_index].vector

    def share_on_host(self, unit_index: int) -> bool:
        """See ``ParameterStore.share_on_host``."""
        unit = self._units[unit_index]
        if unit.vector is None:
            unit = self._shards_in_place.share_on_host(unit, self._config.transfers.gather_dtype)
            self._units[unit_index] = unit
        return unit.vector is not None or not unit.layout.size_bytes

    def streams_gradients(self, unit_index: int) -> bool:
        """See ``ParameterStore.streams_gradients``."""
        return not all(shard.server.pushes_through_shm for shard in self._units[unit_index].shards)

    def await_version(self, unit_index: int) -> Future[int]:
        """See ``ParameterStore.await_version``."""
        self._membership.check()
        return self._traffic.await_version(self._units[unit_index], self.progress.number)

    def push(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See ``ParameterStore.push``."""
        with uninterrupted:  # a part that is counted is pushed
            self._push(unit_index, gradients)

    def _push(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._membership.check()
        unit, current = self._units[unit_index], self.progress.require_current(self.spare_hint)
        header = shard_pb2.ReduceScatterHeader(
            context=self._membership.context(self.progress.number, epoch=current.item.epoch),
            unit=unit.layout.unit,
            dp_rank=current.item.dp_rank,
            attempt=current.item.attempt,
            part=current.parts[unit_index],
        )
        current.parts[unit_index] += 1
        if dropped := current.to_drop.pop(unit_index, None):
            header.dropped_indices[:] = sorted(dropped)
            current.pushed[unit_index] -= dropped
        current.pushed[unit_index].update(index for index, _ in gradients)
        if self._feedback is not None and gradients:
            copies, copied = to_host([gradient for _, gradient in gradients])
            copied()
            whole = {index: flat for (index, _), flat in zip(gradients, copies, strict=True)}
            encoded = self._feedback.encode(unit_index, unit.layout, current.item.dp_rank, whole)
            if encoded is not None:
                self._traffic.push_encoded(unit, header, encoded)
                return
        self._traffic.push(unit, header, gradients)

    def may_keep(self, unit_index: int) -> bool:
        """See ``ParameterStore.may_keep``."""
        return self._kept_units is None or unit_index in self._kept_units

    def drop(self, unit_index: int, parameter_indices: Iterable[int]) -> None:
        """See ``ParameterStore.drop``."""
        self.progress.drop(unit_index, parameter_indices)

    def push_drops(self) -> None:
        """At the end of a work item: tells the servers which gradients are dropped, unless a push has said so."""
        current = self.progress.require_current()
        for unit_index in sorted(current.to_drop):
            is_known = current.item.global_rank in self._last_ranks
            if current.parts[unit_index] or self.may_keep(unit_index) or not is_known:
                self.push(unit_index, [])
        current.to_drop.clear()

    def drain(self) -> None:
        """See ``ParameterStore.drain``."""
        self._traffic.drain()

    def discard(self, *, empty_too: bool = False) -> None:
        """Withdraws what was pushed for the current item; between items, for all of the step's.

        A finished item stays finished: its rank then has no gradient in the step.

        Args:
            empty_too: Begins finished items anew also if nothing was pushed for them.
        """
        current = self.progress.current
        for progress in [current] if current else list(self.progress.items.values()):
            if progress.parts or (empty_too and progress.finished):
                self._reset(progress)

    def update_partitions(
        self, work: coordinator_pb2.PartitionWork, update: Callable[[int, PartitionSegment], None], *, keep_bytes: float
    ) -> None:
        """Reads, updates and stages one data rank's partitions of all units; see ``PartitionUpdates.run``.

        Args:
            work: The lease on the partitions.
            update: Is given a unit's index and a part of its partition, to be changed in place.
            keep_bytes: How much values and state may stay here until the next step.

        Raises:
            StepStateError: The step's gradient is another by now, or void.
            StaleEpochError: The partitions went to another trainer.
        """

        def make_context() -> common_pb2.RequestContext:
            self._membership.check()
            return self._membership.context(self.progress.number, epoch=work.epoch)

        units = self._units.values()
        self._partition_updates.run(units, work.dp_rank, make_context, update, keep_bytes=keep_bytes)

    def close(self) -> None:
        """Stops the threads and closes the connections; waits for what is under way, as it uses memory of units."""
        self._reachability.close()
        self._traffic.close()
        self._partition_updates.close()
        for server in self._servers.values():
            server.close()
        self._shards_in_place.close()
        if self._node is not None:
            self._node.close()
        self._traffic.join(_END_LIMIT_S)
        self._partition_updates.join(_END_LIMIT_S)

    def _reset(self, progress: ItemProgress) -> None:
        self._traffic.forget()
        request = coordinator_pb2.ResetWorkRequest(
            context=self._membership.context(self.progress.number, epoch=progress.item.epoch),
            trainer=self._membership.trainer,
            global_rank=progress.item.global_rank,
        )
        response: coordinator_pb2.ResetWorkResponse = self._membership.poll(
            "ResetWork",
            request,
            lambda answer: answer.HasField("item"),
            what=f"the servers to drop the gradient of rank {progress.item.global_rank} in step {self.progress.number}",
        )
        progress.begin_attempt(response.item)
        self.progress.is_complete = False
        self._release_gradient_buffers(progress.item.dp_rank)
        if self._feedback is not None:
            self._feedback.reset(progress.item.dp_rank)

    def _release_gradient_buffers(self, dp_rank: int | None = None) -> None:
        for server in self._servers.values():
            if server.shm is not None:
                server.shm.release(dp_rank)

    def _reach(
        self, wire: Wire, layout: UnitLayout, declared: coordinator_pb2.DeclareUnitResponse
    ) -> tuple[RemoteShard, ...]:
        run = self._membership.identity
        return tuple(
            RemoteShard(run, layout, self._server(at.address), at.start_bytes, at.stop_bytes, wire)
            for at in declared.shards
        )

    def _server(self, address: str) -> ServerConnection:
        if address not in self._servers:
            membership, config = self._membership, self._config
            guard = self._guards[address] = ServerGuard(address, membership.ask, config.waits.wait_limit_s)
            self._servers[address] = guard.run(
                "connecting",
                lambda: ServerConnection(
                    address,
                    membership.identity,
                    kinds=config.transfers.kinds,
                    chunk_bytes=config.transfers.chunk_bytes,
                    check=membership.check,
                    credentials=membership.credentials,
                    guard=guard,
                ),
                repeat=False,
            )
        return self._servers[address]

    def _end_transfers(self) -> None:
        """This trainer is no member any more: what is under way on servers fails now, and says why."""
        for server in list(self._servers.values()):
            server.close()
