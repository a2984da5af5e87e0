"""Writes this server's file of a checkpoint, and fills reserved shards from a checkpoint, in background threads."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from shardwell_server.shard.checkpoints.contents import describe_shard, fill_shard
from shardwell_server.shard.concurrency import in_threads_of
from shardwell_server.shard.shard_spec import Role
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.unit.portable_state import (
    CapturedShard,
    ShardState,
    VersionCapture,
    begin_import,
    finish_import,
)
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_wire import fault_points
from shardwell_wire.checkpoints.format import FilePlan, Part, Piece
from shardwell_wire.checkpoints.opening import CheckpointRoots
from shardwell_wire.checkpoints.reading import Checkpoint
from shardwell_wire.checkpoints.writing import CheckpointFileWriter
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import CorruptDataError, InternalError, NotFoundError, ShardwellError, UnavailableError

logger = logging.getLogger(__name__)

_THREADS = 2
"""Shards that are read at the same time, so that checksums overlap with waiting for storage."""
_KEEP_OPEN_S = 60.0
"""How long a checkpoint stays open for the next unit of a run: opening it reads the headers of all files."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint of which several units may be loaded one after the other."""

    url: str
    """Folder of the checkpoint."""
    version: int
    """Version of the checkpoint, which the shards then have."""
    opened: dict[str, Checkpoint]
    """The checkpoint by ``url``, once it is open."""
    roots: CheckpointRoots
    """The folders that may be opened."""

    def open(self) -> Checkpoint:
        """Opens the checkpoint, unless it is open. Blocks. Raises as ``Checkpoint``."""
        checkpoint = self.opened.get(self.url) or Checkpoint(self.roots.open(self.url))
        if checkpoint.manifest.step != self.version:
            raise CorruptDataError(
                f"{self.url} has step {checkpoint.manifest.step}, expected {self.version}", path=self.url
            )
        self.opened[self.url] = checkpoint
        return checkpoint


class OpenedCheckpoints:
    """Keeps checkpoints open while their units are loaded. Used on the event loop.

    Args:
        roots: The folders that may be opened.
    """

    def __init__(self, roots: CheckpointRoots) -> None:
        self._roots = roots
        self._opened: dict[str, Checkpoint] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def source(self, url: str, version: int) -> StoredCheckpoint:
        """Returns a checkpoint. It stays open for ``_KEEP_OPEN_S`` after the last call."""
        if (timer := self._timers.pop(url, None)) is not None:
            timer.cancel()
        self._timers[url] = asyncio.get_running_loop().call_later(_KEEP_OPEN_S, self._close, url)
        return StoredCheckpoint(url, version, self._opened, self._roots)

    def _close(self, url: str) -> None:
        del self._timers[url]
        self._opened.pop(url, None)


class ShardLoading:
    """Loads all shards of a run, or of one unit, that are reserved on this server and have no values.

    Args:
        run: The run.
        source: The checkpoint.
        restore: Number of the attempt to load all units, as in ``LoadShardsRequest``.
        unit: Name of the unit. Empty: all units.
        discard: Empties a shard whose loading has failed. None: the caller drops the shards.
    """

    def __init__(
        self,
        run: HostedRun,
        source: StoredCheckpoint,
        *,
        restore: int = 0,
        unit: str = "",
        discard: Callable[[HostedRun, UnitShard], object] | None = None,
    ) -> None:
        self.restore, self.loaded_bytes, self.total_bytes = restore, 0, 0
        self.error: ShardwellError | None = None
        self.ended = asyncio.Event()
        """Set when the shards are published, or an error occurred."""
        self._run, self._source, self._unit, self._discard = run, source, unit, discard
        self._counting = threading.Lock()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        # Threads of their own: storage may answer slowly, and steps of other runs need the threads for tensor work.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardwell-load")
        self._in_thread = in_threads_of(self._threads)

    def start(self) -> None:
        """Starts loading."""
        self._task = asyncio.get_running_loop().create_task(self._load_or_fail())

    def stop(self) -> None:
        """Makes the loading end early, because another attempt begins or the run is deleted."""
        self._stopped = True

    def check(self) -> None:
        """Raises the error that ended the loading, if there was one."""
        if self.error is not None:
            raise type(self.error)(str(self.error), **self.error.data)

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
        checkpoint = await self._in_thread(self._source.open)
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
        described = await self._in_thread(lambda: [_describe(checkpoint, shard) for shard in shards])
        self.total_bytes = sum(state.size_bytes for state in described)
        destinations = [begin_import(shard, state) for shard, state in zip(shards, described, strict=True)]
        filled = await asyncio.gather(
            *(self._fill(checkpoint, destination) for destination in destinations), return_exceptions=True
        )
        for outcome in filled:
            if isinstance(outcome, BaseException):
                raise outcome
        for shard in shards:
            finish_import(shard, self._source.version)
        if self._run.rank_versions is not None:
            self._run.rank_versions.start_at(self._source.version)

    async def _fill(self, checkpoint: Checkpoint, destination: ShardState) -> None:
        def fill() -> None:
            self._check_not_stopped()
            fill_shard(checkpoint, destination, self._note_read)
            fault_points.reach("server.load.middle", unit=destination.layout.unit)

        try:
            await self._in_thread(fill)
        except ShardwellError:
            self._stopped = True  # the other shards need not be read
            raise

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise UnavailableError(f"run {self._run.name!r} is not loaded from {self._source.url} any more")

    def _note_read(self, size: int) -> None:
        with self._counting:
            self.loaded_bytes += size
        self._check_not_stopped()


def _describe(checkpoint: Checkpoint, shard: UnitShard) -> ShardState:
    return describe_shard(checkpoint, shard.layout, shard.start_bytes, shard.stop_bytes, shard.dp)


_WINDOW_BYTES = 4 << 20
"""Bytes that are copied out of a shard at a time. The window stays in the cache for the checksum and the write."""

_NICENESS = 5
"""Added to the priority number of the writing thread: training comes first."""


@dataclass(frozen=True, slots=True)
class FileContents:
    """What a file will contain. ``pieces`` are the names of the captured shards' tensors, in the same order."""

    server_id: str
    url: str
    """Folder of the checkpoint."""
    run_id: str
    version: int
    parts: Sequence[Part]
    averages_begun: bool
    pieces: Sequence[Sequence[Piece]]
    """By captured shard."""


@dataclass(slots=True)
class FileProgress:
    """How far a file is. Changed on the event loop, except the number of written bytes."""

    written_bytes: int = 0
    total_bytes: int = 0
    file_json: str | None = None
    """The complete file's entry in the manifest."""
    error: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def note_planned(self, total_bytes: int) -> None:
        """Records the size of all tensors. Called in the thread."""
        self.total_bytes = total_bytes

    def note_written(self, size_bytes: int) -> None:
        """Counts written bytes. Called in the thread."""
        self.written_bytes += size_bytes

    def end(self, file_json: str | None, error: str) -> None:
        """Records the outcome."""
        if not self.ended.is_set():
            self.file_json, self.error = file_json, error
            self.ended.set()


class CheckpointWriting:
    """Writes one file. The thread is a daemon: storage that does not answer must not keep the process alive.

    Args:
        checkpoint_id: Id of the checkpoint.
        capture: The shards.
        contents: What the file contains.
        roots: The folders that may be opened.
    """

    def __init__(
        self, checkpoint_id: str, capture: VersionCapture, contents: FileContents, roots: CheckpointRoots
    ) -> None:
        self.checkpoint_id, self.capture, self.progress = checkpoint_id, capture, FileProgress()
        self._contents, self._roots, self._loop = contents, roots, asyncio.get_running_loop()
        self._remaining = list(range(len(capture.shards)))
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
        self.progress.end(file_json, error)
        if error:
            logger.warning("this server's file of checkpoint %s was not written: %s", self._contents.url, error)

    def _write(self) -> str:
        contents = self._contents
        plan = FilePlan(
            [piece for pieces in contents.pieces for piece in pieces],
            contents.parts,
            run_id=contents.run_id,
            step=contents.version,
            averages_begun=contents.averages_begun,
        )
        self.progress.note_planned(sum(piece.size_bytes for piece in plan.pieces))
        writer = CheckpointFileWriter(self._roots.open(contents.url), contents.server_id, plan)
        try:
            window = torch.empty(_WINDOW_BYTES, dtype=torch.uint8)
            while self._remaining:
                number = self._next()
                captured = self.capture.shards[number]
                for at, piece in enumerate(contents.pieces[number]):
                    self._write_piece(writer, captured, at, piece, window)
                    captured.compute_note_written(at)
                fault_points.reach("server.checkpoint.between_shards", step=contents.version)
            fault_points.reach("server.checkpoint.before_header", step=contents.version)
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
            writer.write_part(piece, memory_at(part.data_ptr(), part.numel()))
            self.progress.note_written(part.numel())
            fault_points.reach("server.checkpoint.middle", step=self._contents.version)

    def _check(self) -> None:
        if self.capture.failure is not None:
            raise self.capture.failure
