"""Records of shards, and the words in shared memory that continue them from step to step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.restart.shard_record import (
    MAX_UPDATES,
    PartRecord,
    Prepared,
    PreparedRecord,
    ShardDescription,
    StepWord,
    decode,
    encode_spec,
    next_generation,
)
from shardwell_server.shard.shard_spec import ShardSpec
from shardwell_server.shard.state import taking_up
from shardwell_wire.host.server_folders import FolderOwner
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2
from tests.support.shard_server import OneUnit, ShardServer, layout_of

LAYOUT = layout_of(weight=((17, 5), "float32"), bias=((5,), "float32"))
OWNER = FolderOwner(server_id="s", coordinator="here:1")


@pytest.mark.parametrize("prepared", Prepared)
@pytest.mark.parametrize("version", [0, 1, (1 << 32) - 1])
def test_word_keeps_every_field(version: int, prepared: Prepared) -> None:
    place = memoryview(bytearray(8))
    for word in (StepWord(255, version, MAX_UPDATES, prepared), StepWord(1, version, 0, prepared)):
        word.write(place)
        assert StepWord.read(place) == word


def test_word_that_was_never_written_continues_no_record() -> None:
    assert StepWord.read(memoryview(bytearray(8))).generation == 0
    generation = 0
    for _ in range(600):
        former, generation = generation, next_generation(generation)
        assert generation not in (0, former) and generation < 256


def description() -> ShardDescription:
    layout = UnitLayout.from_proto(common_pb2.UnitSpec(name="u"))
    spec = ShardSpec(run=RunIdentity("r", "1"), layout=layout, index=0, start_bytes=0, stop_bytes=0, dp=2)
    parts = [PartRecord("sgd", 3, {}, None), PartRecord(None, 0, {}, None)]
    record = ShardDescription(
        spec=spec, version=4, values="v", files={}, parts=parts, generation=7, present=[1], counted=[0]
    )
    return decode(record.encode(encode_spec(spec)))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Prepared.NO, None),
        (Prepared.GRADIENTS, PreparedRecord([1], skipped=False)),
        (Prepared.SKIPPED, PreparedRecord([], skipped=True)),
        (Prepared.EMPTY, PreparedRecord([], skipped=False)),
    ],
)
def test_word_continues_its_record(kind: Prepared, expected: PreparedRecord | None) -> None:
    found = description().continued(StepWord(7, 9, 5, kind))
    assert (found.version, found.prepared, [part.step_count for part in found.parts]) == (9, expected, [8, 0])


def test_word_of_another_record_is_void() -> None:
    record = description()
    assert record.continued(StepWord(6, 9, 5, Prepared.SKIPPED)) == record


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedMemory]:
    with closing(SharedMemory(tmp_path, OWNER)) as made:
        yield made


def saved(shared: SharedMemory) -> ShardDescription:
    (record, _), *others = [taking_up.read(shared, data) for data in shared.records().values()]
    assert not others
    return record


@pytest.mark.parametrize("dp", [1, 2])
def test_steps_replace_no_record(dp: int, shared: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write_record = SharedMemory.write_record

    def note(self: SharedMemory, name: str, data: bytes) -> None:
        written.append(name)
        write_record(self, name, data)

    monkeypatch.setattr(SharedMemory, "write_record", note)
    with ShardServer(shared=shared) as server:
        unit = OneUnit(server, LAYOUT, dp=dp).begin()
        for step in range(6):
            gradients = [None, None] if step == 5 else unit.filled(1.0)
            for rank in range(dp):
                unit.push(gradients, step=step, rank=rank)
            unit.prepare(step, optimizer=unit.update_request(step, momentum=0.9).optimizer)
            assert saved(shared).prepared == PreparedRecord([] if step == 5 else [0, 1], skipped=False)
            unit.update(step, momentum=0.9)
            found = saved(shared)
            assert (found.version, found.prepared) == (step + 1, None)
            assert [part.step_count for part in found.parts] == [min(step + 1, 5)] * 2
            assert bool(written) == (step in (0, 5)), step  # the first update allocates state; the last has no gradient
            written.clear()


@pytest.mark.parametrize("dp", [1, 2])
def test_step_that_was_skipped_at_first_is_saved_when_it_is_not(dp: int, shared: SharedMemory) -> None:
    with ShardServer(shared=shared) as server:
        unit = OneUnit(server, LAYOUT, dp=dp).begin()
        for rank in range(dp):
            unit.push(unit.filled(1.0), rank=rank)
        unit.prepare(0, skip=True)
        assert saved(shared).prepared == PreparedRecord([], skipped=True)
        unit.prepare(0)  # the gradient that was not finite belonged to another shard, and was computed again
        assert saved(shared).prepared == PreparedRecord([0, 1], skipped=False)


def test_folder_of_a_server_that_only_updates_in_place_stays_new(
    shared: SharedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = tmp_path.iterdir()
    with ShardServer(shared=shared) as server:
        unit = OneUnit(server, LAYOUT).begin()

        def step(number: int) -> float:
            unit.push(unit.filled(1.0), step=number)
            os.utime(folder, (1.0, 1.0))
            unit.prepare(number)
            unit.update(number)
            return folder.stat().st_mtime

        step(0)
        assert step(1) == 1.0
        monkeypatch.setattr(shared, "_noted_at", shared._noted_at - 2 * 3600.0)
        assert step(2) > 1.0
