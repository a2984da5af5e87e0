"""Ends calls to another shard server that has fallen silent, such as a stopped process or an unreachable host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from shardwell_wire.errors import DeadlineError, ShardwellError, UnavailableError

Result = TypeVar("Result")

_ASK_AFTER_S = 1.0
"""Longest time that a call is in flight before the server is asked whether it lives."""
_LEAST_ANSWER_S = 2.0
"""How long to wait for the answer at least, unless a lease is shorter. A busy host may stall a process for a second."""


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """How long a server may be silent while a call to it is in flight. Both together are less than a lease and 1 s."""

    ask_after_s: float
    """Time in seconds after which the server is asked whether it lives. It is asked again after each answer."""
    answer_s: float
    """Longest time in seconds until it answers."""

    @classmethod
    def of_lease(cls, lease_s: float) -> SilenceLimits:
        """Returns the limits for a lease of a server."""
        return cls(min(_ASK_AFTER_S, lease_s / 4), max(lease_s / 2, min(_LEAST_ANSWER_S, lease_s)))


async def unless_silent(
    work: Awaitable[Result], ask: Callable[[float], Awaitable[object]], limits: SilenceLimits
) -> Result:
    """Awaits work on another server while that server answers questions. Cancels the work otherwise.

    The work may take any time. A server that is busy with it still answers, because requests do not block its event
    loop.

    Args:
        work: Calls to the server.
        ask: Sends a question to it, with a deadline in seconds.
        limits: How long the server may be silent.

    Raises:
        UnavailableError: The server did not answer a question in time.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=limits.ask_after_s))[0]:
            try:
                await ask(limits.answer_s)
            except DeadlineError as error:
                if not task.done():
                    raise UnavailableError(f"its server has been silent for {limits.answer_s:g} s") from error
            except ShardwellError:
                pass  # an error is an answer, and the work finds out what it means
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
