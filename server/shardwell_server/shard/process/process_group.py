"""Several shard servers of one host: started together, stopped together, none left behind."""

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
"""A child that was told to stop gets this long: more than a clean stop takes, also on an overloaded host."""


def member_settings(
    settings: Mapping[str, Any], *, server_id: str, memory_budget_bytes: int, bind: str
) -> list[dict[str, Any]]:
    """The settings of each shard server of a group.

    Args:
        settings: Of the whole group, by the names of ``shardwell-server shard``'s options.
        server_id: Name of the group; its members are ``<server_id>-0`` and so on.
        memory_budget_bytes: Of the whole group; shared out evenly.
        bind: host:port; members take consecutive ports from it on, or free ones if it is 0.

    Raises:
        ValueError: There are not so many ports.
    """
    host, _, first_port = bind.rpartition(":")
    count, port = settings["processes"], int(first_port)
    if port + count - 1 > 65535:
        raise ValueError(f"--processes {count} with --listen {bind}: the last port would be {port + count - 1}")
    return [
        {
            **settings,
            "processes": 1,
            "id": f"{server_id}-{number}",
            "memory_budget": memory_budget_bytes // count,
            "listen": f"{host}:{port and port + number}",
            "exit_with_parent": True,
        }
        for number in range(count)
    ]


def command_line(settings: Mapping[str, Any]) -> list[str]:
    """The command that starts one shard server with these settings."""
    words = [sys.executable, "-m", "shardwell_server", "shard"]
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words.append(f"{option}={value}")
    return words


class ProcessGroup:
    """Shard servers as child processes.

    Each lives in a session of its own, so that a terminal's Ctrl-C reaches it through this process only,
    and reads a pipe that this process holds open: it stops when this process ends, whatever ends it.

    Args:
        members: Settings by which to start each one; see ``member_settings``.
    """

    def __init__(self, members: Iterable[Mapping[str, Any]]) -> None:
        self._members = list(members)
        self._children: dict[asyncio.Task[int], tuple[str, Process]] = {}
        """By what waits for its end, until that was seen."""

    async def run(self, endpoint: Endpoint) -> int:
        """Runs all of them until SIGTERM, SIGINT, the starter's end, or until one fails.

        Returns:
            An exit code: 0 if every child stopped cleanly.
        """
        stop = stop_event(endpoint)
        try:
            for settings in self._members:
                await self._start(settings)
            healthy = await self._until_stop(stop)
        finally:
            clean = await self._end()
        return 0 if healthy and clean else 1

    async def _start(self, settings: Mapping[str, Any]) -> None:
        child = await asyncio.create_subprocess_exec(
            *command_line(settings), stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self._children[asyncio.ensure_future(_relay(child))] = (settings["id"], child)

    async def _until_stop(self, stop: asyncio.Event) -> bool:
        """Waits until all shall stop or have stopped; False at once if one fails."""
        told = asyncio.ensure_future(stop.wait())
        try:
            while self._children and not stop.is_set():
                await asyncio.wait({told, *self._children}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in self._children if task.done()]:
                    name, child = self._children.pop(task)
                    if (code := task.result()) != 0:
                        ended = f"{name} (process {child.pid}) ended {_how(code)}"
                        logger.error("%s; stopping the other %d", ended, len(self._children))
                        return False
                    logger.info("%s (process %d) stopped", name, child.pid)
            return True
        finally:
            told.cancel()

    async def _end(self) -> bool:
        """Stops what still runs, kills what does not; returns whether that was not needed."""
        children, self._children = self._children, {}
        for _, child in children.values():
            if child.returncode is None:
                child.terminate()
        if not children:
            return True
        _, late = await asyncio.wait(children, timeout=_KILL_AFTER_S)
        for name, child in (children[task] for task in late):
            logger.error("%s (process %d) did not stop within %.0f s; killing it", name, child.pid, _KILL_AFTER_S)
            child.kill()
        codes = await asyncio.gather(*children)
        # A child that was still importing its modules is ended by the signal itself.
        return all(code in (0, -signal.SIGTERM) for code in codes)


async def _relay(child: Process) -> int:
    """Copies a child's lines to standard output; returns its exit code when it has ended."""
    assert child.stdout is not None
    async for line in child.stdout:
        sys.stdout.write(line.decode())
        sys.stdout.flush()
    return await child.wait()


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
