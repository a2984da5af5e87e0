"""A declared unit and its shards on the servers.

The server that owns a shard now, and the repetition of operations that a move of the shard has broken.

A fetch of one shard, before it is sent.

A push of one shard's part of a gradient, after the gradient was read and before it is sent.

Reads and pushes one shard of a unit: from the host cache or its server, in any dtype, to any memory layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar

import torch

from shardwell.data_plane.error_feedback import EncodedGradients
from shardwell.data_plane.fetch_targets import CastTarget, RangeTarget, copy_all, views
from shardwell.data_plane.gradient_parts import EncodedPart, FlatGradients, VectorPart
from shardwell.data_plane.host_cache import CachedShard
from shardwell.data_plane.kept_streams import DecodedStream, DeltaCache, KeptStream
from shardwell.memory.buffers import BufferPool
from shardwell.transport.base import (
    GradientPart,
    NearlyDone,
    PartHeader,
    PreparedPush,
    PushedRange,
    ShardAddress,
    ignore,
)
from shardwell.transport.server_connection import Arrived, ServerConnection, SmallFetch
from shardwell.transport.shared_vector import SegmentLocation, SharedVector
from shardwell_wire import fault_points
from shardwell_wire.encoding import value_deltas
from shardwell_wire.encoding.streams import RangePlans
from shardwell_wire.encoding.wire_dtypes import AS_STORED, WireDtype
from shardwell_wire.errors import DeadlineError, ShardwellError, StaleEpochError, UnavailableError
from shardwell_wire.model.layout import Segment, UnitLayout
from shardwell_wire.model.names import RunIdentity


@dataclass(frozen=True, slots=True)
class RemoteUnit:
    """A declared unit and its shards."""

    index: int
    layout: UnitLayout
    shards: tuple[RemoteShard, ...]
    placement: int = 0
    """The run's placement when the shards were connected."""
    vector: SharedVector | None = None
    """The flat vector in shared memory of servers or of the host cache, if all of it can be read in place."""


Result = TypeVar("Result")


class Moves(Protocol):
    """Learns from the coordinator which shards have moved, and applies the moves."""

    def settle(self) -> None:
        """Waits until all moves that the coordinator has reported are applied.

        Raises:
            UnavailableError: They could not be applied in time.
        """
        ...

    def require_valid(self) -> None:
        """Raises StaleEpochError if this trainer is no member of the run now."""
        ...


class _NoMoves:
    """The shards never move."""

    def settle(self) -> None:
        """See ``Moves``."""

    def require_valid(self) -> None:
        """See ``Moves``."""


class ShardOwner:
    """The server that owns a shard. All views of the shard share one such object. Thread-safe.

    Attributes:
        server: The present owner. Changed by ``move`` only.

    Args:
        server: The present owner.
        moves: Moves the shard.
    """

    def __init__(self, server: ServerConnection, moves: Moves | None = None) -> None:
        self.server, self._moves = server, moves or _NoMoves()
        self._is_cut_anew = False

    def retire(self) -> None:
        """Marks a shard that does not exist any more, because a rollback has cut its unit anew."""
        self._is_cut_anew = True

    def move(self, server: ServerConnection) -> None:
        """Replaces the owner. Operations that fail at the former owner are repeated at the new one."""
        self.server = server

    def settle(self) -> None:
        """See ``Moves.settle``."""
        self._moves.settle()

    def require_valid(self) -> None:
        """See ``Moves.require_valid``."""
        self._moves.require_valid()

    def run(self, action: Callable[[ServerConnection], Result], *, member: bool = True) -> Result:
        """Runs an operation at the owner. Repeats it if it fails and the shard has another owner by then.

        Args:
            action: The operation. It may be repeated.
            member: Whether to repeat it only while this trainer is a member of the run.

        Raises:
            ShardwellError: The operation's error at the present owner.
            StaleEpochError: This trainer is no member of the run now. Every rollback ends its membership.
        """
        while True:
            server = self.server
            try:
                return action(server)
            except ShardwellError as error:
                if self.server is server:
                    self._moves.settle()
                if self._is_cut_anew:
                    self._moves.require_valid()
                    raise StaleEpochError(f"the run was rolled back, and the shard was cut anew: {error}") from error
                if self.server is server:
                    raise
            if member:
                self._moves.require_valid()


End = Callable[..., None]
"""Called once when a fetch has ended, with the version or with 0 and the error."""


class ShardFetch:
    """Fetches one version of a shard when it is called.

    Args:
        alone: Fetches the shard by itself.
        server: The server that owns the shard.
        small: The same fetch as part of a batch. None: the values are not streamed.
        wait_limit_s: The longest wait for the version.
    """

    def __init__(
        self,
        alone: Callable[[NearlyDone], int],
        server: ServerConnection,
        small: SmallFetch | None,
        *,
        wait_limit_s: float,
    ) -> None:
        self._alone, self.server, self.small, self.wait_limit_s = alone, server, small, wait_limit_s

    def __call__(self, nearly_done: NearlyDone) -> int:
        """Fetches the shard by itself; returns the version."""
        return self._alone(nearly_done)


class PendingFetch:
    """A small fetch of one shard as a part of a batch. A ``BatchedFetch``.

    Args:
        fetch: The fetch.
        small: The same fetch as part of a message.
        size_bytes: Size of the shard.
        end: See ``BatchedFetch.end``.
    """

    __slots__ = ("_fetch", "end", "size_bytes", "small")

    def __init__(self, fetch: ShardFetch, small: SmallFetch, size_bytes: int, end: End) -> None:
        self._fetch, self.small, self.size_bytes, self.end = fetch, small, size_bytes, end

    @property
    def server(self) -> ServerConnection:
        """The server that owns the shard."""
        return self._fetch.server

    @property
    def wait_limit_s(self) -> float:
        """The longest wait for the version."""
        return self._fetch.wait_limit_s

    def fetch_alone(self) -> int:
        """See ``BatchedFetch``."""
        return self._fetch(ignore)


def fetch_together(fetches: Sequence[PendingFetch], arrived: Arrived) -> None:
    """Fetches shards of one server with one request, for ``FetchBatches``."""
    first = fetches[0]
    first.server.fetch_batch([each.small for each in fetches], arrived, wait_limit_s=first.wait_limit_s)


class ShardPush:
    """Pushes one part of a contribution when it is called. May be called again: the server drops duplicates.

    Args:
        owner: The server that owns the shard.
        server: The server that the push was prepared for, which may have lost the shard meanwhile.
        prepared: The part.
        stream_bytes: Size of the part in a stream. 0: the part is in memory of the server.
        wait_limit_s: Deadline of the push.
    """

    __slots__ = ("_owner", "prepared", "server", "stream_bytes", "wait_limit_s")

    def __init__(
        self,
        owner: ShardOwner,
        server: ServerConnection,
        prepared: PreparedPush,
        *,
        stream_bytes: int,
        wait_limit_s: float,
    ) -> None:
        self.server, self.prepared, self.stream_bytes, self.wait_limit_s = server, prepared, stream_bytes, wait_limit_s
        self._owner = owner

    def __call__(self, nearly_done: NearlyDone) -> None:
        """Pushes the part by itself, to the present owner of the shard."""
        self.reach_before()
        self._owner.run(
            lambda server: server.push(self.prepared, wait_limit_s=self.wait_limit_s, nearly_done=nearly_done)
        )
        self.reach_after()

    def reach_before(self) -> None:
        """Marks the fault point before the push."""
        if fault_points.are_armed():
            fault_points.reach("client.push.before", **self._fields())

    def reach_after(self) -> None:
        """Marks the fault point after the push."""
        if fault_points.are_armed():
            fault_points.reach("client.push.after", **self._fields())

    def _fields(self) -> dict[str, Any]:
        push = self.prepared
        return {"unit": push.cut.unit, "dp_rank": push.header.common.dp_rank, "part": push.header.part}


def push_together(pushes: Sequence[ShardPush]) -> list[bool]:
    """Sends pushes to one server in one message, once; returns for each whether the server has accepted it."""
    if fault_points.are_armed():
        for push in pushes:
            push.reach_before()
    first = pushes[0]
    accepted = first.server.push_batch([push.prepared for push in pushes], wait_limit_s=first.wait_limit_s)
    if fault_points.are_armed():
        for push, is_accepted in zip(pushes, accepted, strict=True):
            if is_accepted:
                push.reach_after()
    return accepted


_ASK_S = 1.0
"""How long a server waits for a version before the trainer checks that it is still a member of the run."""

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
        run: The run.
        layout: Layout of the unit.
        server: The server that owns the range, or the owner of a shard that may move.
        start_bytes: Half-open range of the flat vector.
        stop_bytes: End of the range.
        wire: The dtypes in which values travel.
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
        self._address, self._wire = ShardAddress(run, layout, start_bytes, stop_bytes), wire
        self.owner = server if isinstance(server, ShardOwner) else ShardOwner(server)
        self.start_bytes, self.stop_bytes = start_bytes, stop_bytes
        self._plans = RangePlans(layout, start_bytes, stop_bytes)
        self._what = f"unit {layout.unit!r}, bytes [{start_bytes}, {stop_bytes})"
        self._kept = wire.kept_stream(self._what)
        self._cut = lru_cache(_CACHE_SIZE)(self._make_cut)
        """Returns parameters cut to the range, and the size of their stream. (indices, wire dtype)"""
        self.cached: CachedShard | None = None
        """The shard in the host cache, rounded to the gather dtype. Every fetch goes through the cache if it is set."""

    def forget(self) -> None:
        """Forgets the stream that is kept for deltas, because versions are going to be made again."""
        if self._kept is not None:
            self._kept.forget()

    def narrowed(self, start_bytes: int, stop_bytes: int) -> RemoteShard:
        """Returns a range inside this one that is streamed. A lossy dtype needs the whole range."""
        address, wire = self._address, replace(self._wire, deltas=None)
        return RemoteShard(address.run, address.layout, self.owner, start_bytes, stop_bytes, wire)

    @property
    def server(self) -> ServerConnection:
        """The server that owns the range now."""
        return self.owner.server

    @property
    def wait_limit_s(self) -> float:
        """The longest wait for a version to exist."""
        return self._wire.wait_limit_s

    def move(self, server: ServerConnection) -> None:
        """Replaces the owner of the range. Until ``map`` is called again, fetches stream from the new owner."""
        if self.owner.server is not server:
            self._address.window = None
            self.owner.move(server)

    @property
    def address(self) -> ShardAddress:
        """The shard as transports address it."""
        return self._address

    @property
    def is_mapped(self) -> bool:
        """Whether fetches copy from the server's memory."""
        return self._address.window is not None

    @property
    def is_streamed(self) -> bool:
        """Whether fetches stream the values as stored, from the server to this trainer."""
        return self._address.window is None and self.cached is None and self._wire.gather_dtype == AS_STORED

    # ---- reading in place ----

    def locate(self, version: int | None = None) -> SegmentLocation | None:
        """Returns the shard's segment in shared memory of its server, or None if this process cannot map it.

        Args:
            version: Waits until the segment shows this version or a newer one. None: does not wait.
        """
        return self.server.locate(self._address, version, wait_limit_s=self._wire.wait_limit_s)

    def map(self, location: SegmentLocation, *, ask: Callable[[], None] = lambda: None) -> None:
        """Maps the shard's segment, so that fetches copy from it.

        Args:
            location: The segment.
            ask: See ``SharedVector``.
        """
        self._address.window = SharedVector(self._address.layout.unit, [location], ask=ask)

    def await_version(self, version: int | None) -> int:
        """Waits until a shard that is read in place has a version; returns the version."""
        if self.cached is None or version is None:
            try:
                return self._run_when_ready(version, partial(self._await_at, version))
            except UnavailableError:
                if self.cached is None or version is None:  # otherwise it has moved to another host
                    raise
        return self.cached.ensure(version, partial(self._fetch_to_cache, version))

    def _await_at(self, version: int | None, server: ServerConnection, wait_s: float) -> int:
        return server.await_version(self._address, version, wait_s=wait_s, wait_limit_s=self._wire.wait_limit_s)

    def _run_when_ready(
        self, version: int | None, action: Callable[[ServerConnection, float], int], *, member: bool = True
    ) -> int:
        """Runs an operation at the owner that waits for a version.

        Args:
            version: The version. None: any, and this trainer may be no member of the run.
            action: The operation. Its last argument is how long the server may wait.
            member: Whether only a member of the run may wait for the version.
        """
        member = member and version is not None
        deadline = time.monotonic() + self._wire.wait_limit_s
        while True:
            wait_s = min(_ASK_S, max(0.0, deadline - time.monotonic()))
            try:
                return self.owner.run(lambda server: action(server, wait_s), member=member)  # noqa: B023
            except DeadlineError:
                if version is None or wait_s < _ASK_S or time.monotonic() >= deadline:
                    raise
            if member:
                self.owner.require_valid()  # the version never comes if the run went back to an older one

    # ---- fetching ----

    def fetch(
        self, version: int | None, target: memoryview, nearly_done: NearlyDone = ignore, *, exact: bool = False
    ) -> int:
        """Reads one version into ``target``, waiting until it exists; returns the version.

        Args:
            version: None: the newest.
            target: Receives the range, padding included. [stop_bytes - start_bytes]
            nearly_done: Called when the transfer is nearly done.
            exact: Whether to read the values as stored, without rounding.
        """
        wire_dtype = AS_STORED if exact else self._wire.gather_dtype
        if self.cached is not None and version is not None and wire_dtype == self._wire.gather_dtype:
            return self.cached.read(version, target, partial(self._fetch_to_cache, version))
        return self._fetch_into(version, self._range_target(wire_dtype, target), nearly_done)

    def fetch_cast(
        self, version: int | None, layout: UnitLayout, target: memoryview, nearly_done: NearlyDone = ignore
    ) -> int:
        """Reads one version in other dtypes than the stored ones, with as few copies as the transport allows.

        Args:
            version: Waited for until it exists. None: the newest.
            layout: The unit's parameters in the dtypes to deliver.
            target: The unit's whole flat vector in that layout. Receives this shard's values. [layout.size_bytes]
            nearly_done: Called when the transfer is nearly done.
        """
        if self.cached is None:
            return self._fetch_into(version, self._cast_target(layout, target), nearly_done)
        with self._wire.encoded.acquired(self.stop_bytes - self.start_bytes) as stored:
            fetched = self.fetch(version, stored, nearly_done)
            copy_all(
                views(self._plans, self._address.layout, stored, self.start_bytes),
                views(self._plans, layout, target, 0),
            )
        return fetched

    def prepare_fetch(self, version: int, target: memoryview, *, exact: bool = False) -> ShardFetch:
        """Returns a fetch that can be called later; see ``fetch``."""
        wire_dtype = AS_STORED if exact else self._wire.gather_dtype
        in_range = self._range_target(wire_dtype, target)
        return self._prepared_fetch(partial(self.fetch, version, target, exact=exact), version, in_range)

    def prepare_fetch_cast(self, version: int, layout: UnitLayout, target: memoryview) -> ShardFetch:
        """Returns a fetch that can be called later; see ``fetch_cast``."""
        cast = self._cast_target(layout, target)
        return self._prepared_fetch(partial(self.fetch_cast, version, layout, target), version, cast)

    def _prepared_fetch(
        self, alone: Callable[[NearlyDone], int], version: int, target: RangeTarget | CastTarget
    ) -> ShardFetch:
        is_streamed = self._address.window is None and self.cached is None and not target.is_kept(version)
        small = SmallFetch(self._address, version, target) if is_streamed else None
        return ShardFetch(alone, self.server, small, wait_limit_s=self.wait_limit_s)

    def fetch_average(self, version: int, target: memoryview, *, member: bool = True) -> int:
        """Reads the values' moving average; see ``fetch``.

        Args:
            version: The version.
            target: Receives the range.
            member: Whether only a member of the run may wait for the version.
        """
        average, limit_s = self._range_target(AS_STORED, target), self._wire.wait_limit_s
        return self._run_when_ready(
            version,
            lambda server, wait_s: server.fetch_average(
                self._address, version, average, wait_s=wait_s, wait_limit_s=limit_s
            ),
            member=member,
        )

    def _range_target(self, wire_dtype: WireDtype, target: memoryview) -> RangeTarget:
        kept = self._kept if wire_dtype == self._wire.gather_dtype else None
        return RangeTarget(self._plans, wire_dtype, self.start_bytes, target, self._wire.encoded, kept)

    def _cast_target(self, layout: UnitLayout, target: memoryview) -> CastTarget:
        return CastTarget(
            self._address, self._plans, self._wire.gather_dtype, self._wire.encoded, layout, target, self._kept
        )

    def _fetch_to_cache(self, version: int, target: memoryview, former: int | None) -> int:
        """Fetches a version into the host cache, which has the former version now, or an unknown one."""
        in_cache = self._range_target(self._wire.gather_dtype, target)
        if self._wire.deltas is not None and self._kept is not None:
            in_cache.kept = DecodedStream(self._wire.deltas, self._what, former, in_cache.encode)
        return self._fetch_into(version, in_cache, ignore)

    def _fetch_into(self, version: int | None, target: RangeTarget | CastTarget, nearly_done: NearlyDone) -> int:
        limit_s = self._wire.wait_limit_s
        if self._address.window is None and target.read_kept(version):
            assert version is not None
            return version
        return self._run_when_ready(
            version,
            lambda server, wait_s: server.fetch(
                self._address, version, target, wait_s=wait_s, wait_limit_s=limit_s, nearly_done=nearly_done
            ),
        )

    # ---- pushing ----

    def prepare_push(self, header: PartHeader, flats: Mapping[int, torch.Tensor]) -> ShardPush:
        """Prepares a push of this shard's part of gradients.

        Args:
            header: Which part of which contribution it is.
            flats: Whole gradients by parameter index; contiguous, on the CPU, without a graph.

        Returns:
            The push, to be called in any thread. It refers to ``flats`` only if they are streamed: a transport through
            shared memory has copied them.
        """
        indices, wire_dtype = tuple(sorted(flats)), self._wire.push_dtype
        part = FlatGradients(self._plans, indices, wire_dtype, self.start_bytes, flats, self._wire.encoded)
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
            header: Names the ranks.
            indices: Parameters that have a gradient, by rising index.
            memory: The sum, laid out like the range. uint8. [stop_bytes - start_bytes]
        """
        part = VectorPart(self._plans, tuple(indices), self.start_bytes, memory)
        return self._prepare(header, part.indices, part)

    def _prepare(self, header: PartHeader, indices: tuple[int, ...], part: GradientPart) -> ShardPush:
        cut, size_bytes = self._cut(indices, part.wire_dtype)
        push = PreparedPush(self._address, cut, header, part)
        server, prepared = self.owner.run(lambda server: (server, server.prepare_push(push)))
        stream_bytes = size_bytes
        if prepared.is_shared:
            if part.wire_dtype != AS_STORED:
                _, size_bytes = self._cut(indices, AS_STORED)
            server.shared_counter.add(sent_bytes=size_bytes)
            stream_bytes = 0
        return ShardPush(self.owner, server, prepared, stream_bytes=stream_bytes, wait_limit_s=self._wire.wait_limit_s)

    def _make_cut(self, indices: tuple[int, ...], wire_dtype: WireDtype) -> tuple[PushedRange, int]:
        cut = PushedRange(self._address.layout.unit, self.start_bytes, self.stop_bytes, indices)
        return cut, self._plans.plan(indices, wire_dtype).size_bytes
