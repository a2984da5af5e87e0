"""Servers that a test starts by itself: with the arguments of the command, or as another one of a running cluster."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwell.find_credentials import PublishedCredentials
from shardwell.processes.local_cluster import LocalCluster, ServerProcess
from tests.support.forked_servers import ForkedCommand
from tests.support.left_folders import discard, owners_of

ENVIRONMENT = {**{k: v for k, v in os.environ.items() if not k.startswith("SHARDWELL_")}, "OMP_NUM_THREADS": "1"}


@contextmanager
def server_process(*arguments: str, **environment: str) -> Iterator[ForkedCommand]:
    """Runs ``shardwell-server`` with these arguments and variables."""
    process = ForkedCommand(arguments, {**ENVIRONMENT, **environment})
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        discard(owners_of(arguments))


def ready_address(process: ForkedCommand) -> str:
    """Returns the address at which the server is ready."""
    address: str = json.loads(process.stdout.readline())["address"]
    return address


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
