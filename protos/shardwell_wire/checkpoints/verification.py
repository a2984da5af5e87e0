"""Compares every checksum of a checkpoint, and names everything that is damaged or missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from shardwell_wire.checkpoints.manifest import FileRecord, Manifest
from shardwell_wire.checkpoints.reading import Checkpoint, StoredPiece, read_index, read_manifest, verify_piece
from shardwell_wire.checkpoints.storage import Storage
from shardwell_wire.errors import CorruptDataError, NotFoundError

_THREADS = 4
"""Tensors that are read concurrently: buckets answer slowly, and a disk may have several queues."""


def verify(storage: Storage, count: Callable[[int], None]) -> Iterator[str]:
    """Yields one line for each damaged or missing file and tensor, after the whole checkpoint has been read.

    Args:
        storage: The checkpoint's folder.
        count: Called with the number of bytes of each tensor that has been read, in any thread.

    Raises:
        ShardwellError: The storage cannot be read. See ``Storage``.
    """
    try:
        manifest = read_manifest(storage)
    except (NotFoundError, CorruptDataError) as error:
        yield str(error)
        return
    is_damaged = False
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardwell-verify") as threads:
        for file in manifest.files:
            for problem in _verify_file(storage, manifest, file, threads, count):
                is_damaged = True
                yield problem
    if not is_damaged:
        try:
            Checkpoint(storage)
        except CorruptDataError as error:
            yield str(error)


def _verify_file(
    storage: Storage, manifest: Manifest, file: FileRecord, threads: ThreadPoolExecutor, count: Callable[[int], None]
) -> Iterator[str]:
    try:
        index = read_index(storage, manifest, file)
    except (NotFoundError, CorruptDataError) as error:
        yield str(error)
        return

    def problem_of(stored: StoredPiece) -> str:
        try:
            verify_piece(storage, stored)
        except CorruptDataError as error:
            return str(error)
        finally:
            count(stored.piece.size_bytes)
        return ""

    yield from filter(None, threads.map(problem_of, (StoredPiece(file, placed) for placed in index.pieces)))
