"""The undo log of a run: what a new process restores, wherever its predecessor ended."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch

from shardwell_server.shard.arithmetic.update_pieces import Changed, Piece
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.restart.undo import SUFFIX, SharedProgress, UndoLog, mapped, restore_interrupted
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import CapacityError
from shardwell_wire.host.server_folders import FolderOwner

OWNER = FolderOwner(server_id="s", coordinator="here:1")


class KilledError(Exception):
    """Raised where a process ends."""


class EndlessLog(UndoLog):
    """The log of a process that ends before it clears the word in the log's head."""

    def end(self) -> None:
        raise KilledError


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedMemory]:
    with closing(SharedMemory(tmp_path, OWNER)) as made:
        yield made


def test_piece_and_its_count_are_undone_together(shared: SharedMemory) -> None:
    file, ordinary = shared.create(256, "a shard"), torch.zeros(8)
    word, values = memory_at(file.tensor.data_ptr(), 8, file.tensor), file.tensor[64:]
    values.fill_(1)

    def progress(undo: UndoLog) -> SharedProgress:
        assert undo.reserve_pieces(1024)
        return SharedProgress(undo, word, step=3, files=mapped([file]))

    def add(amount: int) -> Piece:
        return Piece(lambda: (values.add_(amount), ordinary.add_(amount)), Changed([values, ordinary]))

    progress(UndoLog(None, shared)).run(add(2))
    killed = progress(EndlessLog(None, shared))
    with suppress(KilledError):
        killed.run(add(4))
    assert (killed.done, values[0].item()) == (2, 7)
    for _ in range(2):  # a process that was killed while it restored is followed by another one
        assert restore_interrupted(shared)
        assert (progress(UndoLog()).done, bool(values.eq(3).all())) == (1, True)
    values.fill_(9)
    assert restore_interrupted(shared) and values[0].item() == 9, "the copies do not count any more"


def test_log_that_names_a_missing_file_makes_all_shards_unusable(shared: SharedMemory) -> None:
    file = shared.create(64, "a shard")
    undo = EndlessLog(None, shared)
    assert undo.reserve_pieces(64)
    progress = SharedProgress(undo, memory_at(file.tensor.data_ptr(), 8, file.tensor), step=0, files=mapped([file]))
    with suppress(KilledError):
        progress.run(Piece(lambda: None, Changed([file.tensor[8:]])))
    file.unlink()
    assert not restore_interrupted(shared)


def test_log_without_bytes_changes_nothing(shared: SharedMemory) -> None:
    (shared.folder / f"log{SUFFIX}").touch()  # the process was killed before it had memory for the log
    assert restore_interrupted(shared)


def test_closed_log_releases_its_memory() -> None:
    undo = UndoLog()
    assert undo.reserve_pieces(64)
    memory = weakref.ref(undo._tensor)
    undo.close()
    assert memory() is None


def test_log_is_refused_where_shared_memory_is_full(shared: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CapacityError("full")

    monkeypatch.setattr(shared, "create", refuse)
    assert not UndoLog(None, shared).reserve_pieces(64)
