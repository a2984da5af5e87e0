"""Tests of weights that change while they are read in place: no result computed from them is returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwell
from shardwell import ShardingStrategy
from shardwell.module.units import Units
from shardwell_wire.errors import UsageError, VersionGoneError
from tests.support.in_place_store import InPlaceStore


class Overwritten(nn.Module):
    """A layer whose forward can make the server overwrite the weights with the next version."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.during_forward: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.during_forward()
        return x * self.weight


@pytest.fixture
def store() -> Iterator[InPlaceStore]:
    with closing(InPlaceStore()) as made:
        yield made


def shard(store: InPlaceStore, **settings: Any) -> tuple[Overwritten, Units]:
    units = Units(store)
    model = shardwell.fully_shard(Overwritten(), SimpleNamespace(units=units), **settings)
    return model, units


CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "FULL_SHARD": {"strategy": ShardingStrategy.FULL_SHARD},
    "SHARD_GRAD_OP": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"strategy": ShardingStrategy.NO_SHARD},
    "reshard_after_forward=False": {"reshard_after_forward": False},
}
MODES: dict[str, Callable[[], Any]] = {
    "with gradients": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", CHOICES)
@pytest.mark.parametrize("training", [True, False])
def test_forward_with_replaced_weights_raises(store: InPlaceStore, settings: str, mode: str, training: bool) -> None:
    model, _ = shard(store, **CHOICES[settings])
    model.train(training)
    model.during_forward = store.overwrite
    with MODES[mode](), pytest.raises(VersionGoneError):
        model(torch.ones(8))


@pytest.mark.parametrize("settings", CHOICES)
def test_forward_with_replaced_kept_weights_raises(store: InPlaceStore, settings: str) -> None:
    """Simulates a forward between the end of ``step.batches`` and ``optimizer.step()``."""
    model, units = shard(store, **CHOICES[settings])
    model(torch.ones(8)).sum().backward()
    units.finish_item()
    store.overwrite()
    with torch.no_grad(), pytest.raises(VersionGoneError):
        model(torch.ones(8))


@pytest.mark.parametrize("settings", CHOICES)
def test_backward_with_replaced_weights_raises(store: InPlaceStore, settings: str) -> None:
    model, _ = shard(store, **CHOICES[settings])
    loss = model(torch.ones(8, requires_grad=True)).sum()
    store.overwrite()
    with pytest.raises(VersionGoneError):
        loss.backward()


@pytest.mark.parametrize("settings", CHOICES)
def test_item_that_does_not_count_is_computed_to_its_end(store: InPlaceStore, settings: str) -> None:
    model, units = shard(store, **CHOICES[settings])
    store.abandoned = True
    model.during_forward = store.overwrite
    loss = model(torch.ones(8, requires_grad=True)).sum()
    store.overwrite()
    loss.backward()
    store.abandoned = False
    units.zero_grad()
    model.during_forward = lambda: None
    assert model(torch.ones(8)).isfinite().all()


def test_backward_of_another_unit_with_replaced_weights_raises(store: InPlaceStore) -> None:
    """A graph node outside every unit, such as a node of a penalty, may have read the weights."""
    model, units = shard(store, strategy=ShardingStrategy.NO_SHARD)
    other = shardwell.fully_shard(Overwritten(), SimpleNamespace(units=units))
    model(torch.ones(8))
    penalty = model.weight.pow(2).sum()
    loss = other(torch.ones(8)).sum() + penalty
    store.overwrite(0)
    with pytest.raises(VersionGoneError):
        loss.backward()


@pytest.mark.parametrize("overwritten", range(3))
@pytest.mark.parametrize("recomputes", [False, True])
def test_one_of_several_units_is_overwritten_in_the_backward(
    store: InPlaceStore, overwritten: int, recomputes: bool
) -> None:
    """The backward checks the versions once, at its end: of units that it is about to read, reads, or has read."""
    units = Units(store)
    layers = [shardwell.fully_shard(Overwritten(), SimpleNamespace(units=units)) for _ in range(3)]

    def middle(x: torch.Tensor) -> torch.Tensor:
        if not recomputes:
            return layers[1](x)
        return checkpoint(layers[1], x, use_reentrant=False)

    hidden = middle(layers[0](torch.ones(8)))
    hidden.register_hook(lambda _: store.overwrite(overwritten))
    loss = layers[2](hidden).sum()
    with pytest.raises(VersionGoneError):
        loss.backward()
    units.zero_grad()
    with torch.no_grad():
        assert layers[overwritten](torch.ones(8)).tolist() == [2.0] * 8


def test_next_version_is_read_after_the_error(store: InPlaceStore) -> None:
    model, _ = shard(store, strategy=ShardingStrategy.NO_SHARD)
    model.during_forward = store.overwrite
    with torch.no_grad(), pytest.raises(VersionGoneError):
        model(torch.ones(8))
    model.during_forward = lambda: None
    with torch.no_grad():
        assert model(torch.ones(8)).tolist() == [2.0] * 8


def test_write_between_forward_and_backward_is_reported(store: InPlaceStore) -> None:
    """Torch counts the write, and the backward does not forget it when it makes the parameters usable again."""
    model, _ = shard(store)
    views: list[torch.Tensor] = []
    model.during_forward = lambda: views.append(model.weight.detach())
    loss = model(torch.ones(8)).sum()
    views[0].add_(1)
    with pytest.raises(UsageError, match="was written in place"):
        loss.backward()


def test_units_are_gathered_when_they_are_needed(store: InPlaceStore) -> None:
    """Nothing is fetched, so nothing is gained by looking ahead."""
    units = Units(store)
    layers = [shardwell.fully_shard(Overwritten(), SimpleNamespace(units=units)) for _ in range(3)]
    model = nn.Sequential(*layers)
    for _ in range(3):
        store.events.clear()
        layers[0].during_forward = lambda: store.events.append("compute")
        model(torch.ones(8)).sum().backward()
        units.finish_item()
        units.invalidate()
        gathers = [event for event in store.events if not event.startswith("push")]
        assert gathers == ["gather Overwritten-0", "compute", "gather Overwritten-1", "gather Overwritten-2"]
