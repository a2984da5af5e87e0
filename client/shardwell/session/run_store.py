"""The run's parameters behind the sharded module: which unit lives where, which step reads what."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from shardwell.data_plane.error_feedback import ErrorFeedback
from shardwell.data_plane.host_cache import HostCache, ShardRange
from shardwell.data_plane.node_gathers import NodeGathers, fetch
from shardwell.data_plane.remote_shard import RemoteShard, Wire
from shardwell.data_plane.server_connection import ServerConnection
from shardwell.data_plane.shared_vector import CAN_MAP, SegmentPlace, SharedVector
from shardwell.data_plane.slice_client import SlicePart
from shardwell.data_plane.slice_updates import SliceUpdates
from shardwell.data_plane.traffic import RemoteUnit, Traffic
from shardwell.memory.completion import Completable
from shardwell.module.store import InitialValues
from shardwell.session.config import JoinConfig
from shardwell.session.membership import Membership
from shardwell.session.node_members import form_node_group
from shardwell.session.progress import ItemProgress, StepProgress
from shardwell_wire import wire_dtypes
from shardwell_wire.errors import ConflictError, DeadlineError, UsageError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

logger = logging.getLogger(__name__)

_UPLOAD_THREADS = 8
"""Each holds a piece of the values."""

_FIRST_PUBLISH_POLL_S, _LONGEST_PUBLISH_POLL_S = 0.005, 0.25


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
        self._units: dict[int, RemoteUnit] = {}
        self._traffic = Traffic(push_bytes=config.push_bytes)
        self._slice_updates = SliceUpdates(membership.world.dp, config.wait_limit_s)
        self._wire, self._feedback = self._make_wire()
        self._cache = self._open_cache() if config.host_cache_bytes else None
        group = form_node_group(membership, config) if config.node_group != "none" else None
        self._node = NodeGathers(group, self._traffic) if group is not None else None

    @property
    def stats(self) -> dict[str, float]:
        """Bytes and counts of gathers and pushes, and seconds the training thread waited for them."""
        servers = self._servers.values()
        return {
            **self._traffic.stats.as_dict(),
            "received_bytes": sum(server.received_bytes for server in servers),
            "sent_bytes": sum(server.sent_bytes for server in servers),
            "cache_hit_bytes": self._cache.hit_bytes if self._cache is not None else 0,
            "node_shared_bytes": self._node.shared_bytes if self._node is not None else 0,
        }

    @property
    def lanes(self) -> list[dict[str, Any]]:
        """Each shard server's lane and what it did."""
        return [server.describe() for server in self._servers.values()]

    def set_wire_dtypes(self, gather_dtype: str | None, push_dtype: str | None) -> None:
        """Changes how 32-bit floats travel, before the first unit; None: as ``join`` was told.

        Raises:
            UsageError: There are units, or no such dtype.
        """
        before = self._config
        self._config = replace(
            before, gather_dtype=gather_dtype or before.gather_dtype, push_dtype=push_dtype or before.push_dtype
        )
        if self._config != before and self._units:
            self._config = before
            raise UsageError(
                f"gather_dtype={gather_dtype!r} and push_dtype={push_dtype!r} can not be set once a session has units: "
                "give them to join, or to the first auto_wrap(memory=...)"
            )
        self._wire, self._feedback = self._make_wire()

    def _make_wire(self) -> tuple[Wire, ErrorFeedback | None]:
        config = self._config
        wire = Wire(wire_dtypes.NAMES[config.gather_dtype], wire_dtypes.NAMES[config.push_dtype], config.wait_limit_s)
        return wire, ErrorFeedback(wire.push_dtype) if config.push_error_feedback else None

    def advance(self, progress: StepProgress) -> None:
        """The step is committed: from now on ``progress`` is the one in flight. Nothing is being gathered or pushed."""
        fewer_ranks = len(progress.items) < len(self.progress.items)
        self.progress = progress
        self._release_mailboxes()
        if fewer_ranks:
            self._slice_updates.forget()
            # Whoever plays the others now needs the room that is reserved for their gradients.
            for server in self._servers.values():
                server.give_mailboxes_back()
        if self._feedback is not None:
            self._feedback.commit()

    def declare(self, layout: UnitLayout, initial_values: InitialValues) -> int:
        """See ``ParameterStore.declare``. Returns once the run has initial values for the unit."""
        declared = self._declare(layout)
        shards = tuple(
            RemoteShard(
                self._membership.run, layout, self._server(at.address), at.start_bytes, at.stop_bytes, self._wire
            )
            for at in declared.shards
        )
        unit = RemoteUnit(declared.unit_index, layout, shards)
        give_up, delay = time.monotonic() + self._config.wait_limit_s, _FIRST_PUBLISH_POLL_S
        # The values are kept until the unit is published: whoever should have sent them may be lost,
        # and then this trainer is asked to.
        while not declared.HasField("version"):
            if declared.initialize:
                self._initialize(unit, initial_values, declared.epoch)
                break
            if time.monotonic() > give_up:
                raise DeadlineError(
                    f"waited {self._config.wait_limit_s:.0f} s for the initial values of unit {layout.unit!r} "
                    "from the trainer that plays the lowest logical rank",
                    unit=layout.unit,
                )
            time.sleep(delay)
            delay = min(delay * 2, _LONGEST_PUBLISH_POLL_S)
            declared = self._declare(layout)
        self._units[unit.index] = self._share(unit)
        return unit.index

    def _share(self, unit: RemoteUnit, *, beyond_budget: bool = False) -> RemoteUnit:
        """Maps the shards that lie in shared memory, of servers or of the host's cache: as a whole, if all do."""
        if not CAN_MAP or not unit.layout.size_bytes:
            return unit
        name, exact = unit.layout.unit, not self._wire.gather_dtype
        try:
            places = {}
            for number, shard in enumerate(unit.shards):
                if (place := self._place(unit, shard)) is not None:
                    if place.stop_bytes > place.start_bytes:
                        shard.window = SharedVector(name, [place])
                    if exact:
                        places[number] = place
            others = [number for number in range(len(unit.shards)) if number not in places]
            places.update(self._cached_places(unit, others, beyond_budget=beyond_budget))
            if len(places) == len(unit.shards):
                in_order = [places[number] for number in range(len(unit.shards))]
                return replace(unit, vector=SharedVector(name, in_order, exact=exact))
        except OSError as error:
            logger.warning("unit %r is fetched, not read in place: %s", name, error)
        return unit

    def _cached_places(
        self, unit: RemoteUnit, numbers: Sequence[int], *, beyond_budget: bool
    ) -> dict[int, SegmentPlace]:
        """Takes shards that cannot be read where they are into the host's cache, if they fit; returns where."""
        if self._cache is None or not numbers:
            return {}
        ranges = {
            number: ShardRange(
                unit.index, unit.shards[number].start_bytes, unit.shards[number].stop_bytes, self._config.gather_dtype
            )
            for number in numbers
        }
        admitted = self._cache.admit(unit.layout.unit, ranges, beyond_budget=beyond_budget)
        for number, cached in admitted.items():
            unit.shards[number].cached = cached
        return {number: cached.place for number, cached in admitted.items()}

    def _open_cache(self) -> HostCache | None:
        config, run = self._config, self._membership.run
        if not CAN_MAP:
            return None
        # A run that is deleted and made again is another one, though its name and its steps are the same.
        described = self._membership.call("DescribeRun", coordinator_pb2.DescribeRunRequest(run=run))
        key = config.address, run, described.summary.created.ToNanoseconds()
        try:
            return HostCache(key, config.host_cache_bytes, wait_limit_s=config.wait_limit_s)
        except OSError as error:
            logger.warning("host cache: every trainer fetches for itself, there is no shared memory: %s", error)
            return None

    def _place(self, unit: RemoteUnit, shard: RemoteShard) -> SegmentPlace | None:
        if shard.server.shm is None:
            return None
        limit_s = self._config.wait_limit_s
        try:
            answer = shard.server.shm.locate(unit.layout.unit, None, timeout_s=limit_s, retry_for_s=limit_s)
        except ConflictError as error:
            logger.warning("unit %r is fetched, not read in place: %s", unit.layout.unit, error)
            return None
        return SegmentPlace(answer.segment.path, shard.start_bytes, shard.stop_bytes)

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
        current, (seat, *_) = self.progress.current, self._membership.seats
        return (
            current is not None
            and current.item.global_rank == seat.coordinates.global_rank
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
            self._cache = self._cache or self._open_cache()
            self._units[unit_index] = unit = self._share(unit, beyond_budget=True)
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
        self._membership.check()
        unit, current = self._units[unit_index], self.progress.require_current()
        header = shard_pb2.ReduceScatterHeader(
            context=self._membership.context(self.progress.number, epoch=current.item.epoch),
            unit=unit.layout.unit,
            dp_rank=current.item.dp_rank,
            attempt=current.item.attempt,
            part=current.parts[unit_index],
        )
        current.parts[unit_index] += 1
        if self._feedback is not None:
            whole = {index: gradient.detach().cpu().contiguous() for index, gradient in gradients}
            compensated = self._feedback.compensate(unit_index, unit.layout, current.item.dp_rank, whole)
            gradients = list(compensated.items())
        self._traffic.push(unit, header, gradients)

    def drain(self) -> None:
        """See ``ParameterStore.drain``."""
        self._traffic.drain()

    def discard(self) -> None:
        """Withdraws what was pushed for the current item; between items, for all of the step's.

        A finished item stays finished: its rank then has no gradient in the step.
        """
        current = self.progress.current
        for progress in [current] if current else list(self.progress.items.values()):
            if progress.parts:
                self._reset(progress)

    def update_slices(
        self, work: coordinator_pb2.SliceWork, update: Callable[[int, SlicePart], None], *, keep_bytes: float
    ) -> None:
        """Reads, updates and stages one data rank's slices of all units; see ``SliceUpdates.run``.

        Args:
            work: The lease on the slices.
            update: Is given a unit's index and a part of its slice, to be changed in place.
            keep_bytes: How much values and state may stay here until the next step.

        Raises:
            StepStateError: The step's gradient is another by now, or void.
            StaleEpochError: The slices went to another trainer.
        """

        def make_context() -> common_pb2.RequestContext:
            self._membership.check()
            return self._membership.context(self.progress.number, epoch=work.epoch)

        units = self._units.values()
        self._slice_updates.run(units, work.dp_rank, make_context, update, keep_bytes=keep_bytes)

    def close(self) -> None:
        """Stops the threads and closes the connections."""
        self._traffic.close()
        self._slice_updates.close()
        for server in self._servers.values():
            server.close()
        if self._cache is not None:
            self._cache.close()
        if self._node is not None:
            self._node.close()

    def _declare(self, layout: UnitLayout) -> coordinator_pb2.DeclareUnitResponse:
        request = coordinator_pb2.DeclareUnitRequest(
            context=self._membership.context(self.progress.number),
            trainer=self._membership.trainer,
            unit=layout.to_proto(),
        )
        response: coordinator_pb2.DeclareUnitResponse = self._membership.call("DeclareUnit", request)
        return response

    def _initialize(self, unit: RemoteUnit, values: InitialValues, epoch: int) -> None:
        context = self._membership.context(0, epoch=epoch)

        def upload(shard: RemoteShard) -> None:
            segments = [
                segment
                for segment in unit.layout.segments(shard.start_bytes, shard.stop_bytes)
                if segment.parameter_index not in values.draws
            ]
            header = shard_pb2.InitializeUnitHeader(
                context=self._membership.context(0, epoch=epoch),
                unit=unit.layout.unit,
                start_bytes=shard.start_bytes,
                stop_bytes=shard.stop_bytes,
                draws=values.draws.values(),
            )
            shard.server.client.initialize(
                header,
                lambda: itertools.chain.from_iterable(map(values.read, segments)),
                sum(segment.size_bytes for segment in segments),
                timeout_s=self._config.wait_limit_s,
                retry_for_s=self._config.wait_limit_s,
            )

        with ThreadPoolExecutor(min(_UPLOAD_THREADS, max(1, len(unit.shards)))) as uploads:
            list(uploads.map(upload, unit.shards))
        self._membership.call(
            "PublishInitialUnit",
            coordinator_pb2.PublishInitialUnitRequest(
                context=context, trainer=self._membership.trainer, unit=unit.layout.unit
            ),
        )

    def _reset(self, progress: ItemProgress) -> None:
        self._traffic.forget()
        request = coordinator_pb2.ResetWorkRequest(
            context=self._membership.context(self.progress.number, epoch=progress.item.epoch),
            trainer=self._membership.trainer,
            global_rank=progress.item.global_rank,
        )
        response: coordinator_pb2.ResetWorkResponse = self._membership.call("ResetWork", request)
        progress.item.CopyFrom(response.item)
        progress.parts.clear()
        self.progress.is_complete = False
        self._release_mailboxes(progress.item.dp_rank)
        if self._feedback is not None:
            self._feedback.reset(progress.item.dp_rank)

    def _release_mailboxes(self, dp_rank: int | None = None) -> None:
        for server in self._servers.values():
            if server.shm is not None:
                server.shm.release(dp_rank)

    def _server(self, address: str) -> ServerConnection:
        if address not in self._servers:
            self._servers[address] = ServerConnection(
                address, self._membership.run, kinds=self._config.lanes, chunk_bytes=self._config.chunk_bytes
            )
        return self._servers[address]
