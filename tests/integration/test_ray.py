"""docs/ray.md with a real Ray: a worker is killed, and the weights have the bits of an undisturbed run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import shardwell
from tests.support.processes import ROOT

SCRIPT = re.findall(r'```python title="train_on_ray.py"\n(.*?)^```', (ROOT / "docs/ray.md").read_text(), re.S | re.M)
SMALL_RAY = """
import functools, ray, runpy
ray.init = functools.partial(ray.init, num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
runpy.run_path("train_on_ray.py", run_name="__main__")
"""
NUM_STEPS = 400

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]


def train(cluster: shardwell.LocalCluster, folder: Path, run: str, *, kill: bool) -> dict[str, torch.Tensor]:
    """Runs the script of the page, kills a worker in the middle if told so, and returns the weights."""
    (folder / "train_on_ray.py").write_text(SCRIPT[0].replace("steps(1000)", f"steps({NUM_STEPS})"))
    of_cluster = {"SHARDWELL_ADDRESS": cluster.address, "SHARDWELL_TOKEN": cluster.token}
    environment = {
        **os.environ,
        **of_cluster,
        "SHARDWELL_RUN": run,
        "SHARDWELL_DP": "2",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with (folder / f"{run}.txt").open("w") as output:
        driver = subprocess.Popen(
            [sys.executable, "-c", SMALL_RAY], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        with attached(cluster, run, driver) as reader:
            if kill:
                reader.wait_for(NUM_STEPS // 4, timeout_s=300)
                [first, _] = workers(driver)
                first.send_signal(signal.SIGKILL)
            reader.wait_for(NUM_STEPS, timeout_s=400)
            with reader.pin() as pinned:
                weights = {name: value.clone() for name, value in pinned.values()}
        assert driver.wait(60) == 0, (folder / f"{run}.txt").read_text()
        assert f"[{NUM_STEPS}, {NUM_STEPS}]" in (folder / f"{run}.txt").read_text()
        return weights
    finally:
        for process in [*psutil.Process(driver.pid).children(recursive=True), driver] if driver.poll() is None else []:
            process.kill()
        driver.wait()


def attached(cluster: shardwell.LocalCluster, run: str, driver: subprocess.Popen[bytes]) -> shardwell.Reader:
    deadline = time.monotonic() + 400
    while True:
        try:
            return shardwell.attach(cluster.address, run=run, token_file=cluster.token_file)
        except (shardwell.NotFoundError, shardwell.StepStateError):
            assert time.monotonic() < deadline and driver.poll() is None, "the run has not started"
            time.sleep(0.1)


def workers(driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Returns the processes that run the script's tasks. Ray names them after the task."""
    processes = psutil.Process(driver.pid).children(recursive=True)
    return sorted((each for each in processes if "ray::train" in " ".join(each.cmdline())), key=lambda each: each.pid)


def test_killed_worker_is_started_again_and_the_bits_are_equal(tmp_path: Path) -> None:
    with shardwell.LocalCluster(num_shards=1) as cluster:
        undisturbed = train(cluster, tmp_path, "undisturbed", kill=False)
        disturbed = train(cluster, tmp_path, "disturbed", kill=True)
        events = subprocess.run(
            [sys.executable, "-m", "shardwell", "events", "--run", "disturbed", "--duration", "1"],
            env={**os.environ, "SHARDWELL_ADDRESS": cluster.address, "SHARDWELL_TOKEN": cluster.token},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    assert "trainer_ended" in events and events.count("trainer_joined") == 3, events
    assert undisturbed.keys() == disturbed.keys()
    assert all(torch.equal(undisturbed[name], disturbed[name]) for name in undisturbed)
