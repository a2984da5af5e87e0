"""The benchmark of a server's steps runs, and leaves nothing in shared memory."""

from __future__ import annotations

import pytest

from benchmarks import server_steps
from shardwell_wire.host.server_folders import DEFAULT_DIRECTORY


def test_benchmark_prints_a_row_per_case(capsys: pytest.CaptureFixture[str]) -> None:
    server_steps.main(["--units", "2", "--dp", "1", "3", "--optimizers", "sgd", "adamw", "--steps", "2"])
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert [row[:3] for row in rows[2:]] == [["2", dp, name] for dp in ("1", "3") for name in ("sgd", "adamw")]
    assert all(float(cell) >= 0.0 for row in rows[2:] for cell in row[3:])
    assert not list(DEFAULT_DIRECTORY.glob(f"{server_steps.OWNER.prefix}*"))
