"""Files of servers and trainers in shared memory, as every process on their host sees them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from shardwell_wire.host.shared_memory import SOCKET_NAME
from tests.support.cluster import wait_until

SHARED_MEMORY = Path("/dev/shm")


def folder_of(pid: int) -> Path:
    """Returns the folder of a running server, found by the lock that the server holds in it."""
    held = [Path(file.path) for file in psutil.Process(pid).open_files() if file.path.startswith(str(SHARED_MEMORY))]
    (folder,) = {path.parent for path in held if path.name == "lock"}
    return folder


def files_of(pid: int) -> set[str]:
    """Returns the names of a running server's files: shards, buffers of trainers, and one file for open sessions.

    Files that only a new process of the server needs are left out: they have a suffix.
    """
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    buffers = {link for link in links if link.startswith("/memfd:shardwell-")}
    return buffers | {path.name for path in folder_of(pid).iterdir() if not path.suffix} - {"lock", SOCKET_NAME}


def shared_folders() -> dict[Path, set[int]]:
    """Returns the folders that trainers of this host share, each with the pids of its members."""
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
    """Returns the shared folders of which this process is a member."""
    return [folder for folder, members in shared_folders().items() if os.getpid() in members]


def wait_for_no_folder() -> None:
    """Waits until this process is a member of no shared folder and every folder has a member.

    Folders of other processes are ignored, because tests may run at the same time. A folder has no member for a
    moment while it is created or removed.
    """
    wait_until(
        lambda: all(members and os.getpid() not in members for members in shared_folders().values()),
        "removal of the folders that trainers share",
    )
