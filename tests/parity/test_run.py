"""Training on real servers matches plain PyTorch bit for bit on any cluster."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch

import shardwell
from tests.support import transformer
from tests.support.processes import TrainerProcess
from tests.support.reference import ADAMW, sha256, train_plain
from tests.support.trainer import train

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 10
CHUNK_BYTES = 4096
"""Small enough that every shard is sent in several chunks."""


def plain(dp: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = transformer.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    return train_plain(model, optimizer, transformer.batch, dp=dp, steps=STEPS), model.state_dict()


@pytest.fixture(scope="module")
def plain_dp2_hash() -> str:
    return sha256(plain(2)[1])


def train_two_ranks(running: shardwell.LocalCluster, **options: Any) -> dict[str, torch.Tensor]:
    """Trains two ranks on one trainer and returns the final weights."""
    with shardwell.join(running.address, run=uuid.uuid4().hex, world=shardwell.World(dp=2), min_trainers=1) as session:
        state: dict[str, torch.Tensor] = train(session, steps=STEPS, **options)[1]
        return state


def test_one_rank_matches_plain_pytorch(cluster_of_three: shardwell.LocalCluster) -> None:
    expected_losses, expected = plain(1)
    with shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex) as session:
        losses, state = train(session, steps=STEPS)
    assert losses == expected_losses
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_one_trainer_with_two_ranks_matches_plain_pytorch(cluster_of_three: shardwell.LocalCluster) -> None:
    expected_losses, expected = plain(2)
    with shardwell.join(
        cluster_of_three.address, run=uuid.uuid4().hex, world=shardwell.World(dp=2), min_trainers=1
    ) as session:
        losses, state = train(session, steps=STEPS)
    assert losses == expected_losses
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_two_trainers_match_plain_pytorch_in_small_chunks(
    cluster_of_three: shardwell.LocalCluster, plain_dp2_hash: str
) -> None:
    run, options = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS, "--transports", "grpc", "--chunk-bytes", CHUNK_BYTES)
    with (
        TrainerProcess(cluster_of_three.address, run, *options, "--global-rank", 1) as second,
        TrainerProcess(cluster_of_three.address, run, *options, "--global-rank", 0) as first,
    ):
        results = [first.finish(), second.finish()]
    assert [result.get("sha256") for result in results] == [plain_dp2_hash] * 2, results
    assert all(len(result["losses"]) == STEPS for result in results)


@pytest.mark.parametrize("servers", ["cluster_of_one", "cluster"])
def test_number_of_servers_changes_no_bit(servers: str, request: pytest.FixtureRequest, plain_dp2_hash: str) -> None:
    running: shardwell.LocalCluster = request.getfixturevalue(servers)
    assert sha256(train_two_ranks(running)) == plain_dp2_hash


def test_clipping_gives_the_same_bits_on_any_number_of_servers(
    cluster_of_one: shardwell.LocalCluster, cluster_of_three: shardwell.LocalCluster
) -> None:
    one, three = (sha256(train_two_ranks(running, clip=0.05)) for running in (cluster_of_one, cluster_of_three))
    assert one == three != sha256(train_two_ranks(cluster_of_one))
