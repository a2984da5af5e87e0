"""What a shard server has in shared memory, as anybody on its host sees it."""

from __future__ import annotations

from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


def folder_of(pid: int) -> Path:
    """The folder of a server that runs, known by the lock that it holds there."""
    held = [Path(file.path) for file in psutil.Process(pid).open_files() if file.path.startswith(str(SHARED_MEMORY))]
    (folder,) = {path.parent for path in held if path.name == "lock"}
    return folder


def files_of(pid: int) -> set[str]:
    """Names of the files of a server that runs: shards, mailboxes, and one for each open lane."""
    return {path.name for path in folder_of(pid).iterdir()} - {"lock"}
