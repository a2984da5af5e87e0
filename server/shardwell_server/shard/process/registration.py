"""Registers a shard server with the coordinator and keeps its lease. A server that stops drains first."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as installed_version
from typing import Any

import grpc
import grpc.aio

from shardwell_server.serving.call_server import CallServer
from shardwell_server.shard.state.runs import CoordinatorTerm
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_wire.connection.channel import backoff, open_aio_channel, open_stub, retry_async
from shardwell_wire.connection.protocol_versions import check_chosen, own_versions
from shardwell_wire.errors import (
    AccessError,
    ConflictError,
    DeadlineError,
    DuplicateError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
)
from shardwell_wire.host.server_folders import own_identity
from shardwell_wire.security.credentials import NO_CREDENTIALS, Credentials
from shardwell_wire.security.tls import connection_error
from shardwell_wire.security.tokens import Role
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
_TIMEOUT_S = 5.0
_NONCE_BYTES = 16
_LEAVE_TIMEOUT_S = 2.0
_FINISH_S = 5.0
"""Longest wait for updates in progress before the process ends. The next process continues an interrupted one."""
_LONGEST_PAUSE_S = 2.0
_LONGEST_SILENT_PAUSE_S = 0.5
"""Longest pause between heartbeats while the coordinator does not answer. Trainers wait when the lease has expired."""
_FIRST_STREAM_PAUSE_S, _LONGEST_STREAM_PAUSE_S = 0.01, 1.0
"""Pauses before a broken membership stream is opened again. The first is well below the coordinator's grace."""
_LEASE_LOST = (StaleEpochError, NotFoundError)
"""Errors of a heartbeat after the lease of this process has ended."""


@dataclass(frozen=True, slots=True)
class RelayOffer:
    """For whom a server relays."""

    host: str
    """Name of the host."""
    owns_nothing: bool
    """Whether the server never gets a shard."""


class Registration:
    """Registers a shard server with the coordinator and keeps its lease. Trainers are refused until then.

    Used on the event loop.

    Args:
        coordinator: host:port.
        server_id: Stable name of the server.
        store: State whose memory and runs are reported.
        credentials: The key with which this server proves itself and checks that answers come from the cluster's
            coordinator, and its TLS.
        insecure: What the server lacks although it listens on a network. Empty: nothing.
        calls: Takes calls of the coordinator beside gRPC. None: nothing does.
        relay: What the server tells of itself as a relay. None: it is none.

    Attributes:
        incarnation: Random id that distinguishes this process from others with the same server id.
        term: The newest term that the coordinator has confirmed.
    """

    def __init__(
        self,
        coordinator: str,
        server_id: str,
        store: ShardStore,
        credentials: Credentials = NO_CREDENTIALS,
        insecure: str = "",
        calls: CallServer | None = None,
        relay: RelayOffer | None = None,
    ) -> None:
        self._relay = relay
        self._coordinator, self._server_id, self._store = coordinator, server_id, store
        self._insecure, self._calls = insecure, calls
        self._credentials = credentials.of_role(Role.SERVER)
        store.lease.suspend()
        self.incarnation = uuid.uuid4().hex
        self._channel = open_aio_channel(coordinator, credentials.tls)
        self._reachable = True
        self._unreachable_because = ""
        """Why the coordinator cannot reach this server, as of the last heartbeat."""
        self._address, self._epoch, self._lease_s = "", 0, 0.0
        self.term = CoordinatorTerm(self._ask_term)
        self._dropping: set[str] = set()
        """Ids of the deleted runs that are being dropped."""
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[asyncio.Future[None]]:
        """Registers on entry, sends heartbeats while the block runs, and deregisters on exit.

        Yields a future that raises when the server must stop. The errors below come from the registration on entry or a
        later one.

        Args:
            address: host:port by which clients reach this server.

        Raises:
            DuplicateError: Another process has registered with the server's id.
            TlsError: The TLS of this server does not suit that of the coordinator.
            ConflictError: The coordinator is too old for this server.
        """
        self._address = address
        stream: asyncio.Future[None] | None = None
        try:
            await self._register()
            task = asyncio.ensure_future(self._keep_lease())
            stream = asyncio.ensure_future(self._keep_stream())
            try:
                yield task
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await self._leave()
        finally:
            if stream is not None:  # also after an error: the stream must not use a closed channel
                stream.cancel()
                await asyncio.gather(stream, return_exceptions=True)
            await self._channel.close()

    async def drain(self, limit_s: float) -> None:
        """Moves the shards of this server to other servers before it stops; see ``drain`` above."""
        await drain(self._ask_to_drain, limit_s, lambda: bool(self._store.describe_ending()))

    async def list_units(self, run: str) -> coordinator_pb2.ListUnitsResponse:
        """Asks the coordinator for the units of a run and the owners of their shards."""
        response: coordinator_pb2.ListUnitsResponse = await self._call(
            "ListUnits", coordinator_pb2.ListUnitsRequest(run=run)
        )
        return response

    async def _ask_to_drain(self) -> coordinator_pb2.DrainServerResponse:
        request = coordinator_pb2.DrainServerRequest(server_id=self._server_id, epoch=self._epoch)
        response: coordinator_pb2.DrainServerResponse = await self._call("DrainServer", request)
        return response

    async def _register(self) -> None:
        request = coordinator_pb2.RegisterServerRequest(
            server_id=self._server_id,
            address=self._address,
            budget_bytes=self._store.memory.budget_bytes,
            shardwell_version=installed_version("shardwell"),
            protocol=own_versions(),
            incarnation=self.incarnation,
            process=own_identity(),
            held=[] if self._store.of_former is None else self._store.of_former.held(),
            restartable=self._store.of_former is not None,
            insecure=self._insecure,
            nonce=secrets.token_bytes(_NONCE_BYTES),
        )
        if self._relay is not None:
            request.relays, request.host = True, self._relay.host
            request.owns_nothing = self._relay.owns_nothing
        sent_s = 0.0

        async def register() -> Any:
            nonlocal sent_s
            # The lease counts from the request, so it ends here no later than at the coordinator.
            sent_s = asyncio.get_running_loop().time()
            response = await self._call("RegisterServer", request)
            self._check_proof(request.nonce, response)
            return response

        response = await retry_async(
            register,
            errors=(UnavailableError, DeadlineError),
            check=partial(self._log_unreachable, "register with"),
            longest_pause_s=_LONGEST_PAUSE_S,
        )
        if not response.coordinator_epoch:
            raise ConflictError(
                f"the coordinator at {self._coordinator} sends no term, so it is older than this server "
                f"({installed_version('shardwell')}): update the coordinator"
            )
        check_chosen(response.protocol_version, self._coordinator)
        self._store.adopt(response.adopted)
        self._epoch, self._lease_s = response.epoch, response.lease_s
        self.term.learn(response.coordinator_epoch)
        self._keep_serving(sent_s, response)
        logger.info("registered with the coordinator at %s as %r", self._coordinator, self._server_id)

    def _keep_serving(
        self, sent_s: float, response: coordinator_pb2.RegisterServerResponse | coordinator_pb2.HeartbeatServerResponse
    ) -> None:
        """Renews the lease under which trainers are served, after the shards are retired that have moved meanwhile.

        Args:
            sent_s: Time at which the request was sent that the coordinator has answered.
            response: The answer. An answer of a former coordinator changes nothing.
        """
        if not self.term.is_newest(response.coordinator_epoch):
            return
        for shard in response.retired_shards:
            self._store.retire(shard.run_id, shard.unit, shard.start_bytes, shard.placement)
        self._store.lease.renew(sent_s, self._lease_s)

    async def _keep_lease(self) -> None:
        while True:
            pause_s = self._lease_s / 3
            await asyncio.sleep(pause_s if self._reachable else min(pause_s, _LONGEST_SILENT_PAUSE_S))
            try:
                await self._beat_or_register()
            # These errors are permanent: another process has the id, or the coordinator is too old.
            except (DuplicateError, ConflictError):
                raise
            except ShardwellError as error:
                self._log_unreachable("reach", error)

    async def _keep_stream(self) -> None:
        """Keeps a membership stream open, by which the coordinator notices the end of this process at once."""
        pauses: Iterator[float] = backoff(_FIRST_STREAM_PAUSE_S, _LONGEST_STREAM_PAUSE_S)
        stub = open_stub(self._channel, _SERVICE, "KeepServerMembership")
        while True:
            request = coordinator_pb2.KeepServerMembershipRequest(
                server_id=self._server_id,
                epoch=self._epoch,
                calls=None if self._calls is None else self._calls.offer(),
                relays=self._relay is not None,
                host="" if self._relay is None else self._relay.host,
            )
            try:
                async for _ in stub(request, metadata=self._credentials.metadata, wait_for_ready=True):
                    pauses = backoff(_FIRST_STREAM_PAUSE_S, _LONGEST_STREAM_PAUSE_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    logger.info("the coordinator keeps no membership streams, so only the lease counts")
                    return
                logger.debug("the membership stream broke: %s", error.details())
            await asyncio.sleep(next(pauses))

    async def _beat_or_register(self) -> None:
        """Sends one heartbeat. Registers again if the lease has ended."""
        try:
            await self._beat()
        except _LEASE_LOST as error:
            logger.warning("the lease of this server has ended, registering again: %s", error)
            await self._register()

    async def _leave(self) -> None:
        """Deregisters, once no shard changes any more. If the coordinator does not answer, the lease expires."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FINISH_S):
                await self._store.finish_work()
        request = coordinator_pb2.DeregisterServerRequest(
            server_id=self._server_id, epoch=self._epoch, keeps_copies=self._store.keeps_shards
        )
        ending, level = self._store.describe_ending(), logging.WARNING
        try:
            await self._call("DeregisterServer", request, timeout_s=_LEAVE_TIMEOUT_S)
        except ShardwellError as error:
            logger.info("cannot deregister: %s", error)
            level = logging.INFO  # the whole cluster ends, such as one in the process of a test
        if ending:
            logger.log(level, "%s", ending)

    async def _ask_term(self) -> None:
        """Sends a heartbeat now. Its response contains the coordinator's term."""
        try:
            await self._beat()
        except _LEASE_LOST as error:
            raise UnavailableError(
                f"server {self._server_id!r} is not registered with the coordinator at {self._coordinator}: try again "
                "when it is",
                server=self._server_id,
            ) from error

    async def _beat(self) -> None:
        request = coordinator_pb2.HeartbeatServerRequest(
            server_id=self._server_id,
            epoch=self._epoch,
            reserved_bytes=self._store.memory.reserved_bytes,
            used_bytes=self._store.memory.used_bytes,
            run_ids=self._store.runs,
            replicated_bytes=self._store.replicated_bytes,
            insecure=self._insecure,
            shardwell_version=installed_version("shardwell"),
            protocol=own_versions(),
            nonce=secrets.token_bytes(_NONCE_BYTES),
        )
        # The lease counts from the request, so it ends here no later than at the coordinator.
        sent_s = asyncio.get_running_loop().time()
        response = await self._call("HeartbeatServer", request)
        self._check_proof(request.nonce, response)
        self.term.learn(response.coordinator_epoch)
        self._keep_serving(sent_s, response)
        self._log_unreachable_address(response.unreachable_because)
        if self.term.is_newest(response.coordinator_epoch):
            for run_id in set(response.deleted_run_ids) - self._dropping:
                self._drop_deleted(run_id)

    def _log_unreachable_address(self, reason: str) -> None:
        if reason != self._unreachable_because:
            self._unreachable_because = reason
            if reason:
                logger.warning(
                    "this server gets no units: %s. Start it with --advertise HOST, the host by which the coordinator "
                    "and the trainers reach it",
                    reason,
                )
            else:
                logger.info("the coordinator reaches this server at %s", self._address)

    def _drop_deleted(self, run_id: str) -> None:
        """Drops a run whose deletion this server missed. Runs in the background, after pending work on the run."""

        async def drop() -> None:
            try:
                freed_bytes = await self._store.drop(run_id)
            finally:
                self._dropping.discard(run_id)
            logger.info("dropped the deleted run with id %s, which freed %d bytes", run_id, freed_bytes)

        self._dropping.add(run_id)
        task = asyncio.ensure_future(drop())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, rpc_name: str, request: Any, *, timeout_s: float = _TIMEOUT_S) -> Any:
        stub = open_stub(self._channel, _SERVICE, rpc_name)
        try:
            response = await stub(request, timeout=timeout_s, metadata=self._credentials.metadata)
        except grpc.aio.AioRpcError as error:
            raise await asyncio.to_thread(
                connection_error, error, f"coordinator at {self._coordinator}", self._coordinator, self._credentials.tls
            ) from error
        self._reachable = True
        return response

    def _check_proof(
        self, nonce: bytes, response: coordinator_pb2.RegisterServerResponse | coordinator_pb2.HeartbeatServerResponse
    ) -> None:
        """Raises AccessError unless an answer comes from a process with the cluster's key.

        Otherwise, a process at the address of a coordinator that has ended could make this server drop runs.
        """
        proof = response.proof
        response.ClearField("proof")
        key = self._credentials.key
        if key is None or hmac.compare_digest(
            key.answer_proof(nonce, response.SerializeToString(deterministic=True)), proof
        ):
            return
        raise AccessError(
            f"the process at {self._coordinator} does not have this cluster's key, so its answer changes nothing: "
            "start the coordinator with the same --token-file"
        )

    def _log_unreachable(self, action: str, error: Exception) -> None:
        """Logs the first of several failed calls."""
        if self._reachable:
            logger.warning("cannot %s the coordinator at %s, retrying: %s", action, self._coordinator, error)
        self._reachable = False


_POLL_S = 0.2
"""Pause between two questions to the coordinator."""
_STUCK_S = 1.0
"""How long the number of shards may stay the same while no other server can take the rest."""
_SILENCE_S = 3.0
"""How long a coordinator that has answered before may be unreachable, for example because it is started again. Shards
that end with this process wait longer, see ``drain``."""


async def drain(
    ask: Callable[[], Awaitable[coordinator_pb2.DrainServerResponse]], limit_s: float, would_lose: Callable[[], bool]
) -> bool:
    """Moves the shards of this server to other servers.

    Args:
        ask: Calls ``DrainServer``, which starts the moves and reports the progress.
        would_lose: Returns True if shards end with this process. It then waits for an absent coordinator, too.

    Returns:
        True if the server has no shards left. False if the coordinator cannot be reached, no other server can take the
        rest, or the time is over.
    """
    loop = asyncio.get_running_loop()
    now = silence_ends_s = loop.time()
    deadline, last_progress_s, left, waiting = now + limit_s, now, -1, False
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                answer = await ask()
        except (UnavailableError, DeadlineError, TimeoutError) as error:
            if loop.time() >= min(deadline, silence_ends_s):
                if loop.time() >= deadline or not would_lose():
                    logger.warning("the shards of this server do not move, because the coordinator is gone: %s", error)
                    return False
                if not waiting:
                    waiting = True
                    logger.warning(
                        "waiting for the coordinator until %g s after the signal, because shards end with this process "
                        "if they do not move (a second SIGTERM stops it at once): %s",
                        limit_s,
                        error,
                    )
        except ShardwellError as error:
            logger.warning("the shards of this server do not move: %s", error)
            return False
        else:
            now = loop.time()
            silence_ends_s, waiting = now + _SILENCE_S, False
            if not answer.shard_count:
                return True
            if left < 0:
                logger.info("moving %d shards to other servers", answer.shard_count)
            if answer.shard_count != left:
                left, last_progress_s = answer.shard_count, now
            if answer.waiting_for and now - last_progress_s > _STUCK_S:
                logger.warning("%d shards stay on this server: %s", left, "; ".join(answer.waiting_for))
                return False
            if now > deadline:
                logger.warning("%d shards stay on this server: they were not moved within %g s", left, limit_s)
                return False
        await asyncio.sleep(_POLL_S)
