"""Waits for the loss of simulated shard servers."""

from __future__ import annotations

from shardwell_server.coordinator.servers.cluster import ServerState
from tests.support.coordinator import Harness


async def until_lost(cluster: Harness, *names: str) -> None:
    """Expires leases, and returns when the coordinator counts the servers as lost."""
    cluster.coordinator.expire()
    states = cluster.state.cluster.servers
    await cluster.until(lambda: all(states[name].state is ServerState.LOST for name in names), f"the loss of {names}")
