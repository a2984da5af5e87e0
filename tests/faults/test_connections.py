"""Fault tests of connections: the end of a process is noticed at once, and cut connections end nobody."""

from __future__ import annotations

import os
import signal
import uuid

import pytest

import shardwell
from tests.support.cluster import events, wait_until
from tests.support.processes import TrainerProcess
from tests.support.reference import undisturbed_sha256
from tests.support.tcp_proxy import TcpProxy

STEPS = 14
LEASE_S = 600.0
"""Longer than the test: only connections tell that a process has ended."""


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_trainers_work_is_reassigned_long_before_its_lease_ends(rank: int) -> None:
    run, options = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS)
    with (
        shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, lease_s=LEASE_S) as cluster,
        TrainerProcess(cluster.address, run, *options, "--global-rank", rank, "--kill-at-step", 3) as killed,
        TrainerProcess(cluster.address, run, *options, "--global-rank", 1 - rank) as survivor,
    ):
        assert killed.finish()["returncode"] == -9
        result = survivor.finish()
        kinds = [event.kind for event in events(cluster.address, run)]
    assert result.get("sha256") == undisturbed_sha256(dp=2, steps=STEPS), result
    assert "trainer_ended" in kinds


def test_cut_connections_end_no_membership() -> None:
    run, options = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS)
    with (
        shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster,
        TcpProxy(cluster.address) as proxy,
        proxy.publish(cluster.key),
        TrainerProcess(proxy.address, run, *options) as first,
        TrainerProcess(cluster.address, run, *options) as second,
    ):
        for step in range(2, STEPS - 2, 2):
            first.wait_for_step(step)
            proxy.cut()
        results = [first.finish(), second.finish()]
        kinds = [event.kind for event in events(cluster.address, run)]
    assert [result.get("sha256") for result in results] == [undisturbed_sha256(dp=2, steps=STEPS)] * 2, results
    assert [len(result["losses"]) for result in results] == [STEPS] * 2, "no work was reassigned"
    assert not {"trainer_ended", "lease_expired"}.intersection(kinds)


def test_end_of_a_shard_server_is_noticed_long_before_its_lease_ends() -> None:
    with shardwell.LocalCluster(num_shards=2, lease_s=LEASE_S) as cluster:
        os.kill(cluster.shards[0].pid, signal.SIGKILL)
        wait_until(
            lambda: "server_ended" in [event.kind for event in events(cluster.address, "")], "the end of the server"
        )
