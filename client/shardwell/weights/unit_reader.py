"""Values of a run's units, read from the shard servers by whoever is no trainer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import torch

from shardwell.transport.grpc_transport import ShardClient
from shardwell_wire.codec import memory_at
from shardwell_wire.credentials import Credentials
from shardwell_wire.errors import UnavailableError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

_THREADS = 8
"""Shards of one unit that are read at once."""


@dataclass(frozen=True)
class PlacedUnit:
    """A unit, and which servers have it."""

    layout: UnitLayout
    shards: tuple[common_pb2.ShardRange, ...]

    @classmethod
    def from_proto(cls, unit: coordinator_pb2.UnitWeights) -> PlacedUnit:
        return cls(UnitLayout.from_proto(unit.spec), tuple(unit.shards))

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """A parameter's values in the unit's flat vector. [shape of the parameter]"""
        parameter, start = self.layout.parameters[index], self.layout.starts[index]
        part = flat[start : start + parameter.size_bytes]
        return part.view(getattr(torch, parameter.dtype)).view(parameter.shape)


class UnitReader:
    """Reads one version of units; a context manager.

    Args:
        run: The run.
        version: Of every unit.
        timeout_s: Deadline of each read.
        credentials: Of the cluster.
    """

    def __init__(self, run: RunIdentity, version: int, *, timeout_s: float, credentials: Credentials) -> None:
        self.run, self.version, self._credentials = run, version, credentials
        self._timeout_s = timeout_s
        self._clients: dict[str, ShardClient] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardwell-read")

    def __enter__(self) -> UnitReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for client in self._clients.values():
            client.close()  # also ends reads that are under way
        self._pool.shutdown(cancel_futures=True)

    def client(self, address: str) -> ShardClient:
        """Calls the shard server at an address; closed with the reader."""
        if address not in self._clients:
            self._clients[address] = ShardClient(address, credentials=self._credentials)
        return self._clients[address]

    def read(self, unit: PlacedUnit) -> torch.Tensor:
        """A unit's flat vector, padding included, on the CPU. uint8. [size_bytes]

        Raises:
            VersionGoneError: The version was overwritten.
            UnavailableError: A server cannot be reached from here.
        """
        flat = torch.empty(unit.layout.size_bytes, dtype=torch.uint8)
        wanted = [shard for shard in unit.shards if shard.stop_bytes > shard.start_bytes]
        clients = [self.client(shard.address) for shard in wanted]
        reads = [
            self._pool.submit(self._read, client, unit, shard, flat)
            for client, shard in zip(clients, wanted, strict=True)
        ]
        for read in reads:
            read.result()
        return flat

    def _read(self, client: ShardClient, unit: PlacedUnit, shard: common_pb2.ShardRange, flat: torch.Tensor) -> None:
        request = shard_pb2.GatherRequest(
            run=self.run.name,
            run_id=self.run.run_id,
            unit=unit.layout.unit,
            version=self.version,
            start_bytes=shard.start_bytes,
            stop_bytes=shard.stop_bytes,
        )
        target = memory_at(flat.data_ptr() + shard.start_bytes, shard.stop_bytes - shard.start_bytes)
        try:
            client.gather(request, target, timeout_s=self._timeout_s, retry_for_s=0.0)
        except UnavailableError as error:
            raise unreachable(shard, error) from error


def unreachable(shard: common_pb2.ShardRange, error: UnavailableError) -> UnavailableError:
    """What to say of a shard server that does not answer though the coordinator does."""
    return UnavailableError(
        f"{shard.server_id} at {shard.address} cannot be reached from here, though the coordinator can: {error}",
        server=shard.server_id,
    )
