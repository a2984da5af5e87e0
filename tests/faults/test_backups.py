"""Fault tests with backups: shard servers are killed or stopped at random instants, and the run gets the same bits."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire import fault_points
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import events, wait_in_sync, wait_until

STEPS, FAULTS_AFTER = 14, (3, 6, 9)
DATA = [torch.randn(64, generator=torch.Generator().manual_seed(index)) for index in range(64)]


def call(address: str, rpc_name: str, request: Any) -> Any:
    with closing(CoordinatorClient(address)) as client:
        return client.call(rpc_name, request, timeout_s=30.0)


def train(address: str, run: str, disturb: Callable[[int], None], *, backups: int) -> str:
    """Trains with two data ranks in this process. Returns the SHA-256 of the weights."""
    world = shardwell.World(dp=2)
    with shardwell.join(address, run=run, world=world, min_trainers=1, backups=backups) as session:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
        for index in (0, 2):
            shardwell.fully_shard(model[index], session, name=f"layer{index}")
        shardwell.fully_shard(model, session, name="rest")
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-3)
        for step in session.steps(STEPS):
            disturb(step.number)
            for batch in step.batches(DATA, batch_size=8):
                model(batch).square().mean().backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        weights = shardwell.full_state_dict(model)
        digest = hashlib.sha256()
        for name, value in sorted(weights.items()):
            digest.update(name.encode() + value.contiguous().numpy().tobytes())
        return digest.hexdigest()


@pytest.fixture(scope="module")
def undisturbed() -> str:
    with shardwell.LocalCluster(num_shards=1) as cluster:
        return train(cluster.address, "plain", lambda step: None, backups=0)


@pytest.mark.timeout(170)
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_run_with_backups_survives_the_loss_of_any_server(undisturbed: str, fault: str) -> None:
    randomness, timers = random.Random(fault), []
    remaining = list(FAULTS_AFTER[: 3 if fault == "kill" else 1])
    lease_s = 2.0 if fault == "stop" else None
    with shardwell.LocalCluster(num_shards=3, **({"lease_s": lease_s} if lease_s else {})) as cluster:

        def promotions() -> int:
            return [event.kind for event in events(cluster.address, "r")].count("shards_promoted")

        def wait_for_promotions() -> None:
            """Waits until the coordinator has noticed all losses: until then, it takes lost backups for good ones."""
            for timer in timers:
                timer.join()
            wait_until(lambda: promotions() == len(timers), "one promotion per loss")

        def disturb(step: int) -> None:
            if step not in remaining:
                return
            remaining.remove(step)  # a step that is computed again calls this function again
            wait_for_promotions()
            wait_in_sync(cluster.address, "r")
            victim = cluster.shards[FAULTS_AFTER.index(step)]
            number = signal.SIGKILL if fault == "kill" else signal.SIGSTOP  # the cluster starts a killed server again
            act = functools.partial(os.kill, victim.pid, number)
            timers.append(threading.Timer(randomness.uniform(0.0, 0.1), act))
            timers[-1].start()

        try:
            assert train(cluster.address, "r", disturb, backups=1) == undisturbed
            wait_for_promotions()
            assert "run_loading" not in [event.kind for event in events(cluster.address, "r")]
            if fault == "stop":
                os.kill(cluster.shards[0].pid, signal.SIGCONT)
            wait_in_sync(cluster.address, "r")
            report = call(cluster.address, "VerifyRun", coordinator_pb2.VerifyRunRequest(run="r"))
            assert (report.version, list(report.differences), report.unprotected_shards) == (STEPS, [], 0)
        finally:
            for timer in timers:
                timer.join()
            if fault == "stop":
                os.kill(cluster.shards[0].pid, signal.SIGCONT)


# Each occurrence is in another update, after the backups are in sync.
@pytest.mark.parametrize("nth", [31, 34])
def test_backup_replaces_a_shard_whose_update_was_interrupted(
    nth: int, undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened, where = tmp_path / "happened", {"server": "shard-0"}
    fault = fault_points.Fault(point="server.update.in_piece", action="kill", nth=nth, once=str(happened), where=where)
    for name, value in fault_points.environment(fault).items():
        monkeypatch.setenv(name, value)
    with shardwell.LocalCluster(num_shards=2) as cluster:

        def disturb(step: int) -> None:
            if step == 2:
                assert not happened.exists()
                wait_in_sync(cluster.address, "r")

        assert train(cluster.address, "r", disturb, backups=1) == undisturbed
        kinds = [event.kind for event in events(cluster.address, "r")]
    assert happened.exists()
    assert kinds.count("shards_promoted") == 1
    assert "run_loading" not in kinds


def test_drained_and_rebalanced_run_gets_the_same_bits(undisturbed: str) -> None:
    with shardwell.LocalCluster(num_shards=3) as cluster:

        def copies_replace_shard_0() -> bool:
            """The next commit moves the shards whose copies are in sync."""
            units = call(cluster.address, "ListUnits", coordinator_pb2.ListUnitsRequest(run="r")).units
            leaving = [(unit, at.start_bytes) for unit in units for at in unit.shards if at.server_id == "shard-0"]
            return all(
                any(
                    copy.shard.start_bytes == start and copy.state == coordinator_pb2.BACKUP_STATE_IN_SYNC
                    for copy in unit.backups
                )
                for unit, start in leaving
            )

        def shard_0_is_empty() -> bool:
            """Shards that a commit moved are released after it."""
            request = coordinator_pb2.DrainServerRequest(server_id="shard-0")
            return call(cluster.address, "DrainServer", request).shard_count == 0

        def shard_0_has_copies() -> bool:
            units = call(cluster.address, "ListUnits", coordinator_pb2.ListUnitsRequest(run="r")).units
            copies = [
                copy.shard.server_id
                for unit in units
                for copy in unit.backups
                if copy.state == coordinator_pb2.BACKUP_STATE_IN_SYNC
            ]
            return "shard-0" in [*copies, *(at.server_id for unit in units for at in unit.shards)]

        def disturb(step: int) -> None:
            if step == 2:
                call(cluster.address, "DrainServer", coordinator_pb2.DrainServerRequest(server_id="shard-0"))
            if 2 < step < 8:
                wait_until(copies_replace_shard_0, "copies of the shards of the drained server", timeout_s=40.0)
            if step > 8:
                wait_until(shard_0_has_copies, "a copy on the server that takes shards again", timeout_s=40.0)
            if step == 8:
                wait_until(shard_0_is_empty, "memory of the moved shards to be released", timeout_s=40.0)
                request = coordinator_pb2.DrainServerRequest(server_id="shard-0", cancel=True)
                call(cluster.address, "DrainServer", request)
                call(cluster.address, "RebalanceRun", coordinator_pb2.RebalanceRunRequest(run="r"))

        assert train(cluster.address, "r", disturb, backups=0) == undisturbed
        kinds = [event.kind for event in events(cluster.address, "r")]
        assert kinds.count("shards_moved") >= 2
        assert "shards_promoted" not in kinds
        units = call(cluster.address, "ListUnits", coordinator_pb2.ListUnitsRequest(run="r")).units
        assert "shard-0" in {shard.server_id for unit in units for shard in unit.shards}
