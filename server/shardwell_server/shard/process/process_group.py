"""Several shard servers of one host, as child processes. One that fails is started again by itself."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shardwell_server.serving.process import Endpoint, stop_event
from shardwell_wire.connection.channel import backoff

logger = logging.getLogger(__name__)

STOP_S = 30.0
"""A clean stop without draining and saving takes less, even on an overloaded host."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
"""Pauses before a child that failed is started again."""
_STEADY_S = 10.0
"""A child that was ready for this time did not fail at its start."""
_MAX_FAILED_STARTS = 5
"""Failures in a row, each at a start, after which the command gives up."""


def member_settings(
    settings: Mapping[str, Any], *, server_id: str, memory_budget_bytes: int, bind: str, supervisor: str = ""
) -> list[dict[str, Any]]:
    """Returns the settings of each shard server in a group.

    Args:
        settings: Settings of the group, by the names of the options of ``shardwell-server shard``.
        server_id: Name of the group. Its members are ``<server_id>-0``, ``<server_id>-1`` and so on.
        memory_budget_bytes: Budget of the group, divided evenly.
        bind: host:port. Members listen on consecutive ports from this one, or on free ports if it is 0.
        supervisor: Identity of the process with whose end no later process takes up the members' shards. Empty: none.

    Raises:
        ValueError: The last port would exceed 65535.
    """
    host, _, first_port = bind.rpartition(":")
    count, port = settings["processes"], int(first_port)
    if port + count - 1 > 65535:
        raise ValueError(
            f"--processes {count} with --listen {bind}: the last port would be {port + count - 1}, expected at most "
            "65535"
        )
    return [
        {
            **settings,
            "processes": 1,
            "id": f"{server_id}-{number}",
            "memory_budget": memory_budget_bytes // count,
            "listen": f"{host}:{port and port + number}",
            "exit_with_parent": True,
            "supervisor": supervisor,
            # Consecutive ports, or free ones if the first is 0, or none.
            "metrics_port": settings["metrics_port"] and settings["metrics_port"] + number,
            "audit_log": settings["audit_log"] and f"{settings['audit_log']}-{number}",
        }
        for number in range(count)
    ]


def command_line(settings: Mapping[str, Any]) -> list[str]:
    """Returns the command line of one shard server with these settings."""
    words = [sys.executable, "-m", "shardwell_server", "shard"]
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words.append(f"{option}={value}")
    return words


class _Member:
    """One shard server of a group, in one process after the other.

    Args:
        settings: Its settings; see ``member_settings``.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self.name: str = settings["id"]
        self.process: Process | None = None
        """The running process. None: it has not started, or has ended."""
        self._was_ready = False
        """True if any process of the server has been ready."""
        self._ready_s: float | None = None
        """Time at which the process was ready. None: it is not ready yet."""
        self._failed_starts = 0
        self._pauses: Iterator[float] = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    async def run(self) -> bool:
        """Runs the server until a process of it ends cleanly. Starts it again after a failure.

        Returns:
            False if the server cannot be started.
        """
        while True:
            code = await self._run_once()
            if code == 0:
                return True
            if self._gives_up(code):
                return False
            await asyncio.sleep(next(self._pauses))

    async def _run_once(self) -> int:
        """Runs one process, and copies its output to standard output. Returns its exit code."""
        self._ready_s = None
        # Its own session: Ctrl-C in a terminal reaches it through this process only.
        self.process = child = await asyncio.create_subprocess_exec(
            *command_line(self._settings), stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self._ended = f"{self.name} (process {child.pid})"
        assert child.stdout is not None
        async for line in child.stdout:
            if self._ready_s is None and line.startswith(b"{"):
                self._note_ready(line)
            sys.stdout.write(line.decode())
            sys.stdout.flush()
        code = await child.wait()
        self.process = None
        if code == 0:
            logger.info("%s stopped", self._ended)
        return code

    def _note_ready(self, line: bytes) -> None:
        """Keeps the port, so that the next process has it too."""
        self._was_ready, self._ready_s = True, asyncio.get_running_loop().time()
        host, port = self._settings["listen"].rpartition(":")[0], json.loads(line)["address"].rpartition(":")[2]
        self._settings["listen"] = f"{host}:{port}"

    def _gives_up(self, code: int) -> bool:
        """Records a failure; returns True if the server is not started again."""
        how = f"{self._ended} ended {_describe_exit(code)}"
        if self._ready_s is not None and asyncio.get_running_loop().time() - self._ready_s > _STEADY_S:
            self._failed_starts, self._pauses = 0, backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        else:
            self._failed_starts += 1
        if code > 0 and not self._was_ready:  # such as an occupied port
            logger.error("%s before it was ready", how)
            return True
        if self._failed_starts >= _MAX_FAILED_STARTS:
            logger.error("%s at its start for the %dth time in a row", how, self._failed_starts)
            return True
        logger.warning("%s; starting it again, it takes up its shards", how)
        return False


class ProcessGroup:
    """Shard servers as child processes. Used on the event loop.

    Each child has its own session, so that Ctrl-C in a terminal reaches it through this process only. Each child reads
    a pipe that this process keeps open. When this process ends for any reason, the pipe closes and the child stops. A
    child that fails is started again with its name and port; the others go on.

    Args:
        members: Settings of each child; see ``member_settings``.
        stop_limit_s: Seconds after a request to stop when a child is killed. None: never.
    """

    def __init__(self, members: Iterable[Mapping[str, Any]], stop_limit_s: float | None = STOP_S) -> None:
        self.members, self._stop_limit_s = [_Member(settings) for settings in members], stop_limit_s
        self._running: dict[asyncio.Task[bool], _Member] = {}

    async def run(self, endpoint: Endpoint) -> int:
        """Runs all children until SIGTERM, SIGINT, the end of the parent process, or until one cannot be started.

        After the first SIGTERM, the children drain. A second signal, SIGINT and the end of the parent stop them at
        once.

        Returns:
            An exit code: 0 if every child stopped cleanly.
        """
        leaving = asyncio.Event()
        stop = stop_event(endpoint, first_sigterm=leaving)
        self._running = {asyncio.ensure_future(member.run()): member for member in self.members}
        try:
            healthy = await self._until_stop(stop, leaving)
        finally:
            clean = await self._end(stop)
        return 0 if healthy and clean else 1

    async def _until_stop(self, *events: asyncio.Event) -> bool:
        """Waits until an event is set or all children have stopped. Returns False at once if one cannot be started."""
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            while self._running and not any(event.is_set() for event in events):
                await asyncio.wait({*waits, *self._running}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in self._running if task.done()]:
                    del self._running[task]
                    if not task.result():
                        logger.error("stopping the other %d", len(self._running))
                        return False
            return True
        finally:
            for wait in waits:
                wait.cancel()

    async def _end(self, stop: asyncio.Event) -> bool:
        """Stops the running children, at once when ``stop`` is set, and kills those that do not stop.

        Returns:
            True if all stopped cleanly.
        """
        for task in self._running:
            task.cancel()  # nothing is started again
        await asyncio.gather(*self._running, return_exceptions=True)
        children = {
            asyncio.ensure_future(child.wait()): (member.name, child)
            for member in self._running.values()
            if (child := member.process) is not None
        }
        for _, child in children.values():
            if child.returncode is None:
                child.terminate()
        if not children:
            return True
        stop_wait = asyncio.ensure_future(stop.wait())
        stop_wait.add_done_callback(lambda _: _close_inputs(child for _, child in children.values()))
        _, late = await asyncio.wait(children, timeout=self._stop_limit_s)
        stop_wait.cancel()
        for name, child in (children[task] for task in late):
            logger.error("%s (process %d) did not stop within %.0f s; killing it", name, child.pid, self._stop_limit_s)
            child.kill()
        codes = await asyncio.gather(*children)
        # A child that is still importing modules has no signal handler yet, so SIGTERM kills it.
        return all(code in (0, -signal.SIGTERM) for code in codes)


def _close_inputs(children: Iterable[Process]) -> None:
    """Closes the standard input of children, which ends them without draining."""
    for child in children:
        if child.stdin is not None:
            child.stdin.close()


def _describe_exit(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
