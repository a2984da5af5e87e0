"""Shard servers come, are heard of, and go: registrations, leases, and finding out who has ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from weakref import WeakValueDictionary

from shardwell_server.coordinator.cluster import Server
from shardwell_server.coordinator.events import EventKind
from shardwell_server.coordinator.shard_client import ShardCalls
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_wire.errors import DuplicateError, UnavailableError


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

    async def register(self, server_id: str, address: str, incarnation: str, budget_bytes: int) -> int:
        """Takes in a shard server process; returns its epoch.

        Raises:
            InvalidRequestError: A field is missing or impossible.
            DuplicateError: Another process has the id: it is alive, or came later than this one.
            UnavailableError: Another process has the id and may be alive. Asking again is harmless.
        """
        cluster = self._state.cluster
        async with self._registering.setdefault(server_id, asyncio.Lock()):
            server = cluster.check(server_id, address, incarnation, budget_bytes)
            former = cluster.servers.get(server_id)
            if former is not None and former.live and former.incarnation != incarnation:
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
        if self._state.cluster.heartbeat(server_id, epoch, reserved_bytes, used_bytes):
            self._state.events.add(EventKind.SERVER_RETURNED, f"server {server_id!r} is heard of again")
            self._wake_runs()

    def expire(self) -> None:
        """Takes the servers whose lease has run out to be lost, and begins to find out whether they have ended."""
        for server in self._state.cluster.expire():
            message = f"server {server.server_id!r} at {server.address} was not heard of for its lease"
            self._state.events.add(EventKind.SERVER_LOST, message)
            self._state.tasks.start(self._watch_lost(server))
            self._wake_runs()

    async def _require_ended(self, former: Server) -> None:
        """Raises DuplicateError if a process is alive, UnavailableError if it may be."""
        try:
            ended = await self._has_ended(former)
        except UnavailableError as error:
            raise UnavailableError(
                f"server {former.server_id!r}: another process, at {former.address}, has this id and may be alive, "
                f"though {error}: it is taken for lost when it was not heard of for {self._state.settings.lease_s:g} s",
                server=former.server_id,
                address=former.address,
            ) from error
        if not ended:
            raise DuplicateError(
                f"server {former.server_id!r}: another process, at {former.address}, has this id and is alive: give "
                "every server its own id (--id, SHARDWELL_ID), or end that process first",
                server=former.server_id,
                address=former.address,
            )

    async def _watch_lost(self, server: Server) -> None:
        """Tries to find out whether a silent server has ended, until it is heard of again or replaced."""
        while not server.live and self._state.cluster.servers[server.server_id] is server:
            with suppress(UnavailableError):
                server.ended = await self._has_ended(server)
            if server.ended:
                message = f"server {server.server_id!r} at {server.address} has ended{self._losses(server)}"
                self._state.events.add(EventKind.SERVER_ENDED, message)
                self._wake_runs()
                return
            await asyncio.sleep(self._state.settings.lease_s)

    async def _has_ended(self, server: Server) -> bool:
        """Whether a process is known to run no more. Raises UnavailableError if that cannot be told."""
        return await self._calls.process_at(server.address) != server.incarnation

    def _losses(self, server: Server) -> str:
        process = (server.server_id, server.incarnation)
        lost = sorted(run.name for run in self._state.runs.values() if process in run.units.processes)
        return f": runs {', '.join(lost)} have lost shards" if lost else ""

    def _wake_runs(self) -> None:
        """Something about servers changed: whoever waits shall look."""
        self._state.cluster.changed.notify()
        for run in self._state.runs.values():
            run.changed.notify()
