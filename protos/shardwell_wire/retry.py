"""Retries with exponential backoff, for threads and for asyncio.

tenacity is not used: it adds 30 to 50 µs to every call that succeeds at once, and its retry state keeps the traceback
of a failed attempt, with the buffers in its frames, until a garbage collection.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from shardwell_wire.errors import UnavailableError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Errors = type[Exception] | tuple[type[Exception], ...]
Check = Callable[[Exception], None]
"""Called with the error of each failed attempt, before the pause. Raises to stop retrying."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0

MAX_CORRUPT = 3
"""Attempts of one transfer whose bytes may arrive with a wrong checksum, one after the other, before it fails."""


def backoff(first_s: float = FIRST_PAUSE_S, longest_s: float = LONGEST_PAUSE_S) -> Iterator[float]:
    """Yields growing pauses in seconds, without end.

    Each pause is 0.5 to 1 times a bound that doubles up to ``longest_s``. The random factor keeps clients that failed
    together from retrying together.
    """
    bound_s = first_s
    while True:
        yield bound_s * random.uniform(0.5, 1.0)
        bound_s = min(2 * bound_s, longest_s)


def retry(
    action: Callable[[], Result],
    *,
    limit_s: float = math.inf,
    errors: Errors = UnavailableError,
    check: Check | None = None,
    longest_pause_s: float = LONGEST_PAUSE_S,
    sleep: Callable[[float], object] = time.sleep,
) -> Result:
    """Calls ``action`` until it succeeds.

    Args:
        action: Must be safe to repeat.
        limit_s: Seconds since the first attempt after which no other attempt starts. 0: a single attempt.
        errors: Errors that are retried. Any other error is raised at once.
        check: See ``Check``.
        longest_pause_s: Upper bound of the pause between two attempts, in seconds.
        sleep: Pauses for a number of seconds, such as ``threading.Event.wait``.

    Returns:
        What ``action`` returned.

    Raises:
        Exception: The last error of ``action`` once ``limit_s`` is over, or what ``check`` raised.
    """
    deadline = time.monotonic() + limit_s
    pauses: Iterator[float] | None = None
    while True:
        try:
            return action()
        except errors as error:
            pauses = pauses or backoff(longest_s=longest_pause_s)
            if (pause_s := _pause_after(error, next(pauses), deadline, check)) is None:
                raise
        sleep(pause_s)


async def retry_async(
    action: Callable[[], Awaitable[Result]],
    *,
    limit_s: float = math.inf,
    errors: Errors = UnavailableError,
    check: Check | None = None,
    longest_pause_s: float = LONGEST_PAUSE_S,
) -> Result:
    """``retry`` on an event loop: awaits ``action``, and does not block while it pauses. Uses the loop's clock."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + limit_s
    pauses: Iterator[float] | None = None
    while True:
        try:
            return await action()
        except errors as error:
            pauses = pauses or backoff(longest_s=longest_pause_s)
            if (pause_s := _pause_after(error, next(pauses), deadline, check, clock)) is None:
                raise
        await asyncio.sleep(pause_s)


def _pause_after(
    error: Exception, pause_s: float, deadline: float, check: Check | None, clock: Callable[[], float] = time.monotonic
) -> float | None:
    """Returns the pause before the next attempt in seconds; None if there is no time left for one."""
    if check is not None:
        check(error)
    if clock() + pause_s > deadline:
        return None
    logger.debug("retrying in %.2f s: %s", pause_s, error)
    return pause_s
