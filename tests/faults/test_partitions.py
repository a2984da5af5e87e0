"""Fault tests of networks that drop everything between two processes: the run goes on, and its bits are the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import shardwell
from tests.support.cluster import events, wait_until
from tests.support.long_run import LongRun
from tests.support.ports import reserved_ports
from tests.support.server_processes import added_server
from tests.support.tcp_proxy import TcpProxy

PROXIED = "behind-proxy"


class Partitioned:
    """A cluster of three shard servers. One of them and the coordinator reach each other through proxies.

    Args:
        stack: Ends the processes.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.cluster = stack.enter_context(shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, lease_s=1.5))
        port = stack.enter_context(reserved_ports())
        self.to_coordinator = stack.enter_context(TcpProxy(self.cluster.address))
        self.to_server = stack.enter_context(TcpProxy(f"127.0.0.1:{port}", f"127.0.0.2:{port}"))
        self.server = stack.enter_context(
            added_server(
                self.cluster,
                PROXIED,
                listen=f"127.0.0.1:{port}",
                advertise="127.0.0.2",
                coordinator=self.to_coordinator.address,
            )
        )

    def kinds(self, run: str = "") -> list[str]:
        """Returns the kinds of the events of a run, or of the cluster."""
        return [event.kind for event in events(self.cluster.address, run)]


@pytest.fixture
def partitioned() -> Iterator[Partitioned]:
    with ExitStack() as stack:
        yield Partitioned(stack)


@contextmanager
def training(partitioned: Partitioned, folder: Path) -> Iterator[LongRun]:
    """Yields a run whose shards have backups. Over gRPC, because other transports go around the proxies."""
    with LongRun(partitioned.cluster, folder, backups=1) as run:
        run.start("a", "b", transports="grpc")
        run.wait_commits(2)
        run.wait_in_sync()
        assert PROXIED in run.owners()
        yield run


@pytest.mark.parametrize("both_ways", [True, False], ids=["both ways", "only to the coordinator"])
def test_server_that_cannot_reach_the_coordinator_is_replaced(
    both_ways: bool, partitioned: Partitioned, tmp_path: Path
) -> None:
    with training(partitioned, tmp_path) as run, ExitStack() as held:
        held.enter_context(partitioned.to_coordinator.hold(partitioned.server.pid))
        if both_ways:
            held.enter_context(partitioned.to_server.hold(partitioned.cluster.coordinator.pid))
        wait_until(lambda: PROXIED not in run.owners(), "other owners of its shards")
        run.wait_commits(3)
        held.close()
        wait_until(lambda: "server_returned" in partitioned.kinds(), "return of the server")
        run.wait_commits(3)
        run.wait_in_sync()
        run.finish()
        kinds = partitioned.kinds(run.name)
        assert "shards_promoted" in kinds and "run_loading" not in kinds
