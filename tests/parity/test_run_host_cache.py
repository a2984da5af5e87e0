"""The host cache changes no bit, and weights cross the network once per host."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwell
from shardwell.parallel import plan_tensor_parallel
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.v1 import coordinator_pb2
from tests.support import gloo, split_gpt, transformer
from tests.support.cluster import join_options
from tests.support.processes import TrainerProcess, run_ranks
from tests.support.reference import ADAMW, sha256, train_plain
from tests.support.shared_files import wait_for_no_folder
from tests.support.trainer import train

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4
REMOTE = "socket,grpc"
"""Without shared memory, a server on this host behaves as a server on another host."""


@pytest.fixture(scope="module")
def plain_hash() -> str:
    model = transformer.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    train_plain(model, optimizer, transformer.batch, dp=2, steps=STEPS)
    return sha256(model.state_dict())


@pytest.fixture(autouse=True)
def _no_folder_is_left() -> Iterator[None]:
    yield
    wait_for_no_folder()


def train_two_ranks(address: str, **options: Any) -> tuple[str, dict[str, float], list[int]]:
    """Trains two ranks on one trainer; returns the hash, the statistics and the sizes of the units."""
    with shardwell.join(
        address,
        run=uuid.uuid4().hex,
        world=shardwell.World(dp=2),
        min_trainers=1,
        **join_options(transports=REMOTE, **options),
    ) as session:
        _, state = train(session, steps=STEPS)
        return sha256(state), session.stats(), [unit.layout.size_bytes for unit in session.units]


def test_one_trainer_fetches_each_version_once(cluster: shardwell.LocalCluster, plain_hash: str) -> None:
    hashed, stats, sizes = train_two_ranks(cluster.address, host_cache_bytes=1 << 30)
    assert hashed == plain_hash
    # Version 0 and one version per step; the state dict reads the last one.
    assert stats["received_bytes"] == (STEPS + 1) * sum(sizes)
    assert stats["peak_unit_bytes"] == max(sizes), "needs no memory beyond the declaration of a unit"


def test_units_beyond_the_budget_are_fetched_in_every_pass(cluster: shardwell.LocalCluster, plain_hash: str) -> None:
    none, one_unit = (train_two_ranks(cluster.address, host_cache_bytes=size) for size in (0, unit_sizes()[0]))
    assert (none[0], one_unit[0]) == (plain_hash, plain_hash)
    model, (received, less) = sum(unit_sizes()), (each[1]["received_bytes"] for each in (none, one_unit))
    assert received > 2 * STEPS * model, "in every pass"
    # One unit is fetched once per version, the others in every pass.
    share = unit_sizes()[0] / model
    assert (STEPS + 1) * model < less < received * (1 - share) + (STEPS + 1) * share * model
    assert none[1]["cache_hit_bytes"] == 0


def unit_sizes() -> list[int]:
    """Returns the sizes of the flat vectors of the units that a trainer declares."""
    model = transformer.build()
    units = [set(block.parameters()) for block in model.blocks]
    units.append(set(model.parameters()).difference(*units))
    return [sum(-(-parameter.nbytes // 64) * 64 for parameter in unit) for unit in units]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rounded_weights_are_decoded_once_and_saved_exactly(cluster: shardwell.LocalCluster, dtype: str) -> None:
    without, without_stats, _ = train_two_ranks(cluster.address, gather_dtype=dtype)
    cached, stats, _ = train_two_ranks(cluster.address, gather_dtype=dtype, host_cache_bytes=1 << 30)
    assert cached == without
    assert 2 * stats["received_bytes"] < without_stats["received_bytes"]


def test_rounding_is_the_same_with_shared_memory(cluster: shardwell.LocalCluster) -> None:
    hashes = set()
    for options in ({}, {"host_cache_bytes": 1 << 30}):
        with shardwell.join(
            cluster.address,
            run=uuid.uuid4().hex,
            world=shardwell.World(dp=2),
            min_trainers=1,
            **join_options(gather_dtype="bfloat16", **options),
        ) as session:
            hashes.add(sha256(train(session, steps=STEPS)[1]))
            assert session.stats()["received_bytes"] == 0
    assert len(hashes) == 1


@pytest.mark.parametrize("transports", [REMOTE, "shm,socket,grpc"])
def test_gather_copies_from_the_cache_or_from_shared_memory(cluster: shardwell.LocalCluster, transports: str) -> None:
    """Units on a GPU are copied this way."""
    run = uuid.uuid4().hex
    with shardwell.join(
        cluster.address, run=run, transfers=shardwell.TransferOptions(transports=transports, host_cache_bytes=1 << 30)
    ) as session:
        train(session, steps=1)
        before = session.stats()["received_bytes"]
        for unit in session.units:
            flat = torch.empty(unit.layout.size_bytes, dtype=torch.uint8)
            session.store.gather(unit.index, memory_at(flat.data_ptr(), flat.numel(), flat)).result(30)
            in_place = session.store.in_place(unit.index)
            assert in_place is not None
            assert torch.equal(flat, in_place.bytes)
        assert session.stats()["received_bytes"] == before


def start(cluster: shardwell.LocalCluster, run: str, *options: object) -> TrainerProcess:
    return TrainerProcess(cluster.address, run, "--dp", 2, "--steps", STEPS, *options)


@pytest.fixture
def _cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWELL_TRANSPORTS", REMOTE)
    monkeypatch.setenv("SHARDWELL_HOST_CACHE_BYTES", str(1 << 30))


@pytest.mark.usefixtures("_cached")
def test_two_trainers_fetch_each_version_once_together(cluster: shardwell.LocalCluster, plain_hash: str) -> None:
    run = uuid.uuid4().hex
    with start(cluster, run, "--global-rank", 1) as second, start(cluster, run, "--global-rank", 0) as first:
        results = [first.finish(), second.finish()]
    assert [result.get("sha256") for result in results] == [plain_hash] * 2, results
    needed, moved = (STEPS + 1) * sum(unit_sizes()), [result["stats"] for result in results]
    assert sum(stats["received_bytes"] for stats in moved) == needed, "once per host and version"
    assert all(stats["received_bytes"] + stats["cache_hit_bytes"] >= needed for stats in moved)


def tensor_parallel_worker(rank: int, address: str, run: str, dp: int, cache_bytes: int, folder: Path) -> None:
    options = join_options(transports=REMOTE, host_cache_bytes=cache_bytes)
    world = shardwell.World(dp=dp, tp=2)
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here", **options) as session:
        model = split_gpt.gpt(2)
        plan_tensor_parallel(model, 2, fused_by_head=True).apply(model, session.replica_mesh()["tp"])
        # Units stay gathered until the end of the work item, so without a cache each is fetched once per step, too.
        shardwell.auto_wrap(model, session, strategy=shardwell.ShardingStrategy.SHARD_GRAD_OP)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        for step in session.steps(STEPS):
            for tokens, targets in step.batches(partial(split_gpt.batch, batch_size=2)):
                split_gpt.loss_of(model(tokens), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        sizes = {unit.name: unit.layout.size_bytes for unit in session.units}
        (folder / str(rank)).write_text(json.dumps([session.stats()["received_bytes"], sizes]))
    gloo.leave()


@pytest.mark.parametrize(("dp", "cache_bytes"), [(1, 0), (1, 1 << 30), (2, 1 << 30)])
def test_trainers_of_a_grid_fetch_each_unit_once_per_host(
    cluster: shardwell.LocalCluster, dp: int, cache_bytes: int, tmp_path: Path
) -> None:
    """Tensor-parallel ranks have their own parts. What is whole on both is one unit. Replicas have the same units."""
    run = uuid.uuid4().hex
    run_ranks(tensor_parallel_worker, cluster.address, run, dp, cache_bytes, tmp_path, count=2 * dp)
    ranks = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2 * dp)]
    first, second = ranks[0][1], ranks[1][1]
    assert {name.partition("@")[2] for name in first.keys() ^ second.keys()} == {"tp0", "tp1"}
    assert first.keys() & second.keys() and not any("@" in name for name in first.keys() & second.keys())
    once = sum((first | second).values())
    by_each = sum(sum(units.values()) for _, units in ranks)
    assert by_each > 1.05 * dp * once
    assert sum(received for received, _ in ranks) == STEPS * (once if cache_bytes else by_each)


@pytest.mark.usefixtures("_cached")
def test_replacing_a_killed_trainer_changes_no_bit(
    cluster_with_short_leases: shardwell.LocalCluster, plain_hash: str
) -> None:
    run = uuid.uuid4().hex
    with (
        start(cluster_with_short_leases, run, "--global-rank", 1, "--kill-at-step", 1) as lost,
        start(cluster_with_short_leases, run, "--global-rank", 0) as first,
    ):
        result = lost.finish()
        assert result["returncode"] == -9, result
        with start(cluster_with_short_leases, run) as second:
            results = [first.finish(), second.finish()]
    assert [result.get("sha256") for result in results] == [plain_hash] * 2, results


def test_recreated_run_reads_nothing_of_the_deleted_run(cluster: shardwell.LocalCluster) -> None:
    options: dict[str, Any] = {"run": uuid.uuid4().hex, "transports": REMOTE, "host_cache_bytes": 1 << 30}
    first = shardwell.join(cluster.address, **join_options(**options))
    layer = torch.nn.Linear(8, 8)
    shardwell.fully_shard(layer, first, name="layer")
    before = shardwell.full_state_dict(layer)
    delete(cluster.address, options["run"])
    with shardwell.join(cluster.address, **join_options(**options)) as second:
        # The relay still has what it cached of the deleted run, with its version 0.
        again = torch.nn.Linear(8, 8)
        expected = again.weight.detach().clone()
        shardwell.fully_shard(again, second, name="layer")
        assert torch.equal(shardwell.full_state_dict(again)["weight"], expected)
        assert not torch.equal(before["weight"], expected)
    first.close()


def delete(address: str, run: str) -> None:
    with closing(CoordinatorClient(address)) as client:
        client.call("DeleteRun", coordinator_pb2.DeleteRunRequest(run=run, force=True))
