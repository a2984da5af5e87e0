"""One shard of a unit, as this trainer reads it and pushes to it: in any dtype, from or to any memory layout.

A ``ShardFetch`` and a ``ShardPush`` are one transfer each, from the training thread to the transport. ``ShardOwner``
names the server that owns the shard now, and repeats a transfer that failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch

from shardwell.data_plane.error_feedback import EncodedGradients
from shardwell.data_plane.fetch_targets import CastTarget, CopyToDevice, DeviceTarget, IncomingChanges, RangeTarget
from shardwell.data_plane.gradient_parts import EncodedPart, FlatGradients, VectorPart
from shardwell.data_plane.host_copy import HostCopy
from shardwell.data_plane.kept_streams import DecodedStream, DeltaCache, KeptStream
from shardwell.memory.buffers import BufferPool
from shardwell.transport.base import (
    DIRECT,
    HIERARCHICAL,
    Arrived,
    GradientPart,
    NearlyDone,
    PartHeader,
    PreparedPush,
    PushedRange,
    ShardAddress,
    ShardRead,
    Since,
    ignore,
)
from shardwell.transport.relay_connection import RelayConnection, RelayLostError
from shardwell.transport.resending import SHARED_TRANSFER, TRANSFER, Operation, Resending
from shardwell.transport.server_connection import ServerConnection
from shardwell.transport.shared_vector import SegmentLocation, SharedVector
from shardwell_wire import fault_points
from shardwell_wire.encoding import value_deltas
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.shard_changes import ShardChanges, spans_of
from shardwell_wire.encoding.streams import InVector, RangePlans
from shardwell_wire.encoding.wire_dtypes import AS_STORED, WireDtype
from shardwell_wire.errors import ShardwellError, StaleEpochError, StepStateError, UnavailableError
from shardwell_wire.model.layout import Segment, UnitLayout
from shardwell_wire.model.names import RunIdentity

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteUnit:
    """A declared unit and its shards."""

    index: int
    layout: UnitLayout
    shards: tuple[RemoteShard, ...]
    placement: int = 0
    """The run's placement when the shards were connected."""
    vector: SharedVector | None = None
    """The flat vector in shared memory of servers or of the relay, if all of it can be read in place."""


class ShardOwner(Resending[ServerConnection]):
    """The server that owns a shard. All views of the shard share one such object. Thread-safe.

    Attributes:
        server: The present owner. Changed by ``move`` only.
    """

    def __init__(self, server: ServerConnection) -> None:
        super().__init__(server)
        self._is_cut_anew = False

    def retire(self) -> None:
        """Marks a shard that does not exist any more, because a rollback has cut its unit anew."""
        self._is_cut_anew = True

    def move(self, server: ServerConnection) -> None:
        """Replaces the owner. Operations that fail at the former owner are repeated at the new one."""
        self.server = server

    def _has_moved(self, server: ServerConnection, error: ShardwellError, operation: Operation, member: bool) -> bool:
        if self.server is server:
            self.policy.settle(mapped=not operation.holds_copy)
        if self._is_cut_anew:
            self.policy.require_valid()
            raise StaleEpochError(f"the run was rolled back, and the shard was cut anew: {error}") from error
        if self.server is server:
            return False
        if member:
            self.policy.require_valid()
        return True


class ShardFetch(ShardRead):
    """A fetch of one version of a shard, which runs when it is called, or in a batch.

    Args:
        version: The version to wait for. None: the newest.
        target: Receives the values.
        average: See ``ShardRead``.
        member: Whether only a member of the run may wait for the version.
    """

    __slots__ = ("_member", "end", "remote", "size_bytes")

    target: RangeTarget | CastTarget | DeviceTarget

    def __init__(
        self,
        remote: RemoteShard,
        version: int | None,
        target: RangeTarget | CastTarget | DeviceTarget,
        *,
        average: bool = False,
        member: bool = True,
    ) -> None:
        super().__init__(remote.address, version, target, average)
        self.remote, self._member = remote, member and version is not None
        self.size_bytes = remote.size_bytes
        self.end: End = ignore_end
        """Called once, in any thread, when the fetch has ended as a part of a batch."""

    @property
    def may_be_batched(self) -> bool:
        """Whether the values travel in a stream."""
        remote, version = self.remote, self.version
        if remote.address.window is not None or remote.cached is not None or version is None:
            return False
        return self.target.kept is None or not self.target.is_kept(version)

    def __call__(self, nearly_done: NearlyDone = ignore, *, past_copy: bool = False) -> int:
        """Fetches the shard by itself; returns the version.

        Args:
            nearly_done: Called when few bytes are missing.
            past_copy: Whether the shard comes from its server, although there may be a copy on this host.
        """
        remote, version, target, operation = self.remote, self.version, self.target, TRANSFER
        in_cache = remote.cached is not None and version is not None and not self.average and not past_copy
        if in_cache and target.wire_dtype == remote.gather_dtype:
            assert version is not None
            return remote.read_cached(version, target)
        if self.shard.window is not None and not self.average:
            operation = SHARED_TRANSFER
        elif version is not None and target.kept is not None and target.read_kept(version):
            return version
        if past_copy:
            operation = replace(operation, holds_copy=True)
        limit_s = remote.wait_limit_s
        until_s = None if version is None else time.monotonic() + limit_s
        # No attribute refers to `nearly_done`: it refers to this fetch, and a cycle would keep the target in memory.
        return remote.owner.run(
            lambda server, wait_s: server.fetch(
                self, wait_s=min(wait_s, limit_s), timeout_s=limit_s, nearly_done=nearly_done
            ),
            operation,
            until_s=until_s,
            member=self._member,
        )


End = Callable[..., None]
"""Called with the version of a fetch, or with 0 and its error."""


def ignore_end(version: int, error: BaseException | None = None) -> None:
    """An ``End`` that does nothing."""


def fetch_together(server: ServerConnection, fetches: Sequence[ShardFetch], arrived: Arrived) -> None:
    """Fetches shards of one server with one request, for ``FetchBatches``."""
    server.fetch_batch(fetches, arrived, wait_limit_s=fetches[0].remote.wait_limit_s)


@dataclass(frozen=True, slots=True)
class RelayedPush:
    """How a gradient goes through the relay of this host, which adds it to those of the other trainers.

    If the relay fails in any way, the owner of the shard gets the gradient.
    """

    relay: RelayConnection
    note_sum: Callable[[Sequence[int], int], None]
    """Called in any thread with the ranks in a sum, and the bytes that were pushed for this trainer."""
    spoil: Callable[[], None]
    """Called in any thread if the attempt at the work item must start again."""

    def push(self, prepared: PreparedPush, shard: RemoteShard, limit_s: float) -> tuple[str, int, int] | None:
        """Pushes a part through the relay; returns ``ShardPush.counted``. None: the owner must get the part."""
        try:
            answer = self.relay.push_relayed(prepared, timeout_s=limit_s)
        except (RelayLostError, ShardwellError) as error:
            logger.info("a gradient of unit %r is pushed to its server: %s", prepared.cut.unit, error)
            return None
        ranks = answer.summed_dp_ranks
        if not ranks:
            return DIRECT, answer.pushed_bytes, 0
        self.note_sum(ranks, answer.pushed_bytes)
        if answer.pushed_bytes:
            return HIERARCHICAL, answer.pushed_bytes, 0
        return HIERARCHICAL, 0, sum(segment.size_bytes for segment in shard.segments_of(prepared.cut.indices))


@dataclass(slots=True, eq=False)
class ShardPush:
    """A push of one shard's part of a contribution, which runs when it is called, or in a batch. May be repeated."""

    shard: RemoteShard
    size_bytes: int
    """Size of the shard."""
    server: ServerConnection
    """The server that the push was prepared for, which may have lost the shard meanwhile."""
    prepared: PreparedPush | None = None
    """The part. None: ``prepare`` makes the part when the push is sent."""
    stream_bytes: int = 0
    """Size of the part in a stream. 0: the part is in memory of the server."""
    via: RelayedPush | None = None
    """How the part goes through the relay. None: it goes to the owner of the shard."""
    counted: tuple[str, int, int] | None = None
    """For a part with ``via``: its route, the pushed bytes, and the bytes that another trainer's push contains."""
    prepare: Callable[[], PreparedPush] | None = None
    # ---- set by ``Pushes``, which queues the push ----
    of: Any = None
    """The push of the whole unit."""
    key: tuple[int, int] = (0, 0)
    """Unit index and number of the shard. Pushes with the same key are sent in order."""
    batches: Any = None
    """The batches that contain the part. None: it is sent by itself."""
    done: bool = False
    """Whether the part has ended. It then refers to no gradients."""
    error: BaseException | None = None
    """Why the push failed. Set before it is reported as ended."""

    def __call__(self, nearly_done: NearlyDone = ignore) -> None:
        """Pushes the part by itself, to the present owner of the shard."""
        prepared, has_faults = self.prepared or self.require_prepared(), bool(fault_points.armed_points)
        if has_faults:
            fault_points.reach("client.push.before", **details(prepared))
        limit_s, via = self.shard.wait_limit_s, self.via
        if via is not None:
            self.counted = via.push(prepared, self.shard, limit_s)
        if self.counted is None:
            try:
                self.shard.owner.run(
                    lambda server, _: server.push(prepared, timeout_s=limit_s, nearly_done=nearly_done),
                    SHARED_TRANSFER if prepared.is_shared else TRANSFER,
                )
            except StepStateError as error:
                if via is not None and "sum" in error.data:
                    via.spoil()  # the relay has died after it had pushed the sum
                raise
        if has_faults:
            fault_points.reach("client.push.after", **details(prepared))

    def require_prepared(self) -> PreparedPush:
        """Returns the part, which is prepared now if it is not yet."""
        if self.prepared is not None:
            return self.prepared
        assert self.prepare is not None
        return self.prepare()


def details(push: PreparedPush) -> dict[str, Any]:
    """Returns what a fault point says of a push."""
    return {"unit": push.cut.unit, "dp_rank": push.header.common.dp_rank, "part": push.header.part}


def push_together(pushes: Sequence[ShardPush]) -> list[bool]:
    """Sends pushes to one server in one message, once; returns for each whether the server has accepted it."""
    parts, first = [push.prepared for push in pushes if push.prepared is not None], pushes[0]
    if fault_points.armed_points:
        for part in parts:
            fault_points.reach("client.push.before", **details(part))
    accepted = first.server.push_batch(parts, wait_limit_s=first.shard.wait_limit_s)
    if fault_points.armed_points:
        for part, is_accepted in zip(parts, accepted, strict=True):
            if is_accepted:
                fault_points.reach("client.push.after", **details(part))
    return accepted


_IDLE_BYTES = 64 << 20

_CACHE_SIZE = 16
"""Sets of parameters that a shard remembers. Most units push all parameters together."""


@dataclass(frozen=True)
class Wire:
    """The dtypes in which one trainer's floats travel, and how long it waits."""

    gather_dtype: WireDtype = AS_STORED
    push_dtype: WireDtype = AS_STORED
    wait_limit_s: float = 600.0
    """The longest wait for a version to exist, or for an unavailable server to return."""
    encoded: BufferPool = field(default_factory=lambda: BufferPool(_IDLE_BYTES))
    """Memory for encoded streams."""
    deltas: DeltaCache | None = None
    """Memory in which weights are kept, so that servers send deltas. None: servers send whole streams."""

    def kept_stream(self, what: str) -> KeptStream | None:
        """Returns a new kept stream of a shard. None: servers send whole streams."""
        if self.deltas is None or self.gather_dtype not in value_deltas.WIRE_DTYPES:
            return None
        return KeptStream(self.deltas, what)


class RemoteShard:
    """The range of a unit's flat vector that one server owns.

    A lossy dtype rounds the values on every transport, even where no bytes travel. So the result does not depend on
    the transport.

    Args:
        server: The server that owns the range, or the owner of a shard that may move.
        start_bytes: Half-open range of the flat vector.
        stop_bytes: End of the range.
    """

    def __init__(
        self,
        run: RunIdentity,
        layout: UnitLayout,
        server: ServerConnection | ShardOwner,
        start_bytes: int,
        stop_bytes: int,
        wire: Wire,
    ) -> None:
        self.address, self._wire = ShardAddress(run, layout, start_bytes, stop_bytes), wire
        """The shard as transports address it."""
        self.wait_limit_s, self.gather_dtype = wire.wait_limit_s, wire.gather_dtype
        """The longest wait for a version to exist, and the dtype to which fetched values are rounded."""
        self.owner = server if isinstance(server, ShardOwner) else ShardOwner(server)
        self.start_bytes, self.stop_bytes, self.size_bytes = start_bytes, stop_bytes, stop_bytes - start_bytes
        self._plans = RangePlans(layout, start_bytes, stop_bytes)
        self._what = f"unit {layout.unit!r}, bytes [{start_bytes}, {stop_bytes})"
        self._kept = wire.kept_stream(self._what)
        self._cut = lru_cache(_CACHE_SIZE)(self._make_cut)
        """Returns parameters cut to the range, and the size of their stream. (indices, wire dtype)"""
        self.cached: HostCopy | None = None
        """A copy of the shard on this host, rounded to the gather dtype. Every fetch goes through it if it is set."""

    def forget(self) -> None:
        """Forgets the stream that is kept for deltas, because versions are going to be made again."""
        if self._kept is not None:
            self._kept.forget()

    def narrowed(self, start_bytes: int, stop_bytes: int) -> RemoteShard:
        """Returns a range inside this one that is streamed. A lossy dtype needs the whole range."""
        address, wire = self.address, replace(self._wire, deltas=None)
        return RemoteShard(address.run, address.layout, self.owner, start_bytes, stop_bytes, wire)

    @property
    def largest_ranges_bytes(self) -> int:
        """Up to this size, ranges are read by ``fetch_range`` with fewer bytes than the whole shard."""
        size_bytes = self.stop_bytes - self.start_bytes
        if self.gather_dtype == AS_STORED:
            return size_bytes
        # Values of 8 bits depend on those around them, and the kept stream is whole.
        return size_bytes // 2 if self.gather_dtype in value_deltas.WIRE_DTYPES and self._kept is None else 0

    def fetch_range(self, version: int, start_bytes: int, target: memoryview) -> None:
        """Reads whole elements as a stream. They travel as stored, and are rounded here.

        Args:
            start_bytes: Start of the range in the flat vector.
            target: Receives the range.
        """
        stop_bytes = start_bytes + len(target)
        self.narrowed(start_bytes, stop_bytes).fetch(version, target, exact=True)
        if self.gather_dtype != AS_STORED:
            values = InVector(target, start_bytes)
            RangePlans(self.address.layout, start_bytes, stop_bytes).plan(None, self.gather_dtype).round_trip(
                values, values
            )

    @property
    def server(self) -> ServerConnection:
        """The server that owns the range now."""
        return self.owner.server

    def move(self, server: ServerConnection) -> None:
        """Replaces the owner of the range. Until ``map`` is called again, fetches stream from the new owner."""
        if self.owner.server is not server:
            self.address.window = None
            self.owner.move(server)

    @property
    def is_mapped(self) -> bool:
        """Whether fetches copy from the server's memory."""
        return self.address.window is not None

    @property
    def is_streamed(self) -> bool:
        """Whether fetches stream the values as stored, from the server to this trainer."""
        return self.address.window is None and self.cached is None and self._wire.gather_dtype == AS_STORED

    # ---- reading in place ----

    def locate(self, version: int | None = None) -> SegmentLocation | None:
        """Returns the shard's segment in shared memory of its server, or None if this process cannot map it.

        Args:
            version: Waits until the segment shows this version or a newer one. None: does not wait.
        """
        return self.server.locate(self.address, version, wait_limit_s=self._wire.wait_limit_s)

    def map(self, location: SegmentLocation, *, ask: Callable[[], None] = lambda: None) -> None:
        """Maps the shard's segment, so that fetches copy from it. ``ask``: see ``SharedVector``."""
        self.address.window = SharedVector(self.address.layout.unit, [location], ask=ask)

    def await_version(self, version: int | None) -> int:
        """Waits until a shard that is read in place has a version; returns the version."""
        if self.cached is None or version is None:
            until_s = None if version is None else time.monotonic() + self.wait_limit_s
            try:
                return self.owner.run(
                    lambda server, wait_s: server.await_version(
                        self.address, version, wait_s=min(wait_s, self.wait_limit_s)
                    ),
                    SHARED_TRANSFER,
                    until_s=until_s,
                    member=version is not None,
                )
            except UnavailableError:
                if self.cached is None or version is None:  # otherwise it has moved to another host
                    raise
        self.fetch_copy(self.cached, version)
        return version

    def fetch_copy(self, copy: HostCopy, version: int) -> None:
        """Waits until the copy on this host has a version: from the relay, or fetched by this process."""
        if copy.shows(version):
            copy.count_hit()
            return
        if copy.relay is not None:
            try:
                self.owner.run(
                    lambda _, wait_s: copy.await_relay(version, wait_s), until_s=time.monotonic() + self.wait_limit_s
                )
                return
            except RelayLostError as error:
                logger.info("unit %r is fetched by this trainer itself: %s", self.address.layout.unit, error)
                copy.leave_relay()
        copy.fetch(version, partial(self._fetch_to_copy, version))

    # ---- fetching ----

    def fetch(self, version: int | None, target: memoryview, *, exact: bool = False) -> int:
        """Reads one version into ``target``, waiting until it exists; returns the version; see ``prepare_fetch``."""
        return self.prepare_fetch(version, target, exact=exact)()

    def keeps(self, version: int) -> bool:
        """Returns whether the stream of a version is kept for deltas now."""
        return self._kept is not None and self._kept.has(version)

    def fetch_changes(self, version: int, since: Since, target: memoryview) -> ShardChanges | None:
        """Reads what has changed since a version: from the server, or by comparing a stream that is kept for deltas.

        Args:
            since: The older version.
            target: Receives the shard if the server sends it whole. [stop_bytes - start_bytes]

        Returns:
            None: ``target`` has the shard.
        """
        wire, stream_bytes = self._wire.gather_dtype, self.stop_bytes - self.start_bytes
        spans = spans_of(self.address.layout, self._plans.segments(None), wire, self.start_bytes)
        if spans and self._kept is not None and (before := self._kept.copy(since.version)) is not None:
            self.fetch(version, target)
            if (after := self._kept.copy(version)) is None:
                return None
            base, stream = (memory_at(each.data_ptr(), each.numel(), each) for each in (before, after))
            return ShardChanges.between(spans, base, stream, self._what)
        if wire != AS_STORED:
            stream_bytes = self._plans.plan(None, wire).size_bytes
        whole = RangeTarget(self._plans, wire, self.start_bytes, target, self._wire.encoded)
        incoming = IncomingChanges(spans, since, whole, stream_bytes, self._what)
        read, limit_s = ShardRead(replace(self.address, window=None), version, incoming), self.wait_limit_s
        self.owner.run(lambda server, wait_s: server.fetch(read, wait_s=wait_s, timeout_s=limit_s), member=False)
        return incoming.changes

    def fetch_average(self, version: int, target: memoryview, *, member: bool = True) -> int:
        """Reads the values' moving average; see ``fetch``.

        Args:
            target: Receives the range.
            member: Whether only a member of the run may wait for the version.
        """
        return ShardFetch(self, version, self._range_target(AS_STORED, target), average=True, member=member)()

    def prepare_fetch(self, version: int | None, target: memoryview, *, exact: bool = False) -> ShardFetch:
        """Returns a fetch of one version into ``target``, which waits until the version exists.

        Args:
            version: None: the newest.
            target: Receives the range, padding included. [stop_bytes - start_bytes]
            exact: Whether to read the values as stored, without rounding.
        """
        wire = self._wire
        if exact and wire.gather_dtype != AS_STORED:
            return ShardFetch(self, version, self._range_target(AS_STORED, target))
        into = RangeTarget(self._plans, wire.gather_dtype, self.start_bytes, target, wire.encoded, self._kept)
        return ShardFetch(self, version, into)

    def prepare_fetch_cast(self, version: int | None, layout: UnitLayout, target: memoryview) -> ShardFetch:
        """Returns a fetch in other dtypes than the stored ones, with as few copies as the transport allows.

        Args:
            version: Waited for until it exists. None: the newest.
            layout: The unit's parameters in the dtypes to deliver.
            target: The unit's whole flat vector in that layout. Receives this shard's values. [layout.size_bytes]
        """
        wire = self._wire
        cast = CastTarget(self.address, self._plans, wire.gather_dtype, wire.encoded, layout, target, self._kept)
        return ShardFetch(self, version, cast)

    @property
    def is_registered(self) -> bool:
        """Whether a GPU can copy the stored values from the server's memory. Registers it with CUDA at first."""
        if self._wire.gather_dtype != AS_STORED or self.cached is not None:
            return False
        window = self.address.window
        return self.start_bytes == self.stop_bytes or (window is not None and window.registered is not None)

    def prepare_fetch_to_device(self, version: int, copy: CopyToDevice) -> ShardFetch:
        """Returns a fetch to a GPU, from registered memory. Waits for the version, and for the copy.

        Args:
            copy: Copies the shard's part.
        """
        target = DeviceTarget(self.start_bytes, self.stop_bytes, copy, self._wire.encoded)
        return ShardFetch(self, version, target)

    def read_cached(self, version: int, target: RangeTarget | CastTarget | DeviceTarget) -> int:
        """Reads a version from the copy on this host, in which it is fetched if it is missing; returns the version."""
        copy = self.cached
        assert copy is not None
        self.fetch_copy(copy, version)
        if isinstance(target, RangeTarget):
            return copy.copy_to(version, target.memory)
        with self._wire.encoded.acquired(self.size_bytes) as stored:
            copy.copy_to(version, stored)
            target.deliver_stored(stored)
        return version

    def _range_target(self, wire_dtype: WireDtype, target: memoryview) -> RangeTarget:
        kept = self._kept if wire_dtype == self._wire.gather_dtype else None
        return RangeTarget(self._plans, wire_dtype, self.start_bytes, target, self._wire.encoded, kept)

    def _fetch_to_copy(self, version: int, target: memoryview, former: int | None) -> int:
        """Fetches a version into memory of this process, which has the former version now, or an unknown one."""
        in_cache = self._range_target(self._wire.gather_dtype, target)
        if self._wire.deltas is not None and self._kept is not None:
            in_cache.kept = DecodedStream(self._wire.deltas, self._what, former, in_cache.encode)
        return ShardFetch(self, version, in_cache)(past_copy=True)

    # ---- pushing ----

    def prepare_push_later(
        self, header: PartHeader, read: Callable[[], Mapping[int, torch.Tensor]], via: RelayedPush | None = None
    ) -> ShardPush:
        """Prepares a push whose gradients are read when it is sent; see ``prepare_push``."""
        later = ShardPush(self, self.size_bytes, self.owner.server if via is None else via.relay, via=via)
        later.prepare = lambda: self.prepare_push(header, read(), via).require_prepared()
        return later

    def prepare_push(
        self, header: PartHeader, flats: Mapping[int, torch.Tensor], via: RelayedPush | None = None
    ) -> ShardPush:
        """Prepares a push of this shard's part of gradients.

        Args:
            header: Which part of which contribution it is.
            flats: Whole gradients by parameter index; contiguous, on the CPU, without a graph.
            via: How they go through the relay. None: they go to the owner of the shard.

        Returns:
            The push, to be called in any thread. It refers to ``flats`` only if they are streamed: a transport through
            shared memory has copied them.
        """
        indices, wire_dtype = tuple(sorted(flats)), self._wire.push_dtype
        part = FlatGradients(self._plans, indices, wire_dtype, self.start_bytes, flats, self._wire.encoded)
        if via is not None:
            push = PreparedPush(self.address, self._cut(indices, wire_dtype)[0], header, part)
            try:
                return ShardPush(self, self.size_bytes, via.relay, via.relay.prepare_relayed(push), via=via)
            except (RelayLostError, ShardwellError) as error:
                logger.info("a gradient of unit %r is pushed to its server: %s", self.address.layout.unit, error)
        return self._prepare(header, indices, part)

    def prepare_push_encoded(self, header: PartHeader, gradients: EncodedGradients) -> ShardPush:
        """Prepares a push of this shard's part of encoded gradients; see ``prepare_push``."""
        indices, wire_dtype = gradients.indices, gradients.wire_dtype
        pieces = [piece.of(gradients.stream) for piece in self._plans.pieces_of_unit(indices, wire_dtype)]
        part = EncodedPart(self._plans, indices, wire_dtype, self.start_bytes, pieces)
        return self._prepare(header, indices, part)

    def segments_of(self, indices: tuple[int, ...]) -> Sequence[Segment]:
        """Returns the segments of some parameters in the range."""
        return self._plans.segments(indices)

    def prepare_push_sum(self, header: PartHeader, indices: Sequence[int], memory: torch.Tensor) -> ShardPush:
        """Prepares a push of a sum of several ranks' gradients; see ``prepare_push``. The sum is never rounded.

        Args:
            indices: Parameters that have a gradient, by rising index.
            memory: The sum, laid out like the range. uint8. [stop_bytes - start_bytes]
        """
        part = VectorPart(self._plans, tuple(indices), self.start_bytes, memory)
        return self._prepare(header, part.indices, part)

    def _prepare(self, header: PartHeader, indices: tuple[int, ...], part: GradientPart) -> ShardPush:
        cut, size_bytes = self._cut(indices, part.wire_dtype)
        push, server = PreparedPush(self.address, cut, header, part), self.owner.server
        prepared = server.copy_at_once(push) if server.copies_gradients else push
        if prepared is None:
            server, prepared = self.owner.run(lambda server, _: (server, server.prepare_push(push)), SHARED_TRANSFER)
        if prepared.is_shared:
            if part.wire_dtype != AS_STORED:
                _, size_bytes = self._cut(indices, AS_STORED)
            server.shared_counter.add(sent_bytes=size_bytes)
            size_bytes = 0
        return ShardPush(self, self.size_bytes, server, prepared, size_bytes)

    def _make_cut(self, indices: tuple[int, ...], wire_dtype: WireDtype) -> tuple[PushedRange, int]:
        cut = PushedRange(self.address.layout.unit, self.start_bytes, self.stop_bytes, indices)
        return cut, self._plans.plan(indices, wire_dtype).size_bytes
