"""Several shard servers of one host, started and stopped together."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable, Mapping
from typing import Any

from shardwell_server.process import Endpoint, stop_event

logger = logging.getLogger(__name__)

_KILL_AFTER_S = 30.0
"""A child is killed after this time. A clean stop takes less, even on an overloaded host."""


def member_settings(
    settings: Mapping[str, Any], *, server_id: str, memory_budget_bytes: int, bind: str
) -> list[dict[str, Any]]:
    """Returns the settings of each shard server in a group.

    Args:
        settings: Settings of the group, by the names of the options of ``shardwell-server shard``.
        server_id: Name of the group. Its members are ``<server_id>-0``, ``<server_id>-1`` and so on.
        memory_budget_bytes: Budget of the group, divided evenly.
        bind: host:port. Members listen on consecutive ports from this one, or on free ports if it is 0.

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


class ProcessGroup:
    """Shard servers as child processes. Used on the event loop.

    Each child has its own session, so that Ctrl-C in a terminal reaches it through this process only. Each child reads
    a pipe that this process keeps open. When this process ends for any reason, the pipe closes and the child stops.

    Args:
        members: Settings of each child; see ``member_settings``.
        drain_s: Longest time in which a child moves its shards to other servers after SIGTERM.
    """

    def __init__(self, members: Iterable[Mapping[str, Any]], drain_s: float = 0.0) -> None:
        self._members, self._drain_s = list(members), drain_s
        self._children: dict[asyncio.Task[int], tuple[str, Process]] = {}
        """Name and process of each running child, by the task that waits for its end."""

    async def run(self, endpoint: Endpoint) -> int:
        """Runs all children until SIGTERM, SIGINT, the end of the parent process, or the failure of a child.

        After the first SIGTERM, the children drain. A second signal, SIGINT and the end of the parent stop them at
        once.

        Returns:
            An exit code: 0 if every child stopped cleanly.
        """
        leaving = asyncio.Event()
        stop = stop_event(endpoint, first_sigterm=leaving)
        try:
            for settings in self._members:
                await self._start(settings)
            healthy = await self._until_stop(stop, leaving)
        finally:
            clean = await self._end(stop)
        return 0 if healthy and clean else 1

    async def _start(self, settings: Mapping[str, Any]) -> None:
        child = await asyncio.create_subprocess_exec(
            *command_line(settings), stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self._children[asyncio.ensure_future(_relay(child))] = (settings["id"], child)

    async def _until_stop(self, *events: asyncio.Event) -> bool:
        """Waits until an event is set or all children have stopped. Returns False at once if a child fails."""
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            while self._children and not any(event.is_set() for event in events):
                await asyncio.wait({*waits, *self._children}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in self._children if task.done()]:
                    name, child = self._children.pop(task)
                    if (code := task.result()) != 0:
                        ended = f"{name} (process {child.pid}) ended {_describe_exit(code)}"
                        logger.error("%s; stopping the other %d", ended, len(self._children))
                        return False
                    logger.info("%s (process %d) stopped", name, child.pid)
            return True
        finally:
            for wait in waits:
                wait.cancel()

    async def _end(self, stop: asyncio.Event) -> bool:
        """Stops the running children, at once when ``stop`` is set, and kills those that do not stop.

        Returns:
            True if all stopped cleanly.
        """
        children, self._children = self._children, {}
        for _, child in children.values():
            if child.returncode is None:
                child.terminate()
        if not children:
            return True
        limit_s = self._drain_s + _KILL_AFTER_S
        stop_wait = asyncio.ensure_future(stop.wait())
        stop_wait.add_done_callback(lambda _: _close_inputs(child for _, child in children.values()))
        _, late = await asyncio.wait(children, timeout=limit_s)
        stop_wait.cancel()
        for name, child in (children[task] for task in late):
            logger.error("%s (process %d) did not stop within %.0f s; killing it", name, child.pid, limit_s)
            child.kill()
        codes = await asyncio.gather(*children)
        # A child that is still importing modules has no signal handler yet, so SIGTERM kills it.
        return all(code in (0, -signal.SIGTERM) for code in codes)


def _close_inputs(children: Iterable[Process]) -> None:
    """Closes the standard input of children, which ends them without draining."""
    for child in children:
        if child.stdin is not None:
            child.stdin.close()


async def _relay(child: Process) -> int:
    """Copies a child's output to standard output; returns its exit code."""
    assert child.stdout is not None
    async for line in child.stdout:
        sys.stdout.write(line.decode())
        sys.stdout.flush()
    return await child.wait()


def _describe_exit(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
