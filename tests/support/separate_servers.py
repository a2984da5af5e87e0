"""A coordinator and shard servers as separate processes, which nobody starts again: as an operator runs them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from shardwell.processes.local_cluster import ServerProcess
from shardwell_wire.host.server_folders import DEFAULT_DIRECTORY, FolderOwner, folders_of
from tests.support.cluster import wait_until
from tests.support.left_folders import discard, owners_of

_START_S, _STOP_S = 90.0, 60.0


class SeparateServers:
    """A cluster on the loopback interface. The context manager ends it, and removes what servers left.

    Args:
        folder: Folder for the coordinator's state and the logs.
        names: Ids of the shard servers.
        options: More options of each shard server.
        saves: Whether each shard server has a state directory.
    """

    def __init__(
        self, folder: Path, *names: str, options: Sequence[str] = (), saves: bool = False, budget: str = "200MiB"
    ) -> None:
        self.folder, self._names, self._stack = folder, names, ExitStack()
        self.state_dir = folder / "shards"
        self._options = ["--memory-budget", budget, *options, *(["--state-dir", str(self.state_dir)] if saves else [])]
        self.shards: dict[str, ServerProcess] = {}
        self._owners: dict[str, FolderOwner] = {}

    def __enter__(self) -> SeparateServers:
        with self._stack:
            arguments = ["coordinator", "--listen", "127.0.0.1:0", "--state-dir", str(self.folder / "state")]
            self.coordinator = ServerProcess("coordinator", arguments, self.folder / "coordinator.log")
            self._stack.callback(self.coordinator.stop, _STOP_S)
            self.coordinator.wait_ready(time.monotonic() + _START_S)
            self.address = self.coordinator.address
            self._stack.callback(wait_until, self._removes_folders, "the end of the folders", timeout_s=_STOP_S)
            self._stack.callback(lambda: [shard.kill() for shard in self.shards.values()])
            self.start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """Starts all shard servers."""
        for name in self._names:
            arguments = ["shard", "--coordinator", self.address, "--listen", "127.0.0.1:0"]
            named = ["--id", name] if name else []
            command = [*arguments, *named, *self._options]
            self._owners |= {owner.prefix: owner for owner in owners_of(command)}
            self.shards[name] = ServerProcess(name, command, self.log_path(name))
        for shard in self.shards.values():
            shard.wait_ready(time.monotonic() + _START_S)

    def stop(self, *signals: int) -> None:
        """Sends signals to all shard servers, and waits for their end."""
        for number in signals or (signal.SIGTERM,):
            for shard in self.shards.values():
                os.kill(shard.pid, number)
        for shard in self.shards.values():
            shard._process.wait(_STOP_S)
            shard._reap()

    def kill(self) -> None:
        """Kills all shard servers. Those of a group end by themselves when it has ended."""
        for shard in self.shards.values():
            shard.kill()

    def _removes_folders(self) -> bool:
        """Removes what servers left; returns True if nothing is left, because all have ended."""
        discard(self._owners.values())
        return not any(folders_of(DEFAULT_DIRECTORY, owner) for owner in self._owners.values())

    def log_path(self, name: str) -> Path:
        """Returns the file with the log of a shard server, of all its processes."""
        return self.folder / f"shard-{name}.log"

    def folders(self) -> list[Path]:
        """Returns the folders of the shard servers in shared memory."""
        owners = [FolderOwner(server_id=name, coordinator=self.address) for name in self._names]
        return [folder for owner in owners for folder in folders_of(DEFAULT_DIRECTORY, owner)]

    def saved(self) -> list[Path]:
        """Returns the complete folders in the state directory."""
        return sorted(path for path in self.state_dir.iterdir() if not path.name.startswith("."))
