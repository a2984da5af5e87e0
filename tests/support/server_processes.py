"""Shard servers that a test adds to a running cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwell.find_credentials import PublishedCredentials
from shardwell.processes.local_cluster import LocalCluster, ServerProcess
from tests.support.left_folders import discard, owners_of


@contextmanager
def added_server(cluster: LocalCluster, name: str, **options: str) -> Iterator[ServerProcess]:
    """Adds a shard server with the options of the cluster's first one; stops it without a drain after the block.

    Args:
        cluster: The cluster.
        name: Id of the server.
        **options: Options of the command that differ, such as ``listen="127.0.0.1:50052"``.
    """
    first = cluster.shards[0]
    arguments = list(first._arguments)
    for option, value in {"listen": "127.0.0.1:0", "drain-s": "0", **options, "id": name}.items():
        if f"--{option}" in arguments:
            arguments[arguments.index(f"--{option}") + 1] = value
        else:
            arguments += [f"--{option}", value]
    server = ServerProcess(name, arguments, first.log_path.with_name(f"{name}.log"))
    try:
        server.wait_ready(time.monotonic() + 60.0)
        published = PublishedCredentials(server.address, cluster.key)
        try:
            yield server
        finally:
            published.withdraw()
    finally:
        server.stop(20.0)
        discard(owners_of(arguments))
