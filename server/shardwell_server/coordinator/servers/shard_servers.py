"""Calls to the shard servers of a run, and checks that its shards are available."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from google.protobuf.message import Message

from shardwell_server.coordinator.placed_units import Unit
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.cluster import Cluster, Server, ServerState
from shardwell_server.coordinator.servers.copies import Copies
from shardwell_server.coordinator.servers.shard_client import ShardCalls
from shardwell_server.coordinator.storage.records import ShardRecord
from shardwell_wire.errors import ConflictError, ShardwellError, StaleEpochError, UnavailableError
from shardwell_wire.v1 import common_pb2, shard_pb2

_NOT_FOUND = "it did not take them up, see its log from its start"
_MAX_NAMES = 5
"""Most units named in one message."""


class ShardServers:
    """Calls shard servers on behalf of runs.

    Args:
        calls: Performs the rpcs.
        term: Term of this coordinator, which fences the requests of former coordinators.
        lease_s: Lease of a server in seconds. An unavailable server is retried for this long.

    Attributes:
        copies: Decides what happens to the copies of shards.
    """

    def __init__(self, cluster: Cluster, calls: ShardCalls, *, term: int, lease_s: float) -> None:
        self._cluster, self._calls, self._term, self._lease_s = cluster, calls, term, lease_s
        self.copies = Copies(cluster)
        self._in_flight: dict[tuple[str, str], set[_Call]] = {}
        """Calls that have begun and have not ended, by server process."""

    def context(self, run: Run, step: int) -> common_pb2.RequestContext:
        """Returns the context of a request about a run."""
        return common_pb2.RequestContext(run=run.name, run_id=run.identity.run_id, epoch=self._term, step=step)

    def require_available(self, run: Run) -> None:
        """Raises ConflictError if shards of the run are lost, or UnavailableError if their server is unreachable."""
        for error in availability_errors(run, self._cluster):
            raise error

    async def call(self, server_id: str, rpc_name: str, request: Message, *, retry_for_s: float | None = None) -> Any:
        """Calls one server. Errors name the server.

        Args:
            server_id: Id of the server.
            rpc_name: Name of an rpc of ``ShardService``.
            request: Its request.
            retry_for_s: How long to retry while the server is unavailable. None: as long as a lease.
        """
        return await self._complete(self._begin(server_id), rpc_name, request, retry_for_s=retry_for_s)

    def _begin(self, server_id: str) -> _Call:
        """Begins a call to the present process of a server. ``abandon`` ends the call from now on."""
        call = _Call(self._cluster.require(server_id))
        self._in_flight.setdefault(call.process, set()).add(call)
        return call

    async def _complete(self, call: _Call, rpc_name: str, request: Message, *, retry_for_s: float | None = None) -> Any:
        """Performs a call that has begun; see ``call``."""
        server_id, address = call.process[0], call.server.address
        retry_for_s = self._lease_s if retry_for_s is None else retry_for_s
        try:
            return await call.until_abandoned(
                lambda: self._calls.call(address, rpc_name, request, retry_for_s=retry_for_s)
            )
        except StaleEpochError as error:
            raise ConflictError(
                f"server {server_id!r}: {rpc_name}: {error}: the server follows a coordinator with a later term than "
                f"{self._term}, the term of this coordinator; stop the other coordinator, or restart the server if "
                "this coordinator has lost its state",
                server=server_id,
            ) from error
        except ShardwellError as error:
            raise type(error)(
                f"server {server_id!r}: {rpc_name}: {error}", **{**error.data, "server": server_id}
            ) from error
        finally:
            self._end(call)

    def _end(self, call: _Call) -> None:
        """Ends a call. Harmless to repeat."""
        calls = self._in_flight.get(call.process, set())
        calls.discard(call)
        if not calls:
            self._in_flight.pop(call.process, None)

    def abandon(self, process: tuple[str, str]) -> None:
        """Ends all calls to a server process that is gone. They raise UnavailableError."""
        for call in self._in_flight.pop(process, ()):
            call.abandon()

    async def is_running(self, shard: ShardRecord) -> bool:
        """Probes the server process of a shard. Returns True if it answered."""
        server = self._cluster.servers.get(shard.server_id)
        if server is None or server.incarnation != shard.incarnation:
            return False
        try:
            return await self._calls.is_running(server)
        except UnavailableError:
            return False

    async def call_all(
        self, server_ids: Iterable[str], rpc_name: str, request: Message | Callable[[str], Message]
    ) -> dict[str, Any]:
        """Calls several servers concurrently and waits for all of them.

        Args:
            rpc_name: Name of an rpc of ``ShardService``.
            request: The request, or a function that returns it for a server id.

        Returns:
            The responses by server id.

        Raises:
            ShardwellError: The error of one server. It is an UnavailableError only if every failed server was
                unavailable.
        """
        requests = {name: request if isinstance(request, Message) else request(name) for name in server_ids}
        calls = list[_Call]()
        try:
            for name in requests:
                calls.append(self._begin(name))  # before the tasks start, because ``abandon`` may run before them
            outcomes = await asyncio.gather(
                *(self._complete(call, rpc_name, requests[call.process[0]]) for call in calls), return_exceptions=True
            )
        finally:
            for call in calls:
                self._end(call)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, UnavailableError))
        return dict(zip(requests, outcomes, strict=True))


class _Call:
    """A call to a server process."""

    def __init__(self, server: Server) -> None:
        self.server, self.process = server, (server.server_id, server.incarnation)
        self._is_abandoned = False
        self._timeout: asyncio.Timeout | None = None
        """Expires when the call is abandoned. None: the call has not been sent."""

    def abandon(self) -> None:
        """Ends the call."""
        self._is_abandoned = True
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def until_abandoned(self, send: Callable[[], Awaitable[Any]]) -> Any:
        """Sends the call. Raises UnavailableError as soon as ``abandon`` is called."""
        if not self._is_abandoned:
            try:
                async with asyncio.timeout(None) as self._timeout:
                    return await send()
            except TimeoutError:
                if not self._is_abandoned:
                    raise
        raise UnavailableError("the server is gone", server=self.process[0])


def availability_errors(run: Run, cluster: Cluster) -> list[ShardwellError]:
    """Returns why shards of a run are unavailable: one error per server, permanent ones first."""
    if (restore := run.checkpoints.restore) is not None:
        return [UnavailableError(run.checkpoints.restoring.describe(restore), run=run.name)]
    found = [_availability_error(run, cluster, process) for process in run.units.processes]
    return sorted(filter(None, found), key=lambda error: isinstance(error, UnavailableError))


def check_recoverable(run: Run, cluster: Cluster) -> None:
    """Raises ConflictError if shards of a run are lost permanently."""
    if run.checkpoints.restore is not None:
        return  # the shards are placed again
    for process in run.units.processes:
        error = _availability_error(run, cluster, process)
        if isinstance(error, ConflictError):
            raise error


def _availability_error(run: Run, cluster: Cluster, process: tuple[str, str]) -> ShardwellError | None:
    server_id, _ = process
    server, copies = cluster.servers.get(server_id), Copies(cluster)
    if server is not None and server.may_be_alive and not cluster.has_restarted(*process):
        return None
    # A unit without initial values loses nothing: the next declaration places it on other servers.
    lost = [
        (unit, shard)
        for unit in run.units.owned_by(process)
        for shard in unit.shards
        if unit.published and shard.process == process and copies.replacement(unit, shard) is None
    ]
    if server is None or not cluster.may_return(process):
        return _loss_error(run, cluster, process, lost) if lost else None
    if not lost and cluster.is_gone(process):
        return None  # other copies are being promoted
    reason = f" ({server.unreachable_because})" if server.unreachable_because else ""
    return UnavailableError(
        f"server {server_id!r} at {server.address} has sent no heartbeat for {cluster.silent_s(server):.1f} s{reason}: "
        f"it owns shards of {_names(run.units.owned_by(process))} of this run. The run continues when the server is "
        "reachable again: check its process and the network. If its process has ended, start the server again on its "
        "host, under its id",
        run=run.name,
        server=server_id,
    )


def _loss_error(
    run: Run, cluster: Cluster, process: tuple[str, str], lost: Sequence[tuple[Unit, ShardRecord]]
) -> ShardwellError:
    """Returns the error for a server process that has ended. It is an UnavailableError if the run will continue."""
    server_id, server = process[0], cluster.servers.get(process[0])
    facts = {"run": run.name, "server": server_id}
    units = _names(list({unit.index: unit for unit, _ in lost}.values()))
    sources = [Copies(cluster).sources(*each) for each in lost]
    if all(sources):
        names = sorted({repr(source.server_id) for found in sources for source in found})
        return UnavailableError(
            f"server {server_id!r} has ended and has left its shards of {units} of this run on its host. The run "
            f"continues when server {' or '.join(names)} is started again on its host, under its id",
            **facts,
        )
    if run.checkpoints.saved:
        return UnavailableError(
            f"server {server_id!r} has lost its shards of {units} of this run, which goes back to its last checkpoint",
            **facts,
        )
    found = ""
    if server is None or cluster.has_restarted(*process):
        what = f"server {server_id!r} was restarted and has lost its shards of {units} of this run"
        found = "" if server is None else server.not_kept.get(run.identity.run_id, _NOT_FOUND)
    elif server.state is ServerState.LEFT:
        what = (
            f"server {server_id!r} at {server.address} was stopped and left the cluster, and its shards of {units} of "
            "this run are lost"
        )
    else:
        what = f"server {server_id!r} at {server.address} has ended, and its shards of {units} of this run are lost"
    advice = f"delete the run (shardwell delete-run {run.name}) and start it again"
    return ConflictError(f"{what}: {advice}{f'. About the new process: {found}' if found else ''}", **facts)


def _names(units: Sequence[Unit]) -> str:
    names = [repr(unit.layout.unit) for unit in units[:_MAX_NAMES]]
    more = f" and {len(units) - _MAX_NAMES} more" if len(units) > _MAX_NAMES else ""
    return f"{'unit' if len(units) == 1 else 'units'} {', '.join(names)}{more}"


def reference(unit: Unit, shard: ShardRecord) -> shard_pb2.ShardReference:
    """Returns the name of a shard in requests to its servers."""
    return shard_pb2.ShardReference(unit=unit.layout.unit, start_bytes=shard.start_bytes, stop_bytes=shard.stop_bytes)
