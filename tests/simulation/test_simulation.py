"""Random schedules of the simulated cluster: no step is lost or applied twice, and every run finishes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCHEDULES = int(os.environ.get("SHARDWELL_SIMULATION_SCHEDULES", "400"))
PARTS = 4


def simulate(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *map(str, arguments)]
    folders = [str(ROOT), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_schedule_ends_with_the_bits_of_a_run_without_faults(part: int) -> None:
    count = SCHEDULES // PARTS
    result = simulate("--first", part * 1_000_000, "--schedules", count)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("seed", [901168, 913974, 930024, 913489, 930535, 930494])
def test_schedules_that_lost_a_run_before(seed: int) -> None:
    """A drain whose target is killed (three), a restart during publication, a coordinator that ends between a
    registration and its adoption, and a join while the coordinator is suspended."""
    result = simulate("--seed", seed, "--old-kinds")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("seed", [4007312, 6006885, 6009319, 6024909])
def test_schedules_with_newer_kinds_that_failed_before(seed: int) -> None:
    """A server is stopped whose shards end with it, and the coordinator before it has answered the first question.
    Restarted work whose trainer is gone; a backup's server that starts again when the primary is lost; initial values
    of a former trainer that end later than those of the next one."""
    result = simulate("--seed", seed)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("seed", [7000134, 7000419])
def test_asynchronous_schedules_that_had_a_commit_too_many(seed: int) -> None:
    result = simulate("--seed", seed, "--asynchronous")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_seed_replays_the_same_schedule() -> None:
    one, other = (simulate("--seed", 17, "--trace") for _ in range(2))
    assert one.returncode == 0, one.stdout + one.stderr
    lines = one.stdout.splitlines()
    assert len(lines) > 10 and lines[:-1] == other.stdout.splitlines()[:-1]  # the last line has the wall time
