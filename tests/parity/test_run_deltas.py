"""Deltas change no bit: trainers that keep weights get the same ones as trainers that receive whole streams."""

from __future__ import annotations

import uuid
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.data_plane import fetch
from tests.support import transformer
from tests.support.cluster import join_options
from tests.support.processes import TrainerProcess
from tests.support.reference import sha256
from tests.support.trainer import train

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4
PLENTY = 1 << 30


def train_two_ranks(address: str, steps: int = STEPS, lr: float = 3e-3, **options: Any) -> tuple[str, dict[str, float]]:
    """Trains two ranks on one trainer; returns the hash of the weights and the statistics."""
    with shardwell.join(
        address, run=uuid.uuid4().hex, world=shardwell.World(dp=2), min_trainers=1, **join_options(**options)
    ) as session:
        _, state = train(session, steps=steps, make_optimizer=lambda own: shardwell.optim.AdamW(own, lr=lr))
        return sha256(state), session.stats()


@cache
def without_deltas(address: str, gather_dtype: str, **options: Any) -> tuple[str, dict[str, float]]:
    return train_two_ranks(address, transports="grpc", gather_dtype=gather_dtype, **options)


@pytest.mark.parametrize("transports", ["grpc", "socket,grpc"])
@pytest.mark.parametrize("gather_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("servers", ["cluster_of_one", "cluster_of_three"])
def test_deltas_change_no_bit(request: pytest.FixtureRequest, servers: str, gather_dtype: str, transports: str) -> None:
    address = request.getfixturevalue(servers).address
    hashed, stats = train_two_ranks(address, transports=transports, gather_dtype=gather_dtype, delta_cache_bytes=PLENTY)
    expected, whole = without_deltas(address, gather_dtype)
    assert hashed == expected
    assert stats["delta_ratio"] < 0.9
    assert stats["delta_reused_bytes"] > 0, "the backward reads the version of the forward"
    assert stats["received_bytes"] < 0.6 * whole["received_bytes"]
    assert whole["delta_ratio"] == 1.0


def test_large_shards_are_fetched_by_themselves(
    cluster_of_three: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch.Fetches.__init__, "__kwdefaults__", {"max_batched_bytes": None})
    hashed, stats = train_two_ranks(
        cluster_of_three.address, transports="socket", gather_dtype="bfloat16", delta_cache_bytes=PLENTY
    )
    assert hashed == without_deltas(cluster_of_three.address, "bfloat16")[0]
    assert stats["delta_ratio"] < 0.9


def test_low_learning_rates_transfer_a_small_part(cluster_of_three: shardwell.LocalCluster) -> None:
    options = {"transports": "socket", "gather_dtype": "bfloat16", "lr": 1e-6, "steps": 12}
    hashed, stats = train_two_ranks(cluster_of_three.address, delta_cache_bytes=PLENTY, **options)
    expected, _ = train_two_ranks(cluster_of_three.address, **options)
    assert hashed == expected
    first, rest = stats["delta_stream_bytes"] / 12, stats["delta_received_bytes"]
    assert rest - first < 0.05 * (stats["delta_stream_bytes"] - first), "only the first version is whole"


def test_units_beyond_the_budget_are_received_as_a_whole(cluster_of_three: shardwell.LocalCluster) -> None:
    budget = 60_000
    hashed, stats = train_two_ranks(
        cluster_of_three.address, transports="socket", gather_dtype="bfloat16", delta_cache_bytes=budget
    )
    assert hashed == without_deltas(cluster_of_three.address, "bfloat16")[0]
    assert 0 < stats["delta_cache_bytes"] <= budget


@pytest.mark.parametrize("gather_dtype", ["float32", "int8"])
def test_other_dtypes_are_not_kept(cluster_of_three: shardwell.LocalCluster, gather_dtype: str) -> None:
    options = {"transports": "socket", "gather_dtype": gather_dtype, "steps": 2}
    hashed, stats = train_two_ranks(cluster_of_three.address, delta_cache_bytes=PLENTY, **options)
    expected, whole = train_two_ranks(cluster_of_three.address, **options)
    assert (hashed, stats["received_bytes"]) == (expected, whole["received_bytes"])
    assert stats["delta_cache_bytes"] == stats["delta_stream_bytes"] == 0


def test_the_host_cache_is_its_own_base(cluster_of_three: shardwell.LocalCluster) -> None:
    options = {"transports": "socket", "gather_dtype": "bfloat16", "host_cache_bytes": PLENTY}
    hashed, stats = train_two_ranks(cluster_of_three.address, delta_cache_bytes=PLENTY, **options)
    expected, whole = train_two_ranks(cluster_of_three.address, **options)
    assert hashed == expected == without_deltas(cluster_of_three.address, "bfloat16")[0]
    assert stats["delta_ratio"] < 0.9
    assert stats["received_bytes"] < 0.9 * whole["received_bytes"]
    assert stats["delta_cache_bytes"] == 0, "it takes no further memory"


def test_values_that_a_unit_computes_with_are_the_same(cluster_of_three: shardwell.LocalCluster) -> None:
    """Streams are used as received by units that compute in their dtype, and cast by others."""
    hashes = set()
    for delta_cache_bytes in (0, PLENTY):
        for param_dtype in (torch.bfloat16, torch.float16):
            with shardwell.join(
                cluster_of_three.address,
                run=uuid.uuid4().hex,
                **join_options(transports="socket", gather_dtype="bfloat16", delta_cache_bytes=delta_cache_bytes),
            ) as session:
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 1))
                policy = shardwell.MixedPrecisionPolicy(param_dtype=param_dtype)
                shardwell.fully_shard(model, session, mp_policy=policy)
                optimizer = shardwell.optim.SGD(model.parameters(), lr=1e-2)
                for step in session.steps(4):
                    for x in step.batches([torch.ones(64)], batch_size=1):
                        model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                hashes.add((param_dtype, sha256(shardwell.full_state_dict(model))))
                assert (session.stats()["delta_ratio"] < 1) == bool(delta_cache_bytes)
    assert len(hashes) == 2


def test_two_trainers_share_the_servers_deltas(
    cluster_of_three: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, options = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS, "--transports", "socket")
    monkeypatch.setenv("SHARDWELL_GATHER_DTYPE", "bfloat16")
    hashes = set()
    for budget in ("0", str(PLENTY)):
        monkeypatch.setenv("SHARDWELL_DELTA_CACHE_BYTES", budget)
        with (
            TrainerProcess(cluster_of_three.address, run + budget, *options) as second,
            TrainerProcess(cluster_of_three.address, run + budget, *options) as first,
        ):
            hashes |= {each.finish().get("sha256") for each in (first, second)}
    assert len(hashes) == 1 and None not in hashes


def test_the_sizes_of_the_units_suit_these_tests() -> None:
    """Verifies that the blocks are larger than one block of a delta."""
    assert all(sum(each.numel() for each in block.parameters()) > 4096 for block in transformer.build().blocks)


def test_asynchronous_runs_get_deltas(cluster_of_three: shardwell.LocalCluster) -> None:
    """Work items read versions that the servers hold beside the newest one."""
    options = {"transports": "socket", "gather_dtype": "bfloat16", "consistency": shardwell.ASYNCHRONOUS}
    results = []
    for budget in (0, PLENTY):
        with shardwell.join(
            cluster_of_three.address, run=uuid.uuid4().hex, **join_options(delta_cache_bytes=budget, **options)
        ) as session:
            results.append((sha256(train(session, steps=6)[1]), session.stats()["delta_ratio"]))
    assert results[0][0] == results[1][0]
    assert results[0][1] == 1.0 and results[1][1] < 0.9
