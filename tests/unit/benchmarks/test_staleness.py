"""The simulated clock of ``benchmarks.staleness``: in which order ranks start and commit their items."""

from __future__ import annotations

from typing import Any

import pytest

import shardwell
from benchmarks.staleness import Setting, simulate


class FakeRank:
    """Notes what the clock lets a rank do."""

    def __init__(self, index: int, log: list[str]) -> None:
        self.index, self.number, self._log = index, 0, log

    def compute(self) -> None:
        self._log.append(f"{self.index} starts {self.number}")

    def commit(self) -> None:
        self._log.append(f"{self.index} commits {self.number}")
        self.number += 1


@pytest.mark.parametrize(
    ("mode", "expected", "duration_s"),
    [
        (
            shardwell.ASYNCHRONOUS,
            ["0 starts 0", "1 starts 0", "0 commits 0", "0 starts 1", "0 commits 1", "1 commits 0", "1 starts 1"],
            6.0,
        ),
        (
            shardwell.BOUNDED_STALENESS(0),
            ["0 starts 0", "1 starts 0", "0 commits 0", "1 commits 0", "0 starts 1", "1 starts 1", "0 commits 1"],
            6.0,
        ),
    ],
)
def test_items_are_committed_when_they_end_and_start_if_the_mode_allows(
    mode: shardwell.Consistency, expected: list[str], duration_s: float
) -> None:
    log: list[str] = []
    ranks: Any = [FakeRank(index, log) for index in range(2)]
    setting = Setting(optimizer="SGD", rate=0.1, mode=mode, item_s=(1.0, 3.0))
    assert simulate(ranks, setting, num_items=2) == duration_s
    assert log == [*expected, "1 commits 1"]
