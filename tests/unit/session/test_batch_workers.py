"""Batches that worker processes make ahead: right for any order of requests."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy
import psutil
import pytest
import torch

import shardwell_wire
from shardwell.seeds import derive_seed
from shardwell.step.step_state import WorkItemState
from shardwell.training import batch_workers
from shardwell.training.batch_sources import BatchOptions
from shardwell.training.batch_workers import BatchWorkers
from shardwell.training.training_step import LoopPosition, Step
from shardwell_wire.errors import UnavailableError
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import wait_until


def make_batch(step: int, dp_rank: int) -> tuple[int, int, int, torch.Tensor]:
    if step == 90:
        raise KeyError("no batch for step 90")
    return os.getpid(), step, dp_rank, torch.rand(2) if dp_rank == 1 else torch.zeros(2)


class Requests:
    def __init__(self, workers: int = 2, optimizer_steps: int = 1) -> None:
        self.ranks, self.optimizer_steps = [0, 1], optimizer_steps
        options = BatchOptions(num_workers=workers, prefetch=2)
        self.pool = BatchWorkers(
            make_batch, options, seed=3, optimizer_steps=optimizer_steps, dp_ranks=lambda: self.ranks
        )

    def is_made_ahead(self, commit: int, dp_rank: int) -> bool:
        """Requests a batch and checks it, and the state of torch's generator."""
        seed, step = derive_seed(3, commit, dp_rank), commit // self.optimizer_steps
        torch.manual_seed(seed)
        expected, drawn = make_batch(step, dp_rank), torch.rand(1)
        torch.manual_seed(seed)
        process, *found, values = self.pool.make(step, commit, dp_rank)
        assert found == [step, dp_rank] and torch.equal(values, expected[3])
        assert torch.equal(torch.rand(1), drawn)
        return bool(process != os.getpid())


@pytest.fixture
def requests() -> Iterator[Requests]:
    made = Requests()
    yield made
    made.pool.close()
    assert multiprocessing.active_children() == []


def test_batches_of_the_own_ranks_are_made_ahead(requests: Requests) -> None:
    ahead = [requests.is_made_ahead(commit, rank) for commit in range(6) for rank in (0, 1)]
    assert ahead == [False] + [True] * 11


def test_any_order_of_requests_has_the_right_batches(requests: Requests) -> None:
    assert not requests.is_made_ahead(10, 0)
    assert [requests.is_made_ahead(11, 1), requests.is_made_ahead(11, 0)] == [True, True], "in another order"
    assert not requests.is_made_ahead(11, 5), "of a lost trainer"
    assert not requests.is_made_ahead(11, 0), "once more"
    assert requests.is_made_ahead(12, 0)
    assert not requests.is_made_ahead(3, 0), "the run was rolled back"
    assert requests.is_made_ahead(4, 0)
    assert not requests.is_made_ahead(80, 1), "the run has gone on without this trainer"
    assert requests.is_made_ahead(81, 1)
    requests.ranks = [1]
    assert all(requests.is_made_ahead(commit, 1) for commit in range(82, 88))
    requests.ranks = [2]
    assert [requests.is_made_ahead(commit, 2) for commit in (88, 89)] == [False, False]
    with pytest.raises(KeyError, match="no batch for step 90"):
        requests.is_made_ahead(90, 2)
    assert [requests.is_made_ahead(commit, 2) for commit in range(91, 99)][-1]


def test_seeds_of_several_optimizer_steps_follow_the_commits() -> None:
    requests = Requests(workers=1, optimizer_steps=2)
    assert [requests.is_made_ahead(commit, 1) for commit in range(6, 12)] == [False] + [True] * 5
    requests.pool.close()


def test_worker_that_has_ended_is_named(requests: Requests) -> None:
    requests.is_made_ahead(0, 0)
    for child in multiprocessing.active_children():
        child.kill()
    with pytest.raises((UnavailableError, RuntimeError), match=r"worker .*\(pid.* \d+\)"):  # torch may notice it first
        for commit in range(1, 9):
            requests.is_made_ahead(commit, 0)


@pytest.mark.parametrize("error", [RuntimeError("DataLoader timed out after 1 seconds"), KeyboardInterrupt()])
def test_result_that_was_not_received_is_not_taken_for_another_batch(
    requests: Requests, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    requests.is_made_ahead(0, 0)
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(type(requests.pool._workers), "_get_data", Mock(side_effect=error))
        requests.is_made_ahead(0, 1)
    found = [requests.is_made_ahead(commit, rank) for commit in range(3) for rank in (0, 1)]
    assert found == [False] + [True] * 5, "other workers were started"


def start_and_end(folder: Path, start_method: str) -> None:
    options = BatchOptions(num_workers=2, multiprocessing_context=start_method)
    pool = BatchWorkers(make_batch, options, seed=0, optimizer_steps=1, dp_ranks=lambda: [0])
    workers = {pool.make(step, step, 0)[0] for step in range(5)} - {os.getpid()}
    (folder / "workers").write_text(" ".join(map(str, workers)))
    os._exit(0)


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_workers_end_with_a_killed_trainer(tmp_path: Path, start_method: str) -> None:
    trainer = multiprocessing.get_context("spawn").Process(target=start_and_end, args=(tmp_path, start_method))
    trainer.start()
    trainer.join()
    workers = list(map(int, (tmp_path / "workers").read_text().split()))
    assert len(workers) == 2
    wait_until(lambda: not any(map(psutil.pid_exists, workers)), "the workers have ended")


def python_numbers(step: int, dp_rank: int) -> tuple[float, float]:
    return random.random(), numpy.random.random()


def test_python_and_numpy_numbers_depend_on_the_batch_only() -> None:
    found = []
    for workers in (0, 1, 2):
        options = BatchOptions(num_workers=workers)
        pool = BatchWorkers(python_numbers, options, seed=0, optimizer_steps=1, dp_ranks=lambda: [0])
        for number in range(4):
            make = (lambda step, rank, pool=pool: pool.make(step, step, rank)) if workers else python_numbers
            work = MagicMock(state=Mock(number=number, asynchronous=False))
            item = WorkItemState(coordinator_pb2.WorkItem())
            for batch in Step(LoopPosition(number, 1), work, Mock(), seed=0)._compute(item, make, 1):
                found.append((*batch, *python_numbers(0, 0)))  # the model draws, too
        pool.close()
    assert found[:4] == found[4:8] == found[8:] and len(set(found)) == 4


@pytest.mark.parametrize(("handles_forks", "expected"), [(False, None), (True, "spawn")])
def test_workers_are_not_forked_where_grpc_aborts_forks(
    monkeypatch: pytest.MonkeyPatch, handles_forks: bool, expected: str | None
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(shardwell_wire, "GRPC_HANDLES_FORKS", handles_forks)
    monkeypatch.setattr(batch_workers, "DataLoader", lambda *_, **options: given.append(options) or [])
    list(batch_workers.start_workers([], BatchOptions(num_workers=1), 1))  # type: ignore[arg-type]
    assert given[0]["multiprocessing_context"] == expected
