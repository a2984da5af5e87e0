"""``shardwell checkpoints`` and ``shardwell verify`` on folders and buckets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwell.command.cli import main
from tests.support.checkpoints import write_checkpoint


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_checkpoints_are_listed_with_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, 1, created=1000.0)
    damaged = Path(write_checkpoint(tmp_path, 2, created=2000.0))
    (damaged / "shards-s1.safetensors").unlink()
    write_checkpoint(tmp_path, 3, publish=False)
    assert main(["checkpoints", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["gpt", "2"], ["gpt", "1"], ["gpt", "3"]]
    assert "damaged" in lines[1] and "complete" in lines[2] and "incomplete" in lines[3]
    assert lines[5].startswith("step 2 of run 'gpt' is damaged: ")
    assert main(["checkpoints", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["state"] for entry in listed] == ["damaged", "complete", "incomplete"]
    assert "shards-s1.safetensors is missing" in listed[0]["problem"]


def test_verify_names_every_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(write_checkpoint(tmp_path, 1))
    assert main(["verify", str(tmp_path)]) == 0
    assert "step 1 of run 'gpt' is intact" in capsys.readouterr().out
    for name in ("shards-s0.safetensors", "shards-s1.safetensors"):
        flip(folder / name, (folder / name).stat().st_size - 1)
    assert main(["verify", str(folder)]) == 1
    out = capsys.readouterr()
    assert "tensor 'blocks.0.weight|step|0:11'" in out.out and "shards-s0.safetensors is damaged" in out.out
    assert "tensor 'head.scale|values|0:17'" in out.out and "shards-s1.safetensors is damaged" in out.out
    (folder / "shards-s0.safetensors").unlink()
    assert main(["verify", str(folder)]) == 1
    assert "shards-s0.safetensors is missing from the checkpoint" in capsys.readouterr().out


def test_verify_reports_a_torn_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(write_checkpoint(tmp_path, 1))
    os.truncate(folder / "manifest.json", 100)
    assert main(["verify", str(folder)]) == 1
    assert "manifest.json is not the manifest of a checkpoint, or is damaged" in capsys.readouterr().out
    (folder / "manifest.json").unlink()
    assert main(["verify", str(folder)]) == 1
    assert "contains no complete checkpoint" in capsys.readouterr().out


def test_verify_of_an_incomplete_checkpoint_fails_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(write_checkpoint(tmp_path, 1, publish=False))
    monkeypatch.chdir(tmp_path)
    assert main(["verify", f"./{folder.relative_to(tmp_path)}/"]) == 1
    assert "contains no complete checkpoint" in capsys.readouterr().out


def test_a_checkpoint_of_an_impossible_time_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, 1, created=1e20)
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert "complete" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["checkpoints", "verify"])
def test_a_folder_that_does_not_exist_is_reported(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path / "x")]) == 1
    assert f"{tmp_path}/x does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["checkpoints", "verify"])
def test_a_folder_without_checkpoints_is_reported(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == 1
    assert f"shardwell {command}: {tmp_path} contains no checkpoints" in capsys.readouterr().err


def test_local_checkpoints_are_listed_without_torch_and_fsspec(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    program = (
        "import sys; from shardwell.command.cli import main; "
        f"main(['verify', {str(tmp_path)!r}]); print(sorted({{'torch', 'fsspec'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
