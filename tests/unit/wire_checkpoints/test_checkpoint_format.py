"""Files, manifests and folders of checkpoints: what is written is read back, and what is damaged is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from shardwell_wire.checkpoints.folder import RunFolder, entries_below, folder_name, run_of
from shardwell_wire.checkpoints.format import CheckpointFileWriter, FilePlan, Piece
from shardwell_wire.checkpoints.manifest import Manifest
from shardwell_wire.checkpoints.reading import Checkpoint, StoredPiece
from shardwell_wire.checkpoints.storage import open_storage
from shardwell_wire.errors import CapacityError, CorruptDataError, InvalidRequestError, NotFoundError
from tests.support.checkpoints import RUN, as_bytes, rewrite_manifest, state_tensors, write_checkpoint


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"


def test_every_tensor_is_read_back_over_all_files(url: str) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(url, 42))
    for tensors in state_tensors(42):
        for piece, tensor in tensors.items():
            (stored,) = checkpoint.pieces(piece.parameter, piece.state, piece.start, piece.stop) or [None]
            if stored is None:
                assert piece.start == piece.stop  # no element to look for
                continue
            assert stored.piece == piece
            assert checkpoint.read(stored) == as_bytes(tensor)
    assert checkpoint.states("blocks.0.weight") == ["exp_avg", "step", "values"]
    assert checkpoint.states("head.scale") == ["values"]  # absent state is not zeros
    assert [part.algorithm for part in checkpoint.parts("blocks.0.weight")] == ["adamw", "adamw"]
    manifest = checkpoint.manifest
    assert (manifest.step, manifest.seed, manifest.world.dp) == (42, 3, 2)
    assert float(manifest.commits[0]["grad_norm"]) == float("inf")
    assert manifest.run_state is not None and manifest.run_state.tracked_json == {"schedule": '{"last": 3}'}


def test_a_range_is_read_from_the_pieces_that_it_crosses(url: str) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(url, 1))
    found = checkpoint.pieces("blocks.0.weight", "values", 10, 13)
    data = b"".join(bytes(checkpoint.read(at, max(10, at.piece.start), min(13, at.piece.stop))) for at in found)
    whole = torch.cat(
        [t for part in state_tensors(1) for p, t in part.items() if p.name.startswith("blocks.0.weight|v")]
    )
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), whole[10:13])


def test_the_safetensors_library_reads_every_file(tmp_path: Path) -> None:
    folder = Path(write_checkpoint(tmp_path, 7))
    for number, tensors in enumerate(state_tensors(7)):
        with safe_open(folder / f"shards-s{number}.safetensors", "pt") as file:
            assert sorted(file.keys()) == sorted(piece.name for piece in tensors)
            for piece, tensor in tensors.items():
                expected = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                assert torch.equal(file.get_tensor(piece.name), expected)


def test_parts_of_a_tensor_can_be_written_one_by_one(tmp_path: Path) -> None:
    piece = Piece("w", "values", 0, 6, "float32", (6,))
    data = as_bytes(torch.arange(6.0))
    storage = open_storage(tmp_path)
    writer = CheckpointFileWriter(storage, "s", FilePlan([piece], [], run_id="r", step=0))
    for start in range(0, 24, 8):
        writer.write_part(piece, data[start : start + 8])
    record = writer.finish()
    assert storage.read(record.name)[record.header_bytes :] == data


def test_names_with_any_characters_are_kept(tmp_path: Path) -> None:
    piece = Piece("odd|name é", "trainer.a|b%", 3, 3, "int64", (), "number")
    writer = CheckpointFileWriter(open_storage(tmp_path), "s:1", FilePlan([piece], [], run_id="r", step=0))
    writer.write(piece, as_bytes(torch.tensor([5])))
    record = writer.finish()
    from shardwell_wire.checkpoints.format import FileIndex

    header = (tmp_path / record.name).read_bytes()[: record.header_bytes]
    (placed,) = FileIndex.parse(header, record.size_bytes, "here").pieces
    assert placed.piece == piece


@pytest.mark.parametrize("run", ["gpt", "a/b", "..", ".hidden", "é ü", "x" * 200, "é" * 200, "50%"])
def test_runs_of_any_name_have_their_own_folder(run: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, run=run)
    assert "/" not in folder_name(run) and len(os.fsencode(folder_name(run))) <= 200
    assert len(list(tmp_path.iterdir())) == 1
    entry = RunFolder.of(tmp_path, run).newest()
    assert entry is not None and entry.manifest is not None and entry.manifest.run == run
    assert run_of(folder_name(run)) == run or "~" in folder_name(run)
    assert [at.run for at in entries_below(tmp_path)] == [run]


# ---- damage ----


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def read_everything(folder: str | Path) -> None:
    checkpoint = Checkpoint.open(folder)
    for file in checkpoint.manifest.files:
        for placed in checkpoint.files[file.name].pieces:
            checkpoint.read(StoredPiece(file, placed))


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    folder = Path(write_checkpoint(tmp_path, 1))
    read_everything(folder)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        for position in (0, 7, 9, 100, size // 2, size - 1):
            flip(path, position)
            with pytest.raises(CorruptDataError, match=path.name):
                read_everything(folder)
            flip(path, position)
    read_everything(folder)


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    """Also in numbers and texts that would be valid, such as the state of a scheduler."""
    path = Path(write_checkpoint(tmp_path, 1)) / "manifest.json"
    manifest = path.read_bytes()
    for bit in range(8 * len(manifest)):
        changed = bytearray(manifest)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptDataError, match="manifest"):
            Manifest.from_bytes(bytes(changed), "manifest.json")
    path.write_bytes(manifest.replace(rb"\"last\": 3", rb"\"last\": 4"))
    assert "its checksum differs" in RunFolder.of(tmp_path, RUN).entries()[0].problem


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    folder = Path(write_checkpoint(tmp_path, 1))
    flip(folder / "shards-s0.safetensors", (folder / "shards-s0.safetensors").stat().st_size - 1)
    with pytest.raises(CorruptDataError, match=r"tensor 'blocks\.0\.weight\|step\|0:11' in .*shards-s0") as caught:
        read_everything(folder)
    assert caught.value.data == {"file": "shards-s0.safetensors", "tensor": "blocks.0.weight|step|0:11"}


def test_truncated_and_missing_files_are_named_and_the_checkpoint_before_is_offered(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    folder = Path(write_checkpoint(tmp_path, 2))
    runs = RunFolder.of(tmp_path, RUN)
    newest = runs.newest()
    assert newest is not None and newest.step == 2
    file = folder / "shards-s1.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CorruptDataError, match=r"shards-s1\.safetensors is truncated"):
        Checkpoint.open(folder)
    file.unlink()
    with pytest.raises(NotFoundError, match=r"shards-s1\.safetensors is missing"):
        Checkpoint.open(folder)
    newest = runs.newest()
    assert newest is not None and newest.step == 1


def test_every_torn_manifest_is_refused(tmp_path: Path) -> None:
    folder = Path(write_checkpoint(tmp_path, 1))
    manifest = (folder / "manifest.json").read_bytes()
    for size in range(len(manifest)):
        with pytest.raises(CorruptDataError, match="manifest"):
            Manifest.from_bytes(manifest[:size], "manifest.json")


def test_a_checkpoint_without_a_manifest_is_not_offered(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 5, publish=False)
    runs = RunFolder.of(tmp_path, RUN)
    assert runs.newest() is None
    (entry,) = runs.entries()
    assert entry.is_incomplete and entry.step == 5
    with pytest.raises(NotFoundError, match="no complete checkpoint"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "its format is not 'shardwell-checkpoint'"),
        ({"format_version": 2}, "use a newer version of shardwell"),
        ({"step": -1}, "step is '-1'"),
        ({"step": True}, "step is 'True'"),
        ({"step": 1 << 70}, "step is"),
        ({"created": "now"}, "created"),
        ({"world": {"dp": 0}}, "dp=0"),
        ({"world": {"dp": 1 << 60, "tp": 1 << 60}}, "ranks"),
        ({"units": [{"name": "u", "parameters": [{"name": "w", "shape": [1 << 40, 1 << 40], "dtype": 1}]}]}, "bytes"),
        ({"units": [{"name": "u", "parameters": 5}]}, "parameters"),
        ({"units": [{"name": "u"}, {"name": "u"}]}, "same name"),
        ({"files": [{"name": "../../etc/passwd"}]}, "missing"),
        ({"run_state": {"step": "x"}}, "step"),
        ({"run_state": []}, "run_state is list"),
        ({"commits": [5]}, "commit is int"),
        ({"run": "x" * 300}, "300 characters"),
        ({"extra": {"consistency": "ASYNCHRONOUS"}}, "item_numbers"),
        ({"extra": {"consistency": "ASYNCHRONOUS", "item_numbers": [1, -1]}}, "item_numbers"),
        ({"extra": {"consistency": "SOMETIMES"}}, "expected SYNCHRONOUS"),
    ],
)
def test_impossible_manifests_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = Path(write_checkpoint(tmp_path, 1))
    rewrite_manifest(folder, change)
    with pytest.raises(CorruptDataError, match=message):
        Checkpoint.open(folder)
    entry = RunFolder.of(tmp_path, RUN).entries()[0]
    assert entry.problem and not entry.is_incomplete


def test_file_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = Path(write_checkpoint(tmp_path, 1))
    (file, *others) = json.loads((folder / "manifest.json").read_text())["files"]
    for name in ("../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x", ""):
        rewrite_manifest(folder, {"files": [file | {"name": name}, *others]})
        with pytest.raises(CorruptDataError, match="file name"):
            Checkpoint.open(folder)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"[" * 100_000, b'{"a":1,"a":2}', b"\xff\xfe", b'{"format":NaN}', b"9" * 10_000]
)
def test_other_json_is_no_manifest(text: bytes) -> None:
    with pytest.raises(CorruptDataError, match="here"):
        Manifest.from_bytes(text, "here")


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    folder = Path(write_checkpoint(tmp_path, 1))
    os.truncate(folder / "manifest.json", 1 << 40)
    with pytest.raises(CorruptDataError, match="more than the limit"):
        Checkpoint.open(folder)


# ---- folders ----


def test_only_the_newest_of_a_lineage_are_kept(url: str) -> None:
    for step in (10, 20, 30, 40):
        write_checkpoint(url, step, run_id="a" if step < 30 else "b", created=1000.0 + step)
    write_checkpoint(url, 90, run_id="other", created=5.0)
    runs = RunFolder.of(url, RUN)
    assert [entry.step for entry in runs.entries()] == [40, 30, 20, 10, 90]
    assert runs.keep_newest(3, lineage=("a", "b")) == ["step-000000010-c10"]
    assert [entry.step for entry in runs.entries()] == [40, 30, 20, 90]
    newest = runs.newest(lineage=("a",))
    assert newest is not None and newest.step == 20
    newest = runs.newest(but=("c40",))
    assert newest is not None and newest.step == 30


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, created=1000.0 + step)
    (tmp_path / RUN / "step-000000003-c3" / "shards-s0.safetensors").unlink()
    runs = RunFolder.of(tmp_path, RUN)
    assert runs.keep_newest(1, lineage=("id1",)) == ["step-000000001-c1"]
    newest = runs.newest()
    assert newest is not None and newest.step == 2


def test_publishing_without_a_file_names_the_server(tmp_path: Path) -> None:
    folder = Path(write_checkpoint(tmp_path, 1))
    manifest = Manifest.from_bytes((folder / "manifest.json").read_bytes(), "here")
    (folder / "manifest.json").unlink()
    (folder / "shards-s1.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"server 's1' has written it: .* must reach the same"):
        RunFolder.of(tmp_path, RUN).publish(folder.name, manifest)
    assert not (folder / "manifest.json").exists()


def test_a_list_starts_anywhere_between_the_folder_and_one_checkpoint(url: str) -> None:
    one = write_checkpoint(url, 1, run="a")
    write_checkpoint(url, 2, run="b/c", created=50.0)
    write_checkpoint(url, 3, run="b/c", created=60.0)
    write_checkpoint(url, 4, run="b/c", publish=False)
    found = [(at.run, at.step, at.problem) for at in entries_below(url)]
    assert found == [("a", 1, ""), ("b/c", 3, ""), ("b/c", 2, ""), ("b/c", 4, "it has no manifest")]
    assert [at.step for at in entries_below(f"{url}/{folder_name('b/c')}")] == [3, 2, 4]
    assert [at.step for at in entries_below(one)] == [1]
    assert entries_below(f"{url}/nothing") == []


# ---- storage ----


def test_a_full_disk_is_reported_and_the_file_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = Piece("w", "values", 0, 6, "float32", (6,))
    writer = CheckpointFileWriter(open_storage(tmp_path), "s", FilePlan([piece], [], run_id="r", step=0))

    def pwrite(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(CapacityError, match=r"cannot write .*shards-s\.safetensors: No space left"):
        writer.write(piece, as_bytes(torch.zeros(6)))
    writer.abort()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_interrupted_manifest_leaves_the_former_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(tmp_path)
    storage.write_whole("manifest.json", b"old")
    real = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: real(fd, data[:1], at) and (_ for _ in ()).throw(OSError(5, "x"))
    )
    with pytest.raises(Exception, match="cannot write"):
        storage.write_whole("manifest.json", b"new")
    assert storage.read("manifest.json") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("url", ["", "nosuch://x/y", "a\0b"])
def test_impossible_folders_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError):
        open_storage(url)
