"""Versions that somebody keeps readable while training goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shardwell_server.shard.state.parameters import Parameters
from shardwell_server.shard.state.runs import Run
from shardwell_server.shard.state.values import Values


@asynccontextmanager
async def holding(run: Run, version: int, wait_s: float) -> AsyncIterator[int]:
    """Keeps one version of all of a run's shards here for readers.

    The next update leaves it in copies, as far as there is room; they give way when training needs it.

    Args:
        run: The run.
        version: Waited for until it exists.
        wait_s: How long, for all of them.

    Yields:
        The number of shards.

    Raises:
        DeadlineError: A shard is not of that version yet.
        VersionGoneError: It has been overwritten.
    """
    held: list[tuple[Values, Parameters]] = []
    give_up = asyncio.get_running_loop().time() + wait_s
    try:
        for shard in run.published:
            left_s = max(0.0, give_up - asyncio.get_running_loop().time())
            held.append((shard.values, await shard.values.hold(version, left_s)))
        yield len(held)
    finally:
        for values, parameters in held:
            values.let_go(parameters)
