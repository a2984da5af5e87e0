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

from shardwell_server.process_identity import own_identity
from shardwell_server.shard.state.coordinator_term import CoordinatorTerm
from shardwell_server.shard.state.store import ShardStore
from shardwell_wire.channel import open_aio_channel
from shardwell_wire.credentials import NO_CREDENTIALS, Credentials
from shardwell_wire.errors import (
    ConflictError,
    DeadlineError,
    DuplicateError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
    from_rpc_error,
)
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_LEAVE_TIMEOUT_S = 2.0
_LONGEST_DELAY_S = 2.0
_GIVEN_UP = (StaleEpochError, NotFoundError)
"""What a heartbeat meets when the coordinator does not take this process for the server any more."""


class Registration:
    """Registers a shard server with the coordinator and keeps its lease.

    Args:
        coordinator: host:port.
        server_id: Stable name of the server.
        store: What is reported.
        credentials: Of the cluster; every rpc carries them.

    Attributes:
        incarnation: Random: tells this process from others of its id.
        term: Of the coordinator, as far as this server has been told.
    """

    def __init__(
        self, coordinator: str, server_id: str, store: ShardStore, credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        self._coordinator, self._server_id, self._store = coordinator, server_id, store
        self._credentials = credentials
        self.incarnation = uuid.uuid4().hex
        self._channel = open_aio_channel(coordinator)
        self._reachable = True
        self._address, self._epoch, self._lease_s = "", 0, 0.0
        self.term = CoordinatorTerm(self._ask_term)
        self._dropping: set[str] = set()
        """Ids of deleted runs that are being dropped."""
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[asyncio.Future[None]]:
        """Registered on entry; heartbeats until exit, then deregisters. Gives what raises when the heartbeats fail.

        Args:
            address: host:port at which others reach this server.

        Raises:
            DuplicateError: Another process has the server's id; from what is given: it took this one's place.
            ConflictError: The coordinator is too old for this server; from what is given: it came back as such a one.
        """
        self._address = address
        try:
            await self._register()
            task = asyncio.ensure_future(self._keep())
            try:
                yield task
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await self._leave()
        finally:
            await self._channel.close()

    async def _register(self) -> None:
        request = coordinator_pb2.RegisterServerRequest(
            server_id=self._server_id,
            address=self._address,
            budget_bytes=self._store.memory.budget_bytes,
            shardwell_version=installed_version("shardwell"),
            incarnation=self.incarnation,
            process=own_identity(),
        )
        delay = 0.05
        while True:
            try:
                response = await self._call("RegisterServer", request)
                break
            except (UnavailableError, DeadlineError) as error:
                self._note("register with", error)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, _LONGEST_DELAY_S)
        if not response.coordinator_epoch:
            raise ConflictError(
                f"the coordinator at {self._coordinator} does not say its term: it is of an older Shardwell than this "
                f"server ({installed_version('shardwell')}); update the coordinator first"
            )
        self._epoch, self._lease_s = response.epoch, response.lease_s
        self.term.learn(response.coordinator_epoch)
        logger.info("registered with the coordinator at %s as %r", self._coordinator, self._server_id)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._beat_or_register()
            except (DuplicateError, ConflictError):
                raise
            except ShardwellError as error:
                self._note("reach", error)

    async def _beat_or_register(self) -> None:
        """One heartbeat; registers again if the coordinator has given this server up."""
        try:
            await self._beat()
        except _GIVEN_UP as error:
            logger.warning("the coordinator took this server for lost: %s", error)
            await self._register()

    async def _leave(self) -> None:
        """Says that this process is about to end. If the coordinator does not answer, it finds out by itself."""
        request = coordinator_pb2.DeregisterServerRequest(server_id=self._server_id, epoch=self._epoch)
        try:
            await self._call("DeregisterServer", request, timeout_s=_LEAVE_TIMEOUT_S)
        except ShardwellError as error:
            logger.info("could not deregister: %s", error)

    async def _ask_term(self) -> None:
        """Hears of the coordinator's term now instead of with the next heartbeat."""
        try:
            await self._beat()
        except _GIVEN_UP as error:
            raise UnavailableError(
                f"server {self._server_id!r} is not registered with the coordinator at {self._coordinator} now: ask "
                "again when it is",
                server=self._server_id,
            ) from error

    async def _beat(self) -> None:
        request = coordinator_pb2.HeartbeatServerRequest(
            server_id=self._server_id,
            epoch=self._epoch,
            reserved_bytes=self._store.memory.reserved_bytes,
            used_bytes=self._store.memory.used_bytes,
            run_ids=self._store.runs,
        )
        response = await self._call("HeartbeatServer", request)
        self.term.learn(response.coordinator_epoch)
        if self.term.is_newest(response.coordinator_epoch):
            for run_id in set(response.deleted_run_ids) - self._dropping:
                self._drop_deleted(run_id)

    def _drop_deleted(self, run_id: str) -> None:
        """Drops a run whose deletion this server missed. In the background: work on the run may have to end first."""

        async def drop() -> None:
            try:
                freed_bytes = await self._store.drop(run_id)
            finally:
                self._dropping.discard(run_id)
            logger.info("dropped the deleted run with id %s: %d bytes are free again", run_id, freed_bytes)

        self._dropping.add(run_id)
        task = asyncio.ensure_future(drop())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, rpc_name: str, request: Any, *, timeout_s: float = _TIMEOUT_S) -> Any:
        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        stub = self._channel.unary_unary(
            f"/{service.full_name}/{rpc_name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(service.methods_by_name[rpc_name].output_type).FromString,
        )
        try:
            response = await stub(request, timeout=timeout_s, metadata=self._credentials.metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, f"coordinator at {self._coordinator}") from error
        self._reachable = True
        return response

    def _note(self, what: str, error: ShardwellError) -> None:
        if self._reachable:
            logger.warning("cannot %s the coordinator at %s, trying on: %s", what, self._coordinator, error)
        self._reachable = False
