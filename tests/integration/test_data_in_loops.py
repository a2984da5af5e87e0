"""Streams and worker processes in training loops: several sources, several optimizer steps, ends of loops."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import shardwell
from shardwell_wire.errors import UsageError


class Numbers(IterableDataset[torch.Tensor]):
    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.tensor([float(self.first + number)]) for number in range(7))


def shard(session: shardwell.Session) -> tuple[Any, Any]:
    model = shardwell.fully_shard(nn.Linear(1, 1), session)
    return model, shardwell.optim.SGD(model.parameters(), lr=0.0)


@pytest.fixture
def run(cluster: shardwell.LocalCluster) -> Iterator[Any]:
    """Yields a function that trains and returns the first number of every batch that the loop has read."""
    name = uuid.uuid4().hex

    def train(steps: int, sources: list[tuple[Any, dict[str, Any]]], optimizer_steps: int = 1, **options: Any) -> Any:
        """Reads the sources in turn, one per step."""
        found = []
        with shardwell.join(cluster.address, run=name, host="here", **options) as session:
            model, optimizer = shard(session)
            for step in session.steps(steps, optimizer_steps=optimizer_steps):
                source, settings = sources[step.number % len(sources)]
                for _ in range(optimizer_steps):
                    for batch in step.batches(source, 2, **settings):
                        found.append(int(batch[0]))
                        model(batch).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return found

    yield train


@pytest.mark.parametrize("workers", [0, 1])
def test_streams_in_turn_continue_by_name(run: Any, workers: int) -> None:
    def sources() -> list[tuple[Any, dict[str, Any]]]:
        return [(Numbers(first), {"name": str(first), "num_workers": workers}) for first in (0, 100)]

    assert run(5, sources()) == [0, 100, 2, 102, 4]
    assert run(8, sources()) == [104, 0, 100], "in another session, and in the next epoch"


def test_several_optimizer_steps_read_one_batch(run: Any) -> None:
    assert run(2, [(Numbers(0), {})], optimizer_steps=2) == [0, 0, 2, 2]
    assert run(3, [(Numbers(0), {})], optimizer_steps=2) == [4, 4]


def test_items_of_an_asynchronous_run_have_positions(run: Any) -> None:
    options = {"consistency": shardwell.ASYNCHRONOUS, "world": shardwell.World(dp=2), "min_trainers": 1}
    assert sorted(run(3, [(Numbers(0), {})], **options)) == [0, 0, 1, 1, 1, 4], "an epoch has 3 samples of rank 1"
    assert sorted(run(4, [(Numbers(0), {})], **options)) == [1, 4]


def test_other_source_of_the_same_name_is_refused(run: Any) -> None:
    with pytest.raises(UsageError, match=r"another stream or other options than before .* its own name=..."):
        run(2, [(Numbers(0), {}), (Numbers(100), {})])
    with pytest.raises(UsageError, match=r"another source or other options than before"):
        run(3, [(torch.ones(9, 1), {"num_workers": workers}) for workers in (1, 2)])


def test_workers_end_with_a_loop_that_is_left(cluster: shardwell.LocalCluster) -> None:
    data, children = torch.arange(8.0).reshape(8, 1), psutil.Process().children
    before = children()
    with shardwell.join(cluster.address, run=uuid.uuid4().hex) as session:
        model, optimizer = shard(session)
        for error in (None, KeyError("in the loop")):
            try:
                for step in session.steps(9):
                    for batch in step.batches(data, 2, num_workers=2):
                        model(batch).sum().backward()
                    assert len(children()) == len(before) + 2
                    optimizer.step()
                    optimizer.zero_grad()
                    if error is not None:
                        raise error
                    break
            except KeyError:
                pass
            assert children() == before
        steps = session.steps(9)
        for batch in next(steps).batches(data, 2, num_workers=2):
            model(batch).sum().backward()
    assert children() == before, "the session has ended, and the loop has not"
