"""A run without a fixed length, whose trainers and servers come and go while a test watches."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Any

from shardwell.processes.local_cluster import LocalCluster, ServerProcess
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import wait_in_sync, wait_until
from tests.support.long_trainer import Plan
from tests.support.processes import TrainerProcess
from tests.support.reference import undisturbed_sha256

_AHEAD = 8
"""Steps that the trainers may train beyond the last known commit. They never wait for the plan in practice."""


class LongTrainer(TrainerProcess):
    module = "tests.support.long_trainer"


class LongRun:
    """A run that trains until ``finish``. A context manager, which ends the trainers.

    Args:
        cluster: The cluster.
        folder: Folder for the plan and the times of commits.
        name: Name of the run.
        dp: Data-parallel ranks.
        batch_s: Seconds that each batch sleeps.
        first: Number of steps that the run has committed before.
        **join: More options of ``shardwell.join``.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        folder: Path,
        *,
        name: str = "long",
        dp: int = 2,
        batch_s: float = 0.02,
        first: int = 0,
        **join: Any,
    ) -> None:
        self.cluster, self.name, self.dp = cluster, name, dp
        self.trainers: dict[str, LongTrainer] = {}
        self._folder, self._batch_s, self._join = folder, batch_s, join
        self._ended = threading.Event()
        self._planning = threading.Thread(target=self._plan, daemon=True)
        self._first, self._steps = first, first + _AHEAD

    def start(self, *names: str, address: str = "", transports: str = "") -> None:
        """Starts trainers with these names, also again after their end.

        Args:
            *names: Names of the trainers.
            address: Address of the coordinator for these trainers. Empty: the cluster's.
            transports: As the option of ``join``. Empty: the default.
        """
        for name in names:
            arguments: list[object] = [
                *("--trainer", name, "--dp", self.dp, "--batch-s", self._batch_s, "--join", json.dumps(self._join)),
                *("--commits", self._folder / f"{name}.commits", "--plan-file", self._plan_file),
                *(("--transports", transports) if transports else ()),
            ]
            self.trainers[name] = LongTrainer(address or self.cluster.address, self.name, *arguments)

    def end(self, name: str, number: int) -> dict[str, Any]:
        """Sends a signal to a trainer, which must end it; returns its output."""
        trainer = self.trainers.pop(name)
        with trainer:
            os.kill(trainer.pid, number)
            return trainer.finish(30.0)

    @property
    def committed(self) -> int:
        """Number of committed steps that the trainers have reported."""
        return max((steps[-1] for steps in self.reports().values() if steps), default=self._first)

    def reports(self) -> dict[str, list[int]]:
        """Returns the numbers of committed steps that each trainer has reported."""
        found = {}
        for path in self._folder.glob("*.commits"):
            lines = path.read_text().splitlines(keepends=True)
            found[path.stem] = [int(line.split()[0]) for line in lines if line.endswith("\n")]
        return found

    def wait_commits(self, count: int) -> None:
        """Waits until as many more steps are committed."""
        wanted = self.committed + count
        wait_until(lambda: self.committed >= wanted, f"commit of step {wanted}", timeout_s=60.0)

    def wait_players(self, names: Collection[str]) -> None:
        """Waits until the work items of a step are leased to exactly these trainers."""
        request = coordinator_pb2.DescribeRunRequest(run=self.name)

        def players() -> set[str]:
            return {work.trainer for work in self.call("DescribeRun", request).work}

        wait_until(lambda: players() == set(names), f"work of {names}", timeout_s=60.0)

    def wait_in_sync(self) -> None:
        """Waits until every shard has one backup in sync."""
        wait_in_sync(self.cluster.address, self.name)

    def owners(self) -> set[str]:
        """Returns the ids of the servers that serve shards of the run."""
        units = self.call("ListUnits", coordinator_pb2.ListUnitsRequest(run=self.name)).units
        return {shard.server_id for unit in units for shard in unit.shards if shard.stop_bytes > shard.start_bytes}

    def call(self, rpc_name: str, request: Any) -> Any:
        """Calls the coordinator."""
        with closing(CoordinatorClient(self.cluster.address)) as client:
            return client.call(rpc_name, request, timeout_s=30.0)

    def finish(self) -> int:
        """Lets the trainers end at the same step; checks their weights. Returns the number of steps."""
        self._stop_planning()
        Plan(self._steps, is_final=True).write(self._plan_file)
        results = {name: trainer.finish() for name, trainer in self.trainers.items()}
        assert {result["returncode"] for result in results.values()} == {0}, results
        assert {result["steps"] for result in results.values()} == {self._steps}, results
        expected = undisturbed_sha256(dp=self.dp, steps=self._steps)
        assert {name: result["sha256"] for name, result in results.items()} == dict.fromkeys(results, expected)
        return self._steps

    @property
    def _plan_file(self) -> Path:
        return self._folder / "plan"

    def _plan(self) -> None:
        """Lets the trainers go on while the run commits steps."""
        while not self._ended.wait(0.02):
            self._steps = max(self._steps, self.committed + _AHEAD)
            Plan(self._steps, is_final=False).write(self._plan_file)

    def _stop_planning(self) -> None:
        self._ended.set()
        self._planning.join()

    def __enter__(self) -> LongRun:
        self._folder.mkdir(parents=True, exist_ok=True)
        Plan(self._steps, is_final=False).write(self._plan_file)
        self._planning.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_planning()
        for trainer in self.trainers.values():
            trainer.__exit__()


def terminate(server: ServerProcess) -> None:
    """Stops a shard server (SIGTERM) and waits until its cluster has started another process at its address."""
    former = server.pid
    os.kill(former, signal.SIGTERM)
    wait_until(lambda: server.pid != former and server.exit_code is None, f"restart of {server.name}", timeout_s=30.0)
