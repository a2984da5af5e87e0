"""``step.log``: means over the data ranks, in the commit record."""

from __future__ import annotations

import logging
import math
import os
import uuid
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

import shardwell
from shardwell_wire.errors import InvalidRequestError, UsageError
from tests.support import gloo
from tests.support.processes import run_ranks

DP, STEPS = 3, 3


def batch(step: int, dp_rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dp_rank))


def join(cluster: shardwell.LocalCluster, run: str, trainer: str = "one") -> shardwell.Session:
    return shardwell.join(
        cluster.address, run=run, trainer=trainer, world=shardwell.World(dp=DP), min_trainers=1, host="here"
    )


def shard(session: shardwell.Session) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = shardwell.fully_shard(nn.Linear(5, 1), session)
    return model, shardwell.optim.SGD(model.parameters(), lr=0.1)


def test_means_are_added_in_rank_order_and_are_in_the_commit(
    cluster: shardwell.LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    run, means = uuid.uuid4().hex, []
    with join(cluster, run) as session:
        model, optimizer = shard(session)
        session.track(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        for step in session.steps(STEPS):
            logged = []
            for x in step.batches(batch):
                loss = model(x).square().mean()
                loss.backward()
                step.log(loss=math.nan)
                step.log(loss=loss, rank=len(logged), first=None if logged else 7, none=None)
                logged.append(loss.item())
            assert step.means == {} and math.isnan(step.means["loss"]), "nothing is committed"
            with pytest.raises(UsageError, match=r"step.log\(loss=...\) was called in step \d outside of a work item"):
                step.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            assert step.means == {"first": 7.0, "loss": (logged[0] + logged[1] + logged[2]) / DP, "rank": 1.0}
            means.append(dict(step.means))
            if step.number == STEPS - 1:
                break  # as a trainer that is lost before the end of the iteration
    with join(cluster, run) as session, caplog.at_level(logging.WARNING, logger="shardwell"):
        model, optimizer = shard(session)
        session.track(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        numbers = []
        for step in session.steps(STEPS + 1):
            for x in step.batches(batch):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            numbers.append(step.number)
            assert dict(step.means) == (means[-1] if step.number == STEPS - 1 else {})
    assert numbers == [STEPS - 1, STEPS]
    assert f"the loop body of step {STEPS - 1} runs again, because the run was interrupted in it" in caplog.text


def mortal_worker(rank: int, address: str, run: str) -> None:
    with shardwell.join(
        address, run=run, world=shardwell.World(dp=2), global_rank=rank, trainer=f"t{rank}", host="here"
    ) as session:
        model, optimizer = shard(session)
        for step in session.steps(STEPS):
            for x in step.batches(batch):
                loss = model(x).square().mean()
                loss.backward()
                step.log(loss=loss)
                if rank == 1 and step.number == 1:
                    os._exit(0)
            with torch.no_grad():
                expected = [model(batch(step.number, dp_rank)).square().mean().item() for dp_rank in range(2)]
            optimizer.step()
            optimizer.zero_grad()
            assert step.means == {"loss": (expected[0] + expected[1]) / 2}, "also with the work of a lost trainer"
    assert rank == 0


def test_means_do_not_depend_on_lost_trainers(cluster: shardwell.LocalCluster) -> None:
    run_ranks(mortal_worker, cluster.address, uuid.uuid4().hex)


def test_each_item_of_an_asynchronous_run_has_its_own_numbers(cluster: shardwell.LocalCluster) -> None:
    run = uuid.uuid4().hex
    with shardwell.join(cluster.address, run=run, consistency=shardwell.ASYNCHRONOUS, host="here") as session:
        model, optimizer = shard(session)
        for step in session.steps(2):
            for x in step.batches(batch):
                loss = model(x).square().mean()
                loss.backward()
                step.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            assert step.means == {"loss": loss.item()}


def test_wrong_numbers_are_refused(cluster: shardwell.LocalCluster) -> None:
    with join(cluster, uuid.uuid4().hex) as session:
        model, optimizer = shard(session)
        for step in session.steps(1):
            for x in step.batches(batch):
                model(x).square().mean().backward()
                with pytest.raises(UsageError, match=r"step.log\(x=...\): .* got a tensor of shape \[4, 5\]"):
                    step.log(x=x)
                with pytest.raises(UsageError, match=r"step.log\(x=...\): expected a number .*, got a str"):
                    step.log(x="1")  # type: ignore[arg-type]
                with pytest.raises(
                    InvalidRequestError, match="65 numbers are logged for one work item: expected at most 64"
                ):
                    step.log(**{f"x{index}": index for index in range(65)})
                with pytest.raises(InvalidRequestError, match="name of a logged number"):
                    step.log(**{"x" * 101: 1.0})
                step.log(inf=math.inf)
            optimizer.step()
            optimizer.zero_grad()
            assert step.means == {"inf": math.inf}


def test_a_loop_without_batches_logs_before_the_commit(cluster: shardwell.LocalCluster) -> None:
    run = uuid.uuid4().hex
    with shardwell.join(cluster.address, run=run, host="here") as session:
        model, optimizer = shard(session)
        for step in session.steps(2):
            loss = model(batch(step.number, 0)).square().mean()
            loss.backward()
            step.log(loss=loss)
            optimizer.step()
            assert step.means == {"loss": loss.item()}
            optimizer.zero_grad()


def parts_worker(rank: int, address: str, run: str) -> None:
    with shardwell.join(address, run=run, world=shardwell.World(tp=2), global_rank=rank, host="here") as session:
        mesh = session.replica_mesh()["tp"]
        model, optimizer = shard(session)
        for step in session.steps(1):
            for x in step.batches(batch):
                model(x).square().mean().backward()
                loss = DTensor.from_local(torch.tensor(1.0 + rank), mesh, [Partial()])
                if rank == 0:  # a collective on one rank only would wait for the other
                    with pytest.raises(UsageError, match=r"call loss = loss.full_tensor\(\) on all of them"):
                        step.log(loss=loss)
                loss = loss.full_tensor()
                if rank == 0:
                    step.log(loss=loss, whole=DTensor.from_local(loss, mesh, [Replicate()], run_check=False))
            optimizer.step()
            optimizer.zero_grad()
            assert step.means == {"loss": 3.0, "whole": 3.0}
    gloo.leave()


def test_parts_of_a_number_are_refused(cluster: shardwell.LocalCluster) -> None:
    run_ranks(parts_worker, cluster.address, uuid.uuid4().hex)
