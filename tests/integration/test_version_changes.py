"""What has changed between two versions of a run, and reads of a part of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import shardwell
from shardwell.weights import pinned_version as pinned_module
from shardwell.weights.pinned_version import PinnedVersion
from tests.support.background_training import BackgroundTraining

State = dict[str, torch.Tensor]
KEPT = 4


class Adapted(nn.Module):
    """A linear layer with a frozen weight and a trained adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 200) / 20, requires_grad=False)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(4, 200) / 20), nn.Parameter(torch.zeros(300, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight + self.lora_b @ self.lora_a).t()


class Model(nn.Module):
    """A model with an adapter, statistics, a tied parameter, a frozen unit and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(200, 200, bias=False), nn.Linear(200, 200)
        self.leave.weight = self.enter.weight
        self.frozen, self.norm = nn.Linear(200, 200).requires_grad_(False), nn.BatchNorm1d(200)
        self.adapted, self.narrow = Adapted(), nn.Linear(300, 7, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.adapted(self.leave(self.norm(self.frozen(self.enter(x)))) * self.scale)
        return self.narrow(hidden.bfloat16()).float()


class Training(BackgroundTraining):
    """A run that trains the model."""

    model, units, width = Model, {nn.BatchNorm1d, Adapted, nn.Linear}, 200


@contextmanager
def streamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Readers in the block do not map the servers' memory."""
    with monkeypatch.context() as patch:
        patch.setattr(pinned_module, "CAN_MAP", False)
        yield


def read(reader: shardwell.Reader, version: int) -> State:
    with reader.pin(version) as pinned:
        return dict(pinned.values())


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def applied(base: State, pinned: PinnedVersion, since: int | str) -> State:
    """Returns copies of tensors with the changes since their version."""
    state = {name: value.clone() for name, value in base.items()}
    for change in pinned.changes(since):
        before = state[change.name].clone()
        change.apply_to(state[change.name])
        if change.indices is not None:
            assert bool((change.indices[1:] > change.indices[:-1]).all())
            changed = (before != state[change.name]).reshape(-1)
            assert not bool(changed[torch.isin(torch.arange(len(changed)), change.indices, invert=True)].any())
    return state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("backups", [0, 1])
def test_base_and_changes_are_the_pinned_version(cluster: shardwell.LocalCluster, dtype: str, backups: int) -> None:
    training = Training(cluster.address, keep_versions=KEPT, backups=backups)
    with training.in_background(), shardwell.attach(cluster.address, training.run, gather_dtype=dtype) as reader:
        training.wait_for(KEPT + 1)
        newest = training.pause()
        versions = range(newest - KEPT, newest + 1)
        states = {version: read(reader, version) for version in versions}
        for version in versions:
            for since in range(newest - KEPT, version + 1):
                with reader.pin(version) as pinned:
                    assert equal(applied(states[since], pinned, since), states[version])
                    names = {change.name for change in pinned.changes(since)}
                    assert bool(names) == (since < version) and not any("frozen" in name for name in names)
                    patched = {name: value.clone() for name, value in states[since].items()}
                    assert set(pinned.patch(patched, since)) == names and equal(patched, states[version])
