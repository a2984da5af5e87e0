"""Reads a pinned version of a live run's weights while training continues, without a rank and the model's code."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch

from shardwell.data_plane.kept_streams import DeltaCache
from shardwell.data_plane.shard import RemoteShard, Wire
from shardwell.transport.resending import ResendPolicy
from shardwell.transport.server_connection import TRANSPORT_NAMES, ConnectOptions, ServerConnection
from shardwell.transport.service_client import CoordinatorClient, StandingRpc
from shardwell.transport.shared_vector import CAN_MAP
from shardwell_wire.connection.channel import retry
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.wire_dtypes import AS_STORED, WireDtype
from shardwell_wire.errors import (
    DeadlineError,
    NotFoundError,
    RunDeletedError,
    ShardwellError,
    StepStateError,
    UnavailableError,
    VersionGoneError,
)
from shardwell_wire.model.layout import Parameter, UnitLayout, shown_names
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.security.credentials import Credentials
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

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


@dataclass(frozen=True)
class PlacedUnit:
    """A unit and the owners of its shards."""

    layout: UnitLayout
    shards: tuple[common_pb2.ShardRange, ...]

    @classmethod
    def from_proto(cls, unit: coordinator_pb2.UnitWeights) -> PlacedUnit:
        return cls(UnitLayout.from_proto(unit.spec), tuple(unit.shards))

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Returns a view of a parameter in the unit's flat vector. [shape of the parameter]"""
        parameter, start = self.layout.parameters[index], self.layout.starts[index]
        part = flat[start : start + parameter.size_bytes]
        return part.view(getattr(torch, parameter.dtype)).view(parameter.shape)


class UnitReader:
    """Reads one version of a run's units from the shard servers. Ends the reads in flight when its context ends.

    Args:
        connections: Connections to the run's shard servers.
        version: Version of every unit.
        timeout_s: Deadline of each read, in seconds.
    """

    def __init__(self, connections: RunConnections, version: int, *, timeout_s: float) -> None:
        self.connections, self.run, self.version = connections, connections.run, version
        self.timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardwell-read")

    def __enter__(self) -> UnitReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, ShardwellError):
            self.connections.close()  # cancels the reads in flight, for example after Ctrl-C
        self._pool.shutdown(cancel_futures=True)

    def read(self, unit: PlacedUnit) -> torch.Tensor:
        """Returns a unit's flat vector with padding, as uint8 on the CPU. [size_bytes]

        Raises:
            VersionGoneError: The version was overwritten.
            UnavailableError: A shard server cannot be reached from this host.
        """
        flat = torch.empty(unit.layout.size_bytes, dtype=torch.uint8)
        wanted = [shard for shard in unit.shards if shard.stop_bytes > shard.start_bytes]
        reads = [self._pool.submit(self._read, unit, shard, flat) for shard in wanted]
        for read in reads:
            read.result()
        return flat

    def _read(self, unit: PlacedUnit, shard: common_pb2.ShardRange, flat: torch.Tensor) -> None:
        target = memory_at(flat.data_ptr() + shard.start_bytes, shard.stop_bytes - shard.start_bytes, flat)
        self.connections.read(unit.layout, shard, self.version, target, timeout_s=self.timeout_s)


@dataclass(frozen=True)
class StoredPart:
    """A parameter or buffer in one unit: the whole tensor, or the part of one tensor-parallel rank."""

    unit: PlacedUnit
    index: int
    """Layout index in the unit."""

    @property
    def described(self) -> Parameter:
        """The layout entry."""
        return self.unit.layout.parameters[self.index]

    def copy_to(self, tensor: torch.Tensor, flat: torch.Tensor) -> None:
        """Copies the part from its unit's flat vector to its place in the whole tensor."""
        tensor[self.described.box.slices].copy_(self.unit.view(flat, self.index))


@dataclass(frozen=True)
class StoredParameter:
    """A parameter or buffer as the run stores it, in one part or several."""

    name: str
    """Name in the model if the run knows it (see ``shown_names``), else in the run."""
    aliases: tuple[str, ...]
    """Other names of the same tied parameter."""
    parts: tuple[StoredPart, ...]
    """Its parts, in the order of the units. They do not overlap."""

    @property
    def names_in_run(self) -> tuple[str, ...]:
        """The names under which the run stores the parameter, which begin with the name of a ``fully_shard`` call."""
        return self.parts[0].described.name, *self.parts[0].described.aliases

    @property
    def meta(self) -> torch.Tensor:
        """A tensor of the shape and dtype of the whole parameter on the meta device."""
        described = self.parts[0].described
        return torch.empty(described.box.whole, dtype=getattr(torch, described.dtype), device="meta")


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
        self._changes: dict[str, int] = {}
        for change in (change for pin in pins for change in pin.changes):
            self._changes[change.unit] = max(change.version, self._changes.get(change.unit, 0))
        units = [PlacedUnit.from_proto(unit) for unit in weights.units]
        self.units = {unit.layout.unit: unit for unit in units}
        """The units by name."""
        names = shown_names(unit.layout for unit in units)
        self.parameters = _stored((unit for unit in units if not unit.layout.holds_buffers), names)
        self.buffers = _stored((unit for unit in units if unit.layout.holds_buffers), names)

    def changed_at(self, unit: PlacedUnit) -> int:
        """Returns the newest version, up to this one, that may have changed a value of a unit."""
        return self._changes.get(unit.layout.unit, self.version)

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and values of parameters, then of buffers.

        Holds one unit at a time, and the units of all tensor-parallel ranks for parameters that are split.

        Raises:
            VersionGoneError: A shard server evicted the version because it needed the memory.
        """
        flats: dict[str, torch.Tensor] = {}
        for parameter in (*self.parameters, *self.buffers):
            units = {part.unit.layout.unit: part.unit for part in parameter.parts}
            # Releases units before the next ones are read.
            flats = {name: flat for name, flat in flats.items() if name in units}
            flats.update((name, self.read(unit)) for name, unit in units.items() if name not in flats)
            # Not a view, which would keep the memory of the unit.
            value = torch.empty_like(parameter.meta, device="cpu")
            for part in parameter.parts:
                part.copy_to(value, flats[part.unit.layout.unit])
            yield parameter.name, value

    def read(self, unit: PlacedUnit) -> torch.Tensor:
        """Returns a unit's flat vector with padding, as uint8 on the CPU; raises as ``values``. [size_bytes]"""
        try:
            return self._reader.read(unit)
        except VersionGoneError as error:
            raise VersionGoneError(
                f"version {self.version} of run {self.run!r} was evicted while it was read: training is at version "
                f"{error.data.get('newest', '?')}, and a shard server had no memory left for a copy of unit "
                f"{unit.layout.unit!r} of version {self.version}. Raise the servers' --memory-budget, add servers, or "
                "try again when the servers are less busy",
                **error.data,
            ) from error


def _stored(units: Iterable[PlacedUnit], names: Mapping[str, tuple[str, ...]]) -> Sequence[StoredParameter]:
    """Returns the parameters of units, in the order of their first parts.

    Args:
        units: The units.
        names: See ``shown_names``.

    Raises:
        StepStateError: A part of a parameter is missing, or several units store a parameter.
    """
    parts: dict[str, list[StoredPart]] = {}
    for unit in units:
        for index, parameter in enumerate(unit.layout.parameters):
            parts.setdefault(parameter.name, []).append(StoredPart(unit, index))
    for name, found in parts.items():
        stored, total = sum(part.described.numel for part in found), math.prod(found[0].described.box.whole)
        if stored > total:
            owners = ", ".join(repr(part.unit.layout.unit) for part in found)
            raise StepStateError(
                f"the units {owners} of the run all store {name!r}, so its value is not known: stages that share a "
                "parameter or buffer must be those of one split_model or ModelSplit.from_modules",
                parameter=name,
            )
        if stored != total:
            raise StepStateError(
                f"the run has {stored} of the {total} elements of parameter {name!r}: the trainers of a "
                "tensor-parallel rank have not declared their part yet. Try again when training has started",
                parameter=name,
            )
    return [StoredParameter(names[name][0], names[name][1:], tuple(found)) for name, found in parts.items()]


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
        NotFoundError: The run does not exist.
        StepStateError: The run has no weights yet.
        UnavailableError: A shard server of the run cannot be reached from this host.
        VersionGoneError: The version is not kept any more. Or every version was overwritten before it was pinned.
        DeadlineError: The version was not committed in time.
    """
    # If a server cannot be reached, the coordinator may be about to name another owner of its shards.
    limit_s = timeout_s if waits else 0.0

    def pin() -> tuple[PinnedVersion, ExitStack]:
        if version is None:
            return _pin_newest(coordinator, run, timeout_s, connections)
        with ExitStack() as stack:
            return _pin(coordinator, run, version, timeout_s, timeout_s, stack, connections), stack.pop_all()

    pinned, stack = retry(pin, limit_s=limit_s)
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
    reader = stack.enter_context(UnitReader(connections, version, timeout_s=timeout_s))
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
            run=run, version=version, published_name=name, wait_s=left_s, reader=reader
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
        self._closed_bytes = 0
        """Bytes that closed connections have received."""
        self._lock = threading.Lock()
        self._servers: dict[_ServerKey, ServerConnection] = {}
        self._shards: dict[_ShardKey, RemoteShard] = {}

    def server(self, shard: common_pb2.ShardRange) -> ServerConnection:
        """Returns the connection to the server process that owns a shard.

        Raises:
            UnavailableError: The server cannot be reached.
        """
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
            used = self._servers.setdefault(key, opened)
        if used is not opened:
            opened.close()
        return used

    def read(
        self, layout: UnitLayout, shard: common_pb2.ShardRange, version: int, target: memoryview, *, timeout_s: float
    ) -> None:
        """Reads one version of a shard: from shared memory while it is the newest, otherwise as a stream.

        Args:
            layout: Layout of the shard's unit.
            shard: The shard and its owner.
            version: The version. Waited for until it exists.
            target: Receives the shard, padding included. [stop_bytes - start_bytes]
            timeout_s: Deadline in seconds.

        Raises:
            VersionGoneError: The version was overwritten.
            UnavailableError: The shard server cannot be reached from this host.
        """
        with self.reaching(shard):
            remote = self._shard(layout, shard, timeout_s)
            try:
                remote.fetch(version, target)
            except VersionGoneError:
                if not remote.is_mapped:
                    raise
                # The newest version has replaced the mapped bytes. A pinned version is still streamed.
                remote.narrowed(shard.start_bytes, shard.stop_bytes).fetch(version, target)

    @contextmanager
    def reaching(self, shard: common_pb2.ShardRange) -> Iterator[None]:
        """Closes the connection to the shard's server if the server cannot be reached, or has lost the shard.

        Raises:
            UnavailableError: In both cases. The coordinator may be about to name another owner, or knows that the run
                was deleted.
        """
        try:
            yield
        except NotFoundError as error:
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
        """Closes all connections. Reads in flight fail."""
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
