"""Leases of shard servers: registration, heartbeats, and probes of silent servers.

Note: [Lost and ended servers]
    A server whose lease expires is probed. If it answers, its lease is renewed once. If it is unreachable, or answers
    but sends no heartbeat within the renewed lease, it is *lost*: without heartbeats it refuses trainers. A lost server
    may still run: it may be suspended, disconnected, or behind a proxy that refuses connections. Runs wait for it. A
    server has *ended* only if its process is gone from the coordinator's own host, if another process of its id
    answers at its address or registers, or if it deregistered. A *restartable* server leaves its copies of shards to
    the next process of its id, also when it deregisters and keeps them. Its memory is gone when that process has
    registered without them. Error messages advise to delete a run only when memory is gone.

    A process that registers is probed first. If it does not answer at its address, it is registered, but it is
    *unreachable*: no unit is placed on it until a probe succeeds. See ``Server.reached``.

    A server whose membership stream breaks is probed at once. If its host refuses the connection, the server is lost
    before its lease expires, and ``Server.refused`` is set. See Note: [Broken streams].
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection
from weakref import WeakValueDictionary

from shardwell_server.coordinator.connection import ConnectionState
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.servers.cluster import Server, ServerState, describe_unreachable
from shardwell_server.coordinator.servers.shard_client import REFUSED, ShardCalls
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_wire.connection.channel import backoff
from shardwell_wire.errors import ConflictError, DuplicateError, ShardwellError, StaleEpochError, UnavailableError
from shardwell_wire.host.server_folders import has_ended
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_MAX_PROBE_PAUSE_S = 1.0
"""Longest pause between probes of a server that was loaded from storage, until its lease expires."""


class ServerLeases:
    """Leases of the shard servers. ``calls``: performs the probes."""

    def __init__(self, state: CoordinatorState, calls: ShardCalls) -> None:
        self._state, self._calls = state, calls
        self._registration_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By server id. Held while a server is registered or forgotten. A lock exists only while a task uses it."""
        self._probing: set[int] = set()
        """Epochs of the servers that are being probed."""
        self._forgetting: set[str] = set()
        """Ids of the servers that are being forgotten in the background."""

    def start(self) -> None:
        """Probes the servers that were loaded from storage, so that live ones are confirmed early."""
        for server in self._state.cluster.servers.values():
            if server.state is ServerState.UNCONFIRMED:
                self._start_probing(server)

    async def register(
        self,
        server_id: str,
        address: str,
        incarnation: str,
        budget_bytes: int,
        process: str = "",
        *,
        restartable: bool = False,
        holds_shards: bool = False,
        relay: coordinator_pb2.RegisterServerRequest | None = None,
    ) -> int:
        """Registers a shard server process. Returns its epoch.

        The caller must decide at once, without ``await``, which shards of its predecessor the process keeps. ``relay``
        says whether and for which host the server relays; None: it does not.

        Raises:
            InvalidRequestError: A field is missing or invalid.
            DuplicateError: Another process has the id and is alive, or registered later than this one.
            UnavailableError: Another process has the id and may be alive. The caller may retry.
        """
        cluster = self._state.cluster
        async with self._registration_lock(server_id):
            server = cluster.check(server_id, address, incarnation, budget_bytes, process, restartable=restartable)
            former = cluster.servers.get(server_id)
            if former is not None and former.may_be_alive and former.incarnation != incarnation:
                await self._require_ended(former)
            if relay is not None:
                server.relays, server.owns_nothing, server.host = relay.relays, relay.owns_nothing, relay.host
            if server.owns_nothing:
                server.mark_reached()  # only trainers of its host must reach it
            else:
                await self._reach(server)
            # Store the server before units can be placed on it: every owner of shards must survive a restart.
            await self._save(server)
            cluster.register(server)
        message = f"server {server_id!r} at {address} with {budget_bytes} bytes, epoch {server.epoch}"
        if former is None:
            self._state.events.add(EventKind.SERVER_REGISTERED, message)
        elif former.incarnation != incarnation:
            memory = "" if holds_shards else f"; its memory is empty{self._losses(former)}"
            self._state.events.add(EventKind.SERVER_RESTARTED, message + memory)
        if not server.reached:
            logger.warning("%s", describe_unreachable(server))
            self._start_probing(server)
        self._notify_runs()
        return server.epoch

    async def prove_alive(self, server_ids: Collection[str]) -> None:
        """Probes live servers. Servers that do not answer are suspected, so that no copy is dropped for their sake."""

        async def prove(server: Server) -> None:
            try:
                running = await self._calls.is_running(server)
            except UnavailableError:
                running = False
            if not running and server.live and self._state.cluster.servers.get(server.server_id) is server:
                server.suspected = True
                self._start_probing(server)

        servers = [self._state.cluster.servers.get(server_id) for server_id in server_ids]
        await asyncio.gather(*(prove(server) for server in servers if server is not None and server.live))

    async def _reach(self, server: Server) -> None:
        """Probes a process that registers, and records whether it answers at its address."""
        try:
            self._note_reached(server, running=await self._calls.is_running(server))
        except UnavailableError as error:
            server.note_unreachable(str(error))

    def _note_reached(self, server: Server, *, running: bool) -> None:
        if running:
            server.mark_reached()
        else:
            server.note_unreachable(f"another process of this id answers at {server.address}")

    def heartbeat(self, request: coordinator_pb2.HeartbeatServerRequest) -> None:
        """Renews a server's lease. Raises as ``Cluster.heartbeat``."""
        self._note_alive(request.server_id, self._state.cluster.heartbeat(request))

    async def keep_membership(
        self, request: coordinator_pb2.KeepServerMembershipRequest
    ) -> AsyncGenerator[coordinator_pb2.KeepServerMembershipResponse]:
        """Keeps a server's membership stream open: yields one message, then waits until the membership ends.

        The caller must close the iterator, or cancel its task, when the stream breaks.

        Args:
            request: Names the server. It also says where the server takes calls beside gRPC, and whether it relays:
                a server that keeps its lease does not register again with a restarted coordinator.

        Raises:
            StaleEpochError: The server is not registered, has left, or another process has its id.
        """
        cluster, server_id, epoch = self._state.cluster, request.server_id, request.epoch
        server = cluster.require_epoch(server_id, epoch)
        server.relays, server.host = request.relays, request.host
        self._note_alive(server_id, cluster.renew_lease(server))
        if request.HasField("calls"):
            self._state.tasks.start(self._calls.use_calls(server.address, request.calls))
        with server.connection.stream(lambda: self._watch_disconnected(server.server_id, server.incarnation)):
            yield coordinator_pb2.KeepServerMembershipResponse()
            while not self._state.stopping:
                await server.connection.news.wait()
                cluster.require_epoch(server_id, epoch)

    def _watch_disconnected(self, server_id: str, incarnation: str) -> None:
        """Finds out whether a server without a stream has ended. See Note: [Broken streams]."""
        cluster = self._state.cluster

        def current() -> Server | None:
            server = cluster.servers.get(server_id)
            alike = server is not None and server.incarnation == incarnation and server.may_be_alive
            return server if alike else None

        async def watch(server: Server, was_silent: bool) -> None:
            state = await server.connection.settled_state(server.process, was_silent=was_silent)
            # The server may have ended or been replaced while this task waited.
            if (found := current()) is None:
                return
            if state is ConnectionState.ENDED:
                self._note_ended(found)
            elif state is ConnectionState.DISCONNECTED:
                found.suspected = True
                self._start_probing(found)

        if self._state.stopping:
            return
        if (server := current()) is not None and not server.connection.streams:
            was_silent = cluster.silent_s(server) > self._state.settings.lease_s / 2
            self._state.tasks.start(watch(server, was_silent))

    async def deregister(self, server_id: str, epoch: int, *, keeps_copies: bool = False) -> None:
        """Marks a shard server as stopped before its process ends. Repeating it is harmless.

        Args:
            keeps_copies: True if the next process of the id takes up the copies. Otherwise the server has left.

        Raises:
            NotFoundError: The server is not registered.
            StaleEpochError: Another process has its id.
        """
        server = self._state.cluster.require(server_id)
        if server.epoch != epoch:
            raise StaleEpochError(
                f"server {server_id!r} deregisters with epoch {epoch}, but the process of this id has epoch "
                f"{server.epoch}",
                server=server_id,
                epoch=server.epoch,
            )
        if server.ended:
            return
        # Mark the server before storing it, so that no unit is placed on it meanwhile.
        self._state.cluster.deregister(server, keeps_copies=keeps_copies)
        await self._save(server)
        left = "keeps its copies for its next start" if keeps_copies else f"left the cluster{self._losses(server)}"
        message = f"server {server_id!r} at {server.address} was stopped and {left}"
        self._state.events.add(EventKind.SERVER_LEFT, message)
        self._notify_runs()

    async def _save(self, server: Server) -> None:
        if not server.owns_nothing:
            await self._state.storage.save_server(server.to_record())

    async def forget(self, server_id: str) -> None:
        """Removes a server from the registry.

        Raises:
            NotFoundError: The server is not registered.
            ConflictError: The server may be alive, or owns shards of a run.
        """
        async with self._registration_lock(server_id):
            server = self._state.cluster.require(server_id)
            if server.may_be_alive:
                raise ConflictError(
                    f"server {server_id!r} at {server.address} is {server.state.name.lower()}: only a server that is "
                    "lost, has ended or has left can be forgotten; stop it first",
                    server=server_id,
                )
            if runs := self._runs_on(server):
                raise ConflictError(
                    f"server {server_id!r} owns shards of {_named(runs)}, which cannot be located if the server is "
                    "forgotten: delete these runs first if they cannot continue",
                    server=server_id,
                )
            await self._forget(server)

    def expire(self) -> None:
        """Starts probing silent servers. Forgets servers that left and own no shards."""
        cluster = self._state.cluster
        for server in list(cluster.servers.values()):
            if server.may_be_alive and not server.connection.streams and has_ended(server.process):
                self._note_ended(server)  # before it opened a stream
            elif cluster.lease_expired(server) or (server.live and not server.reached):
                self._start_probing(server)
            left = server.state is ServerState.LEFT and server.server_id not in self._forgetting
            if left and not self._runs_on(server):
                self._state.tasks.start(self._forget_left(server))

    def _registration_lock(self, server_id: str) -> asyncio.Lock:
        return self._registration_locks.setdefault(server_id, asyncio.Lock())

    async def _require_ended(self, former: Server) -> None:
        """Raises DuplicateError if a process is alive, UnavailableError if it may be alive."""
        try:
            running = await self._calls.is_running(former)
        except UnavailableError as error:
            raise UnavailableError(
                f"server {former.server_id!r}: another process at {former.address} has this id and may be alive, "
                f"although {error}: it is considered lost after {self._state.settings.lease_s:g} s without a heartbeat",
                server=former.server_id,
                address=former.address,
            ) from error
        if running:
            raise DuplicateError(
                f"server {former.server_id!r}: another process at {former.address} has this id and is alive: give "
                "every server its own id (--id, SHARDWELL_ID), or stop that process first",
                server=former.server_id,
                address=former.address,
            )

    # Probes

    def _start_probing(self, server: Server) -> None:
        if server.epoch not in self._probing:
            self._probing.add(server.epoch)
            self._state.tasks.start(self._probe(server))

    async def _probe(self, server: Server) -> None:
        """Probes a server until it is live, replaced, or has ended. See Note: [Lost and ended servers]."""
        lease_s = self._state.settings.lease_s
        pauses = backoff(min(lease_s / 5, _MAX_PROBE_PAUSE_S), lease_s)
        try:
            while self._is_in_doubt(server):
                try:
                    running = await self._calls.is_running(server)
                except UnavailableError as error:
                    self._note_unreachable(server, str(error), refused=error.data.get("connection") == REFUSED)
                else:
                    self._note_probe_answered(server, running=running)
                if not self._is_in_doubt(server):
                    return
                soon = server.state is ServerState.UNCONFIRMED or (server.live and server.suspected)
                later_s = next(pauses) if server.live and not server.reached else lease_s
                await asyncio.sleep(min(lease_s / 5, _MAX_PROBE_PAUSE_S) if soon else later_s)
        finally:
            self._probing.discard(server.epoch)

    def _is_in_doubt(self, server: Server) -> bool:
        """True if it is unknown whether a registered server is alive."""
        cluster = self._state.cluster
        unconfirmed_or_lost = server.state in (ServerState.UNCONFIRMED, ServerState.LOST)
        current = cluster.servers.get(server.server_id) is server
        doubtful = unconfirmed_or_lost or server.suspected or cluster.lease_expired(server)
        return current and (doubtful or (server.live and not server.reached))

    def _note_unreachable(self, server: Server, reason: str, *, refused: bool) -> None:
        if not self._is_in_doubt(server):
            return
        first = not server.unreachable_because
        server.note_unreachable(reason)
        if first:
            self._notify_runs()  # placements wait for the first probe after a restart
        expired, ended = self._state.cluster.lease_expired(server), server.suspected and refused
        if server.may_be_alive and (expired or ended):
            self._note_lost(server, "it closed its connection" if ended else "its lease expired", reason, refused=ended)

    def _note_lost(self, server: Server, what: str, reason: str, *, refused: bool = False) -> None:
        server.mark_lost(refused=refused)
        message = f"server {server.server_id!r} at {server.address}: {what}, and {reason}"
        self._state.events.add(EventKind.SERVER_LOST, message)
        self._notify_runs()

    def _note_probe_answered(self, server: Server, *, running: bool) -> None:
        if not self._is_in_doubt(server):
            return
        if server.live and not server.reached and not self._state.cluster.lease_expired(server):
            self._note_reached(server, running=running)
            if server.reached:
                self._state.events.add(EventKind.SERVER_RETURNED, f"server {server.server_id!r} is reachable now")
                self._notify_runs()
        elif not running:
            self._note_ended(server)
        elif not server.renewed_by_probe:
            if server.live:
                logger.warning("server %r sends no heartbeats but answers probes: lease renewed", server.server_id)
            server.mark_reached()
            self._note_alive(server.server_id, self._state.cluster.renew_lease(server))
        elif self._state.cluster.lease_expired(server):
            self._note_lost(server, "its lease expired", "it answers probes, but no heartbeats arrive from it")

    def _note_ended(self, server: Server) -> None:
        server.state = ServerState.ENDED
        losses = "" if server.restartable else self._losses(server)
        message = f"server {server.server_id!r} at {server.address} has ended{losses}"
        self._state.events.add(EventKind.SERVER_ENDED, message)
        self._notify_runs()

    def _note_alive(self, server_id: str, before: ServerState) -> None:
        """Reports that a server is live again, given the state it had before."""
        if before not in (ServerState.LIVE, ServerState.UNCONFIRMED):
            self._state.events.add(EventKind.SERVER_RETURNED, f"server {server_id!r} is reachable again")
        if before is not ServerState.LIVE:
            self._notify_runs()

    # Forgetting

    async def _forget(self, server: Server) -> None:
        cluster = self._state.cluster
        await self._state.storage.delete_server(server.server_id, cluster.last_epoch)
        # Another process may have registered under the id while the deletion was stored.
        if cluster.servers.get(server.server_id) is server:
            cluster.forget(server)

    async def _forget_left(self, server: Server) -> None:
        """Forgets a server that has left. If this cannot be stored, the next ``expire`` tries again."""
        self._forgetting.add(server.server_id)
        try:
            async with self._registration_lock(server.server_id):
                if self._state.cluster.servers.get(server.server_id) is server and not self._runs_on(server):
                    await self._forget(server)
        except ShardwellError as error:
            logger.error("%s", error)
        finally:
            self._forgetting.discard(server.server_id)

    def _runs_on(self, server: Server) -> list[str]:
        """Returns the names of the runs with units on a server process, published or not."""
        process = (server.server_id, server.incarnation)
        return sorted(run.name for run in self._state.runs.values() if process in run.units.processes)

    def _losses(self, server: Server) -> str:
        """Returns the runs that lose shards when a server process ends, for messages."""
        process = (server.server_id, server.incarnation)
        lost = [
            name
            for name in self._runs_on(server)
            if any(unit.published for unit in self._state.runs[name].units.owned_by(process))
        ]
        return f": {_named(lost)} lost shards" if lost else ""

    def _notify_runs(self) -> None:
        """Wakes every rpc that waits for a change of the servers."""
        self._state.cluster.changed.notify()
        for run in self._state.runs.values():
            run.changed.notify()


def _named(runs: list[str]) -> str:
    return f"{'run' if len(runs) == 1 else 'runs'} {', '.join(map(repr, runs))}"
