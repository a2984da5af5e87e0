"""A relay process for tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import shardwell
from shardwell.processes.local_cluster import ServerProcess


@contextmanager
def relay_process(
    cluster: shardwell.LocalCluster, folder: Path, *options: str, name: str = "relay-0"
) -> Iterator[ServerProcess]:
    """Starts ``shardwell-server relay`` for a cluster; stops it when the block ends."""
    arguments = ["relay", "--listen", "127.0.0.1:0", "--exit-with-parent", "--token-file", cluster.token_file]
    process = ServerProcess(
        name, [*arguments, "--id", name, "--coordinator", cluster.address, *options], folder / f"{name}.log"
    )
    try:
        process.wait_ready(time.monotonic() + 60)
        yield process
    finally:
        process.request_stop(at_once=True)
        process.stop(30)
