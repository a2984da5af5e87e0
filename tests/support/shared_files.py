"""What servers and trainers have in shared memory, as anybody on their host sees it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from tests.support.cluster import wait_until

SHARED_MEMORY = Path("/dev/shm")


def folder_of(pid: int) -> Path:
    """The folder of a server that runs, known by the lock that it holds there."""
    held = [Path(file.path) for file in psutil.Process(pid).open_files() if file.path.startswith(str(SHARED_MEMORY))]
    (folder,) = {path.parent for path in held if path.name == "lock"}
    return folder


def files_of(pid: int) -> set[str]:
    """Names of the files of a server that runs: shards, gradient buffers, and one for each open transport."""
    return {path.name for path in folder_of(pid).iterdir()} - {"lock"}


def shared_folders() -> dict[Path, set[int]]:
    """The folders that trainers of this host share, each with the processes that take part."""
    found = {}
    for folder in SHARED_MEMORY.glob("shardwell_cache-*"):
        try:
            lock = (folder / "lock").stat()
        except FileNotFoundError:
            found[folder] = set()
            continue
        file = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
        locks = map(str.split, Path("/proc/locks").read_text().splitlines())
        found[folder] = {int(pid) for _, kind, _, _, pid, place, *_ in locks if (kind, place) == ("FLOCK", file)}
    return found


def folders_shared_here() -> list[Path]:
    """Those in which this process takes part."""
    return [folder for folder, members in shared_folders().items() if os.getpid() in members]


def wait_for_no_folder() -> None:
    """Fails if this process takes part in a folder, or if there is one in which nobody does.

    Those of other processes are theirs, as of tests that run at the same time; one that is made or removed is empty.
    """
    wait_until(
        lambda: all(members and os.getpid() not in members for members in shared_folders().values()),
        "removal of the folders that trainers share",
    )
