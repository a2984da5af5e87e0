"""Tests for the benchmark of the waits between two steps: the table, the arguments, and a short run."""

from pathlib import Path

import pytest

from benchmarks import commit_latency
from benchmarks.commit_latency import Point, parse_arguments


def test_the_last_trainer_of_a_step_waits_least() -> None:
    point = Point(dp=2)
    steps = [{"FinishWork": 0.004, "CommitStep": 0.002, "first weights": 0.001}] * 3
    others = [{"FinishWork": 0.001, "CommitStep": 0.003, "first weights": 0.003}] * 3
    point.add([{"waits": steps}, {"waits": others}])
    medians = [cell.partition(" ")[0] for cell in point.to_row()]
    assert medians == ["2", "2.50", "2.50", "1.00", "2.00", "2.00"]


@pytest.mark.parametrize("arguments", [["--dp", "0"], ["--steps", "0"], ["--servers", "0"]])
def test_bad_arguments_are_rejected(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)


@pytest.mark.usefixtures("_forked_workers")
def test_a_short_run_writes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dp", "1", "2", "--units", "2", "--steps", "3", "--rounds", "1", "--results", str(tmp_path)]
    commit_latency.main(options)
    text = (tmp_path / "commit_latency.md").read_text()
    assert "failed" not in text
    assert "fdatasync of 16 kB" in text
    cells = [line.partition(" |")[0] for line in text.splitlines() if line.startswith("| ")]
    assert cells == ["| trainers", "| ---", "| 1", "| 2"]
