"""Threads for work on folders of checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.checkpoints.opening import CheckpointRoots
from shardwell_wire.checkpoints.storage import Storage
from shardwell_wire.errors import InternalError, ShardwellError, UnavailableError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class CheckpointFiles:
    """Opens folders of checkpoints, and runs blocking work on them in threads.

    The threads are their own, because a bucket that does not answer must not block anything else.

    Args:
        roots: The folders that may be opened.
    """

    def __init__(self, roots: CheckpointRoots) -> None:
        self._roots = roots
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="shardwell-checkpoints")
        self._closed = False

    async def __call__(self, work: Callable[[], Result]) -> Result:
        """Returns the result of ``work``. Unexpected errors of storage libraries become InternalError."""
        if self._closed:
            raise UnavailableError("the coordinator is stopping")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except (ShardwellError, asyncio.CancelledError):
            raise
        except Exception as error:
            logger.exception("unexpected error in the storage of checkpoints")
            raise InternalError(f"the storage of checkpoints failed: {type(error).__name__}: {error}") from error

    def open(self, url: str) -> Storage:
        """Returns the storage at a path or URL. Blocks.

        Raises:
            ShardwellError: See ``CheckpointRoots.open``.
        """
        return self._roots.open(url)

    def open_run(self, url: str, run: str) -> RunFolder:
        """Returns the folder of a run in a folder of checkpoints. Blocks. Raises as ``open``."""
        return RunFolder(self._roots.open(url), run)

    def close(self) -> None:
        """Lets running work end, and starts no more."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
