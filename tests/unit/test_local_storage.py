"""Checkpoint folders on a local disk while several processes change them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwell_wire.checkpoints.local_storage import LocalStorage
from shardwell_wire.errors import NotFoundError


def test_a_folder_is_deleted_although_another_process_removes_a_file_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).touch()
    remove, calls = shutil.rmtree, []

    def lose_a_race(path: Path, *arguments: Any) -> None:
        calls.append(path)
        if len(calls) == 1:
            (path / "a").unlink()
            raise FileNotFoundError(2, "No such file or directory", str(path / "a"))
        remove(path, *arguments)

    monkeypatch.setattr(shutil, "rmtree", lose_a_race)
    LocalStorage(tmp_path).delete_folder("step-1")
    assert not folder.exists() and calls == [folder, folder]


def test_no_file_is_created_in_a_folder_that_was_removed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "step-1")
    with pytest.raises(NotFoundError, match=r"step-1 does not exist on this host. .*aborted.* share the folder"):
        storage.create("shards-a.safetensors", 10)
    assert not (tmp_path / "step-1").exists()
    storage.make_folder("")
    storage.create("shards-a.safetensors", 10).abort()
