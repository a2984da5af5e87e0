"""One name per parameter: whatever lists or takes names has those of the model that ``fully_shard`` has wrapped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardwell
from shardwell.command.cli import main


class Net(nn.Module):
    """Two blocks with statistics, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(7, 4)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(x)))


def wrap(model: nn.Module, session: shardwell.Session) -> None:
    for block in model.blocks:
        shardwell.fully_shard(block, session)
    shardwell.fully_shard(model, session)


@contextmanager
def trained(
    address: str, run: str, steps: int, *, wrap: Callable[[Net, shardwell.Session], None] = wrap, **options: Any
) -> Iterator[tuple[shardwell.Session, Net, str]]:
    """Yields a session, its model after some steps, and a checkpoint from before the run knew the model's names."""
    with shardwell.join(address, run=run, **options) as session:
        model = Net()
        wrap(model, session)
        early = "" if "resume" in options else session.save_checkpoint(wait=True)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.1)
        for step in session.steps(steps):
            for tokens in step.batches(lambda step, rank: torch.arange(7)):
                model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield session, model, early


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_readers_and_commands_have_the_names_of_the_model(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with trained(cluster.address, run_name, 2, checkpoint_dir=tmp_path / "saved") as (_, model, _):
        expected = shardwell.full_state_dict(model)
        once = {name: value for name, value in expected.items() if name != "head.weight"}  # tied to tokens.weight
        with shardwell.attach(cluster.address, run_name) as reader:
            with reader.pin() as pinned:
                assert_same(dict(pinned.values()), once)
                stored = (*pinned.parameters, *pinned.buffers)
                in_run = {
                    own: name
                    for each in stored
                    for own, name in zip(each.names_in_run, (each.name, *each.aliases), strict=True)
                }
            assert in_run["Sequential-0.1.running_var"] == "blocks.0.1.running_var"
            assert reader.digest() == shardwell.weights_digest(expected)
            for rename in (None, lambda name: name.removeprefix("Net-0."), in_run.get):
                plain = Net()
                with torch.no_grad():
                    plain.tokens.weight.zero_()
                assert reader.follow(plain, rename=rename) == 2
                assert_same(plain.state_dict(), expected)
        at = ["--address", cluster.address]
        for name in ("blocks.1.0.weight", "Sequential-1.0.weight"):
            assert main(["peek", run_name, name, "-o", "json", *at]) == 0
            (piece, *_) = map(json.loads, capsys.readouterr().out.splitlines())
            assert piece["peek"]["values"][0] == pytest.approx(expected["blocks.1.0.weight"][0, 0].item())
        assert main(["peek", run_name, "blocks.1.0.wait", *at]) == 1
        assert "only 'blocks.1.0.weight'" in capsys.readouterr().err
        assert main(["export", run_name, str(tmp_path / "export"), *at]) == 0
        assert_same(safetensors.torch.load_file(tmp_path / "export" / "model.safetensors"), once)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_have_the_names_of_the_model_and_are_resumed_with_or_without(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path
) -> None:
    options = {"checkpoint_dir": tmp_path / "saved"}
    with trained(cluster.address, run_name, 2, **options) as (session, model, early):
        expected, url = shardwell.full_state_dict(model), session.save_checkpoint(wait=True)
    old, new = shardwell.open_checkpoint(early), shardwell.open_checkpoint(url)
    assert "Sequential-0.0.weight" in old.parameters, "as in checkpoints of an earlier Shardwell"
    del expected["head.weight"]
    assert_same(new.state_dict(), expected)
    assert (
        new.states("blocks.0.0.weight")
        == new.states("Sequential-0.0.weight")
        == ["exp_avg", "exp_avg_sq", "step", "values"]
    )
    assert next(iter(new.buffers)) == "blocks.0.1.running_mean"
    for source, step in ((early, 0), (url, 2)):
        with trained(cluster.address, f"{run_name}-{step}", step + 1, resume=source, **options) as (session, model, _):
            saved = shardwell.open_checkpoint(session.save_checkpoint(wait=True))
            state = shardwell.full_state_dict(model)
        del state["head.weight"]
        assert saved.step == step + 1
        assert_same(saved.state_dict(), state)

    assert main(["convert-checkpoint", url, str(tmp_path / "dcp")]) == 0
    target = {"model": Net().state_dict()}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    assert_same({name: value for name, value in target["model"].items() if name != "head.weight"}, expected)
    back = ["--like", url, "--run", "back"]
    assert main(["convert-checkpoint", str(tmp_path / "dcp"), str(tmp_path / "saved"), *back]) == 0
    converted = shardwell.open_checkpoint(tmp_path / "saved", run="back")
    assert_same(converted.state_dict(), expected)
    assert converted.optimizer("blocks.0.0.weight") == ("adamw", 2)
    assert torch.equal(converted.read("blocks.1.0.bias", "exp_avg"), new.read("blocks.1.0.bias", "exp_avg"))


def test_each_model_of_a_run_has_its_own_names(cluster: shardwell.LocalCluster, run_name: str) -> None:
    with shardwell.join(cluster.address, run=run_name) as session:
        nets = [Net(), Net()]
        wrap(nets[0], session)
        optimizers = [shardwell.optim.SGD(nets[0].parameters(), lr=0.1)]
        with shardwell.attach(cluster.address, run_name) as reader:
            with reader.pin() as pinned:
                assert pinned.parameters[0].name == "blocks.0.0.weight"
            wrap(nets[1], session)
            optimizers.append(shardwell.optim.SGD(nets[1].parameters(), lr=0.1))
            for number, net in enumerate(nets):
                prefix, plain = f"Net-{number}.", Net()
                own = {f"{prefix}{name}": name for name in plain.state_dict()}
                reader.follow(plain, rename=own.get)
                assert_same(plain.state_dict(), shardwell.full_state_dict(net))


def test_a_run_continues_with_auto_wrap_instead_of_fully_shard_and_back(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path
) -> None:
    def blocks(model: nn.Module, session: shardwell.Session) -> None:
        shardwell.auto_wrap(model, session, shardwell.ModuleTypePolicy({nn.Linear}))

    options = {"checkpoint_dir": tmp_path}
    with trained(cluster.address, f"{run_name}-all", 3, **options) as (_, model, _):
        expected = shardwell.full_state_dict(model)
    with trained(cluster.address, run_name, 2, **options) as (session, model, _):
        url = session.save_checkpoint(wait=True)
    with trained(cluster.address, f"{run_name}-auto", 3, wrap=blocks, resume=url, rewrap=True, **options) as found:
        session, model, _ = found
        assert_same(shardwell.full_state_dict(model), expected)
        auto = session.save_checkpoint(wait=True)
    assert main(["convert-checkpoint", auto, str(tmp_path / "dcp")]) == 0
    assert main(["convert-checkpoint", str(tmp_path / "dcp"), str(tmp_path), "--like", url, "--run", run_name]) == 0
    back = shardwell.open_checkpoint(tmp_path, run=run_name)
    assert back.optimizer("Net-0.tokens.weight") == ("adamw", 3)
    with trained(cluster.address, f"{run_name}-back", 3, resume=back.url, **options) as (_, model, _):
        assert_same(shardwell.full_state_dict(model), expected)
