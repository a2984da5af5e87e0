"""A primary's side of backups: it sends copies of its committed state, and every step before its commit record.

Note: [When a backup has a step]
    A commit record implies that every backup that is in sync can apply the step. The mean gradient is sent as soon as
    it has been computed, which is usually during the backward of other units. PrepareStep, PrepareUpdate and
    ConfirmPartitions send what is still missing, and let the backup confirm it and allocate the memory of the update.
    They answer with the backups that failed, which the coordinator stores as out of sync before the commit record. The
    receiver of a step takes no lock of its run, so two servers can prepare each other's backups.

    A backup whose server falls silent does not delay the step until its lease ends: see ``peers.py``. A server that
    refuses connections is given up after ``_RETRY_S``, with all its backups at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from shardwell_server.shard.concurrency import deadline_of
from shardwell_server.shard.memory.buffer_reuse import tensor_memory
from shardwell_server.shard.requests.peers import GrpcPeers, SilenceLimits, unless_silent
from shardwell_server.shard.shard_spec import Role
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.portable_state import export, write_content
from shardwell_server.shard.unit.unit_shard import Backup, BufferShard, StepContent, UnitShard
from shardwell_wire import fault_points
from shardwell_wire.connection.channel import MAX_CORRUPT, retry_async
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.encoding.chunk_streams import Buffer
from shardwell_wire.errors import (
    ConflictError,
    CorruptDataError,
    InternalError,
    NotFoundError,
    ShardwellError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.model.topology import runs_on_trainers
from shardwell_wire.v1 import common_pb2, shard_pb2

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
"""How long to retry while a backup's server is unavailable. A connection that was cut can be opened again within this
time. The step waits meanwhile, so a server that has ended must be given up soon."""

_TIMEOUT_S, _SLOWEST_BYTES_PER_S = 10.0, 20e6
"""Deadline of one transfer: a fixed time, and a time per byte."""

_STREAMS_PER_SERVER = 4
"""Number of shards that are sent to one server at a time."""

_Entry = tuple[UnitShard, Backup]
_Result = TypeVar("_Result")


class Replicator:
    """Brings the backups of this server's primaries to every step. Used on the event loop.

    Args:
        peers: Calls other servers.
    """

    def __init__(self, store: ShardStore, peers: GrpcPeers) -> None:
        self._store, self._peers = store, peers
        self._tasks: set[asyncio.Task[None]] = set()
        store.when_reduced = self._start_early

    async def close(self) -> None:
        """Ends all transfers in the background."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- copying ----

    async def copy(self, run: HostedRun, request: shard_pb2.CopyShardRequest, wait_s: float) -> tuple[int, int]:
        """Makes a reserved backup on another server a copy of a primary; returns its version and the bytes sent.

        A repeated request for a backup that is in sync sends no state again.

        Args:
            run: The run.
            request: Names the primary and the backup.
            wait_s: Deadline in seconds.

        Raises:
            NotFoundError: This server does not have the shard.
            ConflictError: The shard is a backup here.
            StepStateError: The backup missed a step since it was copied, or has a later reservation.
            ShardwellError: The target cannot be reached, or refused the state.
        """
        shard = run.exact_shard(request.shard)
        if shard.role is not Role.PRIMARY:
            raise ConflictError(f"this server has a backup of {shard.what}: copy the primary", unit=shard.unit)
        backup = Backup(request.target_server_id, request.target_address, request.placement)
        deadline = asyncio.get_running_loop().time() + wait_s
        # Before updates of the shard have to wait.
        await self._ask(run, backup.address, SilenceLimits.of_lease(self._store.lease.length_s).answer_s)
        size_bytes = 0
        async with deadline_of(wait_s, f"the copy of {shard.what}"), shard.unchanging:
            known = shard.backups.by_server.get(backup.server_id)
            if known is None or known.reservation < backup.reservation:
                size_bytes = await self._send_state(run, shard, backup, deadline)
            else:
                _check_repeated(shard, known, backup)
                backup = known
            assert shard.version is not None
            version = shard.version
            if run.is_reduced(version):
                # The commit record of the prepared step may exist already.
                await self._bring(run, version, [(shard, backup)], run.expected_optimizer)
                if backup.failure:
                    raise UnavailableError(f"the backup on server {backup.server_id!r}: {backup.failure}")
        self._start_early(run, shard)
        return version, size_bytes

    async def _send_state(self, run: HostedRun, shard: UnitShard, backup: Backup, deadline: float) -> int:
        """Sends the committed state to a backup and registers the backup; returns the bytes sent.

        Args:
            shard: The primary, which does not change meanwhile.
            backup: The backup, without values.
            deadline: Time of the event loop.
        """
        shard.backups.by_server.pop(backup.server_id, None)  # it is built anew
        state, held = export(shard), shard.values.held
        assert shard.version is not None
        older = [held.find(version) for version in held.versions]
        header = shard_pb2.ReceiveShardStateHeader(
            context=self._context(run, shard.version), target=self._target(shard, backup), held_versions=held.versions
        )
        write_content(state, header)
        first = shard_pb2.ReceiveShardStateRequest(header=header)
        pieces = [tensor_memory(tensor) for _, tensor in state.tensors()]
        pieces += [tensor_memory(each.buffer) for each in older if each is not None]
        size_bytes = sum(piece.nbytes for piece in pieces)
        left_s = deadline - asyncio.get_running_loop().time()
        fault_points.reach("server.copy_shard.before", unit=shard.index)
        sending = self._send_stream(
            backup, "ReceiveShardState", lambda: chunk_streams.encode_stream(first, pieces), timeout_s=left_s
        )
        await self._unless_silent(run, backup.address, sending)
        fault_points.reach("server.copy_shard.after", unit=shard.index)
        self._store.replicated_bytes += size_bytes
        # Registered before anything else is sent: a step that is prepared from now on includes the backup.
        shard.backups.add(backup)
        return size_bytes

    # ---- steps ----

    async def bring_all(
        self, run: HostedRun, step: int, optimizer: common_pb2.OptimizerStep | None
    ) -> tuple[list[shard_pb2.BackupStatus], list[shard_pb2.BackupStatus]]:
        """Brings all backups of a run to a prepared step. Raises nothing.

        Returns only when no backup is left that was added meanwhile. Answer without another ``await``: see ``copy``.

        Args:
            optimizer: The optimizer that is expected to update the step. None: not known yet.

        Returns:
            The backups that failed, and those that are confirmed.
        """
        run.expected_optimizer = optimizer
        done: set[int] = set()
        while left := [entry for entry in _entries(run, step) if id(entry[1]) not in done]:
            done.update(id(backup) for _, backup in left)
            await self._bring(run, step, left, optimizer)
        backups = [(shard, backup) for shard in run.published for backup in shard.backups.by_server.values()]
        statuses = [status_of(shard, each.reservation, each.failure, each.server_id) for shard, each in backups]
        return [each for each in statuses if each.error], [each for each in statuses if not each.error]

    async def _bring(
        self, run: HostedRun, step: int, entries: Sequence[_Entry], optimizer: common_pb2.OptimizerStep | None
    ) -> None:
        by_address: dict[str, list[_Entry]] = {}
        for shard, backup in entries:
            by_address.setdefault(backup.address, []).append((shard, backup))

        async def bring(address: str, own: Sequence[_Entry]) -> None:
            try:
                await self._unless_silent(run, address, self._bring_to(run, step, address, own, optimizer))
            except UnavailableError as error:
                for shard, backup in own:
                    self._fail(shard, backup, error)

        await asyncio.gather(*(bring(address, own) for address, own in by_address.items()))

    async def _unless_silent(self, run: HostedRun, address: str, work: Awaitable[_Result]) -> _Result:
        """Awaits calls to a server. Raises UnavailableError if the server falls silent."""
        limits = SilenceLimits.of_lease(self._store.lease.length_s)
        return await unless_silent(work, partial(self._ask, run, address), limits)

    async def _ask(self, run: HostedRun, address: str, limit_s: float) -> None:
        """Asks a server to confirm no backups. Raises DeadlineError or UnavailableError if it does not answer."""
        request = shard_pb2.ConfirmBackupsRequest(context=self._context(run, 0))
        await self._peers.call(address, "ConfirmBackups", request, timeout_s=limit_s)

    async def _bring_to(
        self,
        run: HostedRun,
        step: int,
        address: str,
        entries: Sequence[_Entry],
        optimizer: common_pb2.OptimizerStep | None,
    ) -> None:
        """Brings the backups on one server to a step. Backups that fail are recorded."""
        limit = asyncio.Semaphore(_STREAMS_PER_SERVER)

        async def send(shard: UnitShard, backup: Backup) -> None:
            async with limit:
                await self._send_missing(run, step, shard, backup, optimizer)

        await asyncio.gather(*(send(shard, backup) for shard, backup in entries))
        # A backup that has failed is left out and reported, and the step goes on without it.
        entries = [(shard, backup) for shard, backup in entries if not backup.failure]
        if not entries:
            return
        request = shard_pb2.ConfirmBackupsRequest(
            context=self._context(run, step),
            optimizer=optimizer,
            backups=[
                shard_pb2.BackupToConfirm(
                    target=self._target(shard, backup),
                    generation=shard.partitions.generation,
                    contents=[content for content, _ in contents_of(shard, optimizer)],
                )
                for shard, backup in entries
            ],
        )
        try:
            response = await retry_async(
                lambda: self._peers.call(address, "ConfirmBackups", request, timeout_s=_TIMEOUT_S), limit_s=_RETRY_S
            )
        except ShardwellError as error:
            for shard, backup in entries:
                self._fail(shard, backup, error)
            return
        reasons = {(status.unit_index, status.start_bytes): status.error for status in response.failed_backups}
        for shard, backup in entries:
            if (reason := reasons.get((shard.index, shard.start_bytes))) is not None:
                self._fail(shard, backup, StepStateError(reason))

    async def _send_missing(
        self, run: HostedRun, step: int, shard: UnitShard, backup: Backup, optimizer: common_pb2.OptimizerStep | None
    ) -> None:
        """Sends what a backup lacks of a step, and records a failure. Raises nothing but CancelledError."""
        async with backup.lock:
            if backup.failure:
                return
            try:
                generation = shard.partitions.generation
                for content, detail in contents_of(shard, optimizer):
                    key = (step, generation, content, detail)
                    if key in backup.acknowledged:
                        continue
                    await self._send_content(run, step, shard, backup, content, optimizer)
                    if shard.partitions.generation != generation:
                        raise _GradientChanged
                    former = {other for other in backup.acknowledged if other[:2] == (step, generation)}
                    backup.acknowledged = former | {key}
            except _GradientChanged:
                pass  # the new gradient is sent when it has been computed
            except UnavailableError as error:
                self._fail(shard, backup, error)
                self._give_up(run, backup.address, error)
            except ShardwellError as error:
                self._fail(shard, backup, error)
            except Exception as error:
                logger.exception("cannot replicate %s", shard.what)
                self._fail(shard, backup, InternalError(f"{type(error).__name__} on the primary's server"))

    def _give_up(self, run: HostedRun, address: str, error: UnavailableError) -> None:
        """Records that all backups on an unavailable server fail. Otherwise each of them would retry in its turn."""
        for shard in run.published:
            for backup in shard.backups.in_sync:
                if backup.address == address:
                    self._fail(shard, backup, error)

    def _fail(self, shard: UnitShard, backup: Backup, error: Exception) -> None:
        logger.warning(
            "the backup of %s, [%d, %d), on server %r is out of sync: %s",
            shard.what,
            shard.start_bytes,
            shard.stop_bytes,
            backup.server_id,
            error,
        )
        backup.failure = backup.failure or str(error)

    # ---- early ----

    def _start_early(self, run: HostedRun, shard: UnitShard) -> None:
        """Starts to send a mean gradient that has just been computed."""
        if shard.role is not Role.PRIMARY or shard.updated_by_trainers or not self._store.lease.valid:
            return
        for backup in shard.backups.in_sync:
            task = asyncio.ensure_future(self._send_early(run, shard, backup))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send_early(self, run: HostedRun, shard: UnitShard, backup: Backup) -> None:
        if shard.version is not None and shard.gradient.reduced is not None and not shard.gradient.reduced.skipped:
            await self._send_missing(run, shard.version, shard, backup, run.expected_optimizer)

    # ---- content ----

    async def _send_content(
        self,
        run: HostedRun,
        step: int,
        shard: UnitShard,
        backup: Backup,
        content: StepContent,
        optimizer: common_pb2.OptimizerStep | None,
    ) -> None:
        generation = shard.partitions.generation
        header = shard_pb2.ReplicateStepHeader(
            context=self._context(run, step), target=self._target(shard, backup), generation=generation, content=content
        )
        pieces = write_step(shard, header, optimizer)
        size_bytes = sum(len(piece) for piece in pieces)
        if content == shard_pb2.STEP_CONTENT_GRADIENT and backup.shares_host and shard.gradient.mean_path:
            header.path, pieces = shard.gradient.mean_path, []
        timeout_s = _TIMEOUT_S + size_bytes / _SLOWEST_BYTES_PER_S

        def messages() -> Iterator[bytes]:
            first = shard_pb2.ReplicateStepRequest(header=header)
            for message in chunk_streams.encode_stream(first, pieces):
                # Checked before each message, because the memory may have been reused.
                if shard.partitions.generation != generation:
                    raise _GradientChanged
                yield message
                fault_points.reach("server.replicate.middle", unit=shard.index, step=step)

        fault_points.reach("server.replicate.before", unit=shard.index, step=step)
        try:
            await retry_async(
                lambda: self._send_stream(backup, "ReplicateStep", messages, timeout_s=timeout_s), limit_s=_RETRY_S
            )
        except NotFoundError as error:
            if not header.path:
                raise
            logger.info("the gradients of %s are streamed to server %r: %s", shard.what, backup.server_id, error)
            backup.shares_host = False
            if shard.partitions.generation != generation or (header.path and shard.gradient.reduced is None):
                raise _GradientChanged from error
            await self._send_content(run, step, shard, backup, content, optimizer)
            return
        fault_points.reach("server.replicate.after", unit=shard.index, step=step)
        self._store.replicated_bytes += size_bytes

    async def _send_stream(
        self, backup: Backup, rpc_name: str, messages: Callable[[], Iterator[bytes]], *, timeout_s: float
    ) -> None:
        """Sends a stream to a backup's server. Repeats it if its bytes arrived there with a wrong checksum."""
        for attempt in range(1, MAX_CORRUPT + 1):
            try:
                await self._peers.stream(backup.address, rpc_name, messages(), timeout_s=timeout_s)
                return
            except CorruptDataError as error:
                what = f"{rpc_name} from this host, {socket.gethostname()!r}, to server {backup.server_id!r} at "
                what += f"{backup.address} was damaged {attempt} times in a row: {error}"
                logger.warning("%s", what)
                if attempt == MAX_CORRUPT:
                    raise CorruptDataError(f"{what}. Check the memory and the network of both hosts") from error

    def _context(self, run: HostedRun, step: int) -> common_pb2.RequestContext:
        return common_pb2.RequestContext(run=run.name, run_id=run.identity.run_id, step=step)

    def _target(self, shard: UnitShard, backup: Backup) -> shard_pb2.BackupTarget:
        reference = shard_pb2.ShardReference(
            unit=shard.unit, start_bytes=shard.start_bytes, stop_bytes=shard.stop_bytes
        )
        return shard_pb2.BackupTarget(
            shard=reference, reservation=backup.reservation, placement=shard.backups.placement
        )


class _GradientChanged(Exception):
    """The gradient of a step changed while it was sent."""


def _entries(run: HostedRun, step: int) -> list[_Entry]:
    """Returns the backups that must have a step, with their primaries."""
    return [(shard, backup) for shard in run.published if shard.version == step for backup in shard.backups.in_sync]


def status_of(shard: UnitShard, placement: int, error: str, server_id: str = "") -> shard_pb2.BackupStatus:
    """Describes a backup of a shard, which has the reservation ``placement``."""
    return shard_pb2.BackupStatus(
        unit_index=shard.index,
        start_bytes=shard.start_bytes,
        stop_bytes=shard.stop_bytes,
        server_id=server_id,
        placement=placement,
        error=error,
    )


def _check_repeated(shard: UnitShard, known: Backup, asked: Backup) -> None:
    """Raises StepStateError unless a repeated request names a backup that is in sync."""
    what = f"the backup of {shard.what} on server {asked.server_id!r}"
    if known.reservation > asked.reservation:
        raise StepStateError(
            f"{what} cannot be copied under reservation {asked.reservation}: it has reservation {known.reservation}",
            unit=shard.unit,
        )
    if known.failure:
        raise StepStateError(
            f"{what} is out of sync under reservation {known.reservation}: {known.failure}; reserve it again",
            unit=shard.unit,
        )


# ---- what the update of a step needs ----

_GRADIENT = shard_pb2.STEP_CONTENT_GRADIENT
_CONTRIBUTIONS = shard_pb2.STEP_CONTENT_CONTRIBUTIONS
_PARTITIONS = shard_pb2.STEP_CONTENT_PARTITIONS


def contents_of(
    shard: UnitShard, optimizer: common_pb2.OptimizerStep | None
) -> list[tuple[StepContent, tuple[object, ...]]]:
    """Returns what a backup needs for the step in flight, each with a value that changes when the content changes."""
    found: list[tuple[StepContent, tuple[object, ...]]] = []
    on_trainers = optimizer is not None and runs_on_trainers(optimizer.algorithm)
    reduced = shard.gradient.reduced
    if not isinstance(shard, BufferShard) and reduced is not None and not reduced.skipped and not on_trainers:
        found.append((_GRADIENT, ()))
    if numbers := _replicated_numbers(shard, optimizer):
        found.append((_CONTRIBUTIONS, tuple(sorted(numbers))))
    if on_trainers and shard.partitions.staged:
        found.append((_PARTITIONS, (shard.partitions.stage_count,)))
    return found


def _replicated_numbers(shard: UnitShard, optimizer: common_pb2.OptimizerStep | None) -> set[int]:
    """Returns the segments of which the backup needs the gradient of each rank: see ``UnitShard.kept_numbers``."""
    if isinstance(shard, BufferShard):
        wanted = set(range(len(shard.segments)))
    elif optimizer is None:
        return set()
    else:
        groups = next((unit.group_indices for unit in optimizer.units if unit.unit_index == shard.index), None)
        wanted = set(shard.gradient.kept_numbers(groups))
    present = set[int]().union(*(each.present for each in shard.gradient.contributions.by_rank.values()))
    return wanted & present


def write_step(
    shard: UnitShard, header: shard_pb2.ReplicateStepHeader, optimizer: common_pb2.OptimizerStep | None
) -> list[Buffer]:
    """Completes the header of a stream for one kind of content, and returns the memory to send.

    Args:
        shard: The primary.
        optimizer: The optimizer that is expected to update the step. None: not known yet.
    """
    pieces: list[Buffer] = []
    if header.content == _GRADIENT:
        assert shard.gradient.reduced is not None
        for segment, gradient in zip(shard.segments, shard.gradient.reduced.gradients, strict=True):
            if gradient is not None:
                header.gradient_indices.append(segment.parameter_index)
                pieces.append(tensor_memory(gradient))
    elif header.content == _CONTRIBUTIONS:
        numbers = _replicated_numbers(shard, optimizer)
        for contributor, contribution in sorted(shard.gradient.contributions.by_rank.items()):
            own = sorted(numbers & contribution.present)
            indices = [shard.segments[number].parameter_index for number in own]
            header.contributions.add(contributor=contributor, parameter_indices=indices)
            pieces += [tensor_memory(contribution.views[number]) for number in own]
    else:
        for rank, staged in sorted(shard.partitions.staged.items()):
            header.partitions.add(
                dp_rank=rank,
                parameter_indices=[segment.parameter_index for segment in staged.segments],
                state=staged.state.tensors,
                request_id=staged.state.request_id,
            )
            pieces += staged.memory
    return pieces
