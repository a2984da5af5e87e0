"""Tests of the folder that processes of one host share: nothing remains when processes die."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from shardwell.peers import host_folder
from shardwell.peers.host_folder import MEMORY, HostFolder
from tests.support.processes import ROOT

ENTER = """
import sys
from pathlib import Path
from shardwell.peers.host_folder import HostFolder

folder = HostFolder("key", Path(sys.argv[1]))

def say(text):
    print(text, flush=True)
"""


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder of a memory file system."""
    with TemporaryDirectory(dir=MEMORY, prefix="shardwell_test-") as path:
        yield Path(path)


class Trainer:
    """Another process that uses the folder."""

    def __init__(self, memory: Path, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENTER + script, str(memory)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_files_are_private_to_the_user(memory: Path) -> None:
    folder = HostFolder("key", memory)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.path.iterdir()} == {0o600}
    folder.close()


def test_folder_writable_by_others_is_rejected(memory: Path) -> None:
    with_name = HostFolder("key", memory)
    with_name.close()
    with_name.path.mkdir()
    with_name.path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"expected a folder of user .* found one with mode 0777"):
        HostFolder("key", memory)


def test_missing_shared_memory_raises(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError):
        HostFolder("key", tmp_path / "missing")


def test_last_process_removes_the_folder(memory: Path) -> None:
    folders = [HostFolder("key", memory) for _ in range(3)]
    for folder in folders:
        assert list(memory.iterdir()) == [folders[0].path]
        folder.close()
    assert not list(memory.iterdir())


def test_folder_exists_while_used_under_concurrent_entering_and_leaving(memory: Path) -> None:
    def enter_and_leave(number: int) -> None:
        for turn in range(50):
            folder = HostFolder("key", memory)
            own = folder.path / f"{number}-{turn}"
            own.touch()
            assert own.exists(), "removed while in use"
            folder.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(enter_and_leave, range(4)))
    assert not list(memory.iterdir())


def test_folders_of_killed_trainers_are_removed_by_any_run(memory: Path) -> None:
    with Trainer(memory, "say('here'); sys.stdin.readline()") as other:
        assert other.read_line() == "here"
        alive = HostFolder("another", memory)
        assert len(list(memory.iterdir())) == 2, "folders in use are not removed"
        other.process.send_signal(signal.SIGKILL)
        other.process.wait(30)
    (memory / f"shardwell_cache-{os.geteuid()}-emptied").mkdir(mode=0o700)
    (memory / "not ours").mkdir()
    third = HostFolder("third", memory)
    assert len(list(memory.iterdir())) == 3
    for folder in (alive, third):
        folder.close()
    assert [path.name for path in memory.iterdir()] == ["not ours"]


def test_aborted_removal_is_resumed(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = HostFolder("key", memory)
    (folder.path / "file").touch()

    def cut(path: Path) -> None:
        raise OSError(errno.EIO, "aborted")

    with monkeypatch.context() as patched:
        patched.setattr(host_folder, "_remove_empty", cut)
        folder.close()
    assert list(folder.path.iterdir()) == []
    HostFolder("other", memory).close()
    assert not list(memory.iterdir())
