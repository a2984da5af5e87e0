"""Writes this server's file of a checkpoint, in a background thread."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from shardwell_server.shard.state.version_capture import CapturedShard, VersionCapture
from shardwell_wire import fault_points
from shardwell_wire.checkpoints.format import FilePlan, Part, Piece
from shardwell_wire.checkpoints.opening import CheckpointRoots
from shardwell_wire.checkpoints.writing import CheckpointFileWriter
from shardwell_wire.chunk_streams import memory_at
from shardwell_wire.errors import ShardwellError, UnavailableError

logger = logging.getLogger(__name__)

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
