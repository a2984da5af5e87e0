"""Shard servers come, are heard of, and go: registrations, leases, and finding out who has ended.

Note: What is known of a silent server
    A server that is silent for its lease is probed. If it answers, its lease goes on. If it cannot be reached it is
    lost, which says nothing of its process: it may be stopped, cut off, or behind a proxy that refuses connections.
    Runs wait for it. That a server has ended, with its memory, is known only if its process is gone from the
    coordinator's own host, if another process of its id answers at its address or registers, or if it said that it
    leaves. Only then are users told to delete a run.
"""

from __future__ import annotations

import asyncio
import logging
from weakref import WeakValueDictionary

from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.servers.cluster import Server, ServerState
from shardwell_server.coordinator.servers.shard_client import ShardCalls
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_wire.errors import ConflictError, DuplicateError, ShardwellError, StaleEpochError, UnavailableError

logger = logging.getLogger(__name__)

_LONGEST_PROBE_PAUSE_S = 1.0
"""How often a server that is remembered from an earlier term is probed until its lease is over."""


class ServerLeases:
    """The shard servers' places in the cluster.

    Args:
        state: Where they are kept.
        calls: How they are reached.
    """

    def __init__(self, state: CoordinatorState, calls: ShardCalls) -> None:
        self._state, self._calls = state, calls
        self._registering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By server id."""
        self._probing: set[int] = set()
        """Epochs of the servers that are being probed."""
        self._forgetting: set[str] = set()

    def start(self) -> None:
        """Probes the servers of an earlier term, so that those that are alive need not be waited for."""
        for server in self._state.cluster.servers.values():
            if server.state is ServerState.UNCONFIRMED:
                self._start_probing(server)

    async def register(
        self, server_id: str, address: str, incarnation: str, budget_bytes: int, process: str = ""
    ) -> int:
        """Takes in a shard server process; returns its epoch.

        Raises:
            InvalidRequestError: A field is missing or impossible.
            DuplicateError: Another process has the id: it is alive, or came later than this one.
            UnavailableError: Another process has the id and may be alive. Asking again is harmless.
        """
        cluster = self._state.cluster
        async with self._registering.setdefault(server_id, asyncio.Lock()):
            server = cluster.check(server_id, address, incarnation, budget_bytes, process)
            former = cluster.servers.get(server_id)
            if former is not None and former.may_be_alive and former.incarnation != incarnation:
                await self._require_ended(former)
            await self._state.storage.save_server(server.to_record())
            cluster.register(server)
        message = f"server {server_id!r} at {address} with {budget_bytes} bytes, epoch {server.epoch}"
        if former is None:
            self._state.events.add(EventKind.SERVER_REGISTERED, message)
        elif former.incarnation != incarnation:
            self._state.events.add(EventKind.SERVER_RESTARTED, f"{message}; its memory is empty{self._losses(former)}")
        self._wake_runs()
        return server.epoch

    def heartbeat(self, server_id: str, epoch: int, reserved_bytes: int, used_bytes: int) -> None:
        """A shard server is heard of; raises as ``Cluster.heartbeat`` does."""
        self._note_alive(server_id, self._state.cluster.heartbeat(server_id, epoch, reserved_bytes, used_bytes))

    async def leave(self, server_id: str, epoch: int) -> None:
        """A shard server is about to end, with its memory. Repeating it is harmless.

        Raises:
            NotFoundError: There is no such server.
            StaleEpochError: Another process has its id.
        """
        server = self._state.cluster.require(server_id)
        if server.epoch != epoch:
            raise StaleEpochError(
                f"server {server_id!r} leaves with epoch {epoch}, but the process of that id has {server.epoch}",
                server=server_id,
                epoch=server.epoch,
            )
        if server.state is ServerState.LEFT:
            return
        self._state.cluster.leave(server)
        await self._state.storage.save_server(server.to_record())
        message = f"server {server_id!r} at {server.address} was stopped and left the cluster{self._losses(server)}"
        self._state.events.add(EventKind.SERVER_LEFT, message)
        self._wake_runs()

    async def forget(self, server_id: str) -> None:
        """Removes a server from the list.

        Raises:
            NotFoundError: There is no such server.
            ConflictError: It may be alive, or has shards of a run.
        """
        async with self._registering.setdefault(server_id, asyncio.Lock()):
            server = self._state.cluster.require(server_id)
            if server.may_be_alive:
                raise ConflictError(
                    f"server {server_id!r} at {server.address} is {server.state.name.lower()}: only a server that is "
                    "lost, has ended or has left can be forgotten; stop it first",
                    server=server_id,
                )
            if runs := self._runs_on(server):
                raise ConflictError(
                    f"server {server_id!r} has shards of {_named(runs)}, which would no longer know where they are: "
                    "delete those runs first if they cannot go on",
                    server=server_id,
                )
            await self._forget(server)

    def expire(self) -> None:
        """Begins to find out what became of silent servers; forgets those that left nothing behind."""
        cluster = self._state.cluster
        for server in list(cluster.servers.values()):
            if cluster.is_silent(server):
                self._start_probing(server)
            left = server.state is ServerState.LEFT and server.server_id not in self._forgetting
            if left and not self._runs_on(server):
                self._state.tasks.start(self._forget_or_retry(server))

    async def _require_ended(self, former: Server) -> None:
        """Raises DuplicateError if a process is alive, UnavailableError if it may be."""
        try:
            running = await self._calls.is_running(former)
        except UnavailableError as error:
            raise UnavailableError(
                f"server {former.server_id!r}: another process, at {former.address}, has this id and may be alive, "
                f"though {error}: it is taken for lost when it was not heard of for {self._state.settings.lease_s:g} s",
                server=former.server_id,
                address=former.address,
            ) from error
        if running:
            raise DuplicateError(
                f"server {former.server_id!r}: another process, at {former.address}, has this id and is alive: give "
                "every server its own id (--id, SHARDWELL_ID), or end that process first",
                server=former.server_id,
                address=former.address,
            )

    def _start_probing(self, server: Server) -> None:
        if server.epoch not in self._probing:
            self._probing.add(server.epoch)
            self._state.tasks.start(self._probe(server))

    async def _probe(self, server: Server) -> None:
        """Finds out what became of a server, until it is heard of, replaced, or known to have ended."""
        lease_s = self._state.settings.lease_s
        try:
            while self._is_in_doubt(server):
                try:
                    running = await self._calls.is_running(server)
                except UnavailableError as error:
                    self._note_silence(server, str(error))
                else:
                    self._note_answer(server, running=running)
                if not self._is_in_doubt(server):
                    return
                is_new = server.state is ServerState.UNCONFIRMED
                await asyncio.sleep(min(lease_s / 5, _LONGEST_PROBE_PAUSE_S) if is_new else lease_s)
        finally:
            self._probing.discard(server.epoch)

    def _is_in_doubt(self, server: Server) -> bool:
        """Whether a server is in the cluster and nobody knows whether it is alive."""
        cluster = self._state.cluster
        is_new_or_lost = server.state in (ServerState.UNCONFIRMED, ServerState.LOST)
        return cluster.servers.get(server.server_id) is server and (is_new_or_lost or cluster.is_silent(server))

    def _note_silence(self, server: Server, reason: str) -> None:
        if not self._is_in_doubt(server):
            return
        server.silence = reason
        if self._state.cluster.is_silent(server):
            server.state = ServerState.LOST
            message = f"server {server.server_id!r} at {server.address} was not heard of for its lease, and {reason}"
            self._state.events.add(EventKind.SERVER_LOST, message)
            self._wake_runs()

    def _note_answer(self, server: Server, *, running: bool) -> None:
        if not self._is_in_doubt(server):
            return
        if running:
            if server.live:
                logger.warning("server %r sends no heartbeats but answers: its lease goes on", server.server_id)
            self._note_alive(server.server_id, self._state.cluster.renew(server))
            return
        server.state = ServerState.ENDED
        message = f"server {server.server_id!r} at {server.address} has ended{self._losses(server)}"
        self._state.events.add(EventKind.SERVER_ENDED, message)
        self._wake_runs()

    def _note_alive(self, server_id: str, former: ServerState) -> None:
        """A server was heard of that was in this state."""
        if former not in (ServerState.LIVE, ServerState.UNCONFIRMED):
            self._state.events.add(EventKind.SERVER_RETURNED, f"server {server_id!r} is heard of again")
        if former is not ServerState.LIVE:
            self._wake_runs()

    async def _forget(self, server: Server) -> None:
        cluster = self._state.cluster
        await self._state.storage.delete_server(server.server_id, cluster.last_epoch)
        if cluster.servers.get(server.server_id) is server:
            cluster.forget(server)

    async def _forget_or_retry(self, server: Server) -> None:
        """Forgets a server that has left; ``expire`` calls it again if the disk does not take it."""
        self._forgetting.add(server.server_id)
        try:
            async with self._registering.setdefault(server.server_id, asyncio.Lock()):
                if self._state.cluster.servers.get(server.server_id) is server and not self._runs_on(server):
                    await self._forget(server)
        except ShardwellError as error:
            logger.error("%s", error)
        finally:
            self._forgetting.discard(server.server_id)

    def _runs_on(self, server: Server) -> list[str]:
        """Names of the runs that have units on a server process, with values or without."""
        process = (server.server_id, server.incarnation)
        return sorted(run.name for run in self._state.runs.values() if process in run.units.processes)

    def _losses(self, server: Server) -> str:
        process, lost = (server.server_id, server.incarnation), []
        for name in self._runs_on(server):
            if any(unit.published for unit in self._state.runs[name].units.of_process(process)):
                lost.append(name)
        return f": {_named(lost)} lost shards" if lost else ""

    def _wake_runs(self) -> None:
        """Something about servers changed: whoever waits shall look."""
        self._state.cluster.changed.notify()
        for run in self._state.runs.values():
            run.changed.notify()


def _named(runs: list[str]) -> str:
    return f"{'run' if len(runs) == 1 else 'runs'} {', '.join(map(repr, runs))}"
