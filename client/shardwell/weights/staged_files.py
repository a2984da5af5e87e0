"""Files of a checkpoint that appear in their folder all together, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged(folder: Path, *, markers: Collection[str], is_ours: Callable[[str], bool]) -> Iterator[Path]:
    """Has files written beside a folder's own, and moved into it when all of them are complete.

    Whoever reads the folder meanwhile, or after a crash at any moment, finds a marker only if every file of one
    export is there. If the block raises, as when the disk is full, the folder stays as it was.

    Args:
        folder: Where the files shall be; made if it does not exist.
        markers: Names of files without which the others are no checkpoint: removed first, moved in last.
        is_ours: Whether a file with some name belongs to an earlier export; those are removed.

    Yields:
        A folder on the same disk to write them to.
    """
    existed = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        yield stage
        _sync(stage)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        if not existed:
            folder.rmdir()
        raise
    names = {path.name for path in stage.iterdir()}
    for marker in markers:
        (folder / marker).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.name not in names and is_ours(path.name):
            path.unlink()
    for name in sorted(names, key=lambda name: (name in markers, name)):
        (stage / name).replace(folder / name)
    stage.rmdir()
    _sync(folder)


def _sync(folder: Path) -> None:
    """Makes the folder's files, or their names, durable."""
    for path in (*folder.iterdir(), folder):
        if path.is_file() or path == folder:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
