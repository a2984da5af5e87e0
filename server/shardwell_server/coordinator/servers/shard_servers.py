"""Calls to the shard servers of a run, and checks that its shards are available.

Tells shard servers that they are the primaries of shards (``PromoteShards``).

Makes shard servers drop the copies that ``Copies`` has given up, once this is durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from google.protobuf.message import Message

from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.cluster import Cluster, ServerState
from shardwell_server.coordinator.servers.copies import Copies
from shardwell_server.coordinator.servers.shard_client import ShardCalls
from shardwell_server.coordinator.signals import BackgroundTasks
from shardwell_server.coordinator.storage.records import BackupRecord, ShardRecord
from shardwell_server.coordinator.units import Unit
from shardwell_wire import fault_points
from shardwell_wire.errors import (
    ConflictError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

_MAX_NAMES = 5
"""Most units named in one message."""


class ShardServers:
    """Calls shard servers on behalf of runs.

    Args:
        cluster: The shard servers.
        calls: Performs the rpcs.
        term: Term of this coordinator, which fences the requests of former coordinators.
        lease_s: Lease of a server in seconds. An unavailable server is retried for this long.
    """

    def __init__(self, cluster: Cluster, calls: ShardCalls, *, term: int, lease_s: float) -> None:
        self._cluster, self._calls, self._term, self._lease_s = cluster, calls, term, lease_s
        self._in_flight: dict[tuple[str, str], set[asyncio.Timeout]] = {}
        """Calls in flight by server process. A timeout expires when the server is gone."""

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
        retry_for_s = self._lease_s if retry_for_s is None else retry_for_s
        server = self._cluster.require(server_id)
        call = self._calls.call(server.address, rpc_name, request, retry_for_s=retry_for_s)
        try:
            return await self._until_gone((server_id, server.incarnation), call)
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

    async def _until_gone(self, process: tuple[str, str], call: Coroutine[Any, Any, Any]) -> Any:
        """Awaits a call. Raises UnavailableError as soon as ``abandon`` is called for the server process."""
        calls = self._in_flight.setdefault(process, set())
        try:
            async with asyncio.timeout(None) as gone:
                calls.add(gone)
                try:
                    return await call
                finally:
                    calls.discard(gone)
                    if not calls and self._in_flight.get(process) is calls:
                        del self._in_flight[process]
        except TimeoutError:
            if not gone.expired():
                raise
            raise UnavailableError("the server is gone", server=process[0]) from None

    def abandon(self, process: tuple[str, str]) -> None:
        """Ends all calls to a server process that is gone. They raise UnavailableError."""
        now = asyncio.get_running_loop().time()
        for gone in self._in_flight.pop(process, ()):
            gone.reschedule(now)

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
            server_ids: Ids of the servers.
            rpc_name: Name of an rpc of ``ShardService``.
            request: The request, or a function that returns it for a server id.

        Returns:
            The responses by server id.

        Raises:
            ShardwellError: The error of one server. It is an UnavailableError only if every failed server was
                unavailable.
        """
        requests = {name: request if isinstance(request, Message) else request(name) for name in server_ids}
        outcomes = await asyncio.gather(
            *(self.call(name, rpc_name, each) for name, each in requests.items()), return_exceptions=True
        )
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, UnavailableError))
        return dict(zip(requests, outcomes, strict=True))


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
    if server is None or cluster.has_restarted(*process):
        what = f"server {server_id!r} was restarted and has lost its shards of {units} of this run"
    elif server.state is ServerState.LEFT:
        what = (
            f"server {server_id!r} at {server.address} was stopped and left the cluster, and its shards of {units} of "
            "this run are lost"
        )
    else:
        what = f"server {server_id!r} at {server.address} has ended, and its shards of {units} of this run are lost"
    return ConflictError(f"{what}: delete the run (shardwell delete-run {run.name}) and start it again", **facts)


def _names(units: Sequence[Unit]) -> str:
    names = [repr(unit.layout.unit) for unit in units[:_MAX_NAMES]]
    more = f" and {len(units) - _MAX_NAMES} more" if len(units) > _MAX_NAMES else ""
    return f"{'unit' if len(units) == 1 else 'units'} {', '.join(names)}{more}"


logger = logging.getLogger(__name__)

_RETRY_S = 0.1


class Promoter:
    """Confirms relocations on the shard servers. The step of a run goes on when all its servers have confirmed.

    Args:
        servers: The shard servers.
        cluster: Their registry.
        tasks: Runs the requests in the background.
        releases: Releases the shards on their former primaries.
    """

    def __init__(self, servers: ShardServers, cluster: Cluster, tasks: BackgroundTasks, releases: Releases) -> None:
        self._servers, self._cluster, self._tasks, self._releases = servers, cluster, tasks, releases
        self.when_refused: Callable[[Run, str, ShardwellError], None] | None = None
        """Called if a server cannot be the primary of a shard, because it lacks the version. Called repeatedly."""
        self._problems: dict[tuple[str, str], str] = {}
        """Why servers have not confirmed, by run id and server. Each reason is logged once."""

    def start(self, run: Run) -> None:
        """Confirms a relocation in the background, until every server has acknowledged it and has released the shards
        that moved away from it."""
        if not run.relocations.settled:
            self._tasks.start(run.calls.promoting(self._confirm, run))

    async def _confirm(self, run: Run) -> None:
        while not (run.relocations.settled or run.deleted):
            outcomes = await asyncio.gather(
                *(self._promote(run, server_id) for server_id in sorted(run.relocations.unconfirmed)),
                *(self._release(run, process) for process in sorted(run.relocations.releasing)),
            )
            if not all(outcomes):
                await asyncio.sleep(_RETRY_S)

    async def _promote(self, run: Run, server_id: str) -> bool:
        """Sends one request. Returns False if it must be repeated."""
        placement = run.relocations.count
        published = [
            (unit, shard)
            for unit in run.units
            for shard in unit.shards
            if unit.published and shard.server_id == server_id
        ]
        if not published:
            run.relocations.note_confirmed(server_id, placement)  # it owns no shards any more
            return True
        owned = [each for each in published if not self._cluster.is_gone(each[1].process)]
        if run.relocations.announced < placement or not owned:
            # Not stored yet. Or the server may come back, and must learn of its shards then; or it is replaced.
            return False
        request = shard_pb2.PromoteShardsRequest(
            context=self._servers.context(run, run.committed_step),
            placement=placement,
            shards=[_reference(unit, shard) for unit, shard in owned],
            fences=[
                shard_pb2.RankFence(
                    dp_rank=item.dp_rank,
                    epoch=item.epoch,
                    attempt=item.attempt,
                    version=step.number if run.asynchronous else None,
                )
                for step in run.work.steps
                for item in step.items.values()
            ],
            backups=[
                shard_pb2.PromotedBackup(
                    shard=_reference(unit, backup),
                    server_id=backup.server_id,
                    address=self._cluster.servers[backup.server_id].address,
                    placement=backup.placement,
                )
                for unit, shard in owned
                for backup in unit.backups_of(shard)
                if backup.in_sync and not self._cluster.is_gone(backup.process)
            ],
        )
        try:
            await self._servers.call(server_id, "PromoteShards", request)
        except (StepStateError, NotFoundError) as error:
            self._log(run, server_id, error)
            if placement == run.relocations.count and self.when_refused is not None:
                self.when_refused(run, server_id, error)
            return False
        except ShardwellError as error:
            self._log(run, server_id, error)
            return False
        self._problems.pop((run.identity.run_id, server_id), None)
        fault_points.reach("coordinator.promotion.after", server=server_id)
        run.relocations.note_confirmed(server_id, placement)
        return True

    async def _release(self, run: Run, process: tuple[str, str]) -> bool:
        """Releases the former shards of one server process. Returns False if this must be repeated."""
        if self._cluster.is_gone(process):
            run.relocations.releasing.discard(process)  # it drops them before it serves anyone again
            run.changed.notify()
            return True
        if self._releases.are_open(run, process):
            return False
        try:
            await self._releases.release(run, process)
        except ShardwellError as error:
            self._log(run, process[0], error)
            return False
        return True

    def _log(self, run: Run, server_id: str, error: ShardwellError) -> None:
        """Logs why a server has not confirmed, once per reason: requests are repeated many times."""
        key, problem = (run.identity.run_id, server_id), str(error)
        if self._problems.get(key) != problem:
            self._problems[key] = problem
            logger.warning("run %r: %s", run.name, problem)


def _reference(unit: Unit, shard: ShardRecord) -> shard_pb2.ShardReference:
    return shard_pb2.ShardReference(unit=unit.layout.unit, start_bytes=shard.start_bytes, stop_bytes=shard.stop_bytes)


class Releases:
    """Releases copies on shard servers: with their heartbeats, before their updates, or by themselves.

    Args:
        servers: The shard servers.
        cluster: Their registry.
        copies: Decides which copies are released.
        save: Stores a run; see ``CoordinatorState.save``.
    """

    def __init__(
        self, servers: ShardServers, cluster: Cluster, copies: Copies, save: Callable[[Run], Awaitable[None]]
    ) -> None:
        self._servers, self._cluster, self._copies, self._save = servers, cluster, copies, save

    def are_open(self, run: Run, process: tuple[str, str]) -> bool:
        """True while it is not decided whether a server process must drop a former copy."""
        self._copies.settle(run)
        return any(copy.process == process for _, copy in run.units.former)

    async def _durable(self, run: Run, process: tuple[str, str]) -> list[tuple[Unit, BackupRecord]]:
        """Returns the copies that a server process must drop, once this is stored."""
        if not (found := self._copies.to_release(run, process)):
            return []
        await self._save(run)
        still = self._copies.to_release(run, process)  # empty if a restore has begun
        return [each for each in found if each in still]

    async def named(self, runs: Iterable[Run], server_id: str, incarnation: str) -> list[coordinator_pb2.RetiredShard]:
        """Returns the copies of runs that a server process must drop before it serves anyone."""
        process = (server_id, incarnation)
        for run in (listed := list(runs)):
            if self.are_open(run, process):  # the process has returned before this was decided
                run.relocations.releasing.add(process)
        return [
            coordinator_pb2.RetiredShard(
                run_id=run.identity.run_id,
                unit=unit.layout.unit,
                start_bytes=backup.start_bytes,
                stop_bytes=backup.stop_bytes,
                placement=run.changes.last_epoch,
            )
            for run in listed
            for unit, backup in await self._durable(run, process)
        ]

    async def release(self, run: Run, process: tuple[str, str]) -> None:
        """Makes a server process drop its copies, and removes their records.

        Raises:
            ShardwellError: The server is unavailable, or the decision could not be stored.
        """
        if not (found := await self._durable(run, process)):
            run.relocations.note_released(process)
            return
        request = shard_pb2.ReleaseShardsRequest(
            context=self._servers.context(run, run.committed_step),
            placement=run.changes.last_epoch,
            shards=[reference(unit, backup) for unit, backup in found],
        )
        response = await self._servers.call(process[0], "ReleaseShards", request, retry_for_s=0.0)
        if (server := self._cluster.servers.get(process[0])) is not None and response.free_bytes:
            server.note_free(response.free_bytes)
        for unit, backup in found:
            if any(each is backup for each in unit.backups):
                run.units.remove_backup(unit, backup)
                run.changes.touch()
        run.relocations.note_released(process)


def reference(unit: Unit, shard: ShardRecord) -> shard_pb2.ShardReference:
    """Returns the name of a shard in requests to its servers."""
    return shard_pb2.ShardReference(unit=unit.layout.unit, start_bytes=shard.start_bytes, stop_bytes=shard.stop_bytes)
