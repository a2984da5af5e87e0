"""What a shard server does first when it is stopped: it waits until other servers have its shards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shardwell_wire.errors import DeadlineError, ShardwellError, UnavailableError
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_POLL_S = 0.2
"""Pause between two questions to the coordinator."""
_STUCK_S = 1.0
"""How long the number of shards may stay the same while no other server can take the rest."""
_SILENCE_S = 3.0
"""How long a coordinator that has answered before may be unreachable, for example because it is started again."""


async def drain(ask: Callable[[], Awaitable[coordinator_pb2.DrainServerResponse]], limit_s: float) -> bool:
    """Moves the shards of this server to other servers.

    Args:
        ask: Calls ``DrainServer``, which starts the moves and reports the progress.
        limit_s: Longest time to wait, in seconds.

    Returns:
        True if the server has no shards left. False if the coordinator cannot be reached, no other server can take the
        rest, or the time is over.
    """
    loop = asyncio.get_running_loop()
    now = loop.time()
    deadline, last_answer_s, last_progress_s, left = now + limit_s, -1.0, now, -1
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                answer = await ask()
        except (UnavailableError, DeadlineError, TimeoutError) as error:
            now = loop.time()
            if last_answer_s < 0 or now > min(deadline, last_answer_s + _SILENCE_S):
                logger.warning("the shards of this server do not move, because the coordinator is gone: %s", error)
                return False
        except ShardwellError as error:
            logger.warning("the shards of this server do not move: %s", error)
            return False
        else:
            last_answer_s = now = loop.time()
            if not answer.shard_count:
                return True
            if left < 0:
                logger.info("moving %d shards to other servers", answer.shard_count)
            if answer.shard_count != left:
                left, last_progress_s = answer.shard_count, now
            if answer.waiting_for and now - last_progress_s > _STUCK_S:
                logger.warning("%d shards stay on this server: %s", left, "; ".join(answer.waiting_for))
                return False
            if now > deadline:
                logger.warning("%d shards stay on this server: they were not moved within %g s", left, limit_s)
                return False
        await asyncio.sleep(_POLL_S)
