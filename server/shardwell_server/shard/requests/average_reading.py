"""How the moving averages of a shard are read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shardwell_server.shard.state.parameters import Parameters
from shardwell_server.shard.state.runs import Run
from shardwell_server.shard.state.store import ShardStore
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire.errors import VersionGoneError


@asynccontextmanager
async def reading(
    store: ShardStore, run: Run, shard: UnitShard, version: int | None, wait_s: float
) -> AsyncIterator[tuple[int, Parameters]]:
    """A copy of a shard in which averages take the place of values, and the version it is of.

    Args:
        store: Lends memory and threads.
        run: The run.
        shard: One of its shards.
        version: None: the newest there is.
        wait_s: How long to wait for it to exist, and for room.

    Raises:
        StepStateError: The last step was not averaged.
        VersionGoneError: There is a newer version.
        CapacityError: There was no room in time.
        ShardwellError: As reading the values.
    """
    newest, values = await shard.values.read(version, wait_s)
    shard.values.release(values)
    # Before its turn on the run comes: what makes room may need that turn.
    copy = await store.memory.lend(shard.size_bytes, wait_s, f"{shard.what}, to read averages")

    async def take() -> None:
        if shard.version != newest or shard.values.updating:
            raise VersionGoneError(
                f"version {newest} of {shard.what} has been overwritten", unit=shard.unit, version=newest
            )
        shard.check_averaged()
        await store.in_thread(lambda: shard.compute_averages(copy))
        shard.copies.add(averages)

    averages = Parameters(copy, newest, readers=1)
    try:
        await run.alone(take)
    except BaseException:
        store.memory.take_back(copy)
        raise
    try:
        yield newest, averages
    finally:
        shard.copies.release(averages)
