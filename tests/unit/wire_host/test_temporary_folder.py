"""Temporary folders are removed by their process, or by another process if theirs was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shardwell_wire.host.server_folders import TEMPORARY_PREFIX, TemporaryFolder, temporary_folder

HOLD = """
import sys
from shardwell_wire.host.server_folders import TemporaryFolder
made = TemporaryFolder()
(made.path / "state").mkdir()
print(made.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_process_removes_its_folder(directory: Path) -> None:
    with temporary_folder() as first, temporary_folder() as second:
        assert first != second and first.is_dir() and second.is_dir()
        assert all(
            path.name.startswith(TEMPORARY_PREFIX) and path.stat().st_mode & 0o077 == 0 for path in (first, second)
        )
    assert not list(directory.iterdir())


def test_next_process_removes_folder_of_killed_process(directory: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        with temporary_folder():
            assert (left / "state").is_dir(), "its process is alive"
        process.kill()
        process.wait(20)
    assert left.is_dir()
    TemporaryFolder().remove()
    assert not list(directory.iterdir())


def test_folders_without_a_lock_file_stay(directory: Path) -> None:
    notes = directory / f"{TEMPORARY_PREFIX}notes"
    notes.mkdir(mode=0o700)
    link = directory / f"{TEMPORARY_PREFIX}link"
    link.symlink_to(notes)
    (directory / f"{TEMPORARY_PREFIX}file").touch()
    with temporary_folder():
        pass
    assert sorted(path.name.removeprefix(TEMPORARY_PREFIX) for path in directory.iterdir()) == ["file", "link", "notes"]
