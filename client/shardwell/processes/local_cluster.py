"""A private cluster on this machine: a coordinator and shard servers as processes of their own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Self

from shardwell.credentials import PublishedCredentials
from shardwell.processes.server_process import ServerProcess
from shardwell_wire.credentials import Credentials, new_credentials
from shardwell_wire.errors import UsageError
from shardwell_wire.shared_files import open_file, opened
from shardwell_wire.temporary_folder import TemporaryFolder

_STOP_GRACE_S = 30.0
"""Ending an interpreter with torch in it takes a second, and several on a machine that is busy."""
_LISTEN = "127.0.0.1:0"


class LocalCluster:
    """Starts a coordinator and shard servers on free loopback ports; ends them with itself.

    A context manager::

        with shardwell.LocalCluster(num_shards=2) as cluster:
            session = shardwell.join(cluster.address)

    The servers are real processes that end when this one does, however it ends. Ctrl-C does not
    reach them, so trainers can still leave in good order.

    Only this user's processes can use the cluster: its servers require a token that is made at the start. Processes
    of this user on this host find the token by the cluster's address; others read ``token_file``.

    Args:
        num_shards: Shard servers to start.
        memory_budget: Bytes that each shard server may use. None: the servers share 80 % of what the machine, or the
            container, has.
        lease_s: A trainer or server that was silent for this long is lost. None: the coordinator's
            default.
        min_shard_bytes: A unit is not cut into shards smaller than this. None: the coordinator's
            default.
        state_dir: Where the coordinator keeps its state. None: a temporary directory.
        log_dir: Where the servers' logs go. None: a temporary directory.
        log_level: Of the servers.
        start_limit_s: How long the servers may take to come up.

    Attributes:
        coordinator: The coordinator's process.
        shards: The shard servers' processes, in order of their ids ``shard-0``, ``shard-1``, ...

    Raises:
        UsageError: ``num_shards`` is not positive.
        UnavailableError: A server did not come up; the message ends with its log's tail.
    """

    coordinator: ServerProcess
    shards: tuple[ServerProcess, ...]
    credentials: Credentials
    """What every rpc to the servers must carry; new at every start."""
    token_file: str
    """A file with the token that only this user can read; there until the cluster is stopped."""

    def __init__(
        self,
        num_shards: int = 2,
        *,
        memory_budget: int | None = None,
        lease_s: float | None = None,
        min_shard_bytes: int | None = None,
        state_dir: str | Path | None = None,
        log_dir: str | Path | None = None,
        log_level: str = "info",
        start_limit_s: float = 60.0,
    ) -> None:
        if num_shards < 1:
            raise UsageError(f"LocalCluster(num_shards={num_shards}): expected at least 1 shard server")
        self._num_shards = num_shards
        self._shard_options = _options(memory_budget=memory_budget, servers_on_host=num_shards, log_level=log_level)
        self._coordinator_options = _options(lease_s=lease_s, min_shard_bytes=min_shard_bytes, log_level=log_level)
        self._state_dir, self._log_dir = state_dir, log_dir
        self._start_limit_s = start_limit_s
        self._temporary: TemporaryFolder | None = None
        self._started: list[ServerProcess] = []
        self._published: list[PublishedCredentials] = []

    @property
    def token(self) -> str:
        """The secret that every rpc to the servers must carry, as ``authorization: Bearer TOKEN``."""
        return self.credentials.token

    @property
    def address(self) -> str:
        """The coordinator's host:port: what ``shardwell.join`` takes."""
        return self.coordinator.address

    def start(self) -> None:
        """Starts the servers; returns when all are ready. ``with`` does this."""
        deadline = time.monotonic() + self._start_limit_s
        try:
            self._start(deadline)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops the servers and removes temporary files; harmless to repeat. ``with`` does this.

        The coordinator goes first, so that it does not take the shard servers for lost.
        """
        coordinators, shards = self._started[:1], self._started[1:]
        for processes in (coordinators, shards):
            for process in processes:
                process.ask_to_stop()
            for process in processes:
                process.stop(_STOP_GRACE_S)
        self._started.clear()
        for published in self._published:
            published.withdraw()
        self._published.clear()
        if self._temporary is not None:
            self._temporary.remove()
            self._temporary = None

    def restart_coordinator(self) -> None:
        """Kills the coordinator, if it runs, and starts it again at its address with its state."""
        self.coordinator.restart(time.monotonic() + self._start_limit_s)

    def _start(self, deadline: float) -> None:
        self._temporary = TemporaryFolder()
        folder = self._temporary.path
        state_dir, log_dir = Path(self._state_dir or folder / "state"), Path(self._log_dir or folder / "logs")
        for directory in (state_dir, log_dir):
            directory.mkdir(parents=True, exist_ok=True)
        self.credentials = new_credentials()
        self.token_file = write_token(folder / "token", self.credentials)
        common = ["--listen", _LISTEN, "--exit-with-parent", "--token-file", self.token_file]
        coordinator_options = ["--state-dir", str(state_dir), "--min-servers", str(self._num_shards)]
        self.coordinator = ServerProcess(
            "coordinator",
            ["coordinator", *common, *coordinator_options, *self._coordinator_options],
            log_dir / "coordinator.log",
        )
        self._started.append(self.coordinator)
        self.coordinator.wait_ready(deadline)
        for name in (f"shard-{index}" for index in range(self._num_shards)):
            arguments = ["shard", *common, "--id", name, "--coordinator", self.address, *self._shard_options]
            self._started.append(ServerProcess(name, arguments, log_dir / f"{name}.log"))
        self.shards = tuple(self._started[1:])
        for shard in self.shards:
            shard.wait_ready(deadline)
        self._published = [PublishedCredentials(server.address, self.credentials) for server in self._started]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def write_token(path: Path, credentials: Credentials) -> str:
    """Writes the token to a new file for this user alone; returns the file's path."""
    with opened(open_file(path, write=True, create=True)) as descriptor:
        os.write(descriptor, f"{credentials.token}\n".encode())
    return str(path)


def _options(**values: object) -> list[str]:
    """Command line options from keyword arguments; those that are None are left out."""
    return [
        text
        for name, value in values.items()
        if value is not None
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
