"""Exported models are readable by the libraries that define the formats."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import uuid
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardwell
from shardwell import SizePolicy, auto_wrap, from_safetensors
from shardwell.module.units import Units
from shardwell.weights import state_dict
from shardwell.weights.state_dict import full_state_dict
from shardwell_wire.errors import UsageError
from tests.parity.test_loading import hugging_face
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import Pair, Sharded, gpt, gpt_loss, wrap_blocks, wrap_children
from tests.support.processes import ROOT
from tests.support.saving_probe import LAYER_BYTES, NUM_LAYERS


@pytest.fixture
def trained() -> Pair:
    """Returns a model after two steps. The servers' values differ from the model's initial values."""
    return Pair(gpt(), wrap_blocks).train(gpt_loss, 2)


def without_ties(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "head.weight"}


def assert_same(expected: dict[str, Any], got: dict[str, Any]) -> None:
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        assert torch.equal(got[name], value) and got[name].dtype is value.dtype, name


def load_dcp(state: dict[str, Any], folder: Path) -> None:
    """Loads a checkpoint into the tensors of ``state``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_model_is_saved_in_one_safetensors_file(trained: Pair, tmp_path: Path) -> None:
    gathers = trained.sharded.store.gathers.total()
    (path,) = shardwell.save_safetensors(trained.sharded.model, tmp_path / "out" / "model", metadata={"step": "2"})
    assert trained.sharded.store.gathers.total() - gathers == len(trained.sharded.units)
    assert names_in(path.parent) == ["model.safetensors"]
    assert_same(without_ties(trained.plain.state_dict()), safetensors.torch.load_file(path))
    with safetensors.safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "2"}


def test_several_safetensors_files_replace_an_earlier_export(trained: Pair, tmp_path: Path) -> None:
    model, expected = trained.sharded.model, without_ties(trained.plain.state_dict())
    (tmp_path / "config.json").write_text("{}")
    shardwell.save_safetensors(model, tmp_path)
    first = shardwell.save_safetensors(model, tmp_path, max_shard_bytes=4000)
    paths = shardwell.save_safetensors(model, tmp_path, max_shard_bytes=12_000)
    assert 1 < len(paths) < len(first)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert names_in(tmp_path) == sorted(
        [*{*index["weight_map"].values()}, "config.json", "model.safetensors.index.json"]
    )
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    loaded: dict[str, torch.Tensor] = {}
    for path in paths:
        tensors = safetensors.torch.load_file(path)
        assert len(tensors) == 1 or sum(value.nbytes for value in tensors.values()) <= 12_000
        assert {index["weight_map"][name] for name in tensors} == {path.name}
        loaded.update(tensors)
    assert_same(expected, loaded)
    shardwell.save_safetensors(model, tmp_path)
    assert names_in(tmp_path) == ["config.json", "model.safetensors"]


def test_all_kinds_of_values_are_saved(tmp_path: Path) -> None:
    """Covers buffers, scalars, empty tensors and mixed dtypes."""

    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.scalar, self.empty = nn.Parameter(torch.tensor(2.5)), nn.Parameter(torch.empty(0, 4))
            self.small = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
            self.register_buffer("mask", torch.tensor([True, False]))
            self.register_buffer("kept_out", torch.ones(3), persistent=False)
            self.register_buffer("strided", torch.arange(6.0).view(2, 3).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * self.scalar

    torch.manual_seed(0)
    plain = Kinds()
    sharded = Sharded(Kinds(), wrap_children)
    expected = {**sharded.state()}
    (path,) = shardwell.save_safetensors(sharded.model, tmp_path)
    assert_same(expected, safetensors.torch.load_file(path))
    shardwell.save_dcp(sharded.model, tmp_path / "dcp")
    loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
    load_dcp(loaded, tmp_path / "dcp")
    assert_same(expected, loaded)
    source = from_safetensors(plain, path)
    shardwell.fully_shard(plain, SimpleNamespace(units=Units(InMemoryStore())), source=source)
    assert_same(expected, full_state_dict(plain))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_transformers_loads_the_exported_folder(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model_class, config = hugging_face(family)
    torch.manual_seed(0)
    tokens = torch.arange(12).view(2, 6)
    pair = Pair(model_class(config), lambda model, session: auto_wrap(model, session, SizePolicy(2000)))
    pair.train(lambda model, number: model(tokens, labels=tokens).loss, 2)
    paths = shardwell.save_safetensors(pair.sharded.model, tmp_path, max_shard_bytes=30_000)
    assert len(paths) > 1
    pair.plain.config.save_pretrained(tmp_path)
    loaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_same(pair.plain.state_dict(), loaded.state_dict())
    assert torch.equal(loaded(tokens).logits, pair.plain.eval()(tokens).logits)


def test_dcp_export_is_read_back(trained: Pair, tmp_path: Path) -> None:
    folder, expected = tmp_path / "dcp", without_ties(trained.plain.state_dict())
    for _ in range(2):  # the second export replaces the first
        shardwell.save_dcp(trained.sharded.model, folder)
        assert len(names_in(folder)) == len(expected) + 1
    loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
    load_dcp(loaded, folder)
    assert_same(expected, loaded)
    dcp_to_torch_save(folder, tmp_path / "model.pt")
    assert_same(expected, torch.load(tmp_path / "model.pt", weights_only=True))


SAVES = {
    "safetensors": lambda model, folder: shardwell.save_safetensors(model, folder, max_shard_bytes=12_000),
    "dcp": shardwell.save_dcp,
}


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("kind", SAVES)
def test_full_disk_leaves_the_folder_unchanged(
    trained: Pair, kind: str, existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, save = tmp_path / "out", SAVES[kind]
    before = {}
    if existing:
        save(trained.sharded.model, folder)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
    read_values = state_dict.read_values

    def failing(state: Any, **options: Any) -> Any:
        for number, item in enumerate(read_values(state, **options)):
            if number == 9:
                raise OSError(errno.ENOSPC, "No space left on device")
            yield item

    monkeypatch.setattr(state_dict, "read_values", failing)
    with pytest.raises(OSError, match="No space left"):
        save(trained.sharded.model, folder)
    assert folder.exists() == existing
    assert before == ({path.name: path.read_bytes() for path in folder.iterdir()} if existing else {})


def test_values_that_cannot_be_stored_are_rejected(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"number": 7}

    sharded = Sharded(nn.Sequential(Odd(3, 3)), wrap_children)
    for save in SAVES.values():
        with pytest.raises(UsageError, match=r"'0._extra_state' is dict, expected a tensor.*full_state_dict"):
            save(sharded.model, tmp_path / "out")
    complex_buffer = nn.Linear(3, 3)
    complex_buffer.register_buffer("z", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(UsageError, match=r"'z' has dtype torch.complex128"):
        shardwell.save_safetensors(complex_buffer, tmp_path / "out")
    with pytest.raises(UsageError, match="max_shard_bytes is 0"):
        shardwell.save_safetensors(complex_buffer, tmp_path, max_shard_bytes=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_parts", [1, 3, 50])
def test_parts_add_up_to_the_state(trained: Pair, num_parts: int) -> None:
    parts = [
        shardwell.sharded_state_dict(trained.sharded.model, part=part, num_parts=num_parts) for part in range(num_parts)
    ]
    expected = trained.plain.state_dict()
    assert list(parts[0]) == list(expected)
    for name, value in expected.items():
        slices = [part[name] for part in parts]
        assert torch.equal(torch.cat([each.values for each in slices]), value)
        assert {each.whole_shape for each in slices} == {tuple(value.shape)}
        rows = 0
        for each, chunk in zip(slices, value.chunk(num_parts), strict=False):
            assert each.offsets == (rows, *[0] * (value.dim() - 1)) and torch.equal(each.values, chunk)
            assert each.values.untyped_storage().nbytes() == each.values.nbytes
            rows += len(chunk)


def test_part_out_of_range_is_rejected(trained: Pair) -> None:
    with pytest.raises(UsageError, match="part 2 of 2: expected a part from 0 to 1"):
        shardwell.sharded_state_dict(trained.sharded.model, part=2, num_parts=2)
    with pytest.raises(UsageError, match="pass part= and num_parts="):
        shardwell.sharded_state_dict(trained.sharded.model)


LIMIT_BYTES = 60 << 20
"""Memory for several of the 16 layers, which have 8.4 MB each."""


@pytest.mark.long
@pytest.mark.parametrize("kind", SAVES)
def test_saving_a_model_holds_only_a_few_layers(kind: str, tmp_path: Path, cluster: shardwell.LocalCluster) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.saving_probe", cluster.address, kind, str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    used = json.loads(result.stdout)
    assert len(used) == NUM_LAYERS and max(used) < LIMIT_BYTES < NUM_LAYERS * LAYER_BYTES / 2


def test_parts_default_to_the_ranks_of_the_run(cluster: shardwell.LocalCluster) -> None:
    with shardwell.join(cluster.address, run=uuid.uuid4().hex) as session:
        model = shardwell.fully_shard(nn.Linear(3, 3), session)
        first, parts = shardwell.sharded_state_dict(model), list(model.state_dict(keep_vars=True))
        assert list(first) == parts and session.world.dp == 1
