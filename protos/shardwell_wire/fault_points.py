"""Named points at which tests make a process fail.

``reach`` marks a point in the code. It does nothing unless a test armed the point: in this process with ``armed``, or
in a child process with the environment variable ``SHARDWELL_TEST_FAULTS``, which ``environment`` writes and this module
reads when it is imported. The variable has no effect on an installed package, such as that of the images: only a source
tree with the tests reads it. A point that is not armed costs one test of an empty dictionary.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwell_wire import errors

logger = logging.getLogger(__name__)

VARIABLE = "SHARDWELL_TEST_FAULTS"
_TESTS = Path(__file__).parents[2] / "tests" / "faults"
"""Exists in a source tree only."""

POINTS: Mapping[str, str] = {
    "coordinator.placement.before_record": "servers reserved memory for a unit, and it is not durable yet (run, unit)",
    "coordinator.relocation.before_record": "backups replace lost shards, and this is not durable yet (run)",
    "coordinator.relocation.after_record": "the relocation is durable, and no server knows of it yet (run)",
    "coordinator.adoption.after_record": "a restarted server keeps its shards, and does not know it yet (run, server)",
    "coordinator.backup.copied": "a backup has the committed state, and its record says otherwise (unit, server)",
    "coordinator.promotion.after": "a server acknowledged that it is a primary (server)",
    "relay.fetch.middle": "a version begins to arrive at the relay, whose file shows none meanwhile (unit)",
    "relay.sum.before": "the relay has added gradients, and has not pushed the sum (unit)",
    "relay.sum.after": "the owner has acknowledged a sum, and the trainers have no answer yet (unit)",
    "client.push.before": "a shard's part of a unit's gradient is about to be pushed (unit, dp_rank, part)",
    "client.push.after": "a shard's part of a unit's gradient is acknowledged (unit, dp_rank, part)",
    "client.finish_work.before": "the finished items are about to be reported (step)",
    "client.finish_work.after": "the coordinator answered the report of finished items (step)",
    "client.commit.before": "the step proposal is about to be sent (step)",
    "client.commit.after": "the coordinator answered the step proposal (step)",
    "server.stream.middle": "a chunk of a gradient or of initial values arrived, and more follow",
    "server.call.executed": "an rpc on a call connection was executed, its response is not sent (rpc, connection)",
    "server.push.accepted": "a part of a contribution is stored, and the trainer has no answer yet (dp_rank, part)",
    "server.gather.middle": "a chunk of a shard, or of a batch of ranges, was sent, and more may follow (response)",
    "server.fence.after": "older leases and attempts are fenced (step)",
    "server.prepare.after": "the step is prepared, and the coordinator has no answer yet (step)",
    "server.copy_shard.before": "the committed state of a shard is about to be sent to a backup (unit)",
    "server.copy_shard.after": "a backup has the committed state, and the coordinator has no answer yet (unit)",
    "server.replicate.before": "content of a step is about to be sent to a backup (unit, step)",
    "server.replicate.middle": "a chunk of a step was sent to a backup, and more may follow (unit, step)",
    "server.replicate.after": "a backup has acknowledged content of a step (unit, step)",
    "server.promote.before": "backups are about to become primaries (step)",
    "server.promote.after": "backups have become primaries, and the coordinator has no answer yet (step)",
    "server.file.created": "a file in shared memory has its name, and no bytes yet (suffix)",
    "server.record.replaced": "a shard's record is replaced, and no step word continues it yet (version)",
    "server.update.before": "the update of a prepared step is about to begin (step)",
    "server.update.between_shards": "a shard is updated, and others of the run are not (step, unit)",
    "server.update.middle": "parameters of a shard have changed in part, and its version is still the old one (piece)",
    "server.update.in_piece": "a piece of an update is applied, and not counted yet (piece)",
    "server.update.joint": "an update of several shards has begun, changed some, saved one, or is complete (stage)",
    "server.update.after": "all shards are updated, and the coordinator has no answer yet (step)",
    "server.checkpoint.middle": "a part of a tensor is in the file of a checkpoint, and more follow (step)",
    "server.checkpoint.between_shards": "a shard is in the file of a checkpoint (step)",
    "server.checkpoint.before_header": "all tensors are in the file of a checkpoint, and its header is not (step)",
    "server.load.middle": "a shard is read from a checkpoint, and not published (unit)",
    "coordinator.commit.before_record": "all servers can apply the step, and the record is not written (step)",
    "coordinator.commit.after_record": "the record is durable, and no server received the update (step)",
    "coordinator.update.acknowledged": "a server acknowledged the update of a committed step (step, server)",
    "coordinator.checkpoint.before_begin": "a checkpoint is recorded, and no server has begun (step)",
    "coordinator.checkpoint.begun": "all servers write a checkpoint (step)",
    "coordinator.checkpoint.before_manifest": "the files of a checkpoint are complete, its manifest is missing (step)",
    "coordinator.checkpoint.after_manifest": "the manifest is written, and the checkpoint is not recorded (step)",
    "coordinator.restore.begun": "the decision to load a run is durable, and no server knows of it (step)",
    "coordinator.restore.before_record": "all servers have loaded a run, and the coordinator has not stored it (step)",
    "coordinator.restore.after_record": "a loaded run is stored, and no trainer knows of it (step)",
    "coordinator.fence.before": "new epochs are durable, and no server is fenced",
    "coordinator.fence.after": "the servers are fenced, and the work is not leased yet",
}
"""What has happened at each point, with the details that ``reach`` passes."""

ACTIONS = ("kill", "stop", "raise", "delay")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens when a point is reached."""

    point: str
    """A name of ``POINTS``."""
    action: str
    """``kill`` (SIGKILL) or ``stop`` (SIGSTOP) this process, ``raise`` an error, or ``delay`` the thread."""
    nth: int = 1
    """Occurrence at which it happens, counted from 1. Only occurrences that match ``where`` count."""
    where: Mapping[str, str | int] = field(default_factory=dict)
    """Details that the occurrence must have, such as ``{"unit": 2}`` or ``{"server": "shard-0"}``."""
    error: str = "UnavailableError"
    """Name of the class of ``shardwell_wire.errors`` to raise."""
    delay_s: float = 0.1
    """Duration of ``delay`` in seconds. The whole thread sleeps, also an event loop."""
    once: str = ""
    """Path of a file that is created when the fault happens. A fault whose file exists does not happen again, for
    example in the next process. Empty: no file."""

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ValueError(f"the fault point {self.point!r} does not exist; existing points: {', '.join(POINTS)}")
        if self.action not in ACTIONS:
            raise ValueError(f"action is {self.action!r}, expected one of {', '.join(ACTIONS)}")
        if self.nth < 1:
            raise ValueError(f"nth is {self.nth}, expected at least 1")
        if self.action == "raise":
            _error_class(self.error)


Handler = Callable[[Mapping[str, Any]], None]
"""Called with the details of an occurrence."""


class ArmedPoint:
    """A point that is armed in this process. Thread-safe.

    Args:
        nth: Occurrence at which ``handler`` is called.
        where: Details that the occurrence must have.
        handler: Called once, at that occurrence.

    Attributes:
        count: Number of occurrences so far.
    """

    def __init__(self, nth: int, where: Mapping[str, Any], handler: Handler) -> None:
        self.count = 0
        self._nth, self._where, self._handler = nth, where, handler
        self._lock = threading.Lock()

    @property
    def has_happened(self) -> bool:
        """Whether the occurrence was reached at which the handler is called."""
        return self.count >= self._nth

    def reached(self, details: Mapping[str, Any]) -> None:
        """Counts an occurrence and calls the handler if it is the chosen one."""
        known = {**_process, **details}
        if any(known.get(name) != value for name, value in self._where.items()):
            return
        with self._lock:
            self.count += 1
            chosen = self.count == self._nth
        if chosen:
            self._handler(known)


armed_points: dict[str, tuple[ArmedPoint, ...]] = {}
"""The points that a test armed in this process, by name. Entries are replaced as a whole: readers need no lock."""
_process: dict[str, Any] = {}


def reach(name: str, **details: Any) -> None:
    """Marks a point. Does nothing unless a test armed the point.

    Args:
        name: A name of ``POINTS``.
        **details: Facts about this occurrence, for ``Fault.where``.
    """
    if armed_points:
        for point in armed_points.get(name, ()):
            point.reached(details)


def are_armed(name: str | None = None) -> bool:
    """Returns whether a test armed a point in this process. None: any point."""
    return bool(armed_points) if name is None else name in armed_points


def describe_process(**details: Any) -> None:
    """Adds details to every occurrence in this process, such as ``server="shard-0"``."""
    _process.update(details)


@contextmanager
def armed(
    name: str,
    action: str | Handler,
    *,
    nth: int = 1,
    error: str = "UnavailableError",
    delay_s: float = 0.1,
    **where: Any,
) -> Iterator[ArmedPoint]:
    """Arms a point in this process while the block runs.

    Args:
        name: A name of ``POINTS``.
        action: As in ``Fault.action``, or a function. The function is called with the details of the occurrence.
        nth: See ``Fault.nth``.
        error: See ``Fault.error``.
        delay_s: See ``Fault.delay_s``.
        **where: See ``Fault.where``.
    """
    if callable(action):
        Fault(point=name, action="delay", nth=nth)  # checks the name
        handler = action
    else:
        handler = _handler(Fault(point=name, action=action, nth=nth, error=error, delay_s=delay_s))
    point = ArmedPoint(nth, where, handler)
    armed_points[name] = (*armed_points.get(name, ()), point)
    try:
        yield point
    finally:
        remaining = tuple(each for each in armed_points[name] if each is not point)
        if remaining:
            armed_points[name] = remaining
        else:
            del armed_points[name]


def environment(*faults: Fault) -> dict[str, str]:
    """Returns the environment variable that arms faults in a child process."""
    return {VARIABLE: json.dumps([asdict(fault) for fault in faults])}


def _handler(fault: Fault) -> Handler:
    def happen(details: Mapping[str, Any]) -> None:
        if fault.once:
            try:
                os.close(os.open(fault.once, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        logger.warning("fault point %s: %s %s", fault.point, fault.action, dict(details))
        match fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "delay":
                time.sleep(fault.delay_s)
            case _:
                raise _error_class(fault.error)(f"fault point {fault.point}: raised by a test")

    return happen


def _error_class(name: str) -> type[errors.ShardwellError]:
    found = getattr(errors, name, None)
    if not (isinstance(found, type) and issubclass(found, errors.ShardwellError)):
        raise ValueError(f"error is {name!r}, expected the name of a class of shardwell_wire.errors")
    return found


def arm_from_environment() -> None:
    """Arms exactly the faults in this process's environment. Called at import, and in a process that was forked."""
    armed_points.clear()
    given = os.environ.get(VARIABLE, "[]")
    if given != "[]" and not _TESTS.is_dir():
        logger.warning("%s is ignored: only a source tree with the tests arms fault points", VARIABLE)
        return
    for fields in json.loads(given):
        fault = Fault(**fields)
        armed_points[fault.point] = (
            *armed_points.get(fault.point, ()),
            ArmedPoint(fault.nth, fault.where, _handler(fault)),
        )


arm_from_environment()
