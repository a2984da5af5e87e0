"""Tests for the folders of shard servers in shared memory."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_wire.host import server_folders
from shardwell_wire.host.server_folders import (
    RECORD_SUFFIX,
    FolderOwner,
    make_folder,
    own_identity,
    remove_remains,
    take_folder,
)
from shardwell_wire.host.shared_memory import SOCKET_NAME


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
