"""The memory that this process may use: the machine's, or the tightest limit of its cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_LIMIT_FILES = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}
"""Names of the files with limits, by type of file system: ``cgroup2`` is version 2, ``cgroup`` is version 1."""


def usable_memory_bytes(processes: int = 1, *, own_limits: bool = False) -> int:
    """Returns the memory that each of several processes of this machine may use.

    Args:
        processes: Number of processes that divide the memory evenly.
        own_limits: Whether the limits of this process's cgroups are for it alone. False: the processes divide them too.
    """
    machine: int = psutil.virtual_memory().total
    limits = cgroup_limits()
    return min([machine // processes, *(limit if own_limits else limit // processes for limit in limits)])


def cgroup_limits(proc: Path = Path("/proc/self")) -> list[int]:
    """Returns the memory limits, in bytes, of this process's cgroups and of all cgroups that contain them.

    Slurm and systemd nest cgroups and often limit an outer cgroup only.

    Args:
        proc: The process's directory in ``/proc``.
    """
    limits = []
    for folder, names in _folders(proc):
        for name in names:
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                limits.append(int(text))
    return limits


@dataclass(frozen=True)
class _Mount:
    """A mounted cgroup hierarchy, as this process sees it."""

    kind: str
    root: Path
    """Path of the cgroup that is mounted at ``point``."""
    point: Path


def _folders(proc: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yields the directory of each cgroup, innermost first, with the names of its limit files."""
    try:
        own = dict(_own_cgroups((proc / "cgroup").read_text()))
        mounts = list(_mounts((proc / "mountinfo").read_text()))
    except OSError:
        return  # not Linux
    for mount in mounts:
        path = own.get(mount.kind)
        if path is None:
            continue
        # In a container without a cgroup namespace, the path is relative to the host's root, but the mount shows the
        # container's own cgroup.
        inside = path.relative_to(mount.root) if path.is_relative_to(mount.root) else Path()
        folder = mount.point / inside
        while True:
            yield folder, _LIMIT_FILES[mount.kind]
            if folder == mount.point:
                break
            folder = folder.parent


def _own_cgroups(text: str) -> Iterator[tuple[str, Path]]:
    """Yields this process's cgroup in each hierarchy that can limit memory."""
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield "cgroup2", Path(path)
        elif "memory" in controllers.split(","):
            yield "cgroup", Path(path)


def _mounts(text: str) -> Iterator[_Mount]:
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split()[:3]
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            yield _Mount(kind, Path(_unescaped(fields[3])), Path(_unescaped(fields[4])))


def _unescaped(path: str) -> str:
    """Decodes the octal escapes that ``mountinfo`` uses for spaces and similar characters."""
    return path.encode().decode("unicode_escape")
