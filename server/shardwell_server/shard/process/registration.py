"""Keeps this shard server known to the coordinator."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version as installed_version
from typing import Any

import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from shardwell_server.shard.state.store import ShardStore
from shardwell_wire.channel import open_aio_channel
from shardwell_wire.errors import (
    DeadlineError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
    from_rpc_error,
)
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_LONGEST_DELAY_S = 2.0


class Registration:
    """Registers a shard server with the coordinator and keeps its lease.

    Args:
        coordinator: host:port.
        server_id: Stable name of the server.
        store: What is reported.
    """

    def __init__(self, coordinator: str, server_id: str, store: ShardStore) -> None:
        self._coordinator, self._server_id, self._store = coordinator, server_id, store
        self._incarnation = uuid.uuid4().hex
        self._channel = open_aio_channel(coordinator)
        self._reachable = True

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Registered on entry; heartbeats until exit.

        Args:
            address: host:port at which others reach this server.
        """
        try:
            lease_s, epoch = await self._register(address)
            task = asyncio.ensure_future(self._keep(address, lease_s, epoch))
            try:
                yield
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        finally:
            await self._channel.close()

    async def _register(self, address: str) -> tuple[float, int]:
        request = coordinator_pb2.RegisterServerRequest(
            server_id=self._server_id,
            address=address,
            budget_bytes=self._store.memory.budget_bytes,
            shardwell_version=installed_version("shardwell"),
            incarnation=self._incarnation,
        )
        delay = 0.05
        while True:
            try:
                response = await self._call("RegisterServer", request)
                logger.info("registered with the coordinator at %s as %r", self._coordinator, self._server_id)
                return response.lease_s, response.epoch
            except (UnavailableError, DeadlineError) as error:
                self._note(error)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, _LONGEST_DELAY_S)

    async def _keep(self, address: str, lease_s: float, epoch: int) -> None:
        while True:
            await asyncio.sleep(lease_s / 3)
            try:
                lease_s, epoch = await self._beat(address, lease_s, epoch)
            except ShardwellError as error:
                self._note(error)

    async def _beat(self, address: str, lease_s: float, epoch: int) -> tuple[float, int]:
        """One heartbeat; registers again if the coordinator has given this server up."""
        request = coordinator_pb2.HeartbeatServerRequest(
            server_id=self._server_id,
            epoch=epoch,
            reserved_bytes=self._store.memory.reserved_bytes,
            used_bytes=self._store.memory.used_bytes,
        )
        try:
            await self._call("HeartbeatServer", request)
        except (StaleEpochError, NotFoundError) as error:
            logger.warning("the coordinator took this server for lost: %s", error)
            return await self._register(address)
        return lease_s, epoch

    async def _call(self, rpc_name: str, request: Any) -> Any:
        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        stub = self._channel.unary_unary(
            f"/{service.full_name}/{rpc_name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(service.methods_by_name[rpc_name].output_type).FromString,
        )
        try:
            response = await stub(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, f"coordinator at {self._coordinator}") from error
        self._reachable = True
        return response

    def _note(self, error: ShardwellError) -> None:
        if self._reachable:
            logger.warning("cannot reach the coordinator at %s, trying on: %s", self._coordinator, error)
        self._reachable = False
