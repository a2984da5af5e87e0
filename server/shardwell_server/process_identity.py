"""Which process of which host a server is, so that others on that host can tell when it has ended."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_ENDED_STATES = ("Z", "X")
"""A zombie runs no more, though its parent has not waited for it yet."""


def own_identity() -> str:
    """Names this process: host, process namespace, process id and start time. Empty where ``/proc`` does not tell."""
    pid = os.getpid()
    try:
        _, started = _state_and_start(pid)
        return f"{_process_space()}/{pid}/{started}"
    except OSError:
        return ""


def has_ended(identity: str) -> bool:
    """Whether a process is known to run no more.

    False also if that cannot be told from here: the process is on another host or in another container, or unnamed.

    Args:
        identity: From its ``own_identity``.
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
        return False  # it is there, and belongs to somebody else
    return started != rest or state in _ENDED_STATES


def _process_space() -> str:
    """Where process ids have one meaning: this boot of this host, and this process namespace."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{(_PROC / 'self/ns/pid').readlink().name}"


def _state_and_start(pid: int) -> tuple[str, str]:
    # The name of the program, in parentheses, may contain anything.
    fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]
