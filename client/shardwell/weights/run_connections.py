"""Connections of a reader without a rank to the shard servers of a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardwell.data_plane.kept_streams import DeltaCache
from shardwell.data_plane.remote_shard import RemoteShard, Wire
from shardwell.transport.selector import TRANSPORT_NAMES
from shardwell.transport.server_connection import ServerConnection
from shardwell.transport.server_guard import CorruptTransfers, ServerGuard
from shardwell.transport.shared_vector import CAN_MAP
from shardwell_wire.chunk_streams import DEFAULT_CHUNK_BYTES
from shardwell_wire.credentials import Credentials
from shardwell_wire.errors import NotFoundError, UnavailableError, VersionGoneError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import common_pb2
from shardwell_wire.wire_dtypes import AS_STORED, WireDtype

_ServerKey = tuple[str, str]
"""Address and incarnation of a server process. A restarted server may have other values in the same version."""
_ShardKey = tuple[_ServerKey, str, int, int]
"""Server process, unit and range of a shard."""


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
        self._corrupt = CorruptTransfers()
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
            transports=TRANSPORT_NAMES,
            chunk_bytes=DEFAULT_CHUNK_BYTES,
            credentials=self._credentials,
            guard=ServerGuard(shard.address, corrupt=self._corrupt),
            server_id=shard.server_id,
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
        corrupt_count = sum(self._corrupt.by_server().values())
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
