"""Reports of trainers about the residuals of error feedback in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwell_server.coordinator.checkpoints.saving import usable_files
from shardwell_server.coordinator.run_checkpoints import ResidualReport, ResidualReports
from shardwell_wire.checkpoints.format import FileRecord
from shardwell_wire.checkpoints.manifest import Manifest
from shardwell_wire.checkpoints.storage import LocalStorage
from shardwell_wire.errors import StepStateError
from shardwell_wire.model.topology import World

FILE = FileRecord(
    name="residuals-1.safetensors", server_id="trainer-1", size_bytes=100, header_bytes=50, header_xxh3_64="0" * 16
)
ZEROS = ResidualReport(frozenset({0}), None, "")
WRITTEN = ResidualReport(frozenset({0}), FILE, "")


def test_repeated_report_is_accepted_after_the_end() -> None:
    reports = ResidualReports()
    reports.add("a", WRITTEN)
    assert list(reports.end()) == [("a", WRITTEN)]
    reports.add("a", WRITTEN)
    with pytest.raises(StepStateError, match="without these residuals"):
        reports.add("b", ZEROS)


def test_report_without_a_file_does_not_replace_a_file() -> None:
    reports = ResidualReports()
    reports.add("a", ZEROS)
    reports.add("a", WRITTEN)
    reports.add("a", ZEROS)
    assert list(reports.end()) == [("a", WRITTEN)]


def test_rank_has_residuals_if_all_trainers_of_its_replica_reported_them(tmp_path: Path) -> None:
    manifest = Manifest(
        run="r",
        run_id="id",
        checkpoint_id="checkpoint",
        step=1,
        created=0.0,
        world=World(dp=2, tp=2),
        seed=0,
        units=(),
        files=(),
    )
    both = ResidualReport(frozenset({0, 1}), None, "")
    assert usable_files(LocalStorage(tmp_path), manifest, [("a", both), ("b", ZEROS)], 2) == ([], {0}, [])
    assert usable_files(LocalStorage(tmp_path), manifest, [("a", both)], 1) == ([], {0, 1}, [])
