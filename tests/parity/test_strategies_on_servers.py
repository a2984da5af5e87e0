"""Sharding strategies, prefetch modes and limits on shard servers give the bits of plain PyTorch."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch

import shardwell
from shardwell import ShardingStrategy, UsageError
from shardwell.module.fully_shard import fully_shard
from tests.support import transformer
from tests.support.cluster import join_options
from tests.support.reference import ADAMW, sha256, undisturbed_sha256

FULL, GRAD_OP, NONE, HYBRID = ShardingStrategy


@pytest.fixture(scope="module")
def plain_hash() -> str:
    return undisturbed_sha256(dp=2, steps=4)


def train_on(
    cluster: shardwell.LocalCluster, transports: str, strategies: list[ShardingStrategy], **options: Any
) -> Any:
    """Trains with one trainer that plays both ranks; each unit changes its strategy in every step.

    Returns:
        Hash of the weights, statistics and the session.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with shardwell.join(
        cluster.address,
        run=uuid.uuid4().hex,
        world=shardwell.World(dp=2),
        min_trainers=1,
        **join_options(transports=transports, **options),
    ) as session:
        model = transformer.build()
        modules = [*model.blocks, model]
        for module in modules:
            fully_shard(module, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
        for step in session.steps(4):
            for position, module in enumerate(modules):
                strategy = strategies[(step.number + position) % len(strategies)]
                sharded: Any = module
                (unit,) = module._shardwell_sharding.own_units
                if unit.settings.strategy is not strategy:
                    sharded.set_sharding_strategy(strategy, recurse=False)
            for tokens in step.batches(transformer.batch):
                model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.set_num_threads(before)
        return sha256(shardwell.full_state_dict(model)), session.stats(), session


@pytest.mark.parametrize("transports", ["shm,socket,grpc", "socket", "grpc"])
def test_all_strategies_give_the_same_bits_on_servers(
    cluster: shardwell.LocalCluster, plain_hash: str, transports: str
) -> None:
    for strategies in ([FULL], [GRAD_OP], [NONE], [HYBRID], list(ShardingStrategy)):
        assert train_on(cluster, transports, strategies)[0] == plain_hash


def test_hybrid_fetches_each_version_once_for_all_ranks_of_the_host(cluster: shardwell.LocalCluster) -> None:
    _, stats, session = train_on(cluster, "socket", [HYBRID])
    size = sum(unit.layout.size_bytes for unit in session.units)
    assert stats["received_bytes"] == 5 * size, "version 0 and the versions of four steps"
    assert stats["cache_hit_bytes"] > 0
    assert stats["peak_unit_bytes"] == max(unit.layout.size_bytes for unit in session.units), (
        "memory that the declaration used"
    )


def test_join_takes_and_checks_the_limits(cluster: shardwell.LocalCluster, plain_hash: str) -> None:
    options = {"max_gathers_in_flight": 1, "backward_prefetch": "post"}
    assert train_on(cluster, "socket", [FULL], **options)[0] == plain_hash
    with pytest.raises(UsageError, match="max_gathers_in_flight=-1: expected at least 0"):
        shardwell.join(cluster.address, transfers=shardwell.TransferOptions(max_gathers_in_flight=-1))
    with pytest.raises(UsageError, match="backward_prefetch='sometimes': expected one of pre, post, none"):
        shardwell.join(cluster.address, transfers=shardwell.TransferOptions(backward_prefetch="sometimes"))
