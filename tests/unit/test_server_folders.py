"""Tests for the folders of shard servers in shared memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwell_wire import server_folders
from shardwell_wire.process_identity import own_identity
from shardwell_wire.server_folders import RECORD_SUFFIX, FolderOwner, make_folder, remove_remains, take_folder


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
