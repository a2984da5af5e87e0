"""``shardwell export`` writes one version of a live run's weights, which other libraries can read."""

from __future__ import annotations

import errno
import json
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.distributed import checkpoint

import shardwell
from shardwell.command import export_commands
from shardwell.command.cli import main
from shardwell.transport.service_client import CoordinatorClient
from shardwell.weights import pinned_version as module
from shardwell.weights.pinned_version import PinnedVersion, pinned_version
from shardwell_wire.errors import VersionGoneError
from tests.support.background_training import BackgroundTraining

Command = Callable[..., SimpleNamespace]


class Block(nn.Module):
    """A model with changing statistics, odd sizes, a scalar, an empty parameter and a 16-bit parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(37), nn.Linear(37, 37)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.small = nn.Parameter(torch.ones(37, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)) * self.scale * self.small.float()


class Model(nn.Module):
    """A model with tied embeddings, and statistics outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(37, 37, bias=False), nn.Linear(37, 37)
        self.leave.weight = self.enter.weight
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(37)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(self.norm(x))


class Training(BackgroundTraining):
    """A run that trains the model."""

    model, units, width = Model, {Block}, 37

    def assert_state(self, step: int, got: dict[str, torch.Tensor]) -> None:
        """Compares an export with the state before a step. Tied parameters are stored once."""
        expected = {name: value for name, value in self.states[step].items() if name != "leave.weight"}
        assert sorted(got) == sorted(expected)
        for name, value in expected.items():
            assert got[name].dtype is value.dtype and torch.equal(got[name], value), name


@pytest.fixture
def export(cluster: shardwell.LocalCluster, capsys: pytest.CaptureFixture[str]) -> Command:
    def command(*arguments: object) -> SimpleNamespace:
        code = main(["export", *map(str, arguments), "--address", cluster.address])
        said = capsys.readouterr()
        return SimpleNamespace(code=code, out=said.out, err=said.err)

    return command


@pytest.fixture(scope="module")
def ended(cluster: shardwell.LocalCluster) -> Training:
    """A run whose trainer has left."""
    training = Training(cluster.address)
    with training.in_background():
        pass
    return training


def stored_step(path: Path) -> int:
    with safetensors.safe_open(path, framework="pt") as opened:
        return int(opened.metadata()["step"])


def test_export_during_training_has_the_state_of_one_step(
    cluster: shardwell.LocalCluster, export: Command, tmp_path: Path
) -> None:
    training, found = Training(cluster.address), []
    with training.in_background():
        for number in range(5):
            done = export(training.run, tmp_path / str(number))
            assert done.code == 0, done.err
            assert f"run {training.run!r} after " in done.out and "9 of them buffers" in done.out
            found.append(tmp_path / str(number) / "model.safetensors")
        training.wait_for(stored_step(found[-1]) + 1)
    for path in found:
        training.assert_state(stored_step(path), safetensors.torch.load_file(path))


def test_pinned_version_stays_readable_for_many_steps(cluster: shardwell.LocalCluster) -> None:
    training = Training(cluster.address)
    with (
        training.in_background(),
        closing(CoordinatorClient(cluster.address)) as coordinator,
        pinned_version(coordinator, training.run, timeout_s=20) as pinned,
    ):
        values = pinned.values()
        first = next(values)
        training.wait_for(pinned.version + 5)
        got = {name: value.clone() for name, value in (first, *values)}
    training.assert_state(pinned.version, got)


def test_future_version_is_pinned_if_the_newest_is_overwritten_at_once(
    cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt uses an outdated description."""
    training = Training(cluster.address)
    with training.in_background(), closing(CoordinatorClient(cluster.address)) as coordinator:
        old = module.describe_weights(coordinator, training.run)
        training.wait_for(old.version + 2)
        describe, answers = module.describe_weights, [old]

        def late(*arguments: Any, **options: Any) -> Any:
            return answers.pop() if answers else describe(*arguments, **options)

        monkeypatch.setattr(module, "describe_weights", late)
        with pinned_version(coordinator, training.run, timeout_s=20) as pinned:
            assert pinned.version > old.version
            got = {name: value.clone() for name, value in pinned.values()}
        training.wait_for(pinned.version)
    training.assert_state(pinned.version, got)


def test_export_to_several_files_and_dtypes(ended: Training, export: Command, tmp_path: Path) -> None:
    done = export(ended.run, tmp_path / "out", "--max-shard-size", "3KB", "--dtype", "bfloat16")
    assert (done.code, done.err) == (0, "")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and f", in {len(files)} files in " in done.out
    loaded: dict[str, torch.Tensor] = {}
    for name in files:
        loaded |= safetensors.torch.load_file(tmp_path / "out" / name)
    expected = ended.states[ended.step]
    assert sorted(loaded) == sorted(set(expected) - {"leave.weight"})
    for name, value in loaded.items():
        rounded = expected[name].bfloat16() if expected[name].is_floating_point() else expected[name]
        assert value.dtype is rounded.dtype and torch.equal(value, rounded), name


def test_export_to_dcp(ended: Training, export: Command, tmp_path: Path) -> None:
    assert export(ended.run, tmp_path / "dcp", "--format", "dcp").code == 0
    expected = {name: value for name, value in ended.states[ended.step].items() if name != "leave.weight"}
    loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        checkpoint.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ended.assert_state(ended.step, loaded)


def test_transformers_loads_the_export(
    cluster: shardwell.LocalCluster, export: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = GPT2Config(vocab_size=67, n_positions=16, n_embd=24, n_layer=2, n_head=3)
    torch.manual_seed(0)
    model, tokens = GPT2LMHeadModel(config), torch.arange(12).view(2, 6)
    with shardwell.join(cluster.address, run=uuid.uuid4().hex) as session:
        shardwell.auto_wrap(model, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in session.steps(2):
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert export(session.run, tmp_path / "out").code == 0
        expected = shardwell.full_state_dict(model)
    config.save_pretrained(tmp_path / "out")
    loaded, info = GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name


# Errors.


def test_invalid_arguments_are_rejected(
    ended: Training, export: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    done = export(ended.run, tmp_path / "full")
    assert done.code == 1 and "is not empty (notes.txt): name a new folder" in done.err
    done = export(ended.run, tmp_path / "full" / "notes.txt")
    assert done.code == 1 and "notes.txt is a file: name a folder" in done.err
    done = export("nowhere", tmp_path / "new")
    assert done.code == 1 and "run 'nowhere' does not exist; existing runs: " in done.err
    assert main(["export", "gpt", str(tmp_path / "new"), "--address", "127.0.0.1:1", "--timeout", "2"]) == 4
    assert capsys.readouterr().err.startswith("shardwell export: no answer from a coordinator at 127.0.0.1:1 (")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("text", ["5 parsecs", "0", "-1GB", "GB"])
def test_invalid_sizes_are_rejected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["export", "gpt", "out", f"--max-shard-size={text}"])
    assert f"{text!r} is not a size: expected a size such as 5GB or 500MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("700", 700), ("2tib", 2 << 40)]
)
def test_size_suffixes_are_parsed(text: str, size_bytes: int) -> None:
    assert export_commands.parse_size(text) == size_bytes


def test_full_disk_is_detected_before_values_are_read(
    ended: Training, export: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    monkeypatch.setattr(PinnedVersion, "values", None)
    done = export(ended.run, tmp_path / "new")
    assert done.code == 1 and "has 1000 B free: nothing was written" in done.err
    assert not (tmp_path / "new").exists()


def test_evicted_version_raises_version_gone(cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(cluster.address)
    opened, original = [], module._open
    monkeypatch.setattr(module, "_open", lambda *arguments: opened.append(original(*arguments)) or opened[-1])
    with (
        training.in_background(),
        closing(CoordinatorClient(cluster.address)) as coordinator,
        pinned_version(coordinator, training.run, timeout_s=20) as pinned,
    ):
        for standing in opened:
            standing.end()
        training.wait_for(pinned.version + 4)
        with pytest.raises(VersionGoneError, match=rf"version {pinned.version} of run .* was evicted.*--memory-budget"):
            dict(pinned.values())


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 1, "cannot write to {}: No space left on device (--dtype "),
        (KeyboardInterrupt(), 130, "interrupted; nothing was written to {}"),
    ],
)
def test_interrupted_export_leaves_no_files(
    failure: BaseException,
    code: int,
    message: str,
    kind: str,
    ended: Training,
    export: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = PinnedVersion.values

    def failing(pinned: PinnedVersion) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(values(pinned)):
            if number == 7:
                raise failure
            yield item

    monkeypatch.setattr(PinnedVersion, "values", failing)
    done = export(ended.run, tmp_path / "new", "--format", kind)
    assert done.code == code and message.format(tmp_path / "new") in done.err
    assert not (tmp_path / "new").exists()
