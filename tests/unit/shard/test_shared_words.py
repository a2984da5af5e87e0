"""Words in shared memory, which other processes read at any time."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwell_server.shard.arithmetic.update_pieces import Changed, Piece
from shardwell_server.shard.restart.shard_record import Prepared, StepWord
from shardwell_server.shard.restart.undo import SharedProgress, UndoLog
from shardwell_wire.host.shared_memory import UPDATING, read_version, write_version

READER = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    words = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
print("ready", flush=True)
found, stop = set(), time.monotonic() + 0.3
while time.monotonic() < stop:
    found.update([words[0] for _ in range(1000)])
print(min(found))
"""


def write_versions(place: memoryview) -> None:
    for _ in range(1000):
        write_version(place, 3)
        write_version(place, UPDATING)


STEP_WORD = StepWord(1, 5, 0, Prepared.NO)


def write_step_words(place: memoryview) -> None:
    for _ in range(1000):
        STEP_WORD.write(place)


def write_progress(place: memoryview) -> None:
    values = torch.zeros(4)
    undo = UndoLog()
    assert undo.reserve_pieces(values.nbytes)
    progress = SharedProgress(undo, place, step=9)
    for _ in range(1000):
        progress.run(Piece(lambda: None, Changed([values])))


@pytest.mark.parametrize("write", [write_versions, write_step_words, write_progress])
def test_no_process_sees_a_word_that_was_not_stored(write: Callable[[memoryview], None], tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        place = memoryview(memory)
        write(place)
        with subprocess.Popen([sys.executable, "-c", READER, path], stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
            while reader.poll() is None:
                write(place)
            least = int(reader.stdout.read())
        place.release()
    assert least > 0


def test_negative_words_keep_their_sign() -> None:
    place = memoryview(bytearray(8))
    write_version(place, UPDATING)
    assert read_version(place) == UPDATING
