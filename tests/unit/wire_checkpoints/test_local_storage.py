"""Checkpoint folders on a local disk while several processes change them."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwell_wire.checkpoints.storage import LocalStorage
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


def _write_in_random_parts(storage: LocalStorage, name: str, data: bytes, seed: int) -> None:
    """Writes a file in parts of random sizes, in a random order."""
    rng = random.Random(seed)
    positions = sorted({0, *(rng.randrange(len(data)) for _ in range(12))})
    parts = list(zip(positions, [*positions[1:], len(data)], strict=True))
    rng.shuffle(parts)
    file = storage.create(name, len(data))
    for start, stop in parts:
        file.write(data[start:stop], start)
    file.finish()


@pytest.mark.parametrize("seed", range(4))
def test_a_file_has_all_bytes_whatever_the_parts_and_their_order(tmp_path: Path, seed: int) -> None:
    data = random.Random(seed).randbytes((9 << 20) + 777)  # several windows for direct writes, and a rest
    storage = LocalStorage(tmp_path)
    _write_in_random_parts(storage, "file", data, seed)
    assert storage.read("file") == data


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_without_direct_writes_gets_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    open_file, write_file, direct, refusals = os.open, os.pwrite, set[int](), []

    def open_or_refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and refused == "open":
            refusals.append("open")
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = open_file(path, flags & ~os.O_DIRECT, mode)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def write_or_refuse(descriptor: int, data: memoryview, position: int) -> int:
        if descriptor in direct:
            refusals.append("write")
            raise OSError(errno.EINVAL, "Invalid argument")
        return write_file(descriptor, data, position)

    monkeypatch.setattr(os, "open", open_or_refuse)
    monkeypatch.setattr(os, "pwrite", write_or_refuse)
    data = random.Random(0).randbytes((5 << 20) + 1)
    _write_in_random_parts(LocalStorage(tmp_path), "file", data, seed=1)
    assert LocalStorage(tmp_path).read("file") == data
    assert refusals == [refused]
