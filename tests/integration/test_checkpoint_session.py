"""Checkpoints from a training script: saving, listing, reading by name, and resuming."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch

import shardwell
from shardwell.command.cli import main
from shardwell.options import JoinConfig
from shardwell.store import residuals
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.checkpoints.storage import Storage
from shardwell_wire.errors import AccessError, StepStateError, UsageError
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import events, small_run, wait_until
from tests.support.named_training import join, plain, train
from tests.support.reference import sha256

pytestmark = pytest.mark.usefixtures("one_thread")


def saved_steps(folder: Path, run: str) -> list[int]:
    return [entry.step for entry in RunFolder.of(folder, run).entries() if entry.is_valid]


def test_a_checkpoint_has_the_bits_of_plain_training(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with join(cluster.address, run_name, tmp_path) as session:
        train(session, steps=3)
        url = session.save_checkpoint(wait=True)
    checkpoint = shardwell.open_checkpoint(url)
    weights, state = plain(3)
    assert checkpoint.step == 3
    assert {name for name in weights if name != "head.weight"} == set(checkpoint.parameters)  # tied to tokens.weight
    for name in checkpoint.parameters:
        assert torch.equal(checkpoint.read(name), weights[name]), name
        stored = checkpoint.optimizer_state(name)
        assert set(stored) == {"exp_avg", "exp_avg_sq", "step"}
        for each, tensor in stored.items():
            assert torch.equal(tensor, state[name][each]), (name, each)
        assert checkpoint.optimizer(name) == ("adamw", 3)
    assert len(checkpoint.manifest.files) == 2  # one per shard server
    assert main(["verify", url]) == 0
    assert "is intact" in capsys.readouterr().out


FEEDBACK = shardwell.TransferOptions(push_dtype="int8", push_error_feedback=True)
UNKNOWN = "the rounding errors of pushes before step 2 are not known to this trainer"


def test_a_checkpoint_contains_the_residuals_of_error_feedback(
    cluster: shardwell.LocalCluster,
    run_name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with small_run(cluster.address, run_name, steps=2, checkpoint_dir=str(tmp_path), transfers=FEEDBACK) as session:
        feedback = session.store.gradients.feedback
        session.store.set_wire_dtypes(None, "int8")  # auto_wrap(memory=...) calls this with the session's dtypes
        assert session.store.gradients.feedback is feedback, "the rounding errors are still there"
        url = session.save_checkpoint(wait=True)
    assert main(["verify", url]) == 0
    capsys.readouterr()
    checkpoint = shardwell.open_checkpoint(url)
    assert checkpoint.read("first.weight", "residual.0").any()
    assert set(checkpoint.optimizer_state("first.weight")) == {"exp_avg", "exp_avg_sq", "step"}
    shardwell.join(cluster.address, run=f"{run_name}-resumed", resume=url, transfers=FEEDBACK).close()
    assert "push_error_feedback" not in caplog.text
    assert "residuals_missing" not in [event.kind for event in events(cluster.address, run_name)]
    path = next(Path(url).glob("residuals-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\xee")
    assert main(["verify", url]) == 1
    assert f"{path} is damaged" in capsys.readouterr().out


def test_residuals_of_the_last_step_are_saved_by_a_trainer_that_leaves(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path
) -> None:
    with small_run(cluster.address, run_name, checkpoint_dir=str(tmp_path), checkpoint_every=2, transfers=FEEDBACK):
        pass
    wait_until(lambda: saved_steps(tmp_path, run_name) == [2], "the checkpoint of the last step")
    assert "residual.0" in shardwell.open_checkpoint(tmp_path, run=run_name).states("rest.2.weight")


def test_residuals_that_cannot_be_written_are_an_event_and_zero_in_a_resumed_run(
    cluster: shardwell.LocalCluster,
    run_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def open_storage(url: str) -> Storage:
        raise AccessError("no credentials on this host")

    monkeypatch.setattr(residuals, "open_storage", open_storage)
    with small_run(cluster.address, run_name, checkpoint_dir=str(tmp_path), transfers=FEEDBACK) as session:
        url = session.save_checkpoint(wait=True)
    assert main(["verify", url]) == 0
    (message,) = [at.message for at in events(cluster.address, run_name) if at.kind == "residuals_missing"]
    assert "data ranks [0] (trainer 'tester': no credentials on this host)" in message
    monkeypatch.undo()
    shardwell.join(cluster.address, run=f"{run_name}-resumed", resume=url, transfers=FEEDBACK).close()
    assert UNKNOWN in caplog.text


def test_a_resumed_run_ends_with_the_same_bits(
    cluster: shardwell.LocalCluster, cluster_of_three: shardwell.LocalCluster, run_name: str, tmp_path: Path
) -> None:
    with join(cluster.address, run_name, tmp_path, checkpoint_every=2, resume="latest") as session:
        assert session.step == 0  # there is none yet
        train(session, steps=4)
        wait_until(lambda: 4 in saved_steps(tmp_path, run_name), "checkpoint of step 4")
    with join(cluster_of_three.address, run_name, tmp_path, resume="latest") as session:
        assert session.step == 4
        state = train(session, steps=6)
    assert sha256(state) == sha256(plain(6)[0])
    older = next(at for at in RunFolder.of(tmp_path, run_name).entries() if at.step == 2)
    with join(cluster_of_three.address, f"{run_name}-2", tmp_path, resume=older.url) as session:
        assert session.step == 2
        state = train(session, steps=6)
    assert sha256(state) == sha256(plain(6)[0])


def test_only_the_newest_are_kept(cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path) -> None:
    with join(cluster.address, run_name, tmp_path, checkpoint_every=1, keep=2) as session:
        train(session, steps=5)

        def has_two() -> bool:
            # A checkpoint begins after the one before: not every step has one.
            newest, *others = saved_steps(tmp_path, run_name) or [0]
            return newest == 5 and len(others) == 1

        wait_until(has_two, "two checkpoints")


def test_save_checkpoint_needs_a_folder(cluster: shardwell.LocalCluster, run_name: str) -> None:
    with (
        small_run(cluster.address, run_name) as session,
        pytest.raises(StepStateError, match="has no folder for checkpoints: pass checkpoint_dir"),
    ):
        session.save_checkpoint()


def test_shardwell_checkpoint_saves_during_training(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["checkpoint", run_name, "--address", cluster.address]
    with join(cluster.address, run_name, tmp_path) as session:
        train(session, steps=1)
        assert main([*command, "--wait"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"the checkpoint of step 1 of run {run_name!r} is complete: {tmp_path}")
        assert saved_steps(tmp_path, run_name) == [1]
    assert main(["checkpoint", "nothing", "--address", cluster.address]) == 1
    assert "nothing" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_stops_no_training(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    with join(cluster.address, run_name, folder, checkpoint_every=1) as session:
        wait_until(lambda: folder.is_dir() and not list(folder.iterdir()), "the folder is checked")
        folder.rmdir()
        folder.write_text("")
        state = train(session, steps=3)
        with pytest.raises(shardwell.UnavailableError, match=r"was not written: cannot .*Not a directory"):
            session.save_checkpoint(wait=True)
    assert sha256(state) == sha256(plain(3)[0])


@pytest.mark.parametrize(
    ("folder", "error", "problem"),
    [
        ("file/below", shardwell.InvalidRequestError, r"cannot create .*/file/below: Not a directory"),
        ("/proc/no/such/folder", shardwell.NotFoundError, "cannot create /proc/no/such/folder"),
        ("s4://bucket/x", shardwell.InvalidRequestError, "expected a path, or a URL that starts with"),
        ("gs://bucket/x", shardwell.InvalidRequestError, "this host lacks the package for gs://"),
        ("memory://x", shardwell.InvalidRequestError, "the memory of one process"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_at_join(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path, folder: str, error: type[Exception], problem: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(error, match=problem):
        join(cluster.address, run_name, folder.replace("file", str(tmp_path / "file")), checkpoint_every=1)
    with closing(CoordinatorClient(cluster.address)) as client:
        runs = client.call("ListRuns", coordinator_pb2.ListRunsRequest(), timeout_s=60.0).runs
    assert run_name not in {run.run for run in runs}


def test_options_are_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {"CHECKPOINT_DIR": "here", "CHECKPOINT_EVERY": "20", "KEEP": "3", "RESUME": "latest"}
    config = JoinConfig.from_env({}, {f"SHARDWELL_{name}": value for name, value in variables.items()})
    assert (config.checkpoint_every, config.keep, config.resume) == (20, 3, "latest")
    assert config.checkpoint_dir == os.path.join(tmp_path, "here")  # the servers have another working directory
    assert JoinConfig.from_env({"resume": "s3://bucket/x"}, {}).resume == "s3://bucket/x"
    assert JoinConfig.from_env({"resume": "x"}, {}).resume == os.path.join(tmp_path, "x")
    for wrong in ({"checkpoint_every": -1}, {"keep": True}, {"resume": "latest"}):
        with pytest.raises(UsageError):
            JoinConfig.from_env(wrong, {})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that has no room for a checkpoint."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_an_event_and_stops_no_training(
    cluster: shardwell.LocalCluster,
    run_name: str,
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with join(cluster.address, run_name, small_disk, checkpoint_every=1) as session:
        state = train(session, steps=3)
        with pytest.raises(shardwell.UnavailableError, match=r"was not written: .*No space left on device"):
            session.save_checkpoint(wait=True)
        wait_until(lambda: "No space left on device" in caplog.text, "the trainer warns")
        assert any("no checkpoint is saved" in line for line in session.explain_stall())
        for command in (["events", "--run", run_name, "--duration", "0.5"], ["stall", run_name], ["run", run_name]):
            assert main([*command, "--address", cluster.address]) == 0
            assert "No space left on device" in " ".join(capsys.readouterr().out.split())
    warnings = [at.getMessage() for at in caplog.records if "the checkpoint was not saved" in at.getMessage()]
    assert len(warnings) == len({warning.split(": ", 2)[2] for warning in warnings}), "identical ones are logged once"
    assert sha256(state) == sha256(plain(3)[0])
    wait_until(lambda: not list(small_disk.glob("*/step-*")), "removal of incomplete checkpoints")
    with join(cluster.address, f"{run_name}-2", small_disk, resume="latest") as session:
        assert session.step == 0
    with (small_disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(shardwell.CapacityError, match="No space left on device"):
        join(cluster.address, f"{run_name}-3", small_disk)
