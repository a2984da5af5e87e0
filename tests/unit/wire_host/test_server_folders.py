"""Tests for the folders of shard servers in shared memory."""

from __future__ import annotations

import errno
import os
from argparse import Namespace
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from shardwell_server.shard.memory import mapped_memory
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.process import command
from shardwell_wire.errors import ConflictError
from shardwell_wire.host import server_folders
from shardwell_wire.host.server_folders import (
    RECORD_SUFFIX,
    FolderOwner,
    LockedFolder,
    make_folder,
    own_identity,
    remove_remains,
    take_folder,
)
from shardwell_wire.host.shared_memory import SOCKET_NAME

OWNER = FolderOwner(server_id="s", coordinator="localhost:1")


def test_a_folder_can_be_taken_up_while_other_servers_look_for_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = FolderOwner(server_id="s", coordinator="localhost:1", supervisor=own_identity())
    former = make_folder(tmp_path, owner)
    (former.path / f"unit{RECORD_SUFFIX}").touch()
    os.close(former.lock)  # the process ended
    taken, is_garbage = [], server_folders._is_garbage

    def take_meanwhile(*arguments: object) -> bool:
        if not taken:
            taken.append(take_folder(tmp_path, owner))
        return is_garbage(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(server_folders, "_is_garbage", take_meanwhile)
    remove_remains(tmp_path)
    (found,) = taken
    assert found is not None
    assert found.path == former.path
    found.remove()


def left_folder(directory: Path, owner: FolderOwner) -> LockedFolder:
    """Makes the folder of a process that has a shard, and still holds the lock."""
    former = make_folder(directory, owner)
    (former.path / f"unit{RECORD_SUFFIX}").touch()
    return former


def test_a_new_process_waits_for_the_end_of_the_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = left_folder(tmp_path, OWNER)
    monkeypatch.setattr(mapped_memory.time, "sleep", lambda _: os.close(former.lock))  # the kernel releases the lock
    with closing(SharedMemory(tmp_path, OWNER)) as shared:
        assert shared.folder == former.path and shared.keeps_shards


def test_a_folder_of_a_running_process_is_no_reason_to_start_without_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = left_folder(tmp_path, OWNER)
    monkeypatch.setattr(mapped_memory, "_ENDING_S", -1.0)
    with pytest.raises(ConflictError, match=r"'s': another process .* holds .*: give every server its own id \(--id"):
        SharedMemory(tmp_path, OWNER)
    assert [*tmp_path.iterdir()] == [former.path]
    os.close(former.lock)


def test_a_folder_is_taken_up_although_shared_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    former = left_folder(tmp_path, OWNER)
    os.close(former.lock)
    monkeypatch.setattr(server_folders, "write_whole", refuse)
    again = replace(OWNER, supervisor=own_identity())
    with closing(SharedMemory(tmp_path, again)) as shared:
        assert shared.folder == former.path and shared.keeps_shards


def test_a_server_that_cannot_open_its_folder_does_not_start_without_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    former = left_folder(tmp_path, OWNER)
    os.close(former.lock)
    arguments = Namespace(
        id="s", coordinator="localhost:1", owns_nothing=False, supervisor="", state_dir="", shm_dir=str(tmp_path)
    )
    monkeypatch.setattr(command, "SharedMemory", refuse)
    with pytest.raises(OSError, match="Too many open files"), command._shared_memory(arguments):
        pass
    assert former.path.is_dir()


def test_other_users_may_only_enter_a_folder_also_one_of_an_older_version(tmp_path: Path) -> None:
    owner = FolderOwner(server_id="s", coordinator="localhost:1")
    former = make_folder(tmp_path, owner)
    assert former.path.stat().st_mode & 0o777 == 0o711
    former.path.chmod(0o700)
    os.close(former.lock)  # the process ended
    found = take_folder(tmp_path, owner)
    assert found is not None
    assert found.path.stat().st_mode & 0o777 == 0o711
    found.remove()


def test_socket_survives_the_removal_of_a_former_process_files(tmp_path: Path) -> None:
    with closing(SharedMemory(tmp_path)) as shared:
        (shared.folder / SOCKET_NAME).touch()
        shared.create(8, "a shard")
        shared.remove_all_but([])
        assert {path.name for path in shared.folder.iterdir()} == {SOCKET_NAME, "lock"}
