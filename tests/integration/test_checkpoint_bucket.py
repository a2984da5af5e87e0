"""Checkpoints in a bucket of a real S3-compatible server."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs

import shardwell
from shardwell.command.cli import main
from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.checkpoints.format import CheckpointFileWriter, FilePlan, Piece
from shardwell_wire.checkpoints.reading import Checkpoint
from shardwell_wire.checkpoints.storage import SPOOL_VARIABLE, check_writable, open_storage
from shardwell_wire.errors import (
    AccessError,
    CapacityError,
    CorruptDataError,
    NotFoundError,
    ShardwellError,
    UnavailableError,
)
from tests.support.checkpoints import RUN, as_bytes, state_tensors, write_checkpoint
from tests.support.named_training import join, plain, train
from tests.support.reference import sha256
from tests.support.s3_server import ENVIRONMENT, make_bucket, s3_server

URL = "s3://bucket/runs"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An empty bucket, and an empty spool folder that is empty again after the test."""
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST"), timeout=10).close()
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    spool = tmp_path / "spool"
    spool.mkdir()
    monkeypatch.setenv(SPOOL_VARIABLE, str(spool))
    s3fs.S3FileSystem.clear_instance_cache()  # instances keep their endpoint
    make_bucket(endpoint, "bucket")
    yield endpoint
    assert list(spool.iterdir()) == []


def test_a_checkpoint_is_written_listed_verified_and_read(capsys: pytest.CaptureFixture[str]) -> None:
    check_writable(open_storage(URL))
    url = write_checkpoint(URL, 42, run="a run/with é")
    checkpoint = Checkpoint.open(url)
    for tensors in state_tensors(42):
        for piece, tensor in tensors.items():
            for stored in checkpoint.pieces(piece.parameter, piece.state, piece.start, piece.stop):
                assert checkpoint.read(stored) == as_bytes(tensor)
    assert main(["checkpoints", URL]) == 0
    assert "complete" in capsys.readouterr().out
    assert main(["verify", URL]) == 0
    assert "is intact" in capsys.readouterr().out


def test_incomplete_and_surplus_checkpoints_are_deleted() -> None:
    for step in (1, 2, 3):
        write_checkpoint(URL, step, created=1000.0 + step)
    write_checkpoint(URL, 4, publish=False)
    runs = RunFolder.of(URL, RUN)
    assert [(at.step, at.is_incomplete) for at in runs.entries()] == [(3, False), (2, False), (1, False), (4, True)]
    assert runs.keep_newest(2, lineage=("id1",)) == ["step-000000001-c1"]
    runs.delete("step-000000004-c4")
    assert [at.step for at in runs.entries()] == [3, 2]


def test_a_damaged_object_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    url = write_checkpoint(URL, 1)
    storage = open_storage(url)
    data = bytearray(storage.read("shards-s1.safetensors"))
    data[-1] ^= 1
    storage.write_whole("shards-s1.safetensors", bytes(data))
    assert main(["verify", url]) == 1
    assert "tensor 'head.scale|values|0:17'" in capsys.readouterr().out
    storage.write_whole("shards-s1.safetensors", bytes(data[:-1]))
    with pytest.raises(CorruptDataError, match="is truncated"):
        Checkpoint.open(url)
    storage.delete("shards-s1.safetensors")
    with pytest.raises(NotFoundError, match=r"shards-s1\.safetensors is missing"):
        Checkpoint.open(url)
    assert RunFolder.of(URL, RUN).newest() is None


def test_a_missing_bucket_is_reported() -> None:
    with pytest.raises(NotFoundError, match=r"cannot write s3://nowhere/x/.*: .*bucket does not exist"):
        check_writable(open_storage("s3://nowhere/x"))
    for look in (RunFolder.of("s3://nowhere/x", RUN).newest, RunFolder.of("s3://nowhere", RUN).entries):
        with pytest.raises(NotFoundError, match=r"cannot list s3://nowhere/.*: .*bucket does not exist"):
            look()


def test_characters_of_patterns_in_a_folder_are_no_patterns() -> None:
    runs = RunFolder.of("s3://bucket/lr=[0.1]*", RUN)
    write_checkpoint("s3://bucket/lr=[0.1]*", 1, publish=False)
    kept = write_checkpoint("s3://bucket/lr=[0.1]2", 1)
    runs.delete(runs.entries()[0].folder)
    assert runs.entries() == []
    Checkpoint.open(kept)


def test_an_unreachable_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UnavailableError, match=r"cannot write s3://other/x/\.probe"):
        check_writable(open_storage("s3://other/x"))


def test_a_full_spool_folder_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = Piece("w", "values", 0, 6, "float32", (6,))
    plan = FilePlan([piece], [], run_id="r", step=0)
    writer = CheckpointFileWriter(open_storage(f"{URL}/x"), "s", plan)

    def pwrite(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(CapacityError, match=f"spool file .* {SPOOL_VARIABLE} names another folder"):
            writer.write(piece, bytes(24))
    writer.abort()
    with pytest.raises(ShardwellError):
        Checkpoint.open(f"{URL}/x")


def test_a_large_file_is_uploaded_in_parts() -> None:
    size = 60 << 20  # s3fs uploads parts of 50 MiB
    piece = Piece("w", "values", 0, size, "uint8", (size,))
    storage = open_storage(f"{URL}/large")
    writer = CheckpointFileWriter(storage, "s", FilePlan([piece], [], run_id="r", step=0))
    window = os.urandom(1 << 20)
    for _ in range(60):
        writer.write_part(piece, window)
    record = writer.finish()
    assert storage.size(record.name) == record.size_bytes
    position = record.header_bytes + (30 << 20)
    assert storage.read(record.name, position, position + (1 << 20)) == window


# ---- a run ----


@pytest.fixture(scope="module")
def running(endpoint: str) -> Iterator[shardwell.LocalCluster]:
    """A cluster whose servers reach the bucket."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
            patched.setenv(name, value)
        roots = f"{URL},s3://nowhere"
        with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, checkpoint_root=roots) as cluster:
            yield cluster


@pytest.mark.usefixtures("one_thread")
def test_a_run_is_saved_to_a_bucket_and_resumed_from_it(
    running: shardwell.LocalCluster, run_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with join(running.address, run_name, URL) as session:
        train(session, steps=2)
        url = session.save_checkpoint(wait=True)
    assert url.startswith(f"{URL}/")
    assert main(["verify", URL]) == 0
    assert "step 2 of run" in capsys.readouterr().out
    with join(running.address, f"{run_name}-2", URL, resume=url) as session:
        assert session.step == 2
        assert sha256(train(session, steps=3)) == sha256(plain(3)[0])


def test_another_folder_of_the_bucket_is_refused(running: shardwell.LocalCluster, run_name: str) -> None:
    for folder in ("s3://bucket/x", f"{URL}/../x", f"{URL}-2", "s3://other/x"):
        with pytest.raises(AccessError, match=rf"is not below {URL} or s3://nowhere"):
            join(running.address, run_name, folder)


def test_a_bucket_that_does_not_exist_is_refused_at_join(running: shardwell.LocalCluster, run_name: str) -> None:
    with pytest.raises(NotFoundError, match=r"cannot be saved: cannot write .*bucket does not exist"):
        join(running.address, run_name, "s3://nowhere/runs", checkpoint_every=1)
