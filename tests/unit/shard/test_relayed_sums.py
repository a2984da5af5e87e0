"""Gradients that a relay adds: one push for each group, with the bits of the run's order, and none that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from shardwell_server.shard.requests import relayed_shards
from shardwell_server.shard.requests.relayed_shards import RelayedGradient, RelayedShard, RelayedSums
from shardwell_wire.errors import InvalidRequestError, StepStateError
from shardwell_wire.model.layout import BLOCK_BYTES, Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.model.sum_order import Scratch, SumOrder
from shardwell_wire.v1 import common_pb2, shard_pb2

RUN = RunIdentity("r", "id-of-r")
LAYOUT = UnitLayout(
    "u", (Parameter("a", (3001,), "float32"), Parameter("b", (7,), "float64"), Parameter("c", (4999,), "bfloat16"))
)
START, STOP = BLOCK_BYTES, LAYOUT.size_bytes
WIDE = (0, 1)
"""The parameters of 32 and 64 bits."""


class _Memory:
    async def acquire(self, size_bytes: int, wait_s: float, what: str) -> torch.Tensor:
        return torch.full((size_bytes,), 255, dtype=torch.uint8)

    def release_buffer(self, buffer: torch.Tensor) -> None:
        buffer.zero_()

    async def in_thread(self, work: Any) -> Any:
        return await asyncio.to_thread(work)


class _Store:
    memory = _Memory()


class _Owners:
    """Keeps the pushes that arrive at the owners."""

    def __init__(self) -> None:
        self.pushed: list[tuple[shard_pb2.ReduceScatterHeader, bytes]] = []
        self.error: Exception | None = None

    async def push(
        self, run: RunIdentity, header: shard_pb2.ReduceScatterHeader, pieces: Sequence[memoryview]
    ) -> shard_pb2.ReduceScatterResponse:
        assert run == RUN
        if self.error is not None:
            raise self.error
        self.pushed.append((header, b"".join(pieces)))
        return shard_pb2.ReduceScatterResponse(version=header.context.step)


class _Buffer:
    def __init__(self, flats: Mapping[int, torch.Tensor]) -> None:
        self.buffer = torch.zeros(STOP - START, dtype=torch.uint8)
        for at in LAYOUT.packed_segments(tuple(sorted(flats)), START, STOP):
            part = flats[at.parameter_index][at.start_element : at.stop_element]
            self.buffer[at.start_bytes - START : at.stop_bytes - START] = part.view(torch.uint8)


class Relaying:
    """The relay of one run."""

    def __init__(self, dp: int, groups: tuple[int, ...] = ()) -> None:
        self.order, self.owners = SumOrder(dp, groups), _Owners()
        store: Any = _Store()
        owners: Any = self.owners
        self.sums = RelayedSums(RUN, store, owners)
        self.shard = RelayedShard(RUN, LAYOUT, START, STOP, self.order)

    def push(
        self, rank: int, flats: Mapping[int, torch.Tensor], group: tuple[int, ...], step: int = 0, **fields: Any
    ) -> asyncio.Task[shard_pb2.ReduceGradientBufferResponse]:
        header = shard_pb2.ReduceScatterHeader(
            context=common_pb2.RequestContext(run="r", step=step, epoch=10 + rank, lease_proof=bytes([rank])),
            unit="u",
            dp_rank=rank,
            parameter_indices=sorted(flats),
            start_bytes=START,
            stop_bytes=STOP,
            **fields,
        )
        buffer: Any = _Buffer(flats)
        return asyncio.ensure_future(self.sums.push(RelayedGradient(header, self.shard, buffer), group))

    def stream_of(self, flats: Mapping[int, torch.Tensor]) -> bytes:
        return b"".join(
            bytes(flats[at.parameter_index][at.start_element : at.stop_element].view(torch.uint8).tolist())
            for at in LAYOUT.packed_segments(tuple(sorted(flats)), START, STOP)
        )

    def added(self, own: Mapping[int, Mapping[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
        found = {}
        for index in sorted({index for each in own.values() for index in each}):
            terms = [(rank, each[index]) for rank, each in sorted(own.items()) if index in each]
            found[index] = self.order.add(terms, torch.empty_like(terms[0][1]), Scratch()).clone()
        return found


def gradients(rank: int, indices: Sequence[int] = WIDE) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {
        index: torch.randn(at.numel, generator=generator).to(getattr(torch, at.dtype))
        for index, at in enumerate(LAYOUT.parameters)
        if index in indices
    }


@pytest.mark.parametrize(
    ("group", "dp", "groups"), [((0, 1), 2, ()), ((4, 5, 6, 7), 8, (2, 2, 2)), ((0, 1, 2), 6, (3, 2))]
)
async def test_one_sum_is_pushed_for_all_ranks(group: tuple[int, ...], dp: int, groups: tuple[int, ...]) -> None:
    relaying = Relaying(dp, groups)
    own = {rank: gradients(rank) for rank in group}
    answers = await asyncio.gather(*(relaying.push(rank, own[rank], group) for rank in reversed(group)))
    ((header, stream),) = relaying.owners.pushed
    assert stream == relaying.stream_of(relaying.added(own))
    assert [(at.dp_rank, at.epoch, at.lease_proof) for at in header.summed] == [
        (rank, 10 + rank, bytes([rank])) for rank in group
    ]
    assert header.dp_rank == group[0]
    assert [list(answer.summed_dp_ranks) for answer in answers] == [list(group)] * len(group)
    assert sorted(answer.pushed_bytes for answer in answers) == [0] * (len(group) - 1) + [len(stream)]
    assert not any(answer.adopted for answer in answers)


async def test_parameters_without_a_gradient_on_some_ranks() -> None:
    relaying = Relaying(2)
    own = {0: gradients(0, (0,)), 1: gradients(1, (0, 1))}
    await asyncio.gather(*(relaying.push(rank, own[rank], (0, 1)) for rank in own))
    ((header, stream),) = relaying.owners.pushed
    assert list(header.parameter_indices) == [0, 1]
    assert stream == relaying.stream_of(relaying.added(own))


async def test_late_rank_is_not_awaited_any_more_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed_shards, "PATIENCE_S", 0.01)
    relaying = Relaying(2)
    answer = await relaying.push(0, gradients(0), (0, 1))
    late = await relaying.push(1, gradients(1), (0, 1))
    assert not answer.summed_dp_ranks and not late.summed_dp_ranks
    assert [stream for _, stream in relaying.owners.pushed] == [relaying.stream_of(gradients(rank)) for rank in (0, 1)]
    assert answer.pushed_bytes == late.pushed_bytes == len(relaying.owners.pushed[0][1])
    both = await asyncio.gather(*(relaying.push(rank, gradients(rank), (0, 1), step=1) for rank in (0, 1)))
    assert all(answer.summed_dp_ranks == [0, 1] for answer in both)


async def pushed_together(relaying: Relaying, step: int) -> bool:
    both = await asyncio.gather(*(relaying.push(rank, gradients(rank), (0, 1), step=step) for rank in (0, 1)))
    summed = {tuple(answer.summed_dp_ranks) for answer in both}
    assert summed in ({(0, 1)}, {()})
    return summed == {(0, 1)}


@pytest.mark.parametrize("how", ["open", "skip"])
async def test_rank_that_is_late_in_several_steps_is_awaited_when_it_joins_again(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    relaying = Relaying(2)
    for rank in (0, 1):
        relaying.sums.enter(rank)
    assert await pushed_together(relaying, 0)
    monkeypatch.setattr(relayed_shards, "PATIENCE_S", 0.01)
    for step in range(1, 1 + relayed_shards.MAX_MISSED):
        await relaying.push(0, gradients(0), (0, 1), step=step)
    monkeypatch.setattr(relayed_shards, "PATIENCE_S", 1000.0)
    relaying.sums.skip((0, 1), 9, 0)  # the rank that came says nothing about the one that did not
    assert not await pushed_together(relaying, 10)
    if how == "open":
        relaying.sums.leave(1)
        relaying.sums.enter(1)
        assert not await pushed_together(relaying, 11)
    else:
        relaying.sums.skip((0, 1), 11, 1)
    assert await pushed_together(relaying, 12)


async def test_rank_that_is_new_after_the_first_step_is_not_awaited() -> None:
    """Its trainer builds its model, or has pushed a part of the step to the servers."""
    relaying = Relaying(2)
    relaying.sums.enter(0)
    assert not (await relaying.push(0, gradients(0), (0, 1), step=1)).summed_dp_ranks
    relaying.sums.enter(1)
    assert not (await relaying.push(0, gradients(0), (0, 1), step=2)).summed_dp_ranks
    assert not (await relaying.push(1, gradients(1), (0, 1), step=2)).summed_dp_ranks
    assert await pushed_together(relaying, 3)


@pytest.mark.parametrize("how", ["leave", "skip"])
async def test_rank_that_does_not_come_ends_the_wait(how: str) -> None:
    relaying = Relaying(2)
    for rank in (0, 1):
        relaying.sums.enter(rank)
    waiting = relaying.push(0, gradients(0), (0, 1))
    await asyncio.sleep(0)
    if how == "leave":
        relaying.sums.leave(1)
    else:
        relaying.sums.skip((0, 1), 0, 1)
    assert not (await waiting).summed_dp_ranks
    assert not (await relaying.push(0, gradients(0), (0, 1))).summed_dp_ranks
    if how == "leave":
        relaying.sums.enter(1)
        assert not await pushed_together(relaying, 1)
    assert await pushed_together(relaying, 2)


async def test_cancelled_push_is_in_no_sum() -> None:
    relaying = Relaying(2)
    lost = relaying.push(0, gradients(0), (0, 1))
    await asyncio.sleep(0)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    again = {0: gradients(2), 1: gradients(1)}
    await asyncio.gather(*(relaying.push(rank, own, (0, 1)) for rank, own in again.items()))
    ((_, stream),) = relaying.owners.pushed
    assert stream == relaying.stream_of(relaying.added(again))


async def test_error_of_the_owner_reaches_all_ranks() -> None:
    relaying = Relaying(2)
    relaying.owners.error = StepStateError("the step is prepared")
    pushes = [relaying.push(rank, gradients(rank), (0, 1)) for rank in (0, 1)]
    errors = await asyncio.gather(*pushes, return_exceptions=True)
    assert [type(error) for error in errors] == [StepStateError] * 2


@pytest.mark.parametrize(
    ("indices", "fields"), [((0, 2), {}), ((0,), {"part": 1}), ((0,), {"dropped_indices": [1]}), ((0,), {"copy": True})]
)
async def test_gradients_that_servers_must_add_are_pushed_alone(
    indices: tuple[int, ...], fields: dict[str, Any]
) -> None:
    relaying = Relaying(2)
    answer = await relaying.push(0, gradients(0, indices), (0, 1), **fields)
    ((header, stream),) = relaying.owners.pushed
    assert not answer.summed_dp_ranks and not header.summed
    assert stream == relaying.stream_of(gradients(0, indices))


async def test_push_that_does_not_fit_the_shard_is_refused() -> None:
    relaying = Relaying(2)
    for fields in ({"wire_dtype": common_pb2.WIRE_DTYPE_BFLOAT16}, {"summed": [shard_pb2.SummedRank(dp_rank=0)]}):
        with pytest.raises(InvalidRequestError):
            await relaying.push(0, gradients(0), (0, 1), **fields)
    assert not relaying.owners.pushed
