"""Fault tests of batches whose work has no effect: how many a loop gets, which data they have, and what they change."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import shardwell
import shardwell.testing
from shardwell.step.step_state import WorkItemState
from shardwell_wire.errors import StepRestartedError
from shardwell_wire.v1 import coordinator_pb2
from tests.faults.test_restarted_items import Net, batch, restart_step
from tests.support.cluster import join_options

__all__ = ["restart_step"]


@pytest.fixture(params=[1, 2])
def dp(request: pytest.FixtureRequest) -> Iterator[int]:
    """Starts a cluster; returns the number of data ranks, which one trainer plays."""
    with shardwell.testing.in_process_cluster(num_shards=1, dp=request.param):
        yield request.param


def join(**options: Any) -> shardwell.Session:
    return shardwell.join(run=uuid.uuid4().hex, **join_options(wait_limit_s=60, **options))


def linear(session: shardwell.Session) -> tuple[nn.Module, Any]:
    model = nn.Linear(3, 1)
    shardwell.fully_shard(model, session)
    return model, shardwell.optim.SGD(model.parameters(), lr=0.01)


def refuse_commit(session: shardwell.Session, step: int) -> None:
    """Lets a commit fail once as if the step was restarted, although no item is."""
    committer: Any = session.in_flight._committer
    commit, pending = committer.commit, [step]

    def once(number: int, *arguments: Any, **options: Any) -> Any:
        if [number] == pending:
            pending.clear()
            raise StepRestartedError("the norm is outdated")
        return commit(number, *arguments, **options)

    committer.commit = once


def test_restarted_work_is_computed_once_in_the_next_iteration(restart_step: Callable[[], None]) -> None:
    counts = []
    with join() as session:
        model = Net()
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.05)
        for step in session.steps(4):
            counts.append((step.number, 0))
            for x in step.batches(batch):
                model(x).backward()
                counts[-1] = step.number, counts[-1][1] + 1
            if counts == [(0, 2), (1, 2), (2, 2)]:
                restart_step()
            optimizer.step()
    assert counts == [(0, 2), (1, 2), (2, 2), (2, 2), (3, 2)]


@pytest.mark.parametrize("has_batches", [True, False])
def test_buffers_of_work_that_still_counts_are_committed(dp: int, has_batches: bool) -> None:
    counts = []
    with join() as session:
        model = Net()
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.05)
        refuse_commit(session, 2)
        if not has_batches:  # as if another trainer owned the ranks
            session.in_flight.items.without_effect = lambda *_: iter(())  # type: ignore[method-assign]
        for step in session.steps(4):
            number = 0
            for x in step.batches(batch):
                model(x).backward()
                number += 1
            optimizer.step()
            optimizer.zero_grad()
            counts.append((step.number, number, int(model.norm.num_batches_tracked)))  # type: ignore[arg-type]
    again = dp if has_batches else 0
    assert counts == [(0, dp, 1), (1, dp, 2), (2, dp, 2), (2, again, 3), (3, dp, 4)]


class Numbers(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((3,), float(number)) for number in range(100))


class Sums:
    """Counts what would end the sums of valid work items."""

    count = 0

    def abandon(self) -> None:
        self.count += 1


def test_batch_of_a_rank_that_another_trainer_computes_is_that_of_the_step() -> None:
    source, seen, sums = Numbers(), [], Sums()
    with shardwell.testing.in_process_cluster(num_shards=1, dp=1), join() as session:
        model, optimizer = linear(session)
        work, gradients = session.in_flight, session.in_flight._store.gradients
        without_effect, items = work.items.without_effect, {}

        def then_lease(*arguments: int) -> Iterator[WorkItemState]:
            yield from without_effect(*arguments)
            gradients.sums = None
            work.state.items.update(items)  # this trainer gets the work after all
            items.clear()

        work.items.without_effect = then_lease  # type: ignore[method-assign]
        for step in session.steps(6):
            if step.number == 4:
                items.update(work.state.items)
                work.state.items.clear()
                gradients.sums = sums  # type: ignore[assignment]
            for x in step.batches(source, batch_size=2):
                seen.append((step.number, x[:, 0].tolist()))
                assert (work.items._item_started_s is None) == bool(items), "SIGTERM does not wait for such work"
                model(x).sum().backward()
                if items:
                    gradients.discard()
            optimizer.step()
            optimizer.zero_grad()
    assert sums.count == 0
    read = [(number, [2.0 * number, 2.0 * number + 1]) for number in (0, 1, 2, 3, 4, 4, 5)]
    assert seen == read


def test_asynchronous_run_does_not_read_past_its_end() -> None:
    data, seen = [torch.full((2, 3), float(number)) for number in range(4)], []
    answer = coordinator_pb2.FinishWorkResponse(work=coordinator_pb2.StepWork(step=4, position=4))
    with shardwell.testing.in_process_cluster(num_shards=1, dp=1), join(consistency=shardwell.ASYNCHRONOUS) as session:
        model, optimizer = linear(session)
        committer: Any = session.in_flight._committer
        for step in session.steps(4):
            if step.number == 3:  # another trainer computes the last item, and commits it while this one waits
                session.in_flight.state.items.clear()
                committer.finish_work = lambda *_, **__: answer
            for x in step.batches(lambda number, _: data[number]):
                seen.append(x[0, 0].item())
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [0.0, 1.0, 2.0, 3.0]


def test_repeated_loop_over_batches_may_end_early() -> None:
    class Tracked:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    run = uuid.uuid4().hex
    with shardwell.testing.in_process_cluster(num_shards=1, dp=1):
        for first in (True, False):
            numbers = []
            with shardwell.join(run=run, **join_options(wait_limit_s=60)) as session:
                model, optimizer = linear(session)
                session.track(tracked=Tracked())
                for step in session.steps(4):
                    numbers.append(step.number)
                    for _ in step.batches(lambda *_: torch.ones(2, 3)):
                        model(torch.ones(2, 3)).sum().backward()
                        if not first and step.number == 1:
                            break
                    if not first and step.number == 1:
                        state = session.in_flight.state
                        assert (state._current, state.in_batches) == (None, False)
                        assert all(parameter.grad is None for parameter in model.parameters())
                    optimizer.step()
                    if first and step.number == 1:
                        break
            assert numbers == ([0, 1] if first else [1, 2, 3])


def test_second_loop_of_an_iteration_lists_the_ranks_that_it_has_started() -> None:
    found = []
    with shardwell.testing.in_process_cluster(num_shards=1, dp=2), join() as session:
        model, optimizer = linear(session)
        for step in session.steps(2, optimizer_steps=2):
            for _ in range(2):
                for _ in step.batches(lambda *_: torch.ones(2, 3)):
                    model(torch.ones(2, 3)).sum().backward()
                    found.append(list(step.global_ranks))
                optimizer.step()
                optimizer.zero_grad()
                assert step.global_ranks == [0, 1]
    assert found == [[0], [0, 1]] * 4
