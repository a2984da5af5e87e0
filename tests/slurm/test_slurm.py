"""Trains on Slurm, with the files of deploy/slurm: `make slurm-test`. Needs root and Debian's packages of Slurm.

Jobs of trainers are preempted, requeued and killed at random: the weights keep the bits of plain PyTorch.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

import psutil
import pytest

from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.errors import ShardwellError
from shardwell_wire.security.credentials import read_key_file
from shardwell_wire.security.tls import Tls, TlsOptions
from shardwell_wire.v1 import coordinator_pb2
from tests.slurm.one_machine import PROGRAMS, Slurm
from tests.support.cluster import wait_until
from tests.support.ports import reserved_ports
from tests.support.reference import undisturbed_sha256

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy/slurm"
DP, STEPS, ITEM_S = 2, 240, 0.2
EVERY_STEPS = 20

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


class Cluster:
    """The cluster of cluster.sbatch. A folder takes the place of the home directory."""

    def __init__(self, slurm: Slurm, folder: Path, port: int) -> None:
        self.slurm, self.folder = slurm, folder
        self.results = folder / "results"
        self.results.mkdir()
        self.settings = {
            "SHARDWELL_FOLDER": str(folder / "shared"),
            "SHARDWELL_PORT": str(port),
            "SHARDWELL_PROCESSES": "2",
            "SHARDWELL_MEMORY_BUDGET": "1GiB",
            "SHARDWELL_MIN_SHARD_BYTES": "4096",
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "SHARDWELL_PYTHON": sys.executable,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TEST_RESULTS": str(self.results),
            "TEST_STEPS": str(STEPS),
            "TEST_ITEM_S": str(ITEM_S),
        }
        self.start()

    def start(self) -> None:
        (self.folder / "shared/env.sh").unlink(missing_ok=True)
        log = f"--output={self.folder}/cluster.log"
        options = ("--nodes=1", "--cpus-per-task=2", log)
        self.job = self.slurm.submit(*options, str(FILES / "cluster.sbatch"), **self.settings)
        wait_until(self._is_ready, "the cluster is ready", timeout_s=120.0)

    def _is_ready(self) -> bool:
        assert self.job in self.slurm.jobs(), (self.folder / "cluster.log").read_text()
        if not (self.folder / "shared/env.sh").exists():
            return False
        servers = self.call("ListServers", coordinator_pb2.ListServersRequest()).servers
        return len(servers) == 2

    def stop(self) -> None:
        self.slurm.run("scancel", "--batch", "--signal=TERM", self.job)
        wait_until(lambda: self.job not in self.slurm.jobs(), "the cluster has ended", timeout_s=120.0)

    def call(self, rpc: str, request: Any) -> Any:
        """Calls the coordinator with what env.sh says."""
        found = dict(re.findall(r"(SHARDWELL_\w+)='([^']*)'", (self.folder / "shared/env.sh").read_text()))
        options = TlsOptions(ca=found["SHARDWELL_TLS_CA"], server_name=found["SHARDWELL_TLS_SERVER_NAME"])
        credentials = replace(read_key_file(found["SHARDWELL_TOKEN_FILE"]), tls=Tls(options))
        client = CoordinatorClient(found["SHARDWELL_ADDRESS"], credentials)
        try:
            return client.call(rpc, request)
        finally:
            client.close()

    def step(self, run: str) -> int:
        """Returns the number of committed steps; 0 before the run exists."""
        with suppress(ShardwellError):
            return self.call("DescribeRun", coordinator_pb2.DescribeRunRequest(run=run)).summary.committed_step
        return 0

    def train(self, run: str, *options: str, **settings: str) -> str:
        """Submits trainers; returns the number of their job."""
        script = str(ROOT / "tests/slurm/train.py")
        log = f"--output={self.folder}/{run}-%A-%a.log"
        given = {
            **self.settings,
            "SHARDWELL_RUN": run,
            "SHARDWELL_DP": str(DP),
            "SHARDWELL_RESTARTS": "100",
            **settings,
        }
        return self.slurm.submit(log, *options, str(FILES / "trainers.sbatch"), script, **given)

    def finish(self, run: str, job: str, each_step: Callable[[int], None] = lambda step: None) -> float:
        """Waits for the end of the trainers; returns the seconds from the first step to the last."""
        started: float | None = None
        while any(name.partition("_")[0] == job for name in self.slurm.jobs()):
            step = self.step(run)
            if step and started is None:
                started = time.monotonic()
            if step < STEPS:
                ended = time.monotonic()
                each_step(step)
            time.sleep(0.1)
        assert started is not None, self.logs(run)
        return ended - started

    def logs(self, run: str) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob(f"{run}-*.log")))

    def check(self, run: str, count: int) -> set[str]:
        """Checks the weights that each trainer has read at the end; returns the trainers' names."""
        found = [json.loads(path.read_text()) for path in self.results.glob(f"{run}.*")]
        assert [each["sha256"] for each in found] == [undisturbed_sha256(dp=DP, steps=STEPS)] * count, self.logs(run)
        return {each["trainer"] for each in found}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    missing = [name for name in PROGRAMS if not which(name, path=f"{os.environ['PATH']}:/usr/sbin")]
    assert not missing, f"{missing} not found: apt-get install slurmctld slurmd slurm-client munge"
    with Slurm() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with reserved_ports() as port:
        yield Cluster(slurm, tmp_path_factory.mktemp("home"), port)


def processes_of(job: str) -> list[psutil.Process]:
    """Returns the trainers of a job."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                "tests/slurm/train.py" in " ".join(process.cmdline()[1:2])
                and process.environ().get("SLURM_JOB_ID") == job
            ):
                found.append(process)
    return found


def test_tasks_of_one_job_have_their_ranks(cluster: Cluster) -> None:
    job = cluster.train("tasks", f"--ntasks={DP}", "--cpus-per-task=1", SHARDWELL_DP="", SHARDWELL_RESTARTS="0")
    cluster.finish("tasks", job)
    assert cluster.check("tasks", DP) == {"rank-0", "rank-1"}


def test_random_jobs_are_taken_away(cluster: Cluster) -> None:
    """An array of 3 trainers for 2 data ranks: one can always be replaced at once."""
    undisturbed_s = cluster.finish("calm", cluster.train("calm", "--array=0-2", "--cpus-per-task=1"))
    cluster.check("calm", 3)
    job = cluster.train("preempted", "--array=0-2", "--cpus-per-task=1")
    chosen, kinds, due = random.Random(7), Counter[str](), EVERY_STEPS

    def disturb(step: int) -> None:
        nonlocal due
        if step < due or step > STEPS - EVERY_STEPS:
            return
        running = [
            name for name, state in cluster.slurm.jobs().items() if name.startswith(f"{job}_") and state == "RUNNING"
        ]
        if not running:
            return
        due = step + EVERY_STEPS
        name = chosen.choice(running)
        kind = chosen.choice(["preempted", "requeued", "killed"])
        kinds[kind] += 1
        if kind == "preempted":
            cluster.slurm.run("scancel", "--signal=TERM", name, check=False)  # its steps, not the batch script
        elif kind == "requeued":
            cluster.slurm.run("scontrol", "requeue", name, check=False)
        else:
            number = dict(
                re.findall(r"(\S+) (\d+)", cluster.slurm.run("squeue", "--noheader", "--array", "--format=%i %A"))
            )
            for process in processes_of(number.get(name, "")):
                process.kill()

    disturbed_s = cluster.finish("preempted", job, disturb)
    names = cluster.check("preempted", 3)
    assert all(re.fullmatch(r"slurm-\d+\.0-0", name) for name in names), names
    assert sum(kinds.values()) >= 5 and len(kinds) == 3
    items_s = STEPS * ITEM_S
    print(f"{dict(kinds)}: {disturbed_s:.1f} s, {undisturbed_s:.1f} s without, items alone {items_s:.1f} s")


def test_cluster_is_stopped_and_started(cluster: Cluster) -> None:
    """A stop in the middle of a run saves the shards; the next job on the node takes them up."""
    job = cluster.train("stopped", "--array=0-1", "--cpus-per-task=1")
    wait_until(lambda: cluster.step("stopped") >= 20, "20 steps", timeout_s=120.0)
    cluster.stop()
    assert "saved" in (cluster.folder / "cluster.log").read_text()
    cluster.start()
    before = cluster.step("stopped")
    assert before >= 20
    cluster.finish("stopped", job)
    cluster.check("stopped", 2)
    assert "goes back" not in cluster.logs("stopped")
