"""Fills the reserved shards of a run from a checkpoint, in a background thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from shardwell_server.shard.checkpoints.contents import describe_shard, fill_shard
from shardwell_server.shard.concurrency import in_threads_of
from shardwell_server.shard.state.portable_state import ShardState, begin_import, finish_import
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.shard_spec import Role
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire import fault_points
from shardwell_wire.checkpoints.reading import Checkpoint
from shardwell_wire.errors import CorruptDataError, InternalError, NotFoundError, ShardwellError, UnavailableError

logger = logging.getLogger(__name__)

_THREADS = 2
"""Shards that are read at the same time, so that checksums overlap with waiting for storage."""


class ShardLoading:
    """Loads all shards of a run that are reserved on this server and have no values.

    Args:
        run: The run.
        restore: Number of the attempt, as in ``LoadShardsRequest``.
        url: Folder of the checkpoint.
        version: Version of the checkpoint, which the shards then have.
    """

    def __init__(self, run: HostedRun, restore: int, url: str, version: int) -> None:
        self.restore, self.loaded_bytes, self.total_bytes = restore, 0, 0
        self.error: ShardwellError | None = None
        self.ended = asyncio.Event()
        """Set when the shards are published, or an error occurred."""
        self._run, self._url, self._version = run, url, version
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
            await self._run.exclusively(self._load)
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
        checkpoint = await self._in_thread(lambda: Checkpoint.open(self._url))
        if checkpoint.manifest.step != self._version:
            raise CorruptDataError(
                f"{self._url} has step {checkpoint.manifest.step}, expected {self._version}", path=self._url
            )
        reserved = (shard for shard in self._run.shards.values() if shard.version is None)
        shards = [shard for shard in reserved if shard.role is Role.PRIMARY]
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
            finish_import(shard, self._version)

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
            raise UnavailableError(f"run {self._run.name!r} is not loaded from {self._url} any more")

    def _note_read(self, size: int) -> None:
        with self._counting:
            self.loaded_bytes += size
        self._check_not_stopped()


def _describe(checkpoint: Checkpoint, shard: UnitShard) -> ShardState:
    return describe_shard(checkpoint, shard.layout, shard.start_bytes, shard.stop_bytes, shard.dp)
