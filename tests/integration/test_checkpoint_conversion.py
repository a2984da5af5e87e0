"""A run moves from FSDP2 to Shardwell and back, with optimizer state, without a change of a bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardwell
from shardwell.command.cli import main
from shardwell.weights.checkpoint_conversion import torch_group
from shardwell_wire.errors import CorruptDataError, NotFoundError, UsageError
from tests.support import fsdp2_training, transformer
from tests.support.named_training import DP, join, plain, train
from tests.support.processes import run_ranks
from tests.support.reference import ADAMW, sha256, train_plain

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def like(cluster: shardwell.LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of a run with the model, at step 0."""
    folder = tmp_path_factory.mktemp("like")
    with join(cluster.address, f"like-{folder.name}", folder) as session:
        train(session, steps=0)
        return session.save_checkpoint(wait=True)


def load_torch(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns a plain model and optimizer with the state of a torch checkpoint."""
    model = transformer.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optim": optimizer_state}
        dcp.load(state, checkpoint_id=str(folder), no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return model, optimizer


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_fsdp2_run_continues_in_shardwell_and_again_in_fsdp2(
    cluster: shardwell.LocalCluster, like: str, run_name: str, tmp_path: Path, flat: bool
) -> None:
    run_ranks(fsdp2_training.train, str(tmp_path), 0, 3, None, str(tmp_path / "dcp"), flat)
    checkpoints = tmp_path / "checkpoints"
    command = ["convert-checkpoint", str(tmp_path / "dcp"), str(checkpoints), "--run", run_name, "--like", like]
    assert main(command) == 0
    assert main(["verify", str(checkpoints)]) == 0
    with join(cluster.address, run_name, checkpoints, resume="latest") as session:
        assert session.step == 3
        state = train(session, steps=5)
        saved = session.save_checkpoint(wait=True)
    if not flat:  # the reference continues from the same checkpoint in plain torch
        model, optimizer = load_torch(tmp_path / "dcp")
        assert (tmp_path / "sha256").read_text() == sha256(model.state_dict())
        train_plain(model, optimizer, transformer.batch, dp=DP, steps=5, first=3)
        assert sha256(state) == sha256(model.state_dict())
    assert main(["convert-checkpoint", saved, str(tmp_path / "back")]) == 0
    run_ranks(fsdp2_training.train, str(tmp_path), 5, 5, str(tmp_path / "back"), str(tmp_path / "end"), False)
    assert (tmp_path / "sha256").read_text() == sha256(state)
    assert sha256(load_torch(tmp_path / "end")[0].state_dict()) == sha256(state)
    run_ranks(fsdp2_training.train, str(tmp_path), 5, 6, str(tmp_path / "back"), str(tmp_path / "more"), False)


def test_plain_torch_continues_from_shardwell(cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path) -> None:
    with join(cluster.address, run_name, tmp_path / "checkpoints") as session:
        train(session, steps=2)
        saved = session.save_checkpoint(wait=True)
    shardwell.checkpoint_to_dcp(shardwell.open_checkpoint(saved), tmp_path / "dcp")
    model, optimizer = load_torch(tmp_path / "dcp")
    assert optimizer.param_groups[0]["betas"] == ADAMW["betas"] and optimizer.param_groups[0]["lr"] == ADAMW["lr"]
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, own in optimizer.state.items():
        for name, tensor in plain(2)[1][names[parameter]].items():
            assert torch.equal(own[name], tensor), (names[parameter], name)
    train_plain(model, optimizer, transformer.batch, dp=DP, steps=4, first=2)
    assert sha256(model.state_dict()) == sha256(plain(4)[0])


def test_optimizers_without_state_are_converted(
    cluster: shardwell.LocalCluster, like: str, run_name: str, tmp_path: Path
) -> None:
    """SGD without momentum has parameter groups only."""
    model = transformer.build()
    save_torch(tmp_path / "dcp", model, torch.optim.SGD(model.parameters(), lr=0.1))
    command = ["convert-checkpoint", str(tmp_path / "dcp"), str(tmp_path / "out"), "--run", run_name, "--like", like]
    assert main([*command, "--step", "3"]) == 0
    with join(cluster.address, run_name, tmp_path / "out", resume="latest") as session:
        assert session.step == 3


def test_kernels_of_the_servers_are_named() -> None:
    """Adagrad, unlike AdamW, does not run with fused kernels on the servers."""
    assert [torch_group(name, {})["fused"] for name in ("adamw", "adam", "sgd", "adagrad")] == [True] * 3 + [False]


# ---- errors ----


def test_torch_checkpoints_are_written_to_local_folders(like: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert-checkpoint", like, "s3://bucket/dcp"]) == 1
    assert "s3://bucket/dcp is a URL" in capsys.readouterr().err


def test_steps_need_an_optimizer(like: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_torch(tmp_path / "dcp", transformer.build())
    command = ["convert-checkpoint", str(tmp_path / "dcp"), str(tmp_path / "out"), "--like", like, "--step", "3"]
    assert main(command) == 1
    assert "has no optimizer, but step is 3" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def save_torch(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    state: dict[str, Any] = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if optimizer is not None:
            state["model"], state["optim"] = get_state_dict(model, optimizer)
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)


def test_another_model_is_refused(like: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_torch(tmp_path / "dcp", torch.nn.Linear(3, 2))
    command = ["convert-checkpoint", str(tmp_path / "dcp"), str(tmp_path / "out")]
    assert main([*command, "--like", like, "--step", "1"]) == 1
    assert "has another model than" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_error_without_like_says_how_to_make_such_a_checkpoint(
    cluster: shardwell.LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(3, 2)
    save_torch(tmp_path / "dcp", model)
    command = ["convert-checkpoint", str(tmp_path / "dcp"), str(tmp_path / "out"), "--run", "continued", "--step", "0"]
    assert main(command) == 1
    message = capsys.readouterr().err
    assert "pass --like CHECKPOINT" in message
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWELL_ADDRESS", cluster.address)
    names: dict[str, Any] = {"shardwell": shardwell, "model": torch.nn.Linear(3, 2)}
    exec("\n".join(line[2:] for line in message.splitlines() if line.startswith("  ")), names)
    names["session"].close()
    path = capsys.readouterr().out.strip()
    assert main([*command, "--like", path]) == 0
    converted = shardwell.open_checkpoint(tmp_path / "out", run="continued")
    assert torch.equal(converted.read("weight"), model.weight)


def test_the_step_must_be_known(like: str, tmp_path: Path) -> None:
    save_torch(tmp_path / "dcp", transformer.build())
    with pytest.raises(UsageError, match=r"does not count steps: name the step"):
        shardwell.dcp_to_checkpoint(tmp_path / "dcp", tmp_path / "out", like=shardwell.open_checkpoint(like))


def test_damaged_torch_checkpoints_are_refused(like: str, tmp_path: Path) -> None:
    save_torch(tmp_path / "dcp", transformer.build())
    reader, metadata = shardwell.open_checkpoint(like), tmp_path / "dcp" / ".metadata"
    content = metadata.read_bytes()

    def convert() -> None:
        shardwell.dcp_to_checkpoint(tmp_path / "dcp", tmp_path / "out", like=reader, step=0)

    for damaged in (b"", content[:-1], content[: len(content) // 2], b"\x80\x04cos\nsystem\n(S'true'\ntR."):
        metadata.write_bytes(damaged)
        with pytest.raises(CorruptDataError, match=r"\.metadata is damaged, or was written by something else"):
            convert()
    metadata.write_bytes(content)
    data = next((tmp_path / "dcp").glob("*.distcp"))
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptDataError):
        convert()
    data.unlink()
    with pytest.raises(NotFoundError, match="is missing, which contains"):
        convert()
    assert not list(tmp_path.glob("out/*/*")), "nothing is left"


def test_interrupted_conversion_leaves_nothing(like: str, tmp_path: Path) -> None:
    def interrupt(size_bytes: int) -> None:
        raise KeyboardInterrupt

    save_torch(tmp_path / "dcp", transformer.build())
    with pytest.raises(KeyboardInterrupt):
        shardwell.dcp_to_checkpoint(
            tmp_path / "dcp", tmp_path / "out", like=shardwell.open_checkpoint(like), step=0, note=interrupt
        )
    assert not list(tmp_path.glob("out/*/*"))
