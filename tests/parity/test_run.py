"""The core promise on real servers: the same bits as plain PyTorch, whatever the cluster looks like."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import torch

import shardwell
from tests.support import transformer
from tests.support.processes import TrainerProcess
from tests.support.reference import ADAMW, sha256, train_plain
from tests.support.trainer import train

STEPS = 10


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cluster() -> Iterator[shardwell.LocalCluster]:
    with shardwell.LocalCluster(num_shards=3, min_shard_bytes=4096) as running:
        yield running


def plain(dp: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = transformer.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    return train_plain(model, optimizer, transformer.batch, dp=dp, steps=STEPS), model.state_dict()


@pytest.fixture(scope="module")
def plain_dp2_hash() -> str:
    return sha256(plain(2)[1])


def test_one_rank_equals_plain_pytorch(cluster: shardwell.LocalCluster) -> None:
    expected_losses, expected = plain(1)
    with shardwell.join(cluster.address, run=uuid.uuid4().hex) as session:
        losses, state = train(session, steps=STEPS)
    assert losses == expected_losses
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_one_trainer_playing_two_ranks_equals_plain_pytorch(cluster: shardwell.LocalCluster) -> None:
    expected_losses, expected = plain(2)
    with shardwell.join(cluster.address, run=uuid.uuid4().hex, world=shardwell.World(dp=2), min_trainers=1) as session:
        losses, state = train(session, steps=STEPS)
    assert losses == expected_losses
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("chunk_bytes", [64 << 10, 1 << 20])
def test_two_trainers_give_the_same_bits(
    cluster: shardwell.LocalCluster, plain_dp2_hash: str, chunk_bytes: int
) -> None:
    run, options = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS, "--chunk-bytes", chunk_bytes)
    with (
        TrainerProcess(cluster.address, run, *options, "--global-rank", 1) as second,
        TrainerProcess(cluster.address, run, *options, "--global-rank", 0) as first,
    ):
        results = [first.finish(), second.finish()]
    assert [result.get("sha256") for result in results] == [plain_dp2_hash] * 2, results
    assert all(len(result["losses"]) == STEPS for result in results)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_number_of_servers_changes_no_bit(num_shards: int, plain_dp2_hash: str) -> None:
    with (
        shardwell.LocalCluster(num_shards=num_shards, min_shard_bytes=4096) as small,
        shardwell.join(small.address, run="bits", world=shardwell.World(dp=2), min_trainers=1) as session,
    ):
        _, state = train(session, steps=STEPS)
    assert sha256(state) == plain_dp2_hash


def test_clipping_gives_the_same_bits_on_any_number_of_servers(cluster: shardwell.LocalCluster) -> None:
    hashes = []
    with shardwell.LocalCluster(num_shards=1) as single:
        for running in (single, cluster):
            with shardwell.join(
                running.address, run=uuid.uuid4().hex, world=shardwell.World(dp=2), min_trainers=1
            ) as session:
                hashes.append(sha256(train(session, steps=4, clip=0.05)[1]))
    assert hashes[0] == hashes[1]
