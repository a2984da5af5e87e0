"""Shard servers that are started with a wrong ``--advertise``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

import shardwell
from tests.support.ports import reserved_ports
from tests.support.server_processes import added_server
from tests.support.tcp_proxy import TcpProxy


def servers(cluster: shardwell.LocalCluster, *options: str) -> str:
    command = [sys.executable, "-m", "shardwell", "servers", "--address", cluster.address, *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def state(cluster: shardwell.LocalCluster, server_id: str) -> str:
    rows = json.loads(servers(cluster, "--json"))["servers"]
    return next(row["state"] for row in rows if row["server_id"] == server_id)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def train(cluster: shardwell.LocalCluster, run: str) -> list[str]:
    """Trains a run for two steps; returns what it waited for meanwhile."""
    with shardwell.join(cluster.address, run=run) as session:
        model = torch.nn.Linear(64, 64)
        shardwell.fully_shard(model, session)
        said = session.explain_stall()
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return said


def test_server_at_a_name_that_does_not_resolve_is_not_used() -> None:
    with (
        shardwell.LocalCluster(num_shards=1, lease_s=1.5) as cluster,
        added_server(cluster, "lost", advertise="nosuchhost.invalid", **{"memory-budget": "64GiB"}),
    ):
        assert state(cluster, "lost") == "SERVER_STATE_UNREACHABLE"
        assert "server lost: the coordinator cannot reach nosuchhost.invalid:" in servers(cluster)
        said = "\n".join(train(cluster, "r"))
        assert "server 'lost' at nosuchhost.invalid:" in said
        assert "gets no units: the coordinator cannot reach nosuchhost.invalid:" in said


def test_server_is_used_as_soon_as_its_address_leads_to_it() -> None:
    with (
        reserved_ports() as port,
        shardwell.LocalCluster(num_shards=1, lease_s=1.5) as cluster,
        added_server(cluster, "late", listen=f"127.0.0.1:{port}", advertise="127.0.0.2"),
    ):
        assert state(cluster, "late") == "SERVER_STATE_UNREACHABLE"
        with TcpProxy(f"127.0.0.1:{port}", f"127.0.0.2:{port}"):
            wait_for(lambda: state(cluster, "late") == "SERVER_STATE_LIVE")


def test_server_at_the_address_of_another_server_is_not_used() -> None:
    with reserved_ports() as port, shardwell.LocalCluster(num_shards=1, lease_s=1.5) as cluster:
        first = cluster.shards[0].address
        with (
            TcpProxy(first, f"127.0.0.2:{port}"),
            added_server(cluster, "copied", listen=f"127.0.0.1:{port}", advertise="127.0.0.2"),
        ):
            assert state(cluster, "copied") == "SERVER_STATE_UNREACHABLE"
            assert "server copied: another shard server, 'shard-0', answers at 127.0.0.2" in servers(cluster)
            train(cluster, "r")


@pytest.mark.parametrize("advertise", ["127.0.0.1:50052", "http://node0", "::1", "node 0"])
def test_malformed_host_is_refused_at_the_start(advertise: str) -> None:
    command = [sys.executable, "-m", "shardwell_server", "shard", "--coordinator", "h:1", "--advertise", advertise]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert f"--advertise is {advertise!r}: expected a host name or an IP address without a port" in result.stderr
    assert "Traceback" not in result.stderr
