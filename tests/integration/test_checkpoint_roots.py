"""A trainer's token makes the servers open only what the operator allows, and errors say nothing about its contents."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import shardwell
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.checkpoints.format import FileRecord
from shardwell_wire.checkpoints.reading import Checkpoint
from shardwell_wire.checkpoints.storage import LocalStorage
from shardwell_wire.connection.protocol_versions import own_versions
from shardwell_wire.errors import (
    AccessError,
    CorruptDataError,
    InvalidRequestError,
    RunDeletedError,
    UnavailableError,
)
from shardwell_wire.model.topology import World
from shardwell_wire.security.credentials import Credentials, new_key
from shardwell_wire.security.tokens import ClusterKey, Role
from shardwell_wire.v1 import coordinator_pb2
from tests.support.checkpoints import rewrite_manifest, write_checkpoint
from tests.support.cluster import small_run
from tests.support.server_processes import ready_address, server_process

SECRET = bytes(range(0x30, 0x5A)) + b"-the-secret-of-the-cluster-0123456789"
RUN = "mine"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder for checkpoints, and a folder beside it."""
    top = tmp_path_factory.mktemp("roots")
    for name in ("checkpoints", "beside"):
        (top / name).mkdir()
    (top / "beside" / "key").write_bytes(SECRET)
    return top / "checkpoints", top / "beside"


@pytest.fixture(scope="module")
def secured(folders: tuple[Path, Path]) -> Iterator[shardwell.LocalCluster]:
    with shardwell.LocalCluster(num_shards=1, min_shard_bytes=4096, checkpoint_root=folders[0]) as running:
        yield running


@contextmanager
def cluster_by_hand(folder: Path, of_coordinator: str, of_shard: str) -> Iterator[tuple[str, str]]:
    """Starts a cluster with a key, whose servers have these roots. Yields its address and the file with the key."""
    path = folder / "key"
    path.touch(mode=0o600)
    path.write_text(new_key().secret)
    options = ("--listen", "127.0.0.1:0", "--token-file", str(path))
    with server_process("coordinator", *options, SHARDWELL_CHECKPOINT_ROOT=of_coordinator) as coordinator:
        address = ready_address(coordinator)
        shard = ("shard", *options, "--id", "one", "--coordinator", address, "--checkpoint-root", of_shard)
        with server_process(*shard) as server:
            ready_address(server)
            yield address, str(path)


def join(address: str, key: ClusterKey, *, run: str = RUN, run_id: str = "", wait_s: float = 0.0, **fields: Any) -> Any:
    """Sends a Join with the token of a trainer."""
    config = coordinator_pb2.RunConfig(world=World(dp=1).to_proto(), min_trainers=1)
    for name in ("checkpoint_dir", "seed"):
        if name in fields:
            setattr(config, name, fields.pop(name))
    request = coordinator_pb2.JoinRequest(
        run=run, config=config, trainer="t", incarnation="i", host="h", wait_s=wait_s, protocol=own_versions(), **fields
    )
    token = Credentials(text=key.mint(Role.TRAINER, run=run, run_id=run_id or f"id-of-{run}"))
    with closing(CoordinatorClient(address, token)) as client:
        return client.call("Join", request, timeout_s=30.0)


def runs_of(cluster: shardwell.LocalCluster) -> set[str]:
    with closing(CoordinatorClient(cluster.address, cluster.credentials)) as client:
        return {run.run for run in client.call("ListRuns", coordinator_pb2.ListRunsRequest()).runs}


def test_nothing_outside_of_the_root_is_opened(secured: shardwell.LocalCluster, folders: tuple[Path, Path]) -> None:
    root, beside = folders
    outside = Path(write_checkpoint(beside, 1, run=RUN, checkpoint_id="outside"))
    (root / "link").symlink_to(outside.parent.parent)
    (root / "step-000000001-link").symlink_to(outside)
    for folder in (
        outside,
        f"file://{outside}",
        root / ".." / outside.relative_to(root.parent),
        root / "link" / outside.relative_to(beside),
        root / "step-000000001-link",
        Path(f"{root}-2"),
        "s3://bucket/x",
    ):
        for fields in ({"resume": str(folder)}, {"checkpoint_dir": str(folder)}):
            with pytest.raises(AccessError, match=r"--checkpoint-root|is or contains a link out of"):
                join(secured.address, secured.key, **fields)
    assert RUN not in runs_of(secured)
    assert [path.name for path in beside.glob("**/.probe*")] == []


@pytest.mark.parametrize(
    "url",
    [
        "reference://d::data:x:application/json;base64,e30=",
        "simplecache::file:///etc",
        "ftp://127.0.0.1:9/x",
        "http://127.0.0.1:9/x",
        "github://a:b@c/x",
        "file:///etc::file:///etc",
        "s3://bucket::file:///etc/x",
        "memory://x",
        "/a\0b",
        "x" * 5000,
    ],
)
def test_other_protocols_and_chains_are_refused(secured: shardwell.LocalCluster, url: str) -> None:
    for fields in ({"resume": url}, {"checkpoint_dir": url}):
        with pytest.raises(InvalidRequestError, match=r"checkpoint folder '.*(expected a path|memory of one process)"):
            join(secured.address, secured.key, **fields)


def test_the_run_of_the_token_is_checked_before_anything_is_opened(
    secured: shardwell.LocalCluster, folders: tuple[Path, Path]
) -> None:
    key, address = secured.key, secured.address
    join(address, key, run="deleted", run_id="former")
    with closing(CoordinatorClient(address, secured.credentials)) as client:
        client.call("DeleteRun", coordinator_pb2.DeleteRunRequest(run="deleted", force=True))
    waits = folders[0] / "pipe"
    os.mkfifo(waits)  # opening it for reading would wait for a writer
    for fields in ({"resume": str(waits)}, {"checkpoint_dir": str(folders[0] / "new")}):
        with pytest.raises(RunDeletedError):
            join(address, key, run="deleted", run_id="former", **fields)
    assert not (folders[0] / "new").exists()


def test_only_the_manifest_of_another_run_is_read(secured: shardwell.LocalCluster, folders: tuple[Path, Path]) -> None:
    other = Path(write_checkpoint(folders[0], 3, run="secret-name"))
    for file in other.glob("*.safetensors"):
        file.write_bytes(b"")  # an error about them would show that they were read
    with pytest.raises(AccessError, match="is of another run: an operator can resume from it") as refused:
        join(secured.address, secured.key, resume=str(other))
    assert "secret-name" not in str(refused.value).replace(str(other), "")


def windows(data: bytes) -> set[str]:
    """Returns how an error could quote some bytes: as text, as hexadecimal digits, and as numbers."""
    found = {data[at : at + 4].decode() for at in range(len(data) - 3)}
    for size in (4, 8):
        for at in range(len(data) - size + 1):
            number = int.from_bytes(data[at : at + size], "little")
            found |= {str(number), f"{number:x}", data[at : at + size].hex()}
    return found


def test_errors_have_no_contents(secured: shardwell.LocalCluster, folders: tuple[Path, Path]) -> None:
    """A file of the host in the place of each file of a checkpoint, as a link within the root would have it."""
    secret = folders[0] / "secret"
    secret.write_bytes(SECRET)
    in_json = json.dumps({"format": SECRET.decode(), "format_version": SECRET.decode(), "xxh3_64": SECRET.decode()})
    for number, name in enumerate(("manifest.json", "manifest.json", "shards-s0.safetensors")):
        checkpoint = Path(write_checkpoint(folders[0], 10 + number, run=RUN))
        (checkpoint / name).unlink()
        if number == 1:
            (checkpoint / name).write_text(in_json)
        else:
            (checkpoint / name).symlink_to(secret)
        for change in ({}, {"size_bytes": len(SECRET), "header_bytes": 20}) if number == 2 else ({},):
            if change:
                (file, *others) = json.loads((checkpoint / "manifest.json").read_text())["files"]
                rewrite_manifest(checkpoint, {"files": [file | change, *others]})
            with pytest.raises(CorruptDataError) as refused:
                join(secured.address, secured.key, resume=str(checkpoint))
            message = str(refused.value).replace(str(checkpoint), "")
            quoted = [text for text in windows(SECRET) if text in message]
            assert not quoted, message


def test_sizes_are_bounded_before_bytes_are_read(folders: tuple[Path, Path], tmp_path: Path) -> None:
    class Storage(LocalStorage):
        def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
            assert stop is not None and stop - start < 1 << 28, f"{stop} bytes of {path} are read"
            return super().read(path, start, stop)

    for name in ("manifest.json", "shards-s0.safetensors"):
        checkpoint = Path(write_checkpoint(tmp_path, 1, run=name))
        os.truncate(checkpoint / name, 1 << 40)  # a sparse file
        if name != "manifest.json":
            (file, *_) = json.loads((checkpoint / "manifest.json").read_text())["files"]
            rewrite_manifest(checkpoint, {"files": [file | dict.fromkeys(("size_bytes", "header_bytes"), 1 << 40)]})
        with pytest.raises(CorruptDataError, match=r"limit|more than"):
            Checkpoint(Storage(checkpoint))
    checkpoint = Path(write_checkpoint(tmp_path, 2))
    (file, *_) = json.loads((checkpoint / "manifest.json").read_text())["files"]
    many = [file | {"name": f"f{at}.safetensors", "size_bytes": 1 << 40, "header_bytes": 90 << 20} for at in range(12)]
    rewrite_manifest(checkpoint, {"files": many})
    with pytest.raises(CorruptDataError, match="bytes of headers"):
        Checkpoint(Storage(checkpoint))
    with pytest.raises(ValueError, match="header"):
        FileRecord.from_dict(file | {"header_bytes": file["size_bytes"] + 1})


def test_a_pipe_in_a_checkpoint_blocks_nothing(secured: shardwell.LocalCluster, folders: tuple[Path, Path]) -> None:
    checkpoint = Path(write_checkpoint(folders[0], 20, run="piped"))
    (checkpoint / "manifest.json").unlink()
    os.mkfifo(checkpoint / "manifest.json")
    with pytest.raises(CorruptDataError, match="is not a regular file"):
        join(secured.address, secured.key, run="piped", resume=str(checkpoint))
    (entry,) = RunFolder.of(folders[0], "piped").entries()
    assert "not a regular file" in entry.problem


def test_a_run_is_saved_and_resumed_below_the_root(
    secured: shardwell.LocalCluster, folders: tuple[Path, Path], run_name: str
) -> None:
    for folder in (folders[0], folders[0] / "a" / "b"):
        run = f"{run_name}-{folder.name}"
        with small_run(secured.address, run, checkpoint_dir=str(folder)) as session:
            url = session.save_checkpoint(wait=True)
        with small_run(secured.address, f"{run}-2", resume=url) as session:
            assert session.step == 2


@pytest.mark.parametrize("listed", ["none", "other"])
def test_a_shard_server_checks_the_folder_itself(tmp_path: Path, run_name: str, listed: str) -> None:
    """Also where the coordinator allows it: the links of the server's host may be others."""
    with cluster_by_hand(tmp_path, str(tmp_path), str(tmp_path / "other") if listed == "other" else "") as (
        address,
        key,
    ):
        options = {"checkpoint_dir": str(tmp_path / "checkpoints"), "token_file": key}
        with (
            small_run(address, run_name, **options) as session,
            pytest.raises(UnavailableError, match=r"server 'one': checkpoint folder .*--checkpoint-root"),
        ):
            session.save_checkpoint(wait=True)


def test_without_a_root_a_cluster_with_a_key_opens_nothing(tmp_path: Path, run_name: str) -> None:
    with cluster_by_hand(tmp_path, "", "") as (address, key):
        advice = r"has named no folder for checkpoints\. .* --checkpoint-root \(SHARDWELL_CHECKPOINT_ROOT\) of the"
        for options in ({"checkpoint_dir": str(tmp_path)}, {"resume": str(tmp_path)}):
            with pytest.raises(AccessError, match=advice):
                shardwell.join(address, run=run_name, token_file=key, **options)
        with small_run(address, run_name, token_file=key) as session:
            assert session.step == 2, "a run without checkpoints needs no root"
