"""Sums of several ranks' gradients on a shard server: accepted, counted, dropped and refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shardwell_wire.errors import IncompleteStepError, InvalidRequestError, StaleEpochError, StepStateError
from shardwell_wire.v1 import shard_pb2
from tests.support.shard_server import OneUnit, ShardServer, error_of, layout_of

LAYOUT = layout_of(a=((5, 3), "float32"), b=((7,), "float32"))
EPOCHS = (4, 5, 6, 7)


@pytest.fixture
def one(server: ShardServer) -> OneUnit:
    """A unit of four data ranks in groups of two."""
    unit = OneUnit(server, LAYOUT, dp=4)
    unit.reserve(reduction_groups=[2, 2])
    unit.initialize(unit.zeros())
    unit.publish()
    return unit


def gradients(one: OneUnit, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(value.shape, generator=generator) * 10.0**rank for value in one.zeros()]


def push_alone(one: OneUnit, rank: int, **options: Any) -> Any:
    return one.push(gradients(one, rank), rank=rank, **{"epoch": EPOCHS[rank]} | options)


def push_sum(one: OneUnit, ranks: Sequence[int], *, by: int | None = None, **options: Any) -> Any:
    """Pushes the sum of some ranks' gradients in rank order, as the first of them or as rank ``by``."""
    own = [gradients(one, rank) for rank in ranks]
    total = [torch.stack(terms)[0] for terms in zip(*own, strict=True)]
    for terms in own[1:]:
        total = [before + term for before, term in zip(total, terms, strict=True)]
    summed = [shard_pb2.SummedRank(dp_rank=rank, epoch=EPOCHS[rank]) for rank in ranks]
    rank = ranks[0] if by is None else by
    return one.push(total, **{"rank": rank, "epoch": EPOCHS[rank], "summed": summed} | options)


def commit(one: OneUnit) -> list[torch.Tensor]:
    """Commits step 0 and returns the weights."""
    one.prepare(0)
    one.update(0)
    values: list[torch.Tensor] = one.gather(1)[1]
    return values


def values_alone(server: ShardServer, groups: Sequence[int]) -> list[torch.Tensor]:
    """Returns the weights when every rank pushes its own gradient."""
    other = OneUnit(server, LAYOUT, dp=4, run="-".join(["alone", *map(str, groups)]))
    other.reserve(reduction_groups=groups)
    other.initialize(other.zeros())
    other.publish()
    for rank in range(4):
        push_alone(other, rank)
    return commit(other)


@pytest.mark.parametrize("alone", [(), (0, 1), (2, 3)])
def test_sums_give_the_bits_of_single_gradients(server: ShardServer, one: OneUnit, alone: tuple[int, ...]) -> None:
    for pair in ((0, 1), (2, 3)):
        if pair[0] in alone:
            for rank in pair:
                push_alone(one, rank)
        else:
            push_sum(one, pair, by=pair[1])
    weights = commit(one)
    assert all(map(torch.equal, weights, values_alone(server, (2, 2))))
    assert not all(map(torch.equal, weights, values_alone(server, ()))), "the order shows in the bits"


def test_sum_takes_the_memory_of_one_contribution(server: ShardServer, one: OneUnit) -> None:
    before = server.taken_bytes()
    push_sum(one, (0, 1))
    assert server.taken_bytes() - before == one.size
    push_sum(one, (2, 3))
    commit(one)
    assert (server.taken_bytes(), one.shard.gradient.contributions.by_rank) == (before, {})


def test_repeated_sum_is_dropped(one: OneUnit) -> None:
    assert not push_sum(one, (0, 1)).duplicate
    assert push_sum(one, (0, 1)).duplicate
    assert push_sum(one, (0, 1), by=1).duplicate


def test_fence_of_one_rank_drops_the_sum(server: ShardServer, one: OneUnit) -> None:
    before = server.taken_bytes()
    push_sum(one, (0, 1))
    push_sum(one, (2, 3))
    one.fence(0, (1, 9, 1))
    assert server.taken_bytes() - before == one.size
    error = error_of(lambda: one.prepare(0))
    assert isinstance(error, IncompleteStepError)
    assert "rank 0: expected 1 parts of attempt 0, have none; unit 'u': rank 1: expected 1" in str(error)
    stale = error_of(lambda: push_sum(one, (0, 1)))
    assert isinstance(stale, StaleEpochError), "the epoch of rank 1 is over"
    one.fence(0, (0, EPOCHS[0], 1))
    for rank, epoch in ((0, EPOCHS[0]), (1, 9)):
        push_alone(one, rank, epoch=epoch, attempt=1)
    one.prepare(0, (0, 1, 1), (1, 1, 1), (2, 0, 1), (3, 0, 1))
    one.update(0)
    assert all(map(torch.equal, one.gather(1)[1], values_alone(server, (2, 2))))


def test_late_sum_of_a_former_attempt_is_refused(one: OneUnit) -> None:
    one.fence(0, (1, EPOCHS[1], 1))
    error = error_of(lambda: push_sum(one, (0, 1)))
    assert isinstance(error, StaleEpochError)
    assert "rank 1 has begun attempt 1" in str(error)
    assert one.shard.gradient.contributions.by_rank == {}


def test_sums_and_single_gradients_do_not_mix_in_one_attempt(one: OneUnit) -> None:
    push_sum(one, (0, 1))
    for rank in (0, 1):
        error = error_of(lambda rank=rank: push_alone(one, rank))
        assert isinstance(error, StepStateError) and "either before they are pushed or on the server" in str(error)
    assert isinstance(error_of(lambda: push_alone(one, 0, part=1)), StepStateError)
    assert isinstance(error_of(lambda: push_sum(one, (0, 1, 2, 3))), StepStateError)
    push_alone(one, 2)
    assert isinstance(error_of(lambda: push_sum(one, (2, 3))), StepStateError)
    assert isinstance(error_of(lambda: push_sum(one, (2, 3), by=3)), StepStateError)
    push_alone(one, 3)
    one.prepare(0)


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        ((1, 2), {}, r"summed names the ranks \[1, 2\]; expected a reduction group.* in groups of \(2, 2\)"),
        ((0, 1, 2), {}, r"summed names the ranks \[0, 1, 2\]"),
        ((0, 1), {"rank": 2}, r"with rank 2 under epoch 4"),
        ((0, 1), {"epoch": 9}, r"with rank 0 under epoch 9"),
        ((0, 1), {"part": 1}, "a sum of several ranks is part 0"),
        ((0, 1), {"copy": True}, "copy True"),
        ((0, 1), {"dropped_indices": [0]}, "1 dropped_indices"),
    ],
)
def test_invalid_sum_is_refused(one: OneUnit, ranks: tuple[int, ...], changes: dict[str, Any], message: str) -> None:
    error = error_of(lambda: push_sum(one, ranks, **changes))
    assert isinstance(error, InvalidRequestError)
    with pytest.raises(InvalidRequestError, match=message):
        raise error
    assert one.shard.gradient.contributions.by_rank == {}


def test_16_bit_gradients_are_not_summed(server: ShardServer) -> None:
    one = OneUnit(server, layout_of(a=((4,), "bfloat16")), dp=2).begin()
    summed = [shard_pb2.SummedRank(dp_rank=rank, epoch=1) for rank in range(2)]
    error = error_of(lambda: one.push(one.filled(1.0), summed=summed))
    assert isinstance(error, InvalidRequestError)
    assert "has parameter 'u.a' in bfloat16: each rank must push its own" in str(error)


def test_error_names_the_ranks_of_a_sum_that_is_not_finite(one: OneUnit) -> None:
    summed = [shard_pb2.SummedRank(dp_rank=rank, epoch=EPOCHS[rank]) for rank in (2, 3)]
    push_sum(one, (0, 1))
    one.push(one.filled(float("nan")), rank=2, epoch=EPOCHS[2], summed=summed)
    error = error_of(lambda: one.prepare(0))
    assert "parameter 'u.a' (unit 'u' of run 'r') of logical dp rank 2, 3 has NaN" in str(error)
