"""Folders of servers: how a shard server finds its own in shared memory again, temporary ones, and when one is removed.

A running server holds the lock of its folder, and the kernel releases the lock of a process that has ended. The folder
of a server with an owner file may contain shards. A new process of the same server takes the folder up. Other processes
remove it only if no such process is expected: its supervisor has ended, it contains no shard, or nothing changed for a
day. The temporary folder of a process that was killed is removed when the next one is made. Identities of processes,
such as ``own_identity``, tell other processes of the host that one has ended.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardwell_wire.host.shared_memory import SERVER_FOLDER_PREFIX, SOCKET_NAME, open_file, open_folder, opened

logger = logging.getLogger(__name__)

DEFAULT_DIRECTORY = Path("/dev/shm")
RECORD_SUFFIX = ".shard"
"""End of the name of a file that describes a shard."""
KEPT_S = 24 * 3600.0
"""Seconds after its last change when the folder of a server that has ended is removed although it contains shards."""

TEMPORARY_PREFIX = "shardwell_tmp-"
"""Prefix of the names of temporary folders."""

_LOCK, _OWNER = "lock", "owner.json"
_TEMPORARY_LOCK = ".shardwell_lock"
_UNFINISHED_SUFFIX = ".new"

_PROC = Path("/proc")
_ENDED_STATES = ("Z", "X")
"""A zombie has ended, although its parent has not waited for it."""

_FOLDER_MODE = 0o711
"""Other users may enter a folder, to reach the server's socket, and do nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderOwner:
    """The server that a folder belongs to."""

    server_id: str
    coordinator: str
    """host:port of the coordinator, as the server was told. Servers of two clusters may have the same id."""
    supervisor: str = ""
    """Identity of the process that starts the server again; see ``own_identity``. Empty: not known."""

    @property
    def prefix(self) -> str:
        """Start of the names of the owner's folders."""
        key = hashlib.sha256(f"{self.coordinator}\0{self.server_id}".encode()).hexdigest()[:16]
        return f"{SERVER_FOLDER_PREFIX}{key}-"


@dataclass(frozen=True, slots=True)
class LockedFolder:
    """A folder of this process."""

    path: Path
    lock: int
    """Descriptor that holds the lock."""

    @property
    def own_files(self) -> tuple[str, ...]:
        """Names of the files that belong to the folder itself."""
        return _LOCK, _OWNER, SOCKET_NAME

    @property
    def has_shards(self) -> bool:
        """True if the folder contains the record of a shard."""
        return any(self.path.glob(f"*{RECORD_SUFFIX}"))

    def remove(self) -> None:
        """Removes the folder and releases the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)

    def leave(self) -> None:
        """Leaves the folder to the next process of the server: releases the lock."""
        os.close(self.lock)


def make_folder(
    directory: Path, owner: FolderOwner | None, fill: Callable[[Path], object] = lambda _: None
) -> LockedFolder:
    """Makes and locks a new folder. The name is random: another user could occupy a name that is known in advance.

    Args:
        directory: Directory in a memory file system.
        owner: Server that may take the folder up again. None: nobody does.
        fill: Makes the first files. If it raises, or the process ends, nobody takes the folder up.
    """
    made = Path(tempfile.mkdtemp(prefix=f".{SERVER_FOLDER_PREFIX}", dir=directory))
    with opened(open_folder(made)) as folder:
        lock = _lock(folder, create=True)
        os.fchmod(folder, _FOLDER_MODE)
    # The folder gets its final name, for which other processes look, only once it is locked.
    prefix = SERVER_FOLDER_PREFIX if owner is None else owner.prefix
    made_folder = LockedFolder(made.rename(directory / f"{prefix}{secrets.token_hex(8)}"), lock)
    try:
        fill(made_folder.path)
        if owner is not None:
            _write_owner(made_folder.path, owner)  # last: a folder without an owner is removed
    except BaseException:
        made_folder.remove()
        raise
    return made_folder


def find_in_use(directory: Path, owner: FolderOwner) -> Path | None:
    """Returns a folder with shards of the same server that another process holds. None: there is none.

    That process runs, or the kernel has not yet released what it had.
    """
    for path in folders_of(directory, owner):
        if not any(path.glob(f"*{RECORD_SUFFIX}")):
            continue
        try:
            with opened(open_folder(path)) as folder, opened(_lock(folder)):
                pass
        except BlockingIOError:
            return path
        except OSError as error:
            logger.warning("%s cannot be taken up: %s", path, error)
    return None


def take_folder(directory: Path, owner: FolderOwner) -> LockedFolder | None:
    """Locks the folder that a former process of the same server left; None if there is none.

    If there are several, the newest is taken, and the others are removed. Those of running processes stay.
    """
    taken: LockedFolder | None = None
    for path in sorted(directory.glob(f"{owner.prefix}*"), key=_changed_at, reverse=True):
        try:
            with opened(open_folder(path)) as folder:
                found, lock = _read_owner(folder), _lock(folder)
        except OSError:
            continue  # its server runs, or another user owns it
        candidate = LockedFolder(path, lock)
        if taken is None and found.get("boot") == boot_id():
            taken = candidate
            _take_over(path, found, owner)
        else:
            candidate.remove()
            logger.info("removed %s, an older folder of this server", path)
    return taken


def _take_over(path: Path, found: Mapping[str, Any], owner: FolderOwner) -> None:
    """Makes a folder that was taken up one of this process. The shards in it are of use also if this fails."""
    try:
        path.chmod(_FOLDER_MODE)
        if found != _facts(owner):
            _write_owner(path, owner)
    except OSError as error:  # shared memory may be full
        logger.warning("%s keeps the owner file of the former process: %s", path, error)


def remove_remains(directory: Path) -> None:
    """Removes the folders of this user's ended servers that no process will take up.

    Another user can make a folder with such a name, or put a FIFO in place of the lock file. Neither is opened.
    """
    for path in directory.glob(f"{SERVER_FOLDER_PREFIX}*"):
        _remove_if(path, partial(_is_garbage, path))


def remove_folders(directory: Path, coordinator: str) -> None:
    """Removes the folders of this user's ended servers of one cluster, which has ended."""
    for path in directory.glob(f"{SERVER_FOLDER_PREFIX}*"):
        _remove_if(path, lambda owner: owner.get("coordinator") == coordinator)


def folders_of(directory: Path, owner: FolderOwner) -> list[Path]:
    """Returns the folders of a server, whether it runs or not."""
    return sorted(directory.glob(f"{owner.prefix}*"))


def size_of(folder: Path) -> int:
    """Returns the size of the files in a folder, in bytes. Files that are removed meanwhile do not count."""
    sizes = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sum(sizes)


def write_whole(path: Path, data: bytes) -> None:
    """Creates or replaces a small file. A process that is killed leaves the old file or the new one."""
    temporary = path.with_name(f"{path.name}{_UNFINISHED_SUFFIX}")
    with opened(
        os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    ) as file:
        os.write(file, data)
    temporary.rename(path)


def _remove_if(path: Path, condition: Callable[[Mapping[str, Any]], bool]) -> None:
    try:
        with opened(open_folder(path)) as folder:
            # Folders that are kept are not locked: a new process of their server would take the lock for that of
            # another process, and would start without its shards.
            if not condition(_read_owner(folder)):
                return
            with opened(_lock(folder)):
                if not condition(_read_owner(folder)):
                    return
                shutil.rmtree(path)
    except OSError:
        return  # its server runs, or another user owns it, or another process is making or removing it
    logger.info("removed %s, the folder of a server that has ended", path)


def _is_garbage(path: Path, owner: Mapping[str, Any]) -> bool:
    """Returns whether no process will take up the folder of a server that has ended."""
    if not owner or owner.get("boot") != boot_id() or has_ended(str(owner.get("supervisor", ""))):
        return True
    return not any(path.glob(f"*{RECORD_SUFFIX}")) or time.time() - _changed_at(path) > KEPT_S


def _changed_at(path: Path) -> float:
    """Returns when a server changed the files of its folder last. Updates in place count once in an hour."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _write_owner(path: Path, owner: FolderOwner) -> None:
    write_whole(path / _OWNER, json.dumps(_facts(owner)).encode())


def _facts(owner: FolderOwner) -> dict[str, Any]:
    return {"boot": boot_id(), **asdict(owner)}


def _read_owner(folder: int) -> dict[str, Any]:
    """Returns the content of a folder's owner file; empty if there is none."""
    try:
        with open(open_file(_OWNER, folder=folder), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lock(folder: int, name: str = _LOCK, *, create: bool = False) -> int:
    """Locks a file of a folder; returns the descriptor that holds the lock. Raises OSError if the lock is taken."""
    held = open_file(name, write=True, create=create, folder=folder)  # network file systems lock only writable files
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(held)
        raise
    return held


class TemporaryFolder:
    """A new folder that only this user can enter, in the temporary directory of the environment.

    The process holds a lock on a file in its folder. The kernel releases the lock when the process ends for any reason.
    The next process of the same user that creates such a folder in the same directory then removes the old one.

    Attributes:
        path: The folder.
    """

    def __init__(self) -> None:
        directory = Path(tempfile.gettempdir())
        remove_temporary_folders()
        # The folder gets its final name, which remove_temporary_folders() looks for, only once it is locked.
        made = Path(tempfile.mkdtemp(prefix=f".{TEMPORARY_PREFIX}", dir=directory))
        with opened(open_folder(made)) as folder:
            self._lock = _lock(folder, _TEMPORARY_LOCK, create=True)
        self.path = made.rename(directory / made.name.removeprefix("."))

    def remove(self) -> None:
        """Removes the folder and its contents. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields the path of a ``TemporaryFolder``, which is removed at the end of the block."""
    made = TemporaryFolder()
    try:
        yield made.path
    finally:
        made.remove()


def remove_temporary_folders() -> None:
    """Removes the temporary folders of processes that ended without removing them."""
    for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_PREFIX}*"):
        # Skips folders that are in use, belong to another user, or are being removed by another process.
        with suppress(OSError), opened(open_folder(path)) as folder, opened(_lock(folder, _TEMPORARY_LOCK)):
            shutil.rmtree(path)


def own_identity() -> str:
    """Returns the boot id, process namespace, process id and start time of this process. Empty without ``/proc``."""
    return _identity(os.getpid())


def parent_identity() -> str:
    """As ``own_identity``, of the process that started this one."""
    return _identity(os.getppid())


def boot_id() -> str:
    """Returns an id of this boot of the host. Empty without ``/proc``."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def boot_of(identity: str) -> str:
    """Returns the boot id in the identity of a process: equal for all processes of one machine. Empty: unknown."""
    return identity.partition("/")[0]


def _identity(pid: int) -> str:
    try:
        _, started = _state_and_start(pid)
        return f"{_process_space()}/{pid}/{started}"
    except OSError:
        return ""


def has_ended(identity: str) -> bool:
    """Returns True if a process has ended.

    False if this is unknown: the process is on another host, in another container, or has no identity.

    Args:
        identity: The result of ``own_identity`` in that process.
    """
    return _runs(identity) is False


def runs_here(identity: str) -> bool:
    """Returns True if a process certainly runs on this host. It may be stopped.

    Args:
        identity: The result of ``own_identity`` in that process.
    """
    return _runs(identity) is True


def _runs(identity: str) -> bool | None:
    """Returns whether a process runs. None: unknown."""
    space, _, started = identity.rpartition("/")
    space, _, pid = space.rpartition("/")
    try:
        if not pid.isdecimal() or space != _process_space():
            return None
        with suppress(PermissionError):  # the process exists and belongs to another user
            os.kill(int(pid), 0)
        state, found = _state_and_start(int(pid))
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return None
    return found == started and state not in _ENDED_STATES


def _process_space() -> str:
    """Returns the scope in which process ids are unique: this boot of this host, and this process namespace."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{(_PROC / 'self/ns/pid').readlink().name}"


def _state_and_start(pid: int) -> tuple[str, str]:
    # The program's name, in parentheses, may contain any characters.
    fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]
