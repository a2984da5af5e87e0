"""A short chaos run: the weights have the bits of plain PyTorch, and every trainer finishes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.timeline import InjectedFault, Period, Timeline, percentile, summary

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_short_run_under_faults(tmp_path: Path) -> None:
    options = "--minutes 0.3 --faults 7 --warm-up 15 --seed 5 --no-namespace"
    command = [sys.executable, "-m", "tests.chaos", *options.split(), "--logs", str(tmp_path)]
    folders = [str(ROOT), *filter(None, sys.path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "faults 7, " in result.stdout and "equal" in result.stdout, result.stdout


def timeline(tmp_path: Path, **commits: list[tuple[int, float]]) -> Timeline:
    for name, lines in commits.items():
        (tmp_path / f"{name}.commits").write_text("".join(f"{step} {at_s}\n" for step, at_s in lines))
    return Timeline(tmp_path)


def test_times_of_commits_are_the_earliest_reports(tmp_path: Path) -> None:
    found = timeline(tmp_path, a=[(1, 10.0), (2, 11.0)], b=[(2, 10.9), (3, 12.0)])
    assert found.read() == 3
    assert found.times == {1: 10.0, 2: 10.9, 3: 12.0}
    with (tmp_path / "a.commits").open("a") as file:
        file.write("4 13.0\n5 13")  # the second line is still being written
    assert found.read() == 4


def test_recovery_is_the_longest_gap_after_the_fault(tmp_path: Path) -> None:
    found = timeline(tmp_path, a=[(1, 1.0), (2, 2.0), (3, 5.0), (4, 6.0), (5, 20.0)])
    found.read()
    kill = InjectedFault("kill", "a", 2.5, 2.5)
    assert found.recovery(kill, next_s=7.0, step_s=1.0) == 13.0  # the gap begins before the next fault
    assert found.recovery(kill, next_s=5.5, step_s=1.0) == 1.5
    stop = InjectedFault("stop", "coordinator", 2.5, 4.5, blocks=True)
    assert found.recovery(stop, next_s=5.5, step_s=0.25) == 0.75


def test_goodput_and_summary(tmp_path: Path) -> None:
    found = timeline(tmp_path, a=[(step, float(step)) for step in range(1, 11)] + [(11, 20.0)])
    found.read()
    assert found.goodput([Period(begin_s=10.0, end_s=20.0, step_s=1.0)]) == 0.1
    assert found.goodput([Period(0.0, 5.0, 1.0), Period(10.0, 20.0, 2.0)]) == 7 / 15
    assert found.last_by_trainer == {"a": 20.0}
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0 and percentile([3.0, 1.0, 2.0], 50) == 2.0
    faults = [InjectedFault("kill", "a", 0, 0, recovery_s=value) for value in (0.5, 1.5)]
    assert "kill" in summary(faults) and "1.00" in summary(faults)
