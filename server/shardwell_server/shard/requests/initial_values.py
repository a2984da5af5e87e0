"""Initial values of a shard: received from a trainer, or drawn by the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from shardwell_server.shard.arithmetic import random_values
from shardwell_server.shard.requests.streams import IncomingStream
from shardwell_server.shard.state.store import ShardStore
from shardwell_server.shard.state.unit_shard import UnitShard, first_non_finite
from shardwell_wire import chunk_streams
from shardwell_wire.errors import InvalidRequestError, NonFiniteError, StaleEpochError
from shardwell_wire.layout import Segment
from shardwell_wire.v1 import initialization_pb2, shard_pb2

Draws = Mapping[int, initialization_pb2.ParameterDraw]
"""By parameter index."""


async def receive(
    store: ShardStore,
    shard: UnitShard,
    header: shard_pb2.InitializeUnitHeader,
    incoming: IncomingStream,
    wait_s: float,
) -> None:
    """Receives and draws the initial values of a shard. A newer stream replaces an unfinished one.

    Values for a published unit are ignored.

    Raises:
        NotFoundError: The range is not the shard's.
        InvalidRequestError: The stream is broken, or a distribution is invalid.
        StaleEpochError: The shard has values of a newer epoch, or a newer stream replaced this one.
        NonFiniteError: A value is NaN or infinity; nothing is stored.
        CapacityError: No memory became free in time.
    """
    shard.check_range(header.start_bytes, header.stop_bytes)
    draws = _checked_draws(shard, header)
    epoch, what = header.context.epoch, f"initial values of {shard.what}"
    if shard.version is not None:
        return

    async def receive_values() -> None:
        _check_epoch(shard, epoch)
        buffer = store.memory.incoming(shard.size_bytes, shard.initial_quota, wait_s=wait_s, what=what)
        async with buffer as received:
            _clear_gaps(shard, received.buffer)
            views = shard.views(received.buffer)
            await incoming.into(_streamed(shard.segments, views, draws), what)
            await store.in_thread(partial(_draw, shard, views, draws))
            number = None if shard.layout.holds_buffers else await store.in_thread(partial(first_non_finite, views))
            if number is not None:
                name = shard.layout.parameters[shard.segments[number].parameter_index].name
                raise NonFiniteError(f"the initial value of parameter {name!r} has NaN or infinity", parameter=name)
            if shard.version is None:
                shard.values.accept_initial(epoch, received)

    await shard.streams.replace("initial values", (epoch,), what, receive_values)


def _checked_draws(shard: UnitShard, header: shard_pb2.InitializeUnitHeader) -> Draws:
    draws: dict[int, initialization_pb2.ParameterDraw] = {}
    parameters = shard.layout.parameters
    if header.draws and shard.layout.holds_buffers:
        raise InvalidRequestError(f"{shard.what} holds buffers, whose values cannot be drawn: send them")
    for draw in header.draws:
        if draw.parameter_index >= len(parameters) or draw.parameter_index in draws:
            raise InvalidRequestError(
                f"{shard.what}: parameter_index is {draw.parameter_index} in draws, expected unique numbers below "
                f"{len(parameters)}"
            )
        random_values.check(draw, parameters[draw.parameter_index].name)
        draws[draw.parameter_index] = draw
    return draws


def _clear_gaps(shard: UnitShard, buffer: torch.Tensor) -> None:
    """Zeroes the padding between segments."""
    position = 0
    for segment in shard.segments:
        buffer[position : segment.start_bytes - shard.start_bytes].zero_()
        position = segment.stop_bytes - shard.start_bytes
    buffer[position:].zero_()


def _streamed(segments: Sequence[Segment], views: Sequence[torch.Tensor], draws: Draws) -> list[memoryview]:
    return [
        chunk_streams.memory_at(view.data_ptr(), view.nbytes)
        for segment, view in zip(segments, views, strict=True)
        if segment.parameter_index not in draws
    ]


def _draw(shard: UnitShard, views: Sequence[torch.Tensor], draws: Draws) -> None:
    for segment, view in zip(shard.segments, views, strict=True):
        if (draw := draws.get(segment.parameter_index)) is not None:
            box = shard.layout.parameters[segment.parameter_index].box
            random_values.fill(view, segment.start_element, draw, box)


def _check_epoch(shard: UnitShard, epoch: int) -> None:
    if epoch < shard.values.initial_epoch:
        raise StaleEpochError(
            f"initial values of {shard.what}: epoch {epoch} is over, the shard has values of epoch "
            f"{shard.values.initial_epoch}",
            epoch=epoch,
            newest=shard.values.initial_epoch,
        )
