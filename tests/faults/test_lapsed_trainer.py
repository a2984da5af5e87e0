"""A trainer whose membership is over computes its work item to the end, also if shards move meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import wait_until


def call(address: str, rpc_name: str, request: Any) -> Any:
    with closing(CoordinatorClient(address)) as client:
        return client.call(rpc_name, request, timeout_s=20.0)


def move_all_shards(address: str, server_id: str, failures: list[BaseException]) -> None:
    drain = coordinator_pb2.DrainServerRequest(server_id=server_id)
    wait_until(
        lambda: not call(address, "DrainServer", drain).shard_count or bool(failures), "the moves", timeout_s=60.0
    )


def reached(version: Callable[[], int], end: int, failures: list[BaseException]) -> bool:
    return version() > end or bool(failures)


def model_of(session: shardwell.Session) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    return shardwell.auto_wrap(model, session, shardwell.ModuleTypePolicy({nn.Linear}))


@pytest.mark.long
def test_lapsed_trainer_finishes_its_item_when_shards_have_moved() -> None:
    """It is not told of the move, and the memory of the former owner shows its last version for ever."""
    stop, failures = threading.Event(), list[BaseException]()

    def train_beside(address: str) -> None:
        try:
            with shardwell.join(address, run="r", trainer="b") as session:
                model = model_of(session)
                optimizer = shardwell.optim.SGD(model.parameters(), lr=1e-3)
                for step in session.steps(10**6):
                    if stop.is_set():
                        return
                    for batch in step.batches(lambda *_: torch.ones(2, 256)):
                        model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except BaseException as error:
            failures.append(error)

    with shardwell.LocalCluster(num_shards=2) as cluster:
        waits = shardwell.WaitOptions(wait_limit_s=30.0)
        with shardwell.join(cluster.address, run="r", trainer="a", waits=waits) as session:
            model = model_of(session)
            optimizer = shardwell.optim.SGD(model.parameters(), lr=1e-3)
            spare = threading.Thread(target=train_beside, args=(cluster.address,))

            def version() -> int:
                described = call(cluster.address, "DescribeWeights", coordinator_pb2.DescribeWeightsRequest(run="r"))
                return int(described.version)

            outputs = []
            for step in session.steps(3):
                for batch in step.batches(lambda *_: torch.ones(2, 256)):
                    if step.number == 1 and not outputs:
                        spare.start()
                        session._membership.give_up("a test")
                        wait_until(lambda: version() > 3 or bool(failures), "steps of the spare")
                        move_all_shards(cluster.address, "shard-0", failures)
                        end = version() + 2
                        wait_until(partial(reached, version, end, failures), "further steps of the spare")
                        outputs.append(model(batch).sum().item())  # in vain, from any version
                        stop.set()
                    model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert not failures and len(outputs) == 1
            spare.join(30.0)
            assert not spare.is_alive() and not failures
