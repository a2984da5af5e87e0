"""Checksums of gradients that all tensor-parallel ranks compute, and how the coordinator compares them."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shardwell.data_plane.gradient_parts import GradientChecksums
from shardwell_wire.errors import ConflictError, InvalidRequestError
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, Trainer, optimizer, unit

WORLD = World(dp=2, tp=2, pp=2)
SHAPES = ((3,), (5,))


def checksums(*backwards: dict[int, torch.Tensor]) -> dict[int, int]:
    """Returns the checksums after some backwards of unit 4, by parameter index."""
    found = GradientChecksums()
    for gradients in backwards:
        found.add(4, sorted(gradients.items()))
    (unit,) = found.to_proto()
    assert unit.unit_index == 4
    return dict(zip(unit.parameter_indices, unit.checksums, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checksum_depends_on_every_bit(dtype: torch.dtype) -> None:
    gradient = torch.arange(1, 1001, dtype=torch.float32).to(dtype).view(10, 100)
    expected = checksums({0: gradient, 2: gradient + 1})
    assert expected.keys() == {0, 2} and expected[0] != expected[2]
    assert checksums({0: gradient.clone(), 2: gradient + 1}) == expected
    changed = gradient.clone()
    changed.view(-1).view(torch.uint8)[777] ^= 1
    assert checksums({0: changed, 2: gradient + 1})[0] != expected[0]


def test_a_checksum_depends_on_the_order_of_backwards() -> None:
    one, other = torch.ones(3), torch.zeros(3)
    assert checksums({0: one}, {0: other}) != checksums({0: other}, {0: one})
    assert checksums({0: one}, {0: other}) == checksums({0: one.clone()}, {0: other.clone()})


def test_empty_gradients_and_restarted_items_have_checksums() -> None:
    found = GradientChecksums()
    found.add(0, [(0, torch.empty(0))])
    assert len(found.to_proto()) == 1
    found.clear()
    assert found.to_proto() == []


def report(trainer: Trainer, values: dict[int, int]) -> list[coordinator_pb2.FinishedItem]:
    """Returns the report of a trainer's finished items, with checksums of unit 0 by parameter index."""
    finished = trainer.finished()
    for item in finished:
        item.gradient_checksums.add(unit_index=0, parameter_indices=values, checksums=values.values())
    return finished


def differences(cluster: Harness) -> list[str]:
    return [message for kind, message in cluster.events() if kind == "gradients_differ"]


async def test_a_different_gradient_is_an_event_that_names_parameter_replica_and_step(cluster: Harness) -> None:
    trainers = await cluster.team(*"abcdefgh", world=WORLD)
    await cluster.publish_unit(trainers, "u", *SHAPES)
    for trainer in sorted(trainers, key=lambda trainer: trainer.ranks[0]):
        (rank,) = trainer.ranks
        wrong = WORLD.coordinates(rank).dp_rank == 1 and WORLD.coordinates(rank).tp_rank == 1
        work = trainer.finish(0, report(trainer, {0: 5, 1: 8 if wrong else 7}))
        if wrong:  # the other stage of the replica gets the error of the first one
            with pytest.raises(ConflictError, match=r"different gradients of parameters of unit 'u'"):
                await work
        else:
            await work
    (message,) = differences(cluster)
    player = {trainer.ranks[0]: trainer.name for trainer in trainers}
    assert message.startswith(
        "step 0: tensor-parallel ranks of dp rank 1, pipeline rank 0, computed different gradients of "
        "parameters of unit 'u' that all of them hold: "
        f"'u.1': rank 6 (trainer {player[6]!r}) and rank 4 (trainer {player[4]!r}). "
    )


async def test_equal_gradients_are_no_event_and_stages_are_not_compared(cluster: Harness) -> None:
    trainers = await cluster.team(*"abcdefgh", world=WORLD)
    spec = unit("u", *SHAPES)
    spec.pp_ranks.extend((0, 1))
    for trainer in trainers:
        await trainer.declare(spec)
    for trainer in trainers:
        at = WORLD.coordinates(trainer.ranks[0])
        await trainer.finish(0, report(trainer, {0: 10 * at.dp_rank + at.pp_rank}))
    assert differences(cluster) == []


async def test_context_parallel_ranks_are_not_compared_with_each_other(cluster: Harness) -> None:
    """Each of them has the gradient of its part of the sequences."""
    world = World(cp=2, tp=2)
    trainers = await cluster.team(*"abcd", world=world)
    await cluster.publish_unit(trainers, "u", *SHAPES)
    for trainer in sorted(trainers, key=lambda trainer: trainer.ranks[0])[:3]:
        await trainer.finish(0, report(trainer, {0: world.coordinates(trainer.ranks[0]).cp_rank}))
    assert differences(cluster) == []
    (last,) = (trainer for trainer in trainers if trainer.ranks == [3])
    with pytest.raises(ConflictError, match="different gradients"):
        await last.finish(0, report(last, {0: 5}))
    (message,) = differences(cluster)
    assert "of dp rank 0, context-parallel rank 1, pipeline rank 0, computed different" in message
    assert "'u.0': rank 3 (trainer" in message and "and rank 2 (trainer" in message


@pytest.mark.parametrize("values", [{0: 5}, {}], ids=["other", "none"])
async def test_allowed_differences_are_one_event_per_unit(cluster: Harness, values: dict[int, int]) -> None:
    """A gradient that one rank lacks differs, too."""

    a, b = trainers = await cluster.team(*"ab", world=World(tp=2))
    await cluster.publish_unit(trainers, "u", *SHAPES)
    for step in range(2):
        await a.finish(step, report(a, {0: 4}), allow_gradient_differences=True)
        await b.finish(step, report(b, values), allow_gradient_differences=True)
        assert len(differences(cluster)) == 1
        proposed = optimizer(groups=(0, 0))
        await asyncio.gather(*(each.commit(step, wait_s=5, optimizer=proposed) for each in trainers))


async def test_all_trainers_of_the_item_get_the_error_and_the_step_is_not_finished(cluster: Harness) -> None:
    a, b = trainers = await cluster.team(*"ab", world=World(tp=2))
    await cluster.publish_unit(trainers, "u", *SHAPES)
    waiting = asyncio.create_task(a.finish(0, report(a, {0: 4}), wait_s=30))
    await asyncio.sleep(0)
    for _ in range(2):  # a repeated request has the same answer
        with pytest.raises(ConflictError, match=r"'u.0': rank 1 \(trainer 'b'\) and rank 0 \(trainer 'a'\)"):
            await b.finish(0, report(b, {0: 5}))
    with pytest.raises(ConflictError, match=r"'u.0': rank 1 \(trainer 'b'\) and rank 0 \(trainer 'a'\)"):
        await waiting
    assert len(differences(cluster)) == 1


@pytest.mark.parametrize(
    ("index", "indices", "count"), [(1, [0], 1), (0, [2], 1), (0, [1, 0], 2), (0, [0, 0], 2), (0, [0], 2)]
)
async def test_malformed_checksums_are_refused(cluster: Harness, index: int, indices: list[int], count: int) -> None:
    a, b = trainers = await cluster.team(*"ab", world=World(tp=2))
    await cluster.publish_unit(trainers, "u", *SHAPES)
    finished = a.finished()
    finished[0].gradient_checksums.add(unit_index=index, parameter_indices=indices, checksums=[1] * count)
    with pytest.raises(InvalidRequestError, match=rf"rank 0 reports {count} checksums of the gradients"):
        await a.finish(0, finished)
    await a.finish(0)
    await b.finish(0)
    assert differences(cluster) == []
