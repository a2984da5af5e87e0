"""The sessions that are open in this process. One that is forked from it, such as a DataLoader's worker, has none."""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwell.session.session import Session

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def note_opened(session: Session) -> None:
    """Has a session closed at exit, and found by its parameters."""
    _watch_forks()
    _sessions.add(session)
    atexit.register(session.close)


def note_closed(session: Session) -> None:
    """The session needs no more closing."""
    atexit.unregister(session.close)
    _sessions.discard(session)


def session_of(parameter: Any) -> Session | None:
    """The open session that a sharded parameter belongs to."""
    return next((session for session in _sessions if session.units.locate(parameter) is not None), None)


def at(address: str) -> list[Session]:
    """The open sessions whose coordinator was given to ``join`` by this address."""
    return [session for session in _sessions if session.config.address == address]


def trainer_of(run_id: str) -> str | None:
    """The trainer that plays logical ranks of a run in an open session of this process."""
    return next((at.trainer for at in _sessions if at.run_id == run_id and at.num_ranks), None)


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_disown_all)


def _disown_all() -> None:
    """The threads and connections stayed with the parent; saying goodbye for it would cost it its place in the run."""
    for session in list(_sessions):
        session.disown()
