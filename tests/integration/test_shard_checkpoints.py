"""Checkpoints on one shard server: a consistent version while training goes on, and loading it for any cuts."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.state import taking_up
from shardwell_server.shard.unit import portable_state
from shardwell_wire import fault_points
from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.checkpoints.format import FileRecord
from shardwell_wire.checkpoints.manifest import Manifest
from shardwell_wire.checkpoints.reading import Checkpoint
from shardwell_wire.checkpoints.storage import LocalStorage
from shardwell_wire.errors import CorruptDataError, NotFoundError, StaleEpochError, StepStateError
from shardwell_wire.host.server_folders import FolderOwner
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import shard_pb2
from tests.support.cut_states import restrict
from tests.support.shard_server import OneUnit, ShardServer, error_of, in_background, layout_of

LAYOUT = layout_of(large=((300, 400), "float32"), odd=((17, 3), "float32"), small=((5,), "float64"))
BIG = layout_of(large=((3000, 400), "float32"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a checkpoint, which the coordinator creates before the servers begin."""
    made = tmp_path / "r" / "step-000000002-abc"
    made.mkdir(parents=True)
    return made


class Checkpoints:
    """Saves and loads one unit."""

    def __init__(self, unit: OneUnit, folder: Path) -> None:
        self.unit, self.folder = unit, folder

    def begin(self, version: int, checkpoint_id: str = "abc", **changes: Any) -> Any:
        request = shard_pb2.BeginCheckpointRequest(
            context=self.unit.context(version), checkpoint_id=checkpoint_id, url=str(self.folder)
        )
        return self.unit.server.call("BeginCheckpoint", request)

    def describe(self, checkpoint_id: str = "abc", wait_s: float = 10.0) -> shard_pb2.DescribeCheckpointResponse:
        request = shard_pb2.DescribeCheckpointRequest(
            context=self.unit.context(), checkpoint_id=checkpoint_id, wait_s=wait_s
        )
        response: shard_pb2.DescribeCheckpointResponse = self.unit.server.call("DescribeCheckpoint", request)
        return response

    def abort(self, checkpoint_id: str = "abc") -> None:
        request = shard_pb2.AbortCheckpointRequest(context=self.unit.context(), checkpoint_id=checkpoint_id)
        self.unit.server.call("AbortCheckpoint", request)

    def publish(self, version: int, *described: shard_pb2.DescribeCheckpointResponse) -> None:
        """Writes the manifest, as the coordinator does."""
        files = []
        for response in described:
            assert response.HasField("file_json"), response.error
            assert response.written_bytes == response.total_bytes
            files.append(FileRecord.from_dict(json.loads(response.file_json)))
        manifest = Manifest(
            run="r",
            run_id=self.unit.identity.run_id,
            checkpoint_id="abc",
            step=version,
            created=1.0,
            world=World(dp=self.unit.dp),
            seed=0,
            units=(self.unit.layout,),
            files=tuple(files),
        )
        RunFolder.of(self.folder.parent.parent, "r").publish(self.folder.name, manifest)

    def begin_restore(self, restore: int, min_epoch: int = 0) -> None:
        request = shard_pb2.BeginRestoreRequest(context=self.unit.context(), restore=restore, min_epoch=min_epoch)
        self.unit.server.call("BeginRestore", request)

    def load(self, version: int, restore: int = 1) -> shard_pb2.LoadShardsResponse:
        request = shard_pb2.LoadShardsRequest(
            context=self.unit.context(version), restore=restore, url=str(self.folder), wait_s=10.0
        )
        response: shard_pb2.LoadShardsResponse = self.unit.server.call("LoadShards", request)
        return response


def random_gradients(unit: OneUnit, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    whole = {
        index: torch.randn(parameter.numel, generator=generator, dtype=torch.float64)
        for index, parameter in enumerate(unit.layout.parameters)
    }
    return [
        whole[at.parameter_index][at.start_element : at.stop_element].to(
            getattr(torch, unit.layout.parameters[at.parameter_index].dtype)
        )
        for at in unit.segments
    ]


def train(unit: OneUnit, steps: range, algorithm: str = "adamw", **options: Any) -> None:
    for step in steps:
        for rank in range(unit.dp):
            unit.push(random_gradients(unit, 10 * step + rank), step=step, rank=rank)
        unit.prepare(step)
        unit.update(step, algorithm=algorithm, **options)


def tensors(unit: OneUnit) -> dict[str, torch.Tensor]:
    """Returns copies of the unit's values and optimizer state on its server."""
    from shardwell_server.shard.unit.portable_state import export

    return unit.server.evaluate(lambda: {name: each.clone() for name, each in export(unit.shard).tensors()})


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def stored(folder: Path) -> dict[str, bytes]:
    checkpoint = Checkpoint.open(folder)
    return {
        piece.name: bytes(checkpoint.read(each))
        for name in checkpoint.parameters
        for state in checkpoint.states(name)
        for each in checkpoint.pieces(name, state)
        for piece in [each.piece]
    }


def bytes_of(state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}


class Gate:
    """Blocks the writing thread after its first window until ``open``."""

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()

    def __call__(self, details: Mapping[str, Any]) -> None:
        self.reached.set()
        assert self._opened.wait(30)

    def open(self) -> None:
        self._opened.set()


def test_a_checkpoint_has_the_version_at_its_begin_while_training_goes_on(server: ShardServer, folder: Path) -> None:
    unit = OneUnit(server, LAYOUT, dp=2).begin()
    train(unit, range(2))
    expected, checkpoints, gate = tensors(unit), Checkpoints(unit, folder), Gate()
    with fault_points.armed("server.checkpoint.middle", gate):
        checkpoints.begin(2)
        assert gate.reached.wait(20)
        before = server.unreserved_bytes()
        train(unit, range(2, 4))
        assert server.unreserved_bytes() > before, "what was not written was copied"
        gate.open()
        checkpoints.publish(2, checkpoints.describe())
    assert stored(folder) == bytes_of(expected)
    server.until(lambda: server.store.memory.unreserved.used_bytes == 0, "the copies are released")


def test_nothing_is_copied_if_the_file_is_complete_before_the_next_update(server: ShardServer, folder: Path) -> None:
    unit = OneUnit(server, LAYOUT).begin()
    train(unit, range(1))
    checkpoints = Checkpoints(unit, folder)
    checkpoints.begin(1)
    assert checkpoints.describe().HasField("file_json")
    acquired: list[int] = []
    memory = server.store.memory
    original = memory.try_acquire
    memory.try_acquire = lambda size: acquired.append(size) or original(size)  # type: ignore[method-assign]
    train(unit, range(1, 3))
    assert not acquired


def test_an_update_waits_for_the_file_if_there_is_no_memory_for_a_copy(
    server: ShardServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = OneUnit(server, BIG).begin()
    train(unit, range(1), algorithm="sgd", momentum=0.9)
    expected, checkpoints, gate = tensors(unit), Checkpoints(unit, folder), Gate()
    monkeypatch.setattr(portable_state, "MAX_WAIT_S", 60.0)
    monkeypatch.setattr(server.store.memory, "try_acquire", lambda size: None)
    with fault_points.armed("server.checkpoint.middle", gate):
        checkpoints.begin(1)
        assert gate.reached.wait(20)
        unit.push(random_gradients(unit, 1), step=1)
        unit.prepare(1)
        updated = in_background(lambda: unit.update(1, momentum=0.9))
        server.until(
            lambda: server.store.runs[unit.identity.run_id].capture.shards[0].wanted,  # type: ignore[union-attr]
            "the update waits",
        )
        assert server.evaluate(lambda: unit.shard.version) == 1
        gate.open()
        assert next(updated).version == 2
        checkpoints.publish(1, checkpoints.describe())
    assert stored(folder) == bytes_of(expected)


def test_a_checkpoint_that_delays_an_update_too_long_is_given_up(
    server: ShardServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = OneUnit(server, BIG).begin()
    train(unit, range(1), algorithm="sgd")
    checkpoints, gate = Checkpoints(unit, folder), Gate()
    monkeypatch.setattr(portable_state, "MAX_WAIT_S", 0.05)
    monkeypatch.setattr(server.store.memory, "try_acquire", lambda size: None)
    with fault_points.armed("server.checkpoint.middle", gate):
        checkpoints.begin(1)
        assert gate.reached.wait(20)
        train(unit, range(1, 2), algorithm="sgd")
        gate.open()
        assert "no memory for a copy" in checkpoints.describe().error
    assert not list(folder.iterdir()), "what was written is removed"


def test_abort_returns_when_the_file_is_gone(server: ShardServer, folder: Path) -> None:
    """The coordinator removes the folder next. The thread must not write to it any more."""
    unit = OneUnit(server, BIG).begin()
    train(unit, range(1))
    checkpoints, gate = Checkpoints(unit, folder), Gate()
    with fault_points.armed("server.checkpoint.middle", gate), ThreadPoolExecutor(1) as threads:
        checkpoints.begin(1)
        assert gate.reached.wait(20)
        aborting = threads.submit(checkpoints.abort)
        try:
            with pytest.raises(TimeoutError):
                aborting.result(0.2)  # the thread is still in the middle of the file
            assert list(folder.iterdir())
        finally:
            gate.open()
        aborting.result(20)
        assert not list(folder.iterdir())
        assert not checkpoints.describe().HasField("file_json")


@pytest.mark.parametrize("end", ["drop", "restore"])
def test_a_checkpoint_ends_with_its_run(server: ShardServer, folder: Path, end: str) -> None:
    unit = OneUnit(server, BIG).begin()
    train(unit, range(1))
    checkpoints, gate = Checkpoints(unit, folder), Gate()
    with fault_points.armed("server.checkpoint.middle", gate):
        checkpoints.begin(1)
        assert gate.reached.wait(20)
        {"drop": unit.drop, "restore": lambda: checkpoints.begin_restore(1)}[end]()
        gate.open()
        if end == "drop":
            assert isinstance(error_of(checkpoints.describe), NotFoundError)
        else:
            assert not checkpoints.describe().HasField("file_json")
    for thread in threading.enumerate():
        if thread.name == "shardwell-checkpoint":
            thread.join(20)
    assert not list(folder.iterdir())


def test_begin_is_idempotent_and_checks_the_version(server: ShardServer, folder: Path) -> None:
    unit = OneUnit(server, LAYOUT).begin()
    train(unit, range(1))
    checkpoints = Checkpoints(unit, folder)
    assert isinstance(error_of(lambda: checkpoints.begin(0)), StepStateError)
    checkpoints.begin(1)
    checkpoints.begin(1)
    assert checkpoints.describe().HasField("file_json")
    assert isinstance(error_of(lambda: checkpoints.describe("another")), NotFoundError)


def test_a_full_disk_is_reported_and_leaves_nothing(
    server: ShardServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = OneUnit(server, BIG).begin()
    train(unit, range(1))
    checkpoints = Checkpoints(unit, folder)
    original: Callable[..., int] = os.pwrite

    def full(descriptor: int, data: memoryview, position: int) -> int:
        if position > 1 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(descriptor, data[: 1 << 20], position)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        checkpoints.begin(1)
        response = checkpoints.describe()
    assert "No space left on device" in response.error
    assert not list(folder.iterdir())
    train(unit, range(1, 2))
    checkpoints.begin(2, "next")
    assert checkpoints.describe("next").HasField("file_json")


@pytest.mark.parametrize("algorithm", ["sgd", "adamw"])
def test_loading_for_other_cuts_and_going_on_gives_the_same_bits(
    server: ShardServer, folder: Path, algorithm: str
) -> None:
    options = {"momentum": 0.9} if algorithm == "sgd" else {}
    whole = OneUnit(server, LAYOUT, dp=2).begin()
    train(whole, range(2), algorithm, **options)
    checkpoints = Checkpoints(whole, folder)
    checkpoints.begin(2)
    checkpoints.publish(2, checkpoints.describe())
    train(whole, range(2, 4), algorithm, **options)
    cut = 40 * 4096
    for part in ((0, cut), (cut, LAYOUT.size_bytes)):
        with ShardServer() as other:
            piece = OneUnit(other, LAYOUT, dp=2, part=part)
            loading = Checkpoints(piece, folder)
            loading.begin_restore(1)
            piece.reserve()
            response = loading.load(2)
            assert response.loaded and response.loaded_bytes == response.total_bytes
            assert piece.gather()[0] == 2
            train(piece, range(2, 4), algorithm, **options)
            expected = whole.server.evaluate(lambda part=part: _restricted(whole, *part))
            assert_same(tensors(piece), expected)


def _restricted(unit: OneUnit, start: int, stop: int) -> dict[str, torch.Tensor]:
    from shardwell_server.shard.unit.portable_state import export

    return {name: each.clone() for name, each in restrict(export(unit.shard), start, stop).tensors()}


def test_loaded_shards_can_be_taken_up_by_the_next_process(server: ShardServer, folder: Path, tmp_path: Path) -> None:
    unit = OneUnit(server, LAYOUT).begin()
    train(unit, range(2))
    checkpoints = Checkpoints(unit, folder)
    checkpoints.begin(2)
    checkpoints.publish(2, checkpoints.describe())
    owner = FolderOwner(server_id="s", coordinator="here:1")
    with closing(SharedMemory(tmp_path, owner)) as shared, ShardServer(shared=shared) as other:
        resumed = OneUnit(other, LAYOUT)
        loading = Checkpoints(resumed, folder)
        loading.begin_restore(1)  # the server has not heard of the run before
        resumed.reserve()
        loading.load(2)
        (record, _), *others = [taking_up.read(shared, data) for data in shared.records().values()]
        assert not others
        assert (record.version, [part.step_count for part in record.parts]) == (2, [2, 2, 2])


def test_shards_without_updates_have_no_state_after_loading(server: ShardServer, folder: Path) -> None:
    unit = OneUnit(server, LAYOUT).begin()
    unit.push([random_gradients(unit, 0)[0], None, None], step=0)
    unit.prepare(0)
    unit.update(0, momentum=0.9)
    checkpoints = Checkpoints(unit, folder)
    checkpoints.begin(1)
    checkpoints.publish(1, checkpoints.describe())
    expected = tensors(unit)
    assert sum("momentum_buffer" in name for name in expected) == 1
    checkpoints.begin_restore(1)
    unit.reserve(placement=5)
    checkpoints.load(1)
    assert_same(tensors(unit), expected)


@pytest.mark.parametrize("damage", ["flip", "missing", "truncated"])
def test_damage_is_reported_by_file_and_tensor(server: ShardServer, folder: Path, damage: str) -> None:
    unit = OneUnit(server, LAYOUT).begin()
    train(unit, range(1))
    checkpoints = Checkpoints(unit, folder)
    checkpoints.begin(1)
    checkpoints.publish(1, checkpoints.describe())
    path = folder / "shards-here.safetensors"
    if damage == "flip":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    elif damage == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1)
    checkpoints.begin_restore(1)
    unit.reserve(placement=5)
    error = error_of(lambda: checkpoints.load(1))
    assert isinstance(error, CorruptDataError)
    assert "shards-here.safetensors" in str(error)
    if damage == "flip":
        assert "u." in str(error) and "|" in str(error), "the tensor is named"


def test_a_restore_rejects_older_epochs_and_attempts_of_a_former_restore(server: ShardServer, folder: Path) -> None:
    unit = OneUnit(server, LAYOUT).begin()
    train(unit, range(1))
    checkpoints = Checkpoints(unit, folder)
    checkpoints.begin(1)
    checkpoints.publish(1, checkpoints.describe())
    train(unit, range(1, 3))
    checkpoints.begin_restore(7, min_epoch=50)
    unit.reserve(placement=50)
    checkpoints.load(1, restore=7)
    gradients = random_gradients(unit, 1)
    assert isinstance(error_of(lambda: unit.push(gradients, step=1, epoch=49)), StaleEpochError)
    unit.push(gradients, step=1, epoch=50)
    checkpoints.begin_restore(7, min_epoch=50)  # repeated: drops nothing
    assert unit.gather()[0] == 1
    assert isinstance(error_of(lambda: checkpoints.begin_restore(6)), StaleEpochError)
    assert isinstance(error_of(lambda: checkpoints.load(1, restore=6)), StaleEpochError)
    shutil.rmtree(folder)
    assert LocalStorage(folder).names() == []
