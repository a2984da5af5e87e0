"""Reads a pinned version of a live run's weights while training continues, without a rank and the model's code."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import TypeVar

import torch

from shardwell.data_plane.kept_streams import DeltaCache
from shardwell.data_plane.shard import RemoteShard, Wire
from shardwell.transport.base import Since
from shardwell.transport.resending import ResendPolicy
from shardwell.transport.server_connection import TRANSPORT_NAMES, ConnectOptions, ServerConnection
from shardwell.transport.service_client import CoordinatorClient, StandingRpc
from shardwell.transport.shared_vector import CAN_MAP
from shardwell.weights.changes import StoredChanges, TensorChange, UnitChanges
from shardwell.weights.stored_parameters import (
    Chosen,
    Names,
    PlacedUnit,
    Slices,
    StoredParameter,
    choose,
    ranges_of,
    stored_parameters,
)
from shardwell.weights.weight_files import differences, listed
from shardwell_wire.connection.channel import retry
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.shard_changes import ShardChanges
from shardwell_wire.encoding.wire_dtypes import AS_STORED, WireDtype
from shardwell_wire.errors import (
    ConflictError,
    DeadlineError,
    NotFoundError,
    RunDeletedError,
    ShardwellError,
    UnavailableError,
    UsageError,
    VersionGoneError,
)
from shardwell_wire.model.layout import Box, UnitLayout, shown_names
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.security.credentials import Credentials
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

Result = TypeVar("Result")

Ranges = Sequence[tuple[int, int]]
"""Ranges of a flat vector in bytes, half-open."""

_ServerKey = tuple[str, str]
"""Address and incarnation of a server process. A restarted server may have other values in the same version."""
_ShardKey = tuple[_ServerKey, str, int, int]
"""Server process, unit and range of a shard."""

_ATTEMPTS = 8
_CALL_MARGIN_S = 5.0
_FUTURE_WAIT_S = 2.0
"""How long to wait for a future version. If no step is committed meanwhile, the newest version can be pinned."""
_THREADS = 8
"""Shards of one unit that are read concurrently."""
_REMEMBERED_READS = 10_000


class UnitReader:
    """Reads one version of a run's units from the shard servers. Ends the reads in flight when its context ends.

    Args:
        coordinator: Client of the coordinator.
        connections: Connections to the run's shard servers.
        version: Version of every unit.
        timeout_s: Deadline of each read, in seconds.
    """

    def __init__(
        self, coordinator: CoordinatorClient, connections: RunConnections, version: int, *, timeout_s: float
    ) -> None:
        self.coordinator, self.connections, self.timeout_s = coordinator, connections, timeout_s
        self.run, self.version = connections.run, version
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardwell-read")

    def __enter__(self) -> UnitReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, (ShardwellError, GeneratorExit)):
            self.connections.close()  # cancels the reads in flight, for example after Ctrl-C
        self._pool.shutdown(cancel_futures=True)

    def read(self, unit: PlacedUnit, ranges: Ranges | None = None) -> Callable[[], torch.Tensor]:
        """Begins to read a unit.

        Args:
            unit: The unit.
            ranges: Ranges of the flat vector that are needed. Other bytes are arbitrary. None: all.

        Returns:
            Function that waits for the unit's flat vector with padding, as uint8 on the CPU, and raises as
            ``RunConnections``. [size_bytes]
        """
        flat = torch.empty(unit.layout.size_bytes, dtype=torch.uint8)
        wait = self._begin(unit, flat, partial(self.connections.read, ranges=ranges))
        return lambda: (wait(), flat)[1]

    def changes(self, unit: PlacedUnit, since: Since | None) -> Callable[[], UnitChanges]:
        """Begins to read what has changed in a unit since a version, or the whole unit, as ``read``."""
        if since is None:
            whole = self.read(unit)
            return lambda: UnitChanges(unit, whole(), [(0, unit.layout.size_bytes, None)])
        flat = torch.empty(unit.layout.size_bytes, dtype=torch.uint8)
        wait = self._begin(unit, flat, partial(self.connections.read_changes, since=since))
        return lambda: UnitChanges(unit, flat, wait())

    def _begin(
        self, unit: PlacedUnit, flat: torch.Tensor, read: Callable[..., Result]
    ) -> Callable[[], list[tuple[int, int, Result]]]:
        """Starts concurrent reads of a unit's shards into the flat vector. The function it returns waits for them."""
        reads = list[tuple[int, int, Future[Result]]]()
        read = partial(read, version=self.version, timeout_s=self.timeout_s)
        for shard in unit.shards:
            if size_bytes := shard.stop_bytes - shard.start_bytes:
                target = memory_at(flat.data_ptr() + shard.start_bytes, size_bytes, flat)
                begun = self._pool.submit(read, unit.layout, shard, target)
                reads.append((shard.start_bytes, shard.stop_bytes, begun))
        return lambda: [(start, stop, each.result()) for start, stop, each in reads]


class PinnedVersion:
    """All parameters and buffers of one version of a run. Created by ``pinned_version``.

    Attributes:
        run: Name of the run.
        version: Number of committed steps.
        rollback_count: How often the run was rolled back before. The same version may have other values afterwards.
        parameters: Parameters of all units, in the order of the units.
        buffers: The persistent buffers of all sharded modules.
    """

    def __init__(
        self,
        weights: coordinator_pb2.DescribeWeightsResponse,
        reader: UnitReader,
        pins: Sequence[shard_pb2.PinVersionResponse],
    ) -> None:
        self.run, self.version = reader.run.name, weights.version
        self.rollback_count: int = weights.rollback_count
        self._reader = reader
        self._changes: dict[tuple[str, int, int], int] = {}
        """The newest version that may have changed each shard, by unit and range."""
        for change in (change for pin in pins for change in pin.changes):
            key = change.unit, change.start_bytes, change.stop_bytes
            self._changes[key] = max(change.version, self._changes.get(key, 0))
        units = [PlacedUnit.from_proto(unit) for unit in weights.units]
        self.units = {unit.layout.unit: unit for unit in units}
        """The units by name."""
        names = shown_names(unit.layout for unit in units)
        self.parameters = stored_parameters((unit for unit in units if not unit.layout.holds_buffers), names)
        self.buffers = stored_parameters((unit for unit in units if unit.layout.holds_buffers), names)

    def changed_at(self, unit: PlacedUnit) -> int:
        """Returns the newest version, up to this one, that may have changed a value of a unit."""
        ranges = ((shard.start_bytes, shard.stop_bytes) for shard in unit.shards)
        keys = [(unit.layout.unit, start, stop) for start, stop in ranges if start < stop]
        # No server has answered for a shard that moved while the servers were asked: it may have changed.
        return max((self._changes.get(key, self.version) for key in keys), default=self.version)

    def values(self, names: Names | None = None, *, slices: Slices | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and values of parameters, then of buffers.

        Holds one unit while it reads the next one, and the units of all tensor-parallel ranks for split parameters.

        Args:
            names: A glob pattern of names, or several, such as ``"*lora_*"``. Other tensors are not read. A tied
                parameter has several names, and is yielded under the first. Default: all.
            slices: ``(dim, index, count)`` by name or glob pattern: a tensor is cut into ``count`` slices along a dim,
                as by ``torch.chunk``, and the slice with the index is yielded. The first pattern that matches counts.
                The smallest range of bytes with the slice is read: of a slice of columns, that of all rows.

        Raises:
            UsageError: A pattern matches nothing, or a slice does not exist.
            VersionGoneError: A shard server evicted the version because it needed the memory.
        """
        chosen = self.choose(names, slices)
        ranges = None if names is None and slices is None else ranges_of(chosen)
        return self._values(chosen, ranges)

    def _values(
        self, chosen: Sequence[Chosen], ranges: Mapping[str, Ranges] | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for stored, region, flats in _with_units(chosen, partial(self._begin, ranges)):
            # Not a view, which would keep the memory of the unit.
            value = torch.empty(region.shape, dtype=stored.meta.dtype)
            for part in stored.parts:
                part.copy_to(value, flats[part.unit_name], region)
            yield stored.name, value

    def changes(
        self, since: int | str, names: Names | None = None, *, slices: Slices | None = None
    ) -> Iterator[TensorChange]:
        """Yields what has changed since a version: indices and new values, or whole tensors.

        The servers compute the changes once for all readers of the same two versions, and send them if they are smaller
        than the shard. Every transfer has a checksum; ``patch`` also checks the result.

        Args:
            since: An older version, or the name of a published one. The run must keep it, or this reader must have kept
                it for deltas (``delta_cache_bytes``).
            names: As in ``values``. Units without these tensors are not read.
            slices: As in ``values``. Indices count in the slice.

        Raises:
            UsageError: A pattern matches nothing, or a slice does not exist.
            VersionGoneError: The older version cannot be read any more, or is not older, or the run was rolled back
                after this reader had read it. Read the whole version instead.
            UnavailableError: A shard server cannot be reached for the reader's timeout.
        """
        found = (changes.find() for changes in self._changed(since, self.choose(names, slices)))
        return (change for change in found if change is not None)

    def patch(self, tensors: Mapping[str, torch.Tensor], since: int | str, names: Names | None = None) -> list[str]:
        """Brings tensors from an older version to this one, in place.

        All changes are read and checked before the first value is written: the changed tensors must have the checksums
        that the servers computed from this version.

        Args:
            tensors: Tensors of the older version by the names that ``values`` yields, such as a state dict. Other
                entries are ignored. With ``gather_dtype="bfloat16"``, they have the rounded values, in that dtype or in
                the run's.
            since: As in ``changes``.
            names: As in ``values``. Other tensors keep their values.

        Returns:
            The names of the tensors that have changed.

        Raises:
            UsageError: A tensor of the run is missing or has another shape, or a pattern matches nothing.
            CorruptDataError: A result is not that of this version, so a tensor has other values. Nothing was written.
            VersionGoneError, UnavailableError: As ``changes``. Nothing was written.
        """
        chosen = self.choose(names)
        targets = {stored.name: [tensors[name] for name in stored.names if name in tensors] for stored, _ in chosen}
        problems = [f"{name!r} is missing" for name, found in targets.items() if not found]
        for stored, _ in chosen:
            for tensor in targets[stored.name]:
                how = differences(stored.meta.shape, stored.meta.dtype, tensor, "run", cast=True)
                problems += [f"{stored.name!r} is {each}" for each in how]
        if problems:
            raise UsageError(f"the tensors do not fit run {self.run!r}: {listed(problems)}")
        found = list[TensorChange]()
        for changes in self._changed(since, chosen, has_values=True):
            for tensor in targets[changes.stored.name]:
                changes.check_result(tensor)
            if (change := changes.find()) is not None:
                found.append(change)
        for change in found:
            for tensor in targets[change.name]:
                change.apply_to(tensor)
        return [change.name for change in found]

    def _changed(
        self, since: int | str, chosen: Sequence[Chosen], *, has_values: bool = False
    ) -> Iterator[StoredChanges]:
        """Yields what has changed in each tensor."""
        reader, connections = self._reader, self._reader.connections
        if isinstance(since, int):
            if since < 0:
                raise UsageError(f"since={since}: expected a version of run {self.run!r}, which are numbers from 0")
            self._check_older(since, connections.rollback_count_of(since, self.rollback_count))
        number, name = (since, "") if isinstance(since, int) else (None, since)
        describe = partial(describe_weights, reader.coordinator, self.run, version=number, name=name)
        pin = partial(pinned_version, reader.coordinator, self.run, timeout_s=reader.timeout_s, waits=True)
        former: coordinator_pb2.DescribeWeightsResponse | PinnedVersion | None = None
        with ExitStack() as stack:
            try:
                # Without a pin, the older version may be one of the same number that was committed after a rollback.
                # Only `patch` notices this.
                if has_values and not connections.pins_former:
                    described = retry(lambda: describe(without_units=True), limit_s=reader.timeout_s)
                    former = described if _stays(described, self.version) else None
                former = former or stack.enter_context(pin(connections=connections, version=since))
            except VersionGoneError:
                units = {part.unit_name: part.unit for stored, _ in chosen for part in stored.parts}
                # Buffers are not kept for deltas, and are read whole.
                if not isinstance(since, int) or not all(
                    unit.layout.holds_buffers or self.changed_at(unit) <= since or connections.keep(unit, since)
                    for unit in units.values()
                ):
                    raise
                version, is_gone = since, True
            else:
                version, is_gone = former.version, False
                self._check_older(version, former.rollback_count)

            def begin(unit: PlacedUnit) -> Callable[[], UnitChanges | None]:
                if self.changed_at(unit) <= version:
                    return lambda: None
                is_whole = is_gone and unit.layout.holds_buffers
                return reader.changes(unit, None if is_whole else Since(version, has_values))

            try:
                for stored, region, changes in _with_units(chosen, begin):
                    found = {name: each for name, each in changes.items() if each is not None}
                    yield StoredChanges(stored, region, found, version)
            except VersionGoneError:
                connections.pins_former = True  # the run has dropped it during the reads
                raise

    def _check_older(self, version: int, rollback_count: int) -> None:
        if version > self.version or rollback_count != self.rollback_count:
            raise VersionGoneError(
                f"there are no changes since version {version} for version {self.version} of run {self.run!r}: "
                f"{'it is not older' if version > self.version else 'the run was rolled back'}. Read the whole version",
                version=version,
                newest=self.version,
            )

    def choose(self, names: Names | None, slices: Slices | None = None) -> list[Chosen]:
        """Returns tensors and their regions, as ``values`` yields them."""
        return choose([*self.parameters, *self.buffers], names, slices, self.run)

    def read(self, unit: PlacedUnit) -> torch.Tensor:
        """Returns a unit's flat vector with padding, as uint8 on the CPU; raises as ``values``. [size_bytes]"""
        return self._begin(None, unit)()

    def read_units(
        self, units: Mapping[str, PlacedUnit], ranges: Mapping[str, Ranges] | None = None
    ) -> dict[str, torch.Tensor]:
        """Returns the flat vectors of units, as ``read``.

        Args:
            units: The units by name.
            ranges: Ranges of the flat vectors that are needed. Other bytes are arbitrary. None: all.
        """
        return dict(zip(units, _read_ahead(units.values(), partial(self._begin, ranges)), strict=True))

    def _begin(self, ranges: Mapping[str, Ranges] | None, unit: PlacedUnit) -> Callable[[], torch.Tensor]:
        """Begins to read a unit. The function that is returned waits for it."""
        read = self._reader.read(unit, None if ranges is None else ranges.get(unit.layout.unit, []))

        def finish() -> torch.Tensor:
            try:
                return read()
            except VersionGoneError as error:
                raise VersionGoneError(
                    f"version {self.version} of run {self.run!r} was evicted while it was read: training is at version "
                    f"{error.data.get('newest', '?')}, and a shard server had no memory left for a copy of unit "
                    f"{unit.layout.unit!r} of version {self.version}. Raise the servers' --memory-budget, add servers, "
                    "or try again when the servers are less busy",
                    **error.data,
                ) from error

        return finish


def _stays(former: coordinator_pb2.DescribeWeightsResponse, version: int) -> bool:
    """Returns whether a run keeps a version for more than one step, or the version is the one that a reader pins."""
    kept, published = former.kept_versions, former.published.values()
    return former.version in (version, *published, *[each for each in kept if each not in published][1:])


def _with_units(
    chosen: Sequence[Chosen], begin: Callable[[PlacedUnit], Callable[[], Result]]
) -> Iterator[tuple[StoredParameter, Box, dict[str, Result]]]:
    """Yields tensors and regions with what was read of their units. Releases units that no tensor needs any more.

    Args:
        begin: Begins to read a unit. The function that it returns waits for the result.
    """
    needed = [{part.unit_name: part.unit for part in stored.parts} for stored, _ in chosen]
    results = _read_ahead(
        (unit for former, units in pairwise([{}, *needed]) for name, unit in units.items() if name not in former), begin
    )
    held = dict[str, Result]()
    for (stored, region), units in zip(chosen, needed, strict=True):
        for name in held.keys() - units.keys():
            del held[name]
        held.update((name, next(results)) for name in units if name not in held)
        yield stored, region, held


def _read_ahead(units: Iterable[PlacedUnit], begin: Callable[[PlacedUnit], Callable[[], Result]]) -> Iterator[Result]:
    """Yields what is read of each unit. Reads the next unit while the caller uses one."""
    reads = deque[Callable[[], Result]]()
    for unit in units:
        reads.append(begin(unit))
        if len(reads) > 1:
            yield reads.popleft()()
    while reads:
        yield reads.popleft()()


@contextmanager
def pinned_version(
    coordinator: CoordinatorClient,
    run: str,
    *,
    timeout_s: float,
    connections: RunConnections | None = None,
    waits: bool = False,
    version: int | str | None = None,
) -> Iterator[PinnedVersion]:
    """Pins a version of a run, or the newest that all its shard servers still have. Training continues.

    If steps are committed faster than all servers can be reached, a future version is pinned: each server gets the
    request before the version exists.

    Args:
        coordinator: Client of the coordinator.
        run: Name of the run.
        timeout_s: How long to wait for a future version, and for each read, in seconds.
        connections: Connections to use. Default: new connections, closed at the end.
        waits: Whether to wait, for the timeout, while shards get other servers or the run is loaded.
        version: The version, which is waited for until it is committed, or the name of a published one. None: the
            newest.

    Raises:
        StepStateError: The run has no weights yet.
        Exception: As ``Reader.pin``.
    """
    # If a server cannot be reached, the coordinator may be about to name another owner of its shards.
    limit_s = timeout_s if waits else 0.0

    def pin() -> tuple[PinnedVersion, ExitStack]:
        if version is None:
            return _pin_newest(coordinator, run, timeout_s, connections)
        with ExitStack() as stack:
            return _pin(coordinator, run, version, timeout_s, timeout_s, stack, connections), stack.pop_all()

    def check(error: Exception) -> None:
        if connections is not None and connections.is_closed:  # by another thread
            raise error

    pinned, stack = retry(pin, limit_s=limit_s, check=check)
    with stack:
        yield pinned


def _pin_newest(
    coordinator: CoordinatorClient, run: str, timeout_s: float, connections: RunConnections | None
) -> tuple[PinnedVersion, ExitStack]:
    """Returns a pinned version, and the stack to close after its use."""
    ahead, target = 1, None
    tried: list[int] = []
    for _ in range(_ATTEMPTS):
        with ExitStack() as stack:
            try:
                wait_s = timeout_s if target is None else min(timeout_s, _FUTURE_WAIT_S)
                return _pin(coordinator, run, target, timeout_s, wait_s, stack, connections), stack.pop_all()
            except VersionGoneError as error:
                newest = int(error.data["newest"])
                tried.append(newest if target is None else target)
                target, ahead = newest + ahead, ahead * 2
            except DeadlineError:
                if target is None:
                    raise
                target, ahead = None, 1  # no step was committed, so the newest version can be pinned
    raise VersionGoneError(
        f"run {run!r} commits steps faster than its shard servers can be asked to pin a version: versions "
        f"{', '.join(map(str, tried))} were overwritten before they were pinned. Try again when training pauses",
        newest=tried[-1] if tried else None,
    )


def _pin(
    coordinator: CoordinatorClient,
    run: str,
    target: int | str | None,
    timeout_s: float,
    wait_s: float,
    stack: ExitStack,
    connections: RunConnections | None,
) -> PinnedVersion:
    """Tries to pin version ``target``, or the newest. Closes everything it opens with the stack."""
    newest = describe_weights(coordinator, run, name=target if isinstance(target, str) else "")
    version = target if isinstance(target, int) else newest.version
    owners = {shard.address: shard for unit in newest.units for shard in unit.shards}
    asking = stack.enter_context(ThreadPoolExecutor(len(owners) + 1))
    if connections is None:
        # Closed before the thread pool, so that pending requests are cancelled.
        identity = RunIdentity(run, newest.run_id)
        connections = stack.enter_context(closing(RunConnections(identity, coordinator.credentials)))
    elif newest.run_id != connections.run.run_id:
        raise RunDeletedError(
            f"run {run!r} was deleted and created again since this reader attached: attach again", run=run
        )
    reader = stack.enter_context(UnitReader(coordinator, connections, version, timeout_s=timeout_s))
    # All servers are asked concurrently. For a future version, they are asked before the version exists.
    described = None
    if isinstance(target, int):
        described = asking.submit(describe_weights, coordinator, run, version=target, wait_s=wait_s)
    opened = [asking.submit(_open, reader, shard, wait_s) for shard in owners.values()]
    for each in opened:
        if each.exception() is None:
            stack.callback(each.result().end)
    try:
        changes = [each.result().answer for each in opened]  # raises the first error when all pins are known
    except VersionGoneError:
        if described is not None:
            described.result()  # the coordinator's error says which versions are kept
        raise
    return PinnedVersion(newest if described is None else described.result(), reader, changes)


def _open(reader: UnitReader, shard: common_pb2.ShardRange, wait_s: float) -> StandingRpc:
    request = shard_pb2.PinVersionRequest(
        run=reader.run.name, run_id=reader.run.run_id, version=reader.version, wait_s=wait_s
    )
    timeout_s = wait_s + _CALL_MARGIN_S
    with reader.connections.reaching(shard):
        return reader.connections.server(shard).client.open("PinVersion", request, timeout_s=timeout_s)


def describe_weights(
    coordinator: CoordinatorClient,
    run: str,
    *,
    version: int | None = None,
    name: str = "",
    wait_s: float = 0.0,
    reader: coordinator_pb2.ReaderReport | None = None,
    without_units: bool = False,
) -> coordinator_pb2.DescribeWeightsResponse:
    """Describes a version, the published version of a name, or the newest. Repeats the request for ``wait_s`` seconds.

    Raises:
        VersionGoneError: A newer version is committed, and the run does not keep this one.
        NotFoundError: No version is published under the name.
        DeadlineError: The version was not committed in time.
    """
    give_up = time.monotonic() + wait_s
    while True:
        left_s = max(0.0, give_up - time.monotonic())
        request = coordinator_pb2.DescribeWeightsRequest(
            run=run, version=version, published_name=name, wait_s=left_s, reader=reader, without_units=without_units
        )
        try:
            answer: coordinator_pb2.DescribeWeightsResponse = coordinator.call(
                "DescribeWeights", request, timeout_s=left_s + _CALL_MARGIN_S
            )
            return answer
        except DeadlineError:
            if time.monotonic() >= give_up:
                raise


class RunConnections:
    """Connects to the shard servers of one run on first use, by the fastest transport. Thread-safe.

    Args:
        run: The run.
        credentials: Credentials of the cluster.
        gather_dtype: Dtype in which float32 parameters travel. Buffers travel as stored.
        delta_cache_bytes: Limit of the memory for streams that are kept, so that servers send deltas.
    """

    def __init__(
        self,
        run: RunIdentity,
        credentials: Credentials,
        *,
        gather_dtype: WireDtype = AS_STORED,
        delta_cache_bytes: int = 0,
    ) -> None:
        self.run, self._credentials, self._gather_dtype = run, credentials, gather_dtype
        # A reader learns of a rollback at any time, and then reads other values of the same version.
        self._deltas = DeltaCache(delta_cache_bytes, reads_again=False)
        self._policy = ResendPolicy()
        self._closed_bytes, self.is_closed = 0, False
        """Bytes that closed connections have received; whether ``close`` was called."""
        self._lock = threading.Lock()
        self.pins_former = False
        """Whether the run has dropped a former version while changes since it were read, so that it must be pinned."""
        self._read = dict[int, int]()
        """How often the run had been rolled back when each version was read last, for the last versions read."""
        self._servers: dict[_ServerKey, ServerConnection] = {}
        self._shards: dict[_ShardKey, RemoteShard] = {}

    def note_read(self, version: int, rollback_count: int) -> None:
        """Notes that the reader has read a version after this number of rollbacks."""
        self._read.pop(version, None)
        self._read[version] = rollback_count
        if len(self._read) > _REMEMBERED_READS:
            del self._read[next(iter(self._read))]

    def rollback_count_of(self, version: int, default: int) -> int:
        """Returns the number of rollbacks before the reader has read a version."""
        return self._read.get(version, default)

    def server(self, shard: common_pb2.ShardRange) -> ServerConnection:
        """Returns the connection to the server process that owns a shard. Raises UnavailableError if there is none."""
        key = _server_key(shard)
        with self._lock:
            if (known := self._servers.get(key)) is not None:
                return known
            former = [each for each in self._servers if each[0] == shard.address]
        for each in former:
            self._forget(each)
        # Without the lock: a server that does not answer must not delay the others.
        opened = ServerConnection(
            shard.address,
            self.run,
            ConnectOptions(TRANSPORT_NAMES, credentials=self._credentials),
            self._policy,
            shard.server_id,
        )
        with self._lock:
            used = opened if self.is_closed else self._servers.setdefault(key, opened)
        if used is not opened or self.is_closed:
            opened.close()
        return used

    def read(
        self,
        layout: UnitLayout,
        shard: common_pb2.ShardRange,
        target: memoryview,
        *,
        version: int,
        ranges: Ranges | None = None,
        timeout_s: float,
    ) -> None:
        """Reads one version of a shard: from shared memory while it is the newest, otherwise as a stream.

        Args:
            layout: Layout of the shard's unit.
            shard: The shard and its owner.
            target: Receives the shard, padding included. [stop_bytes - start_bytes]
            version: The version. Waited for until it exists.
            ranges: Ranges of the flat vector that are needed. The whole shard is read if that sends less. None: all.
            timeout_s: Deadline in seconds.

        Raises:
            VersionGoneError: The version was overwritten.
            UnavailableError: The shard server cannot be reached from this host.
        """
        with self.reaching(shard):
            remote = self._shard(layout, shard, timeout_s)
            if ranges is not None:
                bounds = [(max(start, shard.start_bytes), min(stop, shard.stop_bytes)) for start, stop in ranges]
                bounds = [(start, stop) for start, stop in bounds if start < stop]
                if sum(stop - start for start, stop in bounds) <= remote.largest_ranges_bytes:
                    for start, stop in bounds:
                        part = target[start - shard.start_bytes : stop - shard.start_bytes]
                        remote.fetch_range(version, start, part)
                    return
            try:
                remote.fetch(version, target)
            except VersionGoneError:
                if not remote.is_mapped:
                    raise
                # The newest version has replaced the mapped bytes. A pinned version is still streamed.
                remote.narrowed(shard.start_bytes, shard.stop_bytes).fetch(version, target)

    def read_changes(
        self,
        layout: UnitLayout,
        shard: common_pb2.ShardRange,
        target: memoryview,
        *,
        version: int,
        since: Since,
        timeout_s: float,
    ) -> ShardChanges | None:
        """Reads what has changed in a shard since a version; raises as ``read``.

        Returns:
            None: ``target`` has the whole shard.
        """
        with self.reaching(shard):
            return self._shard(layout, shard, timeout_s).fetch_changes(version, since, target)

    def keep(self, unit: PlacedUnit, version: int) -> bool:
        """Returns whether a version of all shards of a unit is kept for deltas."""
        keys = [(_server_key(shard), unit.layout.unit, shard.start_bytes, shard.stop_bytes) for shard in unit.shards]
        with self._lock:
            found = [self._shards.get(key) for key in keys if key[2] < key[3]]
        return all(remote is not None and remote.keeps(version) for remote in found)

    @contextmanager
    def reaching(self, shard: common_pb2.ShardRange) -> Iterator[None]:
        """Closes the connection to the shard's server if the server cannot be reached, or has lost the shard.

        Raises:
            UnavailableError: In both cases. The coordinator may be about to name another owner, or knows that the run
                was deleted.
        """
        try:
            yield
        except (NotFoundError, ConflictError) as error:
            if isinstance(error, ConflictError) and "session_unknown" not in error.data:
                raise
            # A new process at the address does not know the session.
            self._forget(_server_key(shard))
            raise UnavailableError(
                f"{shard.server_id} at {shard.address} was restarted, or has given its shards to another server: "
                f"{error}",
                server=shard.server_id,
            ) from error
        except UnavailableError as error:
            self._forget(_server_key(shard))
            raise UnavailableError(
                f"{shard.server_id} at {shard.address} cannot be reached from this host, although the coordinator "
                f"can: {error}",
                server=shard.server_id,
            ) from error

    def stats(self) -> dict[str, float]:
        """Returns the bytes received in streams, the repeated transfers, and the counters of ``DeltaCache``."""
        with self._lock:
            received = sum(server.counter.received_bytes for server in self._servers.values()) + self._closed_bytes
        corrupt_count = sum(self._policy.corrupt.by_server().values())
        return {"received_bytes": received, "corrupt_transfer_count": corrupt_count, **self._deltas.stats()}

    def close(self) -> None:
        """Closes all connections. Reads in flight and later ones fail."""
        self.is_closed = True
        for key in list(self._servers):
            self._forget(key)

    def _shard(self, layout: UnitLayout, shard: common_pb2.ShardRange, timeout_s: float) -> RemoteShard:
        server = self.server(shard)
        key = (_server_key(shard), layout.unit, shard.start_bytes, shard.stop_bytes)
        with self._lock:
            remote = self._shards.get(key)
        if remote is None:
            wire = Wire(
                AS_STORED if layout.holds_buffers else self._gather_dtype,
                wait_limit_s=timeout_s,
                deltas=self._deltas if self._deltas.budget_bytes else None,
            )
            remote = RemoteShard(self.run, layout, server, shard.start_bytes, shard.stop_bytes, wire)
            if CAN_MAP and (location := remote.locate()) is not None:
                try:
                    remote.map(location)
                except FileNotFoundError as error:
                    raise UnavailableError(f"it has removed the file {location.file} of the shard") from error
            with self._lock:
                remote = self._shards.setdefault(key, remote)
        return remote

    def _forget(self, process: _ServerKey) -> None:
        with self._lock:
            server = self._servers.pop(process, None)
            lost = [remote for key, remote in self._shards.items() if key[0] == process]
            self._shards = {key: remote for key, remote in self._shards.items() if key[0] != process}
        for remote in lost:
            remote.forget()
        if server is not None:
            server.close()
            with self._lock:
                self._closed_bytes += server.counter.received_bytes


def _server_key(shard: common_pb2.ShardRange) -> _ServerKey:
    return shard.address, shard.incarnation
