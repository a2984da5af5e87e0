"""Identities of processes, by which other processes on the host detect that one has ended."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_ENDED_STATES = ("Z", "X")
"""A zombie has ended, although its parent has not waited for it."""


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
    space, _, rest = identity.rpartition("/")
    space, _, pid = space.rpartition("/")
    try:
        if not pid.isdecimal() or space != _process_space():
            return False
        os.kill(int(pid), 0)
        state, started = _state_and_start(int(pid))
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False  # the process exists and belongs to another user
    return started != rest or state in _ENDED_STATES


def runs_here(identity: str) -> bool:
    """Returns True if a process certainly runs on this host. It may be stopped.

    Args:
        identity: The result of ``own_identity`` in that process.
    """
    space, _, started = identity.rpartition("/")
    space, _, pid = space.rpartition("/")
    try:
        if not pid.isdecimal() or space != _process_space():
            return False
        state, found = _state_and_start(int(pid))
    except (OSError, OverflowError):
        return False
    return found == started and state not in _ENDED_STATES


def _process_space() -> str:
    """Returns the scope in which process ids are unique: this boot of this host, and this process namespace."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{(_PROC / 'self/ns/pid').readlink().name}"


def _state_and_start(pid: int) -> tuple[str, str]:
    # The program's name, in parentheses, may contain any characters.
    fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]
