"""Tests for the files of a stopped server: in shared memory, and on disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwell_server.shard.memory import saved_files
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.memory.saved_files import SavedFiles
from shardwell_wire.errors import CapacityError, CorruptDataError
from shardwell_wire.host.server_folders import FolderOwner, make_folder, own_identity, remove_remains, take_folder

OWNER = FolderOwner(server_id="s", coordinator="here:1")
CONTENTS = {"record.shard": b"a record", "values": bytes(range(256)) * 40_000, "empty": b""}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, data in {**CONTENTS, "unnamed": b"a gradient of a trainer"}.items():
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> SavedFiles:
    return SavedFiles(tmp_path / "state" / "shards", OWNER)


def shared_memory(tmp_path: Path, saved: SavedFiles | None = None, owner: FolderOwner | None = OWNER) -> SharedMemory:
    directory = tmp_path / "shm"
    directory.mkdir(exist_ok=True)
    return SharedMemory(directory, owner, saved)


def contents(shared: SharedMemory) -> dict[str, bytes]:
    return {name: (shared._directory / name).read_bytes() for name in shared.names("") if shared.has(name)}


def test_saved_files_are_taken_up_once(tmp_path: Path, source: Path, saved: SavedFiles) -> None:
    assert saved.write(source, CONTENTS) == sum(map(len, CONTENTS.values()))
    shared = shared_memory(tmp_path, saved)
    assert {name: data for name, data in contents(shared).items() if name in CONTENTS} == CONTENTS
    assert not shared.has("unnamed") and shared.keeps_shards
    shared.save(CONTENTS)  # stopped before it was registered
    found = saved.find()
    assert found is not None and found.name.endswith("-1")
    shared.remove_saved()
    assert saved.find() is None and not list(saved.directory.iterdir())
    shared.close()
    again = shared_memory(tmp_path, saved)
    assert again._directory == shared._directory, "shared memory is taken up first"
    again.save(CONTENTS)
    assert saved.find() is not None
    again.close()


def test_saved_files_replace_a_folder_without_shards(tmp_path: Path, source: Path, saved: SavedFiles) -> None:
    (tmp_path / "shm").mkdir()
    empty = make_folder(tmp_path / "shm", OWNER)
    empty.leave()
    saved.write(source, CONTENTS)
    shared = shared_memory(tmp_path, saved)
    assert shared.has("record.shard") and not empty.path.exists()
    shared.close()


def test_the_newest_complete_folder_is_taken_up(source: Path, saved: SavedFiles) -> None:
    for number in range(1, 12):
        saved.write(source, CONTENTS)
        found = saved.find()
        assert found is not None and found.name == f"{OWNER.prefix}{number}"
    assert len(list(saved.directory.iterdir())) == 1
    other = SavedFiles(saved.directory, FolderOwner(server_id="t", coordinator="here:1"))
    assert other.find() is None
    other.remove()
    assert saved.find() is not None


def test_nothing_is_saved_by_a_process_that_ends_in_between(tmp_path: Path, source: Path, saved: SavedFiles) -> None:
    program = f"""
import os
from pathlib import Path
from shardwell_server.shard.memory import saved_files
from shardwell_wire.host.server_folders import FolderOwner
saved_files._write_durably = lambda *_: os._exit(7)
owner = FolderOwner(server_id="s", coordinator="here:1")
saved_files.SavedFiles(Path({str(saved.directory)!r}), owner).write(Path({str(source)!r}), ["values"])
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 7
    assert saved.find() is None and list(saved.directory.iterdir())
    saved.write(source, CONTENTS)
    assert saved.find() is not None and len(list(saved.directory.iterdir())) == 1


def test_a_full_disk_leaves_what_was_saved_before(
    tmp_path: Path, source: Path, saved: SavedFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saved.write(source, CONTENTS)
    before = saved.find()
    with monkeypatch.context() as patch:
        patch.setattr(saved_files.os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            saved.write(source, CONTENTS)
        assert [saved.find()] == list(saved.directory.iterdir()) == [before]
        saved.remove()
        shared = shared_memory(tmp_path, saved)
        shared.write_record("record.shard", b"a record")
        shared.save(["record.shard"])
        assert "are not saved in" in caplog.text and "No space left on device" in caplog.text
        shared.close()
    assert (shared._directory / "record.shard").exists()


@pytest.mark.parametrize("damage", ["changed", "short", "missing", "list", "path"])
def test_damaged_files_are_not_taken_up(damage: str, tmp_path: Path, source: Path, saved: SavedFiles) -> None:
    saved.write(source, CONTENTS)
    found = saved.find()
    assert found is not None
    if damage == "changed":
        with (found / "values").open("r+b") as file:
            file.seek(5_000_000)
            file.write(b"\xff\xfe")
    elif damage == "short":
        os.truncate(found / "values", 100)
    elif damage == "missing":
        (found / "values").unlink()
    elif damage == "list":
        (found / "files.json").write_text("{}")
    else:
        listed = (found / "files.json").read_text()
        (found / "files.json").write_text(listed.replace("values", "../values"))
    with pytest.raises(CorruptDataError, match=r"cannot take up the saved shards .* discard"):
        shared_memory(tmp_path, saved)
    assert not list((tmp_path / "shm").iterdir()), "no folder remains"
    assert saved.find() == found


def test_saved_files_that_do_not_fit_are_refused(tmp_path: Path, source: Path, saved: SavedFiles) -> None:
    saved.write(source, CONTENTS)
    found = saved.find()
    assert found is not None
    with pytest.raises(CapacityError, match=r"have 10240008 bytes, but the shared memory at .* offers 10240007"):
        saved.fill(found, tmp_path / "target", free_bytes=10_240_007)
    assert not (tmp_path / "target").exists()


def test_a_server_leaves_a_folder_only_if_somebody_can_take_it_up(tmp_path: Path) -> None:
    ended = own_identity().rpartition("/")[0] + "/1"  # this process, had it started at another time
    for owner, kept in (
        (None, False),
        (OWNER, True),
        (FolderOwner(server_id="t", coordinator="here:1", supervisor=own_identity()), True),
        (FolderOwner(server_id="u", coordinator="here:1", supervisor=ended), False),
    ):
        for has_shards in (False, True):
            shared = shared_memory(tmp_path, owner=owner)
            if has_shards:
                shared.write_record("0.shard", b"a record")
            assert shared.keeps_shards == (kept and has_shards)
            shared.close()
            assert shared._directory.exists() == (kept and has_shards)


def test_a_folder_that_is_being_filled_belongs_to_nobody(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "0.shard").touch()
        remove_remains(tmp_path)  # other processes look
        assert folder.exists() and take_folder(tmp_path, OWNER) is None

    def fail(folder: Path) -> None:
        fill(folder)
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        make_folder(tmp_path, OWNER, fail)
    assert not list(tmp_path.iterdir())
    made = make_folder(tmp_path, OWNER, fill)
    made.leave()
    taken = take_folder(tmp_path, OWNER)
    assert taken is not None and taken.path == made.path
    taken.remove()
    unfinished = make_folder(tmp_path, OWNER)
    (unfinished.path / "0.shard").touch()
    (unfinished.path / "owner.json").unlink()
    unfinished.leave()  # the process was killed while it filled the folder
    remove_remains(tmp_path)
    assert not list(tmp_path.iterdir())
