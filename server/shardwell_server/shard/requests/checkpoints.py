"""The rpcs about checkpoints: writing this server's file, and filling reserved shards from a checkpoint.

Both run in background threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from shardwell_server.shard.concurrency import in_thread
from shardwell_server.shard.memory.buffer_reuse import tensor_memory
from shardwell_server.shard.requests.checkpoint_contents import describe_shard, fill_shard, parts_of, pieces_of
from shardwell_server.shard.shard_spec import Role
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.portable_state import (
    CapturedShard,
    ShardState,
    VersionCapture,
    begin_import,
    export,
    finish_import,
)
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_wire import fault_points
from shardwell_wire.checkpoints.format import CheckpointFileWriter, FilePlan, Piece
from shardwell_wire.checkpoints.reading import Checkpoint
from shardwell_wire.checkpoints.storage import CheckpointRoots
from shardwell_wire.errors import (
    CorruptDataError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.v1 import shard_pb2

logger = logging.getLogger(__name__)

_THREADS = 2
"""Shards that are read at the same time, so that checksums overlap with waiting for storage."""
_KEEP_OPEN_S = 60.0
"""How long a checkpoint stays open for the next unit of a run: opening it reads the headers of all files."""
_WINDOW_BYTES = 4 << 20
"""Bytes that are copied out of a shard at a time. The window stays in the cache for the checksum and the write."""
_NICENESS = 5
"""Added to the priority number of the writing thread: training comes first."""


class CheckpointRequests:
    """Checkpoints and loading of the runs on this server. Used on the event loop.

    Args:
        store: The server's runs.
        roots: The folders that may be opened.
    """

    def __init__(self, server_id: str, store: ShardStore, roots: CheckpointRoots) -> None:
        self._server_id, self._store, self._roots = server_id, store, roots
        self._writing: dict[str, CheckpointWriting] = {}
        """The newest checkpoint of each run, by run id."""
        self._loading: dict[str, ShardLoading] = {}
        """The newest attempt to load all units of each run, by run id."""
        self._loading_units: dict[tuple[str, str], ShardLoading] = {}
        """Units that are being loaded one by one, by run id and name."""
        self._opened = OpenedCheckpoints(roots)

    # ---- writing ----

    async def begin(self, run: HostedRun, request: shard_pb2.BeginCheckpointRequest) -> None:
        """Captures the current version of all primaries and starts writing it. Idempotent.

        Raises:
            StepStateError: A shard has another version, or another checkpoint is being written.
        """
        async with run.exclusively():
            former = self._writing.get(run.identity.run_id)
            if former is not None and former.checkpoint_id == request.checkpoint_id:
                return
            if former is not None and not former.ended.is_set():
                raise StepStateError(
                    f"checkpoint {former.checkpoint_id} of run {run.name!r} is still being written: begin another one "
                    "when it has ended",
                    run=run.name,
                )
            if not request.checkpoint_id or not request.url:
                raise InvalidRequestError("checkpoint_id or url is empty: name the checkpoint and its folder")
            version = request.context.step
            for shard in run.published:
                if shard.version != version:
                    raise StepStateError(
                        f"version {version} cannot be saved: {shard.what} is at version {shard.version}",
                        unit=shard.unit,
                    )
            writing = CheckpointWriting(self._server_id, self._store, run, request, self._roots)
            self._writing[run.identity.run_id] = writing
            # From now on, updates of the run copy what has not been written yet before they change it.
            run.capture = writing.capture
            writing.start()

    async def describe(
        self, request: shard_pb2.DescribeCheckpointRequest, wait_s: float
    ) -> shard_pb2.DescribeCheckpointResponse:
        """Returns the progress of a checkpoint. Waits until its file is complete or has failed.

        Raises:
            NotFoundError: This process writes no such checkpoint.
        """
        writing = self._writing.get(request.context.run_id)
        if writing is None or writing.checkpoint_id != request.checkpoint_id:
            raise NotFoundError(
                f"this server process writes no checkpoint {request.checkpoint_id!r} of run {request.context.run!r}"
            )
        await _wait(writing.ended, wait_s)
        return shard_pb2.DescribeCheckpointResponse(
            written_bytes=writing.written_bytes,
            total_bytes=writing.total_bytes,
            file_json=writing.file_json,
            error=writing.error,
        )

    async def abort(self, request: shard_pb2.AbortCheckpointRequest, wait_s: float) -> None:
        """Stops writing a checkpoint. Returns when the file is removed, or after ``wait_s``."""
        writing = self._writing.get(request.context.run_id)
        if writing is not None and writing.checkpoint_id == request.checkpoint_id:
            writing.abort()
            await _wait(writing.ended, wait_s)

    # ---- loading ----

    async def begin_restore(self, request: shard_pb2.BeginRestoreRequest) -> None:
        """Drops all shards of a run and rejects older epochs. Idempotent.

        Raises:
            StaleEpochError: A later attempt to load the run has begun.
        """
        run_id = request.context.run_id
        if (loading := self._loading.get(run_id)) is not None and loading.restore < request.restore:
            loading.stop()
        self._stop_units(run_id)
        await self._store.begin_restore(request.context, request.restore, request.min_epoch)

    async def load(
        self, run: HostedRun, request: shard_pb2.LoadShardsRequest, wait_s: float
    ) -> shard_pb2.LoadShardsResponse:
        """Loads the reserved shards of a run or of one unit in the background, and waits for the end.

        Raises:
            StaleEpochError: Another attempt to load the run has begun.
            CorruptDataError: A file is missing or damaged.
            UnitMismatchError: The checkpoint lacks a parameter, or has another tensor of its name.
            CapacityError: There is no memory for the state.
        """
        run_id = request.context.run_id
        if request.unit:
            return await self._load_unit(run, request, wait_s)
        if request.restore != run.restore:
            raise StaleEpochError(
                f"run {run.name!r} is loaded by attempt {run.restore}, but the request belongs to attempt "
                f"{request.restore}",
                run=run.name,
            )
        loading = self._loading.get(run_id)
        if loading is None or loading.restore != request.restore:
            loading = self._loading[run_id] = ShardLoading(self._opened, run, request)
            loading.start()
        await _wait(loading.ended, wait_s)
        return loading.response()

    async def _load_unit(
        self, run: HostedRun, request: shard_pb2.LoadShardsRequest, wait_s: float
    ) -> shard_pb2.LoadShardsResponse:
        key = (request.context.run_id, request.unit)
        loading = self._loading_units.get(key)
        # A success that nobody has asked for may be older than the present reservation. Starting again reads nothing if
        # the shards have their values.
        if loading is None or (loading.ended.is_set() and loading.error is None):
            loading = ShardLoading(self._opened, run, request, discard=self._store.empty)
            self._loading_units[key] = loading
            loading.start()
        await _wait(loading.ended, wait_s)
        if loading.ended.is_set() and self._loading_units.get(key) is loading:
            del self._loading_units[key]
        return loading.response()

    async def stop_loading(self, run_id: str, unit: str) -> None:
        """Stops loading a unit whose reservation is about to change. Returns when nothing writes to its memory."""
        if (loading := self._loading_units.get((run_id, unit))) is not None:
            loading.stop()
            await loading.ended.wait()

    def _stop_units(self, run_id: str) -> None:
        for (other, _), loading in self._loading_units.items():
            if other == run_id:
                loading.stop()

    def forget(self, run_id: str) -> None:
        """Ends everything for a run that is being deleted."""
        if (writing := self._writing.pop(run_id, None)) is not None:
            writing.abort()
        if (loading := self._loading.pop(run_id, None)) is not None:
            loading.stop()
        self._stop_units(run_id)


async def _wait(event: asyncio.Event, wait_s: float) -> None:
    try:
        async with asyncio.timeout(wait_s):
            await event.wait()
    except TimeoutError:
        return


class OpenedCheckpoints:
    """Keeps checkpoints open while their units are loaded, several of them one after the other.

    Args:
        roots: The folders that may be opened.
    """

    def __init__(self, roots: CheckpointRoots) -> None:
        self._roots = roots
        self._opened: dict[str, Checkpoint] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def keep(self, url: str) -> None:
        """Keeps a checkpoint open for ``_KEEP_OPEN_S`` after the last call. Call on the event loop."""
        if (timer := self._timers.pop(url, None)) is not None:
            timer.cancel()
        self._timers[url] = asyncio.get_running_loop().call_later(_KEEP_OPEN_S, self._close, url)

    def open(self, url: str, version: int) -> Checkpoint:
        """Opens a checkpoint, unless it is open. Blocks.

        Args:
            url: Folder of the checkpoint.
            version: Its version, which the shards then have.

        Raises:
            ShardwellError: As ``Checkpoint``.
            CorruptDataError: The checkpoint has another version.
        """
        checkpoint = self._opened.get(url) or Checkpoint(self._roots.open(url))
        if checkpoint.manifest.step != version:
            raise CorruptDataError(f"{url} has step {checkpoint.manifest.step}, expected {version}", path=url)
        self._opened[url] = checkpoint
        return checkpoint

    def _close(self, url: str) -> None:
        del self._timers[url]
        self._opened.pop(url, None)


class ShardLoading:
    """Loads all shards of a run, or of one unit, that are reserved on this server and have no values.

    Args:
        opened: The open checkpoints.
        request: Names the checkpoint and its version, the attempt to load all units, or one unit.
        discard: Empties a shard whose loading has failed. None: the caller drops the shards.
    """

    def __init__(
        self,
        opened: OpenedCheckpoints,
        run: HostedRun,
        request: shard_pb2.LoadShardsRequest,
        *,
        discard: Callable[[HostedRun, UnitShard], object] | None = None,
    ) -> None:
        self.restore, self.loaded_bytes, self.total_bytes = request.restore, 0, 0
        self.error: ShardwellError | None = None
        self.ended = asyncio.Event()
        """Set when the shards are published, or an error occurred."""
        self._opened, self._run, self._discard = opened, run, discard
        self._unit, self._url, self._version = request.unit, request.url, request.context.step
        self._counting = threading.Lock()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        # Threads of their own: storage may answer slowly, and steps of other runs need the threads for tensor work.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardwell-load")
        opened.keep(self._url)

    def start(self) -> None:
        """Starts loading."""
        self._task = asyncio.get_running_loop().create_task(self._load_or_fail())

    def stop(self) -> None:
        """Makes the loading end early, because another attempt begins or the run is deleted."""
        self._stopped = True

    def response(self) -> shard_pb2.LoadShardsResponse:
        """Returns the progress. Raises the error that ended the loading, if there was one."""
        if self.error is not None:
            raise type(self.error)(str(self.error), **self.error.data)
        return shard_pb2.LoadShardsResponse(
            loaded=self.ended.is_set(), loaded_bytes=self.loaded_bytes, total_bytes=self.total_bytes
        )

    async def _load_or_fail(self) -> None:
        try:
            # The lock is held throughout: nothing may drop the shards while a thread fills their memory.
            async with self._run.exclusively():
                await self._load()
        except NotFoundError as error:
            self.error = CorruptDataError(str(error), **error.data)
        except ShardwellError as error:
            self.error = error
        except Exception as error:
            logger.exception("unexpected error while run %r was loaded", self._run.name)
            self.error = InternalError(f"{type(error).__name__}: {error}")
        finally:
            self._threads.shutdown(wait=False)
            self.ended.set()

    async def _load(self) -> None:
        checkpoint = await in_thread(self._threads, lambda: self._opened.open(self._url, self._version))
        reserved = (shard for shard in self._run.shards.values() if shard.version is None)
        primaries = (shard for shard in reserved if shard.role is Role.PRIMARY)
        shards = [shard for shard in primaries if self._unit in ("", shard.unit)]
        try:
            await self._load_shards(checkpoint, shards)
        except Exception:
            if self._discard is not None:
                for shard in shards:
                    self._discard(self._run, shard)
            raise

    async def _load_shards(self, checkpoint: Checkpoint, shards: Sequence[UnitShard]) -> None:
        ranges = [(shard.layout, shard.start_bytes, shard.stop_bytes, shard.dp) for shard in shards]
        described = await in_thread(self._threads, lambda: [describe_shard(checkpoint, *each) for each in ranges])
        self.total_bytes = sum(state.size_bytes for state in described)
        destinations = [begin_import(shard, state) for shard, state in zip(shards, described, strict=True)]
        filled = await asyncio.gather(
            *(self._fill(checkpoint, destination) for destination in destinations), return_exceptions=True
        )
        for outcome in filled:
            if isinstance(outcome, BaseException):
                raise outcome
        for shard in shards:
            finish_import(shard, self._version)
        if self._run.rank_versions is not None:
            self._run.rank_versions.start_at(self._version)

    async def _fill(self, checkpoint: Checkpoint, destination: ShardState) -> None:
        def fill() -> None:
            self._check_not_stopped()
            fill_shard(checkpoint, destination, self._note_read)
            fault_points.reach("server.load.middle", unit=destination.layout.unit)

        try:
            await in_thread(self._threads, fill)
        except ShardwellError:
            self._stopped = True  # the other shards need not be read
            raise

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise UnavailableError(f"run {self._run.name!r} is not loaded from {self._url} any more")

    def _note_read(self, size: int) -> None:
        with self._counting:
            self.loaded_bytes += size
        self._check_not_stopped()


class CheckpointWriting:
    """Captures the primaries of a run and writes this server's file of a checkpoint. Used on the event loop.

    The writing thread is a daemon: storage that does not answer must not keep the process alive.

    Args:
        server_id: Name of this server, which is also that of the file.
        run: The run. Its primaries have the version of the request.
        roots: The folders that may be opened.
    """

    def __init__(
        self,
        server_id: str,
        store: ShardStore,
        run: HostedRun,
        request: shard_pb2.BeginCheckpointRequest,
        roots: CheckpointRoots,
    ) -> None:
        self.checkpoint_id = request.checkpoint_id
        self.written_bytes = self.total_bytes = 0
        """Size of the tensors that are written, and of all. Changed in the thread."""
        self.file_json: str | None = None
        """The complete file's entry in the manifest."""
        self.error = ""
        self.ended = asyncio.Event()
        """Set when the file is complete, or has failed."""
        self._server_id, self._url, self._roots = server_id, request.url, roots
        self._run_id, self._version = run.identity.run_id, request.context.step
        found = [(shard, export(shard)) for shard in run.published]
        self._parts = [part for _, state in found for part in parts_of(state)]
        self._averages_begun = any(state.averages_begun for _, state in found)
        # In the order in which the shards will probably be updated.
        place = {index: number for number, index in enumerate(request.unit_order)}
        found.sort(key=lambda each: each[0].update_order(place))
        self._pieces: list[list[Piece]] = []
        """Names of the tensors of each captured shard, in the order of its tensors."""
        captured = []
        for shard, state in found:
            named = list(pieces_of(state))
            self._pieces.append([piece for piece, _ in named])
            captured.append(CapturedShard(shard, [tensor for _, tensor in named], store.memory))
        self.capture = VersionCapture(self._version, captured)
        self._remaining = list(range(len(captured)))
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="shardwell-checkpoint", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def abort(self) -> None:
        """Stops writing. The thread removes what it wrote."""
        self.capture.fail(UnavailableError("the checkpoint was aborted"))

    # ---- in the thread ----

    def _run(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
        try:
            outcome, error = self._write(), ""
        except ShardwellError as failure:
            outcome, error = None, str(failure)
        except Exception as failure:
            logger.exception("unexpected error while a checkpoint was written")
            outcome, error = None, f"{type(failure).__name__}: {failure}"
        with suppress(RuntimeError):  # the event loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._end, outcome, error)

    def _end(self, file_json: str | None, error: str) -> None:
        # A capture that failed in the last moment may have been read after its shard was dropped.
        if file_json is not None and self.capture.failure is not None:
            file_json, error = None, str(self.capture.failure)
        self.capture.end()
        self.file_json, self.error = file_json, error
        self.ended.set()
        if error:
            logger.warning("this server's file of checkpoint %s was not written: %s", self._url, error)

    def _write(self) -> str:
        plan = FilePlan(
            [piece for pieces in self._pieces for piece in pieces],
            self._parts,
            run_id=self._run_id,
            step=self._version,
            averages_begun=self._averages_begun,
        )
        self.total_bytes = sum(piece.size_bytes for piece in plan.pieces)
        writer = CheckpointFileWriter(self._roots.open(self._url), self._server_id, plan)
        try:
            window = torch.empty(_WINDOW_BYTES, dtype=torch.uint8)
            while self._remaining:
                number = self._next()
                captured = self.capture.shards[number]
                for at, piece in enumerate(self._pieces[number]):
                    self._write_piece(writer, captured, at, piece, window)
                    captured.compute_note_written(at)
                fault_points.reach("server.checkpoint.between_shards", step=self._version)
            fault_points.reach("server.checkpoint.before_header", step=self._version)
            record = writer.finish()
            self._check()
            return json.dumps(record.to_dict())
        except BaseException:
            writer.abort()
            raise

    def _next(self) -> int:
        """Takes the shard to write next: one that an update waits for, else the next in order."""
        waited = (number for number in self._remaining if self.capture.shards[number].wanted)
        number = next(waited, self._remaining[0])
        self._remaining.remove(number)
        return number

    def _write_piece(
        self, writer: CheckpointFileWriter, captured: CapturedShard, at: int, piece: Piece, window: torch.Tensor
    ) -> None:
        if not piece.size_bytes:
            writer.write(piece, b"")
        for start in range(0, piece.size_bytes, _WINDOW_BYTES):
            part = window[: min(_WINDOW_BYTES, piece.size_bytes - start)]
            if not captured.compute_read(at, start, part):
                self._check()
                raise UnavailableError("the checkpoint was given up")
            writer.write_part(piece, tensor_memory(part))
            self.written_bytes += part.numel()
            fault_points.reach("server.checkpoint.middle", step=self._version)

    def _check(self) -> None:
        if self.capture.failure is not None:
            raise self.capture.failure
