"""Coordinators and the commands that inspect a cluster need no torch. Everything else says that it is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ADVICE = "PyTorch, which is not installed: install the build for this machine, or run pip install 'shardwell[train]'\n"
SHARD, CLIENT = "shardwell_server.shard.process.command needs ", "shardwell.command.export_commands needs "


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of Python processes that cannot import torch."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, *command)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_coordinator_and_inspection_work(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardwell_server", "coordinator", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--state-dir", str(tmp_path)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as coordinator:
        try:
            assert coordinator.stdout is not None
            address = json.loads(coordinator.stdout.readline())["address"]
            done = run(environment, "-m", "shardwell", "runs", "--address", address)
            assert (done.returncode, done.stderr) == (0, "")
            done = run(environment, "-m", "shardwell_server", "health", address)
            assert (done.returncode, done.stderr) == (0, "")
        finally:
            coordinator.terminate()
        assert coordinator.wait(20) == 0


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (("-m", "shardwell_server", "shard"), f"shardwell-server shard: {SHARD}"),
        (("-m", "shardwell_server", "relay"), f"shardwell-server relay: {SHARD}"),
        (("-m", "shardwell", "export"), f"shardwell export: {CLIENT}"),
        (("-c", "import shardwell; shardwell.join"), "MissingTorchError: shardwell.session.session needs "),
        (("-c", "from shardwell import auto_wrap"), "MissingTorchError: shardwell.wrapping.auto_wrap needs "),
        (("-c", "import shardwell; shardwell.LocalCluster(num_shards=1).start()"), f"shardwell-server shard: {SHARD}"),
    ],
)
def test_missing_torch_is_reported(environment: dict[str, str], command: tuple[str, ...], error: str) -> None:
    done = run(environment, *command)
    assert done.returncode == 1
    assert error + ADVICE in done.stderr
