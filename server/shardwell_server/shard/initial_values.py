"""How the initial values of a shard are received."""

from __future__ import annotations

from functools import partial

from shardwell_server.shard.store import ShardStore
from shardwell_server.shard.streams import IncomingStream
from shardwell_server.shard.unit_shard import UnitShard, first_non_finite
from shardwell_wire import codec
from shardwell_wire.errors import NonFiniteError, StaleEpochError
from shardwell_wire.v1 import shard_pb2


async def receive(
    store: ShardStore,
    shard: UnitShard,
    header: shard_pb2.InitializeUnitHeader,
    incoming: IncomingStream,
    wait_s: float,
) -> None:
    """Receives initial values; of several unfinished streams the newest counts.

    Values for a unit that is published are dropped.

    Raises:
        InvalidRequestError: They are not of the shard's range, or the stream is broken.
        StaleEpochError: Values of a newer epoch are here, or on their way.
        NonFiniteError: A value is NaN or infinity; nothing is kept.
        CapacityError: There was no room to receive them.
    """
    shard.check_range(header.start_bytes, header.stop_bytes)
    epoch, what = header.context.epoch, f"initial values of {shard.what}"
    if shard.version is not None:
        return

    async def take() -> None:
        _check_epoch(shard, epoch)
        room = store.memory.incoming(shard.size_bytes, shard.initial_cover, wait_s=wait_s, what=what)
        async with room as received:
            await incoming.into([codec.memory_at(received.buffer.data_ptr(), shard.size_bytes)], what)
            number = await store.in_thread(partial(first_non_finite, shard.views(received.buffer)))
            if number is not None:
                name = shard.layout.parameters[shard.segments[number].parameter_index].name
                raise NonFiniteError(f"the initial value of parameter {name!r} has NaN or infinity", parameter=name)
            if shard.version is None:
                shard.values.accept_initial(epoch, received)

    await shard.streams.replace("initial values", (epoch,), what, take)


def _check_epoch(shard: UnitShard, epoch: int) -> None:
    if epoch < shard.values.initial_epoch:
        raise StaleEpochError(
            f"{shard.what}: epoch {epoch} is over, the initial values of epoch {shard.values.initial_epoch} are here",
            epoch=epoch,
            newest=shard.values.initial_epoch,
        )
