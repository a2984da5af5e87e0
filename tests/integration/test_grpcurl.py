"""grpcurl: reflection lists and describes the services, and every inspection rpc takes JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import shardwell
from shardwell_wire.v1 import coordinator_pb2, shard_pb2
from tests.support.cluster import small_run
from tests.support.grpcurl import Grpcurl, GrpcurlError

COORDINATOR = "shardwell_wire.v1.CoordinatorService"
SHARD = "shardwell_wire.v1.ShardService"
RUN = "grpcurl"


@pytest.fixture(scope="module", autouse=True)
def _run(cluster: shardwell.LocalCluster) -> Iterator[None]:
    with small_run(cluster.address, RUN, steps=2):
        yield


@pytest.fixture
def coordinator(cluster: shardwell.LocalCluster) -> Grpcurl:
    return Grpcurl(cluster.address)


@pytest.fixture
def shard(coordinator: Grpcurl) -> Grpcurl:
    """Returns the server with the unit ``first``, found through ListUnits."""
    (response,) = coordinator.call(f"{COORDINATOR}/ListUnits", {"run": RUN})
    owners = {unit["unit"]: unit["shards"][0]["address"] for unit in response["units"]}
    return Grpcurl(owners["first"])


def test_grpcurl_lists_the_services(coordinator: Grpcurl, shard: Grpcurl) -> None:
    common = ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]
    assert sorted(coordinator.list()) == [*common, COORDINATOR]
    assert sorted(shard.list()) == [*common, SHARD]


def test_grpcurl_describes_the_services(coordinator: Grpcurl, shard: Grpcurl) -> None:
    expected = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].methods
    assert sorted(coordinator.describe(COORDINATOR)) == sorted(method.name for method in expected)
    expected = shard_pb2.DESCRIPTOR.services_by_name["ShardService"].methods
    assert sorted(shard.describe(SHARD)) == sorted(method.name for method in expected)


@pytest.mark.parametrize(
    ("rpc", "request_json", "expected"),
    [
        ("ListRuns", {}, {"runs"}),
        ("DescribeRun", {"run": RUN}, {"summary", "trainers", "work", "grad_norm", "optimizer", "checkpoints"}),
        ("DescribeWorld", {"run": RUN}, {"world", "world_size", "rank_assignments", "replicas", "ended"}),
        (
            "DescribeWorld",
            {"world": {"dp": 2, "tp": 2, "pp": 2}},
            {"world", "world_size", "rank_assignments", "replicas", "ended"},
        ),
        ("ListUnits", {"run": RUN}, {"units", "version", "placement"}),
        ("ListReaders", {"run": RUN}, {"newest", "readers"}),
        ("ListServers", {}, {"servers", "coordinator_insecure"}),
        ("DescribeCluster", {"run": RUN}, {"shardwell_version", "term", "servers", "runs", "problems"}),
        ("ExplainStall", {"run": RUN}, {"step", "phase", "phase_s", "waiting_for"}),
        (
            "DescribePerformance",
            {"run": RUN},
            {"committed_step", "commit_interval_s", "tokens_per_s", "samples_per_s", "trainers", "logged"},
        ),
    ],
)
def test_inspection_rpcs_of_the_coordinator_take_json(
    coordinator: Grpcurl, rpc: str, request_json: dict[str, Any], expected: set[str]
) -> None:
    (response,) = coordinator.call(f"{COORDINATOR}/{rpc}", request_json)
    assert set(response) == expected


def test_watch_events_streams_json(coordinator: Grpcurl) -> None:
    events = coordinator.call(f"{COORDINATOR}/WatchEvents", {"run": RUN, "duration_s": 0.2})
    assert {"time", "kind", "run", "message"} == set(events[0])
    assert "step_committed" in {event["kind"] for event in events}


@pytest.mark.parametrize(
    ("rpc", "request_json", "expected"),
    [
        ("DescribeServer", {}, {"server_id", "budget_bytes", "runs", "used_bytes"}),
        ("ListShards", {"run": RUN}, {"shards"}),
        ("DescribeShard", {"run": RUN, "unit": "first"}, {"summary", "parameters", "optimizer_state"}),
        ("DescribeStep", {"run": RUN}, {"step", "prepared", "shards", "duplicate_count"}),
        (
            "Peek",
            {"run": RUN, "parameter": "first.weight", "count": 3},
            {"version", "values", "norm", "non_finite_count"},
        ),
        (
            "Peek",
            {"run": RUN, "parameter": "first.weight", "source": "PEEK_SOURCE_OPTIMIZER_STATE", "state_name": "exp_avg"},
            {"version", "values"},
        ),
    ],
)
def test_inspection_rpcs_of_a_shard_server_take_json(
    shard: Grpcurl, rpc: str, request_json: dict[str, Any], expected: set[str]
) -> None:
    (response,) = shard.call(f"{SHARD}/{rpc}", request_json)
    assert expected <= set(response)


def test_health_check_answers(coordinator: Grpcurl) -> None:
    (response,) = coordinator.call("grpc.health.v1.Health/Check", {"service": COORDINATOR})
    assert response == {"status": "SERVING"}


def test_errors_have_a_precise_status(coordinator: Grpcurl) -> None:
    with pytest.raises(GrpcurlError, match="nobody"):
        coordinator.call(f"{COORDINATOR}/DescribeRun", {"run": "nobody"})
